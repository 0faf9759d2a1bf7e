"""JSON lines into checked rows: exact numbers, a line number for every complaint, a cut-off tail forgiven."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any, ParamSpec, TypeVar, cast

from vsim.traces.clock import TimeError, parse_number
from vsim.traces.draft import MAX_TOKENS
from vsim.traces.files import TraceFile
from vsim.traces.options import Report, RowError

Row = dict[str, Any]
P = ParamSpec("P")
T = TypeVar("T")


NO_ARRIVALS = (
    "The file has no arrival times: all requests are sent at 0 (give them a rate to space them)."
)


class _NotFinite(Decimal):
    """NaN or Infinity as JSON writers wrongly spell them; kept, so that the complaint can name the field."""


_decoder_object = json.JSONDecoder(parse_float=Decimal, parse_constant=_NotFinite)
_SEPARATOR = re.compile(r"[\s,]*")


def parse(raw: bytes) -> Any:
    """One JSON value. Raises RowError naming what is wrong, for any bytes."""
    try:
        text = raw.decode("utf-8").strip()
        value, end = _decoder_object.raw_decode(text)
        if end != len(text):
            raise json.JSONDecodeError("Extra data", text, end)
        return value
    except UnicodeDecodeError as error:
        raise RowError(
            f"is not UTF-8 (byte 0x{raw[error.start]:02x}); convert the file, for example iconv -f LATIN1 -t UTF-8"
        ) from None
    except json.JSONDecodeError as error:
        raise RowError(f"is not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise RowError("is nested too deeply") from None
    except (ValueError, ArithmeticError):  # integers of thousands of digits
        raise RowError("holds a number that is too long") from None


def read_rows(file: TraceFile, report: Report) -> Iterator[tuple[int, Row]]:
    """(line number, object) of each usable line.

    A last line that ends in mid-JSON is left out with a sentence (writers die); anywhere else a line that
    isn't a JSON object is an error, or counted with `on_error="skip"`.
    """
    if file.head.lstrip()[:1] == b"[":
        yield from read_array(file, report)
        return
    seen = 0
    for number, raw, is_last in file.lines():
        try:
            row = parse(raw)
        except RowError as error:
            if is_last and seen and raw.lstrip()[:1] == b"{":
                report.oddity(
                    f"The file's last line ({number}) is cut off; it is left out.", number
                )
                report.dropped["truncated_tail"] += 1
            else:
                report.bad_row(number, str(error))
            continue
        if not isinstance(row, dict):
            report.bad_row(number, f"is a JSON {_kind(row)}, not an object with named fields")
            continue
        seen += 1
        yield number, row


def read_array(file: TraceFile, report: Report) -> Iterator[tuple[int, Row]]:
    """(line number, object) of each element of a file that is one JSON array.

    Elements are decoded one by one, so that an array cut off in its middle still gives all that came before.
    """
    raw = file.document()
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.end < len(raw) - 4:
            line = raw[: error.start].count(b"\n") + 1
            report.fail(
                "is not UTF-8; convert the file, for example iconv -f LATIN1 -t UTF-8", line
            )
        text = raw[: error.start].decode("utf-8")  # cut off within its last character
    del raw
    decode = _decoder_object.raw_decode
    at = text.index("[") + 1
    line, counted = 1, 0
    seen = 0
    while True:
        start = _SEPARATOR.match(text, at).end()  # type: ignore[union-attr]
        line += text.count("\n", counted, start)
        counted = start
        if text.startswith("]", start):
            if text[start + 1 :].strip():
                report.oddity(f"Text after the closing bracket (line {line}) is ignored.", line)
            return
        try:
            row, at = decode(text, start)
        except (ValueError, ArithmeticError, RecursionError) as error:
            if not seen:
                report.fail(f"is not JSON: {str(error)[:100]}", line)
            report.oddity(
                f"The file is cut off or damaged in element {seen + 1} (line {line}); "
                "it and all after it are left out.",
                line,
            )
            report.dropped["truncated_tail"] += 1
            return
        seen += 1
        if not isinstance(row, dict):
            report.bad_row(
                line, f"element {seen} is a JSON {_kind(row)}, not an object with named fields"
            )
            continue
        yield line, row


def _kind(value: Any) -> str:
    return {list: "array", str: "string", bool: "boolean", type(None): "null"}.get(
        type(value), "number"
    )


def number(row: Row, name: str) -> int | Decimal:
    """A finite number >= 0 in field `name`, also when written as text. Raises RowError."""
    value = row.get(name)
    if type(value) is int and value >= 0:
        return value
    if value is None:
        raise RowError(f"{name} is missing")
    if isinstance(value, str):
        try:
            value = parse_number(value)
        except TimeError as error:
            raise RowError(f"{name}: {error}") from None
    if isinstance(value, bool) or not isinstance(value, int | Decimal):
        raise RowError(f"{name} is {_shown(value)}, not a number")
    if isinstance(value, Decimal) and not value.is_finite():
        raise RowError(f"{name} is {value}, not a finite number")
    if value < 0:
        raise RowError(f"{name} is negative ({value})")
    return value


def tokens(row: Row, name: str, report: Report, line: int) -> int:
    """A token count in field `name`; 12.0 and "12" pass with a notice. Raises RowError."""
    value = row.get(name)
    if type(value) is int and 0 <= value <= MAX_TOKENS:
        return value
    whole = number(row, name)
    if isinstance(whole, Decimal):
        if whole.adjusted() > 18 or whole != whole.to_integral_value():
            raise RowError(f"{name} is {whole}, not a whole number")
        whole = int(whole)
    if whole > MAX_TOKENS:
        raise RowError(f"{name} is {whole}, not a plausible number of tokens")
    if type(value) is not int:
        written = "text" if isinstance(value, str) else "a decimal"
        report.notice(f"{name} is written as {written}, read as a whole number", line)
    return whole


def integer(row: Row, name: str, default: int) -> int:
    """An optional integer such as a priority. Raises RowError."""
    value = row.get(name)
    if value is None:
        return default
    if type(value) is not int or abs(value) > 2**31 - 1:
        raise RowError(f"{name} is {_shown(value)}, not an integer of 32 bits")
    return value


def label(row: Row, name: str) -> str:
    """An optional name such as a tenant; numbers are taken as text. Raises RowError."""
    value = row.get(name)
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, int | Decimal) and not isinstance(value, bool):
        return str(value)
    raise RowError(f"{name} is {_shown(value)}, not a name")


def ids(row: Row, name: str) -> list[int]:
    """An optional list of content ids (integers of 64 bits). Raises RowError."""
    value = row.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise RowError(f"{name} is {_shown(value)}, not a list of integers")
    for item in value:
        if type(item) is not int or not -(2**63) <= item < 2**63:
            raise RowError(f"{name} holds {_shown(item)}, not an integer of 64 bits")
    return value


class Clock:
    """Reads the arrival time of each row; a file none of whose rows has one is sent at once, and told so."""

    __slots__ = ("absent", "name", "report")

    def __init__(self, name: str, report: Report) -> None:
        self.name = name
        self.report = report
        self.absent: bool | None = None

    def __call__(self, row: Row) -> int | Decimal:
        missing = row.get(self.name) is None
        if self.absent is None:
            self.absent = missing and self.name not in row
            if self.absent:
                self.report.oddity(NO_ARRIVALS)
        if missing and self.absent:
            return 0
        if self.absent:
            raise RowError(f"has a {self.name}, unlike the rows before")
        return number(row, self.name)


class Checks:
    """Reads the fields of one row and says at the end, in one sentence, all that is wrong with it."""

    __slots__ = ("complaints",)

    def __init__(self) -> None:
        self.complaints: list[str] = []

    def __call__(self, reader: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return reader(*args, **kwargs)
        except RowError as error:
            self.complaints.append(str(error))
            return cast(T, 0)  # never used: done() raises

    def done(self) -> None:
        """Raises RowError if any reader did."""
        if self.complaints:
            raise RowError("; ".join(self.complaints))


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value, default=str)
    except (ValueError, RecursionError):
        text = type(value).__name__
    return text if len(text) <= 40 else text[:37] + "..."
