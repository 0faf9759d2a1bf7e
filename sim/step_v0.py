"""A step of the V0 engine, and the ways in which it ends for good."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NoReturn

from vsim.sim.scheduler import EngineDiedError
from vsim.sim.step import Step

BlockPairs = list[tuple[int, int]]


class EngineDiedV0Error(EngineDiedError):
    """0.8.5 would have crashed. `said`: exception and message of its log; `why`: in words.

    (SimPy makes a failure anew from its `args`: they must stay what the constructor takes.)
    """

    def __init__(self, said: str, why: str) -> None:
        super().__init__(said, why)
        self.said = said
        self.why = why

    def __str__(self) -> str:
        return f"{self.said.rstrip(': ')} ({self.why})"


class LivelockError(EngineDiedError):
    """0.8.5 would not crash, but preempt for ever without any request getting further."""

    def __init__(self, preemptions: int, victims: list[int]) -> None:
        super().__init__(preemptions, victims)
        self.preemptions = preemptions
        self.victims = victims

    def __str__(self) -> str:
        return (
            f"livelock: {self.preemptions} preemptions in a row let no request get further"
            f" (the last victims: {', '.join(map(str, self.victims)) or 'none'});"
            " more KV blocks or a shorter max_model_len would end it"
        )


def die(said: str, why: str) -> NoReturn:
    raise EngineDiedV0Error(said, why)


@dataclass(slots=True)
class StepV0(Step):
    """A step with what only V0 has. `num_tokens` and `num_computed` count prefix hits as computed."""

    is_prefill: list[bool] = field(default_factory=list)
    hits: list[int] = field(default_factory=list)  # prefix-cache hit tokens in this chunk
    num_batched_tokens: int = 0  # against max_num_batched_tokens, hits included
    # Victims in the order chosen, forced ones (priority policy) included, and swapped-in requests.
    recomputed: list[int] = field(default_factory=list)
    swapped_out_requests: list[int] = field(default_factory=list)
    swapped_in_requests: list[int] = field(default_factory=list)
    swap_in: BlockPairs = field(default_factory=list)  # (CPU block, GPU block)
    swap_out: BlockPairs = field(default_factory=list)  # (GPU block, CPU block)
    num_preempted: int = 0  # the engine's own count: without forced ones
