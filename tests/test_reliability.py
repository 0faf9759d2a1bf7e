"""A bounded share of `make kills` and `make determinism`: the whole of both takes minutes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vsim.sim.run_io import read_run
from vsim.tests.reliability.determinism import MODEL, TRACE, digest, vsim

REPLAY = ["replay", str(TRACE), *MODEL, "--limit", "60", "--out"]


def test_hash_seed_and_threads_leave_the_same_bytes(tmp_path: Path) -> None:
    found = set()
    for number, variables in enumerate(
        (
            {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"},
            {"PYTHONHASHSEED": "77", "OMP_NUM_THREADS": "2", "NUMBA_NUM_THREADS": "2"},
        )
    ):
        out = tmp_path / str(number) / "run"
        vsim([*REPLAY, str(out)], variables)
        found.add(digest(out))
    assert len(found) == 1


def test_kills_at_random_moments_lose_nothing() -> None:
    from vsim.tests.reliability import kills

    done = subprocess.run(
        [sys.executable, kills.__file__, "--n", "6", "--seed", "3", "--job", "replay", "--job", "trace convert"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 with something lost" in done.stdout


def test_two_replays_into_one_folder_at_once_leave_one_whole_run(tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-m", "vsim", *REPLAY, str(out), "--overwrite"]
    both = [
        subprocess.Popen([*command, "--seed", seed], stdout=subprocess.DEVNULL) for seed in "12"
    ]
    assert [process.wait(120) for process in both] == [0, 0]
    assert read_run(out).num_requests == 60
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_ctrl_c_leaves_no_file_behind_and_says_so(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "vsim", *REPLAY, str(tmp_path / "run")]
    command[command.index("60")] = "19366"
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    time.sleep(0.8)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode in (0, 130, -signal.SIGINT)
    assert "Traceback" not in said or process.returncode == -signal.SIGINT
    assert process.returncode == 0 or list(tmp_path.iterdir()) == []
