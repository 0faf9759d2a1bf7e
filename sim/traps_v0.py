"""Where vLLM 0.8.5's V0 engine stalls, dies or thrashes, said before the run (spec 12.4, 12.13-12.17)."""

from __future__ import annotations

from vsim.sim.block_manager_v0 import WATERMARK
from vsim.sim.config import SchedulerConfig


def warnings_for(config: SchedulerConfig) -> list[str]:
    """Sentences about what a V0 configuration can run into; empty for V1 and for a sound one."""
    if config.engine != "v0":
        return []
    said = []
    blocks, size = config.num_gpu_blocks, config.block_size
    watermark = int(WATERMARK * blocks)
    longest = -(-config.max_model_len // size)
    swaps = config.preemption_mode == "swap" and config.swap_above_tokens is None
    chunked = config.enable_chunked_prefill
    if swaps:
        said += _swap_traps(config, longest)
    if config.enable_prefix_caching and (swaps or config.swap_above_tokens is not None):
        said.append(
            "V0 can die with an assertion when it evicts a cached block that was swapped out before: swap and"
            " prefix caching do not go together"
        )
    if config.policy == "priority" and chunked:
        said.append(
            "V0 ignores --scheduling-policy priority with chunked prefill: requests are served first come,"
            " first served"
        )
    if chunked and config.enable_prefix_caching:
        said += _rounding_traps(config)
    if longest > blocks - watermark:
        said.append(
            f"V0 ends prompts above {max(0, blocks - watermark) * size} tokens without output: they need more"
            f" than the {blocks} KV blocks less the watermark of {watermark}"
        )
    if not watermark and longest >= blocks:
        said.append(
            f"V0 keeps no watermark below {round(1 / WATERMARK)} KV blocks (here {blocks}): requests that fill"
            " the cache to the last block preempt each other, or themselves, step after step"
        )
    return said


def _rounding_traps(config: SchedulerConfig) -> list[str]:
    """With prefix caching V0 rounds what is left of the token budget down to whole blocks (12.9)."""
    budget, size = config.max_num_batched_tokens, config.block_size
    share = budget // config.max_num_partial_prefills
    if share < size:
        return [
            "V0 schedules nothing when a prefill's share of the token budget, here"
            f" {budget} // {config.max_num_partial_prefills}, is below block_size={size}: with chunked prefill"
            " and prefix caching raise max_num_batched_tokens"
        ]
    most = budget - size + 1
    if most < config.max_num_seqs:
        return [
            f"V0 runs at most {most} of max_num_seqs={config.max_num_seqs} decodes in a step: with chunked"
            f" prefill and prefix caching the last {size - 1} of max_num_batched_tokens={budget} stay unused"
        ]
    return []


def _swap_traps(config: SchedulerConfig, longest: int) -> list[str]:
    said = []
    if config.policy == "priority" and not config.enable_chunked_prefill:
        said.append(
            "V0 dies with an assertion when priority preemption swaps a request out: use"
            " --preemption-mode recompute with --scheduling-policy priority"
        )
    if config.enable_chunked_prefill:
        if config.max_num_batched_tokens < config.max_model_len:
            said.append(
                "V0 never brings back a request that was swapped out in mid-prefill with more than"
                f" max_num_batched_tokens={config.max_num_batched_tokens} tokens left, and the swapped queue"
                " stalls behind it: with --preemption-mode swap raise max_num_batched_tokens to"
                f" max_model_len={config.max_model_len} or turn chunked prefill off"
            )
        if config.enable_prefix_caching:
            said.append(
                "V0 dies with an assertion when a request swapped out in mid-prefill comes back under prefix"
                " caching: do not combine chunked prefill, prefix caching and --preemption-mode swap"
            )
    # All sequences but the one that runs on may be on the CPU at once. Chunked prefill goes on admitting
    # while the swapped queue is not empty, so there nothing bounds it.
    most = (config.max_num_seqs - 1) * longest
    if config.enable_chunked_prefill or config.num_cpu_blocks < most:
        bound = "" if config.enable_chunked_prefill else f" (at most {most} can be needed)"
        said.append(
            "V0 dies when the swap space is full: --preemption-mode swap has"
            f" {config.num_cpu_blocks} CPU blocks{bound}"
        )
    return said
