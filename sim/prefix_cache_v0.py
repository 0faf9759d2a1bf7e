"""V0's prefix cache: full blocks found again by their content, evicted when nothing else is free.

Follows vLLM 0.8.5 core/block/prefix_caching_block.py and core/evictor.py (spec 12.21). Both devices keep one;
only the GPU's knows which blocks are computed and when they were last used.
"""

from __future__ import annotations

from bisect import bisect_left
from heapq import heapify, heappop, heappush

from vsim.sim.block_manager_v0 import NoFreeBlocksError
from vsim.sim.request_v0 import RequestV0

NEVER_ACCESSED = -1.0
# Outdated entries of the eviction heap are swept out once it is this many times longer than what it orders.
_SWEEP_RATIO = 50


class EvictionError(Exception):
    """The evictor handed out a block that it knew under an outdated key: 0.8.5 fails an assertion here."""


class Evictor:
    """Unreferenced blocks with content, by (oldest use, longest prefix, lowest id).

    A block that is taken back keeps its entry in the heap. Such entries are passed over when they surface,
    but only if the block is in use or its time differs: one that was freed again with the same time (a
    swapped-out block never gets one) is mistaken for the new entry, as in 0.8.5. Where even the depth is
    equal, 0.8.5 goes by hash value. That differs from process to process (before Python 3.12 it takes in
    the address of None), so the same run may die or not; here the valid entry goes first, and
    `coin_flips` counts.
    """

    def __init__(self) -> None:
        self._held: dict[int, tuple[float, int, int]] = {}  # block -> time, -tokens, key
        self._heap: list[tuple[float, int, int, int]] = []
        self.coin_flips = 0

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, block: int) -> bool:
        return block in self._held

    def add(self, block: int, key: int, prefix_tokens: int, last_access: float) -> None:
        self._held[block] = (last_access, -prefix_tokens, key)
        heappush(self._heap, (last_access, -prefix_tokens, block, key))
        if len(self._heap) > _SWEEP_RATIO * len(self._held):
            self._heap = [
                (time, depth, held, its_key) for held, (time, depth, its_key) in self._held.items()
            ]
            heapify(self._heap)

    def remove(self, block: int) -> None:
        del self._held[block]

    def evict(self) -> tuple[int, int]:
        """The next block to reuse and the key it was found under."""
        while self._heap:
            entry = heappop(self._heap)
            time, _, block, _ = entry
            held = self._held.get(block)
            if held is not None and held[0] == time:
                del self._held[block]
                return block, self._valid_first(entry, held[2])
        raise NoFreeBlocksError

    def _valid_first(self, entry: tuple[float, int, int, int], valid: int) -> int:
        """The key of `entry`, or `valid` if an entry that is equal but for its key has that one."""
        heap = self._heap
        equals = [entry]
        while heap and heap[0][:3] == entry[:3]:
            equals.append(heappop(heap))
        keys = [key for *_, key in equals]
        self.coin_flips += len(set(keys)) > 1
        chosen = keys.index(valid) if valid in keys else 0
        for position, other in enumerate(equals):
            if position != chosen:
                heappush(heap, other)
        return keys[chosen]


