"""`vsim replay` from outside: numbers worked out by hand, requests that left, and flags that mean nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from vsim.cli import main

Call = Callable[..., tuple[int, str, str]]
# Every step takes 10 ms, whatever is in it.
CONSTANT = {
    "schema": "vsim/step-model/1",
    "kind": "corrected",
    "domain": {},
    "provenance": {"label": "10 ms a step"},
    "params": {
        "prior": {
            "kind": "roofline",
            "params": {
                "num_layers": 0,
                "flops_per_token": 0,
                "weight_bytes": 0,
                "head_flops_per_seq": 0,
                "head_bytes": 0,
                "attention_flops_per_pair": 0,
                "kv_bytes_per_token": 0,
                "peak_flops_per_s": 1e12,
                "bytes_per_s": 1e12,
            },
        },
        "coefficients": {"per_step_s": 0.01},
    },
}


@pytest.fixture
def replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Call:
    """`vsim replay TRACE FLAGS` on the tiny model with 100 usable blocks and 10 ms a step."""
    profile = tmp_path / "constant.json"
    profile.write_text(json.dumps(CONSTANT))
    fixed = ["--model", "vsim/tiny-llama", "--gpu", "a100", "--profile", str(profile)]
    fixed += ["--num-gpu-blocks-override", "101", "--max-model-len", "1024", "--json"]

    def call(rows: list[dict[str, Any]], *flags: object) -> tuple[int, str, str]:
        trace = tmp_path / "trace.jsonl"
        trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
        argv = ["vsim", "replay", str(trace), *fixed, *map(str, flags)]
        monkeypatch.setattr(sys, "argv", argv)
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        out = capsys.readouterr()
        return code, out.out, out.err

    return call


def row(timestamp: float, prompt: int, output: int, **more: Any) -> dict[str, Any]:
    return {"timestamp": timestamp, "input_tokens": prompt, "output_tokens": output, **more}


THREE = [row(0.0, 100, 5), row(0.01, 40, 3), row(0.5, 1, 1)]


def test_three_requests_by_hand(replay: Call, tmp_path: Path) -> None:
    code, out, err = replay(THREE, "--no-async-scheduling", "--out", tmp_path / "run")
    assert code == 0, err
    summary = json.loads(out)
    # Steps: 0-10 (first prompt), 10-20 (its decode, second prompt), 20-30 and 30-40 (two decodes), 40-50,
    # then 500-510. The arrival at 10 ms is in the step that starts then.
    steps = pq.read_table(tmp_path / "run/timeline.parquet").to_pydict()
    assert steps["start_ns"] == [0, 10**7, 2 * 10**7, 3 * 10**7, 4 * 10**7, 5 * 10**8]
    assert steps["tokens"] == [100, 41, 2, 2, 1, 1]
    assert steps["kv_blocks_used"] == [7, 10, 10, 10, 7, 1]
    assert steps["kv_tokens_used"] == [100, 141, 143, 145, 104, 1]
    assert summary["duration"] == 0.51
    assert summary["mean_ttft_ms"] == summary["mean_tpot_ms"] == summary["mean_itl_ms"] == 10
    assert summary["mean_e2el_ms"] == 30
    assert summary["output_throughput"] == pytest.approx(9 / 0.51)
    # 45 block-steps of 10 ms in 510 ms of 100 blocks; 634 of their 720 slots hold a token.
    assert summary["kv_usage_mean"] == pytest.approx(45 * 10 / (510 * 100))
    assert summary["kv_fragmentation_mean"] == pytest.approx(1 - 634 / 720)
    assert summary["kv_usage_peak"] == 0.1


def test_a_client_that_left_is_load_and_no_completion(replay: Call) -> None:
    rows = [row(0, 40, 10), row(0, 40, 37, max_tokens=512, status="aborted")]
    code, out, err = replay(rows, "--no-async-scheduling")
    assert code == 0, err
    summary = json.loads(out)
    assert summary["status_counts"]["aborted"] == summary["completed"] == 1
    # The one that stayed decides the latencies; the other one held the engine for 37 steps.
    assert summary["p99_e2el_ms"] == 100
    assert summary["duration"] == 0.37
    assert summary["total_output_tokens"] == 10


def test_priorities_that_nobody_looks_at_are_said(replay: Call) -> None:
    rows = [row(0, 100, 50), row(0.001, 100, 5), row(0.002, 100, 5, priority=-1)]
    told = "The trace has priorities, which --scheduling-policy fcfs does not look at."
    for policy in ("fcfs", "priority"):
        code, out, err = replay(rows, "--scheduling-policy", policy, "--max-num-seqs", 1)
        assert code == 0, err
        assert (told in json.loads(out)["assumptions"]) == (policy == "fcfs")


def test_a_constant_rate_is_told_in_json(replay: Call, tmp_path: Path) -> None:
    code, out, err = replay(THREE, "--request-rate", 2, "--burstiness", "inf", "--out", tmp_path / "run")  # fmt: skip
    assert code == 0, err
    assert json.loads(out)["burstiness"] == "inf"
    assert (tmp_path / "run/summary.json").read_text() == out


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("params", "coefficients", "per_step_s"), "x"),
        (("params", "coefficients", "per_step_s"), float("nan")),
        (("params", "coefficients", "per_step_s"), 1e300),
        (("params", "prior", "params", "bytes_per_s"), 0),
        (("params", "prior", "params", "host_base_s"), -1),
        (("params", "prior", "params", "weight_bytes"), [1]),
        (("provenance", "assumptions"), True),
        (("provenance", "tensor_parallel_size"), {}),
    ],
)
def test_a_profile_of_nonsense_is_one_sentence(
    replay: Call, tmp_path: Path, where: tuple[str, ...], value: object
) -> None:
    broken = json.loads(json.dumps(CONSTANT))
    place = broken
    for key in where[:-1]:
        place = place[key]
    place[where[-1]] = value
    (tmp_path / "broken.json").write_text(json.dumps(broken))
    code, out, err = replay(THREE, "--profile", tmp_path / "broken.json", "--out", tmp_path / "run")
    assert (code, out) == (2, "")
    assert err.startswith("error: profile ") and err.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--burstiness", "0"], "burstiness=0.0 must be positive"),
        (["--burstiness", "2"], "shapes the gaps of request_rate"),
        (["--goodput", "ttft:inf"], "must be finite"),
        (["--time-scale", "1e300"], "longer than 146 years"),
        (["--num-gpu-blocks-override", "10000000000000000"], "more than a simulation keeps"),
        (["--engine", "v0", "--swap-space", "1e9"], "more than a simulation keeps"),
        (["--overlap-swaps"], "--overlap-swaps is for --engine v0"),
        (
            ["--engine", "v0", "--preemption-mode", "recompute", "--swap-above-tokens", "10"],
            "--preemption-mode recompute never swaps",
        ),
        (
            ["--engine", "v0", "-pp", "2", "--max-model-len", "512"],
            "one scheduler a pipeline stage",
        ),
    ],
)
def test_what_cannot_be_is_one_sentence_and_leaves_no_folder(
    replay: Call, tmp_path: Path, flags: list[str], words: str
) -> None:
    code, out, err = replay(THREE, "--out", tmp_path / "run", *flags)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1 and words in err
    assert not (tmp_path / "run").exists()


def test_swapped_bytes_are_told_and_cross_the_link_in_their_time(replay: Call) -> None:
    # Two requests of 20 + 30 tokens on five blocks of 16: at 32 computed tokens each, the first takes the fifth
    # block and the second gives way with two.
    two = [{"timestamp": 0.0, "input_tokens": 20, "output_tokens": 30}] * 2
    v0 = ["--engine", "v0", "--num-gpu-blocks-override", 5, "--max-model-len", 64]

    def run(*flags: object) -> dict[str, Any]:
        code, out, err = replay(two, *v0, *flags)
        assert code == 0, err
        return dict(json.loads(out))

    fast, slow = (run("--preemption-mode", "swap", "--pcie-gbps", gbps) for gbps in (1e6, 1e-6))
    assert fast["swapped_out_blocks"] == fast["swapped_in_blocks"] == 2
    assert fast["recomputed_tokens"] == 0
    assert fast["swapped_bytes"] % 4 == 0 and fast["swapped_bytes"] == slow["swapped_bytes"] > 0
    assert slow["duration"] - fast["duration"] == pytest.approx(slow["swapped_bytes"] / 1e3)
    recompute = run("--swap-above-tokens", 32)
    assert (recompute["swapped_bytes"], recompute["recomputed_tokens"]) == (0, 32)


def test_a_replay_says_what_its_step_times_leave_out() -> None:
    from vsim.sim.deployment import resolve
    from vsim.sim.replay import assumptions_of, step_model_for
    from vsim.traces.trace import Trace

    trace = Trace.of([0.0], [10], [1])

    def said(**flags: Any) -> str:
        deployment = resolve("meta-llama/Llama-3.1-8B", "rtx4090", max_model_len=8192, **flags)
        return " ".join(assumptions_of(trace, deployment, step_model_for(deployment)))

    # The bundled profile was measured with vLLM 0.19.
    assert "measured with vLLM 0.19" in said()
    assert "measured with vLLM" not in said(engine_version="0.19.0")
    assert "pipeline stages" not in said()
    assert "pipeline stages" in said(pipeline_parallel_size=2)


def test_replicas_behind_round_robin_are_as_many_engines_with_links_of_their_own() -> None:
    from vsim.sim.deployment import resolve
    from vsim.sim.replay import replay, step_model_for, with_preemption
    from vsim.traces.trace import Trace

    deployment = with_preemption(
        resolve(
            "meta-llama/Llama-3.1-8B",
            "a100",
            engine="v0",
            preemption_mode="swap",
            max_model_len=1024,
            num_gpu_blocks_override=70,
        ),
        pcie_gbps=0.01,  # so slow that sharing a link would show
    )
    rows = [(0.1 * i, 300 + 7 * i, 150) for i in range(12)]

    def finishes(some: list[tuple[float, int, int]], replicas: int) -> tuple[list[int], int]:
        trace = Trace.of(*zip(*some, strict=True))
        run = replay(trace, deployment, step_model_for(deployment), replicas=replicas)
        return run.requests["finish_ns"].tolist(), int(run.steps["swapped_blocks"].sum())

    together, moved = finishes(rows, 2)
    first = [(t - rows[k][0], p, o) for k in (0, 1) for t, p, o in rows[k::2]]
    halves = [finishes(first[:6], 1)[0], finishes(first[6:], 1)[0]]
    shift = round(rows[1][0] * 1e9)
    assert moved > 0
    assert together[0::2] == halves[0]
    assert together[1::2] == [end + shift for end in halves[1]]
