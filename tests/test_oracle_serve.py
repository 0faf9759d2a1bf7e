"""The `vllm serve` lines of `vsim plan` against the argument parser of vLLM 0.32.0."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from typing import Any

import pytest

from vsim.commands.plan import NO_CHOICE
from vsim.models.quantization import QUANTIZATION_METHODS
from vsim.sim.plan.evaluate import NO_SERVE_FLAGS, serve_line
from vsim.sim.sweep_space import dimensions
from vsim.tests.oracle.client import HERE, missing, python_of

MODEL = "meta-llama/Llama-3.1-8B-Instruct"
WORDS: dict[str, list[Any]] = {
    "block_size": [32],
    "dtype": ["auto", "bfloat16", "float16"],
    "quantization": list(QUANTIZATION_METHODS),
    "kv_cache_dtype": ["auto", "fp8", "fp8_e4m3", "fp8_e5m2"],
    "scheduling_policy": ["fcfs", "priority"],
}
V0_ONLY = {"swap_space", "preemption_mode"}


def settings() -> list[tuple[str, Any]]:
    """Every setting that a plan may choose or hold fixed, with values that differ from the defaults."""
    found: list[tuple[str, Any]] = []
    for name, kind in dimensions().items():
        if name in NO_CHOICE or name in NO_SERVE_FLAGS or name in V0_ONLY or name == "model":
            continue
        values = WORDS.get(name) or {bool: [True, False], int: [3], float: [0.5]}.get(kind)
        assert values, f"{name}: say what it may be"
        found += [(name, value) for value in values]
    return found


@pytest.mark.oracle
def test_vllm_understands_every_line_that_a_plan_may_print() -> None:
    reason = missing("v1")
    if reason is not None:
        if os.environ.get("VSIM_REQUIRE_ORACLE") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    asked = settings()
    lines = [serve_line({"model": MODEL, name: value}) for name, value in asked]
    words = [shlex.split(line) for line in lines]
    words = [line[line.index("serve") + 1 :] for line in words]
    answers = subprocess.run(
        [str(python_of("v1")), str(HERE / "serve_flags.py")],
        input="".join(json.dumps(line) + "\n" for line in words),
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "VLLM_LOGGING_LEVEL": "ERROR"},
    ).stdout.splitlines()
    for (name, value), line, answer in zip(asked, lines, answers, strict=True):
        read = json.loads(answer)
        assert "refused" not in read, (line, read)
        # What the parser read is what was meant; a default is left out of its answer.
        assert read.get(name, value) == value, (line, read)
