"""Data-parallel ranks: vLLM's balancer by hand, lockstep against the plain-clock loop, and one rank as the engine."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
from fixed_step import Fixed
from hypothesis import given, settings
from hypothesis import strategies as st

from vsim.errors import UserError
from vsim.models.step import StepShape
from vsim.sim.cluster import ReplicaSpec
from vsim.sim.config import KVOffload, SchedulerConfig
from vsim.sim.deployment import resolve
from vsim.sim.engine import simulate
from vsim.sim.fleet.data_parallel import DataParallelBalancer, simulate_data_parallel
from vsim.sim.fleet.spec import FleetSpec
from vsim.sim.lockstep import run_lockstep
from vsim.sim.replay import Load, replay, step_model_for
from vsim.sim.run import FINISHED
from vsim.traces.trace import Trace


def rank(waiting: int = 0, running: int = 0, used: int = 0, in_flight: int = 0) -> SimpleNamespace:
    scheduler = SimpleNamespace(
        num_waiting=waiting, num_running=running, num_free_blocks=100 - used, num_usable_blocks=100
    )
    return SimpleNamespace(scheduler=scheduler, in_flight=in_flight)


def test_ties_go_round() -> None:
    balancer = DataParallelBalancer([rank(), rank(), rank()])
    # Nothing in flight is known, but what was sent since the last report counts.
    assert [balancer.choose(0) for _ in range(6)] == [0, 1, 2, 0, 1, 2]


def test_waiting_behind_a_full_cache_counts_up_to_four_times() -> None:
    free = rank(waiting=2, running=6, used=40)
    full = rank(waiting=1, running=6, used=100)  # 7 + 1 x 6 x 0.5 = 10
    assert DataParallelBalancer([full, free]).choose(0) == 1  # 8


def test_between_reports_only_what_was_sent_counts() -> None:
    one, other = rank(running=5), rank(running=1)
    balancer = DataParallelBalancer([one, other])
    assert balancer.choose(0) == 1
    one.scheduler.num_running = 0
    assert [balancer.choose(50_000_000) for _ in range(3)] == [1, 1, 1]
    assert balancer.choose(100_000_000) == 0  # the new report


class Rough(Fixed):
    """Longer for more tokens, so that ranks differ; in lockstep the slowest counts, and a tenth more."""

    def device_seconds(self, shape: StepShape) -> float:
        return 0.004 + 1e-5 * shape.num_tokens + 1e-7 * shape.decode_context_sum

    def host_seconds(self, shape: StepShape) -> float:
        return 0.001 + 1e-5 * shape.num_seqs

    def lockstep_seconds(self, shapes: Sequence[StepShape]) -> float:
        return 1.1 * max(self.device_seconds(shape) for shape in shapes)


def traffic(seed: int, n: int = 60) -> Trace:
    rng = np.random.default_rng(seed)
    return Trace.of(
        np.sort(rng.uniform(0, 2, n)).tolist(),
        rng.integers(1, 300, n).tolist(),
        rng.integers(1, 60, n).tolist(),
    )


@settings(max_examples=40)
@given(seed=st.integers(0, 1 << 20), ranks=st.integers(1, 4), is_async=st.booleans())
def test_lockstep_on_simpys_clock_is_lockstep_on_the_plain_one(
    seed: int, ranks: int, is_async: bool
) -> None:
    trace, model = traffic(seed), Rough()
    config = SchedulerConfig(num_gpu_blocks=60, async_scheduling=is_async, max_num_seqs=16)
    run = simulate_data_parallel(trace, ReplicaSpec(config, model), ranks, in_lockstep=True)
    place = run.requests["replica"] if ranks > 1 else np.zeros(len(trace), dtype=int)

    def wave_ns(shapes: Sequence[StepShape]) -> tuple[int, int]:
        device = model.lockstep_seconds(shapes) if ranks > 1 else model.device_seconds(shapes[0])
        host = max(model.host_seconds(shape) for shape in shapes)
        return round(host * 1e9), round(device * 1e9)

    plain = run_lockstep(trace, config, wave_ns, ranks=ranks, route=place.tolist())
    for name in ("first_scheduled_ns", "first_token_ns", "finish_ns", "preemptions"):
        assert run.requests[name].tolist() == getattr(plain, name).tolist(), name
    assert (run.requests["status"] == FINISHED).all()
    assert len(np.unique(run.steps["end_ns"])) <= len(plain.waves)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("gate", [None, 6])
def test_one_rank_in_lockstep_is_the_single_engine(is_async: bool, gate: int | None) -> None:
    trace, config = traffic(1), SchedulerConfig(num_gpu_blocks=60, async_scheduling=is_async)
    alone = simulate(trace, config, Rough(), max_concurrency=gate)
    group = simulate_data_parallel(
        trace, ReplicaSpec(config, Rough()), 1, in_lockstep=True, max_concurrency=gate
    )
    for side in ("requests", "steps"):
        mine, theirs = getattr(group, side), getattr(alone, side)
        assert mine.keys() == theirs.keys()
        for name in mine:
            assert mine[name].tolist() == theirs[name].tolist(), name


def test_a_rank_that_idles_waits_for_the_others_and_a_free_one_does_not() -> None:
    # A long prompt on rank 0, a short answer on rank 1.
    trace = Trace.of([0.0, 0.0], [2000, 10], [2, 3])
    config = SchedulerConfig(num_gpu_blocks=400, max_num_batched_tokens=2048)
    ends = {}
    for in_lockstep in (True, False):
        run = simulate_data_parallel(
            trace, ReplicaSpec(config, Rough()), 2, in_lockstep=in_lockstep
        )
        assert run.requests["replica"].tolist() == [0, 1]
        ends[in_lockstep] = run.requests["first_token_ns"].tolist()
    assert ends[True][0] == ends[True][1]
    assert ends[False][1] < ends[False][0]


def test_what_is_not_simulated_in_lockstep_is_refused() -> None:
    trace = traffic(1)
    for config, complaint in (
        (SchedulerConfig(engine="v0"), "simulated for V1"),
        (SchedulerConfig(pipeline_parallel_size=2), "without pipeline stages"),
        (SchedulerConfig(kv_offload=KVOffload(10)), "without a CPU offload tier|and without"),
    ):
        with pytest.raises(UserError, match=complaint):
            simulate_data_parallel(trace, ReplicaSpec(config, Fixed()), 2, in_lockstep=True)


@pytest.mark.parametrize(
    ("model", "word"),
    [("Qwen/Qwen3-30B-A3B", "share experts"), ("meta-llama/Llama-3.1-8B", "run free")],
)
def test_replay_runs_the_ranks_of_a_deployment(model: str, word: str) -> None:
    deployment = resolve(model, "h100", data_parallel_size=2)
    trace, step_model = traffic(2), step_model_for(deployment)
    run = replay(trace, deployment, step_model, Load(max_concurrency=8))
    assert (run.requests["status"] == FINISHED).all()
    assert set(run.requests["replica"].tolist()) == {0, 1}
    assert run.config["replicas"] == 2
    assert deployment.gpus == 2
    assert any(word in sentence for sentence in run.assumptions)
    for more in ({"replicas": 2}, {"fleet": FleetSpec()}):
        with pytest.raises(UserError, match="data_parallel_size=2 is several engines"):
            replay(trace, deployment, step_model, **more)  # type: ignore[arg-type]
