"""A run on disk: one folder, written whole or not at all, read back without loss."""

from __future__ import annotations

import ctypes
import json
import math
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vsim.errors import UserError
from vsim.sim.run import (
    OPTIONAL_REQUEST_COLUMNS,
    OPTIONAL_STEP_COLUMNS,
    REQUEST_COLUMNS,
    STATUS_NAMES,
    STEP_COLUMNS,
    Column,
    Run,
    RunEvent,
)
from vsim.sim.summary import SCHEMA as SUMMARY_SCHEMA
from vsim.sim.summary import summary_json
from vsim.traces.arrow import to_arrow, to_numpy

SCHEMA = "vsim/run/1"
RUN_JSON = "run.json"
SUMMARY_JSON = "summary.json"
REQUESTS = "requests.parquet"
TIMELINE = "timeline.parquet"
ITL = "itl.parquet"
PREEMPTIONS = "preemptions.parquet"  # only where they were recorded
SPAN_COLUMNS = {"request": "int64", "out_ns": "int64", "back_ns": "int64"}
REPORT = "report.html"
# A few kilobytes of Parquet can claim billions of equal rows. A run's rows are numbered and timed: they take bytes.
MAX_ROWS_BESIDE, MAX_ROWS_PER_BYTE = 1_000_000, 64


def write_run(
    run: Run,
    folder: str | os.PathLike[str],
    summary: Mapping[str, Any],
    report: bool = True,
    overwrite: bool = True,
) -> None:
    """Write `run` as a folder: run.json, summary.json, three Parquet files and, with `report`, report.html.

    Everything is built in a sibling folder and renamed at the end, so `folder` is either whole or as it was
    before. The same run gives the same bytes. Raises UserError if `folder` exists and is not a vsim run
    (or is one, without `overwrite`), or if the disk refuses.
    """
    target = Path(folder)
    check_target(target, overwrite)
    try:
        parent = target.absolute().parent
        parent.mkdir(parents=True, exist_ok=True)
        # Beside the target, so that the last step is a rename within one file system.
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.vsim-", dir=parent))
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror or error}") from error
    try:
        temporary.chmod(0o777 & ~_umask())
        _write_files(run, temporary, summary, report)
        _move_into_place(temporary, target)
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_target(folder: str | os.PathLike[str], overwrite: bool = True) -> None:
    """Raises UserError if a run may not be written to `folder`. Call it before a long simulation."""
    target = Path(folder)
    if not target.name or target.name in {".", ".."}:
        raise UserError(f"output folder {target}: give the name of a new folder")
    if not target.exists() and not target.is_symlink():
        return
    if not target.is_dir() or target.is_symlink():
        raise UserError(f"output folder {target} exists and is not a folder; choose another name")
    if not any(target.iterdir()):
        return
    if not is_run(target):
        raise UserError(
            f"output folder {target} exists and is not a vsim run; choose another name or remove it"
        )
    if not overwrite:
        raise UserError(f"output folder {target} already holds a run; choose another name")


def is_run(folder: str | os.PathLike[str]) -> bool:
    """Does `folder` hold a run of vsim's, of whatever schema version?"""
    try:
        # The schema stands in the first bytes: a huge file of something else isn't read for this.
        with (Path(folder) / RUN_JSON).open(encoding="utf-8") as file:
            head = file.read(200)
    except (OSError, UnicodeDecodeError):
        return False
    return '"schema": "vsim/run/' in head


