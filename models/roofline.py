"""Step time from a GPU's data sheet and a model's shape: for GPUs nobody measured. It says so."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vsim.errors import UserError
from vsim.models.hardware import Gpu
from vsim.models.model_spec import ModelSpec
from vsim.models.step import FloatArray, StepShape

LABEL = "roofline, not measured"

# What real kernels reach of the data sheet. Dense GEMMs in the layerwise tables of tests/data/cases reach
# 0.96 (RTX 4090) and 0.84 (RTX PRO 6000) of peak FLOPs and 0.93-0.94 of bandwidth; decode attention 0.80 and
# 0.76 of bandwidth, prefill attention 0.43-0.58 of peak. Data-centre parts lose more to their power limit, so
# the values below lie under those. Assumed, not measured, for any other GPU.
COMPUTE_EFFICIENCY = 0.75
MEMORY_EFFICIENCY = 0.85
ATTENTION_COMPUTE_EFFICIENCY = 0.45
ATTENTION_MEMORY_EFFICIENCY = 0.75
KERNEL_US = 3.0  # floor of one small kernel; a layer runs about SMALL_KERNELS beside its GEMMs
SMALL_KERNELS = 6
# A hop between GPUs: NVLink, and PCIe as the tables' authors assume it (cases/README).
NVLINK_HOP_S = 5e-6
PCIE_HOP_S = 20e-6
PCIE_SHARE = 0.5  # of the data sheet's one-way rate; 16 GB/s on PCIe 4.0 x16


@dataclass(frozen=True, slots=True)
class RooflineStepModel:
    """max(FLOPs / peak, bytes / bandwidth) for the dense part and for attention, summed over a step.

    All sizes are per rank (already divided by tensor parallelism). `weight_bytes` are read once a step;
    of experts only those that the step's tokens wake (see `expert_*`). FLOPs count 2 per multiply-add.
    """

    num_layers: int
    flops_per_token: float  # dense part of all layers: 2 x active parameters without experts
    weight_bytes: float  # dense weights without experts, embedding and head
    head_flops_per_seq: float
    head_bytes: float
    attention_flops_per_pair: (
        float  # per query-key product, over all layers: 4 x heads x head_dim x layers
    )
    kv_bytes_per_token: float
    peak_flops_per_s: float
    bytes_per_s: float
    # Layers with a sliding window, apart from the full ones above (0: none).
    window: int = 0  # tokens
    window_flops_per_pair: float = 0.0
    window_kv_bytes_per_token: float = 0.0
    num_experts: int = 0
    top_k: int = 0
    expert_bytes: float = 0.0  # one expert, over all layers
    expert_flops_per_token: float = 0.0  # top_k experts, over all layers
    all_reduce_latency_s: float = 0.0  # all hops of all layers of a step
    all_reduce_s_per_token: float = 0.0
    host_base_s: float = 0.0
    host_per_seq_s: float = 0.0

    def device_seconds(self, shape: StepShape) -> float:
        fixed, pairs, moved = self._fixed(shape)
        context = shape.decode_context_sum
        flops = pairs + context * self.attention_flops_per_pair
        moved += context * self.kv_bytes_per_token
        if self.window:
            seen = min(context, shape.num_decodes * self.window)
            flops += seen * self.window_flops_per_pair
            moved += seen * self.window_kv_bytes_per_token
        return fixed + max(flops / self._attention_flops_per_s, moved / self._attention_bytes_per_s)

    def decode_run_seconds(self, shape: StepShape, steps: int) -> FloatArray:
        """See `RunStepModel`."""
        fixed, pairs, chunk_bytes = self._fixed(shape)
        context = shape.decode_context_sum + np.arange(steps, dtype=np.int64) * shape.num_decodes
        flops = pairs + context * self.attention_flops_per_pair
        moved = chunk_bytes + context * self.kv_bytes_per_token
        if self.window:
            seen = np.minimum(context, shape.num_decodes * self.window)
            flops = flops + seen * self.window_flops_per_pair
            moved = moved + seen * self.window_kv_bytes_per_token
        seconds: FloatArray = fixed + np.maximum(
            flops / self._attention_flops_per_s, moved / self._attention_bytes_per_s
        )
        return seconds

    @property
    def _attention_flops_per_s(self) -> float:
        return self.peak_flops_per_s * ATTENTION_COMPUTE_EFFICIENCY

    @property
    def _attention_bytes_per_s(self) -> float:
        return self.bytes_per_s * ATTENTION_MEMORY_EFFICIENCY

    def host_seconds(self, shape: StepShape) -> float:
        return self.host_base_s + self.host_per_seq_s * shape.num_seqs

    def _fixed(self, shape: StepShape) -> tuple[float, float, float]:
        """(seconds of all but attention, attention FLOPs of the chunks, KV bytes of the chunks)."""
        tokens, seqs = shape.num_tokens, shape.num_seqs
        if not tokens:
            return 0.0, 0.0, 0.0
        flops, moved = tokens * self.flops_per_token, self.weight_bytes
        if self.num_experts:
            awake = self.num_experts * (1 - (1 - self.top_k / self.num_experts) ** tokens)
            moved += awake * self.expert_bytes
            flops += tokens * self.expert_flops_per_token
        peak = self.peak_flops_per_s * COMPUTE_EFFICIENCY
        bandwidth = self.bytes_per_s * MEMORY_EFFICIENCY
        seconds = max(flops / peak, moved / bandwidth)
        seconds += max(seqs * self.head_flops_per_seq / peak, self.head_bytes / bandwidth)
        seconds += self.num_layers * SMALL_KERNELS * KERNEL_US * 1e-6
        seconds += self.all_reduce_latency_s + tokens * self.all_reduce_s_per_token
        if not shape.prefills:
            return seconds, 0.0, 0.0
        pairs = shape.prefill_work * self.attention_flops_per_pair
        kv = sum(context + new for new, context in shape.prefills) * self.kv_bytes_per_token
        if self.window:
            pairs += self.window_flops_per_pair * sum(
                new * min(context + new / 2, self.window) for new, context in shape.prefills
            )
        return seconds, pairs, kv


def roofline_params(
    gpu: Gpu,
    model: ModelSpec,
    *,
    tensor_parallel_size: int = 1,
    weight_bytes_per_param: float = 2.0,
    kv_bytes_per_element: float = 2.0,
) -> dict[str, float | int]:
    """Parameters of a `RooflineStepModel`. Raises UserError if the GPU has no rate or bandwidth on record.

    Weights narrower than 16 bits are taken as widened for 16-bit arithmetic: fewer bytes, the same FLOPs.
    """
    flops = gpu.bf16_tflops or gpu.fp16_tflops
    if not flops or not gpu.memory_bandwidth_gb_s:
        raise UserError(
            f"no FLOP rate or memory bandwidth on record for {gpu.name}: give --profile"
        )
    tp, hidden, layers = tensor_parallel_size, model.hidden_size, model.layers
    moe = model.moe
    moe_layers = sum(layer.moe for layer in layers) if moe else 0
    windows = [layer.window for layer in layers if layer.window]
    full = len(layers) - len(windows)
    dense = len(layers) * _attention_params(model)
    dense += (len(layers) - moe_layers) * 3 * hidden * model.intermediate_size
    if moe:
        dense += moe_layers * 3 * hidden * moe.shared_intermediate_size
    head = hidden * model.vocab_size
    # Per pair and head: query x key over one width, score x value over the other.
    widths = (
        model.mla.kv_lora_rank * 2 + model.mla.qk_rope_head_dim
        if model.mla
        else 2 * model.head_size
    )
    pair = 2.0 * model.num_attention_heads * widths / tp
    kv = _kv_elements(model, tp) * kv_bytes_per_element
    params: dict[str, float | int] = {
        "num_layers": len(layers),
        "flops_per_token": 2.0 * dense / tp,
        "weight_bytes": dense * weight_bytes_per_param / tp,
        "head_flops_per_seq": 2.0 * head / tp,
        "head_bytes": 2.0 * head / tp,
        "attention_flops_per_pair": full * pair,
        "kv_bytes_per_token": full * kv,
        "peak_flops_per_s": flops * 1e12,
        "bytes_per_s": gpu.memory_bandwidth_gb_s * 1e9,
    }
    if windows:
        params |= {
            "window": max(windows),
            "window_flops_per_pair": len(windows) * pair,
            "window_kv_bytes_per_token": len(windows) * kv,
        }
    if moe:
        expert = 3.0 * hidden * moe.intermediate_size * moe_layers / tp
        params |= {
            "num_experts": moe.num_experts,
            "top_k": moe.experts_per_token,
            "expert_bytes": expert * weight_bytes_per_param,
            "expert_flops_per_token": 2.0 * expert * moe.experts_per_token,
        }
    if tp > 1:
        nvlink = gpu.nvlink_gb_s
        rate = (nvlink or (gpu.pcie_gb_s or 32) * PCIE_SHARE) * 1e9
        hops = 2 * (tp - 1) * 2 * len(layers)  # two all-reduces a layer, as a ring
        params |= {
            "all_reduce_latency_s": hops * (NVLINK_HOP_S if nvlink else PCIE_HOP_S),
            "all_reduce_s_per_token": hops * 2.0 * hidden / tp / rate,
        }
    return params


def _attention_params(model: ModelSpec) -> int:
    """Parameters of one layer's attention projections."""
    hidden, heads = model.hidden_size, model.num_attention_heads
    if model.mla is None:
        return hidden * model.head_size * (2 * heads + 2 * model.num_kv_heads)
    mla = model.mla
    query = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    q_in = mla.q_lora_rank
    q = q_in * (hidden + heads * query) if q_in else hidden * heads * query
    down = hidden * (mla.kv_lora_rank + mla.qk_rope_head_dim)
    up = mla.kv_lora_rank * heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    return q + down + up + heads * mla.v_head_dim * hidden


def _kv_elements(model: ModelSpec, tp: int) -> int:
    """KV elements of one token in one layer of one rank."""
    if model.mla:  # one latent, whole on every rank
        return model.mla.kv_lora_rank + model.mla.qk_rope_head_dim
    return 2 * max(1, model.num_kv_heads // tp) * model.head_size
