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
from vsim.models.hardware import Gpu, find_gpu, gpus
from vsim.models.memory import GIB
from vsim.models.model_spec import ModelSpec, load_model, spec_from_config
from vsim.models.quantization import DTYPE_NAMES
from vsim.models.releases import parse_version, tokens_from_concurrency
from vsim.sim.deployment import Deployment, resolve

_QUANTIZED_WORDS = {
    "wna16": "moe_wna16",
    "awq": "awq",
    "gptq": "gptq",
    "fp8": "fp8",
    "w4a16": "gptq",
}

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


def _text(row: dict[str, Any], key: str) -> str:
    value = row.get(key)
    return value if isinstance(value, str) else ""


def _number(row: dict[str, Any], key: str) -> float | None:
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < 1e12 else None  # neither NaN nor infinite nor absurd


def _int(row: dict[str, Any], key: str) -> int | None:
    """A count: positive, or None."""
    value = _number(row, key)
    return int(value) if value is not None and value >= 1 else None


def release_of(row: dict[str, Any]) -> tuple[str, str | None]:
    """(engine, release or None for the newest) from text such as "V0 ~0.6.4" or "0.10.2 V1"."""
    text = _text(row, "vllm")
    # "0.2x" is somewhere in 0.20 to 0.29, "0.7.x" any 0.7.
    text = re.sub(r"(\d+\.\d)x\b", r"\g<1>5", text)
    match = re.search(r"\d+\.\d+(?:\.\d+)?", text)
    release = match.group(0) if match else None
    if "dev" in text:
        release = None
    if re.search(r"\bV0\b", text):
        return "v0", release or "0.8.5"
    if re.search(r"\bV1\b", text):
        return "v1", release
    old = release is not None and parse_version(release) < (0, 8)
    return ("v0" if old else "v1"), release


def gpu_of(row: dict[str, Any]) -> Gpu | None:
    """The GPU named anywhere in the row's text, with the row's own total memory if it gives one."""
    text = _text(row, "gpu")
    found: Gpu | None = None
    outside = re.sub(r"\(.*?\)", " ", text)
    for part in (outside, *re.findall(r"\((.*?)\)", text), text):
        name = re.sub(r"^\s*\d+\s*x\s*|\bsingle\b|\bGPU\b", " ", part).strip()
        try:
            found = find_gpu(name)
            break
        except UserError:
            pass
        names = {alias: g for g in gpus() for alias in (g.name, *g.aliases) if len(alias) > 1}
        for alias in sorted(names, key=len, reverse=True):
            pattern = re.escape(alias).replace(r"\-", r"[-_ ]?")
            if alias != "cpu" and re.search(
                rf"(?<![a-z0-9]){pattern}(?![a-z0-9])", name.lower(), re.I
            ):
                found = names[alias]
                break
        if found is not None:
            break
    if found is None:
        return None
    for pattern, unit in ((r"([\d.]+)\s*GiB", GIB), (r"([\d,]+)\s*B\b", 1)):
        match = re.search(pattern, text)
        total = round(float(match.group(1).replace(",", "")) * unit) if match else 0
        # Only a device's total: some rows give the KV memory in the same words.
        if abs(total / found.memory_bytes - 1) < 0.1:
            return replace(found, memory_bytes=total)
    return found


def model_of(row: dict[str, Any]) -> tuple[ModelSpec | None, str | None]:
    """(the bundled model that the row names, its dtype if the row names one).

    A quantization in the name ("wna16", "AWQ") replaces the checkpoint's own.
    """
    text = _text(row, "model")
    method = next((m for word, m in _QUANTIZED_WORDS.items() if word in text.lower()), None)
    dtype = next(
        (DTYPE_NAMES[w.lower()] for w in re.findall(r"\w+", text) if w.lower() in DTYPE_NAMES), None
    )
    if text.startswith("("):
        return None, dtype  # a geometry, not the model itself
    name = text.split(" ")[0] if text else ""
    for candidate in (name, re.sub(r"-(Instruct|Chat|AWQ|GPTQ|FP8|hf)(-.*)?$", "", name)):
        try:
            model = load_model(candidate)
        except UserError:
            continue
        if method is not None and model.quantization != method:
            model = replace(model, quantization=method, quantization_config={})
        return model, dtype
    return None, dtype


def geometry_of(row: dict[str, Any]) -> ModelSpec | None:
    """A dense model with the row's own layers and heads per rank: enough for KV arithmetic, nothing else."""
    layers, heads, size = (_int(row, k) for k in ("layers", "kv_heads_per_rank", "head_dim"))
    if not layers or not heads or not size:
        return None
    named, _ = model_of(row)
    latent = "mla" in _text(row, "kind").lower() or (named is not None and named.mla is not None)
    if latent and heads == 1 and size > 64:
        # One latent vector a token: the row's head_dim is kv_lora_rank + RoPE part.
        mla = {
            "kv_lora_rank": size - 64,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
        }
    else:
        mla = {}
    config = {
        **mla,
        "model_type": "llama",
        "hidden_size": heads * size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": size,
        "intermediate_size": size,
        "vocab_size": 1000,
        "max_position_embeddings": max(1 << 20, _int(row, "max_model_len") or 0),
        "torch_dtype": "bfloat16",
    }
    return spec_from_config(config, f"{layers} layers x {heads} KV heads x {size}")


def _sizing(
    row: dict[str, Any], model: ModelSpec, engine: str, release: str | None
) -> CapacityInput:
    """The sizing of a row's geometry (one rank), whatever the memory."""
    kv_dtype = _text(row, "kv_dtype")
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
        block_size=_int(row, "block_size") or 16,
        max_model_len=_int(row, "max_model_len") or 16,
        max_num_seqs=1,
        max_num_batched_tokens=2048,
        in_flight_tokens=2048,
        gpu_memory_utilization=0.9,
        enforce_eager=True,
        engine=engine,
        engine_version=release or "",
    )


