"""Public reports of KV capacity (facts/kv_capacity.jsonl) against our sizing, row by row.

A row carries what somebody posted: model, GPU, flags, and some of available memory, blocks, tokens, maximum
concurrency, a refusal. Each claim that a row's inputs allow is checked on its own.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any, Literal

from vsim.errors import UserError
from vsim.models.capacity import CapacityInput, size_kv_cache
from vsim.models.hardware import Gpu, find_gpu
from vsim.models.memory import GIB
from vsim.models.model_spec import ModelSpec, load_model
from vsim.models.quantization import DTYPE_NAMES
from vsim.models.releases import parse_version, tokens_from_concurrency
from vsim.sim.capacity_report import (
    count_of,
    geometry_of,
    gpu_of,
    model_of,
    number_of,
    release_of,
    text_of,
)
from vsim.sim.deployment import Deployment, resolve

Outcome = Literal["exact", "WRONG", "predicted", "no inputs"]


@dataclass(frozen=True, slots=True)
class RowResult:
    """One claim of one row. `error_pct` only for predictions from GPU and model alone."""

    row: str
    claim: str
    outcome: Outcome
    ours: str
    reported: str
    error_pct: float | None = None
    note: str = ""


def _sizing(
    row: dict[str, Any], model: ModelSpec, engine: str, release: str | None
) -> CapacityInput:
    """The sizing of a row's geometry (one rank), whatever the memory."""
    kv_dtype = text_of(row, "kv_dtype")
    kv = kv_dtype if kv_dtype.startswith("fp8") else DTYPE_NAMES.get(kv_dtype, "bfloat16")
    return CapacityInput(
        gpu=find_gpu("h100"),
        model=model,
        dtype="bfloat16",
        kv_cache_dtype=kv,
        quantization=None,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        data_parallel_size=1,
        enable_expert_parallel=False,
        block_size=count_of(row, "block_size") or 16,
        max_model_len=count_of(row, "max_model_len") or 16,
        max_num_seqs=1,
        max_num_batched_tokens=2048,
        in_flight_tokens=2048,
        gpu_memory_utilization=0.9,
        enforce_eager=True,
        engine=engine,
        engine_version=release or "",
    )


def _bytes_per_block(row: dict[str, Any], engine: str, release: str | None) -> int | None:
    if text_of(row, "kind") == "hybrid":
        return None
    model = geometry_of(row)
    if model is None:
        per_token, size = count_of(row, "kv_bytes_per_token_per_rank"), count_of(row, "block_size")
        return per_token * size if per_token and size else None
    want = replace(_sizing(row, model, engine, release), max_model_len=1, available_bytes=1 << 50)
    return size_kv_cache(want).bytes_per_block


def _reported_blocks(row: dict[str, Any]) -> int | None:
    blocks, tokens, size = (count_of(row, k) for k in ("num_gpu_blocks", "kv_tokens", "block_size"))
    if blocks is not None or text_of(row, "kind") == "hybrid":
        return blocks
    return tokens // size if tokens is not None and size and tokens % size == 0 else None


def check_row(row: dict[str, Any]) -> list[RowResult]:
    """Every claim of the row that its inputs allow to check; one "no inputs" result if there is none."""
    name = text_of(row, "id") or "?"
    engine, release = release_of(row)
    results: list[RowResult] = []

    def say(claim: str, ok: bool, ours: object, reported: object, note: str = "") -> None:
        outcome: Outcome = "exact" if ok else "WRONG"
        results.append(RowResult(name, claim, outcome, str(ours), str(reported), None, note))

    per_block = _bytes_per_block(row, engine, release)
    blocks, available = _reported_blocks(row), number_of(row, "available_kv_gib")
    per_token, size = count_of(row, "kv_bytes_per_token_per_rank"), count_of(row, "block_size")
    if per_block and per_token and size and geometry_of(row) is not None:
        say(
            "KV bytes per token and rank",
            per_block == per_token * size,
            per_block // size,
            per_token,
        )
    if per_block and available is not None and available > 0:
        low = math.floor(max(0.0, available - 0.005) * GIB) // per_block
        high = math.floor((available + 0.005) * GIB) // per_block
        if blocks is not None and text_of(row, "kind") == "dense-multirank":
            # The figure is one rank's; the poorest rank sets the blocks.
            say("blocks not above what this rank holds", blocks <= high, f"<= {high}", blocks)
        elif blocks is not None:
            say("blocks from available memory", low <= blocks <= high, f"{low}..{high}", blocks)
        elif (given := _range(row.get("blocks_from_available_range"))) is not None:
            middle = math.floor(available * GIB) // per_block
            say("blocks from available memory", given[0] <= middle <= given[1], middle, given)
    _tokens(row, blocks, say)
    _concurrency(row, release, say)
    cpu = count_of(row, "num_cpu_blocks")
    if per_block and cpu is not None:
        given_swap = re.search(r"swap_space (\d+)", text_of(row, "notes"))
        swap = int(given_swap.group(1)) if given_swap else 4
        ours = swap * GIB // per_block
        say(f"CPU blocks from {swap} GiB of swap", ours == cpu, ours, cpu)
    _refusals(row, engine, release, blocks, say)
    results += _hybrid(row, name, engine, release)
    results += _prediction(row, name, engine, release, blocks, available)
    return results or [RowResult(name, "-", "no inputs", "", "", None, text_of(row, "notes"))]


