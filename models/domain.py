"""Where a step model was measured, and how often it was asked about something else."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from vsim.models.step import StepShape


@dataclass(frozen=True, slots=True)
class Domain:
    """Largest value of each feature among the samples; None: the feature has no limit (a formula)."""

    max_tokens: int | None = None  # tokens in a step
    max_seqs: int | None = None
    max_mixed_decodes: int | None = None  # decodes beside a prefill chunk
    max_prefill_context: int | None = None  # tokens in the KV cache before a chunk
    max_decode_context: int | None = None  # mean over the decodes

    def outside(self, shape: StepShape) -> tuple[str, ...]:
        """Names of the features in which `shape` lies beyond the samples."""
        found = []
        n = shape.num_decodes
        if self.max_tokens is not None and shape.num_tokens > self.max_tokens:
            found.append("max_tokens")
        if self.max_seqs is not None and shape.num_seqs > self.max_seqs:
            found.append("max_seqs")
        if shape.prefills:
            if self.max_mixed_decodes is not None and n > self.max_mixed_decodes:
                found.append("max_mixed_decodes")
            if self.max_prefill_context is not None and any(
                context > self.max_prefill_context for _, context in shape.prefills
            ):
                found.append("max_prefill_context")
        if (
            self.max_decode_context is not None
            and shape.decode_context_sum > self.max_decode_context * n
        ):
            found.append("max_decode_context")
        return tuple(found)

    def decode_steps_inside(self, shape: StepShape) -> int | None:
        """How many of the decode-only steps `shape`, `shape` one token later, ... are inside; None: all.

        Only the contexts grow in such a run, so the steps inside are a prefix of it.
        """
        n = shape.num_decodes
        if (self.max_tokens is not None and n > self.max_tokens) or (
            self.max_seqs is not None and n > self.max_seqs
        ):
            return 0
        if self.max_decode_context is None or n == 0:
            return None
        room = self.max_decode_context * n - shape.decode_context_sum
        return 0 if room < 0 else room // n + 1

    def to_json(self) -> dict[str, int | None]:
        return asdict(self)


WORDS = {
    "max_tokens": "tokens in a step",
    "max_seqs": "sequences in a step",
    "max_mixed_decodes": "decodes beside a prefill",
    "max_prefill_context": "context before a prefill chunk",
    "max_decode_context": "mean decode context",
}
