"""Affinity: who belongs together stays together, also while replicas come and go."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from fixed_step import Fixed

from vsim.sim.cluster import ReplicaSpec, simulate_cluster
from vsim.sim.config import SchedulerConfig
from vsim.sim.fleet.simulate import simulate_fleet
from vsim.sim.fleet.spec import FleetSpec, Outage, Retry
from vsim.sim.router import named_route
from vsim.traces.trace import Trace


def conversations(sessions: int = 12, turns: int = 5) -> Trace:
    """Turns of each session 100 ms apart, each session with a prompt beginning of its own."""
    n = sessions * turns
    of = np.tile(np.arange(sessions), turns)
    trace = Trace.of((np.repeat(np.arange(turns), sessions) * 0.1).tolist(), [64] * n, [3] * n)
    return dataclasses.replace(
        trace,
        session=of.astype(np.int32),
        session_names=tuple(f"s{i}" for i in range(sessions)),
        prefix_ids=np.repeat(of * 10, 4) + np.tile(np.arange(4), n),
        prefix_offsets=np.arange(0, 4 * n + 1, 4),
        prefix_block_tokens=16,
    )


@pytest.mark.parametrize("name", ["session-affinity", "prefix-affinity"])
def test_a_session_keeps_its_replica(name: str) -> None:
    trace = conversations()
    specs = [ReplicaSpec(SchedulerConfig(), Fixed()) for _ in range(4)]
    run = simulate_cluster(trace, specs, named_route(name))
    assert trace.session is not None
    places = [set(run.requests["replica"][trace.session == s].tolist()) for s in range(12)]
    assert all(len(place) == 1 for place in places)
    assert len(set.union(*places)) > 1


@pytest.mark.parametrize("name", ["session-affinity", "prefix-affinity"])
def test_when_a_replica_fails_only_its_own_sessions_move(name: str) -> None:
    trace = conversations()
    assert trace.session is not None
    whole, broken = (
        simulate_fleet(
            trace,
            ReplicaSpec(SchedulerConfig(), Fixed()),
            FleetSpec(replicas=4, failures=outage, retry=Retry(attempts=2)),
            named_route(name),
        ).requests["replica"]
        for outage in ((), (Outage(2, 0.05),))
    )
    stayed = whole != 2
    assert (broken[stayed] == whole[stayed]).all()
    assert (broken[~stayed & (trace.arrival_ns > 0)] != 2).all()
    assert not stayed.all()


def test_without_a_session_the_least_busy_replica_is_taken() -> None:
    trace = Trace.of([0.0, 0.0, 0.0], [16] * 3, [9] * 3)
    specs = [ReplicaSpec(SchedulerConfig(), Fixed()) for _ in range(3)]
    run = simulate_cluster(trace, specs, named_route("session-affinity"))
    assert run.requests["replica"].tolist() == [0, 1, 2]
