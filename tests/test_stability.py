"""A deployment that can't keep up is called unstable, with its growth; one that can never is, however bursty."""

from __future__ import annotations

import numpy as np
import pytest

from vsim.sim.run import Run
from vsim.sim.stability import stability, stability_lines
from vsim.tests.make_run import make_run

SERVICE_S = 0.010


def queue(arrival_s: np.ndarray, service_s: float = SERVICE_S, tokens: int = 50) -> Run:
    """A run of one server without batching: first come, first served, each served in `service_s`."""
    arrival = np.sort(np.round(arrival_s * 1e9).astype(np.int64))
    service = round(service_s * 1e9)
    # Lindley: start i = max over j <= i of arrival j + (i - j) x service.
    steps = np.arange(len(arrival)) * service
    start = np.maximum.accumulate(arrival - steps) + steps
    return make_run(
        {
            "arrival_ns": arrival,
            "first_token_ns": start,
            "finish_ns": start + service,
            "prompt_tokens": np.full(len(arrival), tokens - 1),
        },
        end_ns=int(start[-1]) + service,
    )


def poisson(load: float, count: int, seed: int) -> np.ndarray:
    gaps = np.random.default_rng(seed).exponential(SERVICE_S / load, count)
    return np.cumsum(gaps)


@pytest.mark.parametrize("load", [1.1, 1.3, 2.0, 10.0])
@pytest.mark.parametrize("seed", range(10))
def test_an_overloaded_md1_queue_grows_as_fast_as_requests_come_too_many(
    load: float, seed: int
) -> None:
    found = stability(queue(poisson(load, 20_000, seed)))
    assert found.stable is False
    too_many = (load - 1) / SERVICE_S
    assert found.growth_requests_per_s == pytest.approx(too_many, rel=0.15)
    assert found.growth_tokens_per_s == pytest.approx(50 * too_many, rel=0.15)
    assert "Unstable" in stability_lines(found.data())[0]


@pytest.mark.parametrize("load", [0.3, 0.8, 0.9, 0.95])
@pytest.mark.parametrize("count", [300, 3_000, 30_000])
def test_a_stable_md1_queue_is_never_called_unstable(load: float, count: int) -> None:
    for seed in range(40):
        found = stability(queue(poisson(load, count, seed)))
        assert found.stable is True, seed
        assert stability_lines(found.data()) == []


def bursts(load: float, count: int, seed: int) -> np.ndarray:
    """On for a while at three times the service rate, then off: in the mean `load`."""
    rng = np.random.default_rng(seed)
    gaps = rng.exponential(SERVICE_S / 3, count)
    breaks = rng.random(count) < 1 / 200  # a burst is of 200 requests
    gaps[breaks] += rng.exponential(200 * SERVICE_S * (1 / load - 1 / 3), int(breaks.sum()))
    return np.cumsum(gaps)


@pytest.mark.parametrize("load", [0.4, 0.7, 0.85])
def test_bursts_of_three_times_the_capacity_raise_no_alarm_where_the_mean_is_below_it(
    load: float,
) -> None:
    for seed in range(60):
        assert stability(queue(bursts(load, 20_000, seed))).stable is True, seed


def test_gamma_arrivals_of_high_variance_raise_no_alarm() -> None:
    for seed in range(60):
        rng = np.random.default_rng(seed)
        gaps = rng.gamma(0.1, SERVICE_S / 0.7 / 0.1, 20_000)
        assert stability(queue(np.cumsum(gaps))).stable is True, seed


def test_bursts_above_capacity_in_the_mean_are_found() -> None:
    for seed in range(20):
        assert stability(queue(bursts(1.4, 20_000, seed))).stable is False, seed


def test_everything_sent_at_once_is_a_batch_and_no_verdict() -> None:
    assert stability(queue(np.zeros(500))).stable is None


def test_few_requests_give_no_verdict() -> None:
    assert stability(queue(poisson(3.0, 50, 0))).stable is None


def test_an_empty_run_gives_no_verdict() -> None:
    assert stability(make_run()).stable is None


def test_a_run_cut_short_with_requests_left_is_judged_by_what_waits() -> None:
    run = queue(poisson(2.0, 2_000, 1))
    late = run.requests["first_token_ns"] > int(run.requests["arrival_ns"].max())
    assert late.any()
    for name in ("first_token_ns", "finish_ns"):
        run.requests[name][late] = -1
    run.requests["status"][late] = 2
    assert stability(run).stable is False


@pytest.mark.parametrize(
    ("again", "second_half", "thrashing"), [(400, 3, True), (100, 3, False), (400, 0, False)]
)
def test_thrashing_is_much_computed_again_and_more_and_more_preemptions(
    again: int, second_half: int, thrashing: bool
) -> None:
    n = 200
    run = make_run(
        {
            "arrival_ns": np.arange(n) * 10**9,
            "first_token_ns": np.arange(n) * 10**9 + 1,
            "finish_ns": np.arange(n) * 10**9 + 2,
            "preemptions": np.where(np.arange(n) < n // 2, 1, second_half),
            "recomputed_tokens": np.full(n, again),
        },
        {"start_ns": np.arange(n), "tokens": np.full(n, 1000)},
    )
    found = stability(run)
    assert found.thrashing is thrashing
    assert found.recomputed_share == pytest.approx(again / 1000)
    assert any("Thrashing" in line for line in stability_lines(found.data())) is thrashing
