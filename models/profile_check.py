"""Does a profile belong to a deployment? What is certainly another's is refused, what is doubtful is said."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vsim.errors import UserError
from vsim.models.artifact import Calibration
from vsim.models.hardware import Gpu
from vsim.models.model_spec import ModelSpec, load_model

# What a step's kernels depend on.
_SHAPE = (
    "hidden_size",
    "num_attention_heads",
    "num_kv_heads",
    "head_size",
    "intermediate_size",
    "vocab_size",
    "layers",
    "mla",
    "moe",
    "quantization",
)
_FLOATS = {
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float32": "float32",
    "float": "float32",
}
# Whole steps of a real engine: its scheduler and its launches are in them, and those differ by release.
_WHOLE_STEPS = ("engine-steps", "corrected")
# From this release on the V1 engine is what runs where nobody asked for the other one.
_FIRST_V1 = (0, 9)


@dataclass(frozen=True, slots=True)
class Asked:
    """What a deployment asks of a profile beside GPU, model and tensor-parallel size; None: not known.

    `dtype` is "bfloat16", "float16" or "float32"; `quantization` a method, "" for none; `engine` "v1" or "v0".
    """

    dtype: str | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    enforce_eager: bool | None = None
    engine: str | None = None
    engine_version: str | None = None
    block_size: int | None = None
    on_cpu: bool = False


def mismatch(
    calibration: Calibration, gpu: Gpu | None, model: ModelSpec | None, tensor_parallel_size: int
) -> str | None:
    """Why the profile is not one of this deployment; None: it is, or does not say."""
    says = calibration.provenance
    if gpu is not None and (says.get("gpu") or says.get("gpu_name")):
        known = {_plain(name) for name in (gpu.name, gpu.device_name, *gpu.aliases)}
        if not known & {_plain(str(says.get("gpu", ""))), _plain(str(says.get("gpu_name", "")))}:
            return (
                f"it was measured on {says.get('gpu') or says.get('gpu_name')}, not on {gpu.name}"
            )
    if model is not None and says.get("model") and not _same_model(str(says["model"]), model):
        return f"it was measured with {says['model']}, not with {model.name}"
    tp = says.get("tensor_parallel_size")
    if tp is not None and int(tp) != tensor_parallel_size:
        return f"it was measured with tensor_parallel_size={tp}, not {tensor_parallel_size}"
    return None


def other_engine(calibration: Calibration, asked: Asked) -> str | None:
    """Why its steps are not those of this precision or release, with the remedy; None: they may be."""
    says = calibration.provenance
    return (
        _other_weights(says, asked)
        or _other_cache(says, asked)
        or (_other_release(says, asked) if calibration.kind in _WHOLE_STEPS else None)
    )


def doubts(calibration: Calibration, name: str, asked: Asked) -> tuple[str, ...]:
    """Sentences about what was measured otherwise, or is not said, and is taken all the same."""
    says = calibration.provenance
    said = []
    if calibration.kind != "roofline":
        silent = [
            word
            for word, keys in (("GPU", ("gpu", "gpu_name")), ("model", ("model",)))
            if not any(says.get(key) for key in keys)
        ]
        if silent:
            said.append(
                f"profile {name} does not say which {' and '.join(silent)} it was measured on: whether it fits "
                "this deployment is not known"
            )
    measured = _float_name(says.get("dtype"))
    if measured and asked.dtype and measured != asked.dtype:
        said.append(
            f"profile {name} was measured in {measured}; its step times are taken for {asked.dtype} as well"
        )
    eager = says.get("enforce_eager")
    known = None not in (eager, asked.enforce_eager) and not asked.on_cpu
    if known and bool(eager) != asked.enforce_eager:
        had, has = ("without", "has") if eager else ("with", "has none of")
        said.append(
            f"profile {name} was measured {had} CUDA graphs, this deployment {has} them: small steps will be "
            f"{'shorter' if eager else 'longer'} than predicted"
        )
    sizes = block_sizes(calibration)
    if calibration.kind != "engine-steps" and sizes and asked.block_size not in (None, *sizes):
        said.append(
            f"profile {name} was measured at block size {', '.join(map(str, sizes))}; its step times are taken "
            f"for {asked.block_size} as well"
        )
    return tuple(said)


def block_sizes(calibration: Calibration) -> tuple[int, ...]:
    """The block sizes it was measured at, ascending; () where it does not say."""
    says = calibration.provenance
    sizes = says.get("block_sizes")
    if not isinstance(sizes, list):
        sizes = [says.get("block_size")]
    return tuple(
        sorted(
            {
                size
                for size in sizes
                if isinstance(size, int) and not isinstance(size, bool) and 0 < size <= 1 << 16
            }
        )
    )


def _other_weights(says: Mapping[str, Any], asked: Asked) -> str | None:
    measured = _float_name(says.get("dtype"))
    if measured and asked.dtype and (measured == "float32") != (asked.dtype == "float32"):
        return f"it was measured in {measured}, this deployment computes in {asked.dtype}"
    if asked.quantization is None:
        return None
    if "quantization" in says:
        had = _method(says["quantization"])
    elif measured:
        had = ""
    elif str(says.get("dtype") or "").lower().startswith("fp8"):
        had = "fp8"
    else:
        return None
    if had == _method(asked.quantization):
        return None
    words = [
        f"{method} weights" if method else "weights that are not quantized"
        for method in (had, _method(asked.quantization))
    ]
    return f"it was measured with {words[0]}, this deployment has {words[1]}"


def _other_cache(says: Mapping[str, Any], asked: Asked) -> str | None:
    """A KV cache wider than the measured one: attention would come out too fast. The narrower is doubtful only."""
    had = str(says.get("kv_cache_dtype") or "auto")
    if asked.kv_cache_dtype is None or not had.startswith("fp8"):
        return None
    if asked.kv_cache_dtype.startswith("fp8"):
        return None
    return f"it was measured with an {had} KV cache, this deployment's is {asked.kv_cache_dtype}"


def _other_release(says: Mapping[str, Any], asked: Asked) -> str | None:
    measured = str(says.get("vllm_version") or "")
    had = _release(measured)
    if not had or asked.engine_version is None:
        return None
    if (asked.engine == "v0") != (had < _FIRST_V1):
        return (
            f"it was measured on whole steps of vLLM {measured}, this deployment's engine is "
            f"{(asked.engine or 'v1').upper()}"
        )
    if had != _release(asked.engine_version):
        return (
            f"it was measured on whole steps of vLLM {measured}, not of {asked.engine_version}: replay that "
            f"release (--engine-version {'.'.join(map(str, had))}.0), or calibrate with this one"
        )
    return None


def _release(version: str) -> tuple[int, int] | None:
    """(major, minor) of "0.32.0+cpu"; None where that is no release."""
    match = re.match(r"v?(\d{1,4})\.(\d{1,4})(?!\d)", version)
    return None if match is None else (int(match[1]), int(match[2]))


def _float_name(dtype: object) -> str | None:
    return _FLOATS.get(str(dtype or "").lower())


def _method(quantization: object) -> str:
    """A method's plain name: vLLM runs awq as awq_marlin where it can."""
    return str(quantization or "").lower().removesuffix("_marlin")


def same_name(one: str, other: str) -> bool:
    """Are these two spellings of one model's or device's name?"""
    return _plain(one) == _plain(other)


def _same_model(name: str, model: ModelSpec) -> bool:
    """By name, or by shape where the catalogue knows `name`: fine-tunes and local folders run alike."""
    if _plain(name) == _plain(model.name):
        return True
    try:
        other = load_model(name)
    except UserError:
        return False
    return all(getattr(other, field) == getattr(model, field) for field in _SHAPE)


def _plain(name: str) -> str:
    """Letters and digits of a name, lower case, without an organisation's prefix."""
    return re.sub(r"[^a-z0-9]", "", name.lower().rsplit("/", 1)[-1])
