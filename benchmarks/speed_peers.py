"""Other simulators beside vsim: those that are installed are run on the same requests; the rest are quoted.

`dynamo replay` (NVIDIA, Rust; pip install ai-dynamo ai-dynamo-runtime) is run through its Python API, with
as many KV blocks, sequences and tokens a step as vsim resolves; its step times are its own polynomial.
Vidur, BLIS and TokenSim are looked for and named; nobody could try a call to them here, so there is none.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

# Measured by others than this script: the issue that asked for it, on a machine "like this one" (one core,
# Azure conversation lengths, 6.45 requests/s, one replica, 8B-class model, start to result). Seconds.
QUOTED = {
    "Vidur (Python)": {2000: "19-30", 19366: "45-69"},
    "BLIS (Go)": {2000: "4.3", 19366: "37", 100_000: "209"},
    "dynamo replay (Rust)": {2000: "1.0", 19366: "11.8", 100_000: "56.5"},
    "TokenSim (Python)": {2000: "2.0", 19366: "16"},
}
AISIMULATE_S = 3.0  # published by NVIDIA for 131,072 requests of 1024/128 tokens at concurrency 64

_DYNAMO = """
import json, resource, sys, time
asked = json.loads(sys.argv[1])
began, cpu = time.perf_counter(), time.process_time()
from dynamo.replay import run_synthetic_trace_replay, run_trace_replay
if "trace" in asked:
    report = run_trace_replay(asked["trace"], trace_block_size=512, extra_engine_args=asked["engine"],
                              replay_concurrency=asked["concurrency"])
else:
    report = run_synthetic_trace_replay(1024, 128, asked["requests"], extra_engine_args=asked["engine"],
                                        replay_concurrency=asked["concurrency"])
print(json.dumps({
    "wall_s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu,
    "requests": report.summary["completed_requests"],
    "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
}))
"""


def dynamo_installed(python: str) -> bool:
    """Can this interpreter import dynamo's replay?"""
    code = "import dynamo.replay"
    done = subprocess.run([python, "-c", code], capture_output=True, check=False)
    return done.returncode == 0


def others_found() -> list[str]:
    """Peers that are here and have no runner."""
    modules = {"Vidur": "vidur", "TokenSim": "tokensim", "AISimulate": "aisimulate"}
    found = [name for name, module in modules.items() if importlib.util.find_spec(module)]
    return found + ["BLIS"] * (shutil.which("blis") is not None)


def run_dynamo(
    python: str, trace: Any, blocks: int, concurrency: int | None, same: bool
) -> dict[str, Any]:
    """`trace` (a `vsim` Trace) through dynamo's replay, start to result; `same`: all requests are 1024/128."""
    engine = {
        "engine": {
            "num_gpu_blocks": blocks,
            "block_size": 16,
            "max_num_seqs": 256,
            "max_num_batched_tokens": 8192,
            "enable_prefix_caching": True,
        }
    }
    with tempfile.TemporaryDirectory() as folder:
        asked: dict[str, Any] = {
            "engine": engine,
            "concurrency": concurrency,
            "requests": len(trace),
        }
        if not same:
            path = Path(folder) / "trace.jsonl"
            _write_mooncake(trace, path)
            asked["trace"] = str(path)
        began = time.perf_counter()
        done = subprocess.run(
            [python, "-c", _DYNAMO, json.dumps(asked)], capture_output=True, text=True, check=False
        )
        wall = time.perf_counter() - began
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1][:200] if done.stderr else "?"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found | {"replay_wall_s": found["wall_s"], "wall_s": wall}


def _write_mooncake(trace: Any, path: Path) -> None:
    """Arrival ms, lengths, and one id for each 512 tokens of a prompt, all different: nothing is shared."""
    fresh = 0
    with path.open("w") as out:
        for request in trace:
            pieces = -(-request.prompt_tokens // 512)
            out.write(
                json.dumps(
                    {
                        "timestamp": request.arrival_ns // 1_000_000,
                        "input_length": request.prompt_tokens,
                        "output_length": request.output_tokens,
                        "hash_ids": list(range(fresh, fresh + pieces)),
                    }
                )
                + "\n"
            )
            fresh += pieces
