"""V0's block tables: KV blocks on two devices, given to requests whole, moved between the devices by swaps.

Follows vLLM 0.8.5 core/block_manager.py, core/block/block_table.py and core/block/naive_block.py for one
sequence per group, no sliding window, no lookahead slots (spec 12.3-12.5, 12.13, 12.14, 12.20).
"""

from __future__ import annotations

from typing import Literal, Protocol

from vsim.sim.request_v0 import RequestV0

Fit = Literal["ok", "later", "never"]

WATERMARK = 0.01  # part of the GPU blocks that admission and swap-in leave free; fixed in 0.8.5


class BlockAllocatorV0(Protocol):
    """The blocks of one device. `first_id` is added to its own numbering 0, 1, ... to make ids unique."""

    first_id: int
    num_blocks: int

    @property
    def num_free(self) -> int: ...

    def take(self, request: RequestV0) -> None:
        """Give the request, which holds nothing here, blocks for all its placed tokens."""
        ...

    def give_back(self, request: RequestV0, last_access: float | None = None) -> None:
        """Take all the request's blocks; its table is empty afterwards.

        `last_access`: when a step last used them, if the request ends here; None if it only moves.
        """
        ...

    def grow(self, request: RequestV0) -> None:
        """Place the tokens that have no slot yet, in new blocks where the last one is full."""
        ...

    def full_blocks_to_take(self, request: RequestV0) -> int:
        """How many of the request's full blocks, now on the other device, would need a block here."""
        ...

    def hashless_free_ids(self) -> list[int]:
        """Ids of free blocks in the order they would be handed out."""
        ...


class BlockStack:
    """Blocks without content keys: the last one freed is the next one given."""

    def __init__(self, num_blocks: int, block_size: int, first_id: int = 0) -> None:
        self.first_id = first_id
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(first_id + num_blocks - 1, first_id - 1, -1))  # top at the end

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, request: RequestV0) -> None:
        self._add(request, -(-request.num_placed_tokens // self.block_size))

    def give_back(self, request: RequestV0, last_access: float | None = None) -> None:
        # One by one in table order: the request's last block ends up on top.
        self._free.extend(request.table)
        request.table = []

    def grow(self, request: RequestV0) -> None:
        request.num_placed_tokens = request.num_tokens
        missing = -(-request.num_tokens // self.block_size) - len(request.table)
        if missing > 0:
            self._add(request, missing)

    def full_blocks_to_take(self, request: RequestV0) -> int:
        return request.num_placed_tokens // self.block_size

    def hashless_free_ids(self) -> list[int]:
        return self._free[::-1]

    def _add(self, request: RequestV0, count: int) -> None:
        free = self._free
        if count > len(free):
            raise NoFreeBlocksError
        for _ in range(count):
            request.table.append(free.pop())


class NoFreeBlocksError(Exception):
    """A block was asked for and there was none: the checks before it should have prevented that."""


class BlockManagerV0:
    """Who holds which block, on GPU and CPU. The two allocators are told apart by their ids only."""

    def __init__(self, gpu: BlockAllocatorV0, cpu: BlockAllocatorV0, block_size: int) -> None:
        self.gpu = gpu
        self.cpu = cpu
        self.block_size = block_size
        self.watermark_blocks = int(WATERMARK * gpu.num_blocks)

    def can_allocate(self, request: RequestV0) -> Fit:
        """Does the whole sequence fit (no prefix hit counts), with the watermark left over?"""
        needed = -(-request.num_tokens // self.block_size)
        if self.gpu.num_blocks - needed < self.watermark_blocks:
            return "never"
        return "ok" if self.gpu.num_free - needed >= self.watermark_blocks else "later"

    def allocate(self, request: RequestV0) -> None:
        request.num_placed_tokens = request.num_tokens
        self.gpu.take(request)

    def try_append(self, request: RequestV0) -> bool:
        """Place the tokens that have no slot yet, if the blocks they touch are free; else do nothing."""
        if self._touched(request) > self.gpu.num_free:
            return False
        self.gpu.grow(request)
        return True

    def append(self, request: RequestV0) -> None:
        """The same unasked: after a swap-in, whose own check saw to it."""
        self.gpu.grow(request)

    def free(self, request: RequestV0) -> None:
        self.gpu.give_back(request, request.last_access)
        request.num_placed_tokens = 0

    def can_swap_out(self, request: RequestV0) -> bool:
        return self._fits(request, self.cpu, 0) == "ok"

    def can_swap_in(self, request: RequestV0) -> Fit:
        return self._fits(request, self.gpu, self.watermark_blocks)

    def swap_out(self, request: RequestV0) -> list[tuple[int, int]]:
        """Move to the CPU. Returns (GPU block, CPU block) pairs, each numbered from 0 on its device."""
        return self._move(request, self.gpu, self.cpu)

    def swap_in(self, request: RequestV0) -> list[tuple[int, int]]:
        """Move to the GPU. Returns (CPU block, GPU block) pairs, each numbered from 0 on its device."""
        return self._move(request, self.cpu, self.gpu)

    def _touched(self, request: RequestV0) -> int:
        """Blocks that appending the unplaced tokens would touch, the last one counted even if it has room.

        With nothing to append it is 1 all the same, unless the last block is exactly full (spec 12.5).
        """
        placed = request.num_placed_tokens
        room = self.block_size - placed % self.block_size
        return 1 - (room - (request.num_tokens - placed)) // self.block_size

    def _fits(self, request: RequestV0, device: BlockAllocatorV0, watermark_blocks: int) -> Fit:
        needed = self._touched(request) + device.full_blocks_to_take(request)
        if device.num_blocks < needed:
            return "never"
        return "ok" if device.num_free - needed >= watermark_blocks else "later"

    @staticmethod
    def _move(
        request: RequestV0, source: BlockAllocatorV0, target: BlockAllocatorV0
    ) -> list[tuple[int, int]]:
        before = request.table
        source.give_back(request)
        target.take(request)
        return [
            (old - source.first_id, new - target.first_id)
            for old, new in zip(before, request.table, strict=True)
        ]
