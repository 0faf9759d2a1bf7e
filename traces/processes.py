"""Arrival processes: when requests come, seconds from the start, drawn from a seeded generator."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vsim.errors import UserError

Floats = npt.NDArray[np.float64]
Rng = np.random.Generator

MAX_REQUESTS = 100_000_000


@dataclass(frozen=True, slots=True)
class Arrivals:
    """What to draw: a process by name, with the parameters it takes; others stay None.

    Rates in requests per second, times in seconds. Either `requests` or `duration_s` ends it; with both,
    whichever comes first.
    """

    kind: str = "poisson"
    rate: float | None = None
    requests: int | None = None
    duration_s: float | None = None
    burstiness: float = 1.0  # shape of the gaps, for gamma and weibull; 1 is Poisson
    rates: tuple[float, ...] = ()  # of mmpp's states, or of steps
    holds_s: tuple[float, ...] = ()  # mean stay in each of mmpp's states; length of each step
    sources: int = 50  # on/off sources
    on_s: float = 10.0  # mean on period
    off_s: float = 30.0
    alpha: float = 1.5  # tail index of the on and off periods; below 2 the sum is self-similar
    end_rate: float | None = None  # of a ramp
    swing: float = 0.8  # of a day: from mean * (1 - swing) to mean * (1 + swing)
    period_s: float = 86400.0


def draw(spec: Arrivals, rng: Rng) -> Floats:
    """Ascending arrival times in seconds. Raises UserError for parameters that can't be."""
    _check(spec)
    times = PROCESSES[spec.kind](spec, rng)
    if spec.duration_s is not None:
        times = times[times < spec.duration_s]
    return times if spec.requests is None else times[: spec.requests]


def _check(spec: Arrivals) -> None:
    if spec.kind not in PROCESSES:
        raise UserError(f"arrivals {spec.kind!r} is not one of {', '.join(PROCESSES)}")
    if spec.requests is None and spec.duration_s is None:
        raise UserError("give the number of requests (--requests) or the duration (--duration)")
    if spec.requests is not None and not 1 <= spec.requests <= MAX_REQUESTS:
        raise UserError(f"requests={spec.requests} must be from 1 to {MAX_REQUESTS:,}")
    positive = {
        "duration_s": spec.duration_s,
        "rate": spec.rate,
        "burstiness": spec.burstiness,
        "on_s": spec.on_s,
        "off_s": spec.off_s,
        "period_s": spec.period_s,
    }
    if spec.kind == "ramp" and spec.rate == 0:
        del positive["rate"]  # a ramp may start from nothing
    for name, value in positive.items():
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise UserError(f"{name}={value} must be positive and finite")
    if spec.end_rate is not None and not (spec.end_rate >= 0 and math.isfinite(spec.end_rate)):
        raise UserError(f"end_rate={spec.end_rate} must be finite and not negative")
    if not 0 <= spec.swing <= 1:
        raise UserError(f"swing={spec.swing} must be from 0 to 1")
    if not spec.alpha > 1:
        raise UserError(
            f"alpha={spec.alpha} must be above 1: the mean on and off times are infinite otherwise"
        )
    if spec.sources < 1:
        raise UserError(f"sources={spec.sources} must be at least 1")
    for name, values in (("rates", spec.rates), ("holds_s", spec.holds_s)):
        if any(not (value >= 0 and math.isfinite(value)) for value in values):
            raise UserError(f"{name}={values} must be finite and not negative")
    if spec.duration_s is not None:
        top = max([spec.rate or 0.0, spec.end_rate or 0.0, *spec.rates])
        if spec.duration_s * top > MAX_REQUESTS:
            raise UserError(
                f"duration_s={spec.duration_s:g} at {top:g} req/s is over {MAX_REQUESTS:,} requests"
            )


def _rate(spec: Arrivals) -> float:
    if spec.rate is None:
        raise UserError(f"{spec.kind} arrivals need a rate (--rate)")
    return spec.rate


def _renewal(spec: Arrivals, gaps: Callable[[int], Floats]) -> Floats:
    """Arrival times from independent gaps of mean 1 / rate; the first comes after a gap of its own."""
    rate = _rate(spec)
    wanted = spec.requests
    if wanted is not None:
        return np.cumsum(gaps(wanted))
    assert spec.duration_s is not None
    parts: list[Floats] = []
    now = 0.0
    while now < spec.duration_s:
        size = max(64, int((spec.duration_s - now) * rate * 1.05))
        part = now + np.cumsum(gaps(size))
        parts.append(part)
        now = float(part[-1])
        if sum(map(len, parts)) > MAX_REQUESTS:
            raise UserError(f"more than {MAX_REQUESTS:,} requests")
    return np.concatenate(parts)


