"""Many damaged traces in little time: `python tests/fuzz_traces.py [INPUTS] [SEED]`.

Takes the samples of tests/data/traces (and compressed and Parquet forms of them), damages each in a few
places or splices two, and reads it as what it looks like or as a random format, with random options. Every
input must give a trace that keeps its promises, or one printable sentence (UserError). Anything else is
saved under build/fuzz-traces and makes the exit code 1.
"""

from __future__ import annotations

import gzip
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

from vsim.errors import UserError
from vsim.tests.test_trace_fuzz import PARQUET, SAMPLES, check
from vsim.traces.readers import FORMATS, read_trace

ROOT = Path(__file__).resolve().parent.parent
FINDS = ROOT / "build" / "fuzz-traces"
TOKENS = [
    b"NaN", b"-1", b"1e999", b"Infinity", b"null", b"true", b'""', b"[]", b"{}", b"[", b"}", b",", b"\n", b"\r\n", b"\0",
    b"\xff", b"\xef\xbb\xbf", b'"', b"9" * 30, b"0", b"1.5", b"2024-02-30 00:00:00", b"\x1b[2J", b";", b"\t",
    b'"hash_ids": [1, 2, 3]', b'"timestamp": 5', b'"schema": "vsim/trace/1"',
]  # fmt: skip


def corpus() -> list[bytes]:
    import zstandard

    plain = [path.read_bytes()[:3000] for path in SAMPLES]
    packed = [gzip.compress(data, mtime=0) for data in plain[:3]]
    packed += [zstandard.ZstdCompressor().compress(data) for data in plain[:3]]
    return [*plain, *packed, PARQUET]


def damaged(rng: random.Random, seeds: list[bytes]) -> bytes:
    data = bytearray(rng.choice(seeds))
    if rng.random() < 0.1:
        other = rng.choice(seeds)
        data[rng.randrange(len(data) + 1) :] = other[rng.randrange(len(other)) :]
    for _ in range(rng.choice((0, 1, 1, 2, 3, 8))):
        at = rng.randrange(len(data) + 1)
        kind = rng.random()
        if kind < 0.4:
            data[at : at + rng.choice((0, 1, 4, 10))] = rng.choice(TOKENS)
        elif kind < 0.7 and data:
            data[at % len(data)] = rng.randrange(256)
        elif kind < 0.85:
            del data[at : at + rng.randrange(40)]
        else:
            data[at:at] = data[at : at + rng.randrange(200)]
    if rng.random() < 0.2:
        del data[rng.randrange(len(data) + 1) :]
    return bytes(data)


def options(rng: random.Random) -> dict[str, object]:
    chosen: dict[str, object] = {
        "strict": rng.random() < 0.2,
        "on_error": rng.choice(("fail", "skip", "skip")),
        "zero_output": rng.choice(("drop", "prefill-only", "error")),
        "time_unit": rng.choice((None, None, "s", "ms", "us", "ns")),
        "limit": rng.choice((None, None, 1, 5)),
        "output_tokens_model": rng.choice((None, "upper-bound", 7)),
        "hash_block_tokens": rng.choice((None, None, 1, 16, 512)),
    }
    if rng.random() < 0.3:
        chosen["format"] = rng.choice(list(FORMATS))
    return chosen


def main() -> int:
    inputs = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    rng = random.Random(int(sys.argv[2]) if len(sys.argv) > 2 else time.time_ns())
    seeds = corpus()
    outcomes: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t"
        for number in range(inputs):
            data, chosen = damaged(rng, seeds), options(rng)
            path.write_bytes(data)
            try:
                check(read_trace(path, **chosen))  # type: ignore[arg-type]
                outcomes["read"] += 1
            except UserError as error:
                outcomes["refused" if str(error).isprintable() and str(error) else "unclear"] += 1
            except Exception:
                outcomes["unexplained"] += 1
                FINDS.mkdir(parents=True, exist_ok=True)
                (FINDS / f"{number}.bin").write_bytes(data)
                (FINDS / f"{number}.txt").write_text(f"{chosen}\n{traceback.format_exc()}")
    print(
        f"{inputs:,} inputs: "
        + ", ".join(f"{count:,} {name}" for name, count in sorted(outcomes.items()))
    )
    return 1 if outcomes["unexplained"] or outcomes["unclear"] else 0


if __name__ == "__main__":
    sys.exit(main())
