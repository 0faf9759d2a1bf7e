"""Step time: the shape of one engine step -> seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class StepShape:
    """What one engine step computes, as far as its duration can depend on it.

    `prefills`: (new tokens, tokens already in the KV cache) of each sequence with more than one new token:
    prompt chunks and recomputation alike. A sequence with exactly one new token is a decode, also when it
    is the last token of a prompt: the attention kernel sees no difference.
    `decode_context_*`: over the decodes, tokens already in the KV cache before this step.
    """

    prefills: tuple[tuple[int, int], ...]
    num_decodes: int
    decode_context_sum: int
    decode_context_max: int

    @property
    def num_seqs(self) -> int:
        return len(self.prefills) + self.num_decodes

    @property
    def prefill_tokens(self) -> int:
        return sum(new for new, _ in self.prefills)

    @property
    def num_tokens(self) -> int:
        return self.prefill_tokens + self.num_decodes


class StepModel(Protocol):
    """How long a step takes on one replica.

    The engine decides how the two parts combine: one after the other when scheduling is synchronous, the
    host's part hidden behind the device's when it is asynchronous (vLLM 0.32 `--async-scheduling`).
    """

    def device_seconds(self, shape: StepShape) -> float:
        """Seconds the device is busy with this step."""
        ...

    def host_seconds(self, shape: StepShape) -> float:
        """Seconds of CPU before the device can start: scheduling, input preparation, launch."""
        ...