class PrefixCachingStack:
    """The blocks of one device under prefix caching. Full blocks are shared, the last one is a request's own.

    Blocks without content key come from a stack as without caching; when it is empty, the evictor gives.
    """

    def __init__(self, num_blocks: int, block_size: int, first_id: int = 0) -> None:
        self.first_id = first_id
        self.num_blocks = num_blocks
        self.block_size = block_size
        # Slots counted twice or more because several tables name the block: (references - 1) blocks' worth.
        self.num_extra_references = 0
        self._free = list(range(first_id + num_blocks - 1, first_id - 1, -1))  # top at the end
        self._by_key: dict[int, int] = {}  # also blocks that nobody references
        self._evictor = Evictor()
        self._references = [0] * (first_id + num_blocks)
        self._computed = [False] * (first_id + num_blocks)
        self._last_access = [NEVER_ACCESSED] * (first_id + num_blocks)
        self._touched: list[int] = []  # became full in this step: computed once it ran

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._evictor)

    @property
    def num_cached_free(self) -> int:
        """Free blocks that still hold content somebody may ask for."""
        return len(self._evictor)

    @property
    def coin_flips(self) -> int:
        """Evictions in which 0.8.5 would have gone by hash value: one process would have gone on, another died."""
        return self._evictor.coin_flips

    def hashless_free_ids(self) -> list[int]:
        return self._free[::-1]

    def cached_prefix_tokens(self, request: RequestV0) -> int:
        """Tokens of the leading blocks that are cached and computed.

        The answer is frozen while the request is in prefill: what it finds at its first look is what it is
        granted, also if it waits on and the blocks are evicted meanwhile. 0.8.5 bisects, trusting that a
        cached block's predecessors are cached; where they are not, the answer is odd in the same way.
        """
        if request.num_cached_tokens is None:
            keys = self._keys(request, request.num_tokens)
            request.num_cached_tokens = self.block_size * bisect_left(
                keys, True, hi=request.num_tokens // self.block_size, key=self._is_missing
            )
        return request.num_cached_tokens

    def mark_touched_as_computed(self) -> None:
        """The step is made: what it fills counts as computed from the next step on."""
        for block in self._touched:
            self._computed[block] = True
        self._touched.clear()

    def take(self, request: RequestV0) -> None:
        placed = request.num_placed_tokens
        keys = self._keys(request, placed)
        table = request.table
        for position in range(placed // self.block_size):
            table.append(self._take_full(keys[position]))
        if placed % self.block_size:
            table.append(self._take_hashless())

    def grow(self, request: RequestV0) -> None:
        block_size = self.block_size
        full_before = request.num_placed_tokens // block_size
        request.num_placed_tokens = request.num_tokens
        table = request.table
        for _ in range(-(-request.num_tokens // block_size) - len(table)):
            table.append(self._take_hashless())
        full = request.num_tokens // block_size
        if full > full_before:
            keys = self._keys(request, request.num_tokens)
            for position in range(full_before, full):
                table[position] = self._promote(table[position], keys[position])

    def give_back(self, request: RequestV0, last_access: float | None = None) -> None:
        table = request.table
        if last_access is not None:
            for block in table:
                self._last_access[block] = last_access
            request.num_cached_tokens = None
        full = request.num_placed_tokens // self.block_size
        keys = self._keys(request, request.num_placed_tokens)
        for position, block in enumerate(table):
            if position < full:
                self._drop_full(block, keys[position], (position + 1) * self.block_size)
            else:
                self._drop_hashless(block)
        request.table = []

    def full_blocks_to_take(self, request: RequestV0) -> int:
        full = request.num_placed_tokens // self.block_size
        keys = self._keys(request, request.num_placed_tokens)
        by_key, evictor = self._by_key, self._evictor
        count = 0
        for position in range(full):
            block = by_key.get(keys[position])
            # A cached block that nobody references counts: it leaves the free ones.
            count += block is None or block in evictor
        return count

    @staticmethod
    def _keys(request: RequestV0, num_tokens: int) -> list[int]:
        assert request.keys is not None, "prefix caching needs the content of requests"
        return request.keys.upto(num_tokens)

    def _is_missing(self, key: int) -> bool:
        block = self._by_key.get(key)
        if block is None:
            return True
        if self._references[block]:
            return not self._computed[block]
        return block not in self._evictor

    def _take_full(self, key: int) -> int:
        block = self._by_key.get(key)
        if block is not None:
            self._refer_to_cached(block)
            return block
        return self._promote(self._take_hashless(), key)

    def _take_hashless(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, key = self._evictor.evict()
            if self._by_key.get(key) != block:
                raise EvictionError
            del self._by_key[key]
        self._references[block] = 1
        self._track(block, computed=False)
        return block

    def _promote(self, block: int, key: int) -> int:
        """The block is full now: let others find it, or change to its twin if there is one."""
        twin = self._by_key.get(key)
        if twin is None:
            self._by_key[key] = block
            self._touched.append(block)
            return block
        self._drop_hashless(block)
        self._refer_to_cached(twin)
        return twin

    def _refer_to_cached(self, block: int) -> None:
        self._references[block] += 1
        if self._references[block] > 1:
            self.num_extra_references += 1
            return
        self._evictor.remove(block)
        self._track(block, computed=True)

    def _track(self, block: int, computed: bool) -> None:
        self._computed[block] = computed
        self._last_access[block] = NEVER_ACCESSED

    def _drop_full(self, block: int, key: int, prefix_tokens: int) -> None:
        self._references[block] -= 1
        if self._references[block]:
            self.num_extra_references -= 1
            return
        self._evictor.add(block, key, prefix_tokens, self._last_access[block])

    def _drop_hashless(self, block: int) -> None:
        self._references[block] = 0
        self._free.append(block)
