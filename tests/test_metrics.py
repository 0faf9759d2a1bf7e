"""Metrics are `vllm bench serve`'s, from the client's clock."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vsim.errors import UserError
from vsim.sim import metrics, timeline
from vsim.sim.run import ABORTED, REJECTED, UNFINISHED
from vsim.sim.summary import summarize, summary_json
from vsim.sim.table import render_table
from vsim.tests.make_run import MS, S, make_run, random_run


def two_requests() -> dict[str, list[int]]:
    return {
        "arrival_ns": [0, 1 * S],
        "sent_ns": [0, 1 * S + 500 * MS],  # held back by --max-concurrency
        "first_scheduled_ns": [20 * MS, 1 * S + 600 * MS],
        "first_token_ns": [100 * MS, 1 * S + 800 * MS],
        "finish_ns": [400 * MS, 3 * S],
        "prompt_tokens": [10, 20],
        "output_tokens": [4, 1],
    }


def test_latencies_start_when_the_client_sends() -> None:
    s = summarize(make_run(two_requests()))
    assert s["mean_ttft_ms"] == pytest.approx((100 + 300) / 2)
    assert s["std_ttft_ms"] == pytest.approx(100)  # population
    assert s["mean_e2el_ms"] == pytest.approx((400 + 1500) / 2)
    assert s["mean_queue_time_ms"] == pytest.approx((20 + 100) / 2)
    assert s["mean_client_queue_time_ms"] == pytest.approx(250)
    assert s["mean_e2el_including_client_queue_ms"] == pytest.approx((400 + 2000) / 2)


def test_tpot_excludes_the_first_token_and_single_token_requests() -> None:
    s = summarize(make_run(two_requests()))
    assert s["mean_tpot_ms"] == pytest.approx((400 - 100) / 3)


def test_throughput_counts_finished_requests_over_the_whole_run() -> None:
    s = summarize(make_run(two_requests()))
    assert s["duration"] == 3.0
    assert s["request_throughput"] == pytest.approx(2 / 3)
    assert s["output_throughput"] == pytest.approx(5 / 3)
    assert s["total_token_throughput"] == pytest.approx(35 / 3)


def test_goodput_counts_a_single_token_as_tpot_zero() -> None:
    run = make_run(two_requests())
    s = summarize(run, goodput={"tpot": 50})
    assert s["request_goodput"] == pytest.approx(1 / 3)  # the first one needs 100 ms a token
    assert (
        summarize(run, goodput={"ttft": 100})["goodput_fraction"] == 0.5
    )  # the limit itself is met
    assert summarize(run)["request_goodput"] is None


@pytest.mark.parametrize("pair", ["ttft", "ttft:", "ttft:abc", "itl:5", "tpot:-1", "e2el:nan"])
def test_goodput_refuses_what_vllm_refuses(pair: str) -> None:
    with pytest.raises(UserError):
        metrics.check_goodput(metrics.parse_goodput([pair]))


def test_peak_concurrency_counts_every_second_a_request_touches() -> None:
    # One after the other, never two at once: still both touch second 0.
    run = make_run(
        {"arrival_ns": [0, 600 * MS], "first_token_ns": [1, 1], "finish_ns": [500 * MS, 1 * S]}
    )
    assert metrics.max_concurrent_requests(run) == 2


def test_peaks_of_a_run_of_decades_need_no_memory_for_its_empty_seconds() -> None:
    far = 10**18
    run = make_run(
        {"arrival_ns": [0, far], "first_token_ns": [1, far + 1], "finish_ns": [2, far + 2]}
    )
    assert metrics.max_concurrent_requests(run) == 1
    assert metrics.max_output_tokens_per_s(run) == 1


def test_peak_tokens_are_counted_in_whole_seconds() -> None:
    steps = {
        "start_ns": [0, 900 * MS, 1100 * MS],
        "end_ns": [500 * MS, 1050 * MS, 1900 * MS],
        "emitted": [2, 3, 4],
        "decodes": [9, 9, 9],
    }
    run = make_run({"arrival_ns": [0], "finish_ns": [1900 * MS], "output_tokens": [9]}, steps)
    assert metrics.max_output_tokens_per_s(run) == 7


@given(
    st.dictionaries(st.integers(0, 10**12), st.integers(0, 20), max_size=20),
    st.lists(st.floats(0, 100), min_size=1, max_size=6),
)
def test_itl_equals_numpy_on_the_written_out_list(
    gaps: dict[int, int], percentiles: list[float]
) -> None:
    values = np.array(sorted(gaps), dtype=np.int64)
    counts = np.array([gaps[v] for v in sorted(gaps)], dtype=np.int64)
    ours = metrics.weighted_stats(values, counts, percentiles)
    every = np.repeat(values / 1e6, counts)
    assert ours.count == len(every)
    if not len(every):
        assert ours.mean_ms is None
        return
    got = [value for _, value in ours.percentiles]
    assert got == np.percentile(every, percentiles).tolist()
    assert ours.mean_ms == pytest.approx(every.mean())
    assert ours.std_ms == pytest.approx(every.std(), rel=1e-6, abs=1e-6)


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=40), st.floats(0, 100))
def test_per_request_percentiles_are_numpys(values: list[int], percentile: float) -> None:
    array = np.array(values, dtype=np.int64)
    (_, got), *_ = metrics.stats(array, [percentile]).percentiles
    assert got == np.percentile(array / 1e6, percentile)


@pytest.mark.parametrize("status", [REJECTED, UNFINISHED, ABORTED])
def test_nothing_finished_gives_null_not_nan(status: int) -> None:
    run = make_run(
        {
            "arrival_ns": [0, 5],
            "first_token_ns": [-1, -1],
            "first_scheduled_ns": [-1, -1],
            "finish_ns": [-1, -1],
            "output_tokens": [0, 0],
            "status": [status, status],
            "reason": [0, 0],
        },
        reasons=("too long",),
    )
    s = summarize(run, goodput={"ttft": 1})
    assert s["completed"] == 0 and s["failed"] == 2
    assert s["mean_ttft_ms"] is None and s["p99_itl_ms"] is None
    assert s["rejected_reasons"] == ({"too long": 2} if status == REJECTED else {})
    json.loads(summary_json(s))
    assert "NaN" not in summary_json(s)
    assert "Successful requests" in render_table(s)


def test_an_empty_trace_has_a_summary() -> None:
    s = summarize(make_run())
    assert s["num_prompts"] == 0 and s["request_throughput"] is None
    assert render_table(s)


def test_kv_usage_is_weighted_by_time_and_idle_time_counts_as_empty() -> None:
    # 50 of 100 blocks for 1 s, then nobody is there for 2 s, then 100 blocks for 1 s.
    run = make_run(
        {"arrival_ns": [0, 3 * S], "first_token_ns": [1 * S, 4 * S], "finish_ns": [1 * S, 4 * S]},
        {
            "start_ns": [0, 3 * S],
            "end_ns": [1 * S, 4 * S],
            "kv_blocks_used": [50, 100],
            "kv_tokens_used": [50 * 16 - 80, 100 * 16],
            "running": [1, 1],
        },
    )
    s = summarize(run)
    assert s["kv_usage_mean"] == pytest.approx((0.5 * 1 + 1.0 * 1) / 4)
    assert s["kv_usage_peak"] == 1.0
    # 80 slots wasted for one second of (50 + 100) x 16 slots held for one second each.
    assert s["kv_fragmentation_mean"] == pytest.approx(80 / (150 * 16))
    assert s["kv_fragmentation_peak"] == pytest.approx(80 / (50 * 16))
    assert s["kv_wasted_slots_peak"] == 80


def test_state_holds_through_the_hosts_work_between_two_steps() -> None:
    run = make_run(
        {"arrival_ns": [0], "first_token_ns": [1 * S], "finish_ns": [4 * S], "output_tokens": [2]},
        {"start_ns": [0, 3 * S], "end_ns": [1 * S, 4 * S], "kv_blocks_used": [10, 10]},
    )
    assert summarize(run)["kv_usage_mean"] == pytest.approx(0.1)


def test_replicas_are_summed() -> None:
    run = make_run(
        {"arrival_ns": [0, 0], "first_token_ns": [2 * S] * 2, "finish_ns": [2 * S] * 2},
        {
            "start_ns": [0, 0],
            "end_ns": [2 * S, 2 * S],
            "kv_blocks_used": [30, 50],
            "replica": [0, 1],
        },
    )
    s = summarize(run)
    assert s["kv_usage_peak"] == pytest.approx(80 / 200)
    assert s["kv_usage_mean"] == pytest.approx(80 / 200)


@given(
    st.lists(st.tuples(st.integers(0, 100), st.integers(0, 50)), max_size=20),
    st.integers(1, 12),
)
def test_buckets_agree_with_the_step_function_itself(
    changes: list[tuple[int, int]], buckets: int
) -> None:
    at = sorted({t for t, _ in changes})
    value = [float(dict(changes)[t]) for t in at]
    function = timeline.StepFunction(np.array(at, dtype=np.int64), np.array(value))
    edges = np.linspace(0, 120, buckets + 1).astype(np.int64)
    mean, peak = function.buckets(edges)
    dense = np.zeros(120)
    for t, v in zip(at, value, strict=True):
        dense[t:] = v
    for i in range(buckets):
        part = dense[edges[i] : edges[i + 1]]
        assert mean[i] == pytest.approx(part.mean())
        assert peak[i] == part.max()


def test_prefix_hit_rate_is_hits_over_queried_tokens() -> None:
    counters = {"prefix_cache_queries_tokens": 400, "prefix_cache_hits_tokens": 100}
    assert summarize(make_run(two_requests(), counters=counters))["prefix_cache_hit_rate"] == 0.25
    assert summarize(make_run(two_requests()))["prefix_cache_hit_rate"] is None


def test_any_percentile_can_be_asked_for() -> None:
    s = summarize(make_run(two_requests()), percentiles=(99.9, 5))
    assert {"p99.9_ttft_ms", "p5_ttft_ms"} <= s.keys() and "p99_ttft_ms" not in s
    with pytest.raises(UserError, match="101"):
        summarize(make_run(two_requests()), percentiles=(101,))


def test_the_summary_has_the_keys_of_vllm_bench_serve() -> None:
    s = summarize(random_run(50))
    assert s.keys() >= {
        "duration", "completed", "failed", "total_input_tokens", "total_output_tokens",
        "request_throughput", "request_goodput", "output_throughput", "total_token_throughput",
        "max_output_tokens_per_s", "max_concurrent_requests", "rtfx", "num_prompts", "request_rate",
        "burstiness", "max_concurrency", "model_id", "tokenizer_id", "backend", "label", "date",
        *(f"{a}_{m}_ms" for a in ("mean", "median", "std", "p99") for m in ("ttft", "tpot", "itl", "e2el")),
    }  # fmt: skip


@pytest.mark.parametrize(
    "percentiles", [(50, 90, 95, 99), (1, 5, 10, 25, 50, 75, 90, 95, 99, 99.9)]
)
def test_the_table_is_plain_text_in_80_columns(percentiles: tuple[float, ...]) -> None:
    run = random_run(300, reasons=("evil \x1b[31m red \u202e reason " + "x" * 100,))
    text = render_table(summarize(run, percentiles, {"ttft": 500, "tpot": 50, "e2el": 10000}))
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "\x1b" not in text and "\u202e" not in text
    assert "Mean" in text or "mean" in text
    for words in (
        "Successful requests:",
        "Output token throughput (tok/s):",
        "TTFT",
        "Preemptions:",
    ):
        assert words in text


def test_hours_of_latency_still_fit_one_table() -> None:
    run = random_run(100)
    run.requests["finish_ns"][:] += 10**13
    lines = render_table(summarize(run)).splitlines()
    assert sum(line.lstrip().startswith("mean ") for line in lines) == 1
    assert max(len(line) for line in lines) <= 80


def test_a_large_run_is_summarised_at_once() -> None:
    run = random_run(100_000, 200_000)
    began = time.perf_counter()
    summarize(run)
    # Vectorised it takes about 0.1 s; a loop over requests would take minutes.
    assert time.perf_counter() - began < 5
