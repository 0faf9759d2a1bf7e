"""Prefix-cache keys: one integer per full block, equal exactly where the whole token prefix is equal.

vLLM chains a hash over the tokens of each block (v1/core/kv_cache_utils.py, `hash_block_tokens`, 0.32.0);
which hash it is changes no decision, only equality does. Here the chain runs over maximal token runs
(content.py) instead of tokens: a run of k whole blocks costs one dictionary look-up, not k, so a prompt of
126,000 tokens in 512-token pieces costs 247.
"""

from __future__ import annotations

from collections.abc import Sequence

from vsim.sim.content import Run

_RUN_BLOCKS = 1 << 32  # keys set aside for the blocks of one run


class KeyTable:
    """Names for prefixes, shared by all requests of one scheduler."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._names: dict[object, int] = {}
        self._last = 0

    def name(self, parent: int, content: object) -> int:
        """The first key of `content` after the prefix `parent`; equal for equal arguments."""
        known = (parent, content)
        name = self._names.get(known)
        if name is None:
            name = self._names[known] = self.fresh()
        return name

    def fresh(self) -> int:
        """A name that nothing else will ever have: for tokens that occur in one request alone."""
        self._last += _RUN_BLOCKS
        return self._last


class BlockKeys:
    """The keys of one request's blocks, computed as far as somebody asks.

    `runs` are the request's tokens, prompt and output, as maximal runs; the last one may promise more
    tokens than there are yet. Negative token ids are private to the request.
    """

    __slots__ = ("_name", "_offset", "_run", "_runs", "_sub", "_table", "keys")

    def __init__(self, table: KeyTable, runs: Sequence[Run]) -> None:
        self.keys: list[int] = []
        self._table = table
        self._runs = runs
        self._run = 0  # where the next block starts: this run, ...
        self._offset = 0  # ... so many tokens into it
        self._name = 0  # name of the run the last block lay in, 0: the next block starts a new name
        self._sub = 0  # blocks so far under that name

    def upto(self, num_tokens: int) -> list[int]:
        """Keys of (at least) the full blocks within the first `num_tokens` tokens, which must be known."""
        block_size = self._table.block_size
        keys = self.keys
        missing = num_tokens // block_size - len(keys)
        while missing > 0:
            first, length = self._runs[self._run]
            first += self._offset
            left = length - self._offset
            if left < block_size:
                keys.append(self._mixed_block())
                missing -= 1
                continue
            if not self._name:
                parent = keys[-1] if keys else 0
                table = self._table
                self._name = table.fresh() if first < 0 else table.name(parent, first)
                self._sub = 0
            count = min(left // block_size, missing)
            start = self._name + self._sub
            keys.extend(range(start, start + count))
            missing -= count
            self._sub += count
            self._step(count * block_size)
        return keys

    def _mixed_block(self) -> int:
        """The key of a block that lies across a run's end."""
        parts: list[Run] = []
        wanted = self._table.block_size
        private = False
        while wanted:
            first, length = self._runs[self._run]
            count = min(wanted, length - self._offset)
            parts.append((first + self._offset, count))
            private = private or first < 0
            wanted -= count
            self._step(count)
        self._name = 0
        if private:
            return self._table.fresh()
        return self._table.name(self.keys[-1] if self.keys else 0, tuple(parts))

    def _step(self, tokens: int) -> None:
        self._offset += tokens
        if self._offset == self._runs[self._run][1]:
            self._run += 1
            self._offset = 0
            self._name = 0
