"""One block of a CSV cut into fields, or handed to Arrow as a whole."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from vsim.traces.arrow import to_numpy
from vsim.traces.clock import looks_like_datetime
from vsim.traces.digits import Bytes
from vsim.traces.options import Report, RowError
from vsim.traces.trace import Int64Array


def delimiter_of(head: bytes) -> str:
    """What separates the columns of a CSV's first line: a comma, or else a semicolon or a tab if there is one."""
    line = head.split(b"\n", 1)[0]
    return next((mark for mark in (",", ";", "\t") if mark.encode() in line), ",")


def header_of(head: bytes) -> list[str]:
    """Column names in a CSV's first line."""
    line = head.split(b"\n", 1)[0].decode("utf-8", "replace").strip("\r\n")
    try:
        return [name.strip() for name in next(csv.reader([line], delimiter=delimiter_of(head)), [])]
    except csv.Error:
        return []


# Stands for a delimiter inside quotes while a block is cut at the others.
INNER_DELIMITER = "\x01"
# A quoted field that runs on longer than this is an unbalanced quote.
MAX_RECORD_BYTES = 64 << 20


def whole_records(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Blocks of whole lines as blocks of whole CSV records: no quoted line break falls between two blocks."""
    held = b""
    for part in blocks:
        block = held + part if held else part
        held = b""
        if block.count(b'"') % 2 and block.endswith(b"\n"):
            # The record that the last quote opened begins after the last line break outside quotes.
            data = np.frombuffer(block, dtype=np.uint8)
            outside = np.cumsum(data == ord('"'), dtype=np.int64) % 2 == 0
            breaks = np.flatnonzero(outside & (data == 10))
            cut = int(breaks[-1]) + 1 if len(breaks) else 0
            if len(block) - cut <= MAX_RECORD_BYTES:
                block, held = block[:cut], block[cut:]
        if block:
            yield block
    if held:
        yield held


@dataclass(slots=True)
class Fields:
    """Where each field of a block's well-formed rows begins and ends."""

    data: Bytes
    starts: Int64Array  # (rows, columns)
    ends: Int64Array
    lines: Int64Array  # line numbers
    delimiter: str = ","

    def text(self, row: int, column: int) -> str:
        raw = self.data[self.starts[row, column] : self.ends[row, column]].tobytes()
        try:
            return raw.decode("utf-8").replace(INNER_DELIMITER, self.delimiter).strip()
        except UnicodeDecodeError as error:
            raise RowError(
                f"is not UTF-8 (byte 0x{raw[error.start]:02x}); convert the file, "
                "for example iconv -f LATIN1 -t UTF-8"
            ) from None


def split(
    block: bytes, columns: int, line: int, skip: int, report: Report, delimiter: str
) -> tuple[Fields | None, list[tuple[int, str, bool]], int]:
    """Cut a block into fields.

    Returns the well-formed rows, the others as (line, complaint, is it an unfinished last line?), and the
    number of the line after the block.
    """
    unfinished = not block.endswith(b"\n")
    if b'"' in block:
        block = _unquote(block, columns, line, report, delimiter)
    if unfinished:
        block += b"\n"
    data = np.frombuffer(block, dtype=np.uint8)
    newlines = np.flatnonzero(data == 10)
    commas = np.flatnonzero(data == ord(delimiter))
    starts = np.concatenate(([0], newlines[:-1] + 1))
    ends = newlines.copy()
    has_cr = (ends > starts) & (data[np.maximum(ends - 1, 0)] == 13)
    ends -= has_cr
    next_line = line + len(newlines)
    lines = np.arange(line, next_line)
    if skip:
        starts, ends, lines = starts[skip:], ends[skip:], lines[skip:]
    filled = ends > starts
    first_comma = np.searchsorted(commas, starts)
    counts = np.searchsorted(commas, ends) - first_comma
    right = filled & (counts == columns - 1)
    bad: list[tuple[int, str, bool]] = []
    for row in np.flatnonzero(filled & ~right).tolist():
        text = block[starts[row] : ends[row]]
        if not text.strip(b" \t,;\0"):
            continue  # a blank line, or one of only separators, as spreadsheets leave at the end
        is_last = unfinished and row == len(lines) - 1
        bad.append(
            (
                int(lines[row]),
                f"has {int(counts[row]) + 1} fields, the header has {columns}",
                is_last,
            )
        )
    rows = np.flatnonzero(right)
    if not len(rows):
        return None, bad, next_line
    cut = (
        commas[first_comma[rows][:, None] + np.arange(columns - 1)[None, :]]
        if columns > 1
        else None
    )
    begin, stop = starts[rows][:, None], ends[rows][:, None]
    if cut is not None and cut.size:
        begin, stop = np.hstack([begin, cut + 1]), np.hstack([cut, stop])
    return Fields(data, begin, stop, lines[rows], delimiter), bad, next_line


def _unquote(block: bytes, columns: int, line: int, report: Report, delimiter: str) -> bytes:
    """A block with quoted fields as one without, line for line.

    Delimiters inside quotes become `INNER_DELIMITER`, line breaks spaces, quotes go. A record over several
    lines stands on its first; empty lines follow, so that later line numbers stay right.
    """
    raw = block.split(b"\n")
    out: list[bytes] = []
    while len(out) < len(raw):
        at = len(out)
        if b'"' not in raw[at]:
            out.append(raw[at])
            continue
        end = at + 1
        if raw[at].count(b'"') % 2:  # a quoted line break: the record goes on to the closing quote
            while end < len(raw) and raw[end].count(b'"') % 2 == 0:
                end += 1
            end = end + 1 if end < len(raw) else at + 1
        fields = _record(raw[at:end], delimiter)
        if end > at + 1 and (isinstance(fields, str) or len(fields) != columns):
            end, fields = at + 1, _record(raw[at : at + 1], delimiter)  # only a stray quote
        if (
            isinstance(fields, str) and at == len(raw) - 1
        ):  # no line end after it: the file stops here
            report.oddity(
                f"The file's last line ({line + at}) is cut off; it is left out.", line + at
            )
            report.dropped["truncated_tail"] += 1
            out.append(b"")
            continue
        if isinstance(fields, str):
            report.bad_row(line + at, f"has unbalanced quotes ({fields})")
            out.append(b"")
            continue
        cleaned = delimiter.join(
            field.replace(delimiter, INNER_DELIMITER).replace("\n", " ").replace("\r", " ")
            for field in fields
        )
        out.append(cleaned.encode("utf-8", "surrogateescape"))
        out.extend([b""] * (end - at - 1))
    return b"\n".join(out)


def _record(lines: list[bytes], delimiter: str) -> list[str] | str:
    """The fields of one record, or what is wrong with it."""
    text = [raw.decode("utf-8", "surrogateescape").rstrip("\r") + "\n" for raw in lines]
    text[-1] = text[-1][:-1]
    try:
        return next(csv.reader(text, strict=True, delimiter=delimiter))
    except (csv.Error, StopIteration) as error:
        return str(error)


def arrow_columns(
    block: bytes, header: list[str], position: dict[str, int], skip: int, delimiter: str
) -> tuple[Int64Array, dict[str, Int64Array], bool] | None:
    """Times, numbers and whether dates name a zone, of a block of CSV, by Arrow; None if a field is not plain."""
    if "timestamp" not in position:
        return None
    begin = block.index(b"\n") + 1 if skip else 0
    first = block[begin : block.find(b"\n", begin)].split(delimiter.encode())
    if len(first) <= position["timestamp"]:
        return None
    if not looks_like_datetime(first[position["timestamp"]].decode("latin-1")):
        return None
    zoned = first[position["timestamp"]].endswith((b"+00:00", b"Z"))
    import pyarrow as pa
    import pyarrow.csv as arrow_csv

    names = [f"c{at}" for at in range(len(header))]
    wanted = {names[at]: pa.int64() for at in position.values()}
    wanted[names[position["timestamp"]]] = pa.timestamp("ns", "UTC" if zoned else None)
    try:
        table = arrow_csv.read_csv(
            pa.py_buffer(memoryview(block)[begin:]),
            read_options=arrow_csv.ReadOptions(column_names=names, block_size=len(block) + 1),
            parse_options=arrow_csv.ParseOptions(quote_char=False, delimiter=delimiter),
            convert_options=arrow_csv.ConvertOptions(
                column_types=wanted, include_columns=list(wanted), null_values=[], check_utf8=False
            ),
        )
    except pa.ArrowException:
        return None
    values = {}
    for ours, at in position.items():
        column = table.column(names[at])
        if column.null_count:
            return None
        values[ours] = to_numpy(column.cast(pa.int64()))
    return values.pop("timestamp"), values, zoned
