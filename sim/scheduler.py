"""What the engine asks of a scheduler. No clock, no I/O, no SimPy behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from vsim.sim.step import Step, StepOutput
from vsim.traces.trace import TraceRequest


class EngineDiedError(Exception):
    """The real engine would have crashed here. `str(error)` says what it would have said."""


class Scheduler(Protocol):
    """vLLM's decisions. `scheduler_v1.SchedulerV1` and `scheduler_v0.SchedulerV0` are the two.

    The engine calls `add` for arrivals, then `schedule`, then, once the step ran, `complete`. With a batch
    queue several steps may be scheduled before the first is completed; completion keeps their order.
    """

    def add(self, request: TraceRequest) -> str | None:
        """Queue a request. Returns the reason if the front end refuses it (too long, empty), else None."""
        ...

    def schedule(self) -> Step: ...

    def complete(self, step: Step, ended_transfers: Sequence[int] = ()) -> StepOutput:
        """The step ran. `ended_transfers`: jobs of any `Step.transfers` so far that have ended by now."""
        ...

    def has_requests(self) -> bool:
        """Is there anything left for which `schedule` should be called (spec 1.5)?"""
        ...

    def has_unfinished_requests(self) -> bool: ...

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...

    @property
    def num_free_blocks(self) -> int: ...

    @property
    def num_usable_blocks(self) -> int: ...

    @property
    def num_kv_tokens(self) -> int:
        """KV slots in allocated blocks that hold (or are scheduled to hold) a token; a block shared by
        several requests counts once. `allocated blocks x block_size - num_kv_tokens` is what internal
        fragmentation wastes."""
        ...

    @property
    def counters(self) -> dict[str, int]:
        """Totals for `Run.counters`, e.g. "prefix_cache_queries_tokens", "prefix_cache_hits_tokens"."""
        ...
