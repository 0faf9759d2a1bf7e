"""Layerwise kernel tables (LLMServingSim's profiler format) -> `Calibration` of kind "tables"."""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from vsim.errors import UserError
from vsim.models.artifact import Calibration
from vsim.models.attention import Point, SkewAlpha
from vsim.models.domain import Domain
from vsim.models.links import LinkFigures, link_figures
from vsim.models.table_params import attention_to_json, curve_to_json, skew_to_json

ONCE_A_STEP = {"embedding", "final_layernorm"}
TWICE_A_LAYER = {"layernorm"}
DENSE_MLP = {"gate_up_proj", "act_fn", "down_proj"}
MAX_POINTS = 2_000_000


def from_tables(
    folder: Path,
    *,
    num_layers: int,
    hidden_size: int,
    vocab_size: int = 0,
    tensor_parallel_size: int = 1,
    num_experts: int = 0,
    experts_per_token: int = 0,
    link: LinkFigures | None = None,
    source: str = "",
    licence: str = "",
) -> Calibration:
    """Read `folder`/meta.yaml and `folder`/tp<N>/*.csv (format: tests/data/cases/README.md).

    Raises UserError if a file is missing or a row can't be read.
    """
    link = link or link_figures(None)
    meta_path = folder / "meta.yaml"
    meta = _meta(meta_path)
    tables = folder / f"tp{tensor_parallel_size}"
    if not tables.is_dir():
        have = sorted(p.name for p in folder.glob("tp*")) or ["none"]
        raise UserError(
            f"{folder.name} has no tables for tensor_parallel_size={tensor_parallel_size} (there: {', '.join(have)})"
        )
    digest = hashlib.sha256()
    points = _attention(tables / "attention.csv", digest.update)
    moe = _experts(tables / "moe.csv", digest.update) if (tables / "moe.csv").exists() else None
    per_step, per_layer = _dense(tables / "dense.csv", moe is not None, digest.update)
    head = _head(tables / "per_sequence.csv", digest.update)
    skew = _skew(tables, meta, tensor_parallel_size, digest.update)
    params: dict[str, Any] = {
        "tensor_parallel_size": tensor_parallel_size,
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "vocab_size": vocab_size,
        "per_step": curve_to_json("tokens", per_step),
        "per_layer": curve_to_json("tokens", per_layer),
        "head": curve_to_json("sequences", head),
        "attention": attention_to_json(points),
        "skew": skew_to_json(skew) if skew else None,
        "experts": None,
        "link": {
            "latency_s": link.latency_s,
            "bytes_per_s": link.bytes_per_s,
            "source": link.source,
        },
    }
    assumptions = [
        "host CPU time of a step is not in the tables: taken as hidden behind the device's (0 s)"
    ]
    if moe is not None:
        if not num_experts or not experts_per_token:
            raise UserError(
                f"{tables.name}/moe.csv needs the model's number of experts and experts per token, "
                "which its config.json does not give"
            )
        params["experts"] = {"rows": moe, "num_experts": num_experts, "top_k": experts_per_token}
        assumptions.append(
            "tokens choose experts at random: which experts a batch wakes is not known"
        )
    if tensor_parallel_size > 1 or moe is not None:
        how = "measured elsewhere on this kind of GPU" if link.measured else "not measured"
        assumptions.append(f"the link between GPUs is {how}, not in the tables ({link.source})")
    return Calibration(
        kind="tables",
        params=params,
        domain=_domain(per_layer, head, points),
        quality={"samples": len(points) + len(per_layer) + len(head), "held_out": 0},
        provenance={
            "label": "layerwise kernel tables",
            "gpu": str(meta.get("gpu", "")),
            "gpu_name": str(meta.get("hardware", "")),
            "model": str(meta.get("model", "")),
            "tensor_parallel_size": tensor_parallel_size,
            "dtype": str(meta.get("variant", "")),
            "vllm_version": str(meta.get("vllm_version", "")),
            "cuda_version": str(meta.get("cuda_version", "")),
            "block_size": _mapping(meta, "engine_effective").get("block_size"),
            "measured_at": str(meta.get("profiled_at", "")),
            "repeats": meta.get("measurement_iterations"),
            "samples_sha256": digest.hexdigest(),
            "source": source,
            "licence": licence,
            "assumptions": assumptions,
        },
    )


