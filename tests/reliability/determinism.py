"""The same bytes, whatever the process: `python tests/reliability/determinism.py`, or `make determinism`.

Replays and a sweep in fresh processes: under three hash seeds, one and two threads of every library that has
threads, the compiled path and the step-by-step path, and the sweep by one process, by two, and by a Dask cluster
on this machine where Dask is installed. All outputs of a kind must be equal in every byte.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
TRACE = ROOT / "traces" / "azure2023_conv.csv"
MODEL = ("--model", "meta-llama/Llama-3.1-8B-Instruct", "--gpu", "a100")
THREADS = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMBA_NUM_THREADS",
    "ARROW_NUM_THREADS",
)


def environments() -> list[tuple[str, dict[str, str]]]:
    """(words, variables) of each process."""
    found = [(f"hash seed {seed}", {"PYTHONHASHSEED": seed}) for seed in ("0", "1", "4242")]
    return found + [(f"{count} thread(s)", dict.fromkeys(THREADS, count)) for count in ("1", "2")]


def vsim(arguments: list[str], variables: dict[str, str]) -> None:
    subprocess.run(
        [sys.executable, "-m", "vsim", *arguments],
        env={**os.environ, **variables},
        stdout=subprocess.DEVNULL,
        check=True,
    )


def digest(path: Path) -> str:
    """Of a file, or of a folder's files with their names."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    found = hashlib.sha256()
    for file in files:
        found.update(f"{file.name}\0".encode() + file.read_bytes())
    return found.hexdigest()[:16]


def replays(folder: Path, limit: int) -> dict[str, str]:
    """Digest of the run folder, report included, by what the process was."""
    found = {}
    for number, (words, variables) in enumerate(environments()):
        out = folder / f"run{number}" / "r"
        more = ["--limit", str(limit), "--request-rate", "8", "--out", str(out)]
        vsim(["replay", str(TRACE), *MODEL, *more], variables)
        found[words] = digest(out)
    return found


def paths(limit: int) -> dict[str, str]:
    """Digest of the same run by the compiled and by the step-by-step path."""
    code = (
        "import sys, tempfile; from pathlib import Path\n"
        "from vsim.sim.engine import simulate; from vsim.sim.config import SchedulerConfig\n"
        "from vsim.sim.run_io import write_run; from vsim.sim.summary import summarize\n"
        "from vsim.models.hardware import find_gpu; from vsim.models.load import load_step_model\n"
        "from vsim.models.model_spec import load_model; from vsim.traces.readers import read_trace\n"
        "from vsim.tests.reliability.determinism import digest\n"
        "trace = read_trace(sys.argv[1], limit=int(sys.argv[3]))\n"
        "steps = load_step_model(gpu=find_gpu('a100'), model=load_model(sys.argv[4]))\n"
        "run = simulate(trace, SchedulerConfig(num_gpu_blocks=3000), steps, engine=sys.argv[2])\n"
        "folder = Path(tempfile.mkdtemp()) / 'r'\n"
        "write_run(run, folder, summarize(run)); print(digest(folder))\n"
    )
    return {
        engine: subprocess.run(
            [sys.executable, "-c", code, str(TRACE), engine, str(limit), MODEL[1]],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for engine in ("fast", "reference")
    }


@contextlib.contextmanager
def dask_cluster() -> Iterator[str | None]:
    """Address of a cluster of two workers on this machine, in processes of its own; None without Dask."""
    if importlib.util.find_spec("distributed") is None:
        yield None
        return
    code = (
        "from distributed import LocalCluster\n"
        "if __name__ == '__main__':\n"
        "    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:\n"
        "        print(cluster.scheduler_address, flush=True); input()\n"
    )
    with tempfile.TemporaryDirectory() as name:
        script = Path(name) / "cluster.py"
        script.write_text(code)
        with subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None and process.stdin is not None
            yield process.stdout.readline().strip()
            process.stdin.write("\n")
            process.stdin.flush()


def sweeps(folder: Path, limit: int) -> dict[str, str]:
    """Digest of a sweep's table by who simulated its points."""
    ways: dict[str, list[str]] = {
        "one process": ["--jobs", "1"],
        "two processes (loky)": ["--jobs", "2"],
    }
    found = {}
    with dask_cluster() as address:
        if address is not None:
            ways["a Dask cluster of two"] = [
                "--backend",
                "dask",
                "--address",
                address,
                "--jobs",
                "2",
            ]
        for number, (words, more) in enumerate(ways.items()):
            out = folder / f"sweep{number}" / "t.parquet"
            vary = ["--vary", "max_num_seqs=8,64", "--vary", "block_size=16,32"]
            what = ["sweep", str(TRACE), *MODEL, *vary, "--limit", str(limit)]
            vsim([*what, "--out", str(out), *more], {})
            found[words] = digest(out)
    return found


def main() -> int:
    limit = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    equal = True
    with tempfile.TemporaryDirectory(prefix="vsim-same-bytes-") as name:
        folder = Path(name)
        kinds = {
            "replay": replays(folder, limit),
            "path": paths(min(limit, 500)),
            "sweep": sweeps(folder, limit // 4),
        }
    for kind, found in kinds.items():
        for words, value in found.items():
            print(f"{kind:8} {words:24} {value}")
        equal &= len(set(found.values())) == 1
    print("equal in every byte" if equal else "NOT EQUAL")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
