"""Kill vsim at random moments and see what is left: `python tests/reliability/kills.py [--n N]`, `make kills N=200`.

Jobs that write results (sweep, replay over an earlier run, calibrate with an imagined machine, trace convert, export
over an earlier one) run in forked processes that are ended at a random moment: by SIGKILL, by Ctrl-C, or by a disk that is full after a
random number of bytes. After each, what was there before must be there still, whatever stands under a final name
must be whole, and what was begun must be resumable. At the end every job runs to its end once more and must leave
the bytes of a run that nobody disturbed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import os
import random
import resource
import signal
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections import Counter
from pathlib import Path

import numpy as np

from vsim.calibrate import campaign
from vsim.calibrate.samples import read_samples
from vsim.cli import main as vsim
from vsim.models.artifact import read_calibration
from vsim.models.hardware import find_gpu
from vsim.sim.run_io import read_run
from vsim.sim.sweep_journal import journal_path
from vsim.tests.fake_worker import FakeWorker
from vsim.traces.readers import read_trace
from vsim.traces.trace import Trace
from vsim.traces.write import write_trace

KILL, INTERRUPT, FULL_DISK = "kill -9", "Ctrl-C", "full disk"
MODEL = ("--model", "meta-llama/Llama-3.1-8B-Instruct", "--gpu", "a100")


def digest(path: Path) -> str:
    """Of a file, or of all files of a folder with their names; empty where there is nothing."""
    if not path.exists():
        return ""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    found = hashlib.sha256()
    for file in files:
        if file.is_file():
            found.update(f"{file.name}\0".encode() + file.read_bytes())
    return found.hexdigest()


def call(*arguments: str) -> None:
    """`vsim ARGUMENTS` in this process, silently; ends it by SystemExit."""
    sys.argv = ["vsim", *arguments]
    with (
        open(os.devnull, "w", encoding="utf-8") as quiet,
        contextlib.redirect_stdout(quiet),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        vsim()


class Job(ABC):
    """Work that writes under `folder`, and what must hold however it ends."""

    name = "job"

    def __init__(self, folder: Path, trace: Path) -> None:
        self.folder, self.trace = folder, trace
        folder.mkdir()

    @abstractmethod
    def run(self, round_number: int) -> None: ...

    @abstractmethod
    def check(self) -> None:
        """Raises AssertionError, or whatever a reader raises, if something is lost or half there."""

    def finish(self) -> None:
        """The job once more, undisturbed; then what its result must be."""
        self.check()


class Sweep(Job):
    name = "sweep"

    def __init__(self, folder: Path, trace: Path) -> None:
        super().__init__(folder, trace)
        self.out, self.calm = folder / "t.parquet", folder / "calm" / "t.parquet"
        self.seen: list[str] = []
        self.times = 0

    def _arguments(self, out: Path) -> list[str]:
        vary = (
            "--vary",
            "max_num_seqs=1,2,4,8,16,32",
            "--vary",
            "max_num_batched_tokens=256,512,1024,2048",
        )
        return ["sweep", str(self.trace), *MODEL, *vary, "--jobs", "1", "--out", str(out)]

    def run(self, round_number: int) -> None:
        call(*self._arguments(self.out))

    def check(self) -> None:
        journal = journal_path(self.out)
        lines = journal.read_bytes().split(b"\n")[1:-1] if journal.exists() else []
        keys = [line.decode() for line in lines]
        assert keys[: len(self.seen)] == self.seen, "results kept before are gone"
        self.seen = keys
        if self.out.exists():
            assert digest(self.out) == self._calm(), "the table is not that of an undisturbed sweep"
            self.out.unlink()  # and begin anew, lest every later kill meets finished work
            journal.unlink()
            self.seen = []

    def _calm(self) -> str:
        if not self.calm.exists():
            self.calm.parent.mkdir(exist_ok=True)
            in_child(lambda: call(*self._arguments(self.calm)))
        return digest(self.calm)

    def finish(self) -> None:
        in_child(lambda: self.run(0))
        assert digest(self.out) == self._calm()


class Replay(Job):
    """Two runs take turns under one name."""

    name = "replay"

    def __init__(self, folder: Path, trace: Path) -> None:
        super().__init__(folder, trace)
        self.out = folder / "run"
        self.known = set()
        for seed in (0, 1):
            in_child(lambda seed=seed: self.run(seed))  # type: ignore[misc]
            self.known.add(digest(self.out))
        assert len(self.known) == 2

    def run(self, round_number: int) -> None:
        rate = ("--request-rate", "20", "--seed", str(round_number % 2))
        call("replay", str(self.trace), *MODEL, *rate, "--out", str(self.out), "--overwrite")

    def check(self) -> None:
        assert digest(self.out) in self.known, "neither the earlier run nor the new one, whole"
        read_run(self.out)


class Convert(Job):
    name = "trace convert"

    def __init__(self, folder: Path, trace: Path) -> None:
        super().__init__(folder, trace)
        self.out, self.known = folder / "t.jsonl.gz", {""}
        in_child(lambda: self.run(0))
        self.known.add(digest(self.out))

    def run(self, round_number: int) -> None:
        call("trace", "convert", str(self.trace), str(self.out))

    def check(self) -> None:
        assert digest(self.out) in self.known, "half a trace under its final name"
        read_trace(self.out)


class Export(Job):
    """Two formats take turns under one name."""

    name = "export"

    def __init__(self, folder: Path, trace: Path) -> None:
        super().__init__(folder, trace)
        self.out, self.source, self.known = folder / "e.txt", folder / "run", set[str]()
        in_child(
            lambda: call("replay", str(trace), *MODEL, "--no-report", "--out", str(self.source))
        )
        for number in (0, 1):
            in_child(lambda number=number: self.run(number))  # type: ignore[misc]
            self.known.add(digest(self.out))
        assert len(self.known) == 2 and "" not in self.known

    def run(self, round_number: int) -> None:
        form = ("openmetrics", "perfetto")[round_number % 2]
        call("export", str(self.source), "--format", form, "--out", str(self.out))

    def check(self) -> None:
        assert digest(self.out) in self.known, "half an export under its final name"


class Calibrate(Job):
    """The campaign with its journal of samples; the machine is imagined, so that steps are fast."""

    name = "calibrate"

    def __init__(self, folder: Path, trace: Path) -> None:
        super().__init__(folder, trace)
        self.out = folder / "p.json"
        self.seen: set[tuple[str, int]] = set()

    def run(self, round_number: int) -> None:
        campaign.Worker = FakeWorker  # type: ignore[misc, assignment]
        campaign.find_vllm_python = lambda *_, **__: Path(
            sys.executable
        )  # which FakeWorker never starts
        FakeWorker.scenes = round_number
        plan = campaign.Plan(
            gpu=find_gpu("cpu"), model="tiny", out=self.out, block_sizes=(32,), budget_s=0.5, repeats=2
        )  # fmt: skip
        campaign.calibrate(plan, lambda *_: None)

    def check(self) -> None:
        rows = {(row.session, row.seq) for row in read_samples(self.out).rows}
        assert self.seen <= rows, "measured samples are gone"
        self.seen = rows
        if self.out.exists():
            read_calibration(self.out)

    def finish(self) -> None:
        in_child(lambda: self.run(0))
        self.check()
        assert self.out.exists() and self.seen


JOBS: tuple[type[Job], ...] = (Sweep, Replay, Convert, Export, Calibrate)
TURNS = (0, 1, 2, 0, 1, 3, 4)  # a calibration takes as long as several of the others
WAYS = (*[KILL] * 8, INTERRUPT, FULL_DISK)


def in_child(
    work: object, delay_s: float | None = None, how: str = KILL, most_bytes: int = 0
) -> int:
    """`work()` in a fork; ended after `delay_s` if that is given. The wait status."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 0
        # A shell's background jobs ignore Ctrl-C, and so would their children.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            if how == FULL_DISK and delay_s is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
            work()  # type: ignore[operator]
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 0
        except KeyboardInterrupt:
            code = 130
        except OSError:
            code = 2  # `vsim` says so in a sentence
        except BaseException as error:
            print(f"  a traceback's worth: {type(error).__name__}: {error}", flush=True)
            code = 99
        os._exit(code)
    if delay_s is not None and how != FULL_DISK:
        time.sleep(delay_s)
        os.kill(child, signal.SIGKILL if how == KILL else signal.SIGINT)
    return os.waitpid(child, 0)[1]


