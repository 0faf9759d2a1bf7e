"""A step model as two flat arrays, for compiled code that must give the same seconds to the last bit.

`export` answers None for a model that it does not know: whoever asks then calls the model itself. What
depends on one whole number (tokens, sequences) is exported as the model's own answers, so that only the
arithmetic below is repeated elsewhere (sim/fast/kernel.py), in the same order of operations.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from vsim.models.attention import AttentionGrid, SkewAlpha
from vsim.models.correction import CorrectedStepModel
from vsim.models.curve import Curve
from vsim.models.domain import Domain
from vsim.models.engine_steps import EngineStepModel
from vsim.models.load import LoadedStepModel
from vsim.models.roofline import COMPUTE_EFFICIENCY as COMPUTE
from vsim.models.roofline import KERNEL_US, SMALL_KERNELS, RooflineStepModel
from vsim.models.roofline import MEMORY_EFFICIENCY as MEMORY
from vsim.models.step import StepModel
from vsim.models.tables import US, TablesStepModel

ROOFLINE, TABLES, ENGINE_STEPS = 0, 1, 2
HEADER = 64  # first places of both arrays; each name below is the place of that number
INTEGERS = (
    "kind",
    "corrections",  # how many, one on another
    "corrections_at",  # their coefficients, the innermost first
    "max_tokens",
    "max_seqs",
    "max_mixed_decodes",
    "max_prefill_context",
    "max_decode_context",
    "window",
    "expert_bytes_at",  # by tokens, -1: no experts
    "by_tokens_at",
    "by_seqs_at",
    "curves_at",  # two integers a curve: where its x begin, how many points
    "decode_count",
    "decode_n_at",
    "decode_curve",
    "prefill_count",
    "prefill_chunks_at",
    "prefill_curve",
    "mixed_count",
    "mixed_chunks_at",
    "mixed_alone_at",  # the prefill curve of the same chunk
    "mixed_rows_at",  # where a chunk's contexts begin and end
    "mixed_context_at",
    "mixed_cells_at",  # where a context's decode counts begin and end
    "mixed_n_at",
    "mixed_curve",
    "skewed",
    "skew_chunks_at",
    "skew_chunks",
    "skew_n_at",
    "skew_n",
    "skew_share_at",
    "skew_share",
    "skew_longest_at",
    "skew_longest",
    "skew_prefill_at",
    "skew_prefill",
    "alpha_at",
    "blend_lengths_at",  # decode curves of batch sizes between the measured ones, made when first needed
    "blend_at",
    "blend_points",
    "tokens_curve",
)
FLOATS = (
    "unused",
    "flops_per_token",
    "weight_bytes",
    "expert_flops_per_token",
    "peak",
    "bandwidth",
    "head_flops",
    "head_bytes",
    "small_kernels_s",
    "reduce_latency_s",
    "reduce_s_per_token",
    "attention_flops",
    "kv_bytes",
    "window_flops",
    "window_kv_bytes",
    "attention_peak",
    "attention_bandwidth",
    "attention_scale",
    "host_base_s",
    "host_per_seq_s",
    "host_per_chunk_s",
    "engine_per_seq_s",
    "engine_per_chunk_s",
    "engine_per_mixed_s",
    "engine_pair_s",
    "engine_chunk_context_s",
    "engine_kv_s",
    "engine_uneven_s",
)
COEFFICIENTS = (
    "scale",
    "per_step_s",
    "per_seq_s",
    "per_kv_token_s",
    "per_prefill_token_s",
    "per_mixed_step_s",
)
MAX_ALPHA = 1 << 20  # cells of the skew table


class UnknownModelError(Exception):
    """This step model has no flat form."""


@dataclass(frozen=True, slots=True)
class KernelParams:
    """`integers` int64, `floats` float64; compiled code fills in blended curves as it goes."""

    integers: npt.NDArray[np.int64]
    floats: npt.NDArray[np.float64]
    loaded: LoadedStepModel | None  # whose counts of steps must be kept


def export(model: StepModel, max_tokens: int, max_seqs: int) -> KernelParams | None:
    """`model` for steps of up to `max_tokens` tokens and `max_seqs` sequences; None: no flat form."""
    loaded = model if type(model) is LoadedStepModel else None
    inner: StepModel = loaded.model if loaded is not None else model
    packer = _Packer()
    domain = loaded.calibration.domain if loaded is not None else Domain()
    for name, limit in domain.to_json().items():
        packer.integer(name, -1 if limit is None else limit)
    try:
        corrections = []
        while type(inner) is CorrectedStepModel:
            corrections.append(inner.coefficients)
            inner = inner.prior
        if type(inner) is RooflineStepModel:
            _roofline(packer, inner, max_tokens)
        elif type(inner) is TablesStepModel:
            _tables(packer, inner, max_tokens, max_seqs)
        elif type(inner) is EngineStepModel:
            _engine_steps(packer, inner)
        else:
            return None
        terms = [float(getattr(c, name)) for c in reversed(corrections) for name in COEFFICIENTS]
        packer.integer("corrections", len(corrections))
        packer.integer("corrections_at", packer.floats(terms))
        return KernelParams(*packer.arrays(), loaded)
    except (UnknownModelError, ArithmeticError, ValueError, IndexError, KeyError, TypeError):
        return None  # the model itself will say what is wrong with it


class _Packer:
    def __init__(self) -> None:
        self._header = np.zeros(HEADER, dtype=np.int64)
        self._numbers = np.zeros(HEADER, dtype=np.float64)
        self._integers: list[npt.NDArray[np.int64]] = []
        self._floats: list[npt.NDArray[np.float64]] = []
        self._num_integers = self._num_floats = HEADER
        self._curves: list[int] = []

    def begin_with(self, other: _Packer) -> None:
        """Take over what `other` has packed; this one has packed no arrays yet."""
        assert self._num_integers == self._num_floats == HEADER
        known = other._header != 0
        self._header[known] = other._header[known]
        self._integers, self._floats = list(other._integers), list(other._floats)
        self._num_integers, self._num_floats = other._num_integers, other._num_floats
        self._curves = list(other._curves)

    def in_one_piece(self) -> _Packer:
        """The same with fewer and larger arrays."""
        self._integers = [np.concatenate(self._integers)] if self._integers else []
        self._floats = [np.concatenate(self._floats)] if self._floats else []
        return self

    def integer(self, name: str, value: int) -> None:
        self._header[INTEGERS.index(name)] = value

    def number(self, name: str, value: float) -> None:
        self._numbers[FLOATS.index(name)] = value

    def ints(self, values: Iterable[int]) -> int:
        """Where `values` begin."""
        array = np.asarray(list(values), dtype=np.int64)
        self._integers.append(array)
        self._num_integers += len(array)
        return self._num_integers - len(array)

    def floats(self, values: npt.ArrayLike) -> int:
        array = np.asarray(values, dtype=np.float64)
        self._floats.append(array)
        self._num_floats += len(array)
        return self._num_floats - len(array)

    def curves(self, curves: Iterable[Curve]) -> int:
        """The number of the first of `curves`."""
        first = len(self._curves) // 2
        for curve in curves:
            at = self.floats([*curve.xs, *curve.ys, *curve._slopes])
            self._curves += (at, len(curve.xs))
        return first

    def arrays(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        self.integer("curves_at", self.ints(self._curves))
        return (
            np.concatenate([self._header, *self._integers]),
            np.concatenate([self._numbers, *self._floats]),
        )


def _host(packer: _Packer, base: float, per_seq: float, per_chunk: float = 0.0) -> None:
    packer.number("host_base_s", base)
    packer.number("host_per_seq_s", per_seq)
    packer.number("host_per_chunk_s", per_chunk)


def _roofline(packer: _Packer, model: RooflineStepModel, max_tokens: int) -> None:
    packer.integer("kind", ROOFLINE)
    packer.integer("window", model.window)
    if model.num_experts:
        share = 1 - model.top_k / model.num_experts
        awake = [model.num_experts * (1 - share**tokens) for tokens in range(max_tokens + 1)]
        packer.integer("expert_bytes_at", packer.floats(np.array(awake) * model.expert_bytes))
        packer.number("expert_flops_per_token", model.expert_flops_per_token)
    else:
        packer.integer("expert_bytes_at", -1)
    for name, value in (
        ("flops_per_token", model.flops_per_token),
        ("weight_bytes", model.weight_bytes),
        ("peak", model.peak_flops_per_s * COMPUTE),
        ("bandwidth", model.bytes_per_s * MEMORY),
        ("head_flops", model.head_flops_per_seq),
        ("head_bytes", model.head_bytes),
        ("small_kernels_s", model.num_layers * SMALL_KERNELS * KERNEL_US * 1e-6),
        ("reduce_latency_s", model.all_reduce_latency_s),
        ("reduce_s_per_token", model.all_reduce_s_per_token),
        ("attention_flops", model.attention_flops_per_pair),
        ("kv_bytes", model.kv_bytes_per_token),
        ("window_flops", model.window_flops_per_pair),
        ("window_kv_bytes", model.window_kv_bytes_per_token),
        ("attention_peak", model._attention_flops_per_s),
        ("attention_bandwidth", model._attention_bytes_per_s),
    ):
        packer.number(name, value)
    rates = (
        "peak_flops_per_s",
        "bytes_per_s",
    )
    if any(getattr(model, name) <= 0 for name in rates):
        raise UnknownModelError
    _host(packer, model.host_base_s, model.host_per_seq_s)


def _engine_steps(packer: _Packer, model: EngineStepModel) -> None:
    packer.integer("kind", ENGINE_STEPS)
    packer.integer("tokens_curve", packer.curves([model.tokens]))
    packer.number("engine_per_seq_s", model.per_seq_s)
    packer.number("engine_per_chunk_s", model.per_chunk_s)
    packer.number("engine_per_mixed_s", model.per_mixed_step_s)
    packer.number("engine_pair_s", model.attention.per_pair_s)
    packer.number("engine_chunk_context_s", model.attention.per_chunk_context_token_s)
    packer.number("engine_kv_s", model.attention.per_kv_token_s)
    packer.number("engine_uneven_s", model.attention.per_uneven_token_s)
    _host(packer, model.host.base_s, model.host.per_seq_s, model.host.per_chunk_s)


def _tables(packer: _Packer, model: TablesStepModel, max_tokens: int, max_seqs: int) -> None:
    grid = model.attention
    packer.begin_with(_packed(grid))
    packer.integer("kind", TABLES)
    packer.integer("by_tokens_at", packer.floats(_by_tokens(model, max_tokens)))
    seqs = [model._head_seconds(n) for n in range(max_seqs + 1)]
    packer.integer("by_seqs_at", packer.floats(seqs))
    packer.number("attention_scale", model._attention_scale)
    _host(packer, model.host_base_s, model.host_per_seq_s)
    # Room for the blend of two neighbours at every batch size: xs, ys, slopes.
    sizes = [len(grid._decode[n].xs) for n in grid._decode_n]
    points = max([a + b for a, b in pairwise(sizes)] or sizes)
    points = max(points, *sizes)
    packer.integer("blend_points", points)
    packer.integer("blend_lengths_at", packer.ints([0] * (max_seqs + 1)))
    packer.integer("blend_at", packer.floats(np.zeros((max_seqs + 1) * points * 3)))


def _by_tokens(model: TablesStepModel, max_tokens: int) -> npt.NDArray[np.float64]:
    """`_token_seconds` of every number of tokens as padded; 0 tokens take none. Shape (max_tokens + 1,)."""
    padded = np.arange(max_tokens + 1, dtype=np.int64)
    sizes = np.asarray(model.graph_sizes, dtype=np.int64)
    if len(sizes):
        captured = padded <= sizes[-1]
        padded[captured] = sizes[np.searchsorted(sizes, padded[captured])]
    distinct, which = np.unique(padded[1:], return_inverse=True)
    if model.experts is not None:
        seconds = np.array([model._token_seconds(n, n) for n in distinct.tolist()])
    else:
        # The same sums in the same order as there, a column at a time.
        tokens_in = distinct.astype(np.float64)
        layer = model.per_layer.many(tokens_in)
        seconds = (model.per_step.many(tokens_in) + model.num_layers * layer) * US
        if model.tensor_link is not None:
            reduces = 2 * model.num_layers + 1
            link = model.tensor_link
            sent = distinct * model.token_bytes * 2 * (link.ranks - 1) / link.ranks
            seconds = seconds + reduces * (link.latency_s + sent / link.bytes_per_s)
    return np.concatenate([[0.0], seconds[which]])


_GRIDS_KEPT = 4
_grids: list[tuple[AttentionGrid, _Packer]] = []


def _packed(grid: AttentionGrid) -> _Packer:
    """What `_attention` packs of a grid, made once: a sweep asks for the same few. Grids do not change."""
    for known, packer in _grids:
        if known is grid:
            return packer
    packer = _Packer()
    _attention(packer, grid)
    _grids.append((grid, packer.in_one_piece()))
    del _grids[:-_GRIDS_KEPT]
    return packer


def _attention(packer: _Packer, grid: AttentionGrid) -> None:
    decode_n = grid._decode_n
    packer.integer("decode_count", len(decode_n))
    packer.integer("decode_n_at", packer.floats(decode_n))
    packer.integer("decode_curve", packer.curves(grid._decode[n] for n in decode_n))
    chunks = grid._prefill_chunks
    packer.integer("prefill_count", len(chunks))
    packer.integer("prefill_chunks_at", packer.floats(chunks))
    packer.integer("prefill_curve", packer.curves(grid._prefill[c] for c in chunks))
    mixed = grid._mixed_chunks
    if any(chunk not in grid._prefill for chunk in mixed):
        raise UnknownModelError
    packer.integer("mixed_count", len(mixed))
    packer.integer("mixed_chunks_at", packer.floats(mixed))
    packer.integer("mixed_alone_at", packer.ints(chunks.index(c) for c in mixed))
    rows, contexts, cells, ns = [0], [], [0], []
    curves: list[Curve] = []
    for chunk in mixed:
        for context in grid._mixed_axis[chunk]:
            contexts.append(context)
            for n in grid._mixed_n[chunk, context]:
                ns.append(n)
                curves.append(grid._mixed[chunk, context, n])
            cells.append(len(ns))
        rows.append(len(contexts))
    packer.integer("mixed_rows_at", packer.ints(rows))
    packer.integer("mixed_context_at", packer.floats(contexts))
    packer.integer("mixed_cells_at", packer.ints(cells))
    packer.integer("mixed_n_at", packer.floats(ns))
    packer.integer("mixed_curve", packer.curves(curves))
    if grid.skew is not None:
        _skew(packer, grid.skew)


def _skew(packer: _Packer, skew: SkewAlpha) -> None:
    axes: list[tuple[str, Sequence[float], int]] = [
        ("skew_chunks", skew.chunks, len(skew.chunks)),
        ("skew_n", skew.n_bins, len(skew.n_bins) + 1),
        ("skew_share", skew.share_bins, len(skew.share_bins) + 1),
        ("skew_longest", skew.longest_bins, len(skew.longest_bins) + 1),
        ("skew_prefill", skew.prefill_bins, len(skew.prefill_bins) + 1),
    ]
    shape = tuple(size for _, _, size in axes)
    if not skew.chunks or int(np.prod(shape)) > MAX_ALPHA:
        raise UnknownModelError
    packer.integer("skewed", 1)
    for name, values, _ in axes:
        packer.integer(name, len(values))
        packer.integer(f"{name}_at", packer.floats(list(values)))
    alpha = np.full(shape, skew.default)
    for key, value in skew.alpha.items():
        if all(0 <= part < size for part, size in zip(key, shape, strict=True)):
            alpha[key] = value
    packer.integer("alpha_at", packer.floats(alpha.ravel()))
