"""The coverage benchmark on the recorded spot checks: honest data, honest arithmetic."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from vsim.models.artifact import read_calibration
from vsim.models.uncertainty import uncertainty_of

ROOT = Path(__file__).resolve().parent.parent
SPOT = ROOT / "benchmarks" / "data" / "cpu_spot"


@pytest.fixture(scope="module")
def coverage() -> ModuleType:
    spec = importlib.util.spec_from_file_location("coverage_bench", ROOT / "benchmarks/coverage.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["coverage_bench"] = module  # where dataclasses look for their annotations
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["block-32", "block-64", "second-shape"])
def test_recorded_runs_are_whole(name: str) -> None:
    told = json.loads((SPOT / f"{name}.json").read_text())
    assert told["schema"] == "vsim/spot-check-runs/1"
    assert len(told["first_token_ns"]) == len(told["finish_ns"]) == 3
    sent = np.array(told["arrival_ns"])
    for first, last in zip(told["first_token_ns"], told["finish_ns"], strict=True):
        assert len(first) == len(last) == len(sent) == 200
        assert (np.array(first) > sent).all() and (np.array(last) >= np.array(first)).all()


def test_the_profile_states_what_a_left_out_session_was_off_by() -> None:
    profile = read_calibration(SPOT / "cpu.json")
    assert len(profile.quality["session_bias_pct"]) == 2
    sd = uncertainty_of(profile).scale_sd
    assert sd > max(map(abs, profile.quality["session_bias_pct"])) / 100


def test_a_recorded_spot_check_is_covered_as_the_page_says(coverage: ModuleType) -> None:
    """docs/validation.md: all cells of the block size that was measured lie inside."""
    cells = list(coverage.cpu_cells(SPOT / "block-32.json", read_calibration(SPOT / "cpu.json"), 5))
    assert len(cells) == 3 * 16
    assert np.mean([cell.inside for cell in cells]) > 0.8
    text = coverage.table(cells)
    assert "CPU engine's steps" in text and text.splitlines()[2].startswith("all")


def test_a_cell_outside_is_named(coverage: ModuleType) -> None:
    cells = [
        coverage.Cell("k", "run", "ttft p95", 2.0, 1.0, 0.9, 1.1),
        coverage.Cell("k", "run", "ttft p50", 1.0, 1.0, 0.9, 1.1),
    ]
    text = coverage.table(cells)
    assert "50.0%" in text and "k: run: ttft p95 2, interval 0.9 to 1.1" in text
    assert "ttft p50" not in text
