"""Attention time from a measured grid: one prefill chunk plus n decodes in one varlen call."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from vsim.models.curve import Curve, blend, bracket
from vsim.models.step import FloatArray, StepShape

# Below this chunk size the grid has no point; a step with any chunk takes the varlen path, so the smallest
# measured chunk stands for smaller ones rather than a blend with the decode-only kernel.
Point = tuple[int, int, int, int]  # prefill_chunk, kv_prefill, n_decode, kv_decode


@dataclass(frozen=True, slots=True)
class SkewAlpha:
    """How much of the way from t(mean context) to t(longest context) a batch of unequal decodes goes.

    `alpha` is keyed by bin numbers (chunk, n, share of long ones, longest context, prefill context);
    `*_bins` are the upper edges, inclusive. The samples have a share of the decodes at the longest context
    and the rest at a shorter one. Of a serving batch one decode is known to be as long as the longest, so
    its share is 1 / n: what counts is the one that the others wait for.
    """

    alpha: Mapping[tuple[int, int, int, int, int], float]
    default: float
    chunks: tuple[int, ...]  # profiled chunk sizes, ascending
    n_bins: tuple[float, ...]
    share_bins: tuple[float, ...]
    longest_bins: tuple[float, ...]
    prefill_bins: tuple[float, ...]

    def at(self, chunk: float, n: int, longest: float, prefill_context: float) -> float:
        key = (
            self._chunk_bin(chunk),
            bisect_left(self.n_bins, n),
            bisect_left(self.share_bins, 1 / n),
            bisect_left(self.longest_bins, longest),
            bisect_left(self.prefill_bins, prefill_context),
        )
        return self.alpha.get(key, self.default)

    def decode_only(self, n: int) -> list[float]:
        """`at` for n decodes without a chunk, by bin of the longest context."""
        inside = list(self.longest_bins)
        beyond = inside[-1] + 1 if inside else 1.0
        return [self.at(0, n, longest, 0) for longest in (*inside, beyond)]

    def _chunk_bin(self, chunk: float) -> int:
        i, j, weight = bracket(self.chunks, chunk)
        return j if weight >= 0.5 else i


@dataclass(slots=True)
class AttentionGrid:
    """us of one layer's attention call, from points (prefill_chunk, kv_prefill, n_decode, kv_decode) -> us.

    Between points: straight lines along kv_decode, n_decode, prefill key and chunk, in that order of
    nesting, so the grid need not be a full box. The prefill axis is the query-weighted key length
    (kv_prefill + chunk / 2 for a single chunk, sum(new * (context + new / 2)) / sum(new) for several): with
    it a step's chunks are one chunk that does the same number of query-key products.
    """

    points: Mapping[Point, float]
    skew: SkewAlpha | None = None
    _decode: dict[int, Curve] = field(default_factory=dict, init=False)
    _decode_n: list[int] = field(default_factory=list, init=False)
    _prefill: dict[int, Curve] = field(default_factory=dict, init=False)  # chunk -> over key
    _prefill_chunks: list[int] = field(default_factory=list, init=False)
    # chunk -> kv_prefill axis; (chunk, kv_prefill) -> n axis; (chunk, kv_prefill, n) -> curve over kv_decode
    _mixed_axis: dict[int, list[int]] = field(default_factory=dict, init=False)
    _mixed_n: dict[tuple[int, int], list[int]] = field(default_factory=dict, init=False)
    _mixed: dict[tuple[int, int, int], Curve] = field(default_factory=dict, init=False)
    _mixed_chunks: list[int] = field(default_factory=list, init=False)
    _decode_by_n: dict[int, Curve] = field(default_factory=dict, init=False)
    _alpha_by_n: dict[int, list[float]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        decode: dict[int, list[tuple[int, float]]] = {}
        prefill: dict[int, list[tuple[int, float]]] = {}
        mixed: dict[tuple[int, int, int], list[tuple[int, float]]] = {}
        for (chunk, context, n, kv), us in sorted(self.points.items()):
            if chunk == 0:
                decode.setdefault(n, []).append((kv, us))
            elif n == 0:
                prefill.setdefault(chunk, []).append((context, us))
            else:
                mixed.setdefault((chunk, context, n), []).append((kv, us))
        if not decode or not prefill:
            raise ValueError("an attention grid needs decode-only and prefill-only points")
        self._decode = {n: _curve(rows) for n, rows in decode.items()}
        self._decode_n = sorted(self._decode)
        floor = min(us for rows in prefill.values() for _, us in rows)
        self._prefill = {
            chunk: _with_negative_side(
                _curve((context + chunk / 2, us) for context, us in rows), floor
            )
            for chunk, rows in prefill.items()
        }
        self._prefill_chunks = sorted(self._prefill)
        self._mixed = {key: _curve(rows) for key, rows in mixed.items()}
        for chunk, context, n in sorted(mixed):
            axis = self._mixed_axis.setdefault(chunk, [])
            if not axis or axis[-1] != context:
                axis.append(context)
            self._mixed_n.setdefault((chunk, context), []).append(n)
        self._mixed_chunks = sorted(self._mixed_axis)

    def us(self, shape: StepShape) -> float:
        """us of one layer's attention in a step of this shape."""
        n = shape.num_decodes
        if not shape.prefills:
            return self._decode_us(shape) if n else 0.0
        tokens = shape.prefill_tokens
        key = shape.prefill_work / tokens
        if n == 0 or not self._mixed_chunks:
            alone = self._prefill_us(tokens, key)
            if n == 0:
                return alone
            # No mixed points: the two calls one after the other, less one launch floor.
            curve = self.decode_curve(n)
            return alone + max(0.0, curve(shape.decode_context_sum / n) - curve.ys[0])
        mean = shape.decode_context_sum / n
        at_mean = self._mixed_us(tokens, key, n, mean)
        longest = shape.decode_context_max
        if self.skew is None or n == 1 or longest <= mean:
            return at_mean
        alpha = self.skew.at(tokens, n, longest, max(0.0, key - tokens / 2))
        if alpha == 0.0:
            return at_mean
        return at_mean + alpha * (self._mixed_us(tokens, key, n, longest) - at_mean)

    def decode_run_us(self, shape: StepShape, steps: int) -> FloatArray:
        """`us` of `steps` successive decode-only steps from `shape` on, equal in every bit; shape (steps,)."""
        n = shape.num_decodes
        if n == 0:
            return np.zeros(steps)
        curve = self.decode_curve(n)
        i = np.arange(steps, dtype=np.int64)
        mean = (shape.decode_context_sum + i * n) / n
        at_mean = curve.many(mean)
        if self.skew is None or n == 1:
            return at_mean
        longest = (shape.decode_context_max + i).astype(np.float64)
        bins = np.searchsorted(self.skew.longest_bins, longest)
        alpha = np.array(self._decode_alpha(n))[bins]
        skewed: FloatArray = np.where(
            (longest <= mean) | (alpha == 0.0),
            at_mean,
            at_mean + alpha * (curve.many(longest) - at_mean),
        )
        return skewed

    def decode_curve(self, n: int) -> Curve:
        """us over the mean context for n decodes alone; cached by n."""
        curve = self._decode_by_n.get(n)
        if curve is None:
            i, j, weight = bracket(self._decode_n, n)
            low = self._decode[self._decode_n[i]]
            curve = low if i == j else blend(low, self._decode[self._decode_n[j]], weight)
            self._decode_by_n[n] = curve
        return curve

    def _decode_us(self, shape: StepShape) -> float:
        n = shape.num_decodes
        curve = self.decode_curve(n)
        mean = shape.decode_context_sum / n
        at_mean = curve(mean)
        longest = shape.decode_context_max
        if self.skew is None or n == 1 or longest <= mean:
            return at_mean
        alpha = self._decode_alpha(n)[bisect_left(self.skew.longest_bins, longest)]
        if alpha == 0.0:
            return at_mean
        return at_mean + alpha * (curve(longest) - at_mean)

    def _decode_alpha(self, n: int) -> list[float]:
        """`SkewAlpha.decode_only`, cached by n."""
        alpha = self._alpha_by_n.get(n)
        if alpha is None and self.skew is not None:
            alpha = self._alpha_by_n[n] = self.skew.decode_only(n)
        return alpha or []

    def _prefill_us(self, tokens: float, key: float) -> float:
        i, j, weight = bracket(self._prefill_chunks, tokens)
        low = self._prefill[self._prefill_chunks[i]](key)
        if i == j:
            return low
        return low + weight * (self._prefill[self._prefill_chunks[j]](key) - low)

    def _mixed_us(self, tokens: float, key: float, n: int, kv: float) -> float:
        i, j, weight = bracket(self._mixed_chunks, tokens)
        low = self._mixed_row(self._mixed_chunks[i], key, n, kv)
        if i == j:
            return low
        return low + weight * (self._mixed_row(self._mixed_chunks[j], key, n, kv) - low)

    def _mixed_row(self, chunk: int, key: float, n: int, kv: float) -> float:
        context = key - chunk / 2
        axis = self._mixed_axis[chunk]
        if context < 0 or len(axis) == 1:
            # Less query-key work than one fresh chunk of this size: take off what the prefill alone saves.
            base = self._mixed_at(chunk, axis[0], n, kv)
            alone = self._prefill[chunk]
            return base - (alone(axis[0] + chunk / 2) - alone(key))
        i, j, weight = bracket(axis, context)
        low = self._mixed_at(chunk, axis[i], n, kv)
        if i == j:
            return low
        return low + weight * (self._mixed_at(chunk, axis[j], n, kv) - low)

    def _mixed_at(self, chunk: int, context: int, n: int, kv: float) -> float:
        axis = self._mixed_n[chunk, context]
        i, j, weight = bracket(axis, n)
        low = self._mixed[chunk, context, axis[i]](kv)
        if i == j:
            return low
        return low + weight * (self._mixed[chunk, context, axis[j]](kv) - low)


def _curve(rows: Iterable[tuple[float, float]]) -> Curve:
    pairs = list(rows)
    return Curve([x for x, _ in pairs], [y for _, y in pairs])


def _with_negative_side(curve: Curve, floor: float) -> Curve:
    """`curve` over the prefill key, continued below a fresh chunk's key (chunk / 2) down to no work at all.

    Several fresh chunks do less query-key work than one of their total length. The line keeps the slope of
    the first stretch of at least 512 tokens (shorter ones are noise), down to `floor`, the shortest call.
    """
    key0, y0 = curve.xs[0], curve.ys[0]
    far = next((i for i, x in enumerate(curve.xs) if x - key0 >= 512), len(curve.xs) - 1)
    if key0 <= 0 or far == 0:
        return curve
    slope = max(0.0, (curve.ys[far] - y0) / (curve.xs[far] - key0))
    return Curve([0.0, *curve.xs], [max(min(floor, y0), y0 - slope * key0), *curve.ys])