def small_trace(path: Path) -> Path:
    rng = np.random.default_rng(3)
    times = np.cumsum(rng.exponential(0.05, 150)).tolist()
    lengths = rng.integers(20, 900, 150).tolist(), rng.integers(1, 60, 150).tolist()
    write_trace(Trace.of(times, *lengths), path)
    return path


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--n", type=int, default=40)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument(
        "--minutes", type=float, default=1e9, help="end after so long, with what was done"
    )
    parser.add_argument("--job", action="append", choices=[kind.name for kind in JOBS])
    asked = parser.parse_args()
    rng = random.Random(time.time_ns() if asked.seed is None else asked.seed)
    outcomes: Counter[tuple[str, str, str]] = Counter()
    failures = 0
    with tempfile.TemporaryDirectory(prefix="vsim-kills-") as name:
        base = Path(name)
        trace = small_trace(base / "trace.jsonl")
        chosen = [kind for kind in JOBS if not asked.job or kind.name in asked.job]
        turns = TURNS if len(chosen) == len(JOBS) else range(len(chosen))
        jobs = [kind(base / str(place), trace) for place, kind in enumerate(chosen)]
        lasts = []
        for job in jobs:
            began = time.monotonic()
            in_child(lambda job=job: job.run(0))  # type: ignore[misc]
            lasts.append(time.monotonic() - began)
            job.check()
        stop = time.monotonic() + 60 * asked.minutes
        for number in range(asked.n):
            if time.monotonic() > stop:
                break
            place, how = turns[number % len(turns)], WAYS[number % len(WAYS)]
            job = jobs[place]
            delay_s = rng.uniform(0, 1.05 * lasts[place])
            status = in_child(
                lambda job=job, number=number: job.run(number), delay_s, how, rng.choice((0, 300, 3000, 30_000))
            )  # fmt: skip
            ended = (
                "ended by it"
                if os.WIFSIGNALED(status)
                else f"exit {os.waitstatus_to_exitcode(status)}"
            )
            outcomes[how, job.name, ended] += 1
            try:
                assert ended != "exit 99", "a traceback"
                job.check()
            except Exception as error:
                failures += 1
                print(
                    f"{how} after {delay_s:.3f} s of {job.name}: {type(error).__name__}: {error}",
                    flush=True,
                )
        for job in jobs:
            job.finish()
    for (how, job_name, ended), count in sorted(outcomes.items()):
        print(f"{count:5} x {how} in {job_name}: {ended}")
    struck = sum(count for (_, _, ended), count in outcomes.items() if ended == "ended by it")
    print(
        f"{sum(outcomes.values())} disturbances, {struck} processes ended by their signal, {failures} with something lost"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
