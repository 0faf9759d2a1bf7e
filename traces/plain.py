"""Any CSV, JSON lines or Parquet whose columns say what they hold, by usual names or by --map."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vsim.traces.csv_blocks import header_of
from vsim.traces.csv_table import CsvSpec, read_csv
from vsim.traces.draft import Draft
from vsim.traces.files import TraceFile
from vsim.traces.jsonl import read_rows
from vsim.traces.options import Report
from vsim.traces.outcome import attach_aborted, is_aborted
from vsim.traces.own_jsonl import read_jsonl
from vsim.traces.own_parquet import read_parquet

FIELDS = (
    "timestamp",
    "timestamp_ns",
    "input_tokens",
    "output_tokens",
    "max_tokens",
    "priority",
    "tenant",
    "session",
    "status",
    "hash_ids",
)

# Names under which tools and access logs write our fields; lower case.
ALIASES: dict[str, tuple[str, ...]] = {
    "timestamp": (
        "timestamp",
        "arrival",
        "arrival_time",
        "arrived_at",
        "arrival_s",
        "arrival_ts",
        "time",
        "ts",
        "datetime",
        "date_time",
        "date",
    ),
    "timestamp_ns": ("timestamp_ns", "arrival_ns", "arrival_time_ns"),
    "input_tokens": (
        "input_tokens",
        "prompt_tokens",
        "prompt_len",
        "input_len",
        "input_length",
        "context_tokens",
        "num_prompt_tokens",
        "prompt_length",
    ),
    "output_tokens": (
        "output_tokens",
        "completion_tokens",
        "generated_tokens",
        "output_len",
        "output_length",
        "response_tokens",
        "generation_tokens",
        "num_generation_tokens",
    ),
    "max_tokens": ("max_tokens", "max_completion_tokens", "max_output_tokens"),
    "tenant": ("tenant", "user", "user_id", "client_id", "customer"),
    "session": ("session", "session_id", "conversation_id"),
    "status": ("status", "status_code", "finish_reason"),
    "priority": ("priority",),
    "hash_ids": ("hash_ids",),
}


def guess_names(header: Sequence[str]) -> dict[str, str]:
    """Our field -> the file's column, as far as usual names tell."""
    by_lower = {name.lower(): name for name in reversed(header)}
    found = {}
    for ours, names in ALIASES.items():
        hit = next((by_lower[name] for name in names if name in by_lower), None)
        if hit is not None:
            found[ours] = hit
    return found


def can_guess(header: Sequence[str]) -> bool:
    found = guess_names([str(name) for name in header])
    return "input_tokens" in found and ("output_tokens" in found or "max_tokens" in found)


def _names(header: Sequence[str], report: Report) -> dict[str, str]:
    """Declared names first, usual names for the rest. Raises UserError for a name that isn't there."""
    declared = report.options.column_map
    for ours, theirs in declared.items():
        if ours not in FIELDS:
            report.fail(f"--map {ours}={theirs}: {ours!r} is not one of {', '.join(FIELDS)}")
        if theirs not in header:
            report.fail(
                f"--map {ours}={theirs}: there is no column {theirs!r}; there are {', '.join(header)[:300]}",
                1,
            )
    guessed = {
        ours: theirs
        for ours, theirs in guess_names(header).items()
        if theirs not in declared.values()
    }
    if "timestamp" in declared:
        guessed.pop("timestamp_ns", None)
    if "timestamp_ns" in declared or "timestamp_ns" in guessed:
        guessed.pop("timestamp", None)
    names = {**guessed, **declared}
    told = [
        f"{theirs} as {ours}"
        for ours, theirs in names.items()
        if ours not in declared and ours != theirs
    ]
    if told:
        report.assume(f"Columns are read by their usual meaning: {', '.join(told)}.")
    return names


def read_mapped_csv(file: TraceFile, report: Report) -> Draft:
    names = _names(header_of(file.head), report)
    unit = None
    if "timestamp_ns" in names:
        names["timestamp"], unit = names.pop("timestamp_ns"), "ns"
    _require(names, report)
    names.pop("hash_ids", None)
    if "output_tokens" not in names:
        return _without_outputs(file, names, unit, report)
    draft = read_csv(file, CsvSpec("the file", names, unit=unit or _unit_in_name(names)), report)
    _statuses(draft, report)
    return draft


def _unit_in_name(names: dict[str, str]) -> str | None:
    """A column called start_ms counts milliseconds."""
    tail = names.get("timestamp", "").lower().rpartition("_")[2]
    return {"ns": "ns", "us": "us", "ms": "ms", "s": "s", "sec": "s", "seconds": "s"}.get(tail)


def _require(names: dict[str, str], report: Report) -> None:
    for needed in ("input_tokens", "timestamp"):
        if needed not in names:
            if needed == "timestamp":
                report.oddity(
                    "The file has no arrival times: all requests are sent at 0 (give them a rate to space them)."
                )
                continue
            report.fail(
                f"no column is known to hold {needed}; name it with --map {needed}=COLUMN", 1
            )


def _without_outputs(
    file: TraceFile, names: dict[str, str], unit: str | None, report: Report
) -> Draft:
    """Only a cap, or nothing, tells the output length: what the options say to make of that."""
    model = report.options.output_tokens_model
    if model == "upper-bound" and "max_tokens" in names:
        report.assume(
            f"Output lengths are upper bounds: the file has only {names['max_tokens']}, the client's cap."
        )
        draft = read_csv(
            file,
            CsvSpec("the file", {**names, "output_tokens": names["max_tokens"]}, unit=unit),
            report,
        )
    elif isinstance(model, int):
        report.assume(f"Rows without an output length get {model} output tokens, as asked.")
        draft = read_csv(file, CsvSpec("the file", names, unit=unit), report)
        draft.output = np.full(len(draft.prompt), model, dtype=np.int64)
    else:
        cap = f" ({names['max_tokens']} is a cap, not a length)" if "max_tokens" in names else ""
        report.fail(
            f"no column is known to hold output_tokens{cap}; name it with --map output_tokens=COLUMN, or pass "
            "--output-tokens N or upper-bound",
            1,
        )
    _statuses(draft, report)
    return draft


def _statuses(draft: Draft, report: Report) -> None:
    statuses = draft.extra.get("status")
    if not isinstance(statuses, list):
        return
    aborted = [is_aborted(text, report, draft.line(row)) for row, text in enumerate(statuses)]
    attach_aborted(draft, aborted, report)


def read_mapped_jsonl(file: TraceFile, report: Report) -> Draft:
    sample: dict[str, None] = {}
    for _, row in _first_rows(file):
        sample.update(dict.fromkeys(row))
    names = _names(list(sample), report)
    if "input_tokens" not in names:
        report.fail(
            "no field is known to hold input_tokens; name it with --map input_tokens=FIELD", 1
        )
    return read_jsonl(file, report, names, unit=None)


def _first_rows(file: TraceFile) -> list[tuple[int, dict[str, object]]]:
    """A few rows to learn the fields from, without complaints; the real reading makes those."""
    from vsim.traces.options import ReadOptions

    quiet = Report(file.name, ReadOptions(on_error="skip"))
    rows = []
    for item in read_rows(file, quiet):
        rows.append(item)
        if len(rows) >= 100:
            break
    return rows


def read_mapped_parquet(file: TraceFile, report: Report) -> Draft:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        header = pq.read_schema(file.path).names
    except (pa.ArrowException, OSError, ValueError):
        return read_parquet(file, report, {})  # which says what is wrong with it
    return read_parquet(file, report, _names(header, report))
