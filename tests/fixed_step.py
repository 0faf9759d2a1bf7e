"""A step model that always answers the same."""

from __future__ import annotations

from vsim.models.step import StepShape


class Fixed:
    def __init__(self, device_s: float = 0.010) -> None:
        self._device_s = device_s

    def device_seconds(self, shape: StepShape) -> float:
        return self._device_s

    def host_seconds(self, shape: StepShape) -> float:
        return 0.0
