"""Our metrics against vLLM's own `calculate_metrics` (0.32.0), on the same requests."""

from __future__ import annotations

import json
import os
import subprocess

import numpy as np
import pytest

from vsim.sim.run import FINISHED, REJECTED, Run
from vsim.sim.summary import summarize
from vsim.tests.make_run import MS, S, make_run
from vsim.tests.oracle.client import HERE, missing, python_of

PERCENTILES = (1.0, 50.0, 90.0, 99.0, 99.9)
GOODPUT = {"ttft": 900.0, "tpot": 45.0, "e2el": 3000.0}


def drawn(n: int, seed: int) -> tuple[Run, list[dict[str, object]]]:
    """The same random requests as a `Run` and as what vLLM's client would have collected."""
    rng = np.random.default_rng(seed)
    arrival = np.sort(rng.integers(0, n * 100 * MS, n))
    arrival[0] = 0
    sent = arrival + rng.integers(0, 300 * MS, n)
    status = np.where(rng.random(n) < 0.1, REJECTED, FINISHED)
    output = np.where(status == FINISHED, rng.integers(1, 80, n), 0)
    first, finish = np.full(n, -1), sent.copy()
    gaps: list[int] = []
    emitted: list[int] = []
    rows: list[dict[str, object]] = []
    for i in range(n):
        if status[i] == FINISHED:
            own = rng.integers(1 * MS, 90 * MS, output[i] - 1)
            first[i] = sent[i] + rng.integers(10 * MS, 2 * S)
            times = np.concatenate([[first[i]], first[i] + np.cumsum(own)])
            finish[i] = times[-1]
            gaps += own.tolist()
            emitted += times.tolist()
        rows.append(
            {
                "success": bool(status[i] == FINISHED),
                "prompt_len": 10 + i,
                "output_tokens": int(output[i]),
                "start_time": float(sent[i]) / 1e9,
                "ttft": float(first[i] - sent[i]) / 1e9,
                "itl": [gap / 1e9 for gap in gaps[len(gaps) - max(0, int(output[i]) - 1) :]],
                "latency": float(finish[i] - sent[i]) / 1e9,
            }
        )
    at, count = np.unique(emitted, return_counts=True)
    run = make_run(
        {
            "arrival_ns": arrival,
            "sent_ns": sent,
            "first_token_ns": first,
            "finish_ns": finish,
            "prompt_tokens": np.arange(n) + 10,
            "output_tokens": output,
            "status": status,
            "reason": np.where(status == REJECTED, 0, -1),
        },
        {"start_ns": at - 1, "end_ns": at, "emitted": count},
        itl=gaps,
        reasons=("x",),
    )
    return run, rows


@pytest.mark.oracle
def test_every_metric_equals_vllms() -> None:
    reason = missing("v1")
    if reason is not None:
        if os.environ.get("VSIM_REQUIRE_ORACLE") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    run, rows = drawn(400, seed=1)
    s = summarize(run, PERCENTILES, GOODPUT)
    asked = {
        "requests": rows,
        "duration": s["duration"],
        "percentiles": PERCENTILES,
        "goodput": GOODPUT,
    }
    done = subprocess.run(
        [str(python_of("v1")), str(HERE / "serve_metrics.py")],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = json.loads(done.stdout.splitlines()[-1])
    same_names = (
        "completed", "failed", "request_throughput", "request_goodput", "output_throughput",
        "total_token_throughput", "max_output_tokens_per_s", "max_concurrent_requests",
        *(f"{a}_{m}_ms" for a in ("mean", "median", "std") for m in ("ttft", "tpot", "itl", "e2el")),
    )  # fmt: skip
    for name in same_names:
        assert s[name] == pytest.approx(theirs[name], rel=1e-9), name
    assert s["total_input_tokens"] == theirs["total_input"]
    assert s["total_output_tokens"] == theirs["total_output"]
    for metric in ("ttft", "tpot", "itl", "e2el"):
        for p, value in theirs[f"percentiles_{metric}_ms"]:
            word = str(int(p)) if int(p) == p else str(p)
            assert s[f"p{word}_{metric}_ms"] == pytest.approx(value, rel=1e-9), (metric, p)
