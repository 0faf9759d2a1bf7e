"""Any config.json and any flags: a deployment, or one clear sentence."""

from __future__ import annotations

import os
import random
from typing import Any

from vsim.errors import UserError
from vsim.models.hardware import gpus
from vsim.models.model_spec import bundled_models, spec_from_config
from vsim.sim.deployment import resolve

CASES = int(os.environ.get("VSIM_DEPLOYMENT_CASES", "1500"))
NAN, INF = float("nan"), float("inf")
VALUES: list[Any] = [
    0,
    1,
    2,
    3,
    -1,
    7,
    64,
    128,
    1000,
    10**6,
    10**12,
    None,
    True,
    "x",
    1.5,
    [],
    {},
    [1, 2],
    INF,
    NAN,
]
KEYS = (
    *("head_dim", "kv_lora_rank", "sliding_window", "num_experts", "text_config", "layer_types"),
    *("quantization_config", "rope_scaling", "max_window_layers", "sliding_window_pattern"),
    *("first_k_dense_replace", "mlp_only_layers", "moe_layer_freq", "decoder_sparse_step"),
)
FLAGS: dict[str, list[Any]] = {
    "tensor_parallel_size": [1, 2, 3, 8, 64],
    "pipeline_parallel_size": [1, 2, 5],
    "data_parallel_size": [1, 2],
    "enable_expert_parallel": [True, False],
    "dtype": ["auto", "half", "bfloat16", "float32"],
    "quantization": ["fp8", "awq", "gptq", "mxfp4", "compressed-tensors", "modelopt_fp4"],
    "kv_cache_dtype": ["auto", "fp8", "fp8_ds_mla", "nvfp4", "int8_per_token_head", "bfloat16"],
    "max_model_len": [-1, 0, 1, 16, 4096, 10**6],
    "gpu_memory_utilization": [0.5, 1.0, 0.0, NAN],
    "kv_cache_memory_bytes": [1, 10**9, 10**12],
    "num_gpu_blocks_override": [1, 2, 100, 10**9],
    "block_size": [1, 8, 16, 64, 10**9],
    "max_num_seqs": [1, 256, 10**6],
    "max_num_batched_tokens": [1, 16, 8192],
    "enable_chunked_prefill": [True, False],
    "swap_space": [0, 4, -1, NAN, INF],
    "kv_offloading_size": [0, 1, -1, INF],
    "engine": ["v0", "v1"],
    "engine_version": ["0.8.5", "0.19.0", "0.32.0", "9", "0.6.4"],
    "usage": ["llm", "server"],
    "what_if": [True, False],
    "watermark": [0.0, 0.5, NAN],
    "available_kv_cache_bytes": [0, 1, 10**10, -5],
}


def test_no_config_and_no_flags_crash() -> None:
    rng = random.Random(5)
    configs = [row["config"] for row in bundled_models().values()]
    resolved = 0
    for _ in range(CASES):
        config = dict(rng.choice(configs))
        for _ in range(rng.randrange(4)):
            config[rng.choice([*config, *KEYS])] = rng.choice(VALUES)
        flags = {name: rng.choice(values) for name, values in FLAGS.items() if rng.random() < 0.15}
        try:
            model = spec_from_config(config, "fuzzed")
            run = resolve(model, rng.choice(gpus()), **flags)
        except UserError as error:
            assert str(error).strip()
            assert "\n" not in str(error)
            continue
        resolved += 1
        assert run.kv_cache_blocks >= 0
        assert set(run.flags) == set(run.origins)
    assert resolved > CASES // 20
