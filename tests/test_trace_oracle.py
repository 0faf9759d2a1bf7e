"""Real vLLM sends when we say it would, and reads the timed_trace we write as the trace it was made from."""

from __future__ import annotations

import json
import os
import subprocess
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from vsim.tests.oracle.client import HERE, missing, python_of
from vsim.traces.arrivals import head, send_offsets_s
from vsim.traces.export import write_as
from vsim.traces.readers import read_trace
from vsim.traces.sharing import sharing

pytestmark = pytest.mark.oracle

DATA = Path(__file__).parent / "data" / "traces"
SPACING = [
    {"count": 300, "rate": 8.0, "burstiness": 1.0, "seed": 0},
    {"count": 300, "rate": 8.0, "burstiness": 0.3, "seed": 7},
    {"count": 50, "rate": 0.5, "burstiness": 4.0, "seed": 1},
    {"count": 20, "rate": 2.0, "burstiness": "inf", "seed": 1},
    {"count": 20, "rate": "inf", "burstiness": 1.0, "seed": 1},
]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if missing("v1"):
        pytest.skip(missing("v1") or "")
    path = tmp_path_factory.mktemp("timed") / "t.jsonl"
    write_as(trace(), path, "timed_trace")
    done = subprocess.run(
        [str(python_of("v1")), str(HERE / "bench_requests.py")],
        input=json.dumps({"spacing": SPACING, "timed_trace": str(path)}),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "PYTHONHASHSEED": "0"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def trace() -> Any:
    return head(read_trace(DATA / "mooncake_conversation_head.jsonl"), 30)


@pytest.mark.parametrize("at", range(len(SPACING)))
def test_requests_are_sent_when_vllm_sends_them(told: dict[str, Any], at: int) -> None:
    case = SPACING[at]
    ours = send_offsets_s(
        int(case["count"]), float(case["rate"]), float(case["burstiness"]), int(case["seed"])
    )
    assert ours.tolist() == pytest.approx(told["offsets_s"][at], rel=1e-9, abs=1e-6)


def test_vllm_reads_our_timed_trace_as_the_trace_it_came_from(told: dict[str, Any]) -> None:
    ours, theirs = trace(), told["requests"]
    assert [len(row["prompt"]) for row in theirs] == ours.prompt_tokens.tolist()
    assert [row["output_tokens"] for row in theirs] == ours.output_tokens.tolist()
    assert [row["timestamp"] for row in theirs] == pytest.approx((ours.arrival_ns / 1e9).tolist())
    prompts = [row["prompt"] for row in theirs]
    longest = [
        max((sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, other, strict=False)))
             for other in prompts[:at]), default=0)
        for at, prompt in enumerate(prompts)
    ]  # fmt: skip
    found = sharing(ours)
    assert found is not None
    # Where content ends, the next token may agree by chance.
    for real, said in zip(longest, found.common_tokens.tolist(), strict=True):
        assert said <= real <= said + 3
