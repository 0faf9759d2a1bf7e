"""Our own JSON lines, `vsim/trace/1`: one request a line, an optional first line that describes the file."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import numpy as np

from vsim.traces import jsonl
from vsim.traces.clock import (
    MAX_NS,
    TimeError,
    as_float,
    datetime_to_ns,
    looks_like_datetime,
    names_zone,
)
from vsim.traces.draft import MAX_TOKENS, Draft, choose_unit, times_from_numbers
from vsim.traces.files import TraceFile
from vsim.traces.options import Report, RowError
from vsim.traces.outcome import attach_aborted, attach_caps, is_aborted, output_tokens
from vsim.traces.plain_rows import PlainRows, read_plain_rows
from vsim.traces.prefix import fit_block_tokens
from vsim.traces.trace import Int64Array

SCHEMA = "vsim/trace/1"
NO_IDS: list[int] = []  # one for all rows without: a million empty lists cost more than the rows
DEFAULT_HASH_BLOCK_TOKENS = 16  # vLLM's own block size
_LARGEST = {"timestamp_ns": MAX_NS, "input_tokens": MAX_TOKENS, "output_tokens": MAX_TOKENS}


def read_own_jsonl(file: TraceFile, report: Report) -> Draft:
    """Read `vsim/trace/1` lines. Fields are described in docs/traces.md."""
    return read_jsonl(file, report, {})


def read_jsonl(
    file: TraceFile, report: Report, names: dict[str, str], unit: str | None = "s"
) -> Draft:
    """JSON lines whose fields are called as `names` says (ours -> the file's), or as ours where it is silent.

    `unit`: of numeric timestamps; None if nobody documents it. Dates as text are read as dates.
    """

    def of(ours: str) -> str:
        return names.get(ours, ours)

    if not names and (report.options.hash_block_tokens or 1) >= 1:
        plain_rows = read_plain_rows(file, report, _LARGEST, "output_tokens", _is_header)
        if plain_rows is not None:
            return _plain_draft(plain_rows, report)
    styles: dict[bool, int] = {}  # do dates name a zone -> first such line
    f_time, f_ns, f_in, f_out, f_max = (
        of(name)
        for name in ("timestamp", "timestamp_ns", "input_tokens", "output_tokens", "max_tokens")
    )
    f_ids, f_tenant, f_session, f_status = (
        of(name) for name in ("hash_ids", "tenant", "session", "status")
    )
    times: list[int | Decimal] = []
    in_ns: list[bool] = []
    prompt: list[int] = []
    output: list[int] = []
    caps: list[int] = []
    lines: list[int] = []
    ids: list[list[int]] = []
    rest: list[tuple[int, str, str, bool, int, int]] = []
    header: dict[str, Any] = {}
    first = True
    served = 0
    timeless: bool | None = None  # the first row decides whether the file has arrival times
    plain = (0, "", "", False, -1, 0)
    for line, row in jsonl.read_rows(file, report):
        if first:
            first = False
            if "schema" in row:
                header = _header(row, report, line)
                continue
        if len(row) == 3 and not timeless and _is_plain(row, f_ns, f_in, f_out):
            # Most rows of a long file: three sound integers and nothing else to look at.
            times.append(row[f_ns])
            in_ns.append(True)
            prompt.append(row[f_in])
            output.append(row[f_out])
            caps.append(-1)
            lines.append(line)
            ids.append(NO_IDS)
            rest.append(plain)
            served += row[f_out] > 0
            if report.enough(served):
                break
            continue
        try:
            block = row.get("hash_block_tokens")
            if block is not None:
                _note_block(header, block)
            has_ns = f_ns in row
            check = jsonl.Checks()
            if timeless is None:
                timeless = not has_ns and row.get(f_time) is None and f_time not in row
                if timeless:
                    report.oddity(jsonl.NO_ARRIVALS)
            time: int | Decimal
            if timeless:
                time = check(_no_time, row, f_ns, f_time)
            else:
                time = check(jsonl.number, row, f_ns) if has_ns else check(_time, row, f_time)
            length = check(jsonl.tokens, row, f_in, report, line)
            generated = check(output_tokens, row, f_out, f_max, report, line)
            cap = -1 if row.get(f_max) is None else check(jsonl.tokens, row, f_max, report, line)
            content = check(jsonl.ids, row, f_ids)
            check.done()
            if time < 0 and not has_ns:  # a date
                styles.setdefault(names_zone(row[f_time]), line)
            if "first_token" in row:
                _check_skew(row, time, report, line)
            if has_ns and (not isinstance(time, int) or time > MAX_NS):
                raise RowError(f"{f_ns} is {time}, not a whole number of ns within 146 years")
            if (
                "priority" in row
                or f_tenant in row
                or f_session in row
                or f_status in row
                or "after" in row
                or "aborted" in row
            ):
                extra = (
                    jsonl.integer(row, "priority", 0),
                    jsonl.label(row, f_tenant),
                    jsonl.label(row, f_session),
                    row.get("aborted") is True or is_aborted(row.get(f_status), report, line),
                    jsonl.integer(row, "after", -1),
                    int(jsonl.number(row, "think_ns")) if "think_ns" in row else 0,
                )
            else:
                extra = plain
        except RowError as error:
            report.bad_row(line, str(error))
            continue
        times.append(time)
        in_ns.append(has_ns)
        prompt.append(length)
        output.append(generated)
        caps.append(cap)
        lines.append(line)
        ids.append(content)
        rest.append(extra)
        served += generated > 0
        if report.enough(served):
            break
    if any(in_ns):
        if not all(in_ns):
            report.fail(
                "mixes timestamp and timestamp_ns; use one of them in all rows",
                lines[in_ns.index(False)],
            )
        time_ns = np.asarray(times, dtype=np.int64)
    else:
        time_ns = _times(times, lines, unit, report, told="schema" in header)
    if len(styles) == 2:
        report.oddity(
            f"Some timestamps name a time zone, others do not: those without are read as UTC "
            f"(first at line {styles[False]}).",
            styles[False],
        )
    stated = header.get("hash_block_tokens")
    if stated is not None and report.options.hash_block_tokens is None:
        size = stated
        _cut_extra_ids(prompt, ids, lines, size, report)
    else:
        size = fit_block_tokens(prompt, ids, lines, DEFAULT_HASH_BLOCK_TOKENS, report)
    draft = Draft(
        time_ns=time_ns,
        prompt=np.asarray(prompt, dtype=np.int64),
        output=np.asarray(output, dtype=np.int64),
        lines=np.asarray(lines, dtype=np.int64),
        hash_ids=ids,
        hash_block_tokens=size,
    )
    attach_caps(draft, caps)
    _attach(draft, rest, report, told="schema" in header)
    _take_over(draft, header, report)
    return draft


def _take_over(draft: Draft, header: dict[str, Any], report: Report) -> None:
    """What the describing first line tells of the trace's origin."""
    for sentence in header.get("assumptions", []):
        report.assume(sentence)
    report.dropped.update(header.get("dropped", {}))
    draft.extra.update({name: header[name] for name in ("source", "origin_ns") if name in header})


def _is_header(row: dict[str, Any]) -> bool:
    return "schema" in row


def _plain_draft(rows: PlainRows, report: Report) -> Draft:
    """Rows of three sound integers, with nothing else to look at."""
    header = {} if rows.header is None else _header(rows.header, report, 1)
    draft = Draft(
        time_ns=rows.columns["timestamp_ns"],
        prompt=rows.columns["input_tokens"],
        output=rows.columns["output_tokens"],
        first_line=rows.first_line,
    )
    _take_over(draft, header, report)
    return draft


def _no_time(row: dict[str, Any], f_ns: str, f_time: str) -> int:
    """0 for a row of a file without arrival times. Raises RowError if this row has one after all."""
    if f_ns in row or row.get(f_time) is not None:
        raise RowError(f"has a {f_time}, unlike the rows before")
    return 0


def _is_plain(row: dict[str, Any], f_ns: str, f_in: str, f_out: str) -> bool:
    """Is a row of three fields sound as it is: whole ns, prompt and output tokens?"""
    time, prompt, output = row.get(f_ns), row.get(f_in), row.get(f_out)
    return (
        type(time) is int
        and type(prompt) is int
        and type(output) is int
        and 0 <= time <= MAX_NS
        and 0 <= prompt <= MAX_TOKENS
        and 0 <= output <= MAX_TOKENS
    )


def _times(
    times: list[int | Decimal], lines: list[int], unit: str | None, report: Report, told: bool
) -> Int64Array:
    """Numbers in the file's unit to ns; dates came in as ns already (negative, so that none is mistaken).

    `told`: the file says itself that it is of our schema, so its unit is no assumption.
    """
    if times and all(isinstance(value, int) and value < 0 for value in times):
        return -1 - np.asarray(times, dtype=np.int64)
    if any(value < 0 for value in times):
        row = next(row for row, value in enumerate(times) if value < 0)
        report.fail("mixes dates and numbers as timestamps", lines[row])
    if not told or unit is None or report.options.time_unit is not None:
        unit = choose_unit(
            report,
            documented=unit,
            whose=SCHEMA,
            integral=all(isinstance(value, int) for value in times),
            low=as_float(min(times, default=0)),
            high=as_float(max(times, default=0)),
            rows=len(times),
        )
    return times_from_numbers(times, lines, unit, report)


def _check_skew(row: dict[str, Any], time: int | Decimal, report: Report, line: int) -> None:
    """A client log may tell of clocks that disagree; its arrivals are still arrivals."""
    first = row["first_token"]
    if isinstance(first, int | Decimal) and not isinstance(first, bool) and first < time:
        report.notice(
            "first token before arrival (clock skew): the arrival is used, latencies are not", line
        )


def _time(row: dict[str, Any], name: str) -> int | Decimal:
    """A timestamp: a number >= 0, or a date and time, which comes back as -1 - ns since 1970."""
    value = row.get(name)
    if isinstance(value, str) and looks_like_datetime(value):
        try:
            return -1 - datetime_to_ns(value)
        except TimeError as error:
            raise RowError(f"{name}: {error}") from None
    return jsonl.number(row, name)


def _header(row: dict[str, Any], report: Report, line: int) -> dict[str, Any]:
    """Check the describing first line (in Parquet: the metadata, line 0). Raises UserError for another schema or a field of the wrong kind."""
    schema = row["schema"]
    if schema != SCHEMA:
        report.fail(f"schema is {str(schema)[:60]!r}; this version reads {SCHEMA!r}", line)
    header: dict[str, Any] = {"schema": SCHEMA}
    block = row.get("hash_block_tokens")
    if block is not None:
        try:
            _note_block(header, block)
        except RowError as error:
            report.fail(str(error), line)
    checks = {
        "assumptions": lambda v: isinstance(v, list) and all(isinstance(item, str) for item in v),
        "dropped": lambda v: isinstance(v, dict) and all(type(item) is int for item in v.values()),
        "source": lambda v: (
            isinstance(v, dict) and all(isinstance(item, str) for item in v.values())
        ),
        "origin_ns": lambda v: type(v) is int and 0 <= v <= MAX_NS,
    }
    for name, good in checks.items():
        if name in row:
            if not good(row[name]):
                report.fail(f"{name} in the first line has the wrong kind of value", line)
            header[name] = row[name]
    return header


def _note_block(header: dict[str, Any], block: Any) -> None:
    if type(block) is not int or not 1 <= block <= 1 << 20:
        raise RowError(f"hash_block_tokens is {str(block)[:40]}, not a whole number of tokens")
    if header.setdefault("hash_block_tokens", block) != block:
        raise RowError(
            f"hash_block_tokens is {block} here and {header['hash_block_tokens']} before; a file has one"
        )


def _cut_extra_ids(
    prompt: list[int], ids: list[list[int]], lines: list[int], size: int, report: Report
) -> None:
    for row, content in enumerate(ids):
        expected = -(-prompt[row] // size)
        if len(content) > expected:
            report.notice(
                f"more hash_ids than the prompt has blocks of {size} tokens; the extra ids are ignored",
                lines[row],
            )
            ids[row] = content[:expected]


def _attach(
    draft: Draft, rest: list[tuple[int, str, str, bool, int, int]], report: Report, told: bool
) -> None:
    """Optional columns, where any row has them."""
    n = len(rest)
    if not n:
        return
    priority, tenants, sessions, aborted, after, think = zip(*rest, strict=True)
    if any(priority):
        draft.priority = np.asarray(priority, dtype=np.int32)
    if any(tenants):
        draft.tenants = tenants
    if any(sessions):
        draft.sessions = sessions
    attach_aborted(draft, aborted, report, told)
    if any(value >= 0 for value in after):
        for row, value in enumerate(after):
            if value >= row:
                report.fail(
                    f"after is {value}; a turn can only follow an earlier row (< {row})",
                    draft.line(row),
                )
        if max(think) > MAX_NS:
            report.fail("think_ns is out of range (146 years)")
        draft.after = np.asarray(after, dtype=np.int64)
        draft.think_ns = np.asarray(think, dtype=np.int64)
