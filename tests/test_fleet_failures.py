"""Replicas that fail or are drained: what is lost, what is tried again, and that every request ends exactly once."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from fixed_step import Fixed
from hypothesis import given, settings
from hypothesis import strategies as st

from vsim.errors import UserError
from vsim.sim.cluster import ReplicaSpec
from vsim.sim.config import SchedulerConfig
from vsim.sim.fleet import spec as says
from vsim.sim.fleet.read import read_fleet
from vsim.sim.fleet.report import replicas_over_time
from vsim.sim.fleet.simulate import _Fleet, simulate_fleet
from vsim.sim.fleet.spec import Admission, FleetSpec, Network, Outage, Retry
from vsim.sim.report import render_report
from vsim.sim.router import ROUTES, named_route
from vsim.sim.run import ABORTED, FINISHED, REJECTED, Run
from vsim.sim.run_io import read_run, write_run
from vsim.sim.summary import summarize
from vsim.traces.trace import Trace

MS = 1_000_000
WAIT = Admission(when_full="wait")


def run_of(trace: Trace, spec: FleetSpec, **more: object) -> Run:
    replica = ReplicaSpec(SchedulerConfig(num_gpu_blocks=60), Fixed())
    return simulate_fleet(trace, replica, spec, **more)  # type: ignore[arg-type]


def alone(output_tokens: int = 10) -> Trace:
    return Trace.of([0.0], [16], [output_tokens])


def test_a_request_on_a_failed_replica_is_aborted_and_keeps_what_it_said() -> None:
    run = run_of(alone(), FleetSpec(replicas=1, failures=(Outage(0, 0.055),)))
    assert run.requests["status"].tolist() == [ABORTED]
    assert run.reasons == (says.REPLICA_FAILED,)
    assert run.requests["output_tokens"].tolist() == [5]
    assert run.requests["finish_ns"].tolist() == [55 * MS]
    assert run.itl_count.sum() == 0  # as in vllm bench serve, only answers that ended count
    assert [(e.at_ns, e.kind, e.replica) for e in run.events] == [(55 * MS, "replica_down", 0)]


def test_tried_again_it_starts_over_when_the_replica_is_back() -> None:
    spec = FleetSpec(
        replicas=1, admission=WAIT, failures=(Outage(0, 0.055, 1.0),), retry=Retry(attempts=2)
    )
    run = run_of(alone(), spec)
    assert run.requests["status"].tolist() == [FINISHED]
    # Down until 1.055; then ten steps of 10 ms, from an empty cache.
    assert run.requests["first_token_ns"].tolist() == [1065 * MS]
    assert run.requests["finish_ns"].tolist() == [1155 * MS]
    assert run.requests["attempts"].tolist() == [2]
    assert run.requests["output_tokens"].tolist() == [10]
    assert dict(zip(run.itl_ns.tolist(), run.itl_count.tolist(), strict=True)) == {10 * MS: 9}
    assert run.counters["lost_output_tokens"] == 5
    assert [e.kind for e in run.events] == ["replica_down", "replica_up"]


def test_another_replica_takes_over_at_once() -> None:
    spec = FleetSpec(replicas=2, failures=(Outage(0, 0.055),), retry=Retry(attempts=2, delay_s=0.1))
    run = run_of(alone(), spec)
    assert run.requests["replica"].tolist() == [1]
    assert run.requests["finish_ns"].tolist() == [255 * MS]


def test_with_nobody_left_the_router_refuses() -> None:
    spec = FleetSpec(replicas=1, failures=(Outage(0, 0.055, 1.0),), retry=Retry(attempts=2))
    run = run_of(alone(), spec)
    assert run.requests["status"].tolist() == [REJECTED]
    assert run.reasons == (says.NO_REPLICA,)


def test_who_waits_for_a_replica_that_never_comes_is_said_to_wait() -> None:
    spec = FleetSpec(replicas=1, admission=WAIT, failures=(Outage(0, 0.0),))
    run = run_of(Trace.of([0.1], [16], [10]), spec)
    assert run.ended_early is not None
    assert "1 requests wait at the router" in run.ended_early


def test_a_drained_replica_finishes_what_it_has_and_gets_nothing_new() -> None:
    trace = Trace.of([0.0, 0.0, 0.05, 0.06, 0.5, 0.5], [16] * 6, [10] * 6)
    run = run_of(trace, FleetSpec(replicas=2, drains=(Outage(0, 0.02, 0.3),)))
    assert (run.requests["status"] == FINISHED).all()
    assert run.requests["replica"].tolist()[:4] == [0, 1, 1, 1]
    assert sorted(run.requests["replica"].tolist()[4:]) == [0, 1]
    assert run.requests["finish_ns"][0] == 100 * MS
    told = [(e.at_ns // MS, e.kind) for e in run.events]
    assert told == [(20, "drain_begins"), (100, "drained"), (320, "drain_ends")]


@pytest.mark.parametrize(
    ("route", "attempts", "lost"),
    [
        ("least-requests", 1, 5),
        ("least-requests", 3, 5),
        ("round-robin", 1, 3),
        ("round-robin", 2, 0),
    ],
)
def test_a_failure_nobody_has_noticed_swallows_what_is_sent_there(
    route: str, attempts: int, lost: int
) -> None:
    # One long request keeps the other replica busy; one a 100 ms from 1.05 s on, half a second unnoticed.
    trace = Trace.of([0.0, 0.0, *(1.05 + 0.1 * i for i in range(8))], [16] * 10, [1, 400, *[1] * 8])
    spec = FleetSpec(
        replicas=2,
        failures=(Outage(0, 1.0, 5.0, noticed_after_s=0.5),),
        retry=Retry(attempts=attempts),
    )
    run = run_of(trace, spec, route=named_route(route))
    assert (run.requests["status"] == ABORTED).sum() == lost
    late = run.requests["sent_ns"] > 1500 * MS
    assert (run.requests["status"][late] == FINISHED).all()


def test_a_refused_request_may_try_the_next_replica() -> None:
    one = SchedulerConfig(max_num_seqs=1)
    limits = Admission(max_num_queued_reqs=1)
    trace = Trace.of([0.0, 0.0, 0.0], [16] * 3, [10] * 3)

    def statuses(retry: Retry) -> list[int]:
        spec = FleetSpec(replicas=2, admission=limits, retry=retry)
        run = simulate_fleet(trace, ReplicaSpec(one, Fixed()), spec)
        return run.requests["status"].tolist()  # type: ignore[no-any-return]

    assert statuses(Retry(attempts=2, refused=True)) == [FINISHED, FINISHED, REJECTED]
    # Long enough a pause, and a place is free.
    assert statuses(Retry(attempts=2, delay_s=0.2, refused=True)) == [FINISHED] * 3


def test_failures_after_the_last_answer_do_not_lengthen_the_run() -> None:
    run = run_of(alone(), FleetSpec(replicas=1, failures=(Outage(0, 1000.0),)))
    assert run.end_ns == 100 * MS
    assert run.events == ()


def test_events_and_attempts_survive_the_disk(tmp_path: Path) -> None:
    spec = FleetSpec(replicas=2, failures=(Outage(0, 0.055, 9.0),), retry=Retry(attempts=2))
    run = run_of(alone(), spec)
    write_run(run, tmp_path / "run", summarize(run), report=False)
    back = read_run(tmp_path / "run")
    assert back.events == run.events
    assert back.requests["attempts"].tolist() == [2]
    head = tmp_path / "run" / "run.json"
    head.write_text(head.read_text().replace('"replica_down"', "7"))
    with pytest.raises(UserError, match="events are not"):
        read_run(tmp_path / "run")


def test_the_report_shows_how_many_replicas_there_were() -> None:
    spec = FleetSpec(
        replicas=3,
        failures=(Outage(0, 0.1, 0.2),),
        drains=(Outage(1, 0.2),),
        retry=Retry(attempts=2),
    )
    trace = Trace.of([i * 0.05 for i in range(20)], [16] * 20, [10] * 20)
    run = dataclasses.replace(run_of(trace, spec), config={"fleet": spec.as_dict()})
    at, serving, paid = replicas_over_time(run)
    changes = dict(zip((at // MS).tolist(), serving.tolist(), strict=True))
    assert (serving[0], changes[100], changes[200], changes[300]) == (3, 2, 1, 2)
    assert set(paid.tolist()) == {3}
    page = render_report(run, summarize(run))
    assert "Fleet events" in page and "replica 0 fails: " in page and 'id="fleet"' in page
    plain = run_of(trace, FleetSpec(replicas=3))
    assert "Fleet events" not in render_report(plain, summarize(plain))


outages = st.lists(
    st.builds(
        Outage,
        st.integers(0, 2),
        st.floats(0, 2).map(lambda x: round(x, 3)),
        st.none() | st.floats(0.001, 1).map(lambda x: round(x, 3)),
        st.sampled_from((0.0, 0.2, 5.0)),
    ),
    max_size=4,
)


def apart(found: list[Outage]) -> tuple[Outage, ...]:
    kept: list[Outage] = []
    for one in found:
        others = [o for o in kept if o.replica == one.replica]
        if all(one.at_s > o.end_s or o.at_s > one.end_s for o in others):
            kept.append(one)
    return tuple(kept)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 1 << 20),
    failures=outages,
    drains=outages,
    attempts=st.integers(1, 3),
    refused=st.booleans(),
    limits=st.builds(
        Admission,
        max_waiting_per_replica=st.none() | st.integers(1, 4),
        max_num_queued_reqs=st.none() | st.integers(0, 9),
        max_waiting=st.none() | st.integers(0, 9),
        max_in_flight_per_replica=st.none() | st.integers(1, 6),
        when_full=st.sampled_from(("reject", "wait")),
    ),
    network=st.builds(Network, st.sampled_from((0.0, 0.03)), st.sampled_from((0.0, 0.01))),
    route=st.sampled_from(ROUTES),
    gate=st.none() | st.integers(1, 10),
)
def test_every_request_ends_exactly_once(
    seed: int,
    failures: list[Outage],
    drains: list[Outage],
    attempts: int,
    refused: bool,
    limits: Admission,
    network: Network,
    route: str,
    gate: int | None,
) -> None:
    rng = np.random.default_rng(seed)
    n = 40
    trace = Trace.of(
        np.sort(rng.uniform(0, 2, n)).tolist(),
        rng.integers(1, 100, n).tolist(),
        rng.integers(1, 40, n).tolist(),
    )
    spec = FleetSpec(
        replicas=3,
        network=network,
        admission=limits,
        failures=apart(failures),
        drains=apart(drains),
        retry=Retry(attempts, 0.05, refused),
    )
    config = SchedulerConfig(num_gpu_blocks=30, async_scheduling=bool(seed % 2), max_num_seqs=8)
    fleet = _Fleet(trace, ReplicaSpec(config, Fixed()), spec, named_route(route), seed, gate)
    ends: list[int] = []
    told = fleet.client.finished

    def count(index: int) -> None:
        ends.append(index)
        told(index)

    fleet.client.finished = count  # type: ignore[method-assign]
    run = fleet.run(None, None)
    columns = run.requests
    done = columns["status"] == FINISHED
    over = done | (columns["status"] == REJECTED) | (columns["status"] == ABORTED)
    assert sorted(ends) == np.flatnonzero(over).tolist()
    if run.ended_early is None:
        assert len(ends) == n
    else:
        assert "at the router" in run.ended_early
    assert (columns["output_tokens"][done] == trace.output_tokens[done]).all()
    assert int(run.itl_count.sum()) == int((columns["output_tokens"][done] - 1).sum())
    assert (columns["reason"][over & ~done] >= 0).all()
    assert (columns["reason"][done] == -1).all()
    assert (columns["finish_ns"][over] >= columns["sent_ns"][over]).all()
    if "attempts" in columns:
        assert (columns["attempts"] <= attempts).all()
    # What still stands is empty.
    for slot in fleet.slots:
        assert not slot.requests
        if not slot.down:
            scheduler = slot.engine.scheduler
            assert scheduler.num_free_blocks == scheduler.num_usable_blocks
    again = _Fleet(trace, ReplicaSpec(config, Fixed()), spec, named_route(route), seed, gate)
    other = again.run(None, None)
    assert all(other.requests[c].tobytes() == columns[c].tobytes() for c in columns)


def test_outages_of_one_replica_do_not_overlap(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    head = "replicas: 2\nfailures:\n  - {replica: 0, at_s: 5}\n"
    for line, complaint in (
        (
            "  - {replica: 0, at_s: 9, for_s: 1}\n",
            "fleet.yaml:4: failures[1].at_s falls into or touches",
        ),
        ("  - {replica: 2, at_s: 1}\n", "failures[1].replica is 2, and replicas run from 0 to 1"),
        ("  - {replica: 1}\n", "fleet.yaml:4: failures[1] needs replica and at_s"),
        ("  - {replica: 1, at_s: 1, for_s: 0}\n", "failures[1].for_s is 0 and must be positive"),
        ("retry: {attempts: 0}\n", "retry.attempts is 0"),
    ):
        path.write_text(head + line)
        with pytest.raises(UserError) as caught:
            read_fleet(path)
        assert complaint in str(caught.value)
    path.write_text(head + "  - {replica: 1, at_s: 1, for_s: 2.5}\nretry: {refused: true}\n")
    spec = read_fleet(path)
    assert spec.failures == (Outage(0, 5.0), Outage(1, 1.0, 2.5))
    assert spec.retry == Retry(2, 0.0, True)
