"""Measured timings by one definition: tokens not chunks, failures masked, skewed clocks refused."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vsim.errors import UserError
from vsim.traces.readers import read_trace
from vsim.traces.timings import read_timings

DATA = Path(__file__).parent / "data" / "traces"


def write(tmp_path: Path, *rows: dict[str, Any]) -> Path:
    path = tmp_path / "log"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def test_t20_tpot_counts_tokens_and_gaps_are_marked_as_between_chunks(tmp_path: Path) -> None:
    found = read_timings(
        write(
            tmp_path, {"ttft": 0.2, "itls": [0.03, 0.03, 0.03], "output_tokens": 9, "latency": 0.29}
        )
    )
    assert found.tpot_s[0] == pytest.approx(0.01125)
    assert not found.chunks_are_tokens
    assert any("chunks are not tokens" in note for note in found.notes)


def test_t7_one_token_has_no_tpot(tmp_path: Path) -> None:
    found = read_timings(
        write(tmp_path, {"ttft": 0.2, "itls": [], "output_tokens": 1, "latency": 0.2})
    )
    assert math.isnan(found.tpot_s[0]) and found.e2e_s[0] == found.ttft_s[0]


SKEWED = {
    "arrival": 100.0,
    "first_token": 99.998,
    "end": 101.2,
    "output_tokens": 5,
    "input_tokens": 9,
}
GOOD = {
    "arrival": 100.5,
    "first_token": 100.75,
    "end": 101.25,
    "output_tokens": 5,
    "input_tokens": 9,
}


def test_t17_a_skewed_row_is_flagged_and_many_are_refused(tmp_path: Path) -> None:
    found = read_timings(write(tmp_path, SKEWED, *[GOOD] * 199))
    assert found.usable.sum() == 199 and found.skewed.sum() == 1
    assert found.ttft_s[1] == 0.25 and found.tpot_s[1] == 0.125
    with pytest.raises(UserError, match="the first token precedes the arrival"):
        read_timings(write(tmp_path, SKEWED, *[GOOD] * 9))


def test_t17_the_skewed_row_is_still_an_arrival(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, SKEWED, GOOD), time_unit="s")
    assert trace.arrival_ns.tolist() == [0, 500_000_000]
    assert any("clock skew" in said for said in trace.assumptions)


def test_t22_failures_are_masked_by_errors(tmp_path: Path) -> None:
    result = {
        "completed": 1, "total_input_tokens": 30, "input_lens": [10, 20], "output_lens": [10, 0],
        "ttfts": [0.2, 0.0], "itls": [[0.1] * 9, []], "errors": ["", "timeout"],
    }  # fmt: skip
    found = read_timings(write(tmp_path, result))
    assert found.usable.tolist() == [True, False]
    assert found.ttft_s[found.usable].tolist() == [0.2]
    assert found.chunks_are_tokens and len(found.chunk_gaps_s) == 9
    assert found.e2e_s[0] == pytest.approx(1.1)


def test_t24_aggregates_have_no_timings() -> None:
    with pytest.raises(UserError, match="only aggregates"):
        read_timings(DATA / "vllm_bench_serve_v0.25.1.json")


ODD = st.one_of(
    st.none(),
    st.integers(-5, 10**30),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.floats(), max_size=2),
)
NAMES = ("arrival", "first_token", "end", "ttft", "itls", "latency", "output_tokens", "status", "error",
         "completed", "total_input_tokens", "output_lens", "ttfts", "errors")  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from(NAMES), ODD, max_size=8), max_size=3))
def test_odd_logs_are_read_or_refused(rows: list[dict[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        path.write_text("\n".join(map(json.dumps, rows)))
        try:
            found = read_timings(path)
        except UserError as error:
            assert str(error).isprintable()
            return
        assert np.isfinite(found.e2e_s[found.usable]).all()
