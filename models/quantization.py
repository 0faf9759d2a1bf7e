"""Bytes per stored value: weight quantization methods and KV cache dtypes, by vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass

from vsim.errors import UserError
from vsim.models.hardware import Gpu
from vsim.models.model_spec import ModelSpec
from vsim.models.weights import Tensor

DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
DTYPE_NAMES = {
    "half": "float16",
    "fp16": "float16",
    "bf16": "bfloat16",
    "float": "float32",
    "fp32": "float32",
    **{name: name for name in DTYPE_BYTES},
}

_EIGHT_BIT = (
    *("fp8", "fbgemm_fp8", "ptpc_fp8", "modelopt", "modelopt_mxfp8", "mxfp8", "experts_int8"),
    *("fp8_per_tensor", "fp8_per_block", "fp8_per_channel", "int8_per_channel_weight_only"),
    *("deepseek_v4_fp8", "tpu_int8"),
)
_FOUR_BIT_GROUPED = (
    *(
        "awq",
        "auto_awq",
        "awq_marlin",
        "gptq",
        "auto_gptq",
        "gptq_marlin",
        "moe_wna16",
        "bitsandbytes",
    ),
    *("hqq", "marlin", "inc", "auto-round", "gptq_marlin_24"),
)
_FOUR_BIT_FLOAT = ("modelopt_fp4", "nvfp4", "nvfp4_per_token", "fp_quant")
_MXFP4 = ("mxfp4", "gpt_oss_mxfp4")
_MIXED = ("compressed-tensors", "quark", "torchao", "humming", "modelopt_mixed", "online")
QUANTIZATION_METHODS = (*_EIGHT_BIT, *_FOUR_BIT_GROUPED, *_FOUR_BIT_FLOAT, *_MXFP4, *_MIXED)

# Least compute capability x 10 (vLLM 0.32, `get_min_capability` of each quantization config).
_MIN_CAPABILITY = {
    **dict.fromkeys(_EIGHT_BIT, 75),
    **dict.fromkeys(_FOUR_BIT_FLOAT, 75),
    **dict.fromkeys(_MXFP4, 80),
    **dict.fromkeys(("awq", "auto_awq", "awq_marlin", "humming", "torchao", "online"), 75),
    **dict.fromkeys(("gptq", "auto_gptq", "inc"), 60),
    **dict.fromkeys(("gptq_marlin", "fbgemm_fp8", "experts_int8"), 80),
    **dict.fromkeys(("compressed-tensors", "quark", "moe_wna16", "bitsandbytes"), 70),
}

# KV dtypes of vLLM 0.32 (config/cache.py CacheDType) that vsim can size -> one K or V value, in bytes.
KV_CACHE_DTYPES: dict[str, float] = {
    "float16": 2,
    "bfloat16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "fp8_inc": 1,
    "fp8_ds_mla": 1,
    "nvfp4_ds_mla": 0.5,
    "int8_per_token_head": 1,
    "fp8_per_token_head": 1,
    "int4_per_token_head": 0.5,
    "nvfp4": 0.5,
    "nvfp4_4over6": 0.5,
}


@dataclass(frozen=True, slots=True)
class Quantization:
    """How weights are stored. `bits` is per quantized value, `overhead_bits` its share of scales and zeros."""

    method: str
    bits: float
    overhead_bits: float
    experts_only: bool = False  # MXFP4 checkpoints of gpt-oss leave attention alone
    pad_experts_to: tuple[int, int] = (
        1,
        1,
    )  # (hidden, intermediate) multiples the MoE kernel needs

    def tensor_bytes(self, tensor: Tensor, model: ModelSpec, dtype_bytes: int) -> float:
        """Bytes of one tensor of the rank."""
        quantized = tensor.kind == "expert" or (tensor.kind == "linear" and not self.experts_only)
        if not quantized:
            return tensor.count * dtype_bytes
        count = float(tensor.count)
        if tensor.kind == "expert" and model.moe is not None:
            for size, multiple in zip(
                (model.hidden_size, model.moe.intermediate_size), self.pad_experts_to, strict=True
            ):
                count *= -(-size // multiple) * multiple / size
        return count * (self.bits + self.overhead_bits) / 8


def _four_bit(method: str, config: dict[str, object]) -> Quantization:
    bits = config.get("bits", config.get("w_bit", 4))
    group = config.get("group_size", config.get("q_group_size", 128))
    bits = bits if isinstance(bits, int) and 1 <= bits <= 16 else 4
    group = group if isinstance(group, int) and group > 0 else 128
    # A 16-bit scale and a zero point of `bits` per group.
    return Quantization(method, bits, (16 + bits) / group)


def resolve_quantization(
    model: ModelSpec, asked: str | None, gpu: Gpu, assumptions: list[str]
) -> Quantization | None:
    """The weight format of this model under `--quantization asked`, or None for plain weights.

    Refuses, as vLLM does, an unknown method, one that contradicts the checkpoint's own, and one the GPU is
    too old for. A method asked for on a plain checkpoint is taken as a checkpoint of that format, which is
    added to `assumptions`.
    """
    own = model.quantization
    method = (asked or own or "").lower() or None
    if method is None:
        return None
    if method not in QUANTIZATION_METHODS:
        raise UserError(
            f"Unknown quantization method: {method}. Must be one of {', '.join(sorted(QUANTIZATION_METHODS))}."
        )
    if asked and own and _family(asked) != _family(own):
        raise UserError(
            f"Quantization method specified in the model config ({own}) does not match the quantization "
            f"method specified in the `quantization` argument ({asked})."
        )
    least = _MIN_CAPABILITY.get(method, 0)
    if gpu.compute_capability is not None:
        major, minor = gpu.compute_capability
        if major * 10 + minor < least:
            raise UserError(
                f"The quantization method {method} is not supported for the current GPU. Minimum capability: "
                f"{least}. Current capability: {major * 10 + minor} ({gpu.device_name})."
            )
    if asked and not own and method in (*_FOUR_BIT_GROUPED, *_MIXED, *_MXFP4, "modelopt_fp4"):
        assumptions.append(
            f"--quantization {asked}: {model.name} is taken as a checkpoint of this format and shape"
        )
    config = model.quantization_config
    if method in _MIXED:
        bits, group = _compressed_bits(config)
        if bits == 4:
            return Quantization(method, 4, 20 / group)
        return Quantization(method, bits, 0)
    if method in _FOUR_BIT_GROUPED:
        return _four_bit(method, config)
    if method in _FOUR_BIT_FLOAT:
        return Quantization(method, 4, 8 / 16)
    if method in _MXFP4:
        # One 8-bit scale per 32 values; the MoE kernels pad 2880 to 3072 x 2944 (oracle/mxfp4.py, Marlin).
        return Quantization(method, 4, 8 / 32, experts_only=True, pad_experts_to=(256, 128))
    return Quantization(method, 8, _block_scale_bits(config.get("weight_block_size")))


def _block_scale_bits(block: object) -> float:
    """Bits per value of 32-bit scales, one per block of weights; 0 for per-tensor scales."""
    if not isinstance(block, list) or len(block) != 2:
        return 0.0
    if not all(isinstance(x, int) and 0 < x < 1 << 31 for x in block):
        return 0.0
    return 32 / float(block[0] * block[1])


def _family(method: str) -> str:
    """Names that vLLM treats as one format (the Marlin variants read the same checkpoints)."""
    name = method.lower().replace("auto_", "").removesuffix("_marlin")
    return {"gpt_oss_mxfp4": "mxfp4", "moe_wna16": "awq"}.get(name, name)


def _compressed_bits(config: dict[str, object]) -> tuple[int, int]:
    """Weight bits and group size of a compressed-tensors style config; 8 bits if it does not say."""
    groups = config.get("config_groups")
    if isinstance(groups, dict):
        for group in groups.values():
            weights = group.get("weights") if isinstance(group, dict) else None
            if isinstance(weights, dict) and isinstance(weights.get("num_bits"), int):
                size = weights.get("group_size")
                return weights["num_bits"], size if isinstance(size, int) and size > 0 else 128
    return 8, 128


def weight_bytes(
    tensors: list[Tensor], model: ModelSpec, quantization: Quantization | None, dtype_bytes: int
) -> int:
    """Bytes of a rank's tensors."""
    if quantization is None:
        return sum(t.count for t in tensors) * dtype_bytes
    return round(sum(quantization.tensor_bytes(t, model, dtype_bytes) for t in tensors))


def kv_state_bytes(model: ModelSpec, kv_dtype: str, dtype: str) -> int:
    """Bytes of one token's K and V of one KV head of one layer (MLA: of its latent vector).

    vLLM 0.32: FullAttentionSpec and MLAAttentionSpec (v1/kv_cache_interface.py); per-token-head modes carry
    one 32-bit scale for K and one for V (triton_attn.py); NVFP4 an 8-bit scale per 16 values; fp8_ds_mla is
    656 and nvfp4_ds_mla 352 bytes (mla_attention.py).
    """
    name = dtype if kv_dtype == "auto" else kv_dtype
    size: float
    if model.mla is not None:
        fixed = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}.get(name)
        if fixed is not None:
            return fixed
        size = model.mla.kv_lora_rank + model.mla.qk_rope_head_dim
    else:
        size = 2 * model.head_size
    if name == "float32":
        return round(4 * size)
    content = size * KV_CACHE_DTYPES[name]
    if name.endswith("_per_token_head"):
        content += 2 * 4
    if name.startswith("nvfp4"):
        content += size / 16
    return round(content)
