"""CSV into columns: whole blocks of digits at a time, and row by row, with a complaint, where that fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal

import numpy as np

from vsim.traces.clock import (
    MAX_NS,
    UNIT_NS,
    TimeError,
    as_float,
    datetime_to_ns,
    is_whole,
    looks_like_datetime,
    number_to_ns,
    parse_number,
)
from vsim.traces.csv_blocks import (
    Fields,
    arrow_columns,
    delimiter_of,
    header_of,
    split,
    whole_records,
)
from vsim.traces.digits import Bools, datetimes, decimals, integers
from vsim.traces.draft import MAX_TOKENS, Draft, choose_unit
from vsim.traces.files import TraceFile
from vsim.traces.options import Report, RowError
from vsim.traces.trace import Int64Array

# From here on a block is worth importing Arrow (0.1 s) for; smaller files are read without it.
ARROW_BLOCK_BYTES = 2 << 20

NUMBERS: tuple[str, ...] = ("input_tokens", "output_tokens", "max_tokens", "priority")
TEXTS: tuple[str, ...] = ("tenant", "session", "status")


@dataclass(frozen=True, slots=True)
class CsvSpec:
    """Which column of a CSV says what. Keys of `columns` are our fields, values the file's headers.

    `unit` is the unit of numeric timestamps if the format documents one. `row_filter` sees a row's texts by
    header for the columns in `filter_columns` and returns a reason to drop it, or None.
    """

    whose: str
    columns: Mapping[str, str]
    unit: str | None = None
    zero_means: str = "failed requests"
    filter_columns: tuple[str, ...] = ()
    row_filter: Callable[[dict[str, str]], str | None] | None = None


@dataclass(slots=True)
class _Columns:
    """Growing columns of the whole file."""

    times: list[Int64Array] = field(default_factory=list)
    numbers: dict[str, list[Int64Array]] = field(default_factory=dict)
    texts: dict[str, list[str]] = field(default_factory=dict)
    lines: list[Int64Array] = field(default_factory=list)


def read_csv(file: TraceFile, spec: CsvSpec, report: Report) -> Draft:
    """Read a CSV with a header line into a Draft, in bounded memory beside the columns themselves.

    Raises UserError with file and line for a row that can't be used (or skips it, as the options say).
    """
    header = header_of(file.head)
    position: dict[str, int] = {}
    for ours, theirs in spec.columns.items():
        if theirs not in header:
            report.fail(f"has no column {theirs!r}; its columns are {', '.join(header)[:300]}", 1)
        if header.count(theirs) > 1:
            report.fail(f"has more than one column {theirs!r}; rename all but the right one", 1)
        position[ours] = header.index(theirs)
    reader = _Reader(spec, position, header, report, delimiter_of(file.head))
    line = 1
    for block in whole_records(file.blocks()):
        line = reader.take(block, line)
        if reader.full():
            break
    return reader.draft()


class _Reader:
    """State while blocks of one CSV go by."""

    def __init__(
        self,
        spec: CsvSpec,
        position: dict[str, int],
        header: list[str],
        report: Report,
        delimiter: str = ",",
    ) -> None:
        self.delimiter = delimiter
        self.spec = spec
        self.position = position
        self.header = header
        self.report = report
        self.columns = _Columns()
        self.rows = 0
        self.is_datetime: bool | None = None
        self.unit: str | None = None
        self.dates_without_zone = [0, 0]  # rows, line of the first
        self.dates = 0
        self.number_fields = [name for name in NUMBERS if name in position]
        self.text_fields = [name for name in TEXTS if name in position]

    def full(self) -> bool:
        """Enough rows for the limit? Zero-output rows may still be dropped, so only a generous count will do."""
        limit = self.report.options.limit
        if limit is None or self.report.options.zero_output == "error":
            return False
        kept = sum(
            int(np.count_nonzero(part)) for part in self.columns.numbers.get("output_tokens", [])
        )
        return kept > limit

    def take(self, block: bytes, line: int) -> int:
        """Read one block whose first line has number `line`; returns the next block's first line number."""
        skip = 1 if line == 1 else 0
        if (
            len(block) >= ARROW_BLOCK_BYTES
            and not self.text_fields
            and self.spec.row_filter is None
        ):
            taken = self._take_fast(block, line, skip)
            if taken is not None:
                return taken
        fields, bad, next_line = split(
            block, len(self.header), line, skip, self.report, self.delimiter
        )
        for number, message, is_last in bad:
            if is_last:
                self.report.oddity(
                    f"The file's last line ({number}) is cut off: {message}; it is left out.",
                    number,
                )
                self.report.dropped["truncated_tail"] += 1
            else:
                self.report.bad_row(number, message)
        if fields is not None and len(fields.lines):
            self._parse(fields)
        return next_line

    def _take_fast(self, block: bytes, line: int, skip: int) -> int | None:
        """A whole block through Arrow's parser, if every row of it is plain; else None, and nothing is kept.

        Arrow reads digits and ISO dates to ns exactly; what it refuses, or reads more kindly than we do, goes
        through the careful path, which knows what to say about it.
        """
        if self.is_datetime is False or b'"' in block:
            return None  # numbers as times are read by decimals(), to keep every digit
        columns = arrow_columns(block, self.header, self.position, skip, self.delimiter)
        if columns is None:
            return None
        times, numbers, zoned = columns
        rows = len(times)
        if rows != block.count(b"\n") + (not block.endswith(b"\n")) - skip:
            return None
        good = times.min(initial=0) >= 0 and times.max(initial=0) <= MAX_NS
        for name, column in numbers.items():
            low, high = (-(2**31), 2**31 - 1) if name == "priority" else (0, MAX_TOKENS)
            good = good and column.min(initial=0) >= low and column.max(initial=0) <= high
        if not good:
            return None
        if self.is_datetime is None and self.report.options.time_unit is not None:
            self.report.assume("The file's timestamps are dates: --time-unit is not used.")
        self.is_datetime = True
        self._note_lines(np.arange(line + skip, line + skip + rows))
        self.dates += rows
        if not zoned:  # Arrow takes a block only if all its dates have a zone, or none has
            self.dates_without_zone[1] = self.dates_without_zone[1] or line + skip
            self.dates_without_zone[0] += rows
        self.columns.times.append(times)
        for name, column in numbers.items():
            self.columns.numbers.setdefault(name, []).append(column)
        self.rows += rows
        return line + skip + rows

    def _parse(self, fields: Fields) -> None:
        good = np.ones(len(fields.lines), dtype=bool)
        if self.spec.row_filter is not None:
            self._filter(fields, good)
        times = self._times(fields, good)
        numbers = {name: self._whole(fields, name, good) for name in self.number_fields}
        texts = {name: self._texts(fields, name, good) for name in self.text_fields}
        if not good.all():
            times = times[good]
            numbers = {name: column[good] for name, column in numbers.items()}
            chosen = np.flatnonzero(good).tolist()
            texts = {name: [column[row] for row in chosen] for name, column in texts.items()}
        self.columns.times.append(times)
        self._note_lines(fields.lines[good])
        for name, column in numbers.items():
            self.columns.numbers.setdefault(name, []).append(column)
        for name, text in texts.items():
            self.columns.texts.setdefault(name, []).extend(text)
        self.rows += len(times)

    def _note_lines(self, lines: Int64Array) -> None:
        """Remember line numbers only once a row is missing: ten million of them are 80 MB."""
        if not self.columns.lines and len(lines):
            expected = self.rows + 2  # the header is line 1
            if lines[0] == expected and lines[-1] == expected + len(lines) - 1:
                return
            self.columns.lines.append(np.arange(2, self.rows + 2))
        if len(lines):
            self.columns.lines.append(lines)

    def _filter(self, fields: Fields, good: Bools) -> None:
        assert self.spec.row_filter is not None
        wanted = [
            (name, self.header.index(name))
            for name in self.spec.filter_columns
            if name in self.header
        ]
        for row in range(len(fields.lines)):
            try:
                reason = self.spec.row_filter(
                    {name: fields.text(row, column) for name, column in wanted}
                )
            except RowError as error:
                self.report.bad_row(int(fields.lines[row]), str(error))
                good[row] = False
                continue
            if reason is not None:
                self.report.dropped[reason] += 1
                good[row] = False

    def _times(self, fields: Fields, good: Bools) -> Int64Array:
        if "timestamp" not in self.position:
            return np.zeros(len(fields.lines), dtype=np.int64)
        column = self.position["timestamp"]
        if self.is_datetime is None:
            self._decide_clock(fields, column)
        starts, ends = fields.starts[:, column], fields.ends[:, column]
        if self.is_datetime:
            times, ok = datetimes(fields.data, starts, ends)
            self._count_zones(fields, starts, ends)
        else:
            assert self.unit is not None
            times, ok = decimals(fields.data, starts, ends, UNIT_NS[self.unit])
        for row in np.flatnonzero(~ok & good).tolist():
            number = int(fields.lines[row])
            try:
                text = fields.text(row, column)
                if self.is_datetime:
                    times[row] = datetime_to_ns(text)
                else:
                    times[row] = number_to_ns(parse_number(text), self.unit or "s")
            except (TimeError, RowError) as error:
                good[row] = False
                self.report.bad_row(number, f"{self.header[column]}: {error}")
        return times

    def _count_zones(self, fields: Fields, starts: Int64Array, ends: Int64Array) -> None:
        """How many of these dates name no zone; a time of day is there from the 11th character on."""
        last = fields.data[np.maximum(ends - 1, 0)]
        named = (last == ord("Z")) | (last == ord("z")) | (last == ord("C")) | (last == ord("c"))
        for back in (3, 5, 6):  # +02, +0200, +02:00
            mark = fields.data[np.maximum(ends - back, 0)]
            named |= (ends - starts > 10 + back) & ((mark == ord("+")) | (mark == ord("-")))
        naive = np.flatnonzero(~named)
        self.dates += len(named)
        if len(naive):
            self.dates_without_zone[1] = self.dates_without_zone[1] or int(fields.lines[naive[0]])
            self.dates_without_zone[0] += len(naive)

    def _say_zones(self) -> None:
        """Some dates with a zone, some without: hours may lie between what looks alike."""
        naive, line = self.dates_without_zone
        if 0 < naive < self.dates:
            self.report.oddity(
                f"{naive} of {self.dates} timestamps name no time zone, the others do: "
                f"those without are read as UTC (first at line {line}).",
                line,
            )

    def _decide_clock(self, fields: Fields, column: int) -> None:
        """Dates or numbers, and of what unit: settled once, on the first block."""
        try:
            self.is_datetime = looks_like_datetime(fields.text(0, column))
        except RowError:
            self.is_datetime = False
        if self.is_datetime:
            if self.report.options.time_unit is not None:
                self.report.assume("The file's timestamps are dates: --time-unit is not used.")
            return
        values = []
        for row in range(len(fields.lines)):
            try:
                values.append(parse_number(fields.text(row, column)))
            except (TimeError, RowError):
                continue
            if len(values) >= 10_000 or self.spec.unit is not None:
                break
        values = [value for value in values if value >= 0]
        low, high = (as_float(min(values)), as_float(max(values))) if values else (0.0, 0.0)
        self.unit = choose_unit(
            self.report,
            documented=self.spec.unit,
            whose=self.spec.whose,
            integral=all(is_whole(value) for value in values),
            low=low,
            high=high if self.spec.unit is None else low,
            rows=len(values),
        )

    def _whole(self, fields: Fields, name: str, good: Bools) -> Int64Array:
        column = self.position[name]
        values, ok = integers(fields.data, fields.starts[:, column], fields.ends[:, column])
        signed = name == "priority"
        if not signed:
            ok &= values <= MAX_TOKENS
        for row in np.flatnonzero(~ok & good).tolist():
            number = int(fields.lines[row])
            try:
                value = whole_number(fields.text(row, column), signed=signed)
            except RowError as error:
                good[row] = False
                self.report.bad_row(number, f"{self.header[column]}: {error}")
                continue
            values[row] = value
            if not fields.text(row, column).lstrip("+-").isdigit():
                self.report.notice(
                    f"{self.header[column]} is written as a decimal, read as a whole number", number
                )
        return values

    def _texts(self, fields: Fields, name: str, good: Bools) -> list[str]:
        """A column of names; each distinct one is decoded once."""
        column = self.position[name]
        raw = fields.data.tobytes()
        known: dict[bytes, str] = {}
        texts = []
        spans = zip(fields.starts[:, column].tolist(), fields.ends[:, column].tolist(), strict=True)
        for row, (begin, end) in enumerate(spans):
            piece = raw[begin:end]
            text = known.get(piece)
            if text is None:
                try:
                    text = known[piece] = fields.text(row, column)
                except RowError as error:
                    text = ""
                    if good[row]:
                        good[row] = False
                        self.report.bad_row(
                            int(fields.lines[row]), f"{self.header[column]}: {error}"
                        )
            texts.append(text)
        return texts

    def draft(self) -> Draft:
        """The columns read so far as one Draft."""
        self._say_zones()

        def joined(parts: list[Int64Array]) -> Int64Array:
            whole = np.concatenate(parts) if parts else np.empty(0, np.int64)
            parts.clear()
            return whole

        numbers = {name: joined(self.columns.numbers.get(name, [])) for name in self.number_fields}
        texts = self.columns.texts
        lines = joined(self.columns.lines) if self.columns.lines else None
        priority = numbers.get("priority")
        empty = np.empty(0, np.int64)
        return Draft(
            time_ns=joined(self.columns.times),
            prompt=numbers.get("input_tokens", empty),
            output=numbers.get("output_tokens", empty),
            lines=lines,
            first_line=2,
            max_tokens=numbers.get("max_tokens"),
            priority=None if priority is None else priority.astype(np.int32),
            tenants=texts.get("tenant"),
            sessions=texts.get("session"),
            zero_means=self.spec.zero_means,
            extra={"status": texts["status"]} if "status" in texts else {},
        )


def whole_number(text: str, *, signed: bool = False) -> int:
    """A token count (or a priority) from text; integral decimals such as 12.0 pass. Raises RowError."""
    try:
        value = parse_number(text)
    except TimeError as error:
        raise RowError(str(error)) from None
    if isinstance(value, Decimal):
        if value.adjusted() > 18 or value != value.to_integral_value():
            raise RowError(f"{text[:40]} is not a whole number")
        value = int(value)
    if value < 0 and not signed:
        raise RowError(f"{value} is negative")
    if abs(value) > (2**31 - 1 if signed else MAX_TOKENS):
        raise RowError(f"{value} is not a plausible {'priority' if signed else 'number of tokens'}")
    return value
