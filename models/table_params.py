"""JSON parameters of a tables model <-> the model: `kind` "tables" of a calibration artifact."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vsim.models.attention import AttentionGrid, Point, SkewAlpha
from vsim.models.curve import Curve
from vsim.models.links import Link
from vsim.models.tables import ExpertTable, TablesStepModel, capture_sizes


@dataclass(frozen=True, slots=True)
class StepContext:
    """What of the deployment a step model must know beyond the step's shape."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    enforce_eager: bool = False
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False
    largest_graph: int = 512
    block_size: int | None = None  # None: the one that was measured

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        if self.enforce_eager:
            return ()
        return capture_sizes(self.max_num_seqs, self.max_num_batched_tokens, self.largest_graph)


def attention_to_json(points: Mapping[Point, float]) -> dict[str, Any]:
    """Grid points -> {"kv_axes": [[kv, ...], ...], "rows": [[chunk, context, n, axis number, [us, ...]], ...]}."""
    grouped: dict[tuple[int, int, int], list[tuple[int, float]]] = {}
    for (chunk, context, n, kv), us in sorted(points.items()):
        grouped.setdefault((chunk, context, n), []).append((kv, us))
    axes: list[list[int]] = []
    rows = []
    for (chunk, context, n), cells in grouped.items():
        axis = [kv for kv, _ in cells]
        if axis not in axes:
            axes.append(axis)
        rows.append([chunk, context, n, axes.index(axis), [round(us, 3) for _, us in cells]])
    return {"kv_axes": axes, "rows": rows}


def attention_points(data: Mapping[str, Any]) -> dict[Point, float]:
    """The inverse of `attention_to_json`."""
    axes = data["kv_axes"]
    return {
        (chunk, context, n, kv): float(us)
        for chunk, context, n, axis, times in data["rows"]
        for kv, us in zip(axes[axis], times, strict=True)
    }


def build_tables(params: Mapping[str, Any], context: StepContext) -> TablesStepModel:
    """The step model of `params`. Raises KeyError, TypeError or ValueError where they are not such parameters."""
    skew, host = params.get("skew"), params.get("host") or {}
    tp, dp = int(params["tensor_parallel_size"]), context.data_parallel_size
    experts = params.get("experts")
    return TablesStepModel(
        num_layers=int(params["num_layers"]),
        per_step=_curve(params["per_step"], "tokens"),
        per_layer=_curve(params["per_layer"], "tokens"),
        head=_curve(params["head"], "sequences"),
        attention=AttentionGrid(
            attention_points(params["attention"]), _skew(skew) if skew else None
        ),
        experts=_experts(experts, tp * dp if context.enable_expert_parallel else 1)
        if experts
        else None,
        token_bytes=2 * int(params["hidden_size"]),
        logits_bytes=2 * -(-int(params.get("vocab_size") or 0) // tp),
        tensor_link=_link(params["link"], tp) if tp > 1 else None,
        expert_link=_link(params["link"], tp * dp) if experts and dp > 1 else None,
        graph_sizes=context.graph_sizes,
        host_base_s=float(host.get("base_s", 0.0)),
        host_per_seq_s=float(host.get("per_seq_s", 0.0)),
    )


def curve_to_json(axis: str, points: Mapping[int, float]) -> dict[str, Sequence[float]]:
    """{x: us} -> {axis: [...], "us": [...]}, ascending."""
    xs = sorted(points)
    return {axis: xs, "us": [round(points[x], 3) for x in xs]}


def skew_to_json(skew: SkewAlpha) -> dict[str, Any]:
    return {
        "default": skew.default,
        "chunks": list(skew.chunks),
        "n_bins": list(skew.n_bins),
        "share_bins": list(skew.share_bins),
        "longest_bins": list(skew.longest_bins),
        "prefill_bins": list(skew.prefill_bins),
        "alpha": [[*key, alpha] for key, alpha in sorted(skew.alpha.items())],
    }


def _skew(data: Mapping[str, Any]) -> SkewAlpha:
    return SkewAlpha(
        alpha={
            (int(c), int(n), int(s), int(b), int(p)): float(a) for c, n, s, b, p, a in data["alpha"]
        },
        default=float(data["default"]),
        chunks=tuple(data["chunks"]),
        n_bins=tuple(data["n_bins"]),
        share_bins=tuple(data["share_bins"]),
        longest_bins=tuple(data["longest_bins"]),
        prefill_bins=tuple(data["prefill_bins"]),
    )


def _experts(data: Mapping[str, Any], ranks: int) -> ExpertTable:
    return ExpertTable(
        rows=tuple((int(tokens), Curve(experts, us)) for tokens, experts, us in data["rows"]),
        num_experts=int(data["num_experts"]),
        top_k=int(data["top_k"]),
        ranks=ranks,
    )


def _link(data: Mapping[str, Any], ranks: int) -> Link:
    return Link(ranks, float(data["latency_s"]), float(data["bytes_per_s"]))


def _curve(data: Mapping[str, Any], axis: str) -> Curve:
    return Curve(data[axis], data["us"])
