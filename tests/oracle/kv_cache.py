"""vLLM's own KV cache sizing: a JSON case per line on stdin, blocks, groups and refusal as JSON on stdout.

    <python of the vLLM environment> kv_cache.py

in   {"workers": [{"layers": [{"name", "kind", "heads", "head_size", "dtype", "window", "kv_dtype"}],
                   "available": bytes}], "block_size", "max_model_len", "max_num_batched_tokens", "batches",
      "override": null}
out  {"num_blocks", "groups": [[kind, layers]], "bytes_per_block", "tokens", "max_concurrency"} or {"refused": text}

It calls `get_kv_cache_configs` and `get_kv_cache_capacity` of vLLM 0.32.0 (v1/core/kv_cache_utils.py) with the
specs that `Attention.get_kv_cache_spec` and `MLAAttention.get_kv_cache_spec` would hand over.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from types import SimpleNamespace


def specs_of(case, worker):
    import torch
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
        get_kv_quant_mode,
    )

    dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    specs = {}
    for layer in worker["layers"]:
        dtype = dtypes.get(layer["kv_dtype"], torch.uint8)
        common = {
            "block_size": case["block_size"],
            "num_kv_heads": layer["heads"],
            "head_size": layer["head_size"],
            "dtype": dtype,
            "kv_quant_mode": get_kv_quant_mode(layer["kv_dtype"]),
        }
        if layer["kind"] == "mla":
            spec = MLAAttentionSpec(
                **common,
                max_tp_shards=1,
                cache_dtype_str=layer["kv_dtype"],
                state_content_bytes={"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}.get(layer["kv_dtype"]),
            )
        elif layer["kind"] == "sliding":
            spec = SlidingWindowSpec(**common, sliding_window=layer["window"])
        else:
            spec = FullAttentionSpec(**common)
        if layer["kv_dtype"].endswith("per_token_head"):
            from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

            spec = TritonAttentionBackend.customize_spec(spec)
        specs[layer["name"]] = spec
    return specs


def size(case):
    from vllm.v1.core import kv_cache_utils as kv
    from vllm.v1.kv_cache_layout import KVCacheLayout

    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(
            disable_hybrid_kv_cache_manager=False,
            max_num_batched_tokens=case["max_num_batched_tokens"],
        ),
        model_config=SimpleNamespace(
            max_model_len=case["max_model_len"],
            original_max_model_len=case["max_model_len"],
            hf_config=SimpleNamespace(),
            hf_text_config=SimpleNamespace(),
        ),
        cache_config=SimpleNamespace(
            num_gpu_blocks_override=case["override"],
            prefix_cache_retention_interval=0,
            block_size=case["block_size"],
            get_resolved_kv_cache_layout=lambda: KVCacheLayout.LBNHC,
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
        ),
        attention_config=SimpleNamespace(hisparse_config=None),
        kv_transfer_config=None,
        speculative_config=None,
        num_prefill_lookahead_tokens=0,
        num_speculative_tokens=0,
        max_in_flight_tokens=case["batches"] * case["max_num_batched_tokens"],
    )
    workers = [specs_of(case, worker) for worker in case["workers"]]
    try:
        sized = kv.get_kv_cache_configs(config, workers, [w["available"] for w in case["workers"]])
    except ValueError as error:
        return {"refused": str(error)}
    whole = kv.generate_scheduler_kv_cache_config(sized)
    tokens, concurrency = kv.get_kv_cache_capacity(config, whole)
    return {
        "num_blocks": whole.num_blocks,
        "groups": [
            [
                type(g.kv_cache_spec).__name__,
                sum(len(c.kv_cache_groups[i].layer_names) for c in sized),
            ]
            for i, g in enumerate(whole.kv_cache_groups)
        ],
        "bytes_per_block": [kv._pool_bytes_per_block(config, c.kv_cache_groups) for c in sized],
        "tokens": tokens,
        "max_concurrency": concurrency,
    }


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    logging.disable(logging.CRITICAL)
    for line in sys.stdin:
        answers.write(json.dumps(size(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
