"""vLLM's own defaults: what a flag becomes when the user does not give it."""

from __future__ import annotations

from vsim.models.hardware import Gpu
from vsim.models.memory import GIB
from vsim.models.releases import Version, b200_server_tokens, spares_a100

V0_BLOCK_SIZES = (1, 8, 16, 32, 64, 128)  # 0.8.5 config.py, `BlockSize`


def batch_defaults(
    gpu: Gpu, usage: str, world_size: int, version: Version = ()
) -> tuple[int, int, str]:
    """(max_num_batched_tokens, max_num_seqs, why) before any clipping.

    vLLM 0.32 engine/arg_utils.py, `get_batch_defaults`. `usage` is "server" (`vllm serve`) or "llm" (the
    offline `LLM` class). `world_size` is tp x pp and counts on the CPU only.
    """
    offline = usage == "llm"
    if gpu.platform == "cpu":
        tokens, seqs = (4096, 256) if offline else (2048, 128)
        return tokens * world_size, seqs * world_size, "the CPU backend"
    if gpu.memory_bytes >= 160 * GIB and b200_server_tokens(version):
        return 16384, 1024, f"{gpu.name} (160 GiB or more)"
    spared = "a100" in gpu.device_name.lower() and spares_a100(version)
    if gpu.memory_bytes >= 70 * GIB and not spared:
        return (16384 if offline else 8192), 1024, f"{gpu.name} (70 GiB or more, not an A100)"
    kind = "an A100" if "a100" in gpu.device_name.lower() else "less than 70 GiB"
    return (8192 if offline else 2048), 256, f"{gpu.name} ({kind})"


def block_size(
    gpu: Gpu, engine: str, mla: bool, kv_cache_dtype: str, version: Version = ()
) -> tuple[int, str]:
    """The KV block size without `--block-size`, and why if it is not CacheConfig's 16.

    The platform or the attention backend may ask for more (0.32 platforms/cpu.py, platforms/interface.py
    `update_block_size_for_backend`, platforms/cuda.py `_get_backend_priorities`, the backends'
    `get_supported_kernel_block_sizes`).
    """
    if gpu.platform == "cpu" and engine == "v1":
        return (16, "its MLA kernel") if mla else (128, "the CPU backend")
    if gpu.platform == "npu":
        return 128, "the Ascend plug-in"
    if mla and gpu.compute_capability is not None:
        major = gpu.compute_capability[0]
        if major == 10:
            return 32, "the FlashInfer MLA backend"
        # FlashAttention's MLA kernel takes 16, but no fp8 cache; FlashMLA takes multiples of 64.
        old = engine == "v0" or (version and version < (0, 11))
        if major == 9 and (old or kv_cache_dtype.startswith("fp8")):
            return 64, "the FlashMLA backend"
    return 16, ""


def block_size_refusal(gpu: Gpu, engine: str, size: int) -> str | None:
    """Why the engine would refuse `--block-size size` on this device; None if it would not."""
    if engine == "v0":
        return None if size in V0_BLOCK_SIZES else "vLLM 0.8.5 accepts 1, 8, 16, 32, 64 and 128"
    if gpu.platform == "cuda" and size % 16:
        return (
            "No valid attention backend found for cuda: block_size not supported "
            "(FlashAttention, FlashInfer and Triton take multiples of 16)"
        )
    return None
