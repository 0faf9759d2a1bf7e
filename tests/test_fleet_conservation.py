"""Everything a fleet file can ask for at once: no request, no token, no block and no order of time is lost."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import os
from collections.abc import Iterator

import numpy as np
import pytest
from fixed_step import Fixed

from vsim.models.step import StepShape
from vsim.sim.cluster import ReplicaSpec
from vsim.sim.config import SchedulerConfig
from vsim.sim.engine import Replica
from vsim.sim.explain import PARTS, breakdown
from vsim.sim.fleet.autoscale import METRICS, Autoscale
from vsim.sim.fleet.disaggregation import FleetReplica
from vsim.sim.fleet.report import replicas_over_time
from vsim.sim.fleet.simulate import _Fleet, simulate_fleet
from vsim.sim.fleet.spec import (
    Admission,
    Disaggregation,
    FleetSpec,
    Network,
    Outage,
    Retry,
    TenantLimit,
    Tenants,
)
from vsim.sim.report import render_report
from vsim.sim.router import ROUTES, least_requests, named_route
from vsim.sim.run import ABORTED, FINISHED, REJECTED, Run
from vsim.sim.summary import summarize, summary_json
from vsim.sim.table import render_table
from vsim.traces.trace import Sessions, Trace, TraceSource

CASES = int(os.environ.get("VSIM_FLEET_CASES", "40"))
SECOND = 1_000_000_000


def random_trace(rng: np.random.Generator) -> Trace:
    """Arrivals that meet, prompts that share beginnings, turns that wait for turns, tenants, early ends."""
    n = int(rng.integers(1, 60))
    span = int(rng.choice([0, 1, 5])) * SECOND
    arrival = np.sort(rng.integers(0, span + 1, n))
    if rng.random() < 0.3:
        arrival = arrival // (SECOND // 10) * (SECOND // 10)
    prompt = rng.integers(1, 120, n)
    output = rng.integers(1, 50, n)
    after = np.array([rng.integers(-1, i) if i and rng.random() < 0.5 else -1 for i in range(n)])
    offsets = np.arange(n + 1) * 2
    return Trace(
        arrival_ns=(arrival - arrival[0]).astype(np.int64),
        prompt_tokens=prompt.astype(np.int64),
        output_tokens=output.astype(np.int64),
        source=TraceSource("random", "inline"),
        max_tokens=output + rng.integers(-3, 5, n).clip(1 - output) if rng.random() < 0.3 else None,
        tenant=rng.integers(0, 2, n).astype(np.int32),
        tenant_names=("acme", "blue"),
        prefix_offsets=offsets if (shared := rng.random() < 0.5) else None,
        prefix_ids=rng.integers(0, 5, 2 * n) if shared else None,
        prefix_block_tokens=16 if shared else 0,
        session=rng.integers(-1, 5, n).astype(np.int32) if rng.random() < 0.5 else None,
        sessions=Sessions(after, np.where(after >= 0, rng.integers(0, SECOND, n), 0))
        if rng.random() < 0.4
        else None,
        aborted=rng.random(n) < 0.2 if rng.random() < 0.2 else None,
    )


def random_outages(rng: np.random.Generator, replicas: int, hide: bool) -> tuple[Outage, ...]:
    """At odd times: before the first arrival, at the same instant as others, long after everything."""
    kept: list[Outage] = []
    for _ in range(int(rng.integers(0, 5))):
        one = Outage(
            int(rng.integers(0, replicas)),
            float(rng.choice([0.0, 0.1, 0.5, round(float(rng.random()) * 5, 3), 1e6])),
            None if rng.random() < 0.3 else float(rng.choice([0.001, 0.1, 1.0, 30.0])),
            float(rng.choice([0.0, 0.05, 50.0])) if hide else 0.0,
        )
        others = [o for o in kept if o.replica == one.replica]
        if all(one.at_s > o.end_s or o.at_s > one.end_s for o in others):
            kept.append(one)
    return tuple(kept)


def random_limit(rng: np.random.Generator) -> TenantLimit:
    rate = float(rng.choice([20.0, 500.0])) if rng.random() < 0.5 else None
    return TenantLimit(
        int(rng.integers(1, 5)) if rate is None or rng.random() < 0.5 else None,
        rate,
        float(rng.choice([1.0, 300.0])) if rate is not None and rng.random() < 0.7 else None,
        str(rng.choice(["reject", "wait"])),  # type: ignore[arg-type]
    )


def random_fleet(rng: np.random.Generator) -> FleetSpec:
    def maybe(low: int, high: int) -> int | None:
        return int(rng.integers(low, high)) if rng.random() < 0.3 else None

    pools = rng.random() < 0.2
    scaled = not pools and rng.random() < 0.4
    replicas = int(rng.integers(1, 4))
    most = replicas + int(rng.integers(0, 4)) if scaled else replicas
    link = Disaggregation(
        int(rng.integers(1, 3)),
        int(rng.integers(1, 3)),
        float(rng.choice([0.01, 1.0])),
        float(rng.choice([0.0, 0.003])),
        str(rng.choice(["prefill", "decode"])),  # type: ignore[arg-type]
    )
    return FleetSpec(
        replicas=link.replicas if pools else replicas,
        network=Network(*rng.choice([0.0, 0.02], 2).tolist()),
        admission=Admission(
            maybe(1, 5),
            maybe(0, 9),
            maybe(0, 400),
            maybe(0, 9),
            maybe(1, 6),
            str(rng.choice(["reject", "wait"])),  # type: ignore[arg-type]
        ),
        failures=() if pools else random_outages(rng, most, True),
        drains=() if pools else random_outages(rng, most, False),
        retry=Retry(
            int(rng.integers(1, 4)), float(rng.choice([0.0, 0.2])), bool(rng.random() < 0.5)
        ),
        autoscale=Autoscale(
            1,
            most,
            float(rng.choice([0.5, 2.0])),
            str(rng.choice(["hpa", "threshold"])),  # type: ignore[arg-type]
            str(rng.choice(METRICS)),  # type: ignore[arg-type]
            sync_s=float(rng.choice([0.3, 1.0])),
            scrape_s=float(rng.choice([0.2, 1.0])),
            scrape_delay_s=float(rng.choice([0.0, 0.7])),
            cold_start_s=float(rng.choice([0.0, 1.5])),
            scale_down_window_s=float(rng.choice([0.0, 2.0])),
        )
        if scaled
        else None,
        disaggregation=link if pools else None,
        tenants=Tenants(
            random_limit(rng), {"acme": random_limit(rng)} if rng.random() < 0.5 else {}
        )
        if rng.random() < 0.4
        else None,
    )


def simulated(seed: int) -> tuple[_Fleet, Run, list[int]]:
    rng = np.random.default_rng(seed)
    trace, spec = random_trace(rng), random_fleet(rng)
    config = SchedulerConfig(
        num_gpu_blocks=int(rng.integers(13, 50)),
        enable_prefix_caching=bool(rng.random() < 0.5),
        async_scheduling=bool(rng.random() < 0.5),
        max_num_seqs=int(rng.choice([1, 4, 16])),
    )
    gate = int(rng.integers(1, 12)) if rng.random() < 0.4 else None
    route = named_route(str(rng.choice(ROUTES)), seed)
    fleet = _Fleet(trace, ReplicaSpec(config, Fixed()), spec, route, seed, gate, 1, 100_000)
    ends: list[int] = []
    told = fleet.client.finished

    def count(index: int) -> None:
        ends.append(index)
        told(index)

    fleet.client.finished = count  # type: ignore[method-assign]
    run = fleet.run(None, None)
    return fleet, dataclasses.replace(run, config={"fleet": spec.as_dict()}), ends


@pytest.mark.parametrize("seed", range(CASES))
def test_nothing_is_lost_in_any_fleet(seed: int) -> None:
    fleet, run, ends = simulated(seed)
    trace, columns = fleet.trace, run.requests
    status = columns["status"]
    done, over = status == FINISHED, np.isin(status, (FINISHED, REJECTED, ABORTED))

    # Every request has exactly one outcome, those that failed with a reason.
    assert sorted(ends) == np.flatnonzero(over).tolist()
    if run.ended_early is None:
        assert over.all()
    else:
        assert "wait at the router" in run.ended_early, run.ended_early
    left = np.zeros(len(trace), bool) if trace.aborted is None else trace.aborted
    assert (columns["reason"][over & ~done & ~left] >= 0).all()
    assert (columns["reason"][done] == -1).all()

    # Tokens: each answer has its length, every gap between them is counted once.
    wanted = (
        trace.output_tokens
        if trace.max_tokens is None
        else np.minimum(trace.output_tokens, trace.max_tokens)
    )
    assert (columns["output_tokens"][done] == wanted[done]).all()
    assert int(run.itl_count.sum()) == int((columns["output_tokens"][done] - 1).sum())

    if fleet.pools is None:
        served = status != ABORTED if trace.aborted is None else (status != ABORTED) | trace.aborted
        lost = run.counters.get("lost_output_tokens", 0)
        said = int(columns["output_tokens"][served & (columns["reason"] < 0)].sum())
        assert int(run.steps["emitted"].sum()) == said + lost
        if not fleet.template.config.async_scheduling and run.ended_early is None:
            ran = columns["first_scheduled_ns"] >= 0
            ran &= served & (columns["reason"] < 0)
            computed = (
                columns["prompt_tokens"] + columns["output_tokens"] - 1 - columns["cached_tokens"]
            )
            again = int(columns["recomputed_tokens"].sum())
            lost = run.counters.get("lost_tokens", 0)
            # A step that a failure cuts off is lost and among the steps it never was.
            cut_off = int(computed[ran].sum()) + again + lost - int(run.steps["tokens"].sum())
            failures = sum(event.kind == "replica_down" for event in run.events)
            assert 0 <= cut_off <= failures * fleet.template.config.max_num_batched_tokens

    # Time: in order, and the parts of a latency add up to it.
    marks = [
        columns[name]
        for name in ("arrival_ns", "sent_ns", "first_scheduled_ns", "first_token_ns", "finish_ns")
    ]
    if "routed_ns" in columns:
        marks.insert(2, columns["routed_ns"])
    for before, after in itertools.pairwise(marks):
        assert (before[done] <= after[done]).all()
    assert (columns["finish_ns"][over] >= columns["sent_ns"][over]).all()
    if len(run.steps["start_ns"]):
        parts = breakdown(run)
        assert parts.shape[1] == len(PARTS) and (parts >= 0).all()
        assert (parts.sum(1)[done] == (columns["finish_ns"] - columns["sent_ns"])[done]).all()
    assert [e.at_ns for e in run.events] == sorted(e.at_ns for e in run.events)

    # What still stands is empty, and its blocks are free.
    for slot in fleet.slots:
        assert not slot.requests
        scheduler = slot.engine.scheduler
        assert slot.down or scheduler.num_free_blocks == scheduler.num_usable_blocks
    assert not fleet.place

    # A turn goes out once the one before has its answer.
    if trace.sessions is not None:
        after = trace.sessions.after
        rows = np.flatnonzero((after >= 0) & (columns["sent_ns"] >= 0))
        earliest = columns["finish_ns"][after[rows]] + trace.sessions.think_ns[rows]
        assert (columns["sent_ns"][rows] >= earliest).all()

    # Replicas that get requests are paid for, and none beyond those that may exist.
    _, serving, paid = replicas_over_time(run)
    assert (serving <= paid).all() and (serving >= 0).all()
    assert paid.max() <= fleet.spec.slots

    summary = summarize(run)
    assert sum(summary["status_counts"].values()) == len(trace)
    summary_json(summary)
    render_table(summary)
    render_report(run, summary)

    again = simulated(seed)[1]
    assert all(again.requests[name].tobytes() == columns[name].tobytes() for name in columns)
    assert again.events == run.events and again.end_ns == run.end_ns


class Drawn(Fixed):
    """Service times given one by one: one step a request."""

    def __init__(self, seconds: Iterator[float]) -> None:
        super().__init__()
        self._seconds = seconds

    def device_seconds(self, shape: StepShape) -> float:
        return next(self._seconds)


@pytest.mark.parametrize(("kind", "servers"), [("D", 1), ("M", 1), ("M", 3)])
def test_a_fleet_whose_router_holds_the_queue_waits_as_the_books_say(
    kind: str, servers: int
) -> None:
    """M/M/c and M/D/1, request by request, by the Kiefer-Wolfowitz recursion (whose mean is within 2 % of
    Erlang C and Pollaczek-Khinchine: test_cluster.py)."""
    n, service_s = 3000, 0.010
    rng = np.random.default_rng(11)
    arrival_ns = np.round(np.cumsum(rng.exponential(service_s / (0.6 * servers), n)) * 1e9)
    service_s_each = rng.exponential(service_s, n) if kind == "M" else np.full(n, service_s)
    run = simulate_fleet(
        Trace.of((arrival_ns / 1e9).tolist(), [1] * n, [1] * n),
        ReplicaSpec(
            SchedulerConfig(max_num_seqs=1, enable_prefix_caching=False),
            Drawn(iter(service_s_each.tolist())),
        ),
        FleetSpec(
            replicas=servers,
            admission=Admission(max_in_flight_per_replica=1, when_full="wait"),
        ),
        least_requests,
    )
    free = [0] * servers
    waits = []
    arrivals = run.requests["arrival_ns"].tolist()
    for arrived, served in zip(arrivals, np.round(service_s_each * 1e9).astype(int), strict=True):
        start = max(arrived, heapq.heappop(free))
        heapq.heappush(free, start + max(1, int(served)))
        waits.append(start - arrived)
    waited = run.requests["first_scheduled_ns"] - run.requests["arrival_ns"]
    assert waited.tolist() == waits


def test_an_engine_that_took_back_its_last_blocks_does_not_fall_asleep() -> None:
    """A decode engine of one seat: its request outgrows the cache beside pulled prompts, and starts over."""
    assert simulated(1)[1].ended_early is None


def test_a_drain_that_ends_while_the_replica_is_down_opens_nothing() -> None:
    spec = FleetSpec(replicas=2, failures=(Outage(0, 0.2),), drains=(Outage(0, 0.1, 0.3),))
    trace = Trace.of([i / 10 for i in range(10)], [16] * 10, [5] * 10)
    run = simulate_fleet(trace, ReplicaSpec(SchedulerConfig(num_gpu_blocks=40), Fixed()), spec)
    run = dataclasses.replace(run, config={"fleet": spec.as_dict()})
    assert [e.kind for e in run.events] == ["drain_begins", "replica_down", "drain_ends"]
    assert replicas_over_time(run)[1].tolist() == [2, 1, 1, 1]


@pytest.mark.parametrize("seed", range(20))
def test_looks_that_can_find_nothing_may_be_left_out(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine waiting for a transfer looks every millisecond; the run is the same without those looks."""
    rng = np.random.default_rng(1000 + seed)
    trace = random_trace(rng)
    link = Disaggregation(
        1,
        int(rng.integers(1, 3)),
        float(rng.choice([0.001, 0.01, 1.0])),
        float(rng.choice([0.0, 0.003])),
        "prefill",
    )
    spec = FleetSpec(replicas=link.replicas, disaggregation=link, network=Network(0.01))
    config = SchedulerConfig(num_gpu_blocks=30, async_scheduling=bool(seed % 2), max_num_seqs=4)
    replica = ReplicaSpec(config, Fixed(), frontend_s=float(rng.choice([0.0, 0.0123])))

    def run() -> Run:
        return simulate_fleet(trace, replica, spec, least_requests, block_bytes=100_000)

    shortened = run()
    monkeypatch.setattr(FleetReplica, "_wait_for_change", Replica._wait_for_change)
    plain = run()
    assert all(
        shortened.requests[name].tobytes() == column.tobytes()
        for name, column in plain.requests.items()
    )
    # Two engines' steps at the same instant may stand in either order.
    mine, theirs = (
        np.lexsort((run.steps["replica"], run.steps["end_ns"])) for run in (shortened, plain)
    )
    for name, column in plain.steps.items():
        assert shortened.steps[name][mine].tolist() == column[theirs].tolist(), name
    assert (shortened.end_ns, shortened.counters) == (plain.end_ns, plain.counters)
