"""Batch defaults and scheduler refusals against vLLM's own `EngineArgs` and `SchedulerConfig` (0.32.0)."""

from __future__ import annotations

import json
import os
import random
import subprocess
from typing import Any

import pytest

from vsim.errors import UserError
from vsim.models.hardware import gpus
from vsim.sim.deployment import resolve
from vsim.tests.oracle.client import HERE, missing, python_of

SERIES = int(os.environ.get("VSIM_DEFAULTS_CASES", "1000"))


def drawn(rng: random.Random) -> tuple[str, dict[str, Any]]:
    gpu = rng.choice([g for g in gpus() if g.platform != "npu"])
    length = rng.choice([16, 100, 2048, 8192, 32768])
    flags = {
        "max_model_len": length,
        "usage": rng.choice(["server", "llm"]),
        "tensor_parallel_size": rng.choice([1, 1, 2, 4]),
        "pipeline_parallel_size": rng.choice([1, 1, 2]),
        "max_num_seqs": rng.choice([None, None, 1, 8, 300, 5000]),
        "max_num_batched_tokens": rng.choice([None, None, 64, 4096, 20000]),
        "enable_chunked_prefill": rng.choice([None, None, False]),
        "long_prefill_token_threshold": rng.choice([None, None, 1000]),
        "max_num_active_seqs": rng.choice([None, None, 4, 400]),
    }
    return gpu.name, flags


@pytest.mark.oracle
def test_defaults_and_refusals_equal_vllm() -> None:
    reason = missing("v1")
    if reason is not None:
        if os.environ.get("VSIM_REQUIRE_ORACLE") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    rng = random.Random(7)
    cases = [drawn(rng) for _ in range(SERIES)]
    lines = []
    for name, flags in cases:
        gpu = next(g for g in gpus() if g.name == name)
        case = {
            "memory_bytes": gpu.memory_bytes,
            "device_name": gpu.device_name,
            "cpu": gpu.platform == "cpu",
            "tp": flags["tensor_parallel_size"],
            "pp": flags["pipeline_parallel_size"],
            **{k: flags[k] for k in ("usage", "max_num_seqs", "max_num_batched_tokens")},
            **{k: flags[k] for k in ("max_model_len", "max_num_active_seqs")},
            "enable_chunked_prefill": flags["enable_chunked_prefill"] is not False,
            "long_prefill_token_threshold": flags["long_prefill_token_threshold"] or 0,
        }
        lines.append(json.dumps(case) + "\n")
    answers = subprocess.run(
        [str(python_of("v1")), str(HERE / "engine_args.py")],
        input="".join(lines),
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "VLLM_LOGGING_LEVEL": "ERROR"},
    ).stdout.splitlines()
    refused = 0
    for (name, flags), answer in zip(cases, answers, strict=True):
        real = json.loads(answer)
        mine: dict[str, Any]
        try:
            run = resolve("Qwen/Qwen3-32B", name, num_gpu_blocks_override=10_000, **flags)
            mine = {
                "max_num_seqs": run.scheduler.max_num_seqs,
                "max_num_batched_tokens": run.scheduler.max_num_batched_tokens,
            }
        except UserError as error:
            mine = {"refused": str(error)}
        if "refused" in real:
            refused += 1
            # pydantic wraps the sentence; ours is the sentence itself.
            assert "refused" in mine, (name, flags, real)
            assert mine["refused"].split(". ")[0].rstrip(".") in real["refused"], (mine, real)
        else:
            assert mine == real, (name, flags)
    assert SERIES // 20 < refused < SERIES // 1.1
