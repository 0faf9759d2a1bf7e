"""Causes of latency: they add up, and a planted culprit is named."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from vsim.commands.explain import explain as command
from vsim.errors import UserError
from vsim.models.step import StepShape
from vsim.sim.config import SchedulerConfig
from vsim.sim.engine import simulate
from vsim.sim.explain import (
    KEYS,
    breakdown,
    explain_request,
    explain_tail,
    parse_tail,
    render_explanation,
)
from vsim.sim.run import FINISHED, Run
from vsim.sim.run_io import read_run, write_run
from vsim.sim.summary import summarize
from vsim.tests.causes import ROOT, runs, wrong
from vsim.tests.make_run import MS, S, make_run, random_run
from vsim.traces.readers import read_trace
from vsim.traces.trace import Trace


class Linear:
    """5 ms a step and 0.1 ms a token; 1 ms of host work."""

    def device_seconds(self, shape: StepShape) -> float:
        return 0.005 + 0.0001 * shape.num_tokens

    def host_seconds(self, shape: StepShape) -> float:
        return 0.001


def served(trace: Trace, **flags: object) -> Run:
    config = SchedulerConfig(**{"max_model_len": 200_000, "num_gpu_blocks": 20_000, **flags})  # type: ignore[arg-type]
    run = simulate(trace, config, Linear())
    return dataclasses.replace(run, config={"flags": dataclasses.asdict(config)})


def chats(n: int = 200, every_s: float = 0.1) -> Trace:
    rng = np.random.default_rng(0)
    return Trace.of(
        [i * every_s for i in range(n)],
        rng.integers(50, 300, n).tolist(),
        rng.integers(5, 60, n).tolist(),
    )


def adds_up(run: Run) -> None:
    done = run.requests["status"] == FINISHED
    for by, end in (("e2el", "finish_ns"), ("ttft", "first_token_ns")):
        parts = breakdown(run, by)
        assert (parts >= 0).all()
        expected = np.where(done, run.requests[end] - run.requests["sent_ns"], 0)
        np.testing.assert_array_equal(parts.sum(axis=1), expected)


@given(
    st.lists(st.tuples(st.floats(0, 2), st.integers(1, 400), st.integers(1, 60)), min_size=1, max_size=25),
    st.integers(30, 120),
    st.integers(1, 12),
    st.sampled_from([64, 256, 2048]),
    st.booleans(),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_the_parts_add_up_to_the_latency_to_the_nanosecond(
    rows: list[tuple[float, int, int]], blocks: int, seats: int, budget: int, async_scheduling: bool
) -> None:
    rows = sorted(rows)
    trace = Trace.of(*(list(column) for column in zip(*rows, strict=True)))
    run = served(
        trace,
        num_gpu_blocks=blocks,
        max_num_seqs=seats,
        max_num_batched_tokens=budget,
        max_model_len=480,
        async_scheduling=async_scheduling,
    )
    adds_up(run)


def test_the_parts_of_drawn_runs_add_up_too() -> None:
    for seed in range(5):
        run = random_run(200, 500, seed)
        spans = [
            (i, s + 5 * MS, s + 90 * MS) for i, s in enumerate(run.requests["sent_ns"].tolist())
        ]
        adds_up(run)
        adds_up(dataclasses.replace(run, preemption_spans=np.array(spans)))


@pytest.mark.parametrize(
    "name, most", [("traces/azure2023_conv.csv", 120), ("tests/data/traces/mooncake_conversation_head.jsonl", 30)]
)  # fmt: skip
def test_the_parts_add_up_on_real_traces_whatever_serves_them(name: str, most: int) -> None:
    # Whole traces: python tests/causes.py
    trace = read_trace(ROOT / name, limit=most)
    kinds = [(kind.name, wrong(run)) for kind, run in runs(trace, most)]
    assert [name for name, count in kinds if count] == [] and len(kinds) > 10


def test_each_part_of_a_life_told_by_hand() -> None:
    # Sent during step 0, kept out by a full house in step 1, prefilled in step 2, decoded in 3 and, with
    # another's chunk, in 4; out of the engine from 6 s to 7 s.
    run = make_run(
        {
            "arrival_ns": [500 * MS],
            "first_scheduled_ns": [2 * S],
            "first_token_ns": [3 * S],
            "finish_ns": [8 * S],
            "output_tokens": [4],
        },
        {
            "start_ns": [0, 1 * S, 2 * S, 3 * S, 4 * S, 7 * S],
            "end_ns": [1 * S, 2 * S, 3 * S, 4 * S, 5 * S, 8 * S],
            "running": [1, 8, 1, 1, 1, 1],
            "prefill_tokens": [0, 0, 0, 0, 100, 0],
        },
        config={"max_num_seqs": 8},
        preemption_spans=np.array([[0, 6 * S, 7 * S]]),
    )
    parts = dict(zip(KEYS, (breakdown(run)[0] / 1e9).tolist(), strict=True))
    assert {key: value for key, value in parts.items() if value} == {
        "wait_step": 0.5,
        "wait_seats": 1.0,
        "prefill": 1.0,
        "decode": 2.0,
        "decode_stalled": 1.0,
        "decode_host": 1.0,
        "preempted": 1.0,
    }


def test_one_giant_prompt_among_chats_is_named() -> None:
    base = chats()
    prompts = base.prompt_tokens.copy()
    prompts[100] = 120_000
    run = served(dataclasses.replace(base, prompt_tokens=prompts))
    found = explain_tail(run, 95)
    assert found.culprits[0].request == 100 and found.culprits[0].computed_tokens == 120_000
    assert found.most in ("decode_stalled", "wait_budget", "prefill")
    bystander = explain_request(run, 99)
    assert bystander.culprits[0].request == 100
    assert bystander.parts_ns["decode_stalled"] > 10 * bystander.parts_ns["decode"]
    assert "request 100: 120,000 tokens" in render_explanation(bystander)


def test_too_few_seats_and_too_small_a_cache_are_told_apart() -> None:
    seats = explain_tail(served(chats(every_s=0.01), max_num_seqs=4), 90)
    assert seats.most == "wait_seats"
    cache = explain_tail(served(chats(every_s=0.01), num_gpu_blocks=60, max_model_len=400), 90)
    assert cache.most == "wait_kv"
    budget = explain_tail(served(chats(every_s=0.005), max_num_batched_tokens=128), 90, "ttft")
    assert budget.most == "wait_budget"


def test_the_tenant_of_a_burst_is_named() -> None:
    base = chats(300)
    arrival = np.sort(np.concatenate([base.arrival_ns[:200], 10 * S + np.arange(100) * MS]))
    tenant = ((arrival >= 10 * S) & (arrival < 10 * S + 100 * MS)).astype(np.int32)
    run = served(
        dataclasses.replace(
            base, arrival_ns=arrival, tenant=tenant, tenant_names=("calm", "bursty")
        ),
        max_num_seqs=8,
    )
    found = explain_tail(run, 90)
    assert found.most == "wait_seats"
    assert "tenant bursty sent" in found.burst[0]
    assert "tenant bursty sent" in render_explanation(found)


def test_time_out_of_the_engine_is_seen_where_preemptions_happen() -> None:
    trace = Trace.of([0.0] * 12, [100] * 12, [300] * 12)
    run = served(trace, num_gpu_blocks=100, max_model_len=500)
    assert run.requests["preemptions"].sum() > 0
    assert run.preemption_spans is not None
    parts = breakdown(run)
    out = parts[:, KEYS.index("preempted")]
    assert ((out > 0) == (run.requests["preemptions"] > 0)).all()
    adds_up(run)


def test_an_unfinished_or_unknown_request_is_said_to_be_so() -> None:
    run = random_run(100)
    rejected = int(np.flatnonzero(run.requests["status"] == 1)[0])
    with pytest.raises(UserError, match="rejected: prompt of 9000 tokens"):
        explain_request(run, rejected)
    with pytest.raises(UserError, match="no such request"):
        explain_request(run, 100)
    with pytest.raises(UserError, match="no engine steps"):
        breakdown(random_run(10, 0))
    with pytest.raises(UserError, match="no tail"):
        explain_tail(make_run(), 99)
    for text in ("p100", "x", "-1", "nan"):
        with pytest.raises(UserError, match="--tail"):
            parse_tail(text)


def test_the_command_prints_text_and_json_from_a_stored_run(tmp_path: Path) -> None:
    run = served(
        Trace.of([0.0] * 12, [100] * 12, [300] * 12), num_gpu_blocks=100, max_model_len=500
    )
    write_run(run, tmp_path / "run", summarize(run), report=False)
    np.testing.assert_array_equal(read_run(tmp_path / "run").preemption_spans, run.preemption_spans)
    told = CliRunner().invoke(command, [str(tmp_path / "run"), "--tail", "p50"])
    assert told.exit_code == 0 and "end-to-end latency, mean" in told.output
    assert max(len(line) for line in told.output.splitlines()) <= 80
    data = json.loads(
        CliRunner().invoke(command, [str(tmp_path / "run"), "--json", "--request", "3"]).output
    )
    assert sum(data["parts_ms"].values()) == pytest.approx(data["total_ms"])
    row = run.requests["finish_ns"][3] - run.requests["sent_ns"][3]
    assert data["total_ms"] == pytest.approx(row / 1e6)
