"""A fleet with limits and a network: what it refuses, what a client sees, and that asking for nothing changes nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fixed_step import Fixed

from vsim.errors import UserError
from vsim.models.step import StepShape
from vsim.sim.cluster import ReplicaSpec, simulate_cluster
from vsim.sim.config import SchedulerConfig
from vsim.sim.fleet.read import read_fleet
from vsim.sim.fleet.simulate import simulate_fleet
from vsim.sim.fleet.spec import Admission, FleetSpec, Network
from vsim.sim.router import ROUTES, least_requests, named_route
from vsim.sim.run import FINISHED, REJECTED, Run
from vsim.sim.summary import rejected_reasons, summarize
from vsim.traces.trace import Trace

ONE_AT_A_TIME = SchedulerConfig(max_num_seqs=1, enable_prefix_caching=False)


def burst(count: int, output_tokens: int = 10) -> Trace:
    return Trace.of([0.0] * count, [16] * count, [output_tokens] * count)


def poisson(count: int = 80, rate: float = 60.0, seed: int = 3) -> Trace:
    rng = np.random.default_rng(seed)
    return Trace.of(
        np.cumsum(rng.exponential(1 / rate, count)).tolist(),
        rng.integers(1, 200, count).tolist(),
        rng.integers(1, 30, count).tolist(),
    )


def fleet(
    trace: Trace, spec: FleetSpec, config: SchedulerConfig | None = None, **more: object
) -> Run:
    replica = ReplicaSpec(config or SchedulerConfig(num_gpu_blocks=60), Fixed())
    return simulate_fleet(trace, replica, spec, **more)  # type: ignore[arg-type]


def same(one: Run, other: Run) -> None:
    for side in ("requests", "steps"):
        mine, theirs = getattr(one, side), getattr(other, side)
        assert mine.keys() == theirs.keys()
        for name in mine:
            assert mine[name].tobytes() == theirs[name].tobytes(), name
    assert one.itl_ns.tobytes() == other.itl_ns.tobytes()
    assert one.itl_count.tobytes() == other.itl_count.tobytes()
    assert (one.counters, one.end_ns, one.reasons) == (other.counters, other.end_ns, other.reasons)


@pytest.mark.parametrize("name", ROUTES)
@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("max_concurrency", [None, 5])
def test_a_fleet_that_asks_for_nothing_is_the_cluster(
    name: str, replicas: int, max_concurrency: int | None
) -> None:
    trace, config = poisson(), SchedulerConfig(num_gpu_blocks=60, async_scheduling=True)
    plain = simulate_cluster(
        trace,
        [ReplicaSpec(config, Fixed()) for _ in range(replicas)],
        named_route(name, 1),
        max_concurrency=max_concurrency,
    )
    spec = FleetSpec(replicas=replicas)
    assert spec.is_plain
    same(
        plain,
        fleet(trace, spec, config, route=named_route(name, 1), max_concurrency=max_concurrency),
    )


def test_a_full_queue_is_refused_and_the_rest_is_served() -> None:
    # One runs from the first step on; of the others, all at time 0, two may wait.
    run = fleet(
        burst(6),
        FleetSpec(replicas=1, admission=Admission(max_waiting_per_replica=2)),
        ONE_AT_A_TIME,
    )
    assert run.requests["status"].tolist() == [FINISHED] * 2 + [REJECTED] * 4
    assert rejected_reasons(run) == {"rejected_queue_full": 4}
    assert (run.requests["finish_ns"][2:] == 0).all()


def test_vllms_own_limits_count_what_vllm_counts() -> None:
    # In flight, running or not; and prompt tokens of requests without a first token.
    trace = Trace.of([0.0, 0.0, 0.0, 0.5], [100, 100, 100, 100], [10] * 4)
    run = fleet(trace, FleetSpec(replicas=1, admission=Admission(max_num_queued_reqs=2)))
    assert run.requests["status"].tolist() == [FINISHED, FINISHED, REJECTED, FINISHED]
    assert rejected_reasons(run) == {"rejected_max_num_queued_reqs": 1}
    # 0 < 150 and 100 < 150, but 200 >= 150; later nobody is in prefill.
    run = fleet(trace, FleetSpec(replicas=1, admission=Admission(max_num_queued_tokens=150)))
    assert run.requests["status"].tolist() == [FINISHED, FINISHED, REJECTED, FINISHED]
    assert rejected_reasons(run) == {"rejected_max_num_queued_tokens": 1}


class Drawn(Fixed):
    """Service times given one by one: one step a request."""

    def __init__(self, seconds: Iterator[float]) -> None:
        super().__init__()
        self._seconds = seconds

    def device_seconds(self, shape: StepShape) -> float:
        return next(self._seconds)


@pytest.mark.parametrize(
    ("replicas", "places", "load", "blocked"),
    [
        (1, 2, 1.0, 1 / 3),  # M/M/1/2 at load 1: each of three states is as likely
        (1, 5, 0.9, 0.9**5 * 0.1 / (1 - 0.9**6)),  # M/M/1/5
        (3, 1, 2.0, (8 / 6) / (1 + 2 + 2 + 8 / 6)),  # Erlang's loss formula, three servers
    ],
)
def test_a_limited_queue_refuses_the_share_that_theory_says(
    replicas: int, places: int, load: float, blocked: float
) -> None:
    n = 20_000
    rng = np.random.default_rng(8)
    arrivals = np.cumsum(rng.exponential(0.010 / load, n))
    trace = Trace.of(arrivals.tolist(), [1] * n, [1] * n)
    run = simulate_fleet(
        trace,
        ReplicaSpec(ONE_AT_A_TIME, Drawn(iter(rng.exponential(0.010, n).tolist()))),
        FleetSpec(replicas=replicas, admission=Admission(max_num_queued_reqs=places)),
        least_requests,
    )
    assert (run.requests["status"] == REJECTED).mean() == pytest.approx(blocked, rel=0.03)


def test_the_router_refuses_beyond_the_fleets_queue() -> None:
    spec = FleetSpec(replicas=2, admission=Admission(max_waiting=3))
    run = fleet(burst(8), spec, ONE_AT_A_TIME)
    assert rejected_reasons(run) == {"rejected_fleet_queue_full": 5}


def test_a_router_that_holds_requests_back_serves_them_first_come_first_served() -> None:
    limits = Admission(max_in_flight_per_replica=2, when_full="wait")
    run = fleet(burst(9), FleetSpec(replicas=2, admission=limits), ONE_AT_A_TIME)
    assert (run.requests["status"] == FINISHED).all()
    assert (np.diff(run.requests["first_scheduled_ns"]) >= 0).all()
    assert run.steps["waiting"].max() == 1  # two in flight, one of them runs


def test_a_held_request_is_one_more_waiting_and_a_full_fleet_may_refuse_instead() -> None:
    limits = Admission(max_in_flight_per_replica=2)
    run = fleet(burst(9), FleetSpec(replicas=2, admission=limits), ONE_AT_A_TIME)
    assert rejected_reasons(run) == {"rejected_fleet_queue_full": 5}


def test_a_network_shifts_what_the_client_sees_and_nothing_else() -> None:
    trace = poisson(rate=5.0)
    near = fleet(trace, FleetSpec(replicas=1))
    far = fleet(trace, FleetSpec(replicas=1, network=Network(latency_s=0.040)))
    way = 40_000_000
    for name, shift in (("sent_ns", 0), ("first_scheduled_ns", way), ("first_token_ns", 2 * way)):
        assert (far.requests[name] - near.requests[name] == shift).all(), name
    assert (far.requests["finish_ns"] - near.requests["finish_ns"] == 2 * way).all()
    assert (far.requests["network_ns"] == way).all()
    assert far.itl_ns.tolist() == near.itl_ns.tolist()


def test_the_network_leaves_the_engines_own_timeline_alone() -> None:
    trace = poisson(rate=5.0)
    near = summarize(fleet(trace, FleetSpec(replicas=1)))
    far = summarize(fleet(trace, FleetSpec(replicas=1, network=Network(latency_s=0.040))))
    for name in ("kv_blocks_used_peak", "running_peak", "num_steps"):
        assert near[name] == far[name]
    # The same usage, over a run that is 80 ms longer.
    held = [s["kv_usage_mean"] * s["duration"] for s in (near, far)]
    assert held[1] == pytest.approx(held[0], rel=1e-9)


def test_in_a_closed_loop_the_next_request_waits_for_the_answers_way_back() -> None:
    trace = burst(3, output_tokens=1)
    spec = FleetSpec(replicas=1, network=Network(latency_s=0.040))
    run = fleet(trace, spec, max_concurrency=1)
    # 40 ms there, one step of 10 ms, 40 ms back.
    assert run.requests["sent_ns"].tolist() == [0, 90_000_000, 180_000_000]
    assert (run.requests["first_token_ns"] - run.requests["sent_ns"]).tolist() == [90_000_000] * 3


def test_jitter_is_drawn_per_request_by_the_seed() -> None:
    trace = poisson(2000, rate=500.0)
    spec = FleetSpec(replicas=1, network=Network(latency_s=0.010, jitter_s=0.005))
    config = SchedulerConfig(num_gpu_blocks=4000)
    one, again, other = (fleet(trace, spec, config, seed=seed) for seed in (1, 1, 2))
    same(one, again)
    assert (one.requests["network_ns"] != other.requests["network_ns"]).any()
    assert one.requests["network_ns"].min() >= 10_000_000
    # The mean of 2,000 exponentials is within a tenth of theirs.
    assert one.requests["network_ns"].mean() == pytest.approx(15e6, rel=0.1)


def test_a_turn_follows_a_refused_one_as_it_follows_an_answered_one() -> None:
    from vsim.traces.trace import Sessions

    trace = dataclasses.replace(
        burst(3),
        sessions=Sessions(np.array([-1, -1, 1]), np.array([0, 0, 1_000_000_000])),
    )
    spec = FleetSpec(replicas=1, admission=Admission(max_num_queued_reqs=1))
    run = fleet(trace, spec, ONE_AT_A_TIME)
    assert run.requests["status"].tolist() == [FINISHED, REJECTED, FINISHED]
    assert run.requests["sent_ns"].tolist() == [0, 0, 1_000_000_000]


# --- the file -------------------------------------------------------------------------------------------


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "fleet.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_fleet_file_says_what_it_says(tmp_path: Path) -> None:
    text = """
