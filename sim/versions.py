"""Where vLLM releases decide differently: one table, so that no rule hides in the schedulers.

Read from the releases' own sources (v1/core/sched/scheduler.py, v1/core/block_pool.py,
v1/core/kv_cache_manager.py of each).
"""

from __future__ import annotations

from dataclasses import dataclass

from vsim.errors import UserError


@dataclass(frozen=True, slots=True)
class V1Rules:
    """What a V1 release does, where releases differ. Defaults: 0.32.0."""

    # A waiting request must fit whole before its first chunk is admitted (spec 3.6a).
    reserve_full_isl: bool = True
    # The long-prefill cap is waived for the only request in the system (spec 2.4).
    lone_request_uncapped: bool = True
    # Tokens of the model length that scheduling leaves for the sampled token (spec 2.5).
    length_margin: int = 1
    # Freed blocks that carry no key go to the front of the free list, not to its tail (spec 4.4).
    unkeyed_blocks_first: bool = True
    # Without prefix caching a request's blocks are freed first block first (0.8.5).
    frees_in_table_order: bool = False
    # `--scheduling-policy priority` exists.
    has_priority: bool = True
    # `--async-scheduling` exists.
    has_async: bool = True
    # `--watermark` exists.
    has_watermark: bool = True


V1_RULES: dict[str, V1Rules] = {
    "0.32.0": V1Rules(),
    "0.8.5": V1Rules(
        reserve_full_isl=False,
        lone_request_uncapped=False,
        length_margin=0,
        unkeyed_blocks_first=False,
        frees_in_table_order=True,
        has_priority=False,
        has_async=False,
        has_watermark=False,
    ),
}


def v1_rules(version: str) -> V1Rules:
    """The rules of a release. Raises UserError for one that has not been read."""
    if version not in V1_RULES:
        known = ", ".join(V1_RULES)
        raise UserError(
            f"engine_version={version}: vsim knows the V1 scheduler of vLLM {known}; pick one of these"
        )
    return V1_RULES[version]
