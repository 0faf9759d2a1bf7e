"""Real vLLM on the CPU, for real: the recorder sees what it claims to see."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from vsim.calibrate.campaign import engine_args, limits_of
from vsim.calibrate.measure import write_model
from vsim.calibrate.measured_run import build_run
from vsim.calibrate.samples import journal_path, read_samples
from vsim.calibrate.self_check import same_decisions, self_check
from vsim.calibrate.spot import scheduler_config, serve_command
from vsim.calibrate.worker import Worker, find_vllm_python, worker_environment
from vsim.errors import UserError
from vsim.models.model_spec import bundled_models
from vsim.traces.trace import Trace

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("vllm")]


def small_config() -> dict:  # type: ignore[type-arg]
    """The bundled tiny model with two layers: a step takes milliseconds."""
    return {
        **bundled_models()["vsim/tiny-llama"]["config"],
        "num_hidden_layers": 2,
        "hidden_size": 256,
    }


@pytest.fixture(scope="module")
def python() -> Path:
    try:
        return find_vllm_python()
    except UserError as missing:
        if os.environ.get("VSIM_REQUIRE_ORACLE"):
            pytest.fail(str(missing))
        pytest.skip("no Python with vLLM here")


@pytest.fixture(scope="module")
def worker(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    folder = tmp_path_factory.mktemp("vllm")
    model = write_model(small_config(), folder / "model")
    with Worker(python, worker_environment(1, True), folder) as running:
        args = engine_args(
            model,
            32,
            on_cpu=True,
            kv_cache_gib=0.25,
            flags={
                "max_model_len": 512,
                "max_num_seqs": 8,
                "max_num_batched_tokens": 256,
                "num_gpu_blocks_override": 31,
            },
        )
        running.started = running.start(  # type: ignore[attr-defined]
            args, yardstick={"reference_ns": None}
        )
        yield running


def test_it_says_where_it_runs(worker: Worker) -> None:
    assert worker.hello["platform"] == "cpu"
    assert worker.hello["device"]
    limits = limits_of(worker.started)  # type: ignore[attr-defined]
    assert (limits.block_size, limits.max_num_seqs, limits.kv_tokens) == (32, 8, 30 * 32)


def test_a_scene_has_the_composition_asked_for(worker: Worker) -> None:
    steps = worker.scene(
        {"decodes": [64, 64, 128], "decode_steps": 3, "prefills": [[40, 32]], "injections": 2}
    )
    shapes = [
        list(zip(s["num_tokens"], s["num_computed"], strict=True)) for s in steps if not s["warmup"]
    ]
    assert shapes[:4] == [
        [(1, 65), (1, 65), (1, 129)],
        [(1, 66), (1, 66), (1, 130)],
        [(1, 67), (1, 67), (1, 131), (40, 32)],
        [(1, 68), (1, 68), (1, 132)],
    ], "contexts are declared cached, not computed"
    assert all(s["total_ns"] >= s["schedule_ns"] + s["device_ns"] > 0 for s in steps)


def test_a_served_trace_is_decided_as_simulated_and_agrees_with_itself(worker: Worker) -> None:
    trace = Trace.of(
        [0, 0, 0, 0, 0.02, 0.02, 0.05, 5.0],
        [150, 150, 140, 160, 100, 300, 60, 33],
        [120, 110, 130, 120, 40, 30, 100, 5],
    )
    started = worker.started  # type: ignore[attr-defined]
    measured = build_run(trace, worker.serve(serve_command(trace, "wall")), started, {}, {})
    assert self_check(trace, measured.run) == []
    assert measured.run.requests["preemptions"].sum() > 0, "30 blocks must not be enough"
    config = scheduler_config(started, worker.hello["vllm_version"])
    same = same_decisions(trace, config, measured)
    assert same["equal_steps"] == same["steps"]
    assert same["largest_finish_difference_ms"] == 0


def test_a_run_cut_short_leaves_the_engine_clean(worker: Worker) -> None:
    command = {"requests": [[0, 100, 400, 0]] * 6, "limit_s": 0.5}
    messages = list(worker.serve(command))
    assert "done" in messages[-1]
    assert not any(m["step"]["finished"] for m in messages if "step" in m)
    steps = worker.scene({"decodes": [64], "decode_steps": 2, "prefills": []})
    assert steps[0]["requests"] == [0]
    assert (steps[0]["running"], steps[0]["waiting"]) == (1, 0)


def test_every_step_knows_how_slow_the_machine_was_around_it(worker: Worker) -> None:
    assert worker.started["yardstick_ns"] > 0  # type: ignore[attr-defined]
    trace = Trace.of([0, 0, 3.0], [100, 80, 60], [20, 20, 20])
    steps = [m["step"] for m in worker.serve(serve_command(trace, "wall")) if "step" in m]
    assert all(0.5 < step["slowdown"] < 50 for step in steps)
    assert len({step["slowdown"] for step in steps}) > len(steps) / 2, "measured anew each time"
    for step in steps:
        assert step["end_ns"] - step["start_ns"] == step["total_ns"]


def test_kernels_of_the_model_are_timed(worker: Worker) -> None:
    kernels = worker.kernels([1, 256], 3)
    assert kernels["rows"] == [1, 256]
    assert 0 < kernels["linear_s"][0] < kernels["linear_s"][1]
    assert all(seconds > 0 for seconds in kernels["head_s"])


def test_shared_prefixes_hit_the_cache(worker: Worker) -> None:
    from dataclasses import replace

    import numpy as np

    plain = Trace.of([0, 10.0], [100, 100], [4, 4])
    trace = replace(
        plain,
        prefix_ids=np.array([1, 2, 1, 2]),
        prefix_offsets=np.array([0, 2, 4]),
        prefix_block_tokens=32,
    )
    started = worker.started  # type: ignore[attr-defined]
    measured = build_run(trace, worker.serve(serve_command(trace, "wall")), started, {}, {})
    assert measured.run.requests["cached_tokens"].tolist() == [0, 64]


def test_a_refusal_comes_back_as_one_sentence(python: Path, tmp_path: Path) -> None:
    model = write_model(small_config(), tmp_path / "model")
    with (
        Worker(python, worker_environment(1, True), tmp_path) as running,
        pytest.raises(UserError, match="vLLM said: "),
    ):
        running.start(
            engine_args(model, 17, on_cpu=True, kv_cache_gib=0.25, flags={"max_model_len": 512})
        )


# A test run in the background of a shell ignores Ctrl-C, and its children would too.
RUN = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from vsim.cli import main; main()"
)


def started(command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def test_killed_in_the_middle_nothing_measured_is_lost(python: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(small_config()))
    out = tmp_path / "p.json"
    command = [
        *(
            sys.executable,
            "-c",
            RUN,
            "calibrate",
            "--gpu",
            "cpu",
            "--model",
            str(tmp_path / "model"),
        ),
        *(
            "--out",
            str(out),
            "--block-sizes",
            "32",
            "--budget-minutes",
            "5",
            "--max-model-len",
            "512",
        ),
        *("--max-num-seqs", "8", "--kv-cache-gib", "0.25", "--vllm-python", str(python)),
    ]
    process = started(command)
    for _ in range(600):
        time.sleep(0.25)
        if journal_path(out).exists() and len(read_samples(out).rows) > 30:
            break
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = len(read_samples(out).rows)
    assert kept > 30
    assert not out.exists()
    # The same command, interrupted by Ctrl-C this time, goes on and leaves an artifact.
    process = started(command)
    for _ in range(600):
        time.sleep(0.25)
        if len(read_samples(out).rows) > kept + 60:
            break
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=120) == 130
    assert len(read_samples(out).rows) > kept
    assert json.loads(out.read_text())["kind"] == "engine-steps"
