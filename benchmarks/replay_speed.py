"""How fast vsim is, in one command: named workloads, growth, the reference path, sweeps, and peers.

    python benchmarks/replay_speed.py [--quick] [--huge] [--json FILE] [--page FILE.md] [--only NAME,NAME]
                                      [--peer-python PATH]

Every measurement is a process of its own. Beside wall seconds stand CPU seconds: on a busy machine they
say more. `--quick` takes a tenth of the requests and less; `--huge` adds ten million requests;
`--peer-python` names an interpreter that has ai-dynamo-runtime, if this one has not.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import speed_peers
from speed_workloads import AZURE, CALIBRATED, ROOT, WORKLOADS

Row = dict[str, Any]
SAID: list[str] = []  # of the part under way
PARTS = ("workloads", "growth", "reference", "simpy", "shell", "sweep", "peers")


def say(text: str = "", end: str = "\n") -> None:
    """Print, and keep for `--page`."""
    print(text, end=end, flush=True)
    SAID.append(text + end)


def child(workload: str, requests: int, path: str = "fast", repeats: int = 1) -> Row:
    """One measurement in a fresh process; of several, the one of the fewest CPU seconds."""
    asked = {"workload": workload, "requests": requests, "path": path, "repeats": repeats}
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("speed_workloads.py")), json.dumps(asked)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{workload} with {requests:,} requests failed:\n{done.stderr[-2000:]}")
    found: Row = json.loads(done.stdout.splitlines()[-1])
    return found | {"process_wall_s": time.perf_counter() - began}


HEAD = (
    f"{'workload':16}{'requests':>11}{'steps':>11}{'wall s':>9}{'CPU s':>9}{'requests/s':>12}{'steps/s':>12}"
    f"{'us/request':>12}{'peak MiB':>10}{'B/request':>11}"
)


def line(row: Row, name: str | None = None) -> str:
    cpu = max(row["cpu_s"], 1e-9)
    per_request = (row["peak_mib"] - row["peak_mib_before"]) * 2**20 / row["requests"]
    return (
        f"{name or row['workload']:16}{row['requests']:11,}{row['steps']:11,}{row['wall_s']:9.2f}{row['cpu_s']:9.2f}"
        f"{row['requests'] / cpu:12,.0f}{row['steps'] / cpu:12,.0f}{cpu / row['requests'] * 1e6:12.1f}"
        f"{row['peak_mib']:10,.0f}{per_request:11,.0f}"
    )


def workloads(names: list[str], quick: bool) -> list[Row]:
    say("\nWorkloads (requests/s and steps/s by CPU time; B/request: memory that the replay added)")
    say(HEAD)
    rows = []
    for name in names:
        workload = WORKLOADS[name]
        row = child(name, workload.quick if quick else workload.requests)
        rows.append(row)
        say(line(row) + ("" if row["kernel"] else "  step by step"))
    for name in names:
        say(f"  {name}: {WORKLOADS[name].says}")
    return rows


def growth(quick: bool, huge: bool) -> list[Row]:
    sizes = [1000, 10_000] if quick else [10_000, 100_000, 1_000_000] + [10_000_000] * huge
    say("\nGrowth: Azure lengths, all sent at once, one replica, roofline of an A100")
    say(HEAD)
    rows = []
    for size in sizes:
        # What takes a tenth of a second is at the mercy of whatever else runs: the best of five.
        rows.append(child("saturated", size, repeats=5 if size <= 100_000 else 1))
        say(line(rows[-1]))
    costs = [row["cpu_s"] / row["requests"] for row in rows]
    say(
        f"  cost per request, largest / smallest: {max(costs) / min(costs):.2f}"
        f" ({min(costs) * 1e6:.1f} to {max(costs) * 1e6:.1f} us)"
    )
    # The few milliseconds before the first request count in a small run: what each further request takes.
    more = [
        (b["cpu_s"] - a["cpu_s"]) / (b["requests"] - a["requests"])
        for a, b in itertools.pairwise(rows)
    ]
    say(
        "  each further request, from one size to the next: "
        + ", ".join(f"{cost * 1e6:.2f}" for cost in more)
        + " us"
    )
    return rows


def reference(names: list[str], quick: bool) -> list[Row]:
    """The step-by-step path beside the fast one, on the same requests, one after the other."""
    say("\nReference path beside the fast path (CPU seconds of the same requests)")
    say(f"{'workload':16}{'requests':>11}{'fast':>9}{'reference':>11}{'ratio':>9}")
    rows = []
    for name in names:
        count = WORKLOADS[name].reference // (4 if quick else 1)
        fast = child(name, count)
        slow = child(name, count, "reference")
        row = {"workload": name, "requests": fast["requests"], "fast": fast, "reference": slow}
        rows.append(row)
        say(
            f"{name:16}{fast['requests']:11,}{fast['cpu_s']:9.3f}{slow['cpu_s']:11.3f}"
            f"{slow['cpu_s'] / fast['cpu_s']:9.1f}"
            + ("" if fast["kernel"] else "  (not covered by the compiled path)")
            + ("" if fast["sha256"] == slow["sha256"] else "  THE RUNS DIFFER"),
        )
    return rows


def simpy(quick: bool) -> Row:
    row = child("azure-roofline", 300 if quick else 2000, "simpy")
    say(
        f"\nSimPy's own share of the reference path ({row['requests']:,} Azure requests): {row['events']:,} events; as many "
        f"bare timeouts take {row['bare_events_cpu_s']:.2f} of {row['reference_cpu_s']:.2f} CPU s = {row['share']:.1%}"
    )
    return row


def timed(command: list[str]) -> Row:
    """Wall seconds of a command, CPU seconds of it and all its children, and the largest one's peak."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wall = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall_s": wall, "cpu_s": cpu}


