"""How wrong a step model may be: from its own record, and models that are wrong by as much."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vsim.models.artifact import Calibration
from vsim.models.correction import NAMES, Coefficients, CorrectedStepModel
from vsim.models.domain import Domain
from vsim.models.hardware import find_gpu
from vsim.models.kernel_params import export
from vsim.models.load import LoadedStepModel
from vsim.models.model_spec import load_model
from vsim.models.roofline import RooflineStepModel, roofline_params
from vsim.models.step import StepShape
from vsim.models.uncertainty import (
    EVIDENCE,
    SCALE_SD,
    Uncertainty,
    changed,
    deviations,
    draw,
    drawn,
    slowed,
    step_factors,
    uncertainty_of,
)

PARAMS = roofline_params(find_gpu("a100"), load_model("meta-llama/Llama-3.1-8B-Instruct"))
ROOFLINE = RooflineStepModel(**PARAMS)
CALIBRATION = Calibration("roofline", PARAMS, Domain(), provenance={"label": "roofline"})
DECODES = StepShape((), 32, 32_000, 1000)
MIXED = StepShape(((512, 0), (100, 2000)), 8, 9_000, 3000)
RESIDUALS = {"p1": -9.0, "p25": -3.0, "p50": 0.5, "p75": 2.0, "p99": 8.0}


def calibration(kind: str, quality: dict[str, Any], **provenance: Any) -> Calibration:
    return Calibration(kind, {}, Domain(), quality, {"label": kind, **provenance})


@pytest.mark.parametrize("kind", SCALE_SD)
def test_a_kind_without_a_record_is_as_wrong_as_its_kind_was_elsewhere(kind: str) -> None:
    found = uncertainty_of(calibration(kind, {}))
    assert found.scale_sd == found.prefill_sd == SCALE_SD[kind]
    assert found.source == EVIDENCE[kind]


def test_an_unknown_kind_is_trusted_no_more_than_a_roofline() -> None:
    assert uncertainty_of(calibration("of tomorrow", {})).scale_sd == SCALE_SD["roofline"]


def test_more_sessions_with_the_same_error_make_narrower_intervals_never_below_it() -> None:
    widths = [
        uncertainty_of(calibration("engine-steps", {"session_bias_pct": [6.0, -6.0] * n})).scale_sd
        for n in (1, 2, 5, 20)
    ]
    assert widths == sorted(widths, reverse=True)
    assert widths[0] > 0.07 and 0.055 < widths[-1] < 0.065


def test_a_single_held_out_bias_counts_as_one_session() -> None:
    one = uncertainty_of(calibration("engine-steps", {"held_out_error": {"bias_pct": -6.2}}))
    same = uncertainty_of(calibration("engine-steps", {"session_bias_pct": [-6.2]}))
    assert one == same
    assert one.scale_sd > 0.062, "one look at an error does not bound the next"
    assert "-6.2 % off" in one.source


def test_a_profile_carried_over_to_another_model_is_less_sure_and_least_by_scaling_alone() -> None:
    own = calibration("engine-steps", {"session_bias_pct": [1.0, 2.0]})
    widths = [uncertainty_of(own).scale_sd]
    for how in ("timed matrix products", "scaling"):
        said = {**own.provenance, "carried_over_from": "another", "carried_over_by": how}
        found = uncertainty_of(replace(own, provenance=said))
        assert "carried over" in found.source
        widths.append(found.scale_sd)
    assert widths == sorted(widths) and widths[2] > 0.2


@pytest.mark.parametrize(
    "quality",
    [
        {},
        {"held_out_error": None},
        {"fit": {"median_abs_pct": 1}},
        {"held_out_error": {"residual_pct": {}}},
        {"session_bias_pct": "6"},
        {"session_bias_pct": []},
    ],
)
def test_without_residuals_on_record_steps_do_not_scatter(quality: dict[str, Any]) -> None:
    assert step_factors(quality) == (1.0,)
    assert uncertainty_of(calibration("tables", quality)).scale_sd == SCALE_SD["tables"]


def test_single_steps_scatter_as_the_held_out_ones_did() -> None:
    factors = step_factors({"held_out_error": {"residual_pct": RESIDUALS}})
    assert np.mean(factors) == pytest.approx(1.0)
    assert 0.02 < np.std(factors) < 0.06
    assert min(factors) > 0.9 and max(factors) < 1.12


def test_deviations_fill_every_stratum_once() -> None:
    found = deviations(20, 3, np.random.default_rng(1))
    assert found.shape == (20, 3)
    assert np.allclose(np.sort(found, axis=0)[:, 0], np.sort(found, axis=0)[:, 2])
    assert np.allclose(found.mean(axis=0), 0, atol=1e-12)
    low, high = np.percentile(found[:, 0], [5, 95], method="hazen")
    assert high == pytest.approx(-low) == pytest.approx(1.645, abs=0.06)


@given(
    scale=st.floats(0.5, 2.0),
    own=st.floats(0.5, 2.0),
    terms=st.tuples(*[st.floats(0, 1e-6)] * len(NAMES)),
)
def test_a_change_of_a_corrected_model_is_the_same_as_one_correction_on_another(
    scale: float, own: float, terms: tuple[float, ...]
) -> None:
    added = dict(zip(NAMES, terms, strict=True))
    corrected = CorrectedStepModel(ROOFLINE, Coefficients(per_step_s=1e-3, scale=own))
    merged = changed(corrected, scale, added)
    nested = CorrectedStepModel(corrected, Coefficients(**added, scale=scale))
    assert isinstance(merged, CorrectedStepModel) and merged.prior is ROOFLINE
    for shape in (DECODES, MIXED):
        assert merged.device_seconds(shape) == pytest.approx(nested.device_seconds(shape))


def test_draws_of_a_corrected_model_stay_what_the_compiled_path_knows() -> None:
    covariance = tuple(map(tuple, (np.diag([1e-8, 1e-8, 1e-16, 1e-20])).tolist()))
    unsure = Uncertainty(0.01, 0.01, covariance)
    model = CorrectedStepModel(ROOFLINE, Coefficients(per_step_s=1e-3))
    loaded = LoadedStepModel(model, CALIBRATION, "it")
    for row in deviations(5, unsure.dimensions, np.random.default_rng(2)):
        found = drawn(loaded, unsure, row)
        assert isinstance(found, LoadedStepModel) and found.name == "it"
        assert export(found, 2048, 64) is not None
    assert loaded.steps == 0, "drawing asks for no step of the run"


def test_draws_spread_as_stated() -> None:
    unsure = Uncertainty(0.05, 0.0)
    base = ROOFLINE.device_seconds(DECODES)
    rows = deviations(200, unsure.dimensions, np.random.default_rng(3))
    ratios = [drawn(ROOFLINE, unsure, row).device_seconds(DECODES) / base for row in rows]
    assert np.mean(ratios) == pytest.approx(1.0, abs=1e-9)
    assert np.std(ratios) == pytest.approx(0.05, rel=0.02)


def test_coefficients_are_drawn_with_their_correlation() -> None:
    per_step, per_token = 1e-3, 1e-9
    covariance = (
        (per_step**2, -0.9 * per_step * 1e-4, 0.0, 0.0),
        (-0.9 * per_step * 1e-4, 1e-8, 0.0, 0.0),
        (0.0, 0.0, 1e-14, 0.0),
        (0.0, 0.0, 0.0, per_token**2),
    )
    unsure = Uncertainty(0.0, 0.0, covariance)
    found = [
        drawn(ROOFLINE, unsure, row).coefficients  # type: ignore[attr-defined]
        for row in deviations(400, unsure.dimensions, np.random.default_rng(4))
    ]
    steps = np.array([c.per_step_s for c in found])
    mixed = np.array([c.per_mixed_step_s for c in found])
    assert np.std(steps) == pytest.approx(per_step, rel=0.1)
    assert np.std([c.per_kv_token_s for c in found]) == pytest.approx(per_token, rel=0.1)
    assert np.corrcoef(steps, mixed)[0, 1] == pytest.approx(-0.9, abs=0.05)


def test_the_slow_end_is_slower_and_a_draw_repeats_itself() -> None:
    unsure = Uncertainty(0.05, 0.05)
    slow = slowed(ROOFLINE, unsure, 1.645)
    for shape in (DECODES, MIXED):
        assert slow.device_seconds(shape) > ROOFLINE.device_seconds(shape)
    one, two = (draw(ROOFLINE, unsure, np.random.default_rng(5)) for _ in range(2))
    assert one.device_seconds(MIXED) == two.device_seconds(MIXED)
