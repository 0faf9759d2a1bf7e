"""Where vLLM's V1 releases decide differently: one table, so that no rule hides in the scheduler.

Read from each release's own v1/core/sched/scheduler.py, v1/core/block_pool.py and v1/core/kv_cache_manager.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

from vsim.errors import UserError
from vsim.sim.config import SchedulerConfig


@dataclass(frozen=True, slots=True)
class V1Rules:
    """What a V1 release does, where releases differ. Defaults: 0.32.0."""

    # A waiting request must fit whole before its first chunk is admitted (spec 3.6a).
    reserves_full_isl: bool = True
    # The long-prefill cap is waived for the only request in the system (spec 2.4).
    uncaps_lone_request: bool = True
    # `--no-enable-chunked-prefill` keeps a prompt whole (0.8.5 cuts it all the same).
    can_keep_prompts_whole: bool = True
    # Tokens of the model length that scheduling leaves for the sampled token (spec 2.5).
    length_margin: int = 1
    # Freed blocks that carry no key go to the front of the free list, not to its tail (spec 4.4).
    reuses_unkeyed_blocks_first: bool = True
    # Without prefix caching a request's blocks are freed first block first.
    frees_in_table_order: bool = False
    # Output in flight at a preemption is marked stale: it leaves the reset counters alone, and its request
    # is not admitted before it came (spec 3.8, 6.4).
    tracks_stale_output: bool = True
    # Such output is thrown away.
    drops_output_of_preempted: bool = False
    # A victim that stood before the scan without having been scheduled moves the scan back, too. (Without,
    # the request behind it is passed over in this step.)
    keeps_place_after_any_victim: bool = True
    # Settings of SchedulerConfig that the release does not have, or that vsim does not model for it.
    lacks: frozenset[str] = frozenset()


_SINCE_0_20 = frozenset(
    {
        "watermark",
        "max_num_active_seqs",
        "long_prefill_token_threshold_adaptive",
        "prefix_cache_retention_interval",
        # These existed, with other rules that are not modelled:
        "kv_groups",
        "kv_offload",
    }
)

V1_RULES: dict[str, V1Rules] = {
    "0.32.0": V1Rules(),
    "0.19.0": V1Rules(
        uncaps_lone_request=False,
        reuses_unkeyed_blocks_first=False,
        tracks_stale_output=False,
        keeps_place_after_any_victim=False,
        lacks=_SINCE_0_20,
    ),
    "0.8.5": V1Rules(
        reserves_full_isl=False,
        uncaps_lone_request=False,
        can_keep_prompts_whole=False,
        length_margin=0,
        reuses_unkeyed_blocks_first=False,
        frees_in_table_order=True,
        tracks_stale_output=False,
        drops_output_of_preempted=True,
        lacks=_SINCE_0_20 | {"policy", "async_scheduling", "max_num_scheduled_tokens"},
    ),
}


def closest_read_release(version: str) -> str:
    """The newest release in `V1_RULES` that is not newer than `version`.

    Raises UserError for text that is no release, and for releases older than all that were read.
    """
    wanted = _parsed(version)
    older = [known for known in V1_RULES if wanted and _parsed(known) <= wanted]
    if not older:
        raise UserError(
            f"engine_version={version}: vsim has the V1 scheduler of vLLM {', '.join(V1_RULES)} and, between"
            " these, the next older one; choose a release from 0.8.5 on"
        )
    return max(older, key=_parsed)


def assumed_rules(version: str) -> str | None:
    """The sentence that says so where a release's scheduler was not read but assumed like another's."""
    closest = closest_read_release(version)
    if closest == version:
        return None
    return f"vLLM {version} is taken to schedule like {closest}, the closest older release whose scheduler was read."


def _parsed(version: str) -> tuple[int, ...]:
    match = re.match(r"\d{1,4}(\.\d{1,4})*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def v1_rules(config: SchedulerConfig) -> V1Rules:
    """The rules of `config.engine_version`, or of the closest release that was read (`assumed_rules`).

    Raises UserError for a release too old, or a setting that the release does not have.
    """
    version = closest_read_release(config.engine_version)
    rules = V1_RULES[version]
    for setting in fields(config):
        value = getattr(config, setting.name)
        if setting.name in rules.lacks and value != setting.default:
            raise UserError(
                f"{setting.name}={value}: not in vLLM {version}'s V1 scheduler, or not modelled for it;"
                " drop it or choose engine_version=0.32.0"
            )
    if version != "0.32.0" and config.async_scheduling and config.pipeline_parallel_size > 1:
        raise UserError(
            f"async_scheduling with pipeline_parallel_size={config.pipeline_parallel_size} is modelled for"
            " engine_version=0.32.0 only"
        )
    return rules
