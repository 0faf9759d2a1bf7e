"""State over time: step columns as step functions, their time-weighted means, peaks and buckets."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vsim.sim.run import Run

Int64Array = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
_CHUNK = 1 << 18  # steps at a time


@dataclass(frozen=True, slots=True)
class StepFunction:
    """A value that holds from `at_ns[i]` to `at_ns[i + 1]`, the last one to the end, 0 before the first.

    `at_ns`: ascending, shape (k,). `value`: shape (k,).
    """

    at_ns: Int64Array
    value: FloatArray

    def integral(self, until_ns: npt.NDArray[np.generic]) -> FloatArray:
        """Value x ns from the beginning of time to each of `until_ns` (ascending or not)."""
        if not len(self.at_ns):
            return np.zeros(len(until_ns))
        until = np.asarray(until_ns, dtype=float)
        total = np.concatenate([[0.0], np.cumsum(self.value[:-1] * np.diff(self.at_ns))])
        segment = np.searchsorted(self.at_ns, until, side="right") - 1
        known = np.maximum(segment, 0)
        result = total[known] + self.value[known] * (until - self.at_ns[known])
        return np.where(segment < 0, 0.0, result)

    def at(self, when_ns: Int64Array) -> FloatArray:
        """The value at each of `when_ns`; 0 before the first change."""
        if not len(self.at_ns):
            return np.zeros(len(when_ns))
        segment = np.searchsorted(self.at_ns, when_ns, side="right") - 1
        return np.where(segment < 0, 0.0, self.value[np.maximum(segment, 0)])

    def mean(self, start_ns: int, end_ns: int) -> float | None:
        """Time-weighted mean over [start, end]; None if that is empty."""
        if end_ns <= start_ns or not len(self.at_ns):
            return None
        low, high = self.integral(np.array([start_ns, end_ns]))
        return float(high - low) / (end_ns - start_ns)

    def buckets(self, edges_ns: Int64Array) -> tuple[FloatArray, FloatArray]:
        """(time-weighted mean, maximum) between successive edges; each of shape (len(edges) - 1,)."""
        if not len(self.at_ns):
            zeros = np.zeros(len(edges_ns) - 1)
            return zeros, zeros
        width = np.diff(edges_ns)
        mean = np.diff(self.integral(edges_ns)) / np.maximum(width, 1)
        # What was carried in at a bucket's start, and everything that begins inside it.
        carried_at = np.searchsorted(self.at_ns, edges_ns[:-1], side="right") - 1
        peak = np.where(carried_at >= 0, self.value[np.maximum(carried_at, 0)], 0.0)
        inside_from = np.searchsorted(self.at_ns, edges_ns[:-1], side="left")
        inside_to = np.searchsorted(self.at_ns, edges_ns[1:], side="left")
        some = inside_to > inside_from
        if some.any():
            # reduceat over [from, to) pairs; the odd results (between buckets) are dropped.
            padded = np.append(self.value, -np.inf)
            pairs = np.column_stack([inside_from[some], inside_to[some]]).ravel()
            peak[some] = np.maximum(peak[some], np.maximum.reduceat(padded, pairs)[::2])
        return mean, peak


class StepClock:
    """When each step's state begins and ends to hold: made once for a run, asked for many columns.

    A step's state holds from its start until the next step starts, also through the host's work between
    two steps. Where nobody is in flight any more when it ends, it falls to 0 there: blocks of ended
    requests are free (cached prefixes are free blocks too, as in vLLM's `kv_cache_usage_perc`).
    """

    def __init__(self, run: Run) -> None:
        steps = run.steps
        self._replicas: list[tuple[Int64Array | slice, Int64Array, Int64Array]] = []
        if not len(steps["start_ns"]):
            return
        replica = steps.get("replica")
        for which in (None,) if replica is None else np.unique(replica):
            mine: Int64Array | slice = slice(None)
            if which is not None:
                mine = np.flatnonzero(replica == which)
            start, end = steps["start_ns"][mine], steps["end_ns"][mine]
            idle_from = end[idle_after(run, start, end, which)]
            at = np.concatenate([start, idle_from])
            # Where a step starts at the very instant the last one ended, the new state wins.
            idle = np.concatenate([np.ones(len(start), np.int8), np.zeros(len(idle_from), np.int8)])
            order = np.lexsort((idle, at))
            self._replicas.append((mine, at[order], order))

    def state(self, value: npt.NDArray[np.generic]) -> StepFunction:
        """A per-step value (shape (steps,)) over time, summed over replicas where there are several."""
        parts = []
        for mine, at, order in self._replicas:
            own = np.asarray(value[mine], dtype=float)
            padded = np.concatenate([own, np.zeros(len(at) - len(own))])
            parts.append(StepFunction(at, padded[order]))
        if len(parts) == 1:
            return parts[0]
        return _sum(parts)


def _sum(parts: list[StepFunction]) -> StepFunction:
    if not parts:
        return StepFunction(np.empty(0, dtype=np.int64), np.empty(0))
    changes = np.concatenate([np.diff(part.value, prepend=0.0) for part in parts])
    times, place = np.unique(np.concatenate([part.at_ns for part in parts]), return_inverse=True)
    return StepFunction(times, np.cumsum(np.bincount(place, weights=changes)).astype(float))


def idle_after(
    run: Run, start: Int64Array, end: Int64Array, replica: int | None
) -> npt.NDArray[np.bool_]:
    """Is nobody in flight from this step's end until the next step starts? Shape (steps,)."""
    requests = run.requests
    sent, ended = requests["sent_ns"], requests["finish_ns"]
    if "routed_ns" in requests:
        # A fleet's replica has a request from when it got it until the answer's way back.
        sent = requests["routed_ns"]
        ended = np.where(sent >= 0, ended, -1)
        if "network_ns" in requests:
            ended = np.where(ended >= 0, ended - requests["network_ns"], -1)
    if replica is not None and "replica" in requests:
        here = requests["replica"] == replica
        over = requests.get("handed_over_ns")
        if over is not None:
            # Where pools share the work: at the one until it is handed over, at the other from then on.
            moved, first = over >= 0, requests["prefill_replica"] == replica
            sent = np.where(moved & here, over, sent)
            ended = np.where(moved & first, over, ended)
            here = np.where(moved, here | first, here)
        sent, ended = sent[here], ended[here]
    sent, ended = np.sort(sent[sent >= 0]), np.sort(ended[ended >= 0])
    idle = np.append(start[1:] > end[:-1], True)
    at = np.flatnonzero(idle)
    for low in range(0, len(at), _CHUNK):  # in pieces: light load asks this of every step
        some = at[low : low + _CHUNK]
        moment = end[some]
        idle[some] = np.searchsorted(sent, moment, side="right") <= np.searchsorted(
            ended, moment, side="right"
        )
    idle[-1] = True  # whatever is left never runs again
    return idle


def in_flight(run: Run) -> StepFunction:
    """Requests between the client's send and their end, over time."""
    sent = run.requests["sent_ns"]
    went = sent >= 0
    finish = run.requests["finish_ns"]
    ended = finish[went & (finish >= 0)]
    at = np.concatenate([sent[went], ended])
    change = np.concatenate([np.ones(int(went.sum())), -np.ones(len(ended))])
    if not len(at):
        return StepFunction(np.empty(0, dtype=np.int64), np.empty(0))
    times, place = np.unique(at, return_inverse=True)
    return StepFunction(times, np.cumsum(np.bincount(place, weights=change)).astype(float))
