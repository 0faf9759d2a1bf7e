"""A request as the V0 scheduler tracks it: vLLM's SequenceGroup with its one Sequence."""

from __future__ import annotations

from vsim.sim.block_keys import BlockKeys

# Where a request stands (vLLM `SequenceStatus`).
WAITING, RUNNING, SWAPPED, FINISHED, IGNORED = range(5)


class RequestV0:
    """One request between arrival and finish. Owned and mutated by its scheduler alone.

    `num_tokens` counts prompt and output tokens known so far; `num_computed_tokens` those whose KV is
    written, or is being written by the step in flight once that is completed. `is_prefill` is the stage: from
    arrival or recompute until every known token has been computed (vllm/sequence.py 0.8.5).
    """

    __slots__ = (
        "arrival",
        "ends_after",
        "high_water",
        "index",
        "is_prefill",
        "keys",
        "last_access",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_output_tokens",
        "num_placed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_tokens",
        "priority",
        "scheduled_once",
        "status",
        "table",
    )

    def __init__(
        self,
        index: int,
        arrival: float,
        prompt_tokens: int,
        ends_after: int,
        priority: int = 0,
        keys: BlockKeys | None = None,
    ) -> None:
        self.index = index
        self.arrival = arrival
        self.priority = priority
        self.num_prompt_tokens = prompt_tokens
        self.num_tokens = prompt_tokens
        self.num_output_tokens = 0
        self.ends_after = (
            ends_after  # output tokens after which it stops: the scheduler may not look
        )
        self.status = WAITING
        self.is_prefill = True
        self.num_computed_tokens = 0
        self.num_preemptions = 0
        self.scheduled_once = False
        self.high_water = 0  # most tokens it had computed when it lost its KV
        # Block table; see block_manager_v0.py
        self.table: list[int] = []  # physical block ids, on the device where the request is
        self.num_placed_tokens = 0  # known tokens that have a slot in the table
        # Prefix caching only; see prefix_cache_v0.py
        self.keys = keys
        self.num_cached_tokens: int | None = (
            None  # hit at first look; stays as it was during a prefill
        )
        self.last_access = -1.0