def read_run(folder: str | os.PathLike[str]) -> Run:
    """The run that `write_run` stored in `folder`; equal to it in every column and field.

    Raises UserError if the folder is not a run, is of another schema, or is damaged.
    """
    base = Path(folder)
    head = _read_head(base)
    requests = _read_columns(base / REQUESTS, REQUEST_COLUMNS, OPTIONAL_REQUEST_COLUMNS)
    steps = _read_columns(base / TIMELINE, STEP_COLUMNS, OPTIONAL_STEP_COLUMNS)
    itl = _read_columns(base / ITL, {"itl_ns": "int64", "count": "int64"})
    _check_columns(base / REQUESTS, requests)
    _check_columns(base / TIMELINE, steps)
    if len(itl["count"]) and (itl["count"].min() < 0 or (np.diff(itl["itl_ns"]) <= 0).any()):
        raise UserError(f"{base / ITL}: not distinct ascending gaps with their counts")

    spans = None
    if (base / PREEMPTIONS).exists():
        columns = _read_columns(base / PREEMPTIONS, SPAN_COLUMNS)
        _check_columns(base / PREEMPTIONS, columns)
        spans = np.column_stack([columns[name] for name in SPAN_COLUMNS])
        rows, out, back = spans.T
        if len(rows) and (
            rows.min() < 0 or rows.max() >= len(requests["request"]) or (back < out).any()
        ):
            raise UserError(
                f"{base / PREEMPTIONS}: a preemption of no request, or one that ends too early"
            )

    def field(name: str, kind: type, each: type | None = None) -> Any:
        value = head.get(name)
        inner = list(value.values()) if isinstance(value, dict) else (value or ())
        # bool is an int to Python, but not a count to us.
        fits = isinstance(value, kind) and not (kind is int and isinstance(value, bool))
        if not fits or (each is not None and not all(type(item) is each for item in inner)):
            raise UserError(f"{base / RUN_JSON}: {name} is missing or of the wrong type")
        return value

    if head.get("origin") not in ("simulated", "measured"):
        raise UserError(f"{base / RUN_JSON}: origin {head.get('origin')!r} is not known")
    if head.get("ended_early") is not None:
        field("ended_early", str)
    for name in ("block_size", "num_gpu_blocks", "end_ns"):
        if not 0 <= field(name, int) < 1 << 62:
            raise UserError(f"{base / RUN_JSON}: {name}={head[name]} is out of range")
    return Run(
        origin=head["origin"],
        requests=requests,
        steps=steps,
        itl_ns=itl["itl_ns"],
        itl_count=itl["count"],
        block_size=head["block_size"],
        num_gpu_blocks=head["num_gpu_blocks"],
        reasons=tuple(field("reasons", list, str)),
        tenant_names=tuple(field("tenant_names", list, str)),
        config=field("config", dict),
        provenance=field("provenance", dict),
        assumptions=tuple(field("assumptions", list, str)),
        counters=field("counters", dict, int),
        preemption_spans=spans,
        events=_read_events(base, head.get("events", [])),
        end_ns=head["end_ns"],
        ended_early=head["ended_early"] if head.get("ended_early") is not None else None,
    )


