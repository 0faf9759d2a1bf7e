"""Facts of a trace, checked against hand-made traces and definitions; nothing from a file escapes unescaped."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest

from vsim.traces.burstiness import autocorrelation, counts, dispersion, hurst, index_of_dispersion
from vsim.traces.export import write_as
from vsim.traces.facts import facts, rank_correlation
from vsim.traces.facts_html import page
from vsim.traces.facts_text import text
from vsim.traces.readers import read_trace
from vsim.traces.sharing import sharing
from vsim.traces.trace import Trace

ROOT = Path(__file__).parents[1]
AZURE = ROOT / "traces" / "azure2023_conv.csv"
DATA = Path(__file__).parent / "data" / "traces"


def test_counts_leave_out_the_last_partial_window() -> None:
    ns = np.asarray([0, 400, 999, 1000, 2500]) * 1_000_000
    assert counts(ns, 1.0).tolist() == [3, 1]
    assert counts(ns, 10.0).tolist() == [5]


def test_dispersion_is_zero_for_a_clock_and_one_for_poisson() -> None:
    clock = np.arange(0, 100_000_000_000, 250_000_000)
    assert index_of_dispersion(counts(clock, 1.0)) == 0
    rng = np.random.default_rng(0)
    poisson = np.sort(rng.integers(0, 10_000 * 10**9, 50_000))
    assert index_of_dispersion(counts(poisson, 1.0)) == pytest.approx(1, abs=0.05)
    assert hurst(counts(poisson, 1.0)) == pytest.approx(0.5, abs=0.06)


def test_autocorrelation_of_an_alternating_series() -> None:
    series = np.asarray([1, -1] * 50)
    assert autocorrelation(series, 1) == pytest.approx(-0.99)
    assert autocorrelation(series, 2) == pytest.approx(0.98)
    assert math.isnan(autocorrelation(np.ones(9), 1))


def test_rank_correlation_agrees_with_scipy() -> None:
    from scipy.stats import spearmanr

    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 20, 200), rng.integers(0, 20, 200)
    assert rank_correlation(x, x + y) == pytest.approx(spearmanr(x, x + y).statistic)


def shared(rows: list[tuple[int, list[int]]], size: int) -> Trace:
    trace = Trace.of(range(len(rows)), [prompt for prompt, _ in rows], [1] * len(rows))
    ids = [value for _, content in rows for value in content]
    offsets = np.concatenate(([0], np.cumsum([len(content) for _, content in rows])))
    return dataclasses.replace(
        trace, prefix_offsets=offsets, prefix_ids=np.asarray(ids), prefix_block_tokens=size
    )


def test_t13_the_last_token_is_always_computed() -> None:
    found = sharing(shared([(512, [5]), (512, [5])], 512))
    assert found is not None
    assert found.hit_tokens(16).tolist() == [0, 496]


def test_t12_a_cut_piece_shares_its_tokens_in_whole_blocks() -> None:
    found = sharing(shared([(512, [5]), (300, [5])], 512))
    assert found is not None and found.hit_tokens(16).tolist() == [0, 288]
    other_way = sharing(shared([(300, [5]), (512, [5])], 512))
    assert other_way is not None and other_way.common_tokens.tolist() == [0, 300]


def test_sharing_ends_at_the_first_difference() -> None:
    found = sharing(shared([(48, [1, 2, 3]), (48, [1, 9, 3]), (48, [7, 2, 3])], 16))
    assert found is not None and found.common_tokens.tolist() == [0, 16, 0]


def test_what_lies_beyond_the_ids_is_private() -> None:
    found = sharing(shared([(40, [1, 2]), (40, [1, 2])], 16))
    assert found is not None and found.common_tokens.tolist() == [0, 32]


def test_facts_are_json_without_nan_for_any_small_trace() -> None:
    for trace in (Trace.of([0], [5], [6]), Trace.of([0, 0], [5, 5], [1, 1])):
        found = facts(trace)
        json.loads(json.dumps(found, allow_nan=False))
        assert text(found) and page(found)


def test_a_trace_that_spans_a_century_fits_in_memory() -> None:
    trace = Trace.of([0, 3e9], [5, 6], [1, 1])
    found = facts(trace)
    assert found["rate"]["peak_1s_per_s"] == 1
    assert len(found["rate"]["over_time"]["requests"]) < 200
    assert text(found) and page(found)


def test_dispersion_counts_empty_windows_without_laying_them_out() -> None:
    rng = np.random.default_rng(0)
    ns = np.sort(rng.integers(0, 500 * 10**9, 300))
    for window in (1, 10, 60):
        value, top = dispersion(ns, window)
        assert value == pytest.approx(index_of_dispersion(counts(ns, window)))
        assert top == counts(ns, window).max()


def test_the_azure_page_says_what_the_file_holds() -> None:
    found = facts(read_trace(AZURE))
    assert (found["requests"], found["tokens"]["prompt"], found["tokens"]["output"]) == (
        19_366,
        22_361_870,
        4_088_665,
    )
    shown = text(found)
    assert "19,366 requests over 58.4 min, from 2023-11-16 18:15:46 UTC" in shown
    assert "nothing; every row of the file is used" in shown


def test_names_from_a_file_can_not_act_on_terminal_or_page() -> None:
    evil = "<script>alert(1)</script>\x1b[2J"
    trace = dataclasses.replace(
        Trace.of([0, 1], [5, 6], [7, 8], name=evil),
        tenant=np.zeros(2, np.int32),
        tenant_names=(evil,),
    )
    found = facts(trace)
    assert "\x1b" not in text(found)
    assert "<script>" not in page(found)
    assert "http" not in page(found)


@pytest.mark.parametrize("form", ["azure", "mooncake"])
def test_public_files_come_out_as_they_went_in(tmp_path: Path, form: str) -> None:
    source = AZURE if form == "azure" else DATA / "mooncake_conversation_head.jsonl"
    write_as(read_trace(source), tmp_path / "out", form)
    assert (tmp_path / "out").read_bytes() == source.read_bytes()


def test_timed_trace_has_an_id_for_every_16_tokens_and_shares_as_before(tmp_path: Path) -> None:
    trace = read_trace(DATA / "mooncake_conversation_head.jsonl")
    said = write_as(trace, tmp_path / "t.jsonl", "timed_trace")
    assert any("--timed-trace-chunk-hash-size 16" in sentence for sentence in said)
    back = read_trace(tmp_path / "t.jsonl", time_unit="s", hash_block_tokens=16, strict=True)
    assert (back.arrival_ns == trace.arrival_ns).all()
    assert (back.prompt_tokens == trace.prompt_tokens).all()
    assert (np.diff(back.prefix_offsets) == -(-trace.prompt_tokens // 16)).all()  # type: ignore[arg-type]
    before, after = sharing(trace), sharing(back)
    assert before is not None and after is not None
    assert before.ceiling(16) == after.ceiling(16)


def test_sessions_go_out_as_aiperf_delays_and_come_back(tmp_path: Path) -> None:
    rows = [
        {"session_id": "a", "timestamp": 0, "input_length": 10, "output_length": 4},
        {"session_id": "a", "delay": 2000, "input_length": 30, "output_length": 4},
    ]
    (tmp_path / "in").write_text("\n".join(map(json.dumps, rows)))
    trace = read_trace(tmp_path / "in")
    assert write_as(trace, tmp_path / "out", "mooncake") == ()
    assert [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()] == rows


def test_what_a_form_can_not_carry_is_said(tmp_path: Path) -> None:
    trace = read_trace(DATA / "burstgpt_6col_rows.csv")
    said = write_as(trace, tmp_path / "out", "azure")
    assert any("tenants" in sentence for sentence in said)
    assert any("no dates" in sentence for sentence in said)
