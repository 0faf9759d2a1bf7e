"""A prediction's interval: from the profile's own errors, the same for the same seed."""

import numpy as np
import pytest

from vsim.calibrate.ensemble import LEAST_BIAS_PCT, StepErrors, bands
from vsim.calibrate.spot import numbers
from vsim.models.step import StepShape
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
QUALITY = {
    "held_out_error": {
        "bias_pct": -2.0,
        "residual_pct": {"p1": -9.0, "p25": -3.0, "p50": 0.5, "p75": 2.0, "p99": 8.0},
    }
}


def test_errors_come_from_the_held_out_steps() -> None:
    errors = StepErrors.of(QUALITY)
    assert errors.bias_pct == 2.0
    assert np.mean(errors.factors) == pytest.approx(1.0)
    assert 0.02 < np.std(errors.factors) < 0.06
    assert min(errors.factors) > 0.9 and max(errors.factors) < 1.12


@pytest.mark.parametrize("quality", [{}, {"held_out_error": None}, {"fit": {"median_abs_pct": 1}}])
def test_without_any_error_on_record_the_least_bias_stands(quality: dict) -> None:  # type: ignore[type-arg]
    assert StepErrors.of(quality) == StepErrors((1.0,), LEAST_BIAS_PCT)


def test_the_interval_holds_the_median_and_repeats_itself() -> None:
    errors = StepErrors.of(QUALITY)
    first = bands(TRACE, CONFIG, Steps(), errors, numbers, draws=6)
    assert first == bands(TRACE, CONFIG, Steps(), errors, numbers, draws=6)
    for band in first.values():
        assert band.low <= band.median <= band.high
    exact = numbers(simulate(TRACE, CONFIG, Steps()))
    assert first["e2e", "mean"].median == pytest.approx(exact["e2e", "mean"], rel=0.02)
    assert first["e2e", "mean"].high / first["e2e", "mean"].low > 1.02, "a bias of 2 % must show"


def test_no_error_no_interval() -> None:
    found = bands(TRACE, CONFIG, Steps(), StepErrors((1.0,), 0.0), numbers, draws=2)
    exact = numbers(simulate(TRACE, CONFIG, Steps()))
    assert {key: band.median for key, band in found.items()} == exact
    assert all(band.low == band.high for band in found.values())
