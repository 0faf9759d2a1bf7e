"""`vsim calibrate --from-bench`: a correction learned from what a client saw, on results made from a known truth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from vsim.commands.calibrate import calibrate
from vsim.commands.replay import replay as replay_command
from vsim.models.artifact import read_calibration
from vsim.models.correction import Coefficients, CorrectedStepModel
from vsim.sim.deployment import resolve
from vsim.sim.engine import simulate
from vsim.sim.replay import step_model_for
from vsim.traces.trace import Trace

PRIOR = "rtx4090-llama-3.1-8b"
FLAGS = ["--gpu", "rtx4090", "--model", "meta-llama/Llama-3.1-8B", "--max-model-len", "8192"]
TRUTH = Coefficients(1.5e-3, 1e-3, 3e-6, 4e-9)
FRONTEND_S = 9e-3
REQUESTS = 90


def traffic() -> Trace:
    rng = np.random.default_rng(0)
    arrival = np.cumsum(rng.exponential(1 / 8, REQUESTS))
    return Trace.of(
        (arrival - arrival[0]).tolist(),
        rng.lognormal(6.2, 0.9, REQUESTS).astype(int).clip(8, 6000).tolist(),
        rng.lognormal(4.5, 0.6, REQUESTS).astype(int).clip(2, 1500).tolist(),
    )


def served(trace: Trace) -> dict[str, Any]:
    """What `vllm bench serve --save-detailed` would write of a server with the true step times."""
    deployment = resolve("meta-llama/Llama-3.1-8B", "rtx4090", max_model_len=8192)
    model = CorrectedStepModel(step_model_for(deployment).model, TRUTH)
    run = simulate(trace, deployment.scheduler, model, frontend_s=FRONTEND_S).requests
    gaps = (run["finish_ns"] - run["first_token_ns"]) / 1e9
    return {
        "backend": "vllm",
        "model_id": "meta-llama/Llama-3.1-8B",
        "request_rate": 8.0,
        "completed": len(trace),
        "duration": 20.0,
        "input_lens": trace.prompt_tokens.tolist(),
        "output_lens": trace.output_tokens.tolist(),
        "ttfts": ((run["first_token_ns"] - run["sent_ns"]) / 1e9).tolist(),
        "itls": [[gap] for gap in gaps.tolist()],
        "start_times": (1234.5 + run["sent_ns"] / 1e9).tolist(),
        "errors": [""] * len(trace),
    }


def rows(trace: Trace) -> str:
    return "timestamp,input_tokens,output_tokens\n" + "".join(
        f"{r.arrival_ns / 1e9:.6f},{r.prompt_tokens},{r.output_tokens}\n" for r in trace
    )


@pytest.fixture(scope="module")
def trace() -> Trace:
    return traffic()


@pytest.fixture(scope="module")
def result(trace: Trace) -> dict[str, Any]:
    return served(trace)


@pytest.fixture
def here(tmp_path: Path, trace: Trace, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "trace.csv").write_text(rows(trace))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(result: dict[str, Any] | str, *more: str) -> Result:
    Path("bench.json").write_text(result if isinstance(result, str) else json.dumps(result))
    args = [*FLAGS, "--from-bench", "bench.json", "--out", "p.json", *more]
    return CliRunner().invoke(calibrate, args)


def refused(result: dict[str, Any] | str, *more: str) -> str:
    found = run(result, *more)
    assert found.exit_code != 0 and not Path("p.json").exists()
    return str(found.exception) + found.output


def test_the_true_step_times_are_found_from_latencies_alone(
    here: Path, result: dict[str, Any]
) -> None:
    made = run(result, "--trace", "trace.csv", "--prior", PRIOR)
    assert made.exit_code == 0, made.output
    found = read_calibration(here / "p.json")
    held, prior = found.quality["held_out_requests"], found.quality["prior_held_out_requests"]
    for metric, most in (("ttft", 3.0), ("tpot", 1.0), ("e2e", 1.0)):
        assert abs(held[metric]["mean"]) < most
        assert abs(held[metric]["p95"]) < 2 * most
    assert prior["e2e"]["mean"] < -5, "without the correction the prior is too fast"
    assert found.provenance["frontend_s"] == pytest.approx(FRONTEND_S, abs=2e-3)
    assert found.params["coefficients"]["per_step_s"] == pytest.approx(TRUTH.per_step_s, rel=0.2)
    assert found.quality["fitted_requests"] == 60 and found.quality["held_out"] == 30
    assert "HTTP" in found.label and "vllm bench serve" in found.label
    assert any("HTTP" in sentence for sentence in found.assumptions)
    assert str(here) not in (here / "p.json").read_text()


def test_the_replay_of_the_trace_gives_the_measured_latencies(
    here: Path, result: dict[str, Any]
) -> None:
    run(result, "--trace", "trace.csv")
    shown = CliRunner().invoke(
        replay_command, ["trace.csv", *FLAGS, "--profile", "p.json", "--json"]
    )
    assert shown.exit_code == 0, shown.output
    summary = json.loads(shown.output)
    ttft = np.array(result["ttfts"])
    e2e = ttft + np.array([sum(gaps) for gaps in result["itls"]])
    assert summary["mean_ttft_ms"] == pytest.approx(ttft.mean() * 1e3, rel=0.03)
    assert summary["mean_e2el_ms"] == pytest.approx(e2e.mean() * 1e3, rel=0.01)


def test_no_timing_of_a_request_held_out_is_read(here: Path, result: dict[str, Any]) -> None:
    run(result, "--trace", "trace.csv")
    first = read_calibration(here / "p.json")
    late = {
        **result,
        "itls": [
            [gap * (3 if at >= 60 else 1) for gap in gaps] for at, gaps in enumerate(result["itls"])
        ],
    }
    said = run(late, "--trace", "trace.csv").output
    assert "the requests held out took longer" in " ".join(said.split())
    second = read_calibration(here / "p.json")
    assert first.params == second.params
    assert first.quality["held_out_requests"] != second.quality["held_out_requests"]


def test_without_the_trace_the_result_says_what_was_sent(
    here: Path, result: dict[str, Any]
) -> None:
    made = run(result)
    assert made.exit_code == 0, made.output
    assert "no --trace was given" in made.output
    held = read_calibration(here / "p.json").quality["held_out_requests"]
    assert abs(held["e2e"]["mean"]) < 1


def test_a_profile_that_was_corrected_before_is_corrected_once_not_twice(
    here: Path, result: dict[str, Any]
) -> None:
    run(result, "--trace", "trace.csv")
    (here / "p.json").rename(here / "first.json")
    again = run(result, "--trace", "trace.csv", "--prior", "first.json")
    assert again.exit_code == 0, again.output
    found = read_calibration(here / "p.json")
    assert found.params["prior"]["kind"] == "tables"
    assert abs(found.quality["held_out_requests"]["e2e"]["mean"]) < 1


def test_few_failed_requests_are_left_out_and_many_are_refused(
    here: Path, result: dict[str, Any]
) -> None:
    def failing(count: int) -> dict[str, Any]:
        broken = {name: list(v) if isinstance(v, list) else v for name, v in result.items()}
        for at in range(count):
            broken["ttfts"][at], broken["output_lens"][at], broken["itls"][at] = 0.0, 0, []
        return broken

    assert "45 of 90 requests failed" in refused(failing(45), "--trace", "trace.csv")
    made = run(failing(2), "--trace", "trace.csv")
    assert made.exit_code == 0, made.output
    assert "2 of 90 requests failed: they are left out" in made.output
    found = read_calibration(here / "p.json")
    assert found.quality["fitted_requests"] + found.quality["held_out"] == 88


def test_what_cannot_be_the_result_of_this_trace_is_refused(
    here: Path, trace: Trace, result: dict[str, Any]
) -> None:
    aggregates = {k: v for k, v in result.items() if not isinstance(v, list)}
    assert "--save-detailed" in refused(aggregates, "--trace", "trace.csv")
    assert "not a result" in refused('{"a": 1}', "--trace", "trace.csv")
    (here / "short.csv").write_text("\n".join(rows(trace).splitlines()[:40]) + "\n")
    assert "only 39" in refused(result, "--trace", "short.csv")
    other = {**result, "input_lens": [n + 500 for n in result["input_lens"]]}
    said = refused(other, "--trace", "trace.csv")
    assert "request 0 has" in said and "did not cause" in said
    assert "no such file" in refused(result, "--trace", "gone.csv")
    few = {k: v[:10] if isinstance(v, list) else v for k, v in result.items()}
    assert "at least 12" in refused(few)


def test_a_prior_of_another_gpu_is_refused(here: Path, result: dict[str, Any]) -> None:
    assert "was measured on" in refused(result, "--prior", "rtxpro6000-llama-3.1-8b")


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--trace", "trace.csv"], "--trace belongs to --from-bench"),
        (["--no-async-scheduling"], "--async-scheduling belongs to --from-bench"),
        (["--from-bench", "b.json", "--refit"], "different sources"),
        (["--from-bench", "b.json", "--block-sizes", "16,32"], "had one of them"),
        (["--from-bench", "gone.json"], "cannot be read"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(here: Path, more: list[str], says: str) -> None:
    found = CliRunner().invoke(calibrate, [*FLAGS, "--out", "p.json", *more])
    assert found.exit_code != 0
    assert says in str(found.exception) + found.output
