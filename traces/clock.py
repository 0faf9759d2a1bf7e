"""Timestamps to integer nanoseconds, exactly: no float ever holds a time that a file wrote down."""

from __future__ import annotations

import math
import re
from datetime import date
from decimal import ROUND_HALF_UP, Decimal, InvalidOperation

# Unit -> nanoseconds in one.
UNIT_NS: dict[str, int] = {"s": 1_000_000_000, "ms": 1_000_000, "us": 1_000, "ns": 1}

# Half of int64's range, so that differences of two times fit as well (1970 plus 146 years).
MAX_NS = 2**62 - 1

_EPOCH_DAY = date(1970, 1, 1).toordinal()
_DATETIME = re.compile(
    r"(\d{4})-(\d{1,2})-(\d{1,2})"
    r"(?:[T ](\d{1,2}):(\d{2})(?::(\d{2})(?:[.,](\d+))?)?)?"
    r"\s*(Z|UTC|[+-]\d{2}(?::?\d{2})?)?",
    re.ASCII | re.IGNORECASE,
)


class TimeError(ValueError):
    """The text or number is no usable timestamp; `str()` says why."""


def as_float(value: int | Decimal) -> float:
    """`value` to compare with; infinite where a float cannot hold it."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def is_whole(value: int | Decimal) -> bool:
    """Is it an integer? Without making one: `int(Decimal("1e99999999"))` would fill the memory."""
    return isinstance(value, int) or value == value.to_integral_value()


def number_to_ns(value: int | Decimal, unit: str) -> int:
    """A number of `unit`s as nanoseconds, rounded half up. Raises TimeError if negative or out of range."""
    if isinstance(value, int) and abs(value) > MAX_NS:  # thousands of digits cannot even be shown
        raise TimeError("is out of range (146 years)")
    if value < 0:
        raise TimeError(f"{value} is negative")
    if isinstance(value, int):
        ns = value * UNIT_NS[unit]
    else:
        if value.adjusted() > 20:  # before scaling: 1E+999999 must not become a huge integer
            raise TimeError(f"{value} {unit} is out of range")
        ns = int((value * UNIT_NS[unit]).to_integral_value(ROUND_HALF_UP))
    if ns > MAX_NS:
        raise TimeError(f"{value} {unit} is out of range (146 years)")
    return ns


def parse_number(text: str) -> int | Decimal:
    """A finite decimal number from text. Raises TimeError for NaN, Infinity and anything else."""
    text = text.strip()
    if text.isascii() and text.isdigit() and len(text) <= 20:
        return int(text)
    try:
        if len(text) > 64 or "_" in text:  # Decimal would accept 1_000
            raise InvalidOperation
        value = Decimal(text)
    except InvalidOperation:
        raise TimeError(f"{text[:40]!r} is not a number") from None
    if not value.is_finite():
        raise TimeError(f"{text[:40]} is not a finite number")
    return value


def datetime_to_ns(text: str) -> int:
    """An ISO 8601-like date and time, zone optional (then UTC), as nanoseconds since 1970.

    Any number of fraction digits; from the tenth on they are rounded half up.
    """
    match = _DATETIME.fullmatch(text.strip())
    if match is None:
        raise TimeError(f"{text[:40]!r} is not a date and time")
    year, month, day, hour, minute, second, fraction, zone = match.groups()
    try:
        days = date(int(year), int(month), int(day)).toordinal() - _EPOCH_DAY
    except ValueError as error:
        raise TimeError(f"{text[:40]!r} is not a date: {error}") from None
    hours, minutes, seconds = int(hour or 0), int(minute or 0), int(second or 0)
    if hours > 23 or minutes > 59 or seconds > 60:
        raise TimeError(f"{text[:40]!r} is not a time of day")
    total = days * 86400 + hours * 3600 + minutes * 60 + seconds
    if zone and zone.upper() not in ("Z", "UTC"):
        offset = int(zone[1:3]) * 3600 + int(zone[3:].lstrip(":") or 0) * 60
        total -= offset if zone[0] == "+" else -offset
    nanos = 0
    if fraction:
        nanos = int(fraction[:9].ljust(9, "0")) + (len(fraction) > 9 and fraction[9] >= "5")
    ns = total * 1_000_000_000 + nanos
    if not 0 <= ns <= MAX_NS:
        raise TimeError(f"{text[:40]!r} is before 1970 or beyond 2116")
    return ns


def looks_like_datetime(text: str) -> bool:
    return _DATETIME.fullmatch(text.strip()) is not None


def names_zone(text: str) -> bool:
    """Does this date and time say its zone, so that reading it as UTC would be no guess?"""
    match = _DATETIME.fullmatch(text.strip())
    return match is not None and match.group(8) is not None
