"""What a run means: latencies by `vllm bench serve`'s definitions, from the client's clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vsim.errors import UserError
from vsim.sim.run import FINISHED, Run

Int64Array = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
Rows = npt.NDArray[np.bool_] | slice

NS_PER_MS = 1e6
NS_PER_S = 1_000_000_000
GOODPUT_METRICS = ("ttft", "tpot", "e2el")
_MANY_SECONDS = 10_000_000  # four months: from here on only the seconds that occur are counted
_CHUNK = 1 << 20  # steps or tokens at a time


@dataclass(frozen=True, slots=True)
class Latencies:
    """Per-request latencies of the finished requests, in ns.

    `ttft_ns`, `e2el_ns`, `queue_ns`, `client_queue_ns`: shape (finished,). `tpot_ns`: shape (finished with
    more than one output token,). `all_tpot_ns`: shape (finished,), 0 where there was a single token, as
    vLLM counts it for goodput. TTFT and E2EL start when the client sends; `client_queue_ns` is the wait at
    the client's own `--max-concurrency` gate before that; `queue_ns` runs from send to first admission by
    the scheduler. Source: vLLM 0.32 benchmarks/serve.py, `calculate_metrics`.
    """

    ttft_ns: Int64Array
    tpot_ns: FloatArray
    all_tpot_ns: FloatArray
    e2el_ns: Int64Array
    queue_ns: Int64Array
    client_queue_ns: Int64Array


def latencies(run: Run, mask: npt.NDArray[np.bool_] | None = None) -> Latencies:
    """The latencies of the finished requests of `run`, of those in `mask` (shape (n,)) if one is given."""
    done = finished(run, mask)
    all_tpot = tpot_ns(run, done)
    several = run.requests["output_tokens"][done] > 1
    return Latencies(
        ttft_ns=ttft_ns(run, done),
        tpot_ns=all_tpot[several],
        all_tpot_ns=all_tpot,
        e2el_ns=e2el_ns(run, done),
        queue_ns=queue_ns(run, done),
        client_queue_ns=client_queue_ns(run, done),
    )


def finished(run: Run, mask: npt.NDArray[np.bool_] | None = None) -> Rows:
    """Which requests count: the finished ones, of those in `mask` (shape (n,)) if one is given."""
    done = run.requests["status"] == FINISHED
    if mask is not None:
        done &= mask
    return slice(None) if done.all() else done  # all of them: views instead of copies


def ttft_ns(run: Run, done: Rows) -> Int64Array:
    """`Latencies.ttft_ns` of the rows `done`; one column at a time is all that a long run has room for."""
    return run.requests["first_token_ns"][done] - run.requests["sent_ns"][done]


def tpot_ns(run: Run, done: Rows) -> FloatArray:
    """`Latencies.all_tpot_ns` of the rows `done`: 0 for a request of one token, which has no gap to average."""
    columns = run.requests
    output = columns["output_tokens"][done]
    tpot = np.zeros(len(output))
    span = columns["finish_ns"][done] - columns["first_token_ns"][done]
    np.divide(span, output - 1, out=tpot, where=output > 1)
    return tpot


def e2el_ns(run: Run, done: Rows) -> Int64Array:
    """`Latencies.e2el_ns` of the rows `done`."""
    return run.requests["finish_ns"][done] - run.requests["sent_ns"][done]


def queue_ns(run: Run, done: Rows) -> Int64Array:
    """`Latencies.queue_ns` of the rows `done`."""
    scheduled = run.requests["first_scheduled_ns"][done]
    # A measured run may not know when the scheduler first took the request: leave those out.
    known = scheduled >= 0
    return (scheduled - run.requests["sent_ns"][done])[slice(None) if known.all() else known]


def client_queue_ns(run: Run, done: Rows) -> Int64Array:
    """`Latencies.client_queue_ns` of the rows `done`."""
    return run.requests["sent_ns"][done] - run.requests["arrival_ns"][done]


@dataclass(frozen=True, slots=True)
class Stats:
    """Mean, median, population standard deviation and percentiles of one latency, in ms; None: no samples.

    `percentiles` keeps the order asked for.
    """

    count: int
    mean_ms: float | None
    median_ms: float | None
    std_ms: float | None
    max_ms: float | None
    percentiles: tuple[tuple[float, float | None], ...]

    def flat(self, name: str) -> dict[str, float | None]:
        """The keys of `vllm bench serve --save-result`: mean_ttft_ms, median_…, std_…, p99_…."""
        return {
            f"mean_{name}_ms": self.mean_ms,
            f"median_{name}_ms": self.median_ms,
            f"std_{name}_ms": self.std_ms,
            **{f"p{percentile_word(p)}_{name}_ms": value for p, value in self.percentiles},
        }


def percentile_word(percentile: float) -> str:
    """99.0 -> "99", 99.9 -> "99.9", as vLLM names its keys."""
    return str(int(percentile)) if int(percentile) == percentile else str(percentile)


def stats(values_ns: npt.NDArray[np.generic], percentiles: Sequence[float]) -> Stats:
    """Statistics of `values_ns`, shape (k,); all None for k = 0. `np.percentile`, linear."""
    if len(values_ns) == 0:
        return _nothing(percentiles)
    values = np.divide(values_ns, NS_PER_MS, dtype=float)
    mean, std, largest = float(values.mean()), float(values.std()), float(values.max())
    # Last, as it may then sort in place: a copy of ten million values is 80 MB.
    asked = np.percentile(values, [50.0, *percentiles], overwrite_input=True)
    return Stats(
        count=len(values),
        mean_ms=mean,
        median_ms=float(asked[0]),
        std_ms=std,
        max_ms=largest,
        percentiles=tuple(
            (p, float(value)) for p, value in zip(percentiles, asked[1:], strict=True)
        ),
    )


def weighted_stats(
    values_ns: Int64Array, counts: Int64Array, percentiles: Sequence[float]
) -> Stats:
    """As `stats`, of a multiset given as distinct ascending values and how often each occurs.

    Percentiles equal `np.percentile` of the written-out list to the last bit.
    """
    total = int(counts.sum()) if len(counts) else 0
    if total == 0:
        return _nothing(percentiles)
    values = values_ns / NS_PER_MS
    weights = counts.astype(float)
    # Not `@`: BLAS sums in as many parts as it has threads, and the last bit with it.
    mean = float(np.sum(values * weights)) / total
    asked = weighted_percentile(values, counts, [50.0, *percentiles])
    return Stats(
        count=total,
        mean_ms=mean,
        median_ms=float(asked[0]),
        std_ms=float(np.sqrt(np.sum((values - mean) ** 2 * weights) / total)),
        max_ms=float(values[counts > 0][-1]),
        percentiles=tuple(
            (p, float(value)) for p, value in zip(percentiles, asked[1:], strict=True)
        ),
    )


def weighted_percentile(
    values: FloatArray, counts: Int64Array, percentiles: Sequence[float]
) -> FloatArray:
    """`np.percentile(np.repeat(values, counts), percentiles)` without writing the list out.

    `values`: ascending, shape (k,); `counts`: shape (k,), at least one positive. Linear interpolation
    between the two neighbours, from the nearer end as numpy does it, so that the last bit agrees.
    """
    last_index = np.cumsum(counts) - 1
    virtual = (int(last_index[-1])) * (np.asarray(percentiles, dtype=float) / 100)
    below = np.floor(virtual)
    weight = virtual - below
    low = values[np.searchsorted(last_index, below.astype(np.int64))]
    above = np.minimum(below.astype(np.int64) + 1, last_index[-1])
    high = values[np.searchsorted(last_index, above)]
    gap = high - low
    return np.where(weight >= 0.5, high - gap * (1 - weight), low + gap * weight)


def _nothing(percentiles: Sequence[float]) -> Stats:
    return Stats(0, None, None, None, None, tuple((p, None) for p in percentiles))


def parse_goodput(pairs: Sequence[str]) -> dict[str, float]:
    """`--goodput ttft:500 tpot:50` -> {"ttft": 500.0, "tpot": 50.0}, milliseconds.

    Raises UserError for another name, another form, or a negative value, as vLLM refuses them.
    """
    slo: dict[str, float] = {}
    for pair in pairs:
        name, colon, text = pair.partition(":")
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not colon or np.isnan(value):
            raise UserError(
                f"--goodput {pair}: give NAME:MILLISECONDS, for example ttft:500 or tpot:50"
            )
        slo[name] = value
    check_goodput(slo)
    return slo


def check_goodput(slo: Mapping[str, float]) -> None:
    """Raises UserError for an SLO that `vllm bench serve --goodput` would refuse."""
    for name, value in slo.items():
        if name not in GOODPUT_METRICS:
            raise UserError(
                f"--goodput {name}: unknown metric; it must be one of {', '.join(GOODPUT_METRICS)}"
            )
        if not 0 <= value < np.inf:
            raise UserError(
                f"--goodput {name}:{value:g}: the limit in ms must be finite and not negative"
            )


def good_requests(latency: Latencies, slo_ms: Mapping[str, float]) -> int:
    """How many finished requests meet every limit. TPOT counts as 0 for a single token (vLLM)."""
    good = np.ones(len(latency.ttft_ns), dtype=bool)
    by_name: dict[str, npt.NDArray[np.generic]] = {
        "ttft": latency.ttft_ns,
        "tpot": latency.all_tpot_ns,
        "e2el": latency.e2el_ns,
    }
    for name, limit_ms in slo_ms.items():
        good &= np.asarray(by_name[name], dtype=float) <= limit_ms * NS_PER_MS
    return int(good.sum())


def duration_ns(run: Run) -> int:
    """From the first arrival to the last end of a request (served or rejected); 0 if nothing ended.

    It is vLLM's benchmark duration: the client starts its clock, sends, and waits for the last answer.
    """
    ended = run.requests["finish_ns"]
    ended = ended[ended >= 0]
    if not len(ended):
        return max(0, int(run.end_ns))
    return int(ended.max()) - int(run.requests["arrival_ns"].min())


def max_concurrent_requests(run: Run) -> int:
    """vLLM's "peak concurrent requests": finished requests that were active in the busiest second.

    Whole-second buckets from the first send of a finished request. A request counts in every bucket it
    touches, so the peak can exceed `--max-concurrency` (vLLM 0.32 benchmarks/serve.py).
    """
    columns, done = run.requests, finished(run)
    start, end = columns["sent_ns"][done], columns["finish_ns"][done]
    if not len(start):
        return 0
    origin = int(start.min())
    last = max(int(start.max()), int(end.max())) - origin
    if last // NS_PER_S < _MANY_SECONDS:
        change = np.zeros(last // NS_PER_S + 2, dtype=np.int64)
        for low in range(0, len(start), _CHUNK):
            for times, sign, later in ((start, 1, 0), (end, -1, 1)):
                second = (times[low : low + _CHUNK] - origin) // NS_PER_S + later
                counted = np.bincount(second)
                change[: len(counted)] += sign * counted
        return int(np.cumsum(change).max())
    start, end = (start - origin) // NS_PER_S, (end - origin) // NS_PER_S
    # Only the seconds that occur.
    _, second = np.unique(np.concatenate([start, end + 1]), return_inverse=True)
    weight = np.repeat([1.0, -1.0], len(start))
    return int(np.cumsum(np.bincount(second, weights=weight)).max())


def max_output_tokens_per_s(run: Run) -> float:
    """vLLM's "peak output token throughput": tokens received in the busiest whole second.

    Tokens are taken where the run knows them: the step column `emitted`; else one per decode of a step
    plus every request's first token; without any steps, each request's tokens after the first are spread
    evenly up to its end (`token_times_known` says which).
    """
    columns = run.requests
    done = columns["status"] == FINISHED
    if not done.any():
        return 0.0
    origin = int(columns["sent_ns"][done].min())
    when: list[Int64Array] = []
    how_many: list[npt.NDArray[np.generic]] = []
    steps = run.steps
    if len(steps.get("end_ns", ())):
        if "emitted" in steps:
            return _busiest([steps["end_ns"]], [steps["emitted"]], origin)
        first = columns["first_token_ns"][columns["first_token_ns"] >= 0]
        when = [steps["end_ns"], first]
        how_many = [steps["decodes"], np.ones(len(first))]
    else:
        output = columns["output_tokens"][done]
        first = columns["first_token_ns"][done]
        gaps = np.maximum(output - 1, 1)
        row = np.repeat(np.arange(len(output)), output)
        nth = np.arange(len(row)) - np.repeat(np.cumsum(output) - output, output)
        when = [first[row] + (columns["finish_ns"][done] - first)[row] * nth // gaps[row]]
        how_many = [np.ones(len(row))]
    return _busiest(when, how_many, origin)


def _busiest(
    when_ns: Sequence[Int64Array], weights: Sequence[npt.NDArray[np.generic]], origin_ns: int
) -> float:
    """The largest sum of weights in one whole second from `origin_ns` on; pairs of arrays of equal shapes."""
    last = max(int(when.max(initial=origin_ns)) for when in when_ns)
    seconds = (last - origin_ns) // NS_PER_S + 1
    if seconds > _MANY_SECONDS:
        second = (np.concatenate(when_ns) - origin_ns) // NS_PER_S
        weight = np.concatenate(weights).astype(float)
        inside = second >= 0
        _, second = np.unique(second[inside], return_inverse=True)  # only the seconds that occur
        return float(np.bincount(second, weights=weight[inside]).max(initial=0.0))
    totals = np.zeros(seconds)
    for when, weight in zip(when_ns, weights, strict=True):
        for low in range(0, len(when), _CHUNK):
            second = (when[low : low + _CHUNK] - origin_ns) // NS_PER_S
            inside = second >= 0
            part = np.bincount(second[inside], weights=weight[low : low + _CHUNK][inside])
            totals[: len(part)] += part
    return float(totals.max())


def token_times_known(run: Run) -> bool:
    """Does `max_output_tokens_per_s` rest on recorded tokens, not on steps' decodes or an even spread?"""
    return "emitted" in run.steps
