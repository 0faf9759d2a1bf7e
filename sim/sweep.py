"""A sweep: many points of one space, each simulated once, to one Parquet table.

Finished points go to a journal beside the table; the table is put together from it in point order, so its
bytes depend on neither the order of completion, nor the number of jobs, nor interruptions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vsim import __version__
from vsim.errors import UserError
from vsim.sim.cost import COST_KEYS, Prices, cost_of
from vsim.sim.fast.several import load_for
from vsim.sim.sweep_journal import journal_path, open_journal
from vsim.sim.sweep_point import DONE, Asked, point_key, run_point, trace_sha256
from vsim.sim.sweep_space import Point, dimensions
from vsim.traces.trace import Trace

SCHEMA = "vsim/sweep/1"
BACKENDS = ("loky", "threading", "dask", "ray")
Result = dict[str, Any]
# (points done, points in all, points that were already in the journal)
OnPoint = Callable[[int, int, int], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Workers:
    """Who simulates: `jobs` processes here, or a cluster that joblib reaches (`address`)."""

    jobs: int | None = 1  # None: the backend's own choice
    backend: str = "loky"
    address: str | None = None


def sweep(
    trace: Trace,
    points: Sequence[Point],
    out: str | Path,
    *,
    asked: Asked | None = None,
    workers: Workers | None = None,
    prices: Prices | None = None,
    on_point: OnPoint | None = None,
) -> dict[str, int]:
    """Simulate `points` and write the table `out`; how many are done and how many refused.

    Points whose result the journal already has are not simulated again. Raises UserError before any work
    if `out` is something else than a sweep's table, another process is writing it, the trace is empty, a
    price is missing, or the backend cannot be had.
    """
    asked, workers, table = asked or Asked(), workers or Workers(), Path(out)
    _check_target(table)
    check_workers(workers)
    if not points:
        raise UserError("nothing to sweep: give --vary or --grid")
    if len(trace) == 0:
        raise UserError(f"{trace.source.name}: no requests to replay")
    for gpu in dict.fromkeys(str(point["gpu"]) for point in points):
        if prices is not None:
            prices.of(gpu)
    trace_hash = trace_sha256(trace)
    keys = [point_key(point, trace_hash, asked) for point in points]
    with open_journal(table) as journal:
        work = {
            key: point
            for key, point in zip(keys, points, strict=True)
            if key not in journal.results
        }
        kept = sum(key in journal.results for key in keys)
        times = Counter(keys)
        done = kept
        if on_point is not None:
            on_point(done, len(points), kept)
        for key, result in _results(trace, work, asked, workers):
            journal.append(key, result)
            done += times[key]
            if on_point is not None:
                on_point(done, len(points), kept)
        rows = [journal.results[key] for key in keys]
        _write_table(table, _table(points, rows, trace, trace_hash, prices))
    finished = sum(row["status"] == DONE for row in rows)
    return {"done": finished, "refused": len(rows) - finished, "from_journal": kept}


def _job(key: str, trace: Trace, point: Point, asked: Asked, alike: int = 1) -> tuple[str, Result]:
    """One point; `alike`: how many of them this process may expect to simulate."""
    load_for(trace, alike)
    return key, run_point(trace, point, asked)


def _end_with(owner: int) -> None:
    """Let this worker process, which is just starting, end with `owner`, the process that started it.

    loky's workers outlive a parent that was killed -9 by minutes: nobody would read what they compute.
    """

    def watch() -> None:
        while os.getppid() == owner:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _results(
    trace: Trace, work: Mapping[str, Point], asked: Asked, workers: Workers
) -> Iterator[tuple[str, Result]]:
    """(key, result) of each point, as they are finished."""
    if not work:
        return
    local = workers.backend in ("loky", "threading")
    if local and min(workers.jobs or 1, len(work)) == 1:
        for key, point in work.items():
            yield _job(key, trace, point, asked, len(work))
        return
    import joblib

    with joblib_backend(workers) as jobs:
        # One point a task: what is finished reaches the journal at once.
        common: dict[str, Any] = {"n_jobs": jobs, "batch_size": 1}
        each = len(work) // max(joblib.effective_n_jobs(jobs), 1)
        tasks = [
            joblib.delayed(_job)(key, trace, point, asked, each) for key, point in work.items()
        ]
        try:
            yield from _unordered(tasks, common)
        except UserError:
            raise
        except _worker_deaths() as error:
            raise UserError(
                f"a worker process was killed ({type(error).__name__}: out of memory?); finished points are "
                "kept: run again, with fewer --jobs"
            ) from None
        except Exception as error:
            if local:
                raise  # ours to mend, not the user's
            said = str(error).splitlines()[0] if str(error) else ""
            raise UserError(
                f"{workers.backend} failed ({type(error).__name__}: {said}); finished points are kept: "
                "run again to go on"
            ) from None


def _unordered(tasks: Sequence[Any], common: dict[str, Any]) -> Iterator[tuple[str, Result]]:
    import joblib

    try:
        found = joblib.Parallel(return_as="generator_unordered", **common)(tasks)
    except ValueError:
        # A backend (Ray's) that only hands back whole lists: a few points at a time.
        yield from _in_lists(tasks, common)
    else:
        yield from found


def _in_lists(tasks: Sequence[Any], common: dict[str, Any]) -> Iterator[tuple[str, Result]]:
    import joblib

    size = 4 * max(joblib.effective_n_jobs(common["n_jobs"]), 1)
    for start in range(0, len(tasks), size):
        yield from joblib.Parallel(**common)(tasks[start : start + size])


def _worker_deaths() -> tuple[type[BaseException], ...]:
    from joblib.externals.loky.process_executor import BrokenProcessPool

    return (BrokenProcessPool,)


def check_workers(workers: Workers) -> None:
    """Raises UserError if the backend is unknown, not installed, or told an address it has no use for."""
    name = workers.backend
    if name not in BACKENDS:
        raise UserError(f"backend={name!r} is not known; known are {', '.join(BACKENDS)}")
    if name in ("loky", "threading"):
        if workers.address is not None:
            raise UserError(f"--address is for dask and ray; {name} works on this machine")
        return
    needs = {"dask": ("distributed", "dask distributed"), "ray": ("ray", '"ray[default]"')}
    module, packages = needs[name]
    if importlib.util.find_spec(module) is None:
        raise UserError(f"--backend {name} needs a library: pip install {packages}, or use loky")
    if name == "dask" and not re.fullmatch(r"(\w+://)?[^/\s]+:\d+", workers.address or ""):
        raise UserError("--backend dask needs --address, the scheduler's, e.g. tcp://host:8786")


def _join_ray(address: str | None) -> None:
    """Tell joblib of Ray, and connect first: its backend asks Ray for the number of CPUs before it does."""
    import ray
    from ray.util.joblib import register_ray

    if not ray.is_initialized():
        try:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except Exception as error:  # whatever Ray's client, its RPC layer or its raylet make of it
            raise _unreachable("ray", address, error) from None
    register_ray()


def _unreachable(backend: str, address: str | None, error: Exception) -> UserError:
    where = f" at {address}" if address else ""
    said = str(error).splitlines()[0] if str(error) else type(error).__name__
    return UserError(f"cannot reach {backend}{where}: {said}")


@contextlib.contextmanager
def joblib_backend(workers: Workers) -> Iterator[int]:
    """joblib told where to work; gives the n_jobs to ask for. Raises UserError if nobody answers there."""
    import joblib

    options: dict[str, Any] = {}
    if workers.backend == "ray":
        _join_ray(workers.address)
    if workers.backend == "loky":
        options |= {"initializer": _end_with, "initargs": (os.getpid(),)}
    if workers.backend == "dask":
        options["scheduler_host"] = workers.address
    jobs = workers.jobs if workers.jobs is not None else -1
    try:
        try:
            context = joblib.parallel_config(backend=workers.backend, n_jobs=jobs, **options)
        except TypeError:
            if workers.backend != "loky":
                raise
            # joblib before 1.5 takes no initializer: idle workers of a killed sweep stay for minutes.
            context = joblib.parallel_config(backend="loky", n_jobs=jobs)
    except (OSError, ValueError, RuntimeError) as error:
        raise _unreachable(workers.backend, workers.address, error) from None
    with context:
        yield jobs


def _check_target(table: Path) -> None:
    if table.is_dir() or not table.name:
        raise UserError(f"--out {table} is a folder: give the name of a file, e.g. sweep.parquet")
    if not table.exists():
        return
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        told = pq.read_schema(table).metadata or {}
    except (OSError, pa.ArrowException):
        told = {}
    if told.get(b"vsim") is None or SCHEMA not in told[b"vsim"].decode(errors="replace"):
        raise UserError(f"--out {table} exists and is not a table of vsim sweep: choose another")


def _table(
    points: Sequence[Point],
    results: Sequence[Result],
    trace: Trace,
    trace_hash: str,
    prices: Prices | None,
) -> Any:
    """Point by point: settings, status and reason, GPUs, the summary's numbers, cost, assumptions."""
    import pyarrow as pa

    kinds: dict[type, Any] = {
        bool: pa.bool_(),
        int: pa.int64(),
        float: pa.float64(),
        str: pa.string(),
    }
    known = dimensions()
    names = [name for name in known if any(name in point for point in points)]
    numbers = list(dict.fromkeys(name for row in results for name in row.get("numbers", {})))

    def number(row: Result, name: str) -> Any:
        return row.get("numbers", {}).get(name)

    columns: dict[str, Any] = {
        "point": pa.array(range(len(points)), pa.int64()),
        "status": pa.array([row["status"] for row in results], pa.string()),
        "reason": pa.array([row.get("reason") for row in results], pa.string()),
    }
    for name in names:
        # A setting that was left to vLLM shows what it was resolved to, where the summary knows.
        values = [
            point[name] if point.get(name) is not None else number(row, name)
            for point, row in zip(points, results, strict=True)
        ]
        columns[name] = pa.array(values, kinds[known[name]])
    columns["gpus"] = pa.array([row.get("gpus") for row in results], pa.int64())
    hours = [
        row["gpus"] * row["numbers"]["duration"] / 3600 if row["status"] == DONE else None
        for row in results
    ]
    columns["gpu_hours"] = pa.array(hours, pa.float64())
    for name in numbers:
        if name not in columns:
            values = [number(row, name) for row in results]
            whole = all(isinstance(value, int) for value in values if value is not None)
            some = any(value is not None for value in values)
            columns[name] = pa.array(values, pa.int64() if whole and some else pa.float64())
    if prices is not None:
        costs = [
            cost_of(prices, str(point["gpu"]), row["gpus"], row["numbers"]).as_dict()
            if row["status"] == DONE
            else {}
            for point, row in zip(points, results, strict=True)
        ]
        columns["currency"] = pa.array([prices.currency] * len(points), pa.string())
        for name in COST_KEYS:
            columns[name] = pa.array([cost.get(name) for cost in costs], pa.float64())
    columns["step_time"] = pa.array([row.get("step_time") for row in results], pa.string())
    columns["ended_early"] = pa.array([row.get("ended_early") for row in results], pa.string())
    columns["assumptions"] = pa.array(
        [row.get("assumptions") for row in results], pa.list_(pa.string())
    )
    told = {
        "schema": SCHEMA,
        "vsim_version": __version__,
        "trace": dataclasses.asdict(trace.source),
        "trace_sha256": trace_hash,
    }
    return pa.table(columns).replace_schema_metadata({"vsim": json.dumps(told, sort_keys=True)})


def _write_table(path: Path, table: Any) -> None:
    """`table` at `path`, whole or not at all."""
    import pyarrow.parquet as pq

    # One name, not a random one: what a kill leaves behind is overwritten, under the journal's lock.
    temporary = path.with_name(f".{path.name}.part")
    try:
        with temporary.open("wb") as file:
            pq.write_table(table, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UserError(
            f"cannot write {path}: {error.strerror or error}; the results are kept in {journal_path(path).name}"
        ) from None
