"""V1's CPU offload tier, scheduler side: a second-level prefix cache that full blocks are written through to.

Decides what vLLM 0.32.0's OffloadingConnectorScheduler decides (distributed/kv_transfer/kv_connector/v1/
offloading/scheduler.py) for full-attention groups (spec section 9).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from vsim.errors import UserError
from vsim.sim.config import SchedulerConfig
from vsim.sim.cpu_cache import ChunkKey, CpuCache
from vsim.sim.kv_groups import Group
from vsim.sim.kvcache import KVCache
from vsim.sim.request import FINISHED, Request
from vsim.sim.step import Transfers


@dataclass(slots=True)
class _Tracked:
    """What the tier knows of one request."""

    request: Request
    blocks: list[list[int]]  # by group; kept when the request has finished
    stored_chunks: list[int]  # by group: leading chunks that need not be looked at again
    keys: list[list[ChunkKey]]  # by group: of the chunks that were asked for so far
    jobs: set[int] = field(default_factory=set)  # one load, or any number of stores
    local_tokens: int = 0
    seen: dict[ChunkKey, None] = field(default_factory=dict)
    finish_handled: bool = False


@dataclass(slots=True)
class _Job:
    request: int
    keys: list[ChunkKey]
    blocks: list[int]
    is_store: bool


class OffloadTier:
    """Decides per step what to load and what to store. `cache` is the scheduler's GPU cache."""

    def __init__(self, config: SchedulerConfig, cache: KVCache) -> None:
        assert config.kv_offload is not None
        if any(group.window is not None for group in cache.groups):
            raise UserError(
                "kv_offload: vsim models the CPU offload tier for full attention only, not for"
                " sliding windows; drop kv_offload or the windowed groups"
            )
        self._cache = cache
        self._blocks_per_chunk = config.kv_offload.blocks_per_chunk
        self._prompt_only = config.kv_offload.offload_prompt_only
        self.cpu = CpuCache(config.kv_offload.cpu_blocks, config.kv_offload.store_threshold)
        # With prefix caching a chunk is loaded once and then shared; without, everyone loads his own.
        self._loads_are_shared = config.enable_prefix_caching
        self._loading: set[ChunkKey] = set()
        self._tracked: dict[int, _Tracked] = {}
        self._jobs: dict[int, _Job] = {}
        self._num_jobs = 0
        # Blocks whose request has gone while a store still reads them -> these stores.
        self._read_by: dict[int, set[int]] = {}
        # Of the step being put together:
        self._loads: dict[int, tuple[int, int]] = {}
        self._new_blocks: set[int] = set()

    # --- while scheduling ------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        count = len(self._cache.groups)
        self._tracked[request.index] = _Tracked(
            request,
            blocks=[[] for _ in range(count)],
            stored_chunks=[0] * count,
            keys=[[] for _ in range(count)],
        )

    def lookup(self, request: Request, local_tokens: int) -> int | None:
        """Tokens that can be loaded beyond `local_tokens`; None: ask again in a later step."""
        tracked = self._tracked[request.index]
        for blocks in tracked.blocks:
            blocks.clear()
        if tracked.jobs:
            return None
        tracked.local_tokens = local_tokens
        return self._lookup(request, local_tokens)

    def _lookup(self, request: Request, local_tokens: int) -> int | None:
        end = request.num_tokens
        hit = 0
        not_yet = False
        again = True
        while again:
            again = False
            for group in self._cache.groups:
                chunk = group.block_size * self._blocks_per_chunk
                keys = self._chunk_keys(group, request)
                end = min(end, len(keys) * chunk)
                if end - local_tokens < chunk:
                    return 0
                start = local_tokens // chunk
                found = self._leading_chunks(keys[start : -(-end // chunk)])
                if found == 0:
                    return 0
                if found is None:
                    not_yet = True
                else:
                    end = min(end, chunk * (start + found))
                if end - local_tokens < chunk:
                    return 0
                if end - local_tokens < hit and not_yet:
                    # A group ends sooner than another one was deferred for: maybe there is no need to wait.
                    not_yet = False
                    again = True
                hit = end - local_tokens
        if not_yet:
            return None
        if self._loading:
            for group in self._cache.groups:
                chunk = group.block_size * self._blocks_per_chunk
                keys = self._chunk_keys(group, request)
                wanted = keys[local_tokens // chunk : -(-(local_tokens + hit) // chunk)]
                if not self._loading.isdisjoint(wanted):
                    return None
        return hit

    def _leading_chunks(self, keys: list[ChunkKey]) -> int | None:
        """How many of `keys` in a row the CPU holds; None: some of them are still being stored."""
        count = 0
        ready = True
        for key in keys:
            state = self.cpu.state(key)
            if state is None:
                break
            ready = ready and state
            count += 1
        return count if ready else None

    def start_load(self, request: Request, external_tokens: int) -> None:
        """The blocks for `external_tokens` more tokens are allocated: fetch their KV."""
        tracked = self._tracked[request.index]
        per_chunk = self._blocks_per_chunk
        cached = tracked.local_tokens + external_tokens
        keys: list[ChunkKey] = []
        num_blocks = 0
        for group in self._cache.groups:
            table = request.tables[group.index]
            self._new_blocks.update(table)
            end = -(-cached // group.block_size)
            # A prompt of one block of one token, loaded whole, is looked up and loaded once more: by then
            # its block has a key, and nothing is left to copy.
            first = next(
                (
                    k
                    for k in range(-(-tracked.local_tokens // group.block_size), end)
                    if not self._cache.pool.has_key(table[k])
                ),
                end,
            )
            end_chunk = -(-cached // (group.block_size * per_chunk))
            if end > first:
                keys += self._chunk_keys(group, request)[first // per_chunk : end_chunk]
            num_blocks += end - first
            tracked.stored_chunks[group.index] = end_chunk
        self.cpu.start_load(keys)
        tracked.seen.update(dict.fromkeys(keys))
        number = self._new_job(_Job(request.index, keys, [], is_store=False))
        tracked.jobs.add(number)
        self._loads[number] = (request.index, num_blocks)
        if self._loads_are_shared:
            self._loading.update(keys)

    def request_finished(self, request: Request) -> None:
        """Called before a finished request's blocks are freed."""
        tracked = self._tracked[request.index]
        for number in tracked.jobs:
            for block in self._jobs[number].blocks:
                self._read_by.setdefault(block, set()).add(number)

    # --- once a step is put together -------------------------------------------------------------------

    def transfers(
        self,
        scheduled: dict[Request, int],
        preempted: Iterable[Request],
        finished: Iterable[int],
    ) -> Transfers:
        """What the worker copies with this step. Called before its tokens count as computed.

        `finished`: requests that finished since the last step.
        """
        self._note_blocks(scheduled)
        flush: set[int] = set()
        for request in preempted:
            flush |= self._tracked[request.index].jobs
        for block in self._new_blocks.intersection(self._read_by):
            flush |= self._read_by[block]
        stores: dict[int, tuple[int, int]] = {}
        finished = list(finished)
        for request, num_tokens in scheduled.items():
            self._store(
                self._tracked[request.index],
                request.num_computed_tokens + num_tokens,
                stores,
                flush,
            )
        for index in finished:
            tracked = self._tracked[index]
            request = tracked.request
            # The last token's KV was never computed.
            computed = max(request.num_prompt_tokens, request.num_tokens - 1)
            self._store(tracked, computed, stores, flush)
        for index in finished:
            self._forget_finished(self._tracked[index])
        transfers = Transfers(self._loads, stores, tuple(sorted(flush)))
        self._loads = {}
        self._new_blocks = set()
        return transfers

    def _note_blocks(self, scheduled: dict[Request, int]) -> None:
        for request in scheduled:
            tracked = self._tracked[request.index]
            for group in self._cache.groups:
                blocks, table = tracked.blocks[group.index], request.tables[group.index]
                fresh = table[len(blocks) :]
                blocks.extend(fresh)
                self._new_blocks.update(fresh)

    def _store(
        self,
        tracked: _Tracked,
        num_computed_tokens: int,
        stores: dict[int, tuple[int, int]],
        flush: set[int],
    ) -> None:
        """Queue full chunks for storing that the CPU does not hold yet."""
        request = tracked.request
        limit = min(num_computed_tokens, request.num_tokens)
        if self._prompt_only:
            limit = min(limit, request.num_prompt_tokens)
        ends = [self._storable_chunks(group, tracked, limit) for group in self._cache.groups]
        offered: list[ChunkKey] = []
        for group, end in zip(self._cache.groups, ends, strict=True):
            start = tracked.stored_chunks[group.index]
            if end > start:
                offered += self._chunk_keys(group, request)[start:end]
        taken: list[ChunkKey] | None = []
        if offered:
            taken = self.cpu.start_store(offered, tracked.seen)
        if taken is None:
            return  # no room now; offered again with the request's next step
        if taken:
            self._start_store(tracked, ends, taken, stores, flush)
        for group, end in zip(self._cache.groups, ends, strict=True):
            tracked.stored_chunks[group.index] = max(tracked.stored_chunks[group.index], end)

    def _start_store(
        self,
        tracked: _Tracked,
        ends: list[int],
        taken: list[ChunkKey],
        stores: dict[int, tuple[int, int]],
        flush: set[int],
    ) -> None:
        request = tracked.request
        per_chunk = self._blocks_per_chunk
        wanted = set(taken)
        blocks: list[int] = []
        for group, end in zip(self._cache.groups, ends, strict=True):
            start = tracked.stored_chunks[group.index]
            keys = self._chunk_keys(group, request)
            for chunk in range(start, end):
                if keys[chunk] in wanted:
                    blocks += tracked.blocks[group.index][
                        chunk * per_chunk : (chunk + 1) * per_chunk
                    ]
        number = self._new_job(_Job(request.index, taken, blocks, is_store=True))
        tracked.jobs.add(number)
        stores[number] = (request.index, len(blocks))
        if request.status == FINISHED:
            for block in blocks:
                self._read_by.setdefault(block, set()).add(number)
                if block in self._new_blocks:
                    flush.add(number)

    def _forget_finished(self, tracked: _Tracked) -> None:
        request = tracked.request
        tracked.finish_handled = True
        ends = {}
        for group in self._cache.groups:
            for position, key in enumerate(self._chunk_keys(group, request)):
                ends[key] = ((position + 1) * group.block_size, group.index)
        self.cpu.request_finished(sorted(tracked.seen, key=ends.__getitem__))
        if not tracked.jobs:
            del self._tracked[request.index]

    # --- when the worker reports -----------------------------------------------------------------------

    def complete(self, jobs: Iterable[int]) -> list[int]:
        """Copies that have ended. Returns the requests whose load this was."""
        loaded: list[int] = []
        for number in jobs:
            job = self._jobs.pop(number)
            tracked = self._tracked[job.request]
            if job.is_store:
                self.cpu.end_store(job.keys)
                if tracked.request.status == FINISHED:
                    for block in job.blocks:
                        readers = self._read_by[block]
                        readers.discard(number)
                        if not readers:
                            del self._read_by[block]
            else:
                self.cpu.end_load(job.keys)
                self._loading.difference_update(job.keys)
                loaded.append(job.request)
            tracked.jobs.remove(number)
            if tracked.finish_handled and not tracked.jobs:
                del self._tracked[job.request]
        return loaded

    @property
    def has_jobs(self) -> bool:
        """The engine keeps stepping until all copies are reported."""
        return bool(self._jobs)

    # --- chunks ----------------------------------------------------------------------------------------

    def _chunk_keys(self, group: Group, request: Request) -> list[ChunkKey]:
        """Keys of all whole chunks of a request's known tokens."""
        chunk = group.block_size * self._blocks_per_chunk
        known = self._tracked[request.index].keys[group.index]
        count = request.num_tokens // chunk
        if count > len(known):
            assert request.keys is not None
            unit = chunk // self._cache.key_block_size
            keys = request.keys.upto(count * chunk)
            first = (len(known) + 1) * unit - 1
            known.extend((group.index, key) for key in keys[first : count * unit : unit])
        return known

    def _storable_chunks(self, group: Group, tracked: _Tracked, num_tokens: int) -> int:
        """Whole chunks within `num_tokens` that have blocks."""
        return min(
            num_tokens // (group.block_size * self._blocks_per_chunk),
            len(tracked.blocks[group.index]) // self._blocks_per_chunk,
        )

    def _new_job(self, job: _Job) -> int:
        number = self._num_jobs
        self._num_jobs += 1
        self._jobs[number] = job
        return number
