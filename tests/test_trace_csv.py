"""Three ways through a CSV (Arrow, columns of digits, row by row) tell the same story."""

from __future__ import annotations

import tempfile
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vsim.errors import UserError
from vsim.traces import csv_table
from vsim.traces.clock import TimeError, datetime_to_ns, number_to_ns, parse_number
from vsim.traces.digits import datetimes, decimals, integers
from vsim.traces.readers import read_trace

AZURE = Path(__file__).parents[1] / "traces" / "azure2023_conv.csv"


def columns(texts: list[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # type: ignore[type-arg]
    raw = [text.encode() for text in texts]
    data = np.frombuffer(b"\n".join(raw) + b"\n", dtype=np.uint8)
    lengths = np.asarray([len(item) for item in raw])
    starts = np.concatenate(([0], np.cumsum(lengths + 1)[:-1]))
    return data, starts, starts + lengths


DIGITS = st.text("0123456789.", min_size=0, max_size=25)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.one_of(DIGITS, st.decimals(0, 10**9, places=7).map(str)), min_size=1, max_size=5),
    st.sampled_from([1, 1000, 10**6, 10**9]),
)
def test_columns_of_decimals_are_what_exact_arithmetic_says(texts: list[str], scale: int) -> None:
    unit = {1: "ns", 1000: "us", 10**6: "ms", 10**9: "s"}[scale]
    values, ok = decimals(*columns(texts), scale)
    for text, value, good in zip(texts, values.tolist(), ok.tolist(), strict=True):
        if good:
            assert value == number_to_ns(parse_number(text), unit)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.text("0123456789+-x", max_size=20), min_size=1, max_size=5))
def test_columns_of_integers(texts: list[str]) -> None:
    values, ok = integers(*columns(texts))
    for text, value, good in zip(texts, values.tolist(), ok.tolist(), strict=True):
        assert good == (0 < len(text) <= 18 and text.isdigit())
        assert not good or value == int(text)


MOMENTS = st.datetimes(
    min_value=datetime(1970, 1, 1),
    max_value=datetime(2100, 12, 31),
)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(
            MOMENTS,
            st.text("0123456789", max_size=12),
            st.sampled_from(["", "+00:00"]),
            st.integers(0, 25),
            st.sampled_from("0159- :x"),
        ),
        min_size=1,
        max_size=4,
    ),
    st.booleans(),
)
def test_columns_of_dates_are_what_the_calendar_says(rows: list[tuple], damage: bool) -> None:  # type: ignore[type-arg]
    texts = []
    for moment, fraction, zone, at, char in rows:
        text = moment.strftime("%Y-%m-%d %H:%M:%S") + (f".{fraction}" if fraction else "") + zone
        text = text.rjust(len(text), "0") if len(text.split("-")[0]) == 4 else "0" + text
        texts.append(text[:at] + char + text[at + 1 :] if damage else text)
    values, ok = datetimes(*columns(texts))
    for text, value, good in zip(texts, values.tolist(), ok.tolist(), strict=True):
        assert good or damage
        if good:
            assert value == datetime_to_ns(text)


def test_a_day_that_does_not_exist_is_no_date() -> None:
    assert datetimes(*columns(["2023-02-29 00:00:00", "2024-02-29 00:00:00"]))[1].tolist() == [
        False,
        True,
    ]
    with pytest.raises(TimeError):
        datetime_to_ns("2023-02-29 00:00:00")


def outcome(path: Path, arrow_from: int, **options: object) -> object:
    before = csv_table.ARROW_BLOCK_BYTES
    csv_table.ARROW_BLOCK_BYTES = arrow_from
    try:
        trace = read_trace(path, **options)  # type: ignore[arg-type]
    except UserError as error:
        return str(error)
    finally:
        csv_table.ARROW_BLOCK_BYTES = before
    return (
        trace.arrival_ns.tolist(),
        trace.prompt_tokens.tolist(),
        trace.output_tokens.tolist(),
        trace.origin_ns,
        trace.assumptions,
        trace.dropped,
    )


def test_arrow_reads_the_azure_trace_as_the_columns_do() -> None:
    assert outcome(AZURE, 1) == outcome(AZURE, 1 << 60)


TIMES = st.sampled_from(
    ["2024-01-02 10:00:00.1234567", "2024-01-02 10:00:01+00:00", "2024-02-29 23:59:59", "2023-02-29 00:00:00",
     "2024-01-02T10:00:00Z", "2024-01-02", "1969-12-31 00:00:00", "12.5", "", "x", "2024-01-02 10:00:00.1234567891"]
)  # fmt: skip
COUNTS = st.sampled_from(
    ["374", "0", "-1", "12.0", "1.5", "", "nan", " 7", "1e3", "99999999999", "+5", "007"]
)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(TIMES, COUNTS, COUNTS), min_size=1, max_size=4),
    st.sampled_from(["\n", "\r\n", "\n\n"]),
    st.booleans(),
    st.sampled_from(["fail", "skip"]),
)
def test_arrow_and_the_careful_path_agree_on_odd_rows(
    rows: list[tuple[str, str, str]], end: str, finished: bool, on_error: str
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t"
        text = end.join(["TIMESTAMP,ContextTokens,GeneratedTokens", *map(",".join, rows)])
        path.write_bytes((text + (end if finished else "")).encode())
        assert outcome(path, 1, on_error=on_error) == outcome(path, 1 << 60, on_error=on_error)


def test_blocks_join_without_losing_a_row_or_a_line_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vsim.traces import files

    whole = read_trace(AZURE)
    monkeypatch.setattr(files, "BLOCK_BYTES", 1000)
    pieces = read_trace(AZURE)
    assert (pieces.arrival_ns == whole.arrival_ns).all() and (
        pieces.output_tokens == whole.output_tokens
    ).all()
    lines = AZURE.read_bytes().split(b"\r\n")
    lines[15_000] = b"2023-11-16 19:00:00,oops,5"
    (tmp_path / "t").write_bytes(b"\r\n".join(lines))
    with pytest.raises(UserError, match=r"t:15001: ContextTokens: 'oops' is not a number"):
        read_trace(tmp_path / "t")
