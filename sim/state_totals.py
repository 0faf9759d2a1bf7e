"""Means and peaks of the engine's state over a run of any length, in one pass and a bounded amount of memory.

`timeline` makes whole step functions, which a plot needs; ten million steps of them are gigabytes. A mean
and a peak need only the running sum: the same numbers, to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from vsim.sim.run import Column, Run
from vsim.sim.timeline import idle_after

Int64Array = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

CHUNK = 1 << 18  # steps at a time


class StateTotal:
    """One step function, piece by piece: `mean` over [start, end] and `peak`, as `timeline.StepFunction` has them."""

    def __init__(self, start_ns: int, end_ns: int) -> None:
        self._span_ns = end_ns - start_ns
        self._until = np.array([start_ns, end_ns], dtype=float)
        self._integral = [0.0, 0.0]
        self._at: int | None = (
            None  # the last change so far, the value from there on, the sum up to it
        )
        self._value = self._sum = 0.0
        self.peak = -np.inf

    def add(
        self,
        at_ns: Int64Array,
        value: npt.NDArray[np.generic],
        widths_ns: FloatArray | None = None,
    ) -> None:
        """The next changes: from `at_ns[i]` on it is `value[i]`; ascending, both of shape (k,).

        `widths_ns`: the k - 1 differences of `at_ns`, for who adds several values with the same times.
        """
        if not len(at_ns):
            return
        before = at_ns[0] if self._at is None else self._at
        total = np.empty(len(at_ns))
        total[0] = self._sum + self._value * (at_ns[0] - before)
        widths = np.diff(at_ns).astype(float) if widths_ns is None else widths_ns
        np.multiply(value[:-1], widths, out=total[1:], dtype=float)
        # One after the other, so that a sum carried over is the sum in one piece.
        np.cumsum(total, out=total)
        for which, until in enumerate(self._until):
            place = int(np.searchsorted(at_ns, until, side="right")) - 1
            if place >= 0:
                self._integral[which] = float(
                    total[place] + float(value[place]) * (until - at_ns[place])
                )
        self._at, self._value, self._sum = int(at_ns[-1]), float(value[-1]), float(total[-1])
        self.peak = max(self.peak, float(value.max()))

    @property
    def mean(self) -> float | None:
        """Time-weighted; None if the span is empty or nothing was added."""
        if self._span_ns <= 0 or self._at is None:
            return None
        return (self._integral[1] - self._integral[0]) / self._span_ns


def in_one_pass(run: Run) -> bool:
    """Can `state_totals` take this run: one replica, steps in order of their start?"""
    start = run.steps["start_ns"]
    return "replica" not in run.steps and bool((start[1:] >= start[:-1]).all())


def state_totals(run: Run, start_ns: int, end_ns: int) -> tuple[Mapping[str, StateTotal], float]:
    """Totals of "blocks", "wasted" (slots), "running", "waiting", and the largest share of slots wasted.

    For runs that `in_one_pass` accepts, with at least one step.
    """
    totals = {
        name: StateTotal(start_ns, end_ns) for name in ("blocks", "wasted", "running", "waiting")
    }
    largest_share = 0.0
    for piece, moment, at_ns in _changes(run):
        blocks = run.steps["kv_blocks_used"][piece]
        slots = blocks.astype(np.int64) * run.block_size
        wasted = slots - run.steps["kv_tokens_used"][piece]
        states: dict[str, Column] = {
            "blocks": blocks,
            "wasted": wasted,
            "running": run.steps["running"][piece],
            "waiting": run.steps["waiting"][piece],
        }
        share = np.divide(wasted, np.maximum(slots, 1), dtype=float)
        largest_share = max(largest_share, float(share.max(initial=0.0)))
        widths = np.diff(at_ns).astype(float)
        for name, state in states.items():
            # Where nobody is in flight the state is 0.
            totals[name].add(at_ns, _with(state, moment, 0), widths)
    return totals, largest_share


def _with(values: Column, before: Int64Array, what: Int64Array | int) -> Column:
    """`values` with `what` put in before the given places."""
    return np.insert(values, before, what) if len(before) else values


def _changes(run: Run) -> Iterator[tuple[slice, Int64Array, Int64Array]]:
    """Piece by piece: which steps, before which of them (counted in the piece) the engine falls idle, and the
    times of all changes in order, idle ones included."""
    start, end = run.steps["start_ns"], run.steps["end_ns"]
    idle_from = end[idle_after(run, start, end, None)]
    # Where a step starts at the very instant the last one ended, the new state wins.
    before = np.searchsorted(start, idle_from, side="left")
    for low in range(0, len(start), CHUNK):
        high = min(low + CHUNK, len(start))
        here = slice(
            int(np.searchsorted(before, low, side="left")),
            len(before) if high == len(start) else int(np.searchsorted(before, high, side="left")),
        )
        moment = before[here] - low
        yield slice(low, high), moment, _with(start[low:high], moment, idle_from[here])