def vsim() -> list[str]:
    return [sys.executable, "-m", "vsim.cli"]


def shell(repeats: int = 3) -> Row:
    """From the shell to the table, imports included: the whole Azure conversation trace, calibrated timing."""
    command = [
        *vsim(), "replay", str(AZURE), "--model", CALIBRATED["model"], "--gpu", CALIBRATED["gpu"], "--block-size", "16",
    ]  # fmt: skip
    runs = [timed(command) for _ in range(repeats)]
    with tempfile.TemporaryDirectory() as folder:
        written = timed([*command, "--out", str(Path(folder) / "run")])
    bare = [timed([sys.executable, "-c", "import numpy"])["wall_s"] for _ in range(repeats)]
    row = {
        "command": "vsim replay azure2023_conv.csv --model … --gpu … --block-size 16",
        "wall_s": [run["wall_s"] for run in runs],
        "cpu_s": [run["cpu_s"] for run in runs],
        "with_files_and_report_wall_s": written["wall_s"],
        "python_and_numpy_wall_s": bare,
    }
    say(
        f"\nFrom the shell to the table, {CALIBRATED['gpu']}, calibrated, 19,366 requests: "
        f"median {statistics.median(row['wall_s']):.2f} s wall, {statistics.median(row['cpu_s']):.2f} s CPU "
        f"(of which Python and numpy alone {statistics.median(bare):.2f} s); with --out and report "
        f"{written['wall_s']:.2f} s"
    )
    return row


# 2 x 5 x 4 x 5 x 5 = 1,000 what-ifs of one trace.
GRID = (
    "block_size=16,32",
    "max_num_seqs=64,128,256,512,1024",
    "max_num_batched_tokens=2048,4096,8192,16384",
    "gpu_memory_utilization=0.80,0.85,0.90,0.92,0.95",
    "time_scale=1,0.8,0.6,0.5,0.4",
)


def sweep(quick: bool) -> Row:
    """1,000 variants of the Azure trace on 2 cores: start to table, nothing else written."""
    grid = GRID[:2] if quick else GRID
    more = ["--limit", "1000"] if quick else []
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *vsim(),
            "sweep",
            str(AZURE),
            "--model",
            CALIBRATED["model"],
            "--gpu",
            CALIBRATED["gpu"],
        ]
        command += [*more, "--jobs", "2", "--out", str(Path(folder) / "sweep.parquet")]
        for name in grid:
            command += ["--vary", name]
        row = timed(command)
    points = 10 if quick else 1000
    row |= {"points": points, "requests": 1000 if quick else 19366}
    say(
        f"\nSweep: {points:,} variants of {row['requests']:,} requests on 2 cores: {row['wall_s']:.1f} s wall, "
        f"{row['cpu_s']:.1f} s CPU, {row['cpu_s'] / points:.3f} CPU s a variant"
    )
    return row


