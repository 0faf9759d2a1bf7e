"""The real engine as a child process: `with RealEngine("v1") as real: real.run(case)`."""

from __future__ import annotations

import json
import os
import select
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

Case = dict[str, Any]

HERE = Path(__file__).parent
CHECKOUT = HERE.parent.parent
VERSION = {"v1": "0.32.0", "v0": "0.8.5"}
OVERRIDE = {"v1": "VSIM_VLLM_PYTHON", "v0": "VSIM_VLLM_V0_PYTHON"}


def python_of(engine: str) -> Path:
    """The interpreter of the environment that holds the real vLLM, whether or not it exists."""
    named = os.environ.get(OVERRIDE[engine])
    return (
        Path(named) if named else CHECKOUT / ".venvs" / f"vllm-{VERSION[engine]}" / "bin" / "python"
    )


def missing(engine: str) -> str | None:
    """Why the real engine cannot be had here, or None."""
    python = python_of(engine)
    if not python.exists():
        return f"no vLLM {VERSION[engine]} environment: {python} does not exist (make it with `make test`, or set {OVERRIDE[engine]})"
    return None


@dataclass
class Recording:
    """What the real engine did with one case. `crash` is its traceback if the real classes raised."""

    steps: list[dict[str, Any]]
    summary: dict[str, Any] | None = None
    events: dict[str, int] = field(default_factory=dict)
    crash: str | None = None


class RealEngine:
    """Real vLLM scheduler classes in their own Python; imported once, then one case after the other."""

    def __init__(self, engine: str, *, hash_seed: str = "0", timeout_s: float = 120.0) -> None:
        self.engine, self.hash_seed, self.timeout_s = engine, hash_seed, timeout_s
        self.version = ""
        self._child: subprocess.Popen[bytes] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed in __exit__)

    def __enter__(self) -> RealEngine:
        self._start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._stop()
        self._log.close()

    def run(self, case: Case, max_steps: int = 10**9) -> Recording:
        """Step records of the real engine. A case that kills or hangs the child is a crash, and a new child follows."""
        if self._child is None:
            self._start()
        assert self._child is not None and self._child.stdin is not None
        try:
            self._child.stdin.write(
                json.dumps({"case": case, "max_steps": max_steps}).encode() + b"\n"
            )
            self._child.stdin.flush()
            answer = self._read(self.timeout_s)
        except (OSError, TimeoutError, EOFError) as e:
            self._stop()
            return Recording([], crash=f"{type(e).__name__}: {e}\n{self._log_tail()}")
        return Recording(
            answer["steps"], answer.get("summary"), answer.get("events", {}), answer.get("crash")
        )

    def _start(self) -> None:
        environment = {
            **os.environ,
            "PYTHONHASHSEED": self.hash_seed,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_CONFIGURE_LOGGING": "0",
        }
        # The environment under test must not leak into the one that holds vLLM.
        for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
            environment.pop(name, None)
        self._child = subprocess.Popen(
            [str(python_of(self.engine)), str(HERE / "worker.py"), self.engine],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=HERE,
            env=environment,
        )
        try:
            self.version = self._read(300.0)["ready"]
        except (OSError, TimeoutError, EOFError) as e:
            self._stop()
            raise RuntimeError(
                f"the real vLLM {VERSION[self.engine]} did not start: {e}\n{self._log_tail()}"
            ) from e
        if not self.version.startswith(VERSION[self.engine]):
            self._stop()
            raise RuntimeError(
                f"{python_of(self.engine)} holds vLLM {self.version}, needed is {VERSION[self.engine]}"
            )

    def _read(self, timeout_s: float) -> dict[str, Any]:
        assert self._child is not None and self._child.stdout is not None
        ready, _, _ = select.select([self._child.stdout], [], [], timeout_s)
        if not ready:
            raise TimeoutError(f"no answer within {timeout_s:.0f} s")
        line = self._child.stdout.readline()
        if not line.endswith(b"\n"):
            raise EOFError(f"the child ended with status {self._child.wait(10)}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _stop(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        if child.stdin:
            child.stdin.close()
        try:
            child.wait(2)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        if child.stdout:
            child.stdout.close()

    def _log_tail(self) -> str:
        self._log.seek(0)
        return self._log.read()[-3000:].decode(errors="replace")
