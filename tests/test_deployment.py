"""Flags resolved as vLLM resolves them: defaults by GPU, origins, refusals."""

from __future__ import annotations

from typing import Any

import pytest

from vsim.errors import UserError
from vsim.sim.deployment import Deployment, resolve

LLAMA = "meta-llama/Llama-3.1-8B"
GIB = 1 << 30


def llama(gpu: str = "a100", **flags: Any) -> Deployment:
    return resolve(LLAMA, gpu, **{"max_model_len": 8192, **flags})


@pytest.mark.parametrize(
    ("gpu", "usage", "tokens", "seqs"),
    [
        # Spec section 10; engine_facts: server 8192/1024 on 70 GiB and more except A100.
        ("a100", "server", 2048, 256),
        ("a100", "llm", 8192, 256),
        ("a100-40gb", "server", 2048, 256),
        ("a800", "server", 8192, 1024),
        ("h100", "server", 8192, 1024),
        ("h100", "llm", 16384, 1024),
        ("h200", "server", 8192, 1024),
        ("b200", "server", 16384, 1024),
        ("b200", "llm", 16384, 1024),
        ("l40s", "server", 2048, 256),
        ("rtx4090", "server", 2048, 256),
        ("rtxpro6000", "server", 8192, 1024),
    ],
)
def test_batch_defaults_depend_on_the_gpu(gpu: str, usage: str, tokens: int, seqs: int) -> None:
    config = llama(gpu, usage=usage).scheduler
    assert (config.max_num_batched_tokens, config.max_num_seqs) == (tokens, seqs)


def test_the_cpu_has_its_own_defaults() -> None:
    config = resolve("vsim/tiny-llama", "cpu", kv_cache_memory_bytes=GIB).scheduler
    assert (config.max_num_batched_tokens, config.max_num_seqs) == (2048, 128)
    assert config.block_size == 128
    assert not config.async_scheduling


def test_every_flag_says_where_it_comes_from() -> None:
    run = llama(max_num_seqs=64)
    assert run.origins["max_num_seqs"] == "given"
    assert run.origins["max_num_batched_tokens"] == "vLLM 0.32 default for A100-80GB (an A100)"
    assert run.origins["gpu_memory_utilization"] == "vLLM 0.32 default"
    assert set(run.flags) == set(run.origins)
    assert run.as_dict()["flags"]["max_num_seqs"] == 64


def test_v1_defaults() -> None:
    config = llama().scheduler
    assert config.enable_chunked_prefill
    assert config.enable_prefix_caching
    assert config.async_scheduling
    assert config.scheduler_reserve_full_isl
    assert (config.watermark, config.long_prefill_token_threshold, config.policy) == (
        0.0,
        0,
        "fcfs",
    )
    assert config.block_size == 16
    assert llama().gpu_memory_utilization == 0.92
    assert llama(engine_version="0.19.0").gpu_memory_utilization == 0.9


def test_v0_defaults() -> None:
    """Spec 12.22, and 4 GiB of swap at 2 MiB a block as in vllm#6623 (K03): 2048 CPU blocks."""
    run = resolve("meta-llama/Meta-Llama-3-8B", "a100", engine="v0")
    config = run.scheduler
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (256, 8192)
    assert not config.enable_chunked_prefill
    assert not config.enable_prefix_caching
    assert config.num_cpu_blocks == 2048
    assert run.gpu_memory_utilization == 0.9
    long = resolve(LLAMA, "a100", engine="v0", max_model_len=40000).scheduler
    assert long.enable_chunked_prefill
    assert long.max_num_batched_tokens == 2048


def test_without_chunked_prefill_a_batch_holds_a_whole_prompt() -> None:
    run = llama(enable_chunked_prefill=False)
    assert run.scheduler.max_num_batched_tokens == 8192


def test_small_settings_clip_the_defaults() -> None:
    assert llama(max_num_seqs=2, max_model_len=100).scheduler.max_num_batched_tokens == 200
    assert llama(max_num_batched_tokens=100).scheduler.max_num_seqs == 100


def test_the_override_replaces_the_block_count() -> None:
    run = llama(num_gpu_blocks_override=1000)
    assert run.kv_cache_blocks == 1000
    assert run.origins["num_gpu_blocks_override"] == "given"
    assert not any("estimated" in sentence for sentence in run.assumptions)
    assert any("estimated" in sentence for sentence in llama().assumptions)


def test_kv_cache_memory_replaces_the_account() -> None:
    run = llama(kv_cache_memory_bytes=10 * GIB)
    assert run.kv_cache_blocks == 10 * GIB // (2 << 20)


def test_fitting_the_length_to_the_memory() -> None:
    run = llama("rtx4090", max_model_len=-1)
    assert 16 < run.scheduler.max_model_len < 131072
    assert run.capacity.max_concurrency == pytest.approx(1.0, abs=0.01)
    with pytest.raises(UserError, match=f"maximum model length is {run.scheduler.max_model_len}"):
        llama("rtx4090", max_model_len=run.scheduler.max_model_len + 16)