def _constant(spec: Arrivals, rng: Rng) -> Floats:
    rate = _rate(spec)
    count = spec.requests
    if count is None:
        assert spec.duration_s is not None
        count = math.ceil(spec.duration_s * rate)
    return np.arange(count) / rate


def _poisson(spec: Arrivals, rng: Rng) -> Floats:
    return _renewal(spec, lambda size: rng.exponential(1 / _rate(spec), size))


def _gamma(spec: Arrivals, rng: Rng) -> Floats:
    """vLLM's burstiness: gaps of shape b and scale 1 / (rate b)."""
    shape = spec.burstiness
    return _renewal(spec, lambda size: rng.gamma(shape, 1 / (_rate(spec) * shape), size))


def _weibull(spec: Arrivals, rng: Rng) -> Floats:
    shape = spec.burstiness
    if shape < 0.05:
        raise UserError(f"burstiness={shape} is below 0.05, where Weibull gaps overflow")
    scale = 1 / (_rate(spec) * math.gamma(1 + 1 / shape))
    return _renewal(spec, lambda size: scale * rng.weibull(shape, size))


def piecewise_poisson(rates: Sequence[float], lengths_s: Sequence[float], rng: Rng) -> Floats:
    """Poisson arrivals at constant rates one after the other."""
    lengths = np.asarray(lengths_s, dtype=float)
    expected = np.asarray(rates, dtype=float) * lengths
    if expected.sum() > MAX_REQUESTS:
        raise UserError(f"more than {MAX_REQUESTS:,} requests")
    number = rng.poisson(expected)
    starts = np.concatenate(([0.0], np.cumsum(lengths)[:-1]))
    at = np.repeat(starts, number) + rng.random(int(number.sum())) * np.repeat(lengths, number)
    return np.sort(at)


def _end_s(spec: Arrivals, mean_rate: float) -> float:
    """How long to draw: the duration, or long enough for the requests with room to spare."""
    if spec.duration_s is not None:
        return spec.duration_s
    assert spec.requests is not None
    if mean_rate <= 0:
        raise UserError("all rates are 0: no request would ever come")
    return (spec.requests + 10 * math.sqrt(spec.requests) + 10) / mean_rate


def _enough(spec: Arrivals, mean_rate: float, until: Callable[[float], Floats]) -> Floats:
    """Draw up to an end; if that gave too few requests, up to a later one."""
    end = _end_s(spec, mean_rate)
    while True:
        times = until(end)
        if spec.duration_s is not None or spec.requests is None or len(times) >= spec.requests:
            return times
        end *= 2


def _mmpp(spec: Arrivals, rng: Rng) -> Floats:
    """Markov-modulated Poisson: states in turn, each for an exponential time."""
    if len(spec.rates) < 2 or len(spec.rates) != len(spec.holds_s):
        raise UserError("mmpp needs --rates and --holds of the same length, at least 2")
    if min(spec.holds_s) <= 0:
        raise UserError(f"holds_s={spec.holds_s} must be positive")
    mean = float(np.dot(spec.rates, spec.holds_s) / sum(spec.holds_s))
    state = int(rng.choice(len(spec.rates), p=np.asarray(spec.holds_s) / sum(spec.holds_s)))
    seed = int(rng.integers(2**63))

    def until(end: float) -> Floats:
        mine = np.random.default_rng(seed)
        rates, lengths, now, current = [], [], 0.0, state
        while now < end:
            stay = min(float(mine.exponential(spec.holds_s[current])), end - now)
            rates.append(spec.rates[current])
            lengths.append(stay)
            now += stay
            current = _next_state(mine, current, len(spec.rates))
            if len(rates) > 10_000_000:
                raise UserError(
                    "mmpp changes its state more than ten million times; use longer --holds"
                )
        return piecewise_poisson(rates, lengths, mine)

    return _enough(spec, mean, until)


def _next_state(rng: Rng, current: int, states: int) -> int:
    """Any other state, all alike."""
    step = int(rng.integers(1, states)) if states > 1 else 0
    return (current + step) % states


