"""KV cache sizing against vLLM's own `get_kv_cache_configs` (0.32.0): blocks, groups, tokens, refusals."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
from dataclasses import replace
from typing import Any

import pytest

from vsim.errors import UserError
from vsim.models.capacity import CapacityInput, kv_stages, size_kv_cache
from vsim.models.draft import Draft, draft_of
from vsim.models.hardware import find_gpu
from vsim.models.model_spec import ModelSpec, bundled_models, load_model, spec_from_config
from vsim.tests.oracle.client import HERE, missing, python_of

GIB = 1 << 30
SERIES = int(os.environ.get("VSIM_KV_CASES", "400"))
KINDS = {"full": "FullAttentionSpec", "sliding": "SlidingWindowSpec", "mla": "MLAAttentionSpec"}


def drawn(rng: random.Random) -> CapacityInput:
    """A random sizing: a bundled model, or made-up layers of random kinds."""
    if rng.random() < 0.5:
        model = load_model(rng.choice(list(bundled_models())))
    else:
        model = made_up(rng)
    choices = ["bfloat16", "float16", "fp8", "fp8_e5m2"]
    kv_dtype = rng.choice(
        [*choices, "fp8_ds_mla"] if model.mla else [*choices, "int8_per_token_head"]
    )
    heads = model.num_attention_heads
    tp = rng.choice([n for n in (1, 2, 4, 8, 16) if heads % n == 0])
    return CapacityInput(
        gpu=find_gpu("h100"),
        model=model,
        dtype="bfloat16",
        kv_cache_dtype=kv_dtype,
        quantization=None,
        tensor_parallel_size=tp,
        pipeline_parallel_size=rng.choice([1, 1, 1, 2, 3, 4]),
        data_parallel_size=1,
        enable_expert_parallel=False,
        block_size=rng.choice([16, 16, 16, 32, 64, 128]),
        max_model_len=rng.choice([256, 1000, 4096, 8192, 32768, 131072]),
        max_num_seqs=256,
        max_num_batched_tokens=rng.choice([512, 2048, 8192]),
        in_flight_tokens=0,
        gpu_memory_utilization=0.9,
        enforce_eager=False,
        engine="v1",
        engine_version="0.32.0",
        available_bytes=int(rng.choice([0.01, 0.3, 2, 20, 60]) * GIB * rng.uniform(0.5, 1.5)),
        num_gpu_blocks_override=rng.choice([None, None, None, rng.randrange(2, 3000)]),
        draft=draft(rng, model),
    )


def draft(rng: random.Random, model: ModelSpec) -> Draft | None:
    """Now and then a draft: the model's own MTP layers, or a small model of the same kind of attention."""
    if rng.random() < 0.7:
        return None
    if model.num_draft_layers:
        return draft_of(model, {"method": "mtp"})
    if model.mla is not None:
        return None
    return draft_of(
        model, {"method": "eagle", "model": rng.choice(["tiny", "Llama-3.2-1B", "Qwen/Qwen3-0.6B"])}
    )


def made_up(rng: random.Random) -> ModelSpec:
    layers = rng.randrange(4, 40)
    window = rng.choice([128, 512, 1024, 4096])
    kinds = [rng.choice(["sliding_attention", "full_attention"]) for _ in range(layers)]
    return spec_from_config(
        {
            "model_type": "llama",
            "hidden_size": 512,
            "num_hidden_layers": layers,
            "num_attention_heads": 16,
            "num_key_value_heads": rng.choice([1, 2, 4, 8, 16]),
            "head_dim": rng.choice([64, 80, 128, 256]),
            "intermediate_size": 1024,
            "vocab_size": 1000,
            "max_position_embeddings": 1 << 20,
            "sliding_window": window,
            "layer_types": kinds,
        },
        "made up",
    )


