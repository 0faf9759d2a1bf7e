"""The calibration artifact: what goes out comes back, and what is not one is refused with the reason."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vsim.errors import UserError
from vsim.models.artifact import (
    SCHEMA,
    Calibration,
    parse_calibration,
    read_calibration,
    write_calibration,
)
from vsim.models.domain import Domain
from vsim.models.hardware import find_gpu
from vsim.models.load import bundled_profiles, load_step_model
from vsim.models.model_spec import load_model
from vsim.models.roofline import roofline_params
from vsim.models.step import StepShape
from vsim.models.table_params import StepContext

A100, LLAMA = find_gpu("a100"), load_model("meta-llama/Llama-3.1-8B")
SHAPE = StepShape(((300, 100),), 4, 4000, 2000)


def roofline() -> Calibration:
    return Calibration(
        "roofline",
        roofline_params(A100, LLAMA),
        Domain(max_seqs=64),
        {"samples": 3},
        {"label": "x"},
    )


def text(**changes: Any) -> str:
    return json.dumps({**roofline().to_json(), **changes})


def test_written_and_read_again_it_predicts_the_same(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_calibration(roofline(), path)
    again = read_calibration(path)
    assert again == roofline()
    assert again.step_model(StepContext()).device_seconds(SHAPE) == roofline().step_model(
        StepContext()
    ).device_seconds(SHAPE)


def test_a_corrected_model_carries_its_prior_inside() -> None:
    inner = roofline()
    corrected = Calibration(
        "corrected",
        {
            "prior": {"kind": inner.kind, "params": inner.params},
            "coefficients": {"per_step_s": 0.25},
        },
        Domain(),
    )
    model = corrected.step_model(StepContext())
    assert (
        model.device_seconds(SHAPE) == inner.step_model(StepContext()).device_seconds(SHAPE) + 0.25
    )


def test_another_schema_is_refused_naming_both() -> None:
    with pytest.raises(UserError, match=r"vsim/step-model/9.*vsim/step-model/1"):
        parse_calibration(text(schema="vsim/step-model/9"), "p.json")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "not JSON"),
        ("[1]", "no JSON object"),
        ("[" * 100000, "not JSON"),
        (text(kind=None), "lacks"),
        (text(domain={"max_moons": 3}), "max_moons"),
        (text(domain={"max_seqs": "many"}), "whole numbers"),
        (text(quality=[1]), "objects"),
    ],
)
def test_what_is_no_artifact_is_one_clear_sentence(content: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        parse_calibration(content, "p.json")


@pytest.mark.parametrize("params", [{}, {"num_layers": 1}, {"num_layers": "x"}, {"what": 1}])
@pytest.mark.parametrize("kind", ["tables", "roofline", "corrected", "pickle"])
def test_params_that_are_not_whole_are_refused(kind: str, params: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=kind):
        Calibration(kind, params, Domain()).step_model(StepContext())


def test_a_missing_profile_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gone\.json"):
        read_calibration(tmp_path / "gone.json")
    with pytest.raises(UserError, match="gone"):
        load_step_model("gone")


@settings(deadline=None)  # a shared machine may stop for longer than any deadline
@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists, max_leaves=5))
def test_any_json_is_an_artifact_or_a_sentence(value: Any) -> None:
    for key in ("kind", "params", "domain", "quality", "provenance"):
        with contextlib.suppress(UserError):
            parse_calibration(text(**{key: value}), "p.json").step_model(StepContext())


def test_the_bundled_profile_is_chosen_for_its_gpu_and_model() -> None:
    loaded = load_step_model(gpu=find_gpu("rtx4090"), model=LLAMA)
    assert loaded.name == "rtx4090-llama-3.1-8b"
    assert "roofline" not in loaded.label
    assert load_step_model(gpu=A100, model=LLAMA).label.startswith("roofline")


def test_a_profile_of_another_gpu_model_or_size_is_refused_with_the_reason() -> None:
    with pytest.raises(UserError, match=r"RTX 4090.*A100"):
        load_step_model("rtx4090-llama-3.1-8b", gpu=A100)
    with pytest.raises(UserError, match=r"Llama-3\.1-8B.*70B"):
        load_step_model("rtx4090-llama-3.1-8b", model=load_model("meta-llama/Llama-3.1-70B"))
    with pytest.raises(UserError, match=r"tensor_parallel_size=1, not 2"):
        load_step_model("rtx4090-llama-3.1-8b", tensor_parallel_size=2)


def test_a_fine_tune_of_the_same_shape_may_use_the_profile() -> None:
    tuned = replace(LLAMA, name="my/own-tune")
    assert load_step_model("rtx4090-llama-3.1-8b", model=tuned).name == "rtx4090-llama-3.1-8b"


def test_steps_outside_the_domain_are_counted_and_told() -> None:
    loaded = load_step_model("rtx4090-llama-3.1-8b")
    loaded.device_seconds(StepShape((), 8, 800, 100))
    loaded.device_seconds(StepShape((), 8, 8 * 20000, 20000))
    loaded.device_seconds(StepShape(((5000, 0),), 0, 0, 0))
    loaded.decode_run_seconds(StepShape((), 1, 16380, 16380), 10)
    assert loaded.steps_outside == 7
    assert loaded.outside == {"max_decode_context": 6, "max_tokens": 1}
    assert "7 of 13 steps" in loaded.assumptions[-1]


def test_every_bundled_profile_states_source_licence_and_label() -> None:
    names = [name for name, _ in bundled_profiles()]
    assert {"rtx4090-llama-3.1-8b", "rtxpro6000-llama-3.1-8b"} <= set(names)
    for name, path in bundled_profiles():
        data = json.loads(path.read_text())
        assert data["schema"] == SCHEMA, name
        assert data["provenance"]["licence"], name
        assert data["provenance"]["source"], name
        assert data["provenance"]["label"], name


def test_a_profile_measured_in_16_bits_says_so_when_the_cache_is_narrower() -> None:
    plain = load_step_model("rtx4090-llama-3.1-8b")
    narrow = load_step_model("rtx4090-llama-3.1-8b", kv_bytes_per_element=1.0)
    assert not any("narrower" in sentence for sentence in plain.assumptions)
    assert any("KV cache is narrower" in sentence for sentence in narrow.assumptions)
