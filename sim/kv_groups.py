"""KV cache groups: layers that share a block table, with full attention or a sliding window.

vLLM 0.32.0's v1/kv_cache_interface.py and kv_cache_utils.py, `resolve_kv_cache_block_sizes`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from vsim.errors import UserError
from vsim.sim.config import SchedulerConfig


@dataclass(frozen=True, slots=True)
class Group:
    """One KV cache group: layers that share a block table.

    `window` None: full attention. `admission_cap`: most blocks one request can hold at a time, as
    `SlidingWindowSpec.max_admission_blocks_per_request` computes it.
    """

    index: int
    block_size: int
    window: int | None = None
    admission_cap: int | None = None
    retention_interval: int | None = 0

    @property
    def blocks_in_window(self) -> int:
        """Whole blocks before a boundary that the token after it sees."""
        assert self.window is not None
        return -(-(self.window - 1) // self.block_size)

    def skipped_tokens(self, num_computed_tokens: int) -> int:
        """Leading tokens that the next token does not see."""
        return 0 if self.window is None else max(0, num_computed_tokens - self.window + 1)


def make_groups(config: SchedulerConfig) -> tuple[Group, ...]:
    """A configuration's KV cache groups. Raises UserError where vLLM refuses them."""
    groups = []
    in_flight = config.max_concurrent_batches * config.max_num_batched_tokens
    for index, spec in enumerate(config.kv_groups):
        size = spec.block_size or config.block_size
        cap = None
        if spec.type == "swa":
            assert spec.window is not None
            cap = -(-min(spec.window - 1 + in_flight, config.max_model_len) // size) + 1
        groups.append(Group(index, size, spec.window, cap, config.prefix_cache_retention_interval))
    if len(groups) == 1 and groups[0].block_size != config.block_size:
        raise UserError(
            f"kv_groups[0].block_size={groups[0].block_size} differs from block_size={config.block_size};"
            " a single group must use the scheduler's block size"
        )
    interval = config.prefix_cache_retention_interval
    if interval:
        alignment = math.lcm(*(group.block_size for group in groups))
        if all(group.window is None for group in groups):
            raise UserError(
                f"prefix_cache_retention_interval={interval} has no effect without a sliding-window group,"
                " and vLLM refuses it; set it to 0"
            )
        if interval % alignment:
            raise UserError(
                f"prefix_cache_retention_interval={interval} must be a multiple of the block size {alignment}"
            )
    return tuple(groups)