def test_bfloat16_falls_back_on_old_gpus_but_is_refused_if_asked_for() -> None:
    assert llama("v100").dtype == "float16"
    assert any("does not support bfloat16" in sentence for sentence in llama("v100").assumptions)
    with pytest.raises(UserError, match=r"Bfloat16 is only supported.*7\.0.*--dtype=half"):
        llama("v100", dtype="bfloat16")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"max_model_len": 200_000}, r"User-specified max_model_len \(200000\) is greater than the derived"),
        ({"tensor_parallel_size": 3}, r"attention heads \(32\) must be divisible by tensor parallel size \(3\)"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size=0 must be at least 1"),
        ({"pipeline_parallel_size": 33}, "exceeds the 32 layers"),
        ({"enable_expert_parallel": True}, "Number of experts in the model must be greater than 0"),
        ({"block_size": 24}, "block_size=24: No valid attention backend"),
        ({"block_size": 0}, "block_size=0 must be at least 1"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 4096},
         r"max_num_batched_tokens \(4096\) is smaller than max_model_len \(8192\)"),
        ({"max_num_seqs": 4096, "max_num_batched_tokens": 2048},
         r"max_num_batched_tokens \(2048\) must be greater than or equal to max_num_seqs \(4096\)"),
        ({"max_num_active_seqs": 300}, r"max_num_active_seqs \(300\) cannot be greater than max_num_seqs \(256\)"),
        ({"long_prefill_token_threshold": 9000}, "cannot be greater than the max_model_len"),
        ({"kv_cache_dtype": "fp7"}, "kv_cache_dtype='fp7'"),
        ({"quantization": "zip"}, "Unknown quantization method: zip"),
        ({"dtype": "int7"}, "Unknown dtype: 'int7'"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization=1.5"),
        ({"gpu_memory_utilization": 0.1}, "No available memory for the cache blocks"),
        ({"watermark": 1.0}, "watermark=1.0"),
        ({"scheduling_policy": "lifo"}, "scheduling_policy='lifo'"),
        ({"engine": "v2"}, "engine='v2'"),
        ({"swap_space": 4.0}, "--swap-space and --preemption-mode are gone"),
        ({"preemption_mode": "swap"}, "--swap-space and --preemption-mode are gone"),
        ({"num_gpu_blocks_override": 10}, "To serve at least one request"),
        ({"engine": "v0", "num_gpu_blocks_override": 10}, r"The model's max seq len \(8192\) is larger"),
        ({"engine": "v0", "block_size": 48}, "accepts 1, 8, 16, 32, 64 and 128"),
        ({"engine": "v0", "kv_offloading_size": 1.0}, "--kv-offloading-size is a flag of V1"),
        ({"engine": "v0", "async_scheduling": True}, "--async-scheduling is a flag of V1"),
        ({"engine": "v0", "max_num_active_seqs": 3}, "--max-num-active-seqs is a flag of V1"),
        ({"engine": "v0", "engine_version": "0.32.0"}, "the V0 engine is gone since vLLM 0.11"),
        ({"engine_version": "latest"}, "engine_version='latest'"),
    ],
)  # fmt: skip
def test_what_vllm_refuses_is_refused_in_its_words(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        llama(**flags)


def test_too_old_a_gpu_for_a_quantization() -> None:
    with pytest.raises(UserError, match=r"fp8 is not supported for the current GPU.*75.*70"):
        llama("v100", quantization="fp8")


def test_a_checkpoint_s_own_quantization_cannot_be_contradicted() -> None:
    with pytest.raises(UserError, match=r"model config \(fp8\) does not match"):
        resolve("Qwen/Qwen3-32B-FP8", "h100", quantization="awq")
    assert resolve("Qwen/Qwen3-32B-FP8", "h100").flags["quantization"] == "fp8"


def test_a_model_that_does_not_fit_says_what_takes_the_memory() -> None:
    with pytest.raises(UserError, match=r"No available memory.*weights 131\.42"):
        resolve("meta-llama/Llama-3.1-70B", "a100")


def test_what_if_lets_an_unsupported_block_size_through_and_says_so() -> None:
    run = llama(block_size=8, what_if=True)
    assert run.scheduler.block_size == 8
    assert any("block_size=8" in sentence for sentence in run.assumptions)


def test_v0_takes_the_block_sizes_of_its_parser() -> None:
    for block in (8, 16, 32, 64, 128):
        run = llama(engine="v0", block_size=block)
        assert run.scheduler.block_size == block
        assert any("32 as the most" in sentence for sentence in run.assumptions) == (block > 32)


def test_hybrid_models_get_their_groups() -> None:
    groups = resolve("openai/gpt-oss-20b", "h100").scheduler.kv_groups
    assert sorted((g.type, g.window) for g in groups) == [("full", None), ("swa", 128)]


def test_offloading_counts_chunks_over_all_ranks() -> None:
    """Spec 9.6: the size is the total over TP ranks; a Llama 3.1 8B block is 2 MiB over two ranks."""
    run = llama(tensor_parallel_size=2, kv_offloading_size=4.0)
    assert run.scheduler.kv_offload is not None
    assert run.scheduler.kv_offload.cpu_blocks == 2048


def test_a_cpu_tier_smaller_than_a_block_says_that_it_keeps_nothing() -> None:
    run = llama(kv_offloading_size=0.001)
    assert run.scheduler.kv_offload is not None and run.scheduler.kv_offload.cpu_blocks == 0
    assert any("the CPU tier keeps nothing" in sentence for sentence in run.assumptions)


@pytest.mark.parametrize(
    ("gpu", "kv_cache_dtype", "block"),
    [("h200", None, 16), ("h200", "fp8", 64), ("b200", None, 32), ("a100", None, 16)],
)
def test_latent_attention_picks_the_block_size_of_its_kernel(
    gpu: str, kv_cache_dtype: str | None, block: int
) -> None:
    """vLLM 0.32 platforms/cuda.py: FlashAttention's MLA first on Hopper (no fp8), FlashInfer's on Blackwell."""
    run = resolve(
        "deepseek-ai/DeepSeek-V3",
        gpu,
        kv_cache_dtype=kv_cache_dtype,
        available_kv_cache_bytes=40 * GIB,
        tensor_parallel_size=8,
    )
    assert run.scheduler.block_size == block
