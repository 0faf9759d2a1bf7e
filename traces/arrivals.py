"""The same requests at other times: scaled, cut, or spaced as `vllm bench serve` spaces them."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt

from vsim.errors import UserError
from vsim.traces.trace import Int64Array, Sessions, Trace


def scale_time(trace: Trace, factor: float) -> Trace:
    """All arrivals and think times times `factor`: 0.5 plays the trace twice as fast.

    Raises UserError unless 0 < factor < infinity.
    """
    if not (factor > 0 and math.isfinite(factor)):
        raise UserError(f"time_scale={factor} must be a positive finite number")
    if factor == 1:
        return trace
    sessions = trace.sessions
    if sessions is not None:
        sessions = Sessions(after=sessions.after, think_ns=_scaled(sessions.think_ns, factor))
    return dataclasses.replace(
        trace,
        arrival_ns=_scaled(trace.arrival_ns, factor),
        sessions=sessions,
        assumptions=(
            *trace.assumptions,
            f"Time between arrivals is multiplied by {factor:g} (time scale).",
        ),
    )


def _scaled(ns: Int64Array, factor: float) -> Int64Array:
    with np.errstate(over="ignore"):  # said below
        scaled = ns * factor
    if len(scaled) and scaled.max() >= 2.0**62:
        raise UserError(f"time_scale={factor} makes the trace longer than 146 years")
    return np.round(scaled).astype(np.int64)


def send_offsets_s(
    count: int, request_rate: float, burstiness: float, seed: int
) -> npt.NDArray[np.float64]:
    """Seconds after the start at which `vllm bench serve` sends each of `count` requests.

    vLLM 0.32.0 benchmarks/serve.py `get_request`: gaps are gamma with shape `burstiness` and scale
    1 / (rate * burstiness), constant for infinite burstiness; the first request waits for its gap as well;
    then all are stretched so that the last one is sent at count / rate. An infinite rate sends all at 0.
    vLLM draws from numpy's global generator seeded with `--seed`, but only after its data set drew from it,
    so the spacing agrees in law and in its end, not draw by draw.
    Raises UserError unless rate and burstiness are positive.
    """
    if not request_rate > 0:
        raise UserError(f"request_rate={request_rate} must be positive (inf sends all at once)")
    if not burstiness > 0:
        raise UserError(f"burstiness={burstiness} must be positive (1 is Poisson, inf is constant)")
    if math.isinf(request_rate) or count == 0:
        return np.zeros(count)
    if math.isinf(burstiness):
        gaps = np.full(count, 1.0 / request_rate)
    else:
        legacy = np.random.RandomState(seed % 2**32)  # the generator behind np.random.gamma
        gaps = legacy.gamma(burstiness, 1.0 / (request_rate * burstiness), count)
    offsets = np.cumsum(gaps)
    if offsets[-1] != 0:
        offsets *= count / request_rate / offsets[-1]
    return offsets


def rerate(trace: Trace, request_rate: float, burstiness: float = 1.0, seed: int = 0) -> Trace:
    """The trace's requests, in its order, at the times `vllm bench serve` would send them.

    Arrivals count from the start of the benchmark, so the first is not at 0 (unless the rate is infinite).
    Of conversations only the openings are spaced; turns that follow another turn keep doing so. Raises UserError unless rate and burstiness are positive.
    """
    sent = (
        np.arange(len(trace))
        if trace.sessions is None
        else np.flatnonzero(trace.sessions.after < 0)
    )
    offsets = send_offsets_s(len(sent), request_rate, burstiness, seed)
    span = float(offsets[-1]) if len(offsets) else 0.0
    if span >= 4e9:
        raise UserError(f"request_rate={request_rate} makes {len(sent)} requests last {span:.3g} s")
    what = "Requests" if trace.sessions is None else "Conversations"
    if math.isinf(request_rate):
        told = (
            f"{what} are all sent at once (request rate inf); the trace's own times are not used."
        )
    else:
        told = (
            f"{what} are sent at {request_rate:g} per second with burstiness {burstiness:g}, as vllm bench serve "
            "spaces them; the trace's own times are not used."
        )
    arrival = np.round(offsets * 1e9).astype(np.int64)
    if trace.sessions is not None:
        trace, arrival = _with_later_turns(trace, sent, arrival)
    return dataclasses.replace(trace, arrival_ns=arrival, assumptions=(*trace.assumptions, told))


def _with_later_turns(
    trace: Trace, sent: Int64Array, opening_ns: Int64Array
) -> tuple[Trace, Int64Array]:
    """Times for all rows when only those that wait for no other have one; rows are put in order of time.

    A later turn is placed as if answers took no time; replay sends it when the turn before has ended.
    """
    assert trace.sessions is not None
    times = [0] * len(trace)
    for row, time in zip(sent.tolist(), opening_ns.tolist(), strict=True):
        times[row] = time
    after, think = trace.sessions.after.tolist(), trace.sessions.think_ns.tolist()
    for row, before in enumerate(after):
        if before >= 0:
            times[row] = times[before] + think[row]
    arrival = np.asarray(times, dtype=np.int64)
    order = np.argsort(arrival, kind="stable")
    return dataclasses.replace(select_any(trace, order), assumptions=trace.assumptions), arrival[
        order
    ]


def head(trace: Trace, count: int) -> Trace:
    """The first `count` requests in order of arrival. Raises UserError if count is below 1."""
    if count < 1:
        raise UserError(f"limit={count} must be at least 1")
    if count >= len(trace):
        return trace
    return select(trace, np.arange(count), f"Only the first {count} requests are used (limit).")


def select(trace: Trace, rows: Int64Array, why: str) -> Trace:
    """The given rows (ascending) as a trace of their own, from its own first arrival. `why` is its sentence.

    A turn whose predecessor is not among them follows that one's predecessor, or is sent on time.
    """
    offsets, ids = trace.prefix_offsets, trace.prefix_ids
    if offsets is not None and ids is not None:
        lengths = np.diff(offsets)[rows]
        starts = np.repeat(offsets[rows] - np.concatenate(([0], np.cumsum(lengths)[:-1])), lengths)
        ids = ids[np.arange(int(lengths.sum())) + starts]
        offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    arrival = trace.arrival_ns[rows]
    origin = int(arrival[0]) if len(arrival) else 0
    return dataclasses.replace(
        trace,
        arrival_ns=arrival - origin,
        prompt_tokens=trace.prompt_tokens[rows],
        output_tokens=trace.output_tokens[rows],
        max_tokens=None if trace.max_tokens is None else trace.max_tokens[rows],
        priority=None if trace.priority is None else trace.priority[rows],
        tenant=None if trace.tenant is None else trace.tenant[rows],
        session=None if trace.session is None else trace.session[rows],
        aborted=None if trace.aborted is None else trace.aborted[rows],
        sessions=None if trace.sessions is None else relinked(trace.sessions, rows),
        prefix_offsets=offsets,
        prefix_ids=ids,
        origin_ns=trace.origin_ns + origin,
        assumptions=(*trace.assumptions, why),
    )


def select_any(trace: Trace, rows: Int64Array) -> Trace:
    """Rows in any order, each at most once; dependencies follow their rows."""
    n = len(trace)
    picked = select(dataclasses.replace(trace, sessions=None, assumptions=()), rows, "")
    sessions = None
    if trace.sessions is not None:
        place = np.full(n + 1, -1, dtype=np.int64)
        place[rows] = np.arange(len(rows))
        sessions = Sessions(place[trace.sessions.after[rows]], trace.sessions.think_ns[rows])
    return dataclasses.replace(picked, sessions=sessions)


def relinked(sessions: Sessions, rows: Int64Array) -> Sessions | None:
    """Dependencies among the chosen rows; where a predecessor is missing, its own one takes over."""
    n = len(sessions.after)
    before, think = sessions.after.copy(), sessions.think_ns.copy()
    kept = np.zeros(n + 1, dtype=bool)  # the last entry answers for index -1
    kept[rows] = True
    gone = (before >= 0) & ~kept[before]
    while gone.any():
        hop = before[gone]
        think[gone] += sessions.think_ns[hop]
        before[gone] = sessions.after[hop]
        gone = (before >= 0) & ~kept[before]
    new_row = np.full(n + 1, -1, dtype=np.int64)
    new_row[rows] = np.arange(len(rows))
    after = new_row[before[rows]]
    if not (after >= 0).any():
        return None
    return Sessions(after=after, think_ns=np.where(after >= 0, think[rows], 0))
