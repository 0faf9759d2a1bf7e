"""Step time: the shape of one engine step -> seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


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

    @property
    def prefill_work(self) -> float:
        """Query-key pairs of the chunks under a causal mask: sum of new * (context + new / 2)."""
        return sum(new * (context + new / 2) for new, context in self.prefills)

    def after_decodes(self, steps: int) -> StepShape:
        """This decode-only step, `steps` steps later: every context has grown by that many tokens."""
        return StepShape(
            (),
            self.num_decodes,
            self.decode_context_sum + steps * self.num_decodes,
            self.decode_context_max + steps,
        )


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


@runtime_checkable
class RunStepModel(StepModel, Protocol):
    """A step model that can answer a run of decode-only steps in one call.

    The host's part depends on the sequences alone, so over such a run it stays `host_seconds(shape)`.
    """

    def decode_run_seconds(self, shape: StepShape, steps: int) -> FloatArray:
        """Device seconds of `steps` successive decode-only steps that begin with `shape`; shape (steps,).

        Element i equals `device_seconds(shape.after_decodes(i))` in every bit.
        """
        ...


def decode_run_seconds(model: StepModel, shape: StepShape, steps: int) -> FloatArray:
    """`model.decode_run_seconds` where it has one, else the same answer step by step; shape (steps,)."""
    if isinstance(model, RunStepModel):
        return model.decode_run_seconds(shape, steps)
    return np.array(
        [model.device_seconds(shape.after_decodes(i)) for i in range(steps)], dtype=np.float64
    )


@runtime_checkable
class LockstepModel(StepModel, Protocol):
    """A step model that knows what data-parallel ranks with shared experts do to each other."""

    def lockstep_seconds(self, shapes: Sequence[StepShape]) -> float:
        """Device seconds of one step that all ranks make together; `shapes` has one entry per rank."""
        ...


def lockstep_seconds(model: StepModel, shapes: Sequence[StepShape]) -> float:
    """`model.lockstep_seconds` where it has one, else the slowest rank's time alone."""
    if len(shapes) == 1:
        return model.device_seconds(shapes[0])
    if isinstance(model, LockstepModel):
        return model.lockstep_seconds(shapes)
    return max(model.device_seconds(shape) for shape in shapes)
