"""Predict a validation case: its trace on its engine, on the clock of a step model."""

from __future__ import annotations

from collections.abc import Sequence

from vsim.calibrate.case import Case
from vsim.calibrate.follow import due_ns
from vsim.models.step import StepModel, StepShape, lockstep_seconds
from vsim.sim.lockstep import LockstepRun, run_lockstep

NS = 1_000_000_000


def predict(
    case: Case, model: StepModel, frontend_s: float, stop_after_first: int | None = None
) -> LockstepRun:
    """Simulate `case`. Data-parallel ranks step together and are routed to as vLLM does."""

    def wave_ns(shapes: Sequence[StepShape]) -> tuple[int, int]:
        host = max(model.host_seconds(shape) for shape in shapes)
        return round(host * NS), max(1, round(lockstep_seconds(model, shapes) * NS))

    return run_lockstep(
        case.trace,
        case.scheduler,
        wave_ns,
        ranks=case.ranks,
        due_ns=due_ns(case, frontend_s),
        stop_after_first=stop_after_first,
    )
