"""Our own Parquet, `vsim/trace/1`, and any Parquet file whose columns are named to us."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from vsim.traces.arrow import to_numpy
from vsim.traces.clock import MAX_NS, UNIT_NS
from vsim.traces.draft import MAX_TOKENS, Draft, choose_unit
from vsim.traces.files import TraceFile
from vsim.traces.options import Report
from vsim.traces.outcome import is_aborted
from vsim.traces.own_jsonl import SCHEMA, _header
from vsim.traces.trace import Int64Array

# A few kilobytes of Parquet can claim billions of equal values; nothing real comes near.
MAX_VALUES = 1_000_000_000
META_KEY = b"vsim_trace"


# On some damaged files pyarrow 26 leaves a C++ exception of this metadata uncaught, which ends the process.
_COUNT = """
import sys
import pyarrow.parquet as pq
m = pq.read_metadata(sys.argv[1])
groups, columns = range(m.num_row_groups), range(m.num_columns)
print(max((m.row_group(g).column(c).num_values for g in groups for c in columns), default=0))
"""


def _most_values(path: Path) -> int:
    """The most values that a column of a row group claims to hold, counted by a process that may die of it.

    Raises ValueError if it does.
    """
    count = subprocess.run(
        [sys.executable, "-I", "-c", _COUNT, str(path)], capture_output=True, text=True, check=False
    )
    if count.returncode or not count.stdout.strip().isdigit():
        raise ValueError("its column metadata contradicts itself")
    return int(count.stdout)


def read_parquet(file: TraceFile, report: Report, names: dict[str, str]) -> Draft:
    """Read Parquet columns named as ours, or as `names` says (ours -> the file's).

    Raises UserError for a damaged file, missing columns, or values that can't be (with their row number).
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {name: names.get(name, name) for name in _FIELDS}
    try:
        parquet = pq.ParquetFile(file.path)
        names_there = parquet.schema_arrow.names
        values = parquet.metadata.num_rows
        lists = any(
            parquet.schema.column(i).max_repetition_level for i in range(len(parquet.schema))
        )
        if lists and values <= MAX_VALUES:
            values = max(values, _most_values(file.path))
        if values > MAX_VALUES:
            report.fail(f"has more than {MAX_VALUES:,} rows or ids")
        schema = parquet.schema_arrow
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
        report.fail(_damaged(error))
    header: dict[str, Any] = {}
    raw = (schema.metadata or {}).get(META_KEY)
    if raw is not None:
        try:
            described = json.loads(raw)
        except (ValueError, RecursionError):
            described = None
        if not isinstance(described, dict) or "schema" not in described:
            report.fail(f"its {META_KEY.decode()} metadata is damaged")
        header = _header(described, report, 0)
    present = {ours: theirs for ours, theirs in columns.items() if theirs in names_there}
    missing = [columns[name] for name in ("input_tokens", "output_tokens") if name not in present]
    if "timestamp" not in present and "timestamp_ns" not in present:
        missing.append(columns["timestamp"])
    if missing:
        report.fail(
            f"has no column {', '.join(missing)}; its columns are {', '.join(names_there)[:300]}; "
            "name them with --map input_tokens=COLUMN"
        )

    def column_of(name: str) -> Any:
        """One column at a time: the whole table beside its copy in numpy would be twice the trace."""
        theirs = present[name]
        try:
            return parquet.read(columns=[theirs]).column(theirs)
        except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
            report.fail(_damaged(error))

    def whole(name: str, low: int, high: int) -> Int64Array:
        theirs, column = present[name], column_of(name)
        if column.null_count:
            report.fail(f"column {theirs} has {column.null_count} empty values")
        if pa.types.is_timestamp(column.type):
            column = column.cast(pa.timestamp("ns")).cast(pa.int64())
        if not pa.types.is_integer(column.type) and not pa.types.is_floating(column.type):
            report.fail(f"column {theirs} has type {column.type}, not numbers")
        values = to_numpy(column)
        if pa.types.is_floating(column.type):
            off = ~np.isfinite(values) | (values != np.round(values))
            if off.any():
                row = int(np.flatnonzero(off)[0])
                report.fail(f"row {row}: {theirs} is {values[row]}, not a whole number")
        off = (values < low) | (values > high)
        if off.any():
            row = int(np.flatnonzero(off)[0])
            report.fail(f"row {row}: {theirs} is {values[row]}, outside {low} to {high}")
        return _own(values)

    try:
        if "timestamp_ns" in present:
            time_ns = whole("timestamp_ns", 0, MAX_NS)
        else:
            time_ns = _seconds(
                column_of("timestamp"),
                present["timestamp"],
                report,
                "timestamp" in names,
            )
        draft = Draft(
            time_ns=time_ns,
            prompt=whole("input_tokens", 0, MAX_TOKENS),
            output=whole("output_tokens", 0, MAX_TOKENS),
            first_line=0,
        )
        if "max_tokens" in present:
            draft.max_tokens = whole("max_tokens", 0, MAX_TOKENS)
        if "priority" in present:
            draft.priority = whole("priority", -(2**31), 2**31 - 1).astype(np.int32)
        for name in ("tenant", "session"):
            if name in present:
                texts = ["" if v is None else str(v) for v in column_of(name).to_pylist()]
                if name == "tenant":
                    draft.tenants = texts
                else:
                    draft.sessions = texts
        if "aborted" in present:
            draft.aborted = np.asarray([v is True for v in column_of("aborted").to_pylist()])
        elif "status" in present:
            statuses = column_of("status").to_pylist()
            draft.aborted = np.asarray(
                [is_aborted(v, report, row) for row, v in enumerate(statuses)], dtype=bool
            )
        if draft.aborted is not None and not draft.aborted.any():
            draft.aborted = None
        if "after" in present:
            draft.after = whole("after", -1, max(len(time_ns) - 1, 0))
            if (draft.after >= np.arange(len(time_ns))).any():
                report.fail("column after: a turn can only follow an earlier row")
            draft.think_ns = (
                whole("think_ns", 0, MAX_NS)
                if "think_ns" in present
                else np.zeros_like(draft.after)
            )
        if "hash_ids" in present:
            _hash_ids(draft, column_of("hash_ids"), header, report)
    except pa.ArrowException as error:
        report.fail(f"holds values of an unexpected kind: {str(error).splitlines()[0][:200]}")
    for sentence in header.get("assumptions", []):
        report.assume(sentence)
    report.dropped.update(header.get("dropped", {}))
    draft.extra.update({name: header[name] for name in ("source", "origin_ns") if name in header})
    return draft


_FIELDS = (
    "timestamp",
    "timestamp_ns",
    "input_tokens",
    "output_tokens",
    "max_tokens",
    "priority",
    "tenant",
    "session",
    "status",
    "aborted",
    "after",
    "think_ns",
    "hash_ids",
)


def _damaged(error: BaseException) -> str:
    return (
        f"can't be read as Parquet: {str(error).splitlines()[0][:200] if str(error) else 'damaged'}"
    )


def _own(values: Any) -> Int64Array:
    """int64 that may be changed in place: a copy only of what Arrow still holds."""
    if values.dtype == np.int64 and values.flags.writeable:
        return np.ascontiguousarray(values)
    return np.array(values, dtype=np.int64)


def _seconds(column: Any, theirs: str, report: Report, mapped: bool) -> Int64Array:
    """A time column as ns: Arrow timestamps as they are, numbers in the declared unit, else seconds."""
    import pyarrow as pa

    if column.null_count:
        report.fail(f"column {theirs} has {column.null_count} empty values")
    if pa.types.is_timestamp(column.type):
        values = to_numpy(column.cast(pa.timestamp("ns")).cast(pa.int64()))
        if (values < 0).any() or (values > MAX_NS).any():
            report.fail(f"column {theirs} holds times before 1970 or beyond 2116")
        return _own(values)
    if not pa.types.is_integer(column.type) and not pa.types.is_floating(column.type):
        report.fail(f"column {theirs} has type {column.type}, not a time")
    values = to_numpy(column)
    if not np.isfinite(values).all() or (values < 0).any():
        row = int(np.flatnonzero(~np.isfinite(values) | (values < 0))[0])
        report.fail(f"row {row}: {theirs} is {values[row]}; times are finite and not negative")
    unit = choose_unit(
        report,
        documented=None if mapped else "s",
        whose=SCHEMA,
        integral=pa.types.is_integer(column.type),
        low=float(values.min()) if len(values) else 0.0,
        high=float(values.max()) if len(values) else 0.0,
        rows=len(values),
    )
    if len(values) and float(values.max()) * UNIT_NS[unit] > MAX_NS:
        report.fail(f"column {theirs} is out of range in {unit}; is --time-unit right?")
    if pa.types.is_integer(column.type):
        return np.ascontiguousarray(values).astype(np.int64) * UNIT_NS[unit]
    whole = np.floor(values)
    scale = UNIT_NS[unit]
    return whole.astype(np.int64) * scale + np.round((values - whole) * scale).astype(np.int64)


def _hash_ids(draft: Draft, column: Any, header: dict[str, Any], report: Report) -> None:
    import pyarrow as pa

    if not pa.types.is_list(column.type) and not pa.types.is_large_list(column.type):
        report.fail(f"column hash_ids has type {column.type}, not a list of integers")
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], column.type)
    lengths = np.asarray(
        array.value_lengths().fill_null(0).to_numpy(zero_copy_only=False), dtype=np.int64
    )
    flat = array.flatten()
    if flat.null_count or not pa.types.is_integer(flat.type):
        report.fail("column hash_ids holds something other than integers")
    size = report.options.hash_block_tokens or header.get("hash_block_tokens") or 16
    if (lengths > -(-draft.prompt // size)).any():
        row = int(np.flatnonzero(lengths > -(-draft.prompt // size))[0])
        report.fail(
            f"row {row}: has {lengths[row]} hash_ids, more than {draft.prompt[row]} prompt tokens have blocks of "
            f"{size}; --hash-block-tokens sets another block size"
        )
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    draft.prefix_arrays = (
        offsets,
        np.asarray(flat.cast(pa.int64()).to_numpy(zero_copy_only=False)),
    )
    draft.hash_block_tokens = size
