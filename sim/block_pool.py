"""The pool of KV-cache blocks: who is free, in which order, and which prefix each block holds.

Mirrors the decisions of vLLM 0.32.0's v1/core/block_pool.py and FreeKVCacheBlockQueue (spec section 4).
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Iterable

NULL_BLOCK = 0  # stands in block tables for tokens that have left a sliding window; never allocated


class BlockPool:
    """Blocks 1 .. num_blocks - 1, shared by all KV cache groups; block 0 is the null block.

    A block is free exactly when nobody references it. Its key survives that: it can be hit again until
    the block is handed out for new content.
    """

    def __init__(
        self, num_blocks: int, num_groups: int = 1, unkeyed_blocks_first: bool = True
    ) -> None:
        self.num_blocks = num_blocks
        self._unkeyed_blocks_first = unkeyed_blocks_first
        # In order of reuse: those of `_first`, all from block `_fresh` on, those of `_last`. What nobody took
        # yet is only counted: thousands of replicas have millions of blocks, and most are never touched.
        # An ordered dict is a doubly linked list that the standard library keeps.
        self._first: OrderedDict[int, None] = OrderedDict()
        self._last: OrderedDict[int, None] = OrderedDict()
        self._fresh = min(1, num_blocks)
        # Of the blocks below `_fresh`:
        self.refs = [0] * self._fresh
        self._key = [0] * self._fresh  # 0: holds no whole, reusable prefix
        self._group = [0] * self._fresh  # KV cache group of that key
        # Further keys of the same block: a prompt's end inside a block larger than the hashing unit.
        self._more_keys: dict[int, list[tuple[int, int]]] = {}
        # By group: key -> the block, or the blocks in order of registration where several hold the same.
        self._cached: list[dict[int, int | dict[int, None]]] = [{} for _ in range(num_groups)]

    @property
    def num_free(self) -> int:
        return len(self._first) + self.num_blocks - self._fresh + len(self._last)

    @property
    def num_usable(self) -> int:
        return max(self.num_blocks - 1, 0)

    @property
    def num_cached_keys(self) -> int:
        return sum(map(len, self._cached))

    def free_list(self) -> list[int]:
        """Free blocks in order of reuse."""
        return [*self._first, *range(self._fresh, self.num_blocks), *self._last]

    def free_list_crc(self) -> int:
        """CRC-32 of the free blocks' ids joined by ',', in order of reuse."""
        return zlib.crc32(",".join(map(str, self.free_list())).encode())

    def take(self, count: int) -> list[int]:
        """Hand out `count` blocks (at most num_free) for new content: what they held is lost now."""
        refs, keys, first, last = self.refs, self._key, self._first, self._last
        blocks: list[int] = []
        while first and len(blocks) < count:  # none of them holds anything
            block, _none = first.popitem(last=False)
            refs[block] = 1
            blocks.append(block)
        fresh = min(count - len(blocks), self.num_blocks - self._fresh)
        if fresh:
            blocks += range(self._fresh, self._fresh + fresh)
            self._fresh += fresh
            refs += [1] * fresh
            keys += [0] * fresh
            self._group += [0] * fresh
        while len(blocks) < count:
            block, _none = last.popitem(last=False)
            if keys[block]:
                self._forget(block)
            refs[block] = 1
            blocks.append(block)
        return blocks

    def touch(self, blocks: Iterable[int]) -> int:
        """Take a reference on blocks that were hit. Returns how many of them were in use already."""
        refs, free = self.refs, self._last  # what holds a prefix was released to the end
        shared = 0
        for block in blocks:
            if not block:
                continue
            if refs[block]:
                shared += 1
            else:
                del free[block]
            refs[block] += 1
        return shared

    def release(self, blocks: Iterable[int]) -> int:
        """Drop one reference on each of `blocks`, given in order of eviction.

        Returns how many of them others still hold.
        """
        refs, keys, first, last = self.refs, self._key, self._first, self._last
        unkeyed: list[int] = []
        keyed: list[int] = []
        shared = 0
        for block in blocks:
            if not block:
                continue
            refs[block] -= 1
            if refs[block]:
                shared += 1
            elif keys[block] or not self._unkeyed_blocks_first:
                keyed.append(block)
            else:
                unkeyed.append(block)
        for block in reversed(unkeyed):
            first[block] = None
            first.move_to_end(block, last=False)
        for block in keyed:
            last[block] = None
        return shared

    def has_key(self, block: int) -> bool:
        """Does `block` hold a whole prefix that somebody else could reuse?"""
        return bool(self._key[block])

    def find(self, group: int, key: int) -> int:
        """The block that holds the prefix `key`, the one registered first if several do; 0: none does."""
        found = self._cached[group].get(key)
        if found is None:
            return NULL_BLOCK
        return found if isinstance(found, int) else next(iter(found))

    def register(self, group: int, key: int, block: int) -> None:
        """From now on `key` finds `block` too."""
        cached = self._cached[group]
        found = cached.get(key)
        if found is None:
            cached[key] = block
        elif isinstance(found, int):
            if found == block:
                return
            cached[key] = {found: None, block: None}
        elif block in found:
            return
        else:
            found[block] = None
        if self._key[block]:
            self._more_keys.setdefault(block, []).append((group, key))
        else:
            self._key[block] = key
            self._group[block] = group

    def _forget(self, block: int) -> None:
        self._unlink(self._group[block], self._key[block], block)
        self._key[block] = 0
        if self._more_keys:
            for group, key in self._more_keys.pop(block, ()):
                self._unlink(group, key, block)

    def _unlink(self, group: int, key: int, block: int) -> None:
        cached = self._cached[group]
        found = cached[key]
        if isinstance(found, int) or len(found) == 1:
            del cached[key]
        else:
            del found[block]
