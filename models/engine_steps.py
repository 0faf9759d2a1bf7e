"""Step time fitted on a real engine's own steps: `kind` "engine-steps" of a calibration artifact."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vsim.models.curve import Curve
from vsim.models.model_spec import ModelSpec
from vsim.models.step import FloatArray, StepShape


@dataclass(frozen=True, slots=True)
class Attention:
    """Seconds of attention at one block size, each per unit of its feature (`attention_features`)."""

    per_pair_s: float = 0.0
    per_chunk_context_token_s: float = 0.0
    per_kv_token_s: float = 0.0
    per_uneven_token_s: float = 0.0


def attention_features(shape: StepShape) -> tuple[float, float, float, float]:
    """What the coefficients of `Attention` multiply.

    Query-key pairs of the chunks; tokens in the cache before the chunks; tokens in the cache of the
    decodes; how many more there would be if all decodes were as long as the longest.
    """
    return (
        shape.prefill_work,
        float(sum(context for _, context in shape.prefills)),
        float(shape.decode_context_sum),
        float(shape.num_decodes * shape.decode_context_max - shape.decode_context_sum),
    )


@dataclass(frozen=True, slots=True)
class Host:
    """Seconds of CPU work beside the device: scheduling before, bookkeeping after."""

    base_s: float = 0.0
    per_seq_s: float = 0.0
    per_chunk_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineStepModel:
    """tokens(n) + linear terms + attention, all measured on steps of the real engine.

    `tokens`: seconds of everything that works token by token (GEMMs, norms) and of the fixed costs of a
    step, against the step's tokens; monotone.
    """

    tokens: Curve
    per_seq_s: float  # head and sampler
    per_chunk_s: float
    per_mixed_step_s: float
    attention: Attention
    host: Host

    def device_seconds(self, shape: StepShape) -> float:
        if not shape.num_tokens:
            return 0.0
        pairs, chunk_context, kv, uneven = attention_features(shape)
        return (
            self._fixed(shape)
            + self.attention.per_pair_s * pairs
            + self.attention.per_chunk_context_token_s * chunk_context
            + self.attention.per_kv_token_s * kv
            + self.attention.per_uneven_token_s * uneven
        )

    def decode_run_seconds(self, shape: StepShape, steps: int) -> FloatArray:
        """See `RunStepModel`. All contexts grow alike, so only the sum of contexts changes the time."""
        if not shape.num_tokens:
            return np.zeros(steps)
        pairs, chunk_context, kv, uneven = attention_features(shape)
        context = kv + np.arange(steps, dtype=np.float64) * shape.num_decodes
        seconds: FloatArray = (
            self._fixed(shape)
            + self.attention.per_pair_s * pairs
            + self.attention.per_chunk_context_token_s * chunk_context
            + self.attention.per_kv_token_s * context
            + self.attention.per_uneven_token_s * uneven
        )
        return seconds

    def host_seconds(self, shape: StepShape) -> float:
        host = self.host
        return (
            host.base_s + host.per_seq_s * shape.num_seqs + host.per_chunk_s * len(shape.prefills)
        )

    def _fixed(self, shape: StepShape) -> float:
        seconds = self.tokens(shape.num_tokens) + self.per_seq_s * shape.num_seqs
        if shape.prefills:
            seconds += self.per_chunk_s * len(shape.prefills)
            if shape.num_decodes:
                seconds += self.per_mixed_step_s
        return seconds


def build_engine_steps(params: Mapping[str, Any], block_size: int | None) -> EngineStepModel:
    """The step model of `params` at a block size; None: the first measured one.

    Raises KeyError, TypeError or ValueError where they are not such parameters.
    """
    curve = params["tokens"]
    return EngineStepModel(
        tokens=Curve(curve["tokens"], [_seconds(s) for s in curve["seconds"]]),
        per_seq_s=_seconds(params["per_seq_s"]),
        per_chunk_s=_seconds(params["per_chunk_s"]),
        per_mixed_step_s=_seconds(params["per_mixed_step_s"]),
        attention=_attention_at(params["attention"], block_size),
        host=Host(**{k: _seconds(v) for k, v in dict(params["host"]).items()}),
    )


def _seconds(value: Any) -> float:
    """A coefficient from a file. Raises ValueError unless it is finite and not negative."""
    seconds = float(value)
    if not 0 <= seconds < 1e9:
        raise ValueError(f"{value!r} is no time in seconds")
    return seconds


def _attention_at(rows: Sequence[Mapping[str, Any]], block_size: int | None) -> Attention:
    """Coefficients at a block size: as measured, between two measured ones by log size, else the nearest."""
    by_size = {
        int(row["block_size"]): Attention(
            **{k: float(v) for k, v in row.items() if k != "block_size"}
        )
        for row in rows
    }
    sizes = sorted(by_size)
    if sizes[0] < 1:
        raise ValueError(f"block size {sizes[0]} must be at least 1")
    if block_size is None:
        return by_size[int(rows[0]["block_size"])]
    if block_size in by_size:
        return by_size[block_size]
    if block_size < sizes[0] or block_size > sizes[-1]:
        return by_size[sizes[0] if block_size < sizes[0] else sizes[-1]]
    low = max(size for size in sizes if size < block_size)
    high = min(size for size in sizes if size > block_size)
    w = math.log(block_size / low) / math.log(high / low)
    a, b = by_size[low], by_size[high]
    return Attention(
        a.per_pair_s + w * (b.per_pair_s - a.per_pair_s),
        a.per_chunk_context_token_s
        + w * (b.per_chunk_context_token_s - a.per_chunk_context_token_s),
        a.per_kv_token_s + w * (b.per_kv_token_s - a.per_kv_token_s),
        a.per_uneven_token_s + w * (b.per_uneven_token_s - a.per_uneven_token_s),
    )


def measured_block_sizes(params: Mapping[str, Any]) -> tuple[int, ...]:
    """The block sizes at which attention was measured, ascending."""
    return tuple(sorted(int(row["block_size"]) for row in params["attention"]))


def block_size_note(params: Mapping[str, Any], block_size: int | None) -> str | None:
    """One sentence if attention was not measured at this block size, else None."""
    sizes = measured_block_sizes(params)
    if block_size is None or block_size in sizes:
        return None
    inside = sizes[0] < block_size < sizes[-1]
    how = "interpolated from" if inside else "taken from the nearest of"
    return (
        f"attention was not measured at block size {block_size}: its times are {how} "
        f"{', '.join(map(str, sizes))}"
    )


def for_other_model(
    params: Mapping[str, Any],
    measured: ModelSpec,
    other: ModelSpec,
    kernels: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """`params` of one dense model carried over to another on the same device: an estimate, to be labelled so.

    With `kernels`, the other model's matrix products timed on this device (and the measured model's own in
    `params`), these take the measured ones' place, and only what a step costs beside them is scaled: the
    fixed part by the number of layers (each launches the same kernels), the rest by layers x width.
    Without, token work is scaled by the weights it reads. Attention of chunks goes by query heads x head
    size x layers, that of decodes by KV heads x head size x layers: its time is that of reading the cache,
    once for all query heads that share a KV head. The host's part stays.
    """
    layers = other.num_layers / measured.num_layers
    pairs = _attention_width(other) / _attention_width(measured)
    cache = _cache_width(other) / _cache_width(measured)
    knots = [float(t) for t in params["tokens"]["tokens"]]
    seconds = [float(s) for s in params["tokens"]["seconds"]]
    per_seq = float(params["per_seq_s"])
    here = params.get("kernels")
    if kernels is not None and here is not None:
        width = layers * other.hidden_size / measured.hidden_size
        before, after = _linear_curve(here), _linear_curve(kernels)
        beside = [max(0.0, s - before(t)) for t, s in zip(knots, seconds, strict=True)]
        head_before, head_after = _head_line(here), _head_line(kernels)
        moved = [
            after(t)
            + beside[0] * layers
            + max(0.0, b - beside[0]) * width
            + max(0.0, head_after[0] - head_before[0])
            for t, b in zip(knots, beside, strict=True)
        ]
        per_seq = max(0.0, per_seq + head_after[1] - head_before[1])
    else:
        weights = _linear_parameters(other) / _linear_parameters(measured)
        head = (other.vocab_size * other.hidden_size) / (measured.vocab_size * measured.hidden_size)
        moved = [seconds[0] * layers + (s - seconds[0]) * weights for s in seconds]
        per_seq *= head
    carried = {
        **params,
        "tokens": {
            "tokens": list(params["tokens"]["tokens"]),
            "seconds": [float(s) for s in np.maximum.accumulate(moved)],
        },
        "per_seq_s": per_seq,
        "per_chunk_s": params["per_chunk_s"] * layers,
        "per_mixed_step_s": params["per_mixed_step_s"] * layers,
        "attention": [
            {
                k: v * (cache if k in _READS_CACHE else pairs) if k != "block_size" else v
                for k, v in row.items()
            }
            for row in params["attention"]
        ],
    }
    if kernels is not None:
        carried["kernels"] = dict(kernels)
    return carried


def _linear_curve(kernels: Mapping[str, Any]) -> Curve:
    return Curve(kernels["rows"], np.maximum.accumulate(kernels["linear_s"]).tolist())


def _head_line(kernels: Mapping[str, Any]) -> tuple[float, float]:
    """(seconds of the output head for one row, seconds of each further one)."""
    rows, seconds = kernels["rows"], [float(s) for s in kernels["head_s"]]
    # A batch of decodes: beyond a few hundred rows no step asks for logits.
    last = max(i for i, n in enumerate(rows) if n <= max(256, rows[0]))
    if last == 0:
        return seconds[0], 0.0
    return seconds[0], max(0.0, (seconds[last] - seconds[0]) / (rows[last] - rows[0]))


def _linear_parameters(model: ModelSpec) -> int:
    """Weights that every token passes, without embedding and head."""
    attention = model.hidden_size * model.head_size
    attention *= 2 * model.num_attention_heads + 2 * model.num_kv_heads
    return model.num_layers * (attention + 3 * model.hidden_size * model.intermediate_size)


_READS_CACHE = (
    "per_kv_token_s",
    "per_uneven_token_s",
)  # the terms of `Attention` that decodes have


def _attention_width(model: ModelSpec) -> int:
    return model.num_attention_heads * model.head_size * model.num_layers


def _cache_width(model: ModelSpec) -> int:
    return model.num_kv_heads * model.head_size * model.num_layers
