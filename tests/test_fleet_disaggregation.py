"""Prefill and decode on engines of their own: what the hand-over costs, and that nothing is lost by it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fixed_step import Fixed
from hypothesis import given, settings
from hypothesis import strategies as st

from vsim.errors import UserError
from vsim.sim.cluster import ReplicaSpec
from vsim.sim.config import KVGroup, SchedulerConfig
from vsim.sim.engine import simulate
from vsim.sim.explain import breakdown
from vsim.sim.fleet.read import read_fleet
from vsim.sim.fleet.simulate import _Fleet, simulate_fleet
from vsim.sim.fleet.spec import Admission, Disaggregation, FleetSpec, Network
from vsim.sim.router import named_route
from vsim.sim.run import FINISHED, Run
from vsim.sim.summary import summarize
from vsim.traces.trace import Trace

MS = 1_000_000
INF = float("inf")
CONFIG = SchedulerConfig(num_gpu_blocks=200)


def pools(link: Disaggregation, **more: object) -> FleetSpec:
    return FleetSpec(replicas=link.replicas, disaggregation=link, **more)  # type: ignore[arg-type]


def run_of(
    trace: Trace, link: Disaggregation, config: SchedulerConfig = CONFIG, block_bytes: int = 1000
) -> Run:
    return simulate_fleet(trace, ReplicaSpec(config, Fixed()), pools(link), block_bytes=block_bytes)


def alone(output_tokens: int = 10, prompt_tokens: int = 100) -> Trace:
    return Trace.of([0.0], [prompt_tokens], [output_tokens])


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("output_tokens", [1, 2, 10])
def test_over_a_link_that_takes_no_time_one_request_is_served_as_by_one_engine(
    is_async: bool, output_tokens: int
) -> None:
    config = SchedulerConfig(num_gpu_blocks=200, async_scheduling=is_async)
    whole = simulate(alone(output_tokens), config, Fixed())
    split = run_of(alone(output_tokens), Disaggregation(1, 1, INF), config)
    for name in ("first_scheduled_ns", "first_token_ns", "output_tokens", "status"):
        assert split.requests[name].tolist() == whole.requests[name].tolist(), name
    if not is_async:
        assert split.requests["finish_ns"].tolist() == whole.requests["finish_ns"].tolist()


def test_a_transfer_takes_its_bytes_over_the_bandwidth_and_the_latency() -> None:
    # 100 tokens are 7 blocks of 16: 7 MB of 1 MB each at 0.1 GB/s are 70 ms.
    near = run_of(alone(), Disaggregation(1, 1, INF))
    for latency_s, bandwidth, more_ms in ((0.0, 0.1, 70), (0.005, INF, 5), (0.005, 0.1, 75)):
        link = Disaggregation(1, 1, bandwidth, latency_s)
        far = run_of(alone(), link, block_bytes=1_000_000)
        assert far.requests["first_token_ns"].tolist() == near.requests["first_token_ns"].tolist()
        later = far.requests["finish_ns"] - near.requests["finish_ns"]
        assert later.tolist() == [more_ms * MS]
        assert far.counters["kv_transferred_blocks"] == 7
        assert far.counters["kv_transfer_ns"] == more_ms * MS
        assert far.requests["handed_over_ns"].tolist() == [10 * MS]
    assert (far.requests["prefill_replica"][0], far.requests["replica"][0]) == (0, 1)


def test_the_first_token_may_be_the_decode_engines() -> None:
    link = Disaggregation(1, 1, 0.1, first_token="decode")
    run = run_of(alone(), link, block_bytes=1_000_000)
    # Prefill 10 ms, transfer 70 ms, and one step for the prompt's last token again.
    assert run.requests["first_token_ns"].tolist() == [90 * MS]
    assert run.requests["finish_ns"].tolist() == [180 * MS]
    assert run.requests["output_tokens"].tolist() == [10]
    assert int(run.steps["emitted"].sum()) == 10


def test_transfers_into_one_engine_take_turns_and_into_two_do_not() -> None:
    trace = Trace.of([0.0, 0.0], [100, 100], [2, 2])
    one = run_of(trace, Disaggregation(1, 1, 0.1), block_bytes=1_000_000)
    two = run_of(trace, Disaggregation(1, 2, 0.1), block_bytes=1_000_000)
    # Both prompts are through at 10 ms.
    assert one.requests["finish_ns"].tolist() == [90 * MS, 160 * MS]
    assert two.requests["finish_ns"].tolist() == [90 * MS, 90 * MS]


def test_prefill_keeps_the_blocks_until_they_have_been_read() -> None:
    # Room for one prompt at a time (7 blocks of 9): the second one waits for the first one's transfer.
    trace = Trace.of([0.0, 0.0], [100, 100], [2, 2])
    config = SchedulerConfig(num_gpu_blocks=10, enable_prefix_caching=False)
    run = run_of(trace, Disaggregation(1, 1, 0.1), config, block_bytes=1_000_000)
    assert run.requests["first_scheduled_ns"].tolist() == [0, 80 * MS]
    assert (run.requests["status"] == FINISHED).all()


def test_what_the_decode_engine_has_in_its_prefix_cache_is_not_sent_again() -> None:
    import dataclasses

    n = 2
    trace = dataclasses.replace(
        Trace.of([0.0, 1.0], [100, 100], [5, 5]),
        prefix_ids=np.tile(np.arange(6), n),
        prefix_offsets=np.arange(0, 6 * n + 1, 6),
        prefix_block_tokens=16,
    )
    run = run_of(trace, Disaggregation(1, 1, 0.1), block_bytes=1_000_000)
    # 96 of 100 tokens are shared: one block of the second request is left to send.
    assert run.counters["kv_transferred_blocks"] == 7 + 1
    assert run.requests["cached_tokens"].tolist() == [0, 96]


@pytest.mark.parametrize("first_token", ["prefill", "decode"])
def test_the_causes_of_a_latency_still_add_up(first_token: str) -> None:
    rng = np.random.default_rng(4)
    trace = Trace.of(
        np.sort(rng.uniform(0, 1, 60)).tolist(), [100] * 60, rng.integers(2, 30, 60).tolist()
    )
    link = Disaggregation(1, 2, 0.05, first_token=first_token)  # type: ignore[arg-type]
    run = run_of(trace, link, SchedulerConfig(num_gpu_blocks=80), block_bytes=500_000)
    columns = run.requests
    for by, end in (("ttft", "first_token_ns"), ("e2el", "finish_ns")):
        parts = breakdown(run, by)
        assert (parts >= 0).all()
        assert parts.sum(axis=1).tolist() == (columns[end] - columns["sent_ns"]).tolist()
    # Before the first token the prefill engine's queue is what counts.
    waited = breakdown(run, "ttft")[:, :5].sum(axis=1)
    assert waited.tolist() == (columns["first_scheduled_ns"] - columns["sent_ns"]).tolist()


def test_an_idle_decode_engine_holds_nothing() -> None:
    run = run_of(
        Trace.of([0.0, 5.0], [100, 100], [10, 10]), Disaggregation(1, 1, 0.1), block_bytes=1_000_000
    )
    told = summarize(run)
    assert told["kv_blocks_used_peak"] == 7
    # Two requests of 160 ms, each with 7 blocks somewhere, in 5.17 s.
    assert told["kv_usage_mean"] * 2 * 199 * 5.17 < 2 * 7 * 0.17


@settings(max_examples=40)
@given(
    seed=st.integers(0, 1 << 20),
    link=st.builds(
        Disaggregation,
        st.integers(1, 2),
        st.integers(1, 2),
        st.sampled_from((INF, 1.0, 0.01)),
        st.sampled_from((0.0, 0.002)),
        st.sampled_from(("prefill", "decode")),
        st.sampled_from((None, "least-tokens", "kv-aware")),
    ),
    is_async=st.booleans(),
    caching=st.booleans(),
    when_full=st.sampled_from(("wait", "reject")),
    most=st.none() | st.integers(1, 5),
)
def test_nothing_is_lost_between_the_pools(
    seed: int, link: Disaggregation, is_async: bool, caching: bool, when_full: str, most: int | None
) -> None:
    rng = np.random.default_rng(seed)
    n = 30
    trace = Trace.of(
        np.sort(rng.uniform(0, 1, n)).tolist(),
        rng.integers(1, 120, n).tolist(),
        rng.integers(1, 40, n).tolist(),
    )
    config = SchedulerConfig(
        num_gpu_blocks=int(rng.integers(13, 40)),
        enable_prefix_caching=caching,
        async_scheduling=is_async,
        max_num_seqs=8,
    )
    limits = Admission(max_in_flight_per_replica=most, when_full=when_full)  # type: ignore[arg-type]
    spec = pools(link, admission=limits, network=Network(0.01))
    replica = ReplicaSpec(config, Fixed())
    fleet = _Fleet(trace, replica, spec, named_route("round-robin"), 0, None, 1, 500_000)
    run = fleet.run(None, None)
    assert run.ended_early is None
    done = run.requests["status"] == FINISHED
    assert done.all() or (when_full == "reject" and most is not None)
    assert (run.requests["output_tokens"] == trace.output_tokens)[done].all()
    assert int(run.itl_count.sum()) == int((trace.output_tokens[done] - 1).sum())
    first, finish = run.requests["first_token_ns"][done], run.requests["finish_ns"][done]
    assert (run.requests["first_scheduled_ns"][done] < first).all()
    assert (first <= finish).all()
    for slot in fleet.slots:
        scheduler = slot.engine.scheduler
        assert not slot.requests
        assert scheduler.num_free_blocks == scheduler.num_usable_blocks
        assert scheduler.num_kv_tokens == 0


def test_engines_whose_kv_cannot_be_handed_over_are_refused() -> None:
    link = Disaggregation(1, 1, INF)
    for config, complaint in (
        (SchedulerConfig(engine="v0"), "drop --engine v0"),
        (SchedulerConfig(kv_groups=(KVGroup(), KVGroup("swa", 64))), "full attention only"),
    ):
        with pytest.raises(UserError, match=complaint):
            run_of(alone(), link, config)


def test_the_file_may_ask_for_pools(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(
        "disaggregation:\n  prefill_replicas: 1\n  decode_replicas: 3\n  bandwidth_gb_s: 25\n"
        "  first_token: decode\n  decode_route: kv-aware\n"
    )
    spec = read_fleet(path)
    assert spec.disaggregation == Disaggregation(1, 3, 25.0, 0.0, "decode", "kv-aware")
    assert spec.replicas == 4
    link = "disaggregation: {prefill_replicas: 1, decode_replicas: 1, bandwidth_gb_s: 1}\n"
    for text, complaint in (
        (
            "disaggregation: {prefill_replicas: 1}\n",
            "disaggregation needs prefill_replicas, decode",
        ),
        ("replicas: 3\n" + link, "fleet.yaml:1: replicas is 3, and the pools have 2 together"),
        ("failures: [{replica: 0, at_s: 1}]\n" + link, "failures beside disaggregation"),
        ("autoscale: {max_replicas: 2, target: 1}\n" + link, "autoscale beside disaggregation"),
        (link.replace("1}", "0}"), "disaggregation.bandwidth_gb_s is 0"),
    ):
        path.write_text(text)
        with pytest.raises(UserError) as caught:
            read_fleet(path)
        assert complaint in str(caught.value)
