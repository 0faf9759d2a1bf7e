"""How fast and in how much memory a large CSV trace is read, beside pandas' own reader of the same file.

    python benchmarks/trace_import.py [ROWS]

Writes an Azure-like CSV of ROWS rows (default 10,000,000), then reads it in fresh processes: with
`vsim.traces.readers.read_trace`, with `pandas.read_csv` (dates parsed, as a user must), and streaming a
limit of 100,000 rows. Prints rows/s, peak resident memory of each process, and the ratio to pandas.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

BLOCK = 500_000

OURS = """
import resource, sys, time
began = time.perf_counter()
from vsim.traces.readers import read_trace
trace = read_trace(sys.argv[1], limit=int(sys.argv[2]) or None)
seconds = time.perf_counter() - began
usage = resource.getrusage(resource.RUSAGE_SELF)
cpu, peak = usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024
print(len(trace), int(trace.arrival_ns[-1]), int(trace.prompt_tokens.sum()), seconds, cpu, peak)
"""

PANDAS = """
import resource, sys, time
began = time.perf_counter()
import pandas
frame = pandas.read_csv(sys.argv[1], parse_dates=["TIMESTAMP"])
times = frame["TIMESTAMP"].astype("int64")
seconds = time.perf_counter() - began
usage = resource.getrusage(resource.RUSAGE_SELF)
cpu, peak = usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024
unit = 10**9 // {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[frame["TIMESTAMP"].dt.unit]
span = int(times.iloc[-1] - times.iloc[0]) * unit
print(len(frame), span, int(frame["ContextTokens"].sum()), seconds, cpu, peak)
"""


def write_csv(path: Path, rows: int) -> None:
    """Rows 100 to 900 us apart, 7-digit fractions, CRLF, like the Azure files."""
    rng = np.random.default_rng(0)
    now = 1_700_000_000 * 10_000_000
    with path.open("w", newline="") as out:
        out.write("TIMESTAMP,ContextTokens,GeneratedTokens")
        for begin in range(0, rows, BLOCK):
            count = min(BLOCK, rows - begin)
            ticks = now + np.cumsum(rng.integers(1_000, 9_000, count))
            now = int(ticks[-1])
            seconds = np.datetime_as_string((ticks // 10_000_000).astype("datetime64[s]")).tolist()
            fractions = (ticks % 10_000_000).tolist()
            prompts, outputs = (
                rng.integers(1, 8000, count).tolist(),
                rng.integers(1, 900, count).tolist(),
            )
            out.writelines(
                f"\r\n{second.replace('T', ' ')}.{fraction:07d},{prompt},{output}"
                for second, fraction, prompt, output in zip(
                    seconds, fractions, prompts, outputs, strict=True
                )
            )


def measured(code: str, path: Path, limit: int = 0) -> tuple[list[int], float, float, float]:
    """(rows, span ns, prompt tokens), wall and CPU seconds and peak MiB of a fresh process.

    CPU seconds count all threads and the imports: on a busy machine they say more than the wall clock.
    """
    result = subprocess.run(
        [sys.executable, "-c", code, str(path), str(limit)],
        capture_output=True,
        text=True,
        check=True,
    )
    *facts, seconds, cpu, peak = result.stdout.split()
    return [int(value) for value in facts], float(seconds), float(cpu), float(peak)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="?", type=int, default=10_000_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.csv"
        began = time.perf_counter()
        write_csv(path, options.rows)
        size = path.stat().st_size / 2**20
        print(
            f"wrote {options.rows:,} rows, {size:.0f} MiB, in {time.perf_counter() - began:.1f} s"
        )
        ours, *our = measured(OURS, path)
        theirs, *their = measured(PANDAS, path)
        assert ours == theirs, f"the readers disagree: {ours} and {theirs}"
        _, *head = measured(OURS, path, 100_000)
        print(f"{'':14}{'wall s':>10}{'CPU s':>10}{'rows/s':>14}{'peak MiB':>10}")
        for name, (wall, cpu, peak), rows in (
            ("vsim", our, options.rows),
            ("pandas", their, options.rows),
            ("vsim, 100k", head, min(100_000, options.rows)),
        ):
            print(f"{name:14}{wall:10.2f}{cpu:10.2f}{rows / wall:14,.0f}{peak:10.0f}")
        print(
            f"vsim / pandas: {our[0] / their[0]:.2f} of the wall time, {our[1] / their[1]:.2f} of the CPU time, "
            f"{our[2] / their[2]:.2f} of the memory"
        )


if __name__ == "__main__":
    main()