def _range(value: object) -> list[float] | None:
    if (
        isinstance(value, list)
        and len(value) == 2
        and all(isinstance(x, int | float) for x in value)
    ):
        return value
    return None


def _tokens(row: dict[str, Any], blocks: int | None, say: Any) -> None:
    """Dense models: tokens = blocks x block size."""
    tokens, size = count_of(row, "kv_tokens"), count_of(row, "block_size")
    if (
        count_of(row, "num_gpu_blocks") is not None
        and blocks
        and tokens
        and size
        and text_of(row, "kind") != "hybrid"
    ):
        say("tokens", blocks * size == tokens, blocks * size, tokens)


def _concurrency(row: dict[str, Any], release: str | None, say: Any) -> None:
    """The printed concurrency and the printed tokens belong together, by the release's own definition."""
    tokens, length, printed = (
        number_of(row, k) for k in ("kv_tokens", "max_model_len", "max_concurrency")
    )
    if tokens is None or not length or printed is None:
        return
    decimals = len(str(printed).partition(".")[2])
    half = 0.5 * 10 ** -max(2, decimals)
    hybrid = text_of(row, "kind") == "hybrid"
    if hybrid and not tokens_from_concurrency(parse_version(release or "")):
        say(
            "tokens are blocks, not concurrency x length",
            tokens != int(printed * length),
            int(printed * length),
            int(tokens),
            "before 0.20 the log counts blocks // groups x block size",
        )
        return
    say(
        "maximum concurrency",
        abs(tokens / length - printed) <= half + 1 / length,
        f"{tokens / length:.{max(2, decimals)}f}x",
        f"{printed}x",
    )
    blocks = count_of(row, "num_gpu_blocks")
    if hybrid and blocks and printed > 0 and round(blocks / printed) > 0:
        per_request = round(blocks / printed)
        say(
            "tokens = int(blocks / blocks per request x length)",
            int(blocks / per_request * length) == int(tokens),
            f"{blocks}/{per_request} x {int(length)} = {int(blocks / per_request * length)}",
            int(tokens),
        )


def _refusals(
    row: dict[str, Any], engine: str, release: str | None, blocks: int | None, say: Any
) -> None:
    """Lengths that the engine refused must be refused, and the estimated maximum length must match."""
    notes, available = text_of(row, "notes"), number_of(row, "available_kv_gib")
    length = count_of(row, "max_model_len")
    model = geometry_of(row)
    for asked, held in re.findall(r"REJECT (\d+) > (\d+)", notes):
        if blocks is not None and model is not None:
            want = replace(
                _sizing(row, model, engine, release),
                max_model_len=int(asked),
                num_gpu_blocks_override=blocks,
                available_bytes=0,
            )
            message = _refusal(want)
            say(
                f"refuses {asked}",
                message is not None and (held in message),
                message or "accepted",
                f"holds {held}",
            )
    if text_of(row, "kind") == "reject":
        if available is not None and available <= 0:
            message = _refusal(
                replace(
                    _sizing(row, model or load_model("vsim/tiny-llama"), engine, release),
                    available_bytes=math.floor(available * GIB),
                )
            )
            ok = message is not None and "No available memory" in message
            say("refuses negative KV memory", ok, message or "accepted", f"{available} GiB")
        elif blocks is not None and length:
            held_tokens = blocks * (count_of(row, "block_size") or 16)
            say(
                f"refuses {length}",
                length > held_tokens,
                f"holds {held_tokens}",
                f"holds {count_of(row, 'kv_tokens')}",
            )
    other = re.search(
        r"max_model_len (\d+): needs ([\d.]+) GiB, available ([\d.]+) GiB, estimated max len (\d+)",
        notes,
    )
    if other and model is not None:
        asked, needs, have, longest = other.groups()
        low, high = (
            _refusal(
                replace(
                    _sizing(row, model, "v1", release),
                    max_model_len=int(asked),
                    available_bytes=math.floor((float(have) + d) * GIB),
                )
            )
            or ""
            for d in (-0.005, 0.005)
        )
        found = [
            int(m.group(1)) for m in (re.search(r"length is (\d+)", t) for t in (low, high)) if m
        ]
        ok = len(found) == 2 and found[0] <= int(longest) <= found[1] and f"({needs} GiB KV" in low
        say(f"refuses {asked}, estimated maximum length", ok, f"{found}", longest)


def _refusal(want: CapacityInput) -> str | None:
    try:
        size_kv_cache(want)
    except UserError as error:
        return str(error)
    return None


