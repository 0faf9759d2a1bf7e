"""A public capacity report as people wrote it: release, GPU, model and figures out of free text."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from vsim.errors import UserError
from vsim.models.hardware import Gpu, find_gpu, gpus
from vsim.models.memory import GIB
from vsim.models.model_spec import ModelSpec, load_model, spec_from_config
from vsim.models.quantization import DTYPE_NAMES
from vsim.models.releases import parse_version

_QUANTIZED_WORDS = {
    "wna16": "moe_wna16",
    "awq": "awq",
    "gptq": "gptq",
    "fp8": "fp8",
    "w4a16": "gptq",
}


def text_of(row: dict[str, Any], key: str) -> str:
    value = row.get(key)
    return value if isinstance(value, str) else ""


def number_of(row: dict[str, Any], key: str) -> float | None:
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < 1e12 else None  # neither NaN nor infinite nor absurd


def count_of(row: dict[str, Any], key: str) -> int | None:
    """A count: positive, or None."""
    value = number_of(row, key)
    return int(value) if value is not None and value >= 1 else None


def release_of(row: dict[str, Any]) -> tuple[str, str | None]:
    """(engine, release or None for the newest) from text such as "V0 ~0.6.4" or "0.10.2 V1"."""
    text = text_of(row, "vllm")
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
    text = text_of(row, "gpu")
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
    text = text_of(row, "model")
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
    layers, heads, size = (count_of(row, k) for k in ("layers", "kv_heads_per_rank", "head_dim"))
    if not layers or not heads or not size:
        return None
    named, _ = model_of(row)
    latent = "mla" in text_of(row, "kind").lower() or (named is not None and named.mla is not None)
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
        "max_position_embeddings": max(1 << 20, count_of(row, "max_model_len") or 0),
        "torch_dtype": "bfloat16",
    }
    return spec_from_config(config, f"{layers} layers x {heads} KV heads x {size}")