def _meta(path: Path) -> dict[str, Any]:
    try:
        meta = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise UserError(
            f"{path.parent.name} has no meta.yaml: not a folder of layerwise tables"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise UserError(f"{path.name} is not YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(meta, dict):
        raise UserError(f"{path.name} holds no mapping")
    return meta


def _mapping(data: dict[Any, Any], key: object) -> dict[Any, Any]:
    """`data[key]` if that is a mapping, else an empty one."""
    value = data.get(key)
    return value if isinstance(value, dict) else {}


def _rows(
    path: Path, columns: tuple[str, ...], digest: Callable[[bytes], None]
) -> Iterator[list[str]]:
    """The named columns of each row; the file's bytes go to `digest`."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{path.parent.name}/{path.name} is missing") from None
    digest(data)
    reader = csv.DictReader(data.decode("utf-8", "replace").splitlines())
    try:
        there = reader.fieldnames or []
        missing = [c for c in columns if c not in there]
        if missing:
            raise UserError(
                f"{path.name}: no column {missing[0]} (there: {', '.join(there)[:200]})"
            )
        for row in reader:
            yield [row[c] or "" for c in columns]
    except csv.Error as error:
        raise UserError(f"{path.name}:{reader.line_num}: {error}") from None


def _number(path: Path, line: int, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise UserError(f"{path.name}:{line}: {text!r} is not a number") from None
    if not 0 <= value < 1e12:
        raise UserError(f"{path.name}:{line}: {text} is out of range")
    return value


def _attention(path: Path, digest: Callable[[bytes], None]) -> dict[Point, float]:
    columns = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")
    points = {}
    for line, row in enumerate(_rows(path, columns, digest), 2):
        *key, us = (_number(path, line, text) for text in row)
        points[int(key[0]), int(key[1]), int(key[2]), int(key[3])] = us
        if len(points) > MAX_POINTS:
            raise UserError(f"{path.name} has more than {MAX_POINTS:,} points")
    if not any(chunk == 0 for chunk, *_ in points) or not any(n == 0 for _, _, n, _ in points):
        raise UserError(f"{path.name} needs rows of decodes alone and of a chunk alone")
    return points


def _dense(
    path: Path, has_experts: bool, digest: Callable[[bytes], None]
) -> tuple[dict[int, float], dict[int, float]]:
    """(us once a step, us of a layer) by tokens, over the token counts that every layer kind was measured at."""
    layers: dict[str, dict[int, float]] = {}
    for line, (layer, tokens, us) in enumerate(
        _rows(path, ("layer", "tokens", "time_us"), digest), 2
    ):
        if has_experts and layer in DENSE_MLP:
            continue
        layers.setdefault(layer, {})[int(_number(path, line, tokens))] = _number(path, line, us)
    if not layers:
        raise UserError(f"{path.name} has no rows")
    common = set.intersection(*(set(points) for points in layers.values()))
    if not common:
        raise UserError(f"{path.name}: no token count was measured for every layer")
    once = {t: sum(p[t] for name, p in layers.items() if name in ONCE_A_STEP) for t in common}
    each = {
        t: sum(
            p[t] * (2 if name in TWICE_A_LAYER else 1)
            for name, p in layers.items()
            if name not in ONCE_A_STEP
        )
        for t in common
    }
    return once, each


def _head(path: Path, digest: Callable[[bytes], None]) -> dict[int, float]:
    total: dict[int, float] = {}
    for line, (_, sequences, us) in enumerate(
        _rows(path, ("layer", "sequences", "time_us"), digest), 2
    ):
        n = int(_number(path, line, sequences))
        total[n] = total.get(n, 0.0) + _number(path, line, us)
    if not total:
        raise UserError(f"{path.name} has no rows")
    return total


def _experts(path: Path, digest: Callable[[bytes], None]) -> list[list[Any]]:
    """[[tokens, [activated experts, ...], [us, ...]], ...], ascending.

    Where the table has an `ep` column, the rows of a lone GPU (ep 1) are taken, else those of the fewest
    ranks: `ExpertTable` does the sharing.
    """
    columns = ("tokens", "activated_experts", "time_us")
    shared = "ep" in path.read_text(encoding="utf-8", errors="replace").split("\n", 1)[0].split(",")
    cells: dict[int, dict[int, dict[int, float]]] = {}
    for line, row in enumerate(_rows(path, (*columns, "ep") if shared else columns, digest), 2):
        tokens, experts, us, *ranks = (_number(path, line, text) for text in row)
        table = cells.setdefault(int(ranks[0]) if ranks else 1, {})
        table.setdefault(int(tokens), {})[int(experts)] = us
    if not cells:
        raise UserError(f"{path.name} has no rows")
    return [
        [tokens, sorted(row), [round(row[e], 3) for e in sorted(row)]]
        for tokens, row in sorted(cells[min(cells)].items())
    ]


def _skew(
    tables: Path, meta: dict[str, Any], tensor_parallel_size: int, digest: Callable[[bytes], None]
) -> SkewAlpha | None:
    """The alphas of skew_fit.csv, if meta.yaml enables them."""
    fit = _mapping(meta, "skew_fit")
    path = tables / "skew_fit.csv"
    if not fit.get("enabled") or not path.exists():
        return None
    try:
        axes = fit["bucket_axes"]
        labels = [list(axes[f"{name}_labels"]) for name in ("n", "skew_rate", "kv_big", "kp")]
        bins_of = [
            tuple(float(edge) for edge in axes[f"{name}_bins"][1:-1])
            for name in ("n", "skew_rate", "kv_big", "kp")
        ]
    except (KeyError, TypeError, ValueError):
        raise UserError(
            "meta.yaml: skew_fit.enabled is true but bucket_axes does not list bins and labels of n, skew_rate, "
            "kv_big and kp; set enabled to false to take unequal decodes as equal"
        ) from None
    columns = ("pc", "n_label", "skew_rate_label", "kv_big_label", "kp_label", "alpha")
    raw: list[tuple[int, list[int], float]] = []
    for line, (pc, *names, alpha) in enumerate(_rows(path, columns, digest), 2):
        try:
            bins = [axis.index(name) for axis, name in zip(labels, names, strict=True)]
            raw.append((int(_number(path, line, pc)), bins, float(alpha)))
        except ValueError:
            raise UserError(
                f"{path.name}:{line}: a label that meta.yaml does not list, or no number"
            ) from None
    chunks = tuple(sorted({pc for pc, *_ in raw}))
    by_tp = _mapping(fit, "per_tp")
    number = tensor_parallel_size
    per_tp = _mapping(by_tp, number if number in by_tp else str(number))
    return SkewAlpha(
        alpha={(chunks.index(pc), b[0], b[1], b[2], b[3]): alpha for pc, b, alpha in raw},
        default=float(per_tp.get("alpha_default") or 0.0),
        chunks=chunks,
        n_bins=bins_of[0],
        share_bins=bins_of[1],
        longest_bins=bins_of[2],
        prefill_bins=bins_of[3],
    )


def _domain(
    per_layer: dict[int, float], head: dict[int, float], points: dict[Point, float]
) -> Domain:
    return Domain(
        max_tokens=max(per_layer),
        max_seqs=min(max(head), max(n for chunk, _, n, _ in points if chunk == 0)),
        max_mixed_decodes=max((n for chunk, _, n, _ in points if chunk), default=0),
        max_prefill_context=max(context for chunk, context, _, _ in points if chunk),
        max_decode_context=max(kv for chunk, _, _, kv in points if chunk == 0),
    )
