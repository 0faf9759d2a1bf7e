"""Tenants with limits: what each may have, who waits for it, and that the others do not notice."""

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
from vsim.sim.explain import KEYS, breakdown
from vsim.sim.fleet.describe import fleet_summary, tenant_lines
from vsim.sim.fleet.read import read_fleet
from vsim.sim.fleet.simulate import simulate_fleet
from vsim.sim.fleet.spec import Admission, FleetSpec, Network, Outage, Retry, TenantLimit, Tenants
from vsim.sim.fleet.tenants import Account
from vsim.sim.run import FINISHED, REJECTED, Run
from vsim.sim.summary import rejected_reasons, setting
from vsim.traces.trace import Trace

MS, S = 1_000_000, 1_000_000_000


def of_tenants(trace: Trace, codes: list[int], names: tuple[str, ...] = ("acme", "blue")) -> Trace:
    return dataclasses.replace(trace, tenant=np.array(codes, dtype=np.int32), tenant_names=names)


def run_of(trace: Trace, tenants: Tenants, **more: object) -> Run:
    spec = FleetSpec(replicas=1, tenants=tenants, **more)  # type: ignore[arg-type]
    return simulate_fleet(trace, ReplicaSpec(SchedulerConfig(num_gpu_blocks=600), Fixed()), spec)


def test_a_bucket_by_hand() -> None:
    account = Account(TenantLimit(tokens_per_s=10.0, burst_tokens=100.0))
    assert account.refusal(0) is None
    account.take(0, 250)  # anything left lets one in, and it pays in full
    assert account.refusal(0) == "rejected_tenant_tokens"
    assert account.ns_until_tokens(0) == 15 * S + 1
    assert account.refusal(15 * S) == "rejected_tenant_tokens"  # nothing, not something
    assert account.refusal(15 * S + 1) is None
    account.pay(16 * S, 0)
    assert account.tokens == pytest.approx(10.0)
    account.pay(1000 * S, 0)
    assert account.tokens == 100.0  # no more than the burst is saved up


def test_one_tenants_requests_go_one_at_a_time_and_the_other_does_not_notice() -> None:
    trace = of_tenants(Trace.of([0.0] * 4, [16] * 4, [10] * 4), [0, 0, 0, 1])
    limit = TenantLimit(max_in_flight=1, over_limit="wait")
    run = run_of(trace, Tenants(named={"acme": limit}))
    assert run.requests["finish_ns"].tolist() == [100 * MS, 200 * MS, 300 * MS, 100 * MS]
    assert run.requests["routed_ns"].tolist() == [0, 100 * MS, 200 * MS, 0]
    parts = breakdown(run)
    assert parts[:, KEYS.index("fleet")].tolist() == [0, 100 * MS, 200 * MS, 0]
    assert parts.sum(axis=1).tolist() == run.requests["finish_ns"].tolist()


def test_over_the_limit_may_be_refused_instead() -> None:
    trace = of_tenants(Trace.of([0.0] * 4, [16] * 4, [10] * 4), [0, 0, 1, 1])
    run = run_of(trace, Tenants(each=TenantLimit(max_in_flight=1)))
    assert run.requests["status"].tolist() == [FINISHED, REJECTED, FINISHED, REJECTED]
    assert rejected_reasons(run) == {"rejected_tenant_in_flight": 2}


def test_tokens_are_paid_for_prompt_first_and_the_answer_at_its_end() -> None:
    # 100 tokens to begin with, 10 a second. 90 for the first prompt, its answer of 30 at 0.3 s: -17 then.
    trace = of_tenants(Trace.of([0.0, 0.1, 0.4, 2.5], [90, 2, 2, 2], [30, 2, 2, 2]), [0] * 4)
    limit = TenantLimit(tokens_per_s=10.0, burst_tokens=100.0)
    refusing = run_of(trace, Tenants(named={"acme": limit}))
    assert refusing.requests["status"].tolist() == [FINISHED, FINISHED, REJECTED, FINISHED]
    assert rejected_reasons(refusing) == {"rejected_tenant_tokens": 1}
    waiting = run_of(trace, Tenants(named={"acme": dataclasses.replace(limit, over_limit="wait")}))
    assert (waiting.requests["status"] == FINISHED).all()
    # 100 - 90 - 2 - 2 - 30 = -24, ten a second since 0 (but full at 0): above nothing after 2.4 s.
    assert waiting.requests["routed_ns"][2] == pytest.approx(2.4 * S, abs=1000)


@settings(max_examples=40)
@given(seed=st.integers(0, 1 << 20), rate=st.sampled_from((50.0, 200.0, 1000.0)))
def test_nobody_gets_more_than_his_rate(seed: int, rate: float) -> None:
    rng = np.random.default_rng(seed)
    n = 60
    trace = of_tenants(
        Trace.of(
            np.sort(rng.uniform(0, 3, n)).tolist(),
            rng.integers(1, 60, n).tolist(),
            rng.integers(1, 30, n).tolist(),
        ),
        rng.integers(0, 2, n).tolist(),
    )
    limit = TenantLimit(tokens_per_s=rate, burst_tokens=80.0, over_limit="wait")
    run = run_of(trace, Tenants(each=limit))
    assert (run.requests["status"] == FINISHED).all()
    assert trace.tenant is not None
    for code in (0, 1):
        mine = trace.tenant == code
        when = run.requests["routed_ns"][mine]
        order = np.argsort(when, kind="stable")
        paid = np.cumsum(trace.prompt_tokens[mine][order])
        # Before the k-th went in, the prompts so far were within what there had been.
        before = paid - trace.prompt_tokens[mine][order]
        assert (before <= 80.0 + rate * when[order] / S).all()