def _hybrid(row: dict[str, Any], name: str, engine: str, release: str | None) -> list[RowResult]:
    """Blocks and tokens of a bundled model with several KV groups, from the row's own available memory.

    From 0.20.1 on tokens depend on max_num_batched_tokens too: without it in the row they are a prediction.
    """
    model, dtype = model_of(row)
    available = number_of(row, "available_kv_gib")
    if text_of(row, "kind") != "hybrid" or model is None or not available or available <= 0:
        return []
    gpu = gpu_of(row)
    bounds = []
    for rounding in (-0.005, 0.005):
        flags = {"available_kv_cache_bytes": round((available + rounding) * GIB)}
        try:
            run = _resolved(row, model, gpu or find_gpu("h100"), dtype, engine, release, flags)
        except UserError as error:
            return [RowResult(name, "from available memory", "predicted", f"refused: {error}", "")]
        bounds.append(run.capacity)
    stated = re.search(r"(?:max_num_batched_tokens|mnbt) \d+", text_of(row, "notes")) is not None
    sure = stated or not tokens_from_concurrency(parse_version(release or ""))
    results = []
    for claim, key, certain in (
        ("blocks", "num_gpu_blocks", True),
        ("tokens", "kv_tokens", sure),
    ):
        seen = count_of(row, key)
        if seen is None:
            continue
        attribute = "kv_cache_size_tokens" if key == "kv_tokens" else key
        low, high = (getattr(fit, attribute) for fit in bounds)
        inside = low <= seen <= high
        outcome: Outcome = "exact" if inside else "WRONG" if certain else "predicted"
        off = None if inside else 100 * ((low + high) / 2 / seen - 1)
        text = f"{low}..{high}"
        results.append(
            RowResult(name, f"{claim} from available memory", outcome, text, str(seen), off)
        )
    return results


def _prediction(
    row: dict[str, Any],
    name: str,
    engine: str,
    release: str | None,
    blocks: int | None,
    available: float | None,
) -> list[RowResult]:
    """KV memory from GPU and model alone, beside what the real engine found."""
    gpu, (model, dtype) = gpu_of(row), model_of(row)
    if gpu is None or model is None or (blocks is None and available is None):
        return []
    if engine == "v0" and count_of(row, "max_model_len") is None:
        return []  # V0 profiles with max_model_len tokens: without it nothing can be said
    try:
        run = _resolved(row, model, gpu, dtype, engine, release)
    except UserError as error:
        if available is not None and available <= 0:
            return [
                RowResult(
                    name,
                    "predicted: does not fit",
                    "predicted",
                    str(error)[:80],
                    f"{available} GiB",
                )
            ]
        return [
            RowResult(name, "predicted", "predicted", f"refused: {str(error)[:100]}", str(blocks))
        ]
    fit = run.capacity
    one_rank = text_of(row, "kind") == "dense-multirank" and available is not None and available > 0
    if blocks is not None and not one_rank:
        ours, seen, unit = float(fit.num_gpu_blocks), float(blocks), "blocks"
    else:
        ours, seen, unit = fit.available_bytes / GIB, available or 0.0, "KV GiB"
    off = 100 * (ours / seen - 1) if seen > 0 else None
    figures = (f"{ours:.0f}", f"{seen:.0f}") if unit == "blocks" else (f"{ours:.2f}", f"{seen:.2f}")
    return [RowResult(name, f"predicted {unit}", "predicted", *figures, off, gpu.name)]


def _resolved(
    row: dict[str, Any],
    model: ModelSpec,
    gpu: Gpu,
    dtype: str | None,
    engine: str,
    release: str | None,
    more: dict[str, Any] | None = None,
) -> Deployment:
    """The row's deployment."""
    length = count_of(row, "max_model_len")
    kv_dtype = text_of(row, "kv_dtype")
    flags: dict[str, Any] = {
        "tensor_parallel_size": count_of(row, "tp"),
        "gpu_memory_utilization": number_of(row, "gpu_memory_utilization"),
        "kv_cache_dtype": kv_dtype if kv_dtype.startswith("fp8") else None,
        "block_size": count_of(row, "block_size"),
        "dtype": dtype,
        "engine": engine,
        "engine_version": release,
    }
    flags = {k: v for k, v in flags.items() if v is not None}
    if length is not None:
        flags["max_model_len"] = min(length, model.max_model_len)
    notes = text_of(row, "notes")
    for flag, pattern in (
        ("max_num_seqs", r"max_num_seqs (\d+)"),
        ("max_num_batched_tokens", r"(?:max_num_batched_tokens|mnbt) (\d+)"),
    ):
        given = re.search(pattern, notes)
        if given:
            flags[flag] = int(given.group(1))
    # The engine started, or its refusal is checked elsewhere: here only the memory is compared.
    return resolve(model, gpu, what_if=True, **{**flags, **(more or {})})