def peers(python: str, quick: bool) -> list[Row]:
    from speed_workloads import azure, identical

    from vsim.sim.deployment import resolve
    from vsim.traces.arrivals import rerate

    say(
        "\nPeers: Azure conversation lengths, 6.45 requests/s, one replica, 8B-class model; start to result, s"
    )
    sizes = [2000] if quick else [2000, 19366, 100_000]
    ours = {size: child("azure-6.45", size) for size in sizes}
    say(f"{'':24}" + "".join(f"{size:>12,}" for size in sizes))
    say(
        f"{'vsim, here':24}" + "".join(f"{ours[size]['process_wall_s']:12.2f}" for size in sizes),
    )
    rows: list[Row] = [{"peer": "vsim", "workload": "azure-6.45", **row} for row in ours.values()]
    blocks = resolve(**WORKLOADS["azure-6.45"].deployment).scheduler.num_gpu_blocks
    same = 20_000 if quick else 131_072
    if speed_peers.dynamo_installed(python):
        cells = []
        for size in sizes:
            found = speed_peers.run_dynamo(
                python, rerate(azure(size), 6.45), blocks, None, same=False
            )
            rows.append({"peer": "dynamo replay", "workload": "azure-6.45", **found})
            cells.append(f"{found['wall_s']:12.2f}" if "wall_s" in found else f"{'failed':>12}")
        say(f"{'dynamo replay, here':24}" + "".join(cells))
        ratios = [
            row["wall_s"] / ours[row["requests"]]["process_wall_s"]
            for row in rows
            if row["peer"] != "vsim" and "wall_s" in row
        ]
        say(f"{'  its time / ours':24}" + "".join(f"{ratio:12.1f}" for ratio in ratios))
        say("  (its default polynomial for step times; our KV blocks, 16 tokens each)")
        found = speed_peers.run_dynamo(python, identical(same), blocks, 64, same=True)
        rows.append({"peer": "dynamo replay", "workload": "identical", **found})
    else:
        say(
            "dynamo replay: not installed (pip install ai-dynamo ai-dynamo-runtime; --peer-python names another venv)"
        )
    for name in ("vidur", "tokensim", "blis"):
        if not any(name == found.lower() for found in speed_peers.others_found()):
            say(f"{name}: not installed")
        else:
            say(f"{name}: installed, but this script knows no call to it")
    say(
        "Quoted, measured by others on a machine like this one (the issue that asked for this page):"
    )
    for name, figures in speed_peers.QUOTED.items():
        say(f"  {name:22}" + "".join(f"{figures.get(size, '-'):>12}" for size in sizes))
    mine = child("identical", same)
    rows.append({"peer": "vsim", **mine})
    say(
        f"\n{same:,} identical requests, 1024/128 tokens, 64 in flight: vsim {mine['process_wall_s']:.2f} s here",
        end="",
    )
    theirs = [
        row
        for row in rows
        if row["peer"] != "vsim" and row["workload"] == "identical" and "wall_s" in row
    ]
    for row in theirs:
        say(
            f"; dynamo replay {row['wall_s']:.2f} s here ({row['wall_s'] / mine['process_wall_s']:.1f} times ours)",
            end="",
        )
    say(f"; AISimulate publishes {speed_peers.AISIMULATE_S} s for 131,072 on its machine")
    return rows


def machine() -> Row:
    import numpy

    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            row.split(":", 1)[1].strip()
            for row in cpuinfo.read_text().splitlines()
            if row.startswith("model name")
        ]
        model = names[0] if names else model
    commit = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "cpu": model,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "commit": commit.stdout.strip(),
        "load_average": list(os.getloadavg()),
    }


def title(here: Row) -> str:
    return (
        f"vsim {here['commit']}, {here['date']}, {here['cores']} x {here['cpu']}, Python {here['python']}, "
        f"numpy {here['numpy']}, load average before {here['load_average'][0]:.1f}"
    )


def compile_once() -> str:
    """Numba compiles the kernel once per machine and version; not what is to be measured."""
    done = subprocess.run(
        [sys.executable, "-m", "vsim.sim.fast.warm"], capture_output=True, text=True, check=False
    )
    return (done.stdout or done.stderr).strip().splitlines()[-1]


def put_on_page(page: Path, part: str, text: str) -> None:
    """Replace what stands between the marks of `part` in a Markdown page by `text`, as a code block."""
    begin, end = f"<!-- figures: {part} -->\n", "<!-- end of figures -->"
    before, mark, rest = page.read_text(encoding="utf-8").partition(begin)
    if not mark or end not in rest:
        sys.exit(f"{page} has no {begin.strip()} … {end}")
    after = rest[rest.index(end) :]
    block = f"```text\n{text.strip()}\n```\n"
    page.write_text(f"{before}{begin}{block}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a tenth of everything, or less")
    parser.add_argument("--huge", action="store_true", help="growth up to 10,000,000 requests")
    parser.add_argument("--only", help=f"parts ({', '.join(PARTS)}) or workloads, by comma")
    parser.add_argument(
        "--mooncake", type=Path, help="Mooncake's conversation trace; its head is bundled"
    )
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter that has dynamo")
    parser.add_argument(
        "--page", type=Path, metavar="FILE.md", help="put the figures into docs/performance.md"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    options = parser.parse_args()
    if options.mooncake is not None:
        os.environ["VSIM_MOONCAKE"] = str(options.mooncake.resolve())  # for the child processes
    only = set(options.only.split(",")) if options.only else set(PARTS)
    unknown = only - set(PARTS) - set(WORKLOADS)
    if unknown:
        parser.error(
            f"--only {', '.join(sorted(unknown))}: known are {', '.join([*PARTS, *WORKLOADS])}"
        )
    named = [name for name in WORKLOADS if name in only]
    if named:
        only.add("workloads")
    names = named or list(WORKLOADS)
    here = machine()
    say(title(here))
    if here["load_average"][0] > 0.5:
        say("This machine is busy: read the CPU seconds, and those with care.")
    say(f"compiled path: {compile_once()}")
    found: Row = {"machine": here}
    parts: dict[str, Callable[[], Any]] = {
        "workloads": lambda: workloads(names, options.quick),
        "growth": lambda: growth(options.quick, options.huge),
        "reference": lambda: reference(names, options.quick),
        "simpy": lambda: simpy(options.quick),
        "shell": shell,
        "sweep": lambda: sweep(options.quick),
        "peers": lambda: peers(options.peer_python, options.quick),
    }
    for part, measure in parts.items():
        if part in only:
            SAID.clear()
            found[part] = measure()
            if options.page is not None:
                put_on_page(options.page, part, f"{title(here)}\n{''.join(SAID)}")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