def as_case(want: CapacityInput, batches: int) -> dict[str, Any]:
    """The same sizing as vLLM's workers would report it."""
    tp = want.tensor_parallel_size
    owners = [(want.model, layer) for layer in want.model.layers]
    if want.draft is not None:
        owners += [(want.draft.model, layer) for layer in want.draft.layers]
    workers = []
    for stage in kv_stages(want):
        layers = []
        for i in stage:
            model, layer = owners[i]
            if model.mla is not None:
                heads, size = 1, model.mla.kv_lora_rank + model.mla.qk_rope_head_dim
            else:
                heads, size = max(1, model.num_kv_heads // tp), model.head_size
            layers.append(
                {
                    "name": f"model.layers.{i}.self_attn.attn",
                    "kind": layer.attention,
                    "heads": heads,
                    "head_size": size,
                    "window": layer.window,
                    "kv_dtype": want.kv_cache_dtype,
                }
            )
        workers += [{"layers": layers, "available": want.available_bytes}] * min(tp, 2)
    return {
        "workers": workers,
        "block_size": want.block_size,
        "max_model_len": want.max_model_len,
        "max_num_batched_tokens": want.max_num_batched_tokens,
        "batches": batches,
        "override": want.num_gpu_blocks_override,
    }


def ours(want: CapacityInput) -> dict[str, Any]:
    try:
        fit = size_kv_cache(want)
    except UserError as error:
        return {"refused": str(error)}
    return {
        "num_blocks": fit.num_gpu_blocks,
        "groups": [[KINDS[g.kind], len(g.layers)] for g in fit.layout.groups],
        "bytes_per_block": list(fit.layout.bytes_per_block),
        "tokens": fit.kv_cache_size_tokens,
        "max_concurrency": fit.max_concurrency,
    }


def refusal_figures(text: str) -> list[str]:
    """The figures of a refusal: length, GiB needed and had, estimated length."""
    return re.findall(r"\((-?[\d.]+)\)|\((-?[\d.]+) GiB|length is (\d+)", text)


def unsupported(want: CapacityInput) -> bool:
    """More stages than layers: vLLM would refuse earlier."""
    return want.pipeline_parallel_size > want.model.num_layers


@pytest.mark.oracle
def test_sizing_equals_vllm_on_random_deployments() -> None:
    reason = missing("v1")
    if reason is not None:
        if os.environ.get("VSIM_REQUIRE_ORACLE") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    rng = random.Random(32)
    wants, cases = [], []
    for _ in range(SERIES):
        want = drawn(rng)
        batches = rng.choice([1, 2, 3])
        want = replace(want, in_flight_tokens=batches * want.max_num_batched_tokens)
        if not unsupported(want):
            wants.append(want)
            cases.append(as_case(want, batches))
    answers = subprocess.run(
        [str(python_of("v1")), str(HERE / "kv_cache.py")],
        input="".join(json.dumps(case) + "\n" for case in cases),
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "VLLM_LOGGING_LEVEL": "ERROR"},
    ).stdout.splitlines()
    assert len(answers) == len(cases)
    seen = {"sized": 0, "refused": 0, "hybrid": 0}
    for want, answer in zip(wants, answers, strict=True):
        real, mine = json.loads(answer), ours(want)
        if "refused" in real:
            seen["refused"] += 1
            assert "refused" in mine, (want, real)
            assert real["refused"][:40] == mine["refused"][:40], (real, mine)
            if real["refused"].startswith("To serve"):
                assert refusal_figures(real["refused"]) == refusal_figures(mine["refused"])
            continue
        seen["sized"] += 1
        seen["hybrid"] += len(real["groups"]) > 1
        workers_per_stage = min(want.tensor_parallel_size, 2)
        real["bytes_per_block"] = real["bytes_per_block"][::workers_per_stage]
        real["groups"] = [[kind, n // workers_per_stage] for kind, n in real["groups"]]
        assert mine["max_concurrency"] == pytest.approx(real.pop("max_concurrency"), rel=1e-12)
        mine.pop("max_concurrency")
        assert mine == real, want
    print(seen)
    assert min(seen.values()) > SERIES // 20, seen
