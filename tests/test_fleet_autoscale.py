"""The autoscaler's steps against hand-computed ones, and what a fleet does with them."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from fixed_step import Fixed

from vsim.errors import UserError
from vsim.sim.bill import bill, mean_replicas
from vsim.sim.cluster import ReplicaSpec
from vsim.sim.config import SchedulerConfig
from vsim.sim.fleet.autoscale import Autoscale, Autoscaler
from vsim.sim.fleet.read import read_fleet
from vsim.sim.fleet.simulate import simulate_fleet
from vsim.sim.fleet.spec import Admission, FleetSpec, Outage, Retry
from vsim.sim.run import FINISHED, Run
from vsim.sim.summary import summarize
from vsim.traces.trace import Trace

S = 1_000_000_000


def scaler(**more: object) -> Autoscaler:
    return Autoscaler(Autoscale(1, 20, 10.0, **more))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("current", "ready", "unready", "wanted"),
    [
        (2, [20.0, 10.0], 0, 3),  # ceil(2 x 15 / 10)
        (2, [10.9, 10.9], 0, 2),  # within the tolerance of a tenth
        (2, [11.1, 11.1], 0, 3),  # ceil(2.22)
        (3, [12.0, 12.0, 12.0], 0, 4),  # ceil(3.6)
        (1, [100.0], 0, 5),  # 10, but no more than 4 pods or double within 15 s
        (8, [100.0] * 8, 0, 16),  # 80, but no more than double
        (4, [20.0, 20.0], 2, 4),  # two that start count as idle: the mean is on target
        (4, [40.0, 40.0], 2, 8),  # mean 20 over four
        (3, [15.0, 15.0], 1, 3),  # 30 over three is on target
        (3, [20.0, None, 20.0], 0, 4),  # not scraped yet: idle on the way up, ceil(40 / 30 x 3)
        (2, [None, None], 0, 2),  # no metric, no opinion
    ],
)
def test_one_look_of_the_autoscaler(
    current: int, ready: list[float | None], unready: int, wanted: int
) -> None:
    assert scaler().decide(15.0, current, ready, unready) == wanted


def test_going_down_takes_the_largest_recommendation_of_five_minutes() -> None:
    one = scaler()
    assert one.decide(0.0, 4, [10.0] * 4, 0) == 4
    # From now on a quarter of the load: 1 would do, and the 4 of time 0 counts until it is 300 s old.
    for now in range(15, 300, 15):
        assert one.decide(float(now), 4, [2.5] * 4, 0) == 4
    assert one.decide(300.0, 4, [2.5] * 4, 0) == 1


def test_a_look_that_recommends_more_holds_the_way_down_up() -> None:
    one = scaler(scale_down_window_s=60.0)
    assert one.decide(0.0, 4, [2.0] * 4, 0) == 4  # what it found counts as recommended
    assert one.decide(45.0, 4, [7.0] * 4, 0) == 4  # ceil(2.8) = 3, but 4 is 45 s old
    assert one.decide(60.0, 4, [2.0] * 4, 0) == 3  # 1, and 3 is 15 s old
    assert one.decide(105.0, 3, [2.0] * 3, 0) == 1


def test_going_up_may_have_a_window_too() -> None:
    one = scaler(scale_up_window_s=30.0)
    assert one.decide(0.0, 2, [10.0, 10.0], 0) == 2
    assert one.decide(15.0, 2, [20.0, 20.0], 0) == 2
    assert one.decide(30.0, 2, [20.0, 20.0], 0) == 4


def test_the_bounds_hold() -> None:
    one = Autoscaler(Autoscale(2, 3, 10.0, scale_down_window_s=0.0))
    assert one.decide(15.0, 2, [50.0, 50.0], 0) == 3
    assert one.decide(30.0, 3, [0.0] * 3, 0) == 2


def test_more_than_ten_waiting_per_gpu_is_one_replica_more() -> None:
    one = scaler(rule="threshold", scale_in_below=1.0, scale_down_window_s=30.0)
    assert one.decide(15.0, 2, [10.0, 10.0], 0) == 2  # ten is not more than ten
    assert one.decide(30.0, 2, [10.0, 10.5], 0) == 3
    assert one.decide(45.0, 3, [14.0, 14.0], 1) == 3  # 28 on three, one of them starting
    assert one.decide(90.0, 3, [0.0, 0.0, 0.0], 0) == 2
    assert one.decide(135.0, 2, [2.0, 2.0], 0) == 2  # neither much nor little


def test_the_kv_cache_may_be_the_measure() -> None:
    one = Autoscaler(Autoscale(1, 9, 0.8, rule="threshold", metric="kv_usage"))
    # One that starts has an empty cache, which relieves nobody yet.
    assert one.decide(15.0, 2, [0.9], 1) == 3


ONE_AT_A_TIME = SchedulerConfig(max_num_seqs=1, enable_prefix_caching=False, num_gpu_blocks=600)


def load(count: int, every_s: float, output_tokens: int = 100) -> Trace:
    return Trace.of([i * every_s for i in range(count)], [16] * count, [output_tokens] * count)


def run_of(trace: Trace, spec: FleetSpec, **more: object) -> Run:
    return simulate_fleet(trace, ReplicaSpec(ONE_AT_A_TIME, Fixed()), spec, **more)  # type: ignore[arg-type]


def test_a_fleet_grows_under_load_and_pays_from_the_order_to_the_end() -> None:
    # A request takes 1 s; two a second come. The queue grows by one a second.
    spec = FleetSpec(
        replicas=1,
        autoscale=Autoscale(
            1, 4, 10.0, rule="threshold", cold_start_s=30.0, scale_in_below=0.0, scrape_delay_s=1.0
        ),
    )
    run = run_of(load(200, 0.5), spec)
    assert (run.requests["status"] == FINISHED).all()
    # At 15 s some 15 wait, seen by the scrape of 15 s, known at 16, acted upon at 30, ready at 60. At 45 s
    # the 30 seen at 30 s count for two.
    told = [(e.at_ns // S, e.kind, e.replica) for e in run.events]
    assert told[:4] == [
        (30, "replica_asked_for", 1),
        (45, "replica_asked_for", 2),
        (60, "replica_asked_for", 3),
        (60, "replica_ready", 1),
    ]
    began = {replica: at for at, kind, replica in told if kind == "replica_asked_for"}
    end = run.end_ns
    paid = end + sum(end - at * S for at in began.values())
    assert run.counters["replica_ns"] == paid
    first = {r: run.requests["first_scheduled_ns"][run.requests["replica"] == r] for r in (1, 2)}
    assert first[1].min() >= 60 * S
    assert first[2].min() >= 75 * S


def test_one_replica_too_many_finishes_what_it_has_and_is_paid_until_then() -> None:
    spec = FleetSpec(
        replicas=2,
        autoscale=Autoscale(
            1, 2, 4.0, metric="in_flight_per_replica", scale_down_window_s=20.0, scrape_s=1.0
        ),
    )
    # Two long requests of 60 s and 50 s, and nothing else comes: from 15 s on one replica would do.
    run = run_of(Trace.of([0.0, 0.0], [16] * 2, [6000, 5000]), spec)
    told = [(e.at_ns / S, e.kind, e.replica) for e in run.events]
    # The two it found at its first look count until 45 s.
    assert told == [(45.0, "replica_leaves", 1), (50.0, "replica_gone", 1)]
    assert run.counters["replica_ns"] == (60 + 50) * S


def test_nobody_waits_for_ever_for_an_autoscaler_that_does_nothing() -> None:
    spec = FleetSpec(
        replicas=1,
        admission=Admission(when_full="wait"),
        failures=(Outage(0, 0.0),),
        autoscale=Autoscale(1, 1, 10.0),
    )
    run = run_of(Trace.of([1.0, 2.0], [16, 16], [5, 5]), spec)
    assert run.ended_early is not None
    assert "2 requests wait at the router" in run.ended_early


@pytest.mark.parametrize("seed", range(6))
def test_everyone_ends_once_whatever_comes_and_goes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = 150
    trace = Trace.of(
        np.sort(rng.uniform(0, 60, n)).tolist(),
        rng.integers(1, 100, n).tolist(),
        rng.integers(1, 200, n).tolist(),
    )
    spec = FleetSpec(
        replicas=2,
        admission=Admission(when_full="wait", max_in_flight_per_replica=5),
        failures=(Outage(1, 10.0, 5.0), Outage(2, 21.0, 9.0), Outage(0, 30.0)),
        drains=(Outage(1, 40.0, 3.0),),
        retry=Retry(attempts=9),
        autoscale=Autoscale(
            1,
            5,
            2.0,
            rule=("hpa", "threshold")[seed % 2],  # type: ignore[arg-type]
            metric=("waiting_per_gpu", "in_flight_per_replica", "kv_usage")[seed % 3],  # type: ignore[arg-type]
            sync_s=2.0,
            scrape_s=1.0,
            cold_start_s=3.0,
            scale_down_window_s=4.0,
        ),
    )
    run, again = run_of(trace, spec), run_of(trace, spec)
    assert (run.requests["status"] == FINISHED).all() or "wait at the router" in str(
        run.ended_early
    )
    done = run.requests["status"] == FINISHED
    assert (run.requests["output_tokens"] == trace.output_tokens)[done].all()
    assert run.events == again.events
    assert run.requests["finish_ns"].tobytes() == again.requests["finish_ns"].tobytes()
    slots = run.counters["replica_slots"]
    assert run.requests["replica"].max() < slots
    assert 0 < run.counters["replica_ns"] <= slots * run.end_ns


def test_the_file_may_ask_for_autoscaling(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(
        "autoscale:\n  min_replicas: 2\n  max_replicas: 6\n  metric: kv_usage\n  target: 0.8\n  cold_start_s: 90\n"
    )
    spec = read_fleet(path)
    assert spec.autoscale == Autoscale(2, 6, 0.8, metric="kv_usage", cold_start_s=90.0)
    assert spec.settled(1, "round-robin").replicas == 2
    for text, complaint in (
        ("autoscale: {max_replicas: 3}", "autoscale needs max_replicas and target"),
        ("autoscale: {max_replicas: 3, target: 0}", "autoscale.target is 0 and must be positive"),
        ("autoscale: {max_replicas: 3, target: 1, step: 2}", "step is for rule: threshold"),
        ("autoscale: {max_replicas: 1, min_replicas: 2, target: 1}", "is 1, below min_replicas=2"),
        ("replicas: 9\nautoscale: {max_replicas: 3, target: 1}", "fleet.yaml:1: replicas is 9"),
        ("autoscale: {max_replicas: 3, target: 1, metric: cpu}", "must be one of waiting_per_gpu"),
    ):
        path.write_text(text + "\n")
        with pytest.raises(UserError) as caught:
            read_fleet(path)
        assert complaint in str(caught.value)


def test_the_bill_counts_replica_seconds() -> None:
    spec = FleetSpec(
        replicas=2,
        autoscale=Autoscale(
            1, 2, 4.0, metric="in_flight_per_replica", scale_down_window_s=20.0, scrape_s=1.0
        ),
    )
    run = run_of(Trace.of([0.0, 0.0], [16] * 2, [6000, 5000]), spec)
    assert mean_replicas(run, 2) == Fraction(110, 60)
    told = bill(run, summarize(run), None, "A100-80GB", 4 * mean_replicas(run, 2), 2)
    assert told["gpu_hours"] == pytest.approx(4 * 110 / 3600)


def test_the_way_up_starts_from_what_there_was_before_it_went_down() -> None:
    """horizontal.go calculateScaleUpLimitWithScalingRules: replicas deleted within the period count back in."""
    spec = Autoscale(1, 20, 1.0, scale_down_window_s=0.0, max_up_pods=1, max_up_percent=0.0)
    scaler = Autoscaler(spec)
    assert scaler.decide(0.0, 5, [0.5] * 5, 0) == 3
    assert scaler.decide(1.0, 3, [3.0] * 3, 0) == 6
    # 15 s later both changes are forgotten: one more than there are.
    assert scaler.decide(30.0, 6, [3.0] * 6, 0) == 7
