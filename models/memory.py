"""What a start-up takes besides weights and KV: activations, context, NCCL, CUDA graphs. Estimates, and said so.

vLLM measures these on the device; from GPU and model alone they can only be estimated. Each estimate states
its form and what it was compared with; docs/capacity.md has the error per public log.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vsim.models.hardware import Gpu
from vsim.models.model_spec import ModelSpec

GIB = 1 << 30
Version = tuple[int, ...]
Origin = Literal["given", "formula", "measured", "assumed"]


@dataclass(frozen=True, slots=True)
class Term:
    """One summand of the memory account, per rank."""

    name: str
    bytes: int
    origin: Origin
    source: str

    @property
    def gib(self) -> float:
        return self.bytes / GIB


def parse_version(text: str) -> Version:
    """ "0.21.1rc2" -> (0, 21, 1); anything unreadable -> ()."""
    numbers: list[int] = []
    for part in text.lstrip("vV~ ").split("."):
        digits = ""
        for ch in part:
            if not ch.isdigit():
                break
            digits += ch
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def activation_peak(
    model: ModelSpec, tp: int, ep: int, tokens: int, seqs: int, dtype_bytes: int
) -> Term:
    """Transient peak of the profile run: `tokens` tokens through the widest layer, or `seqs` rows of sampling.

    Forward: residual, normed input and output of the layer (3 x hidden) and the gate/up product with its
    activation (3 x intermediate of the rank; for routed layers per chosen expert). Compared with vllm#10517:
    20,000 tokens of Llama 3.1 8B take 2.07 GiB, this gives 2.06 GiB.
    Sampling: the logits in the model's dtype and 2.5 copies in 32 bits (temperature, softmax, sort), over the
    whole vocabulary on every rank.
    """
    hidden = model.hidden_size
    widths = [0]
    if model.moe is not None and any(layer.moe for layer in model.layers):
        moe = model.moe
        cut = moe.intermediate_size if ep > 1 else -(-moe.intermediate_size // tp)
        widths.append(
            moe.experts_per_token * (3 * cut + hidden) + 3 * moe.shared_intermediate_size // tp
        )
    if any(not layer.moe for layer in model.layers):
        widths.append(3 * model.intermediate_size // tp)
    heads = model.num_attention_heads // tp
    kv_heads = max(1, model.num_kv_heads // tp)
    widths.append((2 * heads + 2 * kv_heads) * model.head_size)
    forward = tokens * (3 * hidden + max(widths)) * dtype_bytes
    sampling = round(seqs * model.vocab_size * (dtype_bytes + 2.5 * 4))
    peak = max(forward, sampling)
    what = (
        f"forward of {tokens} tokens"
        if forward >= sampling
        else f"sampling for {seqs} sequences over {model.vocab_size} tokens"
    )
    return Term("activation peak", peak, "assumed", f"estimate, {what} (models/memory.py)")


def non_torch(gpu: Gpu, tp: int, pp: int) -> Term:
    """CUDA modules, cuBLAS workspaces and, for more than one rank, NCCL's buffers."""
    if gpu.platform == "cpu":
        return Term("non-torch memory", 0, "assumed", "the CPU backend has no device context")
    base = 0.25 * GIB
    nccl = 0.0 if tp * pp == 1 else (342 if tp * pp == 2 else 392) * (1 << 20)
    source = "estimate: 0.25 GiB of kernels and workspaces"
    if nccl:
        source += f", {round(nccl / (1 << 20))} MiB of NCCL (aiconfigurator-core 0.12.0, nccl_mem)"
    return Term("non-torch memory", round(base + nccl), "assumed", source)


def cuda_graphs(
    gpu: Gpu, enforce_eager: bool, max_num_seqs: int, max_num_batched_tokens: int, version: Version
) -> Term:
    """The share that vLLM subtracts for CUDA graphs, from 0.21 on."""
    if gpu.platform != "cuda" or enforce_eager:
        return Term("CUDA graph estimate", 0, "formula", "no graphs are captured")
    if version and version < (0, 21):
        return Term(
            "CUDA graph estimate",
            0,
            "formula",
            "before vLLM 0.21 graphs are not taken from the KV budget",
        )
    largest = capture_limit(gpu, max_num_seqs, max_num_batched_tokens)
    estimate = round(0.6 * GIB * largest / 512)
    return Term(
        "CUDA graph estimate",
        estimate,
        "assumed",
        f"estimate: 0.6 GiB at 512 captured tokens (public logs: 0.3 to 0.7), here up to {largest}",
    )


def capture_limit(gpu: Gpu, max_num_seqs: int, max_num_batched_tokens: int) -> int:
    """The largest batch vLLM 0.32 captures a CUDA graph for (spec section 10)."""
    cap = 1024 if gpu.compute_capability and gpu.compute_capability[0] == 10 else 512
    return min(2 * max_num_seqs, cap, max_num_batched_tokens)