def _on_off(spec: Arrivals, rng: Rng) -> Floats:
    """Many sources with Pareto on and off periods, Poisson while on: self-similar for alpha < 2.

    Willinger et al. (1997): the sum has Hurst exponent (3 - alpha) / 2.
    """
    rate = _rate(spec)
    share = spec.on_s / (spec.on_s + spec.off_s)
    while_on = rate / spec.sources / share
    seed = int(rng.integers(2**63))

    def pareto(mine: Rng, mean: float, size: int) -> Floats:
        return mean * (spec.alpha - 1) / spec.alpha * (1 + mine.pareto(spec.alpha, size))

    def until(end: float) -> Floats:
        mine = np.random.default_rng(seed)
        parts = []
        for _ in range(spec.sources):
            # Start far enough back that a source is found on or off as if it had always run.
            now = -float(mine.random()) * 10 * (spec.on_s + spec.off_s)
            starts, lengths = [], []
            while now < end:
                on, off = pareto(mine, spec.on_s, 1)[0], pareto(mine, spec.off_s, 1)[0]
                low, high = max(now, 0.0), min(now + on, end)
                if high > low:
                    starts.append(low)
                    lengths.append(high - low)
                now += on + off
            if starts:
                number = mine.poisson(while_on * np.asarray(lengths))
                parts.append(
                    np.repeat(starts, number)
                    + mine.random(int(number.sum())) * np.repeat(lengths, number)
                )
        return np.sort(np.concatenate(parts)) if parts else np.empty(0)

    return _enough(spec, rate, until)


def _steps(spec: Arrivals, rng: Rng) -> Floats:
    """Rates one after the other, each for its hold; repeated until the end."""
    if not spec.rates or len(spec.holds_s) not in (1, len(spec.rates)):
        raise UserError("steps needs --rates, and --holds of length 1 or as many as rates")
    holds = spec.holds_s * len(spec.rates) if len(spec.holds_s) == 1 else spec.holds_s
    cycle = sum(holds)
    if cycle <= 0:
        raise UserError(f"holds_s={spec.holds_s} must add up to more than 0")
    mean = float(np.dot(spec.rates, holds)) / cycle
    if spec.duration_s is None and spec.requests is None:
        return np.empty(0)

    def until(end: float) -> Floats:
        rounds = math.ceil(end / cycle)
        return piecewise_poisson(spec.rates * rounds, holds * rounds, np.random.default_rng(seed))

    seed = int(rng.integers(2**63))
    return _enough(spec, mean, until)


def _thinned(top: float, end: float, rate_at: Callable[[Floats], Floats], rng: Rng) -> Floats:
    """Poisson arrivals of a rate that changes, by thinning those of the top rate (Lewis and Shedler, 1979)."""
    if top * end > MAX_REQUESTS:
        raise UserError(f"more than {MAX_REQUESTS:,} requests")
    at = np.sort(rng.random(rng.poisson(top * end)) * end)
    return at[rng.random(len(at)) * top < rate_at(at)]


def _ramp(spec: Arrivals, rng: Rng) -> Floats:
    """From `rate` to `end_rate` in a straight line over the duration."""
    begin, finish = _rate(spec), spec.end_rate
    if finish is None:
        raise UserError("a ramp needs --end-rate")
    end = spec.duration_s
    if end is None:
        assert spec.requests is not None
        if begin + finish <= 0:
            raise UserError("all rates are 0: no request would ever come")
        end = spec.requests / ((begin + finish) / 2)
    slope, expected = (finish - begin) / end, (begin + finish) / 2 * end
    if not 0 < expected <= MAX_REQUESTS:
        raise UserError(
            f"a ramp from {begin:g} to {finish:g} req/s over {end:g} s means {expected:.3g} requests"
        )
    number = spec.requests if spec.requests is not None else rng.poisson(expected)
    # Given their number, arrivals are independent with the rate as density: invert its integral.
    part = np.sort(rng.random(number)) * expected
    if slope == 0:
        return part / begin
    return (np.sqrt(np.maximum(begin**2 + 2 * slope * part, 0)) - begin) / slope


def _diurnal(spec: Arrivals, rng: Rng) -> Floats:
    """A sine of one period around the mean rate, lowest at the start."""
    mean = _rate(spec)
    seed = int(rng.integers(2**63))

    def rate_at(at: Floats) -> Floats:
        return mean * (1 - spec.swing * np.cos(2 * math.pi * at / spec.period_s))

    def until(end: float) -> Floats:
        return _thinned(mean * (1 + spec.swing), end, rate_at, np.random.default_rng(seed))

    # Whole periods have the mean rate; less than one starts in the trough.
    return _enough(spec, mean, until)


PROCESSES: dict[str, Callable[[Arrivals, Rng], Floats]] = {
    "constant": _constant,
    "poisson": _poisson,
    "gamma": _gamma,
    "weibull": _weibull,
    "mmpp": _mmpp,
    "onoff-pareto": _on_off,
    "steps": _steps,
    "ramp": _ramp,
    "diurnal": _diurnal,
}
