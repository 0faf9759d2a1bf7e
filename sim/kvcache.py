"""Paged KV cache: block tables of requests over one pool, with prefix caching and sliding windows.

Decides what vLLM 0.32.0's v1/core/kv_cache_manager.py, kv_cache_coordinator.py and
single_type_kv_cache_manager.py decide (spec sections 3.6, 4 and 5).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vsim.sim.block_pool import NULL_BLOCK, BlockPool
from vsim.sim.config import SchedulerConfig
from vsim.sim.kv_groups import Group, make_groups
from vsim.sim.request import Request
from vsim.sim.versions import V1Rules


@dataclass(frozen=True, slots=True)
class Hit:
    """Blocks that already hold a request's prefix, by group, and the tokens they stand for."""

    tables: Sequence[list[int]]
    tokens: int


class KVCache:
    """Block tables over one pool. Allocation is all or nothing."""

    def __init__(self, config: SchedulerConfig, rules: V1Rules) -> None:
        self.groups = make_groups(config)
        self.max_model_len = config.max_model_len
        self.caching = config.enable_prefix_caching
        self.pool = BlockPool(
            config.num_gpu_blocks, len(self.groups), rules.reuses_unkeyed_blocks_first
        )
        self.watermark_blocks = int(config.watermark * config.num_gpu_blocks)
        # One slot holds one token of one group. Blocks shared by several requests count once.
        self.slots_used = 0
        self._last_block_first = self.caching or not rules.frees_in_table_order
        self.no_hit = Hit(tuple([] for _ in self.groups), 0)
        self._single = len(self.groups) == 1 and self.groups[0].window is None
        sizes = [group.block_size for group in self.groups]
        # Hits and registrations end where a block of every group ends.
        self.alignment = math.lcm(*sizes)
        self.key_block_size = math.gcd(*sizes)
        # Groups of one kind are looked up together; full attention first, as it bounds the others.
        kinds: dict[tuple[int | None, int], list[Group]] = {}
        for group in self.groups:
            kinds.setdefault((group.window, group.block_size), []).append(group)
        self._kinds = sorted(kinds.values(), key=lambda kind: kind[0].window is not None)

    # --- looking up ------------------------------------------------------------------------------------

    def lookup(self, request: Request) -> Hit:
        """The longest cached prefix of a request. At least one token is left to compute (spec 5.4)."""
        if not self.caching:
            return self.no_hit
        limit = request.num_tokens - 1
        assert request.keys is not None
        keys = request.keys.upto(request.num_tokens)
        if len(self.groups) == 1:
            request.shared_prefix_end = 0
            tables, tokens = self._find(self._kinds[0], keys, limit)
            return Hit(tables, tokens) if tokens else self.no_hit
        return self._lookup_all_kinds(request, keys, limit)

    def _lookup_all_kinds(self, request: Request, keys: list[int], limit: int) -> Hit:
        """A prefix that every kind of group holds: shorten until all agree."""
        tables: list[list[int]] = [[] for _ in self.groups]
        full_hits: dict[
            int, int
        ] = {}  # full attention holds every shorter prefix too: one look is enough
        longest = 0
        hit = limit
        while True:
            current = hit
            for position, kind in enumerate(self._kinds):
                if position in full_hits:
                    current = min(current, full_hits[position])
                    continue
                found, current = self._find(kind, keys, current)
                if kind[0].window is None:
                    full_hits[position] = current
                for group, table in zip(kind, found, strict=True):
                    tables[group.index] = table
                longest = max(longest, current)
            if current >= hit:
                break
            hit = current
            if len(self._kinds) == 2 and full_hits:
                break
        for group in self.groups:
            if group.window is None:
                del tables[group.index][-(-hit // group.block_size) :]
        # A prefix that another group holds further: worth keeping when this request computes it.
        request.shared_prefix_end = longest if longest > hit else 0
        return Hit(tables, hit) if hit else self.no_hit

    def _find(self, kind: list[Group], keys: list[int], limit: int) -> tuple[list[list[int]], int]:
        """Hit blocks of the groups of one kind within `limit` tokens, and the tokens they cover."""
        if kind[0].window is None:
            return self._find_full(kind, keys, limit)
        return self._find_window(kind, keys, limit)

    def _find_full(
        self, kind: list[Group], keys: list[int], limit: int
    ) -> tuple[list[list[int]], int]:
        block_size = kind[0].block_size
        scale = block_size // self.key_block_size
        wanted = keys if scale == 1 else keys[scale - 1 :: scale]
        tables: list[list[int]] = [[] for _ in kind]
        for key in wanted[: limit // block_size]:
            blocks = self._find_in_all(kind, key)
            if blocks is None:
                break
            for table, block in zip(tables, blocks, strict=True):
                table.append(block)
        tokens = len(tables[0]) * block_size
        tokens -= tokens % self.alignment
        for table in tables:
            del table[tokens // block_size :]
        return tables, tokens

    def _find_window(
        self, kind: list[Group], keys: list[int], limit: int
    ) -> tuple[list[list[int]], int]:
        """Only the blocks that the next token still sees have to be there: search from the right."""
        block_size = kind[0].block_size
        scale = block_size // self.key_block_size
        needed = kind[0].blocks_in_window
        count = limit // block_size
        aligned = block_size == self.alignment
        tables = [[NULL_BLOCK] * count for _ in kind]
        run = 0
        length = 0
        for position in range(count - 1, -1, -1):
            blocks = self._find_in_all(kind, keys[(position + 1) * scale - 1])
            if blocks is None:
                run = 0
                continue
            if run == 0 and not aligned and (position + 1) * block_size % self.alignment:
                continue
            for table, block in zip(tables, blocks, strict=True):
                table[position] = block
            run += 1
            if run >= needed:
                length = position + run
                break
        else:
            length = run  # the sequence's own start: shorter than the window, and whole
            while length * block_size % self.alignment:
                length -= 1
        for table in tables:
            del table[length:]
        return tables, length * block_size

    def _find_in_all(self, kind: list[Group], key: int) -> list[int] | None:
        blocks = []
        for group in kind:
            block = self.pool.find(group.index, key)
            if not block:
                return None
            blocks.append(block)
        return blocks

    # --- allocating ------------------------------------------------------------------------------------

    def grow(self, request: Request, num_new_tokens: int) -> bool:
        """Slots for `num_new_tokens` more tokens of a running request, or False and nothing changed."""
        if not self._single:
            return self.allocate(request, num_new_tokens, self.no_hit)
        table = request.tables[0]
        block_size = self.groups[0].block_size
        total = request.num_computed_tokens + num_new_tokens
        missing = -(-min(total, self.max_model_len) // block_size) - len(table)
        if missing > 0:
            pool = self.pool
            if missing > pool.num_free:
                return False
            table += pool.take(missing)
        self.slots_used += total - request.slots_used
        request.slots_used = total
        if self.caching:
            self.register(request, min(total, request.num_tokens))
        return True

    def allocate(
        self,
        request: Request,
        num_new_tokens: int,
        hit: Hit,
        *,
        external_tokens: int = 0,
        watermark: int = 0,
        reserved: int = 0,
        register: bool = True,
    ) -> bool:
        """Adopt `hit`, make room for `external_tokens` a connector brings and `num_new_tokens` to compute.

        `watermark`, `reserved`: blocks that must stay free. False leaves the tables as they were, except
        that blocks behind a sliding window are given back in any case (spec 4.6).
        """
        pool = self.pool
        local = request.num_computed_tokens + hit.tokens
        computed = min(local + external_tokens, self.max_model_len)
        total = computed + num_new_tokens
        slots = min(total, self.max_model_len)
        self.drop_skipped_blocks(request, max(0, computed - request.num_in_flight_tokens))
        need = self._blocks_needed(request, slots, hit, local + external_tokens)
        if need + watermark > pool.num_free - reserved:
            return False
        if hit is not self.no_hit or external_tokens:
            self._adopt(request, hit, local, external_tokens)
        for group in self.groups:
            table = request.tables[group.index]
            missing = -(-slots // group.block_size) - len(table)
            if missing > 0:
                table += pool.take(missing)
        self._use_slots(request, total)
        if register and self.caching:
            self.register(request, min(total, request.num_tokens))
        return True

    def fits_whole(
        self, request: Request, hit: Hit, watermark: int, external_tokens: int = 0
    ) -> bool:
        """Would all tokens that a waiting request has so far fit into the free blocks (spec 3.6a)?"""
        whole = min(request.num_tokens, self.max_model_len)
        local = request.num_computed_tokens + hit.tokens
        computed = min(local + external_tokens, self.max_model_len)
        need = self._blocks_needed(request, whole, hit, computed, capped=True)
        return need + watermark <= self.pool.num_free

    def fits_chunk(self, request: Request, hit: Hit, num_new_tokens: int, watermark: int) -> bool:
        """Would `allocate` with these arguments succeed (spec 3.6b)?"""
        local = request.num_computed_tokens + hit.tokens
        slots = min(local + num_new_tokens, self.max_model_len)
        return self._blocks_needed(request, slots, hit, local) + watermark <= self.pool.num_free

    def blocks_to_finish_prefill(self, request: Request) -> int:
        """Blocks a request must still get until all its known tokens are computed (spec 9.3)."""
        whole = min(request.num_tokens, self.max_model_len)
        return self._blocks_needed(
            request, whole, self.no_hit, request.num_computed_tokens, capped=True
        )

    def _blocks_needed(
        self, request: Request, num_tokens: int, hit: Hit, computed: int, capped: bool = False
    ) -> int:
        """Free blocks it takes to hold `num_tokens`: new ones, and hit ones that lie in the free list."""
        refs = self.pool.refs
        total = 0
        for group in self.groups:
            required = -(-num_tokens // group.block_size)
            if capped and group.admission_cap is not None:
                required = min(required, group.admission_cap)
            held = len(request.tables[group.index])
            blocks = hit.tables[group.index]
            skipped = group.skipped_tokens(computed) // group.block_size
            total += max(required - max(skipped, held + len(blocks)), 0)
            for block in blocks[max(0, skipped - held) :] if skipped else blocks:
                if block and not refs[block]:
                    total += 1
        return total

    def _adopt(self, request: Request, hit: Hit, local: int, external_tokens: int) -> None:
        """Put hit blocks into empty tables, then blocks for what a connector will bring."""
        pool = self.pool
        if any(request.tables):
            return
        for group in self.groups:
            table = request.tables[group.index]
            skipped = group.skipped_tokens(local + external_tokens) // group.block_size
            blocks = hit.tables[group.index][skipped:]
            # Blocks that others use already are not used a second time.
            self.slots_used -= pool.touch(blocks) * group.block_size
            table += [NULL_BLOCK] * skipped
            table += blocks
            request.registered[group.index] = len(table)
            if group.window is not None:
                request.null_blocks[group.index] = table.count(NULL_BLOCK)
        # Only now, so that no group's new blocks can be another group's hits.
        if external_tokens:
            for group in self.groups:
                if group.skipped_tokens(local + external_tokens) >= local + external_tokens:
                    continue
                table = request.tables[group.index]
                missing = -(-(local + external_tokens) // group.block_size) - len(table)
                if missing > 0:
                    table += pool.take(missing)

    def _use_slots(self, request: Request, num_tokens: int) -> None:
        """Account for `num_tokens` tokens of a request that have, or now get, a slot."""
        used = num_tokens * len(self.groups)
        if not self._single:
            for group in self.groups:
                used -= request.null_blocks[group.index] * group.block_size
        self.slots_used += used - request.slots_used
        request.slots_used = used

    # --- registering and freeing -----------------------------------------------------------------------

    def register(self, request: Request, num_tokens: int) -> None:
        """Make the full blocks within the first `num_tokens` tokens hittable (spec 5.2, 5.3)."""
        if not self.caching:
            return
        if self._single and num_tokens // self.alignment <= request.registered[0]:
            return  # most often: no further block is full
        if len(self.groups) > 1:
            num_tokens -= num_tokens % self.alignment
        assert request.keys is not None
        keys = request.keys.upto(num_tokens)
        pool = self.pool
        for group in self.groups:
            done = request.registered[group.index]
            full = num_tokens // group.block_size
            if full > done:
                scale = group.block_size // self.key_block_size
                table = request.tables[group.index]
                worth = self._worth_keeping(request, group, done, full)
                for position in range(done, full):
                    block = table[position]
                    if block and (worth is None or worth[position - done]):
                        pool.register(group.index, keys[(position + 1) * scale - 1], block)
                request.registered[group.index] = full
            if group.window is None and group.block_size != self.key_block_size:
                self._register_prompt_end(request, group, keys, num_tokens)

    def _worth_keeping(
        self, request: Request, group: Group, done: int, full: int
    ) -> list[bool] | None:
        """Which of a windowed group's blocks a later request could resume at; None: all of them.

        Follows `SlidingWindowManager.reachable_block_mask`: with `prefix_cache_retention_interval` None a
        window is kept before every alignment boundary, with k > 0 before every k-th token, and with any
        number (0 by default) before the prompt's last token and a detected shared prefix.
        """
        if group.window is None:
            return None
        needed = group.blocks_in_window
        keep = [False] * (full - done)
        interval = group.retention_interval
        segment = self.alignment if interval is None else interval
        if segment:
            per_segment = segment // group.block_size
            if needed >= per_segment:
                return None
            for position in range(done, full):
                if position % per_segment >= per_segment - needed:
                    keep[position - done] = True
        if interval is not None:
            ends = [request.num_prompt_tokens - 1]
            if request.shared_prefix_end:
                ends.append(request.shared_prefix_end)
            for end_tokens in ends:
                end = end_tokens // self.alignment * self.alignment // group.block_size
                for position in range(max(done, end - needed), min(full, end)):
                    keep[position - done] = True
        return keep

    def _register_prompt_end(
        self, request: Request, group: Group, keys: list[int], num_tokens: int
    ) -> None:
        """A prompt's last hashing boundary inside a larger block is an entry of its own."""
        unit = self.key_block_size
        end = (request.num_prompt_tokens - 1) // unit * unit
        if not 0 < end <= num_tokens or end % group.block_size == 0:
            return
        table = request.tables[group.index]
        position = end // group.block_size
        if position < len(table) and table[position]:
            self.pool.register(group.index, keys[end // unit - 1], table[position])

    def drop_skipped_blocks(self, request: Request, num_processed_tokens: int) -> None:
        """Give back blocks that no later token of the request can see (sliding windows)."""
        if self._single:
            return
        for group in self.groups:
            if group.window is None:
                continue
            table = request.tables[group.index]
            end = min(group.skipped_tokens(num_processed_tokens) // group.block_size, len(table))
            dropped = []
            for position in range(end - 1, -1, -1):
                if not table[position]:
                    break
                dropped.append(table[position])
                table[position] = NULL_BLOCK
            if dropped:
                request.null_blocks[group.index] += len(dropped)
                slots = len(dropped) * group.block_size
                request.slots_used -= slots
                # What others still hold stays in use.
                self.slots_used -= slots - self.pool.release(dropped) * group.block_size

    def free(self, request: Request) -> None:
        """Give back all blocks of a request, its last block first (spec 4.4)."""
        self.slots_used -= request.slots_used
        request.slots_used = 0
        for group in self.groups:
            table = request.tables[group.index]
            if not table:
                continue
            order = reversed(table) if self._last_block_first else table
            self.slots_used += self.pool.release(order) * group.block_size
            request.tables[group.index] = []
            request.registered[group.index] = 0
            request.null_blocks[group.index] = 0

    def detach(self, request: Request) -> list[int]:
        """Take a request's blocks away from it without freeing them: a batch in flight may write them.

        Returns them in table order, group after group; pass them to `free_detached` later.
        """
        self.slots_used -= request.slots_used
        request.slots_used = 0
        blocks: list[int] = []
        for group in self.groups:
            blocks += request.tables[group.index]
            request.tables[group.index] = []
            request.registered[group.index] = 0
            request.null_blocks[group.index] = 0
        return blocks

    def free_detached(self, blocks: list[int]) -> None:
        """Free blocks that `detach` returned."""
        self.slots_used += self.pool.release(reversed(blocks)) * self.groups[0].block_size
