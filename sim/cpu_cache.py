"""The CPU side of V1's offload tier: which chunks of KV it holds, and which it gives up first.

Decides what vLLM 0.32.0's v1/kv_offload/cpu/manager.py with the LRU policy decides.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

# (KV cache group, key of the prefix that ends with the chunk)
ChunkKey = tuple[int, int]

_BEING_STORED = -1


class CpuCache:
    """Chunks by key. A chunk is being stored, or readable with a number of loads that read it.

    Recency belongs to requests, not transfers: a chunk gets its rank when it is created, and again when a
    request that used it finishes, its first chunk being the most recent.
    """

    def __init__(self, capacity: int, store_threshold: int = 0) -> None:
        self.capacity = capacity
        self._readers: dict[ChunkKey, int] = {}
        self._rank: dict[ChunkKey, int] = {}
        self._last_rank = 0
        self._evictable: set[ChunkKey] = set()
        # (rank, key); entries whose chunk has another rank by now, or is in use, are stale.
        self._queue: list[tuple[int, ChunkKey]] = []
        # How often each key was offered, oldest first: below the threshold a chunk is not worth storing.
        self._store_threshold = store_threshold
        self._offers: dict[ChunkKey, int] = {}

    def state(self, key: ChunkKey) -> bool | None:
        """True: can be read. False: is being stored. None: not there."""
        readers = self._readers.get(key)
        return None if readers is None else readers != _BEING_STORED

    def start_load(self, keys: Iterable[ChunkKey]) -> None:
        for key in keys:
            if self._readers[key] == 0:
                self._evictable.remove(key)
            self._readers[key] += 1

    def end_load(self, keys: Iterable[ChunkKey]) -> None:
        for key in keys:
            self._readers[key] -= 1
            if self._readers[key] == 0:
                self._make_evictable(key)

    def start_store(
        self, keys: Sequence[ChunkKey], seen: dict[ChunkKey, None]
    ) -> list[ChunkKey] | None:
        """Make room for those of `keys` that are not there yet, and return them; None if it cannot be.

        All or nothing. Keys that the request really uses are added to `seen`, also if there is no room.
        """
        if self._store_threshold >= 2:
            self._count_offers(keys)
        wanted: list[ChunkKey] = []
        for key in keys:
            state = self.state(key)
            if state is None:
                if self._store_threshold >= 2 and self._offers.get(key, 0) < self._store_threshold:
                    continue
                wanted.append(key)
                seen[key] = None
            elif state:
                seen[key] = None
        if not wanted:
            return []
        missing = len(wanted) - (self.capacity - len(self._readers))
        if missing > 0 and not self._evict(missing, set(keys)):
            return None
        for key in wanted:
            self._readers[key] = _BEING_STORED
            self._rank[key] = self._next_rank()
        return wanted

    def end_store(self, keys: Iterable[ChunkKey]) -> None:
        for key in keys:
            if self._readers.get(key) == _BEING_STORED:
                self._readers[key] = 0
                self._make_evictable(key)

    def request_finished(self, keys_from_the_start: Sequence[ChunkKey]) -> None:
        """A request used these chunks: they are recent now, the first one most."""
        for key in reversed(keys_from_the_start):
            if key in self._readers:
                self._rank[key] = self._next_rank()
                if key in self._evictable:
                    heapq.heappush(self._queue, (self._rank[key], key))

    def _next_rank(self) -> int:
        self._last_rank += 1
        return self._last_rank

    def _make_evictable(self, key: ChunkKey) -> None:
        self._evictable.add(key)
        heapq.heappush(self._queue, (self._rank[key], key))
        if len(self._queue) > 4 * len(self._readers) + 64:
            self._queue = [(self._rank[key], key) for key in self._evictable]
            heapq.heapify(self._queue)

    def _evict(self, count: int, protected: set[ChunkKey]) -> bool:
        """Drop the `count` least recent chunks that nobody uses and `protected` has not, or none."""
        if count > len(self._evictable):
            return False
        chosen: dict[ChunkKey, None] = {}
        kept: list[tuple[int, ChunkKey]] = []
        while self._queue and len(chosen) < count:
            entry = heapq.heappop(self._queue)
            rank, key = entry
            if key in chosen or key not in self._evictable or self._rank[key] != rank:
                continue
            kept.append(entry)
            if key not in protected:
                chosen[key] = None
        enough = len(chosen) == count
        for entry in kept:
            if not enough or entry[1] not in chosen:
                heapq.heappush(self._queue, entry)
        if enough:
            for key in chosen:
                self._evictable.remove(key)
                del self._readers[key]
                del self._rank[key]
        return enough

    def _count_offers(self, keys: Sequence[ChunkKey]) -> None:
        """Count an offer of each key; the table forgets the least recently offered ones."""
        offers, most = self._offers, 64_000
        fresh = []
        for key in keys:
            if key in offers:
                offers[key] = offers.pop(key) + 1
            else:
                fresh.append(key)
        room = len(offers) - (len(keys) - len(fresh))
        for key in fresh:
            if len(offers) >= most:
                if room <= 0:
                    continue
                del offers[next(iter(offers))]
                room -= 1
            offers[key] = 1
