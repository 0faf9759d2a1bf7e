"""A small correction on a prior, learned from the real engine's own steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vsim.models.step import (
    FloatArray,
    StepModel,
    StepShape,
    decode_run_seconds,
    lockstep_seconds,
)


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Seconds added to the prior, each with the unit in its name. `scale` multiplies the prior.

    KV tokens are the tokens in the cache that the decodes of a step attend to.
    """

    per_step_s: float = 0.0
    per_mixed_step_s: float = 0.0  # a step with prefill chunks and decodes
    per_prefill_token_s: float = 0.0
    per_kv_token_s: float = 0.0
    per_seq_s: float = 0.0
    scale: float = 1.0


NAMES = ("per_step_s", "per_mixed_step_s", "per_prefill_token_s", "per_kv_token_s", "per_seq_s")


def features(shape: StepShape) -> tuple[float, float, float, float, float]:
    """What each additive coefficient multiplies, in the order of `NAMES`."""
    return (
        1.0,
        1.0 if shape.prefills and shape.num_decodes else 0.0,
        float(shape.prefill_tokens),
        float(shape.decode_context_sum),
        float(shape.num_seqs),
    )


def group_features(shapes: Sequence[StepShape]) -> tuple[float, ...]:
    """`features` of a step of several ranks: the largest of each."""
    return tuple(max(column) for column in zip(*map(features, shapes), strict=True))


@dataclass(frozen=True, slots=True)
class CorrectedStepModel:
    """prior x scale + linear terms, never less than a tenth of the prior."""

    prior: StepModel
    coefficients: Coefficients

    def device_seconds(self, shape: StepShape) -> float:
        c = self.coefficients
        prior = self.prior.device_seconds(shape)
        seconds = prior * c.scale + c.per_step_s + c.per_seq_s * shape.num_seqs
        seconds += c.per_kv_token_s * shape.decode_context_sum
        if shape.prefills:
            seconds += c.per_prefill_token_s * shape.prefill_tokens
            if shape.num_decodes:
                seconds += c.per_mixed_step_s
        return seconds if seconds > 0.1 * prior else 0.1 * prior

    def decode_run_seconds(self, shape: StepShape, steps: int) -> FloatArray:
        """See `RunStepModel`."""
        c = self.coefficients
        prior = decode_run_seconds(self.prior, shape, steps)
        seconds = prior * c.scale + c.per_step_s + c.per_seq_s * shape.num_seqs
        context = shape.decode_context_sum + np.arange(steps, dtype=np.int64) * shape.num_decodes
        seconds = seconds + c.per_kv_token_s * context
        result: FloatArray = np.where(seconds > 0.1 * prior, seconds, 0.1 * prior)
        return result

    def lockstep_seconds(self, shapes: Sequence[StepShape]) -> float:
        """See `LockstepModel`: each term is that of the rank in which it is largest."""
        prior = lockstep_seconds(self.prior, shapes)
        added = sum(
            getattr(self.coefficients, name) * value
            for name, value in zip(NAMES, group_features(shapes), strict=True)
        )
        return max(prior * self.coefficients.scale + added, 0.1 * prior)

    def host_seconds(self, shape: StepShape) -> float:
        return self.prior.host_seconds(shape)
