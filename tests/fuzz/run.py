"""Fuzz every reader: `python tests/fuzz/run.py [--n N] [--seed S] [--target NAME ...]`, or `make fuzz N=...`.

Each input must give a result or a UserError of one printable sentence, within seconds and a few gigabytes. What
does otherwise is kept in tests/fuzz/corpus/TARGET/, which the test suite replays, and makes the exit code 1.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from types import FrameType

from vsim.errors import UserError
from vsim.tests.fuzz.targets import BY_NAME, TARGETS, Target, draw

CORPUS = Path(__file__).resolve().parent / "corpus"
LIMIT_S = 5.0  # for one input; ordinary ones take a millisecond
ADDRESS_SPACE_BYTES = 6 << 30
READ, REFUSED, FAILED = "read", "refused", "unexplained"


class HangError(BaseException):
    """An input took longer than LIMIT_S. No Exception: no reader may catch it."""


def _hang(_: int, frame: FrameType | None) -> None:
    raise HangError(f"longer than {LIMIT_S} s")


def outcome(target: Target, folder: Path, data: bytes) -> tuple[str, str]:
    """(read, refused or unexplained; what was said)."""
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        target.read(folder, data)
        return READ, ""
    except UserError as error:
        said = str(error)
        return (
            (REFUSED, said) if said and said.isprintable() else (FAILED, f"unprintable: {said!r}")
        )
    except (Exception, HangError):
        return FAILED, traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def guarded() -> None:
    """Limits of this process: an input that blows up is a failure here, not on the machine."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, hard))
    signal.signal(signal.SIGALRM, _hang)
    warnings.simplefilter("ignore")


def keep(target: Target, data: bytes) -> Path:
    folder = CORPUS / target.name
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / (hashlib.sha256(data).hexdigest()[:12] + ".bin")
    path.write_bytes(data)
    return path


def fuzz(target: Target, count: int, seed: int, most_failures: int = 5) -> Counter[str]:
    """`count` inputs; stops early after `most_failures` failures of different tracebacks."""
    # Seeded by text: Python's hash of a string differs from process to process.
    rng = random.Random(f"{target.name} {seed}")
    found: Counter[str] = Counter()
    told: set[str] = set()
    memory = (
        "/dev/shm" if Path("/dev/shm").is_dir() else None
    )  # a write to a disk takes milliseconds
    with tempfile.TemporaryDirectory(prefix="vsim-fuzz-", dir=memory) as name:
        folder = Path(name)
        for _ in range(count):
            data = draw(target, rng)
            result, said = outcome(target, folder, data)
            found[result] += 1
            if result == FAILED:
                where = "\n".join(said.splitlines()[-3:])[:400]
                if where in told:
                    continue
                told.add(where)
                print(f"{target.name}: {keep(target, data)}\n{said}", flush=True)
                if len(told) >= most_failures:
                    break
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--n", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--target", action="append", choices=sorted(BY_NAME))
    asked = parser.parse_args()
    seed = time.time_ns() if asked.seed is None else asked.seed
    guarded()
    chosen = [BY_NAME[name] for name in asked.target] if asked.target else list(TARGETS)
    whole = sum(target.weight for target in chosen)
    total: Counter[str] = Counter()
    print(f"seed {seed}")
    for target in chosen:
        began = time.perf_counter()
        found = fuzz(target, max(1, asked.n * target.weight // whole), seed)
        total += found
        rate = found.total() / (time.perf_counter() - began)
        counts = ", ".join(f"{found[name]:,} {name}" for name in (READ, REFUSED, FAILED))
        print(f"{target.name:14} {found.total():>9,} inputs: {counts} ({rate:,.0f} /s)", flush=True)
    print(f"{'all':14} {total.total():>9,} inputs, {total[FAILED]:,} unexplained")
    return 1 if total[FAILED] else 0


if __name__ == "__main__":
    sys.exit(main())
