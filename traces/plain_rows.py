"""JSON lines of three whole numbers each, as a writer writes them: whole blocks of digits at a time.

A long trace of ours is nothing else. The lines are alike but for their digits, which is checked byte by
byte; a file with any other line is read row by row, by the reader that knows what to say about it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vsim.traces import jsonl
from vsim.traces.digits import Bytes, integers
from vsim.traces.files import TraceFile
from vsim.traces.options import Report, RowError
from vsim.traces.trace import Int64Array

_DIGITS = b"0123456789"
_RUN = re.compile(rb"[0-9]+")


@dataclass(slots=True)
class PlainRows:
    """Columns by field name, and the row that stood before them, if the first one was another."""

    columns: dict[str, Int64Array]
    header: dict[str, Any] | None
    first_line: int


@dataclass(slots=True)
class _Shape:
    """What all lines have in common: `skeleton` is a line without its digits, and which field each number is."""

    skeleton: bytes
    names: list[str]
    before: Bytes  # the byte before and after each number
    after: Bytes


@dataclass(slots=True)
class _Parts:
    columns: dict[str, list[Int64Array]] = field(default_factory=dict)
    served: int = 0


def read_plain_rows(
    file: TraceFile,
    report: Report,
    largest: dict[str, int],
    output: str,
    is_header: Callable[[dict[str, Any]], bool],
) -> PlainRows | None:
    """A file whose lines hold the fields of `largest` (name -> largest sound value), three whole numbers.

    `output`: which of them is the output length; reading ends where the report has enough rows with one.
    A first line that `is_header` accepts is given back as it is. None: some line is another.
    """
    header: dict[str, Any] | None = None
    shape: _Shape | None = None
    parts = _Parts()
    first_line = 1
    first = True
    for block in file.blocks():
        data = block if block.endswith(b"\n") else block + b"\n"
        if first:
            first = False
            end = data.index(b"\n") + 1
            row = _object(data[:end])
            if row is None:
                return None
            if is_header(row):
                header, first_line, data = row, 2, data[end:]
        if not data:
            continue
        if shape is None:
            shape = _shape(data[: data.index(b"\n") + 1], largest)
            if shape is None:
                return None
        found = _columns(data, shape, largest)
        if found is None:
            return None
        last = _enough(found[output], parts, report)
        for name, column in found.items():
            parts.columns.setdefault(name, []).append(column[:last])
        if last is not None:
            break
    if not parts.columns:
        return None
    columns = {name: np.concatenate(pieces) for name, pieces in parts.columns.items()}
    return PlainRows(columns, header, first_line)


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        row = jsonl.parse(line)
    except RowError:
        return None
    return row if isinstance(row, dict) else None


def _shape(line: bytes, largest: dict[str, int]) -> _Shape | None:
    """The shape of the lines, from the first of them."""
    row = _object(line)
    runs = list(_RUN.finditer(line))
    if row is None or row.keys() != largest.keys() or len(runs) != len(row):
        return None  # other fields, a field twice, digits elsewhere than in the values
    if any(type(value) is not int for value in row.values()):
        return None
    return _Shape(
        line.translate(None, _DIGITS),
        list(row),
        np.array([line[run.start() - 1] for run in runs], dtype=np.uint8),
        np.array([line[run.end()] for run in runs], dtype=np.uint8),
    )


def _columns(data: bytes, shape: _Shape, largest: dict[str, int]) -> dict[str, Int64Array] | None:
    """The numbers of a block of whole lines by field, if every line has the shape and every number is sound."""
    rows = data.count(b"\n")
    if data.translate(None, _DIGITS) != shape.skeleton * rows:
        return None
    raw = np.frombuffer(data, dtype=np.uint8)
    digit = (raw - np.uint8(48)) <= 9  # wraps around for bytes below "0"
    edges = (
        np.flatnonzero(digit[1:] != digit[:-1]) + 1
    )  # a line neither begins nor ends with a digit
    starts, ends = edges[::2], edges[1::2]
    fields = len(shape.names)
    if len(starts) != rows * fields or len(ends) != len(starts):
        return None
    found = {}
    for at, name in enumerate(shape.names):
        begin, end = starts[at::fields], ends[at::fields]
        values, ok = integers(raw, begin, end)
        ok &= (raw[begin - 1] == shape.before[at]) & (raw[end] == shape.after[at])
        ok &= (raw[begin] != 48) | (end - begin == 1)  # JSON knows no 007
        if not (ok.all() and values.max() <= largest[name]):
            return None
        found[name] = values
    return found


def _enough(output: Int64Array, parts: _Parts, report: Report) -> int | None:
    """How many of these rows are read until the report has enough of them; None: all, and more."""
    limit = report.options.limit
    served = parts.served + np.cumsum(output > 0)
    parts.served = int(served[-1])
    if limit is None or not report.enough(parts.served):
        return None
    return int(np.argmax(served > limit)) + 1
