"""Can this deployment keep up? Whether a run's backlog grows for as long as requests come, and how fast.

A queue that is stable goes up and down with its bursts and comes back; one that is not grows without end,
and then every latency of the run says only how long the trace was. What is waiting is known exactly from
the requests' own times: sent, and first token. Between the first and the last send the backlog of a stable
queue is stationary; that of an overloaded one grows in each part of that time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vsim.sim.run import FINISHED, UNFINISHED, Run
from vsim.sim.text import number, percent

Int64Array = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

MIN_REQUESTS = 100  # below that a trend and a burst cannot be told apart
PARTS = 10  # of the time in which requests come
SKIPPED = 1  # the first part: a server starts empty, and its queue fills even where it is stable
RISING_SHARE = 0.75  # of the steps from part to part
MIN_LEFT_SHARE = 0.05  # of all requests sent that stand in the backlog when the last comes
# That backlog beside how much the number of arrivals varies by chance: bursts alone make so much and no more.
MIN_LEFT_DEVIATIONS = 2.0
CELLS = 50  # of the sending time, to see how bursty the arrivals are
MIN_LAG_SHARE = 0.05  # of the sending time that the queue still needs after the last send
THRASHING_SHARE = 0.2  # of all computed tokens that were computed before


@dataclass(frozen=True, slots=True)
class Stability:
    """`stable` is None where too few requests tell. Growth is of the backlog: sent, without a first token.

    `growth_requests_per_s` and `growth_tokens_per_s` (prompt and output tokens of those requests) are the
    slopes of least squares over the time in which requests are sent, its first tenth left out;
    `backlog_requests` stand in the backlog when the last is sent, `drain_s` goes by until all have ended.
    `recomputed_share`: of all tokens that the engine computed, those computed again after preemptions.
    """

    stable: bool | None
    growth_requests_per_s: float
    growth_tokens_per_s: float
    backlog_requests: int
    drain_s: float
    recomputed_share: float
    preemptions_per_request: tuple[float, float]  # by arrival: first half, second half
    thrashing: bool

    def data(self) -> dict[str, Any]:
        """JSON-ready, for summary.json."""
        return {**asdict(self), "preemptions_per_request": list(self.preemptions_per_request)}


def stability(run: Run) -> Stability:
    """The verdict on `run`, simulated or measured. Unstable needs a backlog that does all of the following.

    It grows in at least three of four steps between tenths of the sending time, ends at more than 5 % of all
    requests and beyond two standard deviations of the number of arrivals (estimated from their index of
    dispersion: bursts make their own backlog), and takes longer than 5 % of the sending time to drain after
    the last send. A burst meets some of these; overload meets them all.
    """
    columns = run.requests
    known = (columns["status"] == FINISHED) | (columns["status"] == UNFINISHED)
    known &= columns["sent_ns"] >= 0  # a run that ended early has requests that never went out
    sent = columns["sent_ns"][known].astype(np.int64)
    share, halves = _recomputed_share(run), _halves(run)
    thrashing = share > THRASHING_SHARE and halves[1] >= halves[0] > 0
    if len(sent) < 2 or int(sent.max()) <= int(sent.min()):
        return Stability(None, 0.0, 0.0, 0, 0.0, share, halves, thrashing)
    first, last = int(sent.min()), int(sent.max())
    served = columns["first_token_ns"][known].astype(np.int64)
    never = served < 0
    served[never] = np.iinfo(np.int64).max
    tokens = (columns["prompt_tokens"] + columns["output_tokens"])[known].astype(np.int64)
    at = np.linspace(first, last, 20 * PARTS + 1)
    waiting, held = _backlog(sent, served, at), _backlog(sent, served, at, tokens)
    ended = max(last, run.end_ns, int(columns["finish_ns"][known].max()))
    left, drain_s = int(waiting[-1]), (ended - last) / 1e9
    settled = slice(20 * SKIPPED, None)
    growth = _slope(at[settled], waiting[settled])
    token_growth = _slope(at[settled], held[settled])
    levels = waiting[1:].reshape(PARTS, 20).mean(axis=1)[SKIPPED:]
    rising = float((np.diff(levels) > 0).mean())
    grows = (
        growth > 0
        and rising >= RISING_SHARE
        and left > MIN_LEFT_SHARE * len(sent)
        and left > MIN_LEFT_DEVIATIONS * _deviation(sent)
        and (drain_s > MIN_LAG_SHARE * (last - first) / 1e9 or bool(never.any()))
    )
    few = len(sent) < MIN_REQUESTS
    return Stability(
        stable=None if few else not grows,
        growth_requests_per_s=growth,
        growth_tokens_per_s=token_growth,
        backlog_requests=left,
        drain_s=drain_s,
        recomputed_share=share,
        preemptions_per_request=halves,
        thrashing=thrashing,
    )


def stability_lines(found: Mapping[str, Any]) -> list[str]:
    """What a user must be told of `Stability.data()`: nothing of a deployment that keeps up."""
    lines = []
    if found["stable"] is False:
        lines.append(
            "Unstable: this deployment can't keep up. While requests come, its backlog grows by "
            f"{number(found['growth_requests_per_s'])} requests/s "
            f"({number(found['growth_tokens_per_s'])} tokens/s) and holds "
            f"{number(found['backlog_requests'])} at the last one; the latencies above grow with the trace's length."
        )
    if found["thrashing"]:
        before, after = found["preemptions_per_request"]
        lines.append(
            f"Thrashing: {percent(found['recomputed_share'])} of all tokens were computed again after preemptions "
            f"({before:.2f} preemptions a request in the first half, {after:.2f} in the second)."
        )
    return lines


def _backlog(
    sent: Int64Array, served: Int64Array, at: FloatArray, weights: Int64Array | None = None
) -> FloatArray:
    """Requests (or their `weights`) sent by each time of `at` and not yet served then; shape of `at`."""
    return _total_by(sent, at, weights) - _total_by(served, at, weights)


def _total_by(times: Int64Array, at: FloatArray, weights: Int64Array | None) -> FloatArray:
    order = np.argsort(times, kind="stable")
    count = np.searchsorted(times[order], at, side="right")
    if weights is None:
        return count.astype(np.float64)
    return np.concatenate([[0], np.cumsum(weights[order])])[count].astype(np.float64)


def _deviation(sent: Int64Array) -> float:
    """Standard deviation of how many requests come in so long a time, were they drawn anew."""
    counts, _ = np.histogram(sent, bins=CELLS)
    dispersion = float(counts.var() / counts.mean())
    return float(np.sqrt(len(sent) * max(1.0, dispersion)))


def _slope(at_ns: FloatArray, values: FloatArray) -> float:
    """Least squares, per second."""
    seconds = (at_ns - at_ns.mean()) / 1e9
    return float((seconds * (values - values.mean())).sum() / (seconds**2).sum())


def _recomputed_share(run: Run) -> float:
    computed = int(run.steps["tokens"].sum(dtype=np.int64)) if len(run.steps["tokens"]) else 0
    again = int(run.requests["recomputed_tokens"].sum(dtype=np.int64))
    return again / computed if computed else 0.0


def _halves(run: Run) -> tuple[float, float]:
    """Preemptions per request of the first and of the second half of the requests, by arrival."""
    order = np.argsort(run.requests["arrival_ns"], kind="stable")
    counts = run.requests["preemptions"][order]
    half = len(counts) // 2
    if not half:
        return 0.0, 0.0
    return float(counts[:half].mean()), float(counts[half:].mean())
