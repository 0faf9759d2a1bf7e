"""What a start-up takes besides weights and KV: activations, context, NCCL, CUDA graphs. Estimates, and said so.

vLLM measures these on the device; from GPU and model alone they can only be estimated. Each estimate states
its form and what it was compared with; docs/capacity.md has the error per public log.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vsim.models.hardware import Gpu
from vsim.models.model_spec import ModelSpec
from vsim.models.releases import Version, subtracts_cuda_graphs

GIB = 1 << 30
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


def sampling_copies(gpu: Gpu, engine: str, version: Version) -> float:
    """32-bit copies of the (sequences x vocabulary) logits that the profile run's sampling holds at its peak.

    9.65 with PyTorch's own top-k/top-p (sorted values, 64-bit indices, cumulative sums): public logs of 0.6 to
    0.14 give 9.6 to 9.8 for 256 and 1,024 sequences alike. 3.8 with the FlashInfer sampler (0.19 on an H100)
    and with model runner V2 (3.4 in 0.3x); docs/capacity.md lists the logs.
    """
    if engine == "v0" or not version or version < (0, 16):
        return 9.65
    old = gpu.compute_capability is not None and gpu.compute_capability < (8, 0)
    return 9.65 if old and version < (0, 30) else 3.8


def activation_peak(
    model: ModelSpec,
    gpu: Gpu,
    tp: int,
    ep: int,
    tokens: int,
    seqs: int,
    dtype_bytes: int,
    engine: str,
    version: Version,
    chunked_prefill: bool,
) -> Term:
    """Transient peak of the profile run: `tokens` tokens through the widest layer, or `seqs` rows of sampling.

    Forward: residual, normed input and output of the layer (3 x hidden) and the gate/up product with its
    activation (3 x intermediate of the rank; for routed layers per chosen expert). Compared with vllm#10517:
    20,000 tokens of Llama 3.1 8B take 2.07 GiB, this gives 2.06 GiB. Sampling runs over the whole vocabulary
    on every rank (`sampling_copies`); V0's profile run with chunked prefill does not sample (0.06 GiB with 512
    tokens in vllm#10517, 0.19 GiB with 2,048 in vllm#13061).
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
    samples = engine == "v1" or not chunked_prefill
    copies = sampling_copies(gpu, engine, version) if samples else 0.0
    sampling = round(min(seqs, tokens) * model.vocab_size * 4 * copies)
    if forward >= sampling:
        what = f"forward of {tokens} tokens"
    else:
        what = f"sampling: {copies:g} x {min(seqs, tokens)} sequences x {model.vocab_size} tokens x 4 B"
    return Term("activation peak", max(forward, sampling), "assumed", f"estimate, {what}")


def non_torch(gpu: Gpu, tp: int, pp: int, engine: str, version: Version) -> Term:
    """CUDA modules and workspaces, and for more than one rank NCCL's and the all-reduce's buffers.

    Public logs, one rank: 0.35 GiB up to 0.6.4 (which counted the context), 0.02 to 0.12 up to 0.12, 0.25 from
    0.19 on (0.26 on an A100 with 0.31.0). More ranks: 1.4 to 1.8 over NVLink, 0.2 to 1.7 over PCIe.
    """
    if gpu.platform == "cpu":
        return Term("non-torch memory", 0, "assumed", "the CPU backend has no device context")
    if version and version < (0, 6, 5):
        base = 0.35
    elif engine == "v0" or (version and version < (0, 16)):
        base = 0.1
    else:
        base = 0.25
    source = f"estimate: {base} GiB of kernels and workspaces"
    if tp * pp > 1:
        links = 1.2 if gpu.nvlink_gb_s else 0.4
        base += links
        source += (
            f", {links} GiB of communication buffers ({'NVLink' if gpu.nvlink_gb_s else 'PCIe'})"
        )
    return Term("non-torch memory", round(base * GIB), "assumed", source)


def cuda_graphs(
    gpu: Gpu, enforce_eager: bool, max_num_seqs: int, max_num_batched_tokens: int, version: Version
) -> Term:
    """The share that vLLM subtracts for CUDA graphs, from 0.21 on.

    Its estimate (not the memory later used, which is about half of it) in public logs of 7B-class models at
    the default 512 captured tokens: 0.53, 0.58, 0.69, 0.83 GiB; MoE models on several ranks up to 5.
    """
    if gpu.platform != "cuda" or enforce_eager:
        return Term("CUDA graph estimate", 0, "formula", "no graphs are captured")
    if not subtracts_cuda_graphs(version):
        why = "before vLLM 0.21 graphs are not taken from the KV budget"
        return Term("CUDA graph estimate", 0, "formula", why)
    largest = capture_limit(gpu, max_num_seqs, max_num_batched_tokens)
    estimate = round(0.65 * GIB * largest / 512)
    what = f"estimate: 0.65 GiB at 512 captured tokens, here up to {largest}"
    return Term("CUDA graph estimate", estimate, "assumed", what)


def capture_limit(gpu: Gpu, max_num_seqs: int, max_num_batched_tokens: int) -> int:
    """The largest batch vLLM 0.32 captures a CUDA graph for (spec section 10)."""
    cap = 1024 if gpu.compute_capability and gpu.compute_capability[0] == 10 else 512
    return min(2 * max_num_seqs, cap, max_num_batched_tokens)
