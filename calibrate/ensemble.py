"""A prediction with its interval for a spot check: many simulations, whose steps scatter one by one as well."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from vsim.models.step import StepModel, StepShape
from vsim.models.uncertainty import Uncertainty, deviations, drawn
from vsim.sim.config import SchedulerConfig
from vsim.sim.engine import simulate
from vsim.traces.trace import Trace

LOW, HIGH = 5.0, 95.0


@dataclass(frozen=True, slots=True)
class Band:
    """Median of the simulations and the 90 % interval of a number."""

    median: float
    low: float
    high: float


class _Scattering:
    """A step model whose single steps scatter as they were seen to."""

    def __init__(self, model: StepModel, factors: tuple[float, ...], seed: int) -> None:
        self._model = model
        rng = np.random.default_rng([15485863, seed])
        # Drawn in advance and in a circle: one random number a step would cost more than the step.
        self._factors = rng.choice(np.asarray(factors), 8191).tolist()
        self._at = 0

    def device_seconds(self, shape: StepShape) -> float:
        self._at = (self._at + 1) % len(self._factors)
        return self._model.device_seconds(shape) * float(self._factors[self._at])

    def host_seconds(self, shape: StepShape) -> float:
        return self._model.host_seconds(shape)


def bands(
    trace: Trace,
    config: SchedulerConfig,
    model: StepModel,
    uncertainty: Uncertainty,
    numbers: Any,
    draws: int = 15,
    seed: int = 0,
    frontend_s: float = 0.0,
) -> dict[tuple[str, str], Band]:
    """Each of `numbers(run)` over 2 x `draws` simulations.

    One simulation is a lottery: which of two requests just catches a step moves a p90 by percents. The median
    over draws of the step-by-step errors is the prediction; the interval comes from draws in which the
    whole model is off as well, as `uncertainty` has it.
    """

    def run(erring: StepModel, number: int) -> dict[tuple[str, str], float]:
        scattering = _Scattering(erring, uncertainty.step_factors, number)
        found: dict[tuple[str, str], float] = numbers(
            simulate(trace, config, scattering, frontend_s=frontend_s)
        )
        return found

    rng = np.random.default_rng([32452843, seed])
    central = [run(model, draw) for draw in range(draws)]
    wide = [
        run(drawn(model, uncertainty, row), draws + draw)
        for draw, row in enumerate(deviations(draws, uncertainty.dimensions, rng))
    ]
    found = {}
    for key in central[0]:
        median = float(np.median([one[key] for one in central if key in one]))
        # Hazen: the draws are the middles of equally likely strata.
        low, high = np.percentile(
            [one[key] for one in wide if key in one] or [median], [LOW, HIGH], method="hazen"
        )
        found[key] = Band(median, min(median, float(low)), max(median, float(high)))
    return found
