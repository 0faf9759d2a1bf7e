"""Digits in a block of bytes to integers, a whole column at a time and without a float."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vsim.traces.clock import MAX_NS
from vsim.traces.trace import Int64Array

Bytes = npt.NDArray[np.uint8]
Bools = npt.NDArray[np.bool_]

_MONTH_DAYS = np.array([0, 31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31])


def _digit(data: Bytes, at: Int64Array) -> npt.NDArray[np.uint8]:
    return data[at] - np.uint8(48)  # wraps around for bytes below "0": then it is > 9 as well


def integers(data: Bytes, starts: Int64Array, ends: Int64Array) -> tuple[Int64Array, Bools]:
    """Fields of plain digits as int64; `ok` is False where a field is anything else or over 18 digits."""
    width = ends - starts
    ok = (width > 0) & (width <= 18)
    values = np.zeros(len(starts), dtype=np.int64)
    longest = int(width[ok].max()) if ok.any() else 0
    for k in range(longest):
        inside = width > k
        digit = _digit(data, np.where(inside, starts + k, 0))
        ok &= ~inside | (digit <= 9)
        values = np.where(inside, values * 10 + digit, values)
    values[~ok] = 0
    return values, ok


def decimals(
    data: Bytes, starts: Int64Array, ends: Int64Array, scale: int
) -> tuple[Int64Array, Bools]:
    """Fields such as 12 or 12.345 times `scale` (a power of ten), rounded half up, without a float.

    `ok` is False where a field is anything else, or too large.
    """
    width = ends - starts
    dot = ends.copy()
    for k in range(int(width.max(initial=0)) if len(width) else 0):
        at = starts + k
        is_dot = (k < width) & (data[np.minimum(at, len(data) - 1)] == 46)
        dot = np.where(is_dot & (dot == ends), at, dot)
        if k >= 20:
            break
    values, ok = integers(data, starts, dot)
    places = len(str(scale)) - 1
    ok &= values <= MAX_NS // scale
    fraction_width = np.maximum(ends - dot - 1, 0)
    ok &= (dot == ends) | (fraction_width > 0)
    fraction = np.zeros(len(starts), dtype=np.int64)
    round_up = np.zeros(len(starts), dtype=bool)
    for k in range(int(fraction_width.max(initial=0)) if len(width) else 0):
        inside = fraction_width > k
        digit = _digit(data, np.where(inside, dot + 1 + k, 0))
        ok &= ~inside | (digit <= 9)
        if k < places:
            fraction = fraction * 10 + np.where(inside, digit, 0)
        elif k == places:
            round_up = inside & (digit >= 5)
    for _ in range(places - min(places, int(fraction_width.max(initial=0)) if len(width) else 0)):
        fraction *= 10
    values = np.where(ok, values, 0) * scale + fraction + round_up
    return values, ok


def datetimes(data: Bytes, starts: Int64Array, ends: Int64Array) -> tuple[Int64Array, Bools]:
    """Fields such as 2023-11-16 18:15:46.6805900 or …46.680590+00:00 as ns since 1970, exactly.

    `ok` is False where a field has another shape; the caller reads those one by one.
    """
    width = ends - starts
    zoned = np.zeros(len(starts), dtype=bool)
    if len(starts):
        tail = [43, 48, 48, 58, 48, 48]  # +00:00
        zoned = width >= 25
        for back, byte in enumerate(reversed(tail)):
            zoned &= data[np.maximum(ends - 1 - back, 0)] == byte
    ends = np.where(zoned, ends - 6, ends)
    width = ends - starts
    ok = width >= 19
    safe = np.where(ok, starts, 0)

    def number(offset: int, count: int) -> Int64Array:
        nonlocal ok
        value = np.zeros(len(starts), dtype=np.int64)
        for k in range(count):
            digit = _digit(data, np.minimum(safe + offset + k, len(data) - 1))
            ok = ok & (digit <= 9)
            value = value * 10 + digit
        return value

    def sign(offset: int, *bytes_: int) -> None:
        nonlocal ok
        at = data[np.minimum(safe + offset, len(data) - 1)]
        ok = ok & np.isin(at, bytes_)

    year, month, day = number(0, 4), number(5, 2), number(8, 2)
    hour, minute, second = number(11, 2), number(14, 2), number(17, 2)
    for offset, bytes_ in ((4, (45,)), (7, (45,)), (10, (32, 84)), (13, (58,)), (16, (58,))):
        sign(offset, *bytes_)
    ok &= (year >= 1970) & (year <= 2100) & (month >= 1) & (month <= 12)
    leap = (year % 4 == 0) & ((year % 100 != 0) | (year % 400 == 0))
    month_days = _MONTH_DAYS[np.where(ok, month, 1)] + (leap & (month == 2))
    ok &= (day >= 1) & (day <= month_days)
    ok &= (hour <= 23) & (minute <= 59) & (second <= 59)
    fraction_width = np.where(width > 19, width - 20, 0)
    ok &= (width == 19) | (
        (fraction_width > 0) & (data[np.minimum(safe + 19, len(data) - 1)] == 46)
    )
    fraction = np.zeros(len(starts), dtype=np.int64)
    round_up = np.zeros(len(starts), dtype=bool)
    longest = int(fraction_width.max(initial=0)) if len(starts) else 0
    ok &= fraction_width <= 18
    for k in range(min(longest, 18)):
        inside = fraction_width > k
        digit = _digit(data, np.where(inside, safe + 20 + k, 0) % len(data))
        ok &= ~inside | (digit <= 9)
        if k < 9:
            fraction = fraction * 10 + np.where(inside, digit, 0)
        elif k == 9:
            round_up = inside & (digit >= 5)
    fraction *= 10 ** (9 - min(longest, 9))
    days = _days_since_1970(np.where(ok, year, 1970), np.where(ok, month, 1), np.where(ok, day, 1))
    seconds = days * 86400 + np.where(ok, hour * 3600 + minute * 60 + second, 0)
    return seconds * 1_000_000_000 + fraction + round_up, ok


def _days_since_1970(year: Int64Array, month: Int64Array, day: Int64Array) -> Int64Array:
    """Proleptic Gregorian day number, relative to 1970-01-01."""
    shifted = year - (month <= 2)
    era, of_era = shifted // 400, shifted % 400
    of_year = (153 * (month + np.where(month > 2, -3, 9)) + 2) // 5 + day - 1
    return era * 146097 + of_era * 365 + of_era // 4 - of_era // 100 + of_year - 719468
