"""Several replicas behind a router: routing without foresight, and queueing theory as the judge."""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Iterator

import numpy as np
import pytest

from vsim.errors import UserError
from vsim.models.step import StepShape
from vsim.sim.cluster import ReplicaSpec, simulate_cluster
from vsim.sim.config import SchedulerConfig
from vsim.sim.engine import simulate
from vsim.sim.router import ROUTES, least_requests, named_route
from vsim.sim.run import FINISHED
from vsim.traces.trace import Trace


class Fixed:
    def __init__(self, device_s: float = 0.010) -> None:
        self._device_s = device_s

    def device_seconds(self, shape: StepShape) -> float:
        return self._device_s

    def host_seconds(self, shape: StepShape) -> float:
        return 0.0


class Drawn(Fixed):
    """Service times given one by one: one step a request."""

    def __init__(self, seconds: Iterator[float]) -> None:
        super().__init__()
        self._seconds = seconds

    def device_seconds(self, shape: StepShape) -> float:
        return next(self._seconds)


# One request at a time, one token each: a server without batching.
SERVER = SchedulerConfig(max_num_seqs=1, enable_prefix_caching=False)


def waits_ns(arrival_ns: list[int], service_ns: list[int], servers: int) -> np.ndarray:
    """Waiting times of a first-come-first-served queue, by the Kiefer-Wolfowitz recursion."""
    free = [0] * servers
    waits = []
    for arrived, served in zip(arrival_ns, service_ns, strict=True):
        start = max(arrived, heapq.heappop(free))
        heapq.heappush(free, start + served)
        waits.append(start - arrived)
    return np.array(waits)


def erlang_c(servers: int, load: float) -> float:
    """Probability of having to wait in M/M/c; `load` = arrival rate x mean service."""
    below = sum(load**k / math.factorial(k) for k in range(servers))
    all_busy = load**servers / math.factorial(servers) * servers / (servers - load)
    return all_busy / (below + all_busy)


SERVICE_S = 0.010


def drawn(count: int, servers: int, kind: str) -> tuple[list[int], list[int]]:
    """Arrivals and service times in ns, at 60 % load."""
    rng = np.random.default_rng(11)
    gaps = rng.exponential(SERVICE_S / (0.6 * servers), count)
    service = rng.exponential(SERVICE_S, count) if kind == "M" else np.full(count, SERVICE_S)
    return (
        np.round(np.cumsum(gaps) * 1e9).astype(int).tolist(),
        np.maximum(1, np.round(service * 1e9)).astype(int).tolist(),
    )


@pytest.mark.parametrize(("kind", "servers"), [("D", 1), ("M", 1), ("M", 3)])
def test_without_batching_the_cluster_is_a_queue_of_the_books(kind: str, servers: int) -> None:
    arrival_ns, service_ns = drawn(3000, servers, kind)
    trace = Trace.of([a / 1e9 for a in arrival_ns], [1] * 3000, [1] * 3000)
    seconds = iter([s / 1e9 for s in service_ns])
    # The client's gate is the one queue: nobody is sent before a server is free.
    run = simulate_cluster(
        trace,
        [ReplicaSpec(SERVER, Drawn(seconds)) for _ in range(servers)],
        least_requests,
        max_concurrency=servers,
    )
    waited = run.requests["first_scheduled_ns"] - run.requests["arrival_ns"]
    assert waited.tolist() == waits_ns(arrival_ns, service_ns, servers).tolist()


@pytest.mark.parametrize(("kind", "servers"), [("D", 1), ("M", 1), ("M", 3)])
def test_that_queue_waits_as_theory_says(kind: str, servers: int) -> None:
    mean = waits_ns(*drawn(600_000, servers, kind), servers).mean() / 1e9
    load = 0.6 * servers
    expected = erlang_c(servers, load) * SERVICE_S / (servers - load)  # M/M/c
    if kind == "D":
        expected = 0.6 * SERVICE_S / (2 * (1 - 0.6))  # Pollaczek-Khinchine
    assert mean == pytest.approx(expected, rel=0.02)


def trace_with_prefixes(count: int = 60) -> Trace:
    rng = np.random.default_rng(5)
    ids = np.repeat(rng.integers(0, 4, count), 4) * 10 + np.tile(np.arange(4), count)
    trace = Trace.of(
        np.cumsum(rng.exponential(0.02, count)).tolist(),
        [80] * count,
        rng.integers(1, 40, count).tolist(),
    )
    return dataclasses.replace(
        trace,
        prefix_ids=ids.astype(np.int64),
        prefix_offsets=np.arange(0, 4 * count + 1, 4),
        prefix_block_tokens=16,
    )


def test_one_replica_of_a_cluster_is_the_single_engine() -> None:
    trace, config = trace_with_prefixes(), SchedulerConfig(num_gpu_blocks=40, async_scheduling=True)
    alone = simulate(trace, config, Fixed())
    for name in ROUTES:
        cluster = simulate_cluster(trace, [ReplicaSpec(config, Fixed())], named_route(name))
        assert all((cluster.requests[c] == alone.requests[c]).all() for c in alone.requests), name
        assert all((cluster.steps[c] == alone.steps[c]).all() for c in alone.steps), name


@pytest.mark.parametrize("name", ROUTES)
def test_every_route_serves_everyone_and_never_sees_the_answers_length(name: str) -> None:
    trace = trace_with_prefixes()
    config = SchedulerConfig(num_gpu_blocks=40)
    specs = [ReplicaSpec(config, Fixed()) for _ in range(3)]
    run = simulate_cluster(trace, specs, named_route(name, seed=7))
    assert (run.requests["status"] == FINISHED).all()
    assert set(run.requests["replica"].tolist()) <= {0, 1, 2}
    assert sorted(set(run.steps["replica"].tolist())) == sorted(
        set(run.requests["replica"].tolist())
    )
    # What a router cannot know must not matter while nobody has finished: the first to be sent go the
    # same way whatever their answers' length.
    longer = dataclasses.replace(trace, output_tokens=trace.output_tokens + 1)
    other = simulate_cluster(longer, specs, named_route(name, seed=7))
    first_end = int(run.requests["finish_ns"].min())
    early = run.requests["sent_ns"] < first_end
    assert (run.requests["replica"][early] == other.requests["replica"][early]).all()


def test_prefix_affinity_keeps_a_conversation_on_its_replica() -> None:
    trace = trace_with_prefixes()
    specs = [ReplicaSpec(SchedulerConfig(num_gpu_blocks=400), Fixed()) for _ in range(3)]
    together = simulate_cluster(trace, specs, named_route("prefix-affinity"))
    spread = simulate_cluster(trace, specs, named_route("round-robin"))
    assert (
        together.counters["prefix_cache_hits_tokens"] > spread.counters["prefix_cache_hits_tokens"]
    )


def test_an_unknown_route_is_named() -> None:
    with pytest.raises(UserError, match="shortest-job"):
        named_route("shortest-job")
