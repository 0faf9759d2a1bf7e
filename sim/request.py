"""A request as a V1 scheduler tracks it."""

from __future__ import annotations

from vsim.sim.block_keys import BlockKeys

# Where a request stands (vLLM `RequestStatus`).
WAITING, PREEMPTED, LOADING, RUNNING, FINISHED = range(5)


class Request:
    """One request between arrival and finish. Owned and mutated by its scheduler alone.

    `num_computed_tokens` counts tokens whose KV is written or will be by a batch already scheduled;
    `num_tokens` counts prompt and output tokens known so far; `num_placeholders` output tokens that a
    batch in flight will bring (async scheduling only).
    """

    __slots__ = (
        "arrival",
        "ends_after",
        "high_water",
        "index",
        "keys",
        "last_batch",
        "max_tokens",
        "next_decode_step",
        "null_blocks",
        "num_computed_tokens",
        "num_in_flight_tokens",
        "num_output_tokens",
        "num_placeholders",
        "num_preemptions",
        "num_prompt_tokens",
        "num_stale_tokens",
        "num_tokens",
        "order",
        "priority",
        "registered",
        "scheduled_once",
        "shared_prefix_end",
        "slots_used",
        "status",
        "tables",
    )

    def __init__(
        self,
        index: int,
        arrival: float,
        prompt_tokens: int,
        max_tokens: int,
        ends_after: int,
        priority: int = 0,
        name: str | int = 0,
        num_groups: int = 1,
    ) -> None:
        self.index = index
        self.arrival = arrival
        self.priority = priority
        self.order = (priority, arrival, name)  # of the priority queue
        self.num_prompt_tokens = prompt_tokens
        self.num_tokens = prompt_tokens
        self.num_output_tokens = 0
        self.max_tokens = max_tokens  # the client's cap: what the scheduler may know
        self.ends_after = ends_after  # output tokens after which the model stops: what it may not
        self.status = WAITING
        self.num_computed_tokens = 0
        self.num_placeholders = 0
        self.num_in_flight_tokens = 0
        self.num_stale_tokens = 0  # in flight since before the last preemption
        self.num_preemptions = 0
        self.next_decode_step = 0
        self.last_batch = 0  # number of the last non-empty batch it was part of
        self.scheduled_once = False
        self.high_water = 0  # most tokens it had computed when it was preempted
        # KV cache bookkeeping, by group; see kvcache.py
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]
        self.registered = [0] * num_groups  # leading blocks whose keys the pool knows
        self.null_blocks = [0] * num_groups  # leading blocks that have left the window
        self.slots_used = 0
        self.shared_prefix_end = 0
        self.keys: BlockKeys | None = None
