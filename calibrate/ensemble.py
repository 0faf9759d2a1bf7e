"""A prediction with its interval: the same trace, simulated many times with the step times' own errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from vsim.models.step import StepModel, StepShape
from vsim.sim.config import SchedulerConfig
from vsim.sim.engine import simulate
from vsim.traces.trace import Trace

# What is not known about a profile's mean when nothing says more: repeats of a quiet machine differ by it.
LEAST_BIAS_PCT = 0.5
LOW, HIGH = 5.0, 95.0


@dataclass(frozen=True, slots=True)
class Band:
    """Median of the simulations and the 90 % interval of a number."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class StepErrors:
    """How a step model errs: step by step (`factors`, drawn independently) and as a whole (`bias_pct`, one
    standard deviation). Factors are measured over predicted, their mean is 1."""

    factors: tuple[float, ...] = (1.0,)
    bias_pct: float = LEAST_BIAS_PCT

    @classmethod
    def of(cls, quality: Mapping[str, Any]) -> StepErrors:
        """From an artifact's `quality`; where it has no held-out error, the error of the fit."""
        found = quality.get("held_out_error") or quality.get("fit")
        if not isinstance(found, dict) or not isinstance(found.get("residual_pct"), dict):
            return cls()
        quantiles = sorted(
            (float(str(name).lstrip("p")), float(value))
            for name, value in found["residual_pct"].items()
        )
        at = np.linspace(quantiles[0][0], quantiles[-1][0], 199)
        residual = np.interp(at, [q for q, _ in quantiles], [v for _, v in quantiles])
        factors = 1 / np.maximum(0.05, 1 + residual / 100)
        factors /= factors.mean()
        return cls(
            tuple(float(f) for f in factors),
            max(LEAST_BIAS_PCT, abs(float(found.get("bias_pct") or 0.0))),
        )


class _Erring:
    """A step model that errs as it was seen to err."""

    def __init__(self, model: StepModel, errors: StepErrors, scale: float, seed: int) -> None:
        self._model = model
        self._scale = scale
        rng = np.random.default_rng([15485863, seed])
        # Drawn in advance and in a circle: one random number a step would cost more than the step.
        self._factors = rng.choice(np.asarray(errors.factors), 8191).tolist()
        self._at = 0

    def device_seconds(self, shape: StepShape) -> float:
        self._at = (self._at + 1) % len(self._factors)
        return self._model.device_seconds(shape) * self._scale * float(self._factors[self._at])

    def host_seconds(self, shape: StepShape) -> float:
        return self._model.host_seconds(shape) * self._scale


def bands(
    trace: Trace,
    config: SchedulerConfig,
    model: StepModel,
    errors: StepErrors,
    numbers: Any,
    draws: int = 15,
    seed: int = 0,
    frontend_s: float = 0.0,
) -> dict[tuple[str, str], Band]:
    """Each of `numbers(run)` over 2 x `draws` simulations.

    One simulation is a lottery: which of two requests just catches a step moves a p90 by percents. The median
    over draws of the step-by-step errors is the prediction; the interval comes from draws in which the
    whole model is off by a random share as well.
    """

    def run(erring: StepModel) -> dict[tuple[str, str], float]:
        found: dict[tuple[str, str], float] = numbers(
            simulate(trace, config, erring, frontend_s=frontend_s)
        )
        return found

    rng = np.random.default_rng([32452843, seed])
    central: list[dict[tuple[str, str], float]] = []
    wide: list[dict[tuple[str, str], float]] = []
    for draw in range(draws):
        central.append(run(_Erring(model, errors, 1.0, draw)))
        scale = 1 + errors.bias_pct / 100 * float(rng.standard_normal())
        wide.append(run(_Erring(model, errors, max(0.1, scale), draws + draw)))
    found = {}
    for key in central[0]:
        values = [one[key] for one in central if key in one]
        spread = values + [one[key] for one in wide if key in one]
        low, high = np.percentile(spread, [LOW, HIGH])
        found[key] = Band(float(np.median(values)), float(low), float(high))
    return found
