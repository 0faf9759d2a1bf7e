"""What the scheduler is told: vLLM's own names, vLLM's own defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# A pool keeps some 130 bytes a block: beyond this a typing mistake would fill the machine's memory. Small
# models with one-token blocks on the largest GPU stay below it.
MAX_BLOCKS = 1 << 24


@dataclass(frozen=True, slots=True)
class KVGroup:
    """One KV cache group: layers that share a block table (vLLM `KVCacheGroupSpec`)."""

    type: Literal["full", "swa"] = "full"
    window: int | None = None  # tokens, for "swa"
    block_size: int | None = None  # None: the scheduler's


@dataclass(frozen=True, slots=True)
class KVOffload:
    """V1's CPU tier as the scheduler sees it (`--kv-offloading-size`): capacity in chunks.

    Transfer times belong to the engine, not here.
    """

    cpu_blocks: int
    blocks_per_chunk: int = 1
    offload_prompt_only: bool = True  # generated tokens are not offloaded (vLLM's default)
    store_threshold: int = 0  # offers of a chunk before it is stored; below 2: the first one


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Everything a scheduler reads. All values are resolved: no None where vLLM would compute a default.

    `engine` "v1" mirrors vLLM 0.32.0, "v0" mirrors 0.8.5. `engine_version` selects documented differences
    between releases (docs/exactness.md), for example "0.19.0".
    """

    engine: Literal["v1", "v0"] = "v1"
    engine_version: str = "0.32.0"
    block_size: int = 16
    num_gpu_blocks: int = 1000  # V1: includes the null block 0, so one less is usable
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_num_scheduled_tokens: int | None = None  # None: max_num_batched_tokens
    max_num_active_seqs: int | None = None  # None: max_num_seqs
    max_model_len: int = 8192
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    policy: Literal["fcfs", "priority"] = "fcfs"
    long_prefill_token_threshold: int = 0
    long_prefill_token_threshold_adaptive: bool = False
    scheduler_reserve_full_isl: bool = True
    watermark: float = 0.0
    async_scheduling: bool = False
    pipeline_parallel_size: int = 1
    v2_model_runner: bool = True
    kv_groups: tuple[KVGroup, ...] = (KVGroup(),)
    prefix_cache_retention_interval: int | None = (
        0  # None: sliding windows cached at every boundary
    )
    kv_offload: KVOffload | None = None
    # V0 (0.8.5) only
    num_cpu_blocks: int = 0
    preemption_mode: Literal["recompute", "swap"] | None = None
    # Not vLLM's: swap victims with more computed tokens, recompute the others; overrides preemption_mode.
    swap_above_tokens: int | None = None
    # Who gives way (preemption.py VICTIM_RULES); vLLM has only the first.
    victim_rule: Literal["last_in_queue", "most_blocks", "fewest_computed", "least_preempted"] = (
        "last_in_queue"
    )
    max_num_partial_prefills: int = 1
    max_long_partial_prefills: int = 1

    @property
    def max_concurrent_batches(self) -> int:
        """Depth of V1's batch queue (spec 1.3): 1 means schedule, run, update in turn."""
        stages = self.pipeline_parallel_size
        if self.async_scheduling:
            if self.v2_model_runner:
                return stages + 1
            if stages == 1:
                return 2
        return stages
