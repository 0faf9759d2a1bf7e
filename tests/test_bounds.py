"""A bounded simulation is the beginning of the unbounded one, on every path, and says that it is no more."""

from __future__ import annotations

import dataclasses
import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from vsim.cli import vsim
from vsim.errors import UserError
from vsim.models.hardware import find_gpu
from vsim.models.load import load_step_model
from vsim.models.model_spec import load_model
from vsim.sim.bounds import Bounds
from vsim.sim.cluster import ReplicaSpec, simulate_cluster
from vsim.sim.config import SchedulerConfig
from vsim.sim.engine import make_scheduler
from vsim.sim.fleet.data_parallel import simulate_data_parallel
from vsim.sim.fleet.simulate import simulate_fleet
from vsim.sim.fleet.spec import FleetSpec
from vsim.sim.router import named_route
from vsim.sim.run import FINISHED, Run
from vsim.sim.stability import stability
from vsim.traces.trace import Trace
from vsim.traces.write import write_trace

CONFIG = SchedulerConfig(num_gpu_blocks=400, max_num_seqs=16)
STEPS = load_step_model(gpu=find_gpu("a100"), model=load_model("meta-llama/Llama-3.1-8B-Instruct"))
REPLICA = ReplicaSpec(CONFIG, STEPS)
END_S, MANY_STEPS = 2.5, 200


def trace(n: int = 200) -> Trace:
    rng = np.random.default_rng(7)
    times = np.cumsum(rng.exponential(0.05, n)).tolist()
    return Trace.of(times, rng.integers(20, 900, n).tolist(), rng.integers(1, 60, n).tolist())


def columns(run: Run) -> list[bytes]:
    return [
        np.ascontiguousarray(column).tobytes()
        for table in (run.requests, run.steps)
        for _, column in sorted(table.items())
    ]


BOUNDS = (
    Bounds(max_sim_time_s=END_S),
    Bounds(max_steps=MANY_STEPS),
    Bounds(max_sim_time_s=1e6, max_steps=10**9),
)


@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
@pytest.mark.parametrize("route", ["round-robin", "power-of-two"])
def test_both_paths_end_at_the_same_bound_with_the_same_run(bounds: Bounds, route: str) -> None:
    fast, reference = (
        simulate_cluster(
            trace(), [REPLICA] * 3, named_route(route, 5), engine=engine, bounds=bounds
        )
        for engine in ("fast", "reference")
    )
    assert columns(fast) == columns(reference)
    assert fast.ended_early == reference.ended_early
    assert fast.end_ns == reference.end_ns


def test_nothing_happens_after_the_bound_and_what_ended_before_is_as_without_it() -> None:
    whole = simulate_cluster(trace(), [REPLICA])
    part = simulate_cluster(trace(), [REPLICA], bounds=Bounds(max_sim_time_s=END_S))
    ended = part.requests["status"] == FINISHED
    assert 0 < ended.sum() < len(ended)
    assert part.end_ns <= END_S * 1e9
    assert int(part.requests["sent_ns"].max()) <= END_S * 1e9
    for name in ("sent_ns", "first_token_ns", "finish_ns", "output_tokens"):
        assert (part.requests[name][ended] == whole.requests[name][ended]).all()
    n = len(part.steps["start_ns"])
    assert (part.steps["end_ns"] == whole.steps["end_ns"][:n]).all()
    assert whole.ended_early is None
    assert f"{ended.sum()} of 200 requests had ended" in (part.ended_early or "")


def test_a_bound_of_steps_is_kept_exactly_and_counts_all_replicas() -> None:
    run = simulate_cluster(trace(), [REPLICA] * 2, bounds=Bounds(max_steps=MANY_STEPS))
    assert len(run.steps["start_ns"]) == MANY_STEPS
    assert "--max-steps 200 was reached" in (run.ended_early or "")


@pytest.mark.parametrize("bounds", BOUNDS[:2], ids=str)
def test_fleets_and_data_parallel_ranks_end_there_too(bounds: Bounds) -> None:
    fleet = simulate_fleet(trace(), REPLICA, FleetSpec(name="f", replicas=2), bounds=bounds)
    free, locked = (
        simulate_data_parallel(trace(), REPLICA, 2, in_lockstep=locked, bounds=bounds)
        for locked in (False, True)
    )
    for run in (fleet, free, locked):
        assert "was reached at" in (run.ended_early or "")
        if bounds.max_steps is not None:
            # Ranks in lockstep take a step each at a time.
            assert MANY_STEPS <= len(run.steps["start_ns"]) <= 2 * MANY_STEPS
        else:
            assert int(run.steps["start_ns"].max()) <= END_S * 1e9


def test_what_never_went_out_is_no_backlog() -> None:
    long = trace(4000)
    run = simulate_cluster(
        long, [ReplicaSpec(dataclasses.replace(CONFIG, num_gpu_blocks=4000, max_num_seqs=256), STEPS)],
        bounds=Bounds(max_sim_time_s=60),
    )  # fmt: skip
    assert (run.requests["sent_ns"] < 0).any()
    assert stability(run).stable


@pytest.mark.parametrize(
    "wrong", [{"max_sim_time_s": 0.0}, {"max_sim_time_s": float("nan")}, {"max_steps": 0}]
)
def test_bounds_that_leave_nothing_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        Bounds(**wrong)  # type: ignore[arg-type]


def test_replay_says_that_it_is_partial_in_the_table_and_in_the_summary(tmp_path: Path) -> None:
    write_trace(trace(), tmp_path / "t.jsonl")
    command = ["replay", str(tmp_path / "t.jsonl"), "--model", "meta-llama/Llama-3.1-8B-Instruct"]
    command += ["--gpu", "a100", "--max-steps", "50"]
    told = CliRunner().invoke(vsim, command)
    assert told.exit_code == 0
    assert "--max-steps 50 was reached" in " ".join(told.output.split())
    summary = json.loads(CliRunner().invoke(vsim, [*command, "--json"]).output)
    assert "requests had ended" in summary["ended_early"]
    refused = CliRunner().invoke(vsim, [*command, "--advise"])
    assert isinstance(refused.exception, UserError)


def test_blocks_that_nobody_takes_cost_no_memory() -> None:
    tracemalloc.start()
    schedulers = [make_scheduler(SchedulerConfig(num_gpu_blocks=100_000)) for _ in range(8)]
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(schedulers) == 8
    assert held < 8 * 200_000