@given(
    seed=st.integers(0, 1 << 20),
    each=st.builds(
        TenantLimit,
        st.none() | st.integers(1, 4),
        st.none() | st.sampled_from((100.0, 2000.0)),
        over_limit=st.sampled_from(("reject", "wait")),
    ),
    limits=st.builds(
        Admission,
        max_num_queued_reqs=st.none() | st.integers(1, 6),
        max_in_flight_per_replica=st.none() | st.integers(1, 6),
        when_full=st.sampled_from(("reject", "wait")),
    ),
    way=st.sampled_from((0.0, 0.02)),
)
def test_everyone_ends_once_under_every_limit(
    seed: int, each: TenantLimit, limits: Admission, way: float
) -> None:
    rng = np.random.default_rng(seed)
    n = 40
    trace = of_tenants(
        Trace.of(
            np.sort(rng.uniform(0, 1, n)).tolist(),
            rng.integers(1, 60, n).tolist(),
            rng.integers(1, 30, n).tolist(),
        ),
        rng.integers(0, 2, n).tolist(),
    )
    run = run_of(
        trace,
        Tenants(each=each),
        admission=limits,
        network=Network(way),
        failures=(Outage(0, 0.5, 0.2),),
        retry=Retry(attempts=3, delay_s=0.3),
    )
    assert run.ended_early is None
    status = run.requests["status"]
    assert set(status.tolist()) <= {FINISHED, REJECTED}
    assert (run.requests["reason"][status != FINISHED] >= 0).all()
    parts = breakdown(run)
    done = status == FINISHED
    spent = run.requests["finish_ns"] - run.requests["sent_ns"]
    assert (parts[done].sum(axis=1) == spent[done]).all()
    assert (parts >= 0).all()


def test_a_thousand_refusals_in_a_row_do_not_grow_the_stack() -> None:
    n = 3000
    trace = of_tenants(Trace.of([0.0] * n, [16] * n, [2] * n), [0] * n)
    spec = FleetSpec(
        replicas=1,
        admission=Admission(max_num_queued_reqs=1),
        tenants=Tenants(each=TenantLimit(max_in_flight=2, over_limit="wait")),
    )
    replica = ReplicaSpec(SchedulerConfig(num_gpu_blocks=600), Fixed())
    for gate in (None, 10):
        run = simulate_fleet(trace, replica, spec, max_concurrency=gate)
        assert (run.requests["status"] == FINISHED).sum() >= 1
        assert run.ended_early is None


def test_tenants_stand_side_by_side_in_summary_and_table() -> None:
    trace = of_tenants(Trace.of([0.0] * 4, [16] * 4, [10] * 4), [0, 0, 0, 1])
    run = run_of(trace, Tenants(named={"acme": TenantLimit(max_in_flight=2)}))
    run = dataclasses.replace(run, config={"fleet": {}})
    told = fleet_summary(run)["per_tenant"]
    assert [
        (row["tenant"], row["requests"], row["completed"], row["rejected"]) for row in told
    ] == [
        ("acme", 3, 2, 1),
        ("blue", 1, 1, 0),
    ]
    assert told[0]["p95_ttft_ms"] == 10.0
    lines = tenant_lines({"per_tenant": told})
    assert [line.split()[:4] for line in lines[1:]] == [
        ["acme", "3", "2", "1"],
        ["blue", "1", "1", "0"],
    ]


def test_a_tenants_limit_is_not_taken_for_the_clients() -> None:
    # Summaries look settings up by name anywhere in the run's configuration.
    spec = FleetSpec(tenants=Tenants(each=TenantLimit(max_in_flight=3)))
    said = {"load": {"max_concurrency": None}, "fleet": spec.as_dict()}
    assert setting(said, "max_concurrency") is None


def test_the_file_may_limit_tenants(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(
        "tenants:\n  each: {max_in_flight: 8}\n  named:\n"
        "    acme: {tokens_per_s: 500, over_limit: wait}\n"
    )
    assert read_fleet(path).tenants == Tenants(
        TenantLimit(8), {"acme": TenantLimit(tokens_per_s=500.0, over_limit="wait")}
    )
    for text, complaint in (
        ("tenants: {each: {}}\n", "tenants.each needs max_in_flight or tokens_per_s"),
        ("tenants: {other: 3}\n", "tenants.other is not known"),
        ("tenants: {named: {}}\n", "tenants needs each or named"),
        ("tenants:\n  named:\n    acme:\n", "fleet.yaml:3: tenants.named.acme is empty"),
        ("tenants: {each: {max_in_flight: 1, burst_tokens: 4}}\n", "needs tokens_per_s"),
    ):
        path.write_text(text)
        with pytest.raises(UserError) as caught:
            read_fleet(path)
        assert complaint in str(caught.value)
