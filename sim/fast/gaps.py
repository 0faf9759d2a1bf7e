"""A multiset of inter-token gaps that grows by (gap, count) pairs and stays as small as its values."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
_MANY = 1 << 20  # pairs that wait to be merged, at least


class Gaps:
    """Pairs wait until there are as many as distinct values: each value is sorted a few times, not often."""

    def __init__(self) -> None:
        self._waiting: list[Int64Array] = []
        self._num_waiting = 0
        self._merged = np.empty((0, 2), dtype=np.int64)

    def add(self, pairs: Int64Array) -> None:
        """`pairs`: shape (k, 2), any order, values may repeat. They are copied."""
        self._waiting.append(_merged(pairs))
        self._num_waiting += len(self._waiting[-1])
        if self._num_waiting > max(_MANY, len(self._merged)):
            self._merge()

    def result(self) -> tuple[Int64Array, Int64Array]:
        """(distinct values ascending, how often each occurred)."""
        self._merge()
        return (
            np.ascontiguousarray(self._merged[:, 0]),
            np.ascontiguousarray(self._merged[:, 1]),
        )

    def _merge(self) -> None:
        self._merged = _merged(np.concatenate([self._merged, *self._waiting]))
        self._waiting, self._num_waiting = [], 0


def _merged(pairs: Int64Array) -> Int64Array:
    if not len(pairs):
        return pairs.copy()
    pairs = pairs[np.argsort(pairs[:, 0])]  # counts of equal values are added: any order does
    starts = np.flatnonzero(np.diff(pairs[:, 0], prepend=pairs[0, 0] - 1))
    return np.column_stack([pairs[starts, 0], np.add.reduceat(pairs[:, 1], starts)])