def read_summary(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The stored summary.json. Raises UserError if there is none."""
    path = Path(folder) / SUMMARY_JSON
    return _load_json(path)


def stored_summary(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The summary of a run folder as it was asked for, with percentiles, limits, advice; else nothing."""
    if not Path(folder).is_dir():
        return {}
    stored = read_summary(folder)
    return stored if stored.get("schema") == SUMMARY_SCHEMA else {}


def run_json(run: Run) -> str:
    """run.json: everything but the columns, sorted, without dates or paths. The schema comes first."""
    body: dict[str, Any] = {
        "origin": run.origin,
        "block_size": run.block_size,
        "num_gpu_blocks": run.num_gpu_blocks,
        "reasons": list(run.reasons),
        "tenant_names": list(run.tenant_names),
        "config": run.config,
        "provenance": run.provenance,
        "assumptions": list(run.assumptions),
        "counters": run.counters,
        "end_ns": run.end_ns,
        "ended_early": run.ended_early,
    }
    if run.events:
        body["events"] = [[e.at_ns, e.kind, e.replica, e.text] for e in run.events]
    text = json.dumps(
        _json_ready(body), indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False
    )
    return '{\n "schema": "' + SCHEMA + '",' + text[1:] + "\n"


def _read_events(base: Path, rows: Any) -> tuple[RunEvent, ...]:
    """Events as run.json tells them: [at_ns, kind, replica, text]."""
    fits = isinstance(rows, list) and all(
        isinstance(row, list)
        and [type(item) for item in row] == [int, str, int, str]
        and -1 <= row[0] < 1 << 62
        and -1 <= row[2] < 1 << 31
        for row in rows
    )
    if not fits:
        raise UserError(f"{base / RUN_JSON}: events are not [at_ns, kind, replica, text]")
    return tuple(RunEvent(*row) for row in rows)


def _json_ready(value: Any) -> Any:
    """numpy's scalars as Python's; infinities and NaN, which JSON has not, as the words "inf" and "nan"."""
    if isinstance(value, Mapping):
        return {str(key): _json_ready(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_ready(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _write_files(run: Run, folder: Path, summary: Mapping[str, Any], report: bool) -> None:
    (folder / RUN_JSON).write_text(run_json(run), encoding="utf-8")
    (folder / SUMMARY_JSON).write_text(summary_json(summary), encoding="utf-8")
    _write_columns(folder / REQUESTS, run.requests)
    _write_columns(folder / TIMELINE, run.steps)
    _write_columns(folder / ITL, {"itl_ns": run.itl_ns, "count": run.itl_count})
    if run.preemption_spans is not None:
        columns = dict(zip(SPAN_COLUMNS, run.preemption_spans.T, strict=True))
        _write_columns(
            folder / PREEMPTIONS, {k: np.ascontiguousarray(v) for k, v in columns.items()}
        )
    if report:
        from vsim.sim.report import render_report

        (folder / REPORT).write_text(render_report(run, summary), encoding="utf-8")


def _move_into_place(temporary: Path, target: Path) -> None:
    """`target` becomes the new folder in one step; what it held before is left in `temporary`'s place."""
    if not target.exists():
        temporary.rename(target)
        return
    if _exchange(temporary, target):
        return
    # No atomic exchange on this system: keep the earlier run aside until the new one stands.
    aside = temporary.with_name(temporary.name + ".old")
    target.rename(aside)
    try:
        temporary.rename(target)
    except OSError:
        if not target.exists():
            aside.rename(target)
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Linux's renameat2(RENAME_EXCHANGE): a kill at any moment leaves a whole run. False: not to be had."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError, TypeError):
        return False
    at_cwd, exchange = -100, 2
    done = renameat2(at_cwd, os.fsencode(one), at_cwd, os.fsencode(other.absolute()), exchange)
    return bool(done == 0)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _write_columns(path: Path, columns: Mapping[str, Column]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({name: to_arrow(column) for name, column in columns.items()})
    # Fixed options: the bytes must not change with a library's defaults.
    pq.write_table(
        table,
        path,
        compression="zstd",
        compression_level=3,
        version="2.6",
        data_page_version="1.0",
        row_group_size=1 << 20,
        use_dictionary=False,
        write_statistics=True,
        store_schema=False,
    )


def _read_columns(
    path: Path, needed: Mapping[str, str], optional: Mapping[str, str] | None = None
) -> dict[str, Column]:
    """Columns of a Parquet file: all of `needed`, in that order and dtype, then any others there are."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    optional = optional or {}
    try:
        with path.open("rb") as file:
            parquet = pq.ParquetFile(file)
            rows, size = parquet.metadata.num_rows, path.stat().st_size
            if rows > MAX_ROWS_BESIDE + MAX_ROWS_PER_BYTE * size:
                raise UserError(f"{path}: claims {rows} rows in {size} bytes, which no run has")
            table = parquet.read()
    except FileNotFoundError:
        raise UserError(f"{path} is missing: the run folder is incomplete") from None
    except (OSError, ValueError, MemoryError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path} cannot be read: {reason}") from error
    columns: dict[str, Column] = {}
    for name in [*needed, *(n for n in table.column_names if n not in needed)]:
        if name not in table.column_names:
            raise UserError(f"{path}: column {name} is missing; this is not a {SCHEMA} file")
        values = to_numpy(table.column(name))
        wanted = needed.get(name) or optional.get(name)
        if values.dtype.kind not in "iu" and wanted is not None and len(values):
            raise UserError(f"{path}: column {name} holds {values.dtype}, expected {wanted}")
        columns[name] = np.ascontiguousarray(values, dtype=wanted)
    return columns


def _check_columns(path: Path, columns: Mapping[str, Column]) -> None:
    """Raises UserError for values no run has: they would come out as nonsense far from here."""
    for name, column in columns.items():
        if column.dtype.kind not in "iu" or not len(column):
            continue
        low, high = int(column.min()), int(column.max())
        # Sums over a run must stay within int64.
        lowest, highest = -1, 1 << (60 if name.endswith("_ns") else 40)
        if name == "status":
            lowest, highest = 0, len(STATUS_NAMES) - 1
        elif name == "priority":
            lowest = -(1 << 62)
        if low < lowest or high > highest:
            raise UserError(f"{path}: column {name} holds {low if low < lowest else high}")


def _read_head(base: Path) -> dict[str, Any]:
    head = _load_json(base / RUN_JSON)
    schema = head.get("schema")
    if schema != SCHEMA:
        raise UserError(
            f"{base / RUN_JSON}: schema {schema!r} is not {SCHEMA!r}, which this vsim reads; "
            "run the simulation again or use the vsim that wrote it"
        )
    return head


def _load_json(path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path.parent} is not a vsim run: it has no {path.name}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(loaded).__name__}")
    return loaded
