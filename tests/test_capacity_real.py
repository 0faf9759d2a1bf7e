"""The real engine, started once on the CPU: its blocks, defaults and log line are the ones we resolve."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from vsim.models.model_spec import bundled_models
from vsim.models.startup_log import parse_startup_log
from vsim.sim.capacity_check import check_against_log, resolve_beside_log
from vsim.sim.deployment import resolve
from vsim.tests.oracle.client import missing, python_of

SCRIPT = """
import json, sys
from vllm import LLM
if __name__ == "__main__":
    llm = LLM(model=sys.argv[1], load_format="dummy", skip_tokenizer_init=True, enforce_eager=True,
              kv_cache_memory_bytes=1 << 30, distributed_executor_backend="uni")
    c = llm.llm_engine.vllm_config
    print("RESOLVED", json.dumps({
        "num_gpu_blocks": c.cache_config.num_gpu_blocks, "block_size": c.cache_config.block_size,
        "max_num_seqs": c.scheduler_config.max_num_seqs,
        "max_num_batched_tokens": c.scheduler_config.max_num_batched_tokens,
        "async_scheduling": c.scheduler_config.async_scheduling,
        "enable_prefix_caching": c.cache_config.enable_prefix_caching,
        "enable_chunked_prefill": c.scheduler_config.enable_chunked_prefill,
        "max_model_len": c.model_config.max_model_len,
        "v2_model_runner": c.use_v2_model_runner,
    }))
"""


@pytest.mark.vllm
@pytest.mark.xdist_group("vllm")
def test_a_real_start_on_the_cpu(tmp_path: Path) -> None:
    reason = missing("v1")
    if reason is not None:
        if os.environ.get("VSIM_REQUIRE_ORACLE") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(bundled_models()["vsim/tiny-llama"]["config"]))
    script = tmp_path / "start.py"
    script.write_text(SCRIPT)
    quiet = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        [str(python_of("v1")), str(script), str(model)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, **quiet},
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    real = json.loads(done.stdout.split("RESOLVED ", 1)[1].splitlines()[0])
    flags = {"kv_cache_memory_bytes": 1 << 30, "usage": "llm"}
    run = resolve(str(model), "cpu", **flags)  # type: ignore[arg-type]
    ours = {name: getattr(run.scheduler, name) for name in real}
    assert ours == real
    log = parse_startup_log(done.stdout + done.stderr)
    beside = resolve_beside_log(log, {"model": str(model), "gpu": "cpu", **flags})
    checks = check_against_log(beside, log)
    assert {"KV cache size", "maximum concurrency"} <= {c.term for c in checks}
    assert {c.verdict for c in checks} == {"agrees"}