replicas: 3
route: least-tokens
network: {latency_s: 0.02, jitter_s: 5e-3}
admission:
  max_waiting_per_replica: 20
  max_waiting: 50
  when_full: wait
"""
    assert read_fleet(written(tmp_path, text)) == FleetSpec(
        name="fleet.yaml",
        replicas=3,
        route="least-tokens",
        network=Network(0.02, 0.005),
        admission=Admission(max_waiting_per_replica=20, max_waiting=50, when_full="wait"),
    )


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "fleet.yaml is empty"),
        ("- 1\n", "fleet.yaml:1: it must be a mapping"),
        ("replicas: 0\n", "fleet.yaml:1: replicas is 0 and must be at least 1"),
        ("replicas: 2\nreplicas: 3\n", "fleet.yaml:2: replicas stands twice"),
        ("replicas: two\n", "fleet.yaml:1: replicas must be a whole number, not 'two'"),
        ("replicas: true\n", "replicas must be a whole number, not True"),
        ("replicas: 1:30\n", "replicas must be a whole number, not '1:30'"),
        ("replicas: 99999999999999999999999\n", "replicas"),
        ("\nroute: shortest\n", "fleet.yaml:2: route names no route"),
        ("network:\n  latency: 3\n", "fleet.yaml:2: network.latency is not known here; known are"),
        ("network:\n  latency_s: -1\n", "fleet.yaml:2: network.latency_s is -1"),
        ("network: {latency_s: .nan}\n", "network.latency_s must be finite"),
        ("network: fast\n", "fleet.yaml:1: network must be a mapping"),
        ("admission:\n  when_full: drop\n", "admission.when_full must be one of reject, wait"),
        ("admission: {max_waiting: [1]}\n", "admission.max_waiting must be a single value"),
        ("replicas: &a 2\nroute: *a\n", "anchors and aliases"),
        ("replicas: [1\n", "not YAML"),
        ("replicas: !!python/object/apply:os.system ['true']\n", "fleet.yaml:1: replicas"),
        ("[" * 500, "fleet.yaml:1: nested too deep"),
        ("replicas: 2001-99-99\n", "replicas"),
        ("\x00", "fleet.yaml"),
    ],
)
def test_a_bad_file_is_one_sentence_with_its_line(
    tmp_path: Path, text: str, complaint: str
) -> None:
    with pytest.raises(UserError) as caught:
        read_fleet(written(tmp_path, text))
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(UserError, match=r"cannot read fleet file nowhere\.yaml"):
        read_fleet("nowhere.yaml")
