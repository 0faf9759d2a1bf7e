"""KV block arithmetic: the worked examples of spec 11.6, which came from vLLM's own function."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vsim.errors import UserError
from vsim.models.capacity import Capacity
from vsim.models.kv_spec import LayerKV, kv_layout
from vsim.models.model_spec import load_model, spec_from_config
from vsim.sim.deployment import resolve

GIB = 1 << 30


def size(model: str, available_gib: float, **flags: Any) -> Capacity:
    wanted = {"max_model_len": 8192, "max_num_batched_tokens": 8192, **flags}
    return resolve(
        model, "h100", available_kv_cache_bytes=int(available_gib * GIB), **wanted
    ).capacity


def test_llama_8b_in_57_gib() -> None:
    fit = size("meta-llama/Llama-3.1-8B", 57.0)
    assert fit.bytes_per_block == 2 << 20
    assert fit.num_gpu_blocks == 29184
    assert fit.kv_cache_size_tokens == 466_944
    assert fit.max_concurrency == pytest.approx(57.0)


@pytest.mark.parametrize("flags", [{"tensor_parallel_size": 2}, {"kv_cache_dtype": "fp8"}])
def test_two_ranks_or_eight_bits_double_the_blocks(flags: dict[str, Any]) -> None:
    fit = size("meta-llama/Llama-3.1-8B", 57.0, **flags)
    assert (fit.bytes_per_block, fit.num_gpu_blocks) == (1 << 20, 58368)


def test_bigger_blocks_hold_the_same_tokens() -> None:
    fit = size("meta-llama/Llama-3.1-8B", 57.0, block_size=128)
    assert (fit.bytes_per_block, fit.num_gpu_blocks) == (16 << 20, 3648)
    assert fit.kv_cache_size_tokens == 466_944


@pytest.mark.parametrize("tp", [1, 8])
def test_latent_attention_is_not_cut_by_tensor_parallelism(tp: int) -> None:
    fit = size("deepseek-ai/DeepSeek-V3", 40.0, tensor_parallel_size=tp, block_size=64)
    assert (fit.bytes_per_block, fit.num_gpu_blocks) == (4_497_408, 9549)
    assert fit.kv_cache_size_tokens == 611_136


def test_gemma_like_groups() -> None:
    config = {
        "model_type": "gemma3_text", "hidden_size": 5376, "num_hidden_layers": 62, "num_attention_heads": 32,
        "num_key_value_heads": 16, "head_dim": 128, "intermediate_size": 21504, "vocab_size": 262144,
        "max_position_embeddings": 131072, "sliding_window": 1024, "sliding_window_pattern": 6,
        "torch_dtype": "bfloat16",
    }  # fmt: skip
    model = spec_from_config(config, "gemma-like")
    fit = resolve(
        model,
        "h100",
        available_kv_cache_bytes=57 * GIB,
        max_model_len=8192,
        max_num_batched_tokens=8192,
    ).capacity
    assert len(fit.layout.groups) == 7
    assert (fit.bytes_per_block, fit.num_gpu_blocks) == (1_310_720, 46694)


def test_gpt_oss_groups() -> None:
    fit = size("openai/gpt-oss-20b", 57.0)
    assert (fit.bytes_per_block, fit.num_gpu_blocks) == (393_216, 155_648)
    assert len(fit.layout.groups) == 2


def test_rope_tables_are_loaded_with_the_weights() -> None:
    """vLLM logs 14.99 GiB for Llama 3.1 8B (vllm#10517) and 14.96 for Llama 3 8B (vllm#10511)."""
    assert size("meta-llama/Llama-3.1-8B", 57.0).weight_bytes / GIB == pytest.approx(
        14.9888, abs=1e-4
    )
    assert size("meta-llama/Meta-Llama-3-8B", 57.0).weight_bytes / GIB == pytest.approx(
        14.96, abs=5e-3
    )


layer_counts = st.lists(st.sampled_from(["full", "sliding"]), min_size=1, max_size=40)


@given(layer_counts, st.integers(1, 4), st.integers(0, 1 << 34))
@settings(max_examples=100, deadline=None)
def test_every_layer_is_in_one_group_and_the_pool_fits(
    kinds: list[str], stages: int, memory: int
) -> None:
    layers = [
        LayerKV("sliding", 16, 4096, 128) if kind == "sliding" else LayerKV("full", 16, 4096)
        for kind in kinds
    ]
    cut = max(1, len(layers) // stages)
    ranges = [
        range(i * cut, len(layers) if i == stages - 1 else (i + 1) * cut)
        for i in range(stages)
        if i * cut < len(layers)
    ]
    layout = kv_layout(layers, ranges)
    assert sorted(i for group in layout.groups for i in group.layers) == list(range(len(layers)))
    blocks = layout.num_blocks([memory] * len(ranges))
    assert all(blocks * need <= memory for need in layout.bytes_per_block)


def test_qwen_counts_kv_heads_not_hidden_size() -> None:
    """vllm#22291: Qwen2.5-7B takes 57,344 bytes a token, not the 1.53 MB of a formula with the hidden size."""
    assert size("Qwen/Qwen2.5-7B-Instruct", 20.0).kv_bytes_per_token == 57_344
    assert load_model("Qwen/Qwen2.5-7B-Instruct").num_kv_heads == 4


def test_pipeline_stages_hold_their_own_layers() -> None:
    one, two = (
        size("meta-llama/Llama-3.1-70B", 40.0, tensor_parallel_size=4, pipeline_parallel_size=pp)
        for pp in (1, 2)
    )
    assert one.kv_bytes_per_token == 2 * two.kv_bytes_per_token == 81_920
    assert two.num_gpu_blocks == 2 * one.num_gpu_blocks


def test_draft_layers_keep_kv_too() -> None:
    """An MTP layer is one more layer of latent vectors: 62 instead of 61."""
    plain = size("deepseek-ai/DeepSeek-V3", 40.0, tensor_parallel_size=8)
    mtp = size(
        "deepseek-ai/DeepSeek-V3",
        40.0,
        tensor_parallel_size=8,
        speculative_config={"method": "mtp"},
    )
    assert mtp.bytes_per_block * 61 == plain.bytes_per_block * 62
    ngram = size(
        "deepseek-ai/DeepSeek-V3",
        40.0,
        tensor_parallel_size=8,
        speculative_config={"method": "ngram"},
    )
    assert ngram.bytes_per_block == plain.bytes_per_block


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"method": "mtp"}, "has no MTP layers"),
        ({"method": "magic"}, "unknown method 'magic'"),
        ({"method": "ngram", "num_speculative_tokens": -3}, "num_speculative_tokens=-3 must be"),
        ({"method": "eagle"}, "needs a model"),
        ({"method": "eagle", "model": "no/such"}, "unknown model 'no/such'"),
    ],
)
def test_a_draft_that_cannot_be_found(config: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        size("meta-llama/Llama-3.1-8B", 40.0, speculative_config=config)
