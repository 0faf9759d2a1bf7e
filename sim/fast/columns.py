"""Columns that grow where they lie: pieces that are joined in the end would lie in memory twice."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from vsim.sim.run import Column

_FIRST = 1 << 15  # rows


class Columns:
    """Columns of one length, by name in the given order."""

    def __init__(self, kinds: Mapping[str, str]) -> None:
        self.names = tuple(kinds)
        self._columns = {name: np.zeros(_FIRST, dtype=kind) for name, kind in kinds.items()}
        self._length = 0

    def add(self, count: int, rows: Mapping[str, Column]) -> None:
        """`count` more rows; a column that `rows` does not have is 0 in them."""
        until = self._length + count
        for name, column in self._columns.items():
            if until > len(column):
                # The allocator moves the pages of a large array, not what is in them.
                column.resize(max(until, len(column) + len(column) // 8), refcheck=False)
            if name in rows:
                column[self._length : until] = rows[name]
        self._length = until

    def result(self) -> dict[str, Column]:
        """The columns, without room to spare. Nothing can be added any more."""
        for column in self._columns.values():
            column.resize(self._length, refcheck=False)
        return self._columns
