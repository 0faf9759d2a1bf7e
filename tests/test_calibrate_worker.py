"""The recording process and its owner: what is said when it dies, and that nothing stays behind."""

import os
import sys
import time
from pathlib import Path

import pytest

from vsim.calibrate import worker
from vsim.calibrate.worker import Worker, worker_environment
from vsim.errors import UserError

HELLO = "import json, os, subprocess, sys; print(json.dumps({'hello': {'platform': 'cpu'}}), flush=True); "


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_last_words_are_passed_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(worker, "_BOOTSTRAP", "import sys; sys.exit('no such kernel')")
    with pytest.raises(UserError, match="status 1: no such kernel"):
        Worker(Path(sys.executable), worker_environment(1, True), tmp_path)


def test_death_in_the_middle_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        worker, "_BOOTSTRAP", HELLO + "sys.stdin.readline(); sys.exit('out of memory')"
    )
    with (
        Worker(Path(sys.executable), worker_environment(1, True), tmp_path) as one,
        pytest.raises(UserError, match="out of memory"),
    ):
        one.scene({"decodes": [0]})


def test_nothing_stays_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    child = (
        "p = subprocess.Popen(['sleep', '60']); print(json.dumps({'started': p.pid}), flush=True); "
    )
    monkeypatch.setattr(
        worker, "_BOOTSTRAP", HELLO + "sys.stdin.readline(); " + child + "sys.stdin.read()"
    )
    with Worker(Path(sys.executable), worker_environment(1, True), tmp_path) as one:
        pid = int(one.start({}))  # type: ignore[call-overload]
        assert running(pid)
    time.sleep(0.1)
    assert not running(pid)


def test_the_environment_is_offline_and_single_threaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    env = worker_environment(1, on_cpu=True)
    assert env["HF_HUB_OFFLINE"] == "1" and env["VLLM_NO_USAGE_STATS"] == "1"
    assert env["OMP_NUM_THREADS"] == "1"
    assert "PYTHONPATH" not in env, "the recorder must not see this environment's libraries"
    on_gpu = worker_environment(1, on_cpu=False)
    assert on_gpu["PYTHONPATH"] == "/elsewhere", "a CUDA vLLM may live there"
    assert on_gpu.get("OMP_NUM_THREADS") == os.environ.get("OMP_NUM_THREADS")


def test_a_yardstick_that_waited_for_the_core_leaves_no_step_with_negative_cpu_time() -> None:
    from vsim.calibrate.record_engine import EngineStep, _at_best

    nothing: list[int] = []
    step = EngineStep(
        *[nothing] * 8,
        running=1,
        waiting=0,
        kv_blocks_used=1,
        schedule_ns=1_000,
        device_ns=30_000_000,
        total_ns=32_000_000,
        cpu_ns=12_000_000,
    )
    # Another process had the core for most of the yardstick's 20 ms.
    best = _at_best(step, own_ns=20_000_000, own_cpu_ns=2_000_000, slowdown=1.25)
    assert best.total_ns == pytest.approx(12e6 / 1.25)
    assert best.cpu_ns == pytest.approx(10e6 / 1.25)
    assert _at_best(step, 20_000_000, 13_000_000, 1.0).cpu_ns == 0