def _bytes_per_block(row: dict[str, Any], engine: str, release: str | None) -> int | None:
    if _text(row, "kind") == "hybrid":
        return None
    model = geometry_of(row)
    if model is None:
        per_token, size = _int(row, "kv_bytes_per_token_per_rank"), _int(row, "block_size")
        return per_token * size if per_token and size else None
    want = replace(_sizing(row, model, engine, release), max_model_len=1, available_bytes=1 << 50)
    return size_kv_cache(want).bytes_per_block


def _reported_blocks(row: dict[str, Any]) -> int | None:
    blocks, tokens, size = (_int(row, k) for k in ("num_gpu_blocks", "kv_tokens", "block_size"))
    if blocks is not None:
        return blocks
    return tokens // size if tokens is not None and size and tokens % size == 0 else None


def check_row(row: dict[str, Any]) -> list[RowResult]:
    """Every claim of the row that its inputs allow to check; one "no inputs" result if there is none."""
    name = _text(row, "id") or "?"
    engine, release = release_of(row)
    results: list[RowResult] = []

    def say(claim: str, ok: bool, ours: object, reported: object, note: str = "") -> None:
        outcome: Outcome = "exact" if ok else "WRONG"
        results.append(RowResult(name, claim, outcome, str(ours), str(reported), None, note))

    per_block = _bytes_per_block(row, engine, release)
    blocks, available = _reported_blocks(row), _number(row, "available_kv_gib")
    per_token, size = _int(row, "kv_bytes_per_token_per_rank"), _int(row, "block_size")
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
        if blocks is not None and _text(row, "kind") == "dense-multirank":
            # The figure is one rank's; the poorest rank sets the blocks.
            say("blocks not above what this rank holds", blocks <= high, f"<= {high}", blocks)
        elif blocks is not None:
            say("blocks from available memory", low <= blocks <= high, f"{low}..{high}", blocks)
        elif (given := _range(row.get("blocks_from_available_range"))) is not None:
            middle = math.floor(available * GIB) // per_block
            say("blocks from available memory", given[0] <= middle <= given[1], middle, given)
    _tokens(row, blocks, say)
    _concurrency(row, release, say)
    cpu = _int(row, "num_cpu_blocks")
    if per_block and cpu is not None:
        given_swap = re.search(r"swap_space (\d+)", _text(row, "notes"))
        swap = int(given_swap.group(1)) if given_swap else 4
        ours = swap * GIB // per_block
        say(f"CPU blocks from {swap} GiB of swap", ours == cpu, ours, cpu)
    _refusals(row, engine, release, blocks, say)
    results += _prediction(row, name, engine, release, blocks, available)
    return results or [RowResult(name, "-", "no inputs", "", "", None, _text(row, "notes"))]


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
    tokens, size = _int(row, "kv_tokens"), _int(row, "block_size")
    if (
        _int(row, "num_gpu_blocks") is not None
        and blocks
        and tokens
        and size
        and _text(row, "kind") != "hybrid"
    ):
        say("tokens", blocks * size == tokens, blocks * size, tokens)


def _concurrency(row: dict[str, Any], release: str | None, say: Any) -> None:
    """The printed concurrency and the printed tokens belong together, by the release's own definition."""
    tokens, length, printed = (
        _number(row, k) for k in ("kv_tokens", "max_model_len", "max_concurrency")
    )
    if tokens is None or not length or printed is None:
        return
    decimals = len(str(printed).partition(".")[2])
    half = 0.5 * 10 ** -max(2, decimals)
    hybrid = _text(row, "kind") == "hybrid"
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
    blocks = _int(row, "num_gpu_blocks")
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
    notes, available = _text(row, "notes"), _number(row, "available_kv_gib")
    length = _int(row, "max_model_len")
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
    if _text(row, "kind") == "reject":
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
            held_tokens = blocks * (_int(row, "block_size") or 16)
            say(
                f"refuses {length}",
                length > held_tokens,
                f"holds {held_tokens}",
                f"holds {_int(row, 'kv_tokens')}",
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
    if engine == "v0" and _int(row, "max_model_len") is None:
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
    one_rank = _text(row, "kind") == "dense-multirank" and available is not None and available > 0
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
) -> Deployment:
    """The row's deployment."""
    length = _int(row, "max_model_len")
    kv_dtype = _text(row, "kv_dtype")
    flags: dict[str, Any] = {
        "tensor_parallel_size": _int(row, "tp"),
        "gpu_memory_utilization": _number(row, "gpu_memory_utilization"),
        "kv_cache_dtype": kv_dtype if kv_dtype.startswith("fp8") else None,
        "block_size": _int(row, "block_size"),
        "dtype": dtype,
        "engine": engine,
        "engine_version": release,
    }
    flags = {k: v for k, v in flags.items() if v is not None}
    if length is not None:
        flags["max_model_len"] = min(length, model.max_model_len)
    notes = _text(row, "notes")
    for flag, pattern in (
        ("max_num_seqs", r"max_num_seqs (\d+)"),
        ("max_num_batched_tokens", r"(?:max_num_batched_tokens|mnbt) (\d+)"),
    ):
        given = re.search(pattern, notes)
        if given:
            flags[flag] = int(given.group(1))
    # The engine started, or its refusal is checked elsewhere: here only the memory is compared.
    return resolve(model, gpu, what_if=True, **flags)
