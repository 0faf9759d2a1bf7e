"""The engine's loop on the simulated clock: when things start, end and are seen."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vsim.models.step import StepShape
from vsim.sim.cluster import ReplicaSpec, simulate_cluster
from vsim.sim.config import KVOffload, SchedulerConfig
from vsim.sim.engine import HostLink, simulate
from vsim.sim.run import ABORTED, FINISHED, REJECTED, UNFINISHED
from vsim.sim.summary import summarize
from vsim.traces.trace import Sessions, Trace

MS = 1_000_000


@dataclass
class Fixed:
    """Every step takes the same time."""

    device_s: float = 0.010
    host_s: float = 0.0

    def device_seconds(self, shape: StepShape) -> float:
        return self.device_s

    def host_seconds(self, shape: StepShape) -> float:
        return self.host_s


def column(run, name):
    return run.requests[name].tolist()


def test_a_lone_request_pays_one_step_per_token() -> None:
    run = simulate(Trace.of([0.0], [100], [5]), SchedulerConfig(), Fixed())
    assert column(run, "first_token_ns") == [10 * MS]
    assert column(run, "finish_ns") == [50 * MS]
    assert run.itl_ns.tolist() == [10 * MS] and run.itl_count.tolist() == [4]


def test_a_synchronous_step_pays_for_the_cpu_and_an_asynchronous_one_hides_it() -> None:
    trace = Trace.of([0.0], [100], [5])
    sync = simulate(trace, SchedulerConfig(), Fixed(host_s=0.002))
    hidden = simulate(trace, SchedulerConfig(async_scheduling=True), Fixed(host_s=0.002))
    assert column(sync, "finish_ns") == [60 * MS]
    # Only the first launch waits for the CPU; after that the device is never without work.
    assert column(hidden, "finish_ns") == [52 * MS]


def test_an_arrival_during_a_step_is_served_by_the_next_and_under_async_by_the_one_after() -> None:
    trace = Trace.of([0.0, 0.015], [10, 10], [10, 10])
    assert column(simulate(trace, SchedulerConfig(), Fixed()), "first_token_ns") == [
        10 * MS,
        30 * MS,
    ]
    late = simulate(trace, SchedulerConfig(async_scheduling=True), Fixed())
    assert column(late, "first_token_ns") == [10 * MS, 40 * MS]


def test_an_arrival_at_the_very_end_of_a_step_is_in_the_next_one() -> None:
    trace = Trace.of([0.0, 0.010], [10, 10], [10, 10])
    assert column(simulate(trace, SchedulerConfig(), Fixed()), "first_token_ns")[1] == 20 * MS


def test_the_front_end_delays_what_the_engine_sees_but_not_the_clients_clock() -> None:
    run = simulate(Trace.of([0.0], [10], [2]), SchedulerConfig(), Fixed(), frontend_s=0.006)
    assert column(run, "sent_ns") == [0]
    assert column(run, "first_token_ns") == [16 * MS]


def test_a_closed_loop_sends_when_a_place_is_free() -> None:
    trace = Trace.of([0.0] * 4, [10] * 4, [3] * 4)
    run = simulate(trace, SchedulerConfig(), Fixed(), max_concurrency=2)
    assert column(run, "sent_ns") == [0, 0, 30 * MS, 30 * MS]
    assert column(run, "arrival_ns") == [0, 0, 0, 0]


def test_a_turn_follows_the_one_before_after_its_think_time() -> None:
    trace = dataclasses.replace(
        Trace.of([0.0, 0.0], [10, 20], [3, 1]),
        sessions=Sessions(after=np.array([-1, 0]), think_ns=np.array([0, 500 * MS])),
    )
    run = simulate(trace, SchedulerConfig(), Fixed())
    assert column(run, "sent_ns") == [0, 530 * MS]
    assert column(run, "first_token_ns") == [10 * MS, 540 * MS]


def test_a_prompt_that_never_fits_stalls_the_queue_and_the_run_says_so() -> None:
    config = SchedulerConfig(num_gpu_blocks=4, max_model_len=1000)
    run = simulate(Trace.of([0.0, 1.0], [100, 10], [1, 1]), config, Fixed())
    assert column(run, "status") == [UNFINISHED, UNFINISHED]
    assert run.ended_early is not None and "2 of 2" in run.ended_early


def test_a_prompt_too_long_for_the_model_is_rejected_and_takes_no_memory() -> None:
    run = simulate(
        Trace.of([0.0, 0.0], [100, 10], [1, 1]), SchedulerConfig(max_model_len=50), Fixed()
    )
    assert column(run, "status") == [REJECTED, FINISHED]
    assert run.steps["tokens"].sum() == 10


def test_a_client_that_leaves_early_is_load_but_no_completion() -> None:
    trace = Trace.of([0.0, 0.0], [100, 100], [4, 3])
    left = dataclasses.replace(trace, aborted=np.array([False, True]))
    run, stayed = (simulate(t, SchedulerConfig(), Fixed()) for t in (left, trace))
    assert run.requests["status"].tolist() == [FINISHED, ABORTED]
    for name in ("finish_ns", "output_tokens"):
        assert run.requests[name].tolist() == stayed.requests[name].tolist()
    for name, column in run.steps.items():
        assert column.tolist() == stayed.steps[name].tolist()
    # Gaps and latencies are those of the request that finished.
    assert run.itl_count.sum() == 3
    summary = summarize(run)
    assert (summary["completed"], summary["failed"], summary["total_output_tokens"]) == (1, 1, 4)


def test_pipeline_stages_overlap_steps_of_different_requests() -> None:
    trace = Trace.of([0.0, 0.0], [10, 10], [20, 20])
    config = SchedulerConfig(max_num_batched_tokens=10)
    alone = simulate(trace, config, Fixed())
    piped = simulate(trace, dataclasses.replace(config, pipeline_parallel_size=2), Fixed())
    assert piped.end_ns < alone.end_ns * 1.1
    assert (piped.requests["status"] == FINISHED).all()


def test_swapped_blocks_cross_the_link_at_its_speed() -> None:
    config = swapping()
    trace = Trace.of([0.0, 0.0], [120, 120], [80, 80])
    quick = simulate(trace, config, Fixed(), host_link=HostLink(2**20, 1e12))
    slow = simulate(trace, config, Fixed(), host_link=HostLink(2**20, 1e9))
    moved = int(quick.steps["swapped_blocks"].sum())
    assert moved > 0 and (quick.requests["status"] == FINISHED).all()
    assert slow.end_ns - quick.end_ns == pytest.approx(
        moved * (2**20 / 1e9 - 2**20 / 1e12) * 1e9, rel=1e-3
    )


def swapping(num_gpu_blocks: int = 20) -> SchedulerConfig:
    return SchedulerConfig(
        engine="v0",
        engine_version="0.8.5",
        block_size=16,
        num_gpu_blocks=num_gpu_blocks,
        num_cpu_blocks=100,
        preemption_mode="swap",
        enable_prefix_caching=False,
        enable_chunked_prefill=False,
        max_num_batched_tokens=8192,
    )


def test_copies_beside_the_step_cost_only_what_is_longer_than_it() -> None:
    trace = Trace.of([0.0, 0.0], [120, 120], [80, 80])
    free = simulate(trace, swapping(), Fixed(), host_link=HostLink(2**20, 1e15, overlap=True))
    # A copy of every block takes 1 ms, less than the 10 ms of a step: hidden.
    hidden = simulate(trace, swapping(), Fixed(), host_link=HostLink(2**20, 2e10, overlap=True))
    before = simulate(trace, swapping(), Fixed(), host_link=HostLink(2**20, 2e10))
    swap_only = int((hidden.steps["tokens"] == 0).sum())
    assert swap_only == 0
    assert hidden.end_ns == free.end_ns
    assert before.end_ns > hidden.end_ns


def test_replicas_on_one_host_link_wait_for_each_others_copies() -> None:
    trace = Trace.of([0.0] * 4, [120] * 4, [80] * 4)
    shared = HostLink(2**20, 1e8)
    together = simulate_cluster(trace, [ReplicaSpec(swapping(), Fixed(), shared)] * 2)
    apart = simulate_cluster(
        trace, [ReplicaSpec(swapping(), Fixed(), HostLink(2**20, 1e8)) for _ in range(2)]
    )
    assert together.steps["swapped_blocks"].sum() == apart.steps["swapped_blocks"].sum() > 0
    assert together.end_ns > apart.end_ns


@pytest.mark.parametrize("batches", [1, 2, 3])
def test_the_offload_tier_brings_evicted_prefixes_back(batches: int) -> None:
    # With several batches in flight the last load ends with an empty step, while an earlier one completes.
    ids = np.arange(8)
    trace = Trace.of([0.0, 1.0, 2.0], [128, 300, 128], [2, 2, 2])
    trace = dataclasses.replace(
        trace,
        prefix_ids=np.concatenate([ids, ids]),
        prefix_offsets=np.array([0, 8, 8, 16]),
        prefix_block_tokens=16,
    )
    config = SchedulerConfig(
        num_gpu_blocks=22,
        kv_offload=KVOffload(cpu_blocks=100),
        async_scheduling=batches > 1,
        pipeline_parallel_size=max(1, batches - 1),
    )
    run = simulate(trace, config, Fixed(), host_link=HostLink(2**20, 25e9))
    assert (run.requests["status"] == FINISHED).all()
    assert run.counters["offload_stored_blocks"] >= 8
    assert run.counters["offload_loaded_blocks"] > 0


requests = st.lists(
    st.tuples(st.floats(0, 2), st.integers(1, 300), st.integers(1, 60)), min_size=1, max_size=25
)


@settings(max_examples=40, deadline=None)
@given(requests, st.booleans(), st.integers(1, 3), st.one_of(st.none(), st.integers(1, 4)))
def test_everyone_is_served_once_and_time_only_moves_forward(
    rows, asynchronous, stages, gate
) -> None:
    rows.sort()
    trace = Trace.of(*zip(*rows, strict=True))
    config = SchedulerConfig(
        num_gpu_blocks=30,
        max_num_batched_tokens=128,
        max_num_seqs=8,
        max_model_len=400,
        async_scheduling=asynchronous,
        pipeline_parallel_size=stages,
    )
    run = simulate(trace, config, Fixed(host_s=0.001), max_concurrency=gate)
    done = run.requests
    assert (done["status"] == FINISHED).all()
    assert done["output_tokens"].tolist() == trace.output_tokens.tolist()
    assert (done["sent_ns"] >= done["arrival_ns"]).all()
    assert (done["first_scheduled_ns"] >= done["sent_ns"]).all()
    assert (done["first_token_ns"] > done["first_scheduled_ns"]).all()
    assert (done["finish_ns"] >= done["first_token_ns"]).all()
    assert (np.diff(run.steps["end_ns"]) >= 0).all()
    assert (run.steps["kv_blocks_used"] <= run.num_gpu_blocks).all()
    assert (run.steps["kv_tokens_used"] <= run.steps["kv_blocks_used"].astype(np.int64) * 16).all()
    assert run.itl_count.sum() == (trace.output_tokens - 1).sum()
    again = simulate(trace, config, Fixed(host_s=0.001), max_concurrency=gate)
    assert all((again.steps[name] == run.steps[name]).all() for name in run.steps)
