"""A prediction's interval: from the profile's own errors, the same for the same seed."""

import numpy as np
import pytest

from vsim.calibrate.ensemble import bands
from vsim.calibrate.spot import numbers
from vsim.models.step import StepShape
from vsim.models.uncertainty import Uncertainty, step_factors
from vsim.sim.config import SchedulerConfig
from vsim.sim.engine import simulate
from vsim.traces.trace import Trace


class Steps:
    def device_seconds(self, shape: StepShape) -> float:
        return 0.01 + 1e-4 * shape.num_tokens

    def host_seconds(self, shape: StepShape) -> float:
        return 1e-3


CONFIG = SchedulerConfig(num_gpu_blocks=200, max_num_seqs=8)
RNG = np.random.default_rng(1)
TRACE = Trace.of(
    np.cumsum(RNG.exponential(0.2, 40)).tolist(),
    RNG.integers(10, 300, 40).tolist(),
    RNG.integers(2, 60, 40).tolist(),
)
RESIDUALS = {"p1": -9.0, "p25": -3.0, "p50": 0.5, "p75": 2.0, "p99": 8.0}
UNSURE = Uncertainty(0.02, 0.0, (), step_factors({"held_out_error": {"residual_pct": RESIDUALS}}))


def test_the_interval_holds_the_median_and_repeats_itself() -> None:
    first = bands(TRACE, CONFIG, Steps(), UNSURE, numbers, draws=6)
    assert first == bands(TRACE, CONFIG, Steps(), UNSURE, numbers, draws=6)
    for band in first.values():
        assert band.low <= band.median <= band.high
    exact = numbers(simulate(TRACE, CONFIG, Steps()))
    assert first["e2e", "mean"].median == pytest.approx(exact["e2e", "mean"], rel=0.02)
    assert first["e2e", "mean"].high / first["e2e", "mean"].low > 1.02, "a bias of 2 % must show"


def test_no_error_no_interval() -> None:
    found = bands(TRACE, CONFIG, Steps(), Uncertainty(0.0, 0.0), numbers, draws=2)
    exact = numbers(simulate(TRACE, CONFIG, Steps()))
    for key, band in found.items():
        assert band.median == pytest.approx(exact[key])
        assert band.low == band.median == band.high
