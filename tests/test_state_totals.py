"""Means and peaks taken in one pass equal those of the whole step function, bit for bit."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vsim.sim import state_totals, timeline
from vsim.sim.run import Run
from vsim.sim.summary import summarize
from vsim.tests.make_run import S, make_run, random_run

# Short times, so that steps touch, have no length, and fall together with arrivals and ends.
short = st.integers(0, 12)
steps = st.lists(st.tuples(short, short, st.integers(0, 9), st.integers(0, 9)), min_size=1)
requests = st.lists(st.tuples(short, short), min_size=1, max_size=8)


def small_run(rows: list[tuple[int, int, int, int]], sent: list[tuple[int, int]]) -> Run:
    gaps, lengths, blocks, running = zip(*rows, strict=True)
    start = np.cumsum(gaps)
    begin = sorted(at for at, _ in sent)
    return make_run(
        {
            "arrival_ns": begin,
            "finish_ns": [at + 3 * span for at, (_, span) in zip(begin, sent, strict=True)],
        },
        {
            "start_ns": start,
            "end_ns": start + np.array(lengths),
            "kv_blocks_used": blocks,
            "kv_tokens_used": np.maximum(16 * np.array(blocks) - np.array(running), 0),
            "running": running,
            "waiting": lengths,
        },
    )


@given(rows=steps, sent=requests, chunk=st.integers(1, 5), until=st.tuples(short, short))
def test_in_pieces_as_in_one(
    rows: list[tuple[int, int, int, int]],
    sent: list[tuple[int, int]],
    chunk: int,
    until: tuple[int, int],
) -> None:
    run = small_run(rows, sent)
    start, end = min(until), sum(until) * 4
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_totals, "CHUNK", chunk)
        patch.setattr(timeline, "_CHUNK", chunk)
        assert state_totals.in_one_pass(run)
        found, share = state_totals.state_totals(run, start, end)
    clock, steps = timeline.StepClock(run), run.steps
    slots = steps["kv_blocks_used"].astype(np.int64) * run.block_size
    wasted = slots - steps["kv_tokens_used"]
    whole = {
        "blocks": clock.state(steps["kv_blocks_used"]),
        "wasted": clock.state(wasted),
        "running": clock.state(steps["running"]),
        "waiting": clock.state(steps["waiting"]),
    }
    for name, function in whole.items():
        assert found[name].mean == function.mean(start, end)
        assert found[name].peak == function.value.max()
    assert share == (wasted / np.maximum(slots, 1)).max()


def test_the_summary_does_not_depend_on_the_size_of_the_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = random_run(300, 2000)
    whole = summarize(run, goodput={"ttft": 200.0})
    monkeypatch.setattr(state_totals, "CHUNK", 7)
    monkeypatch.setattr(timeline, "_CHUNK", 7)
    monkeypatch.setattr("vsim.sim.metrics._CHUNK", 7)
    assert summarize(run, goodput={"ttft": 200.0}) == whole


def test_a_summary_takes_far_less_memory_than_the_run() -> None:
    run = random_run(100_000, 1_000_000)
    held = sum(column.nbytes for column in (*run.requests.values(), *run.steps.values()))
    summarize(random_run(10, 10))
    tracemalloc.start()
    summarize(run)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < held / 2


def test_a_run_of_many_years_counts_only_the_seconds_that_occur() -> None:
    late = 20_000_000 * S
    run = make_run(
        {
            "arrival_ns": [0, late],
            "finish_ns": [5 * S, late + S],
            "first_token_ns": [S, late],
            "output_tokens": [5, 2],
        },
        {"start_ns": [0, late], "end_ns": [S, late + S], "emitted": [3, 4]},
    )
    summary = summarize(run)
    assert (summary["max_concurrent_requests"], summary["max_output_tokens_per_s"]) == (1, 4.0)
