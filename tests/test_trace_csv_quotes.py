"""CSV with quoted line breaks, columns named twice, dates of two styles: right, or said."""

from __future__ import annotations

from pathlib import Path

import pytest

from vsim.errors import UserError
from vsim.traces.csv_blocks import whole_records
from vsim.traces.readers import read_trace


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "in.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_quoted_line_break_belongs_to_its_row_and_line_numbers_count_it(
    tmp_path: Path, end: str
) -> None:
    good = f'timestamp,prompt,input_tokens,output_tokens{end}{end}0,"a{end}b, c",5,3{end}'
    trace = read_trace(write(tmp_path, good + f"1,x,7,3{end}"), time_unit="s")
    assert trace.prompt_tokens.tolist() == [5, 7]
    with pytest.raises(UserError, match=r"in\.csv:6: input_tokens: -7 is negative"):
        read_trace(write(tmp_path, good + f"{end}1,x,-7,3{end}"), time_unit="s")


def test_a_stray_quote_costs_its_own_row_only(tmp_path: Path) -> None:
    rows = 'timestamp,input_tokens,output_tokens\n0,"5,3\n1,6,3\n2,7,3\n3,"8,3\n4,9,3\n'
    trace = read_trace(write(tmp_path, rows), time_unit="s", on_error="skip")
    assert trace.prompt_tokens.tolist() == [6, 7, 9]
    assert any("in.csv:2:" in said and "in.csv:5:" in said for said in trace.assumptions)


def test_a_file_cut_off_within_quotes_gives_what_came_before(tmp_path: Path) -> None:
    rows = 'timestamp,input_tokens,output_tokens\n0,5,3\n1,6,"'
    trace = read_trace(write(tmp_path, rows), time_unit="s")
    assert trace.prompt_tokens.tolist() == [5]
    assert trace.dropped == {"truncated_tail": 1}


def test_no_quoted_line_break_falls_between_two_blocks() -> None:
    blocks = [b'a,b\n1,"x\n', b"y\n", b'z"\n2,c\n', b'3,"d\n']
    whole = list(whole_records(blocks))
    assert whole == [b"a,b\n", b'1,"x\ny\nz"\n2,c\n', b'3,"d\n']


def test_separators_inside_quotes_are_kept_in_names_and_in_complaints(tmp_path: Path) -> None:
    header = "timestamp,tenant,input_tokens,output_tokens\n"
    trace = read_trace(write(tmp_path, header + '0,"Acme, Inc",5,3\n'), time_unit="s")
    assert trace.tenant_names == ("Acme, Inc",)
    with pytest.raises(UserError, match=r":2: input_tokens: '1,234' is not a number"):
        read_trace(write(tmp_path, header + '0,a,"1,234",3\n'), time_unit="s")


def test_a_column_named_twice_is_refused(tmp_path: Path) -> None:
    rows = "timestamp,input_tokens,input_tokens,output_tokens\n0,3,5,4\n"
    with pytest.raises(UserError, match="more than one column 'input_tokens'"):
        read_trace(write(tmp_path, rows))


def test_dates_with_and_without_zone_in_one_file_are_announced(tmp_path: Path) -> None:
    header = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    plain = "2024-05-10 00:00:00.1,3,4\n"
    zoned = "2024-05-10 00:00:00.2+00:00,3,4\n2024-05-10 02:00:00.3+02:00,3,4\n"
    both = read_trace(write(tmp_path, header + zoned + plain.replace("00.1", "00.4")))
    assert both.arrival_ns.tolist() == [0, 100_000_000, 200_000_000]
    assert any("1 of 3 timestamps name no time zone" in said for said in both.assumptions)
    with pytest.raises(UserError, match=r"in\.csv:4: .*--strict"):
        read_trace(write(tmp_path, header + zoned + plain), strict=True)
    for alike in (plain, zoned, "2024-05-10,3,4\n"):
        trace = read_trace(write(tmp_path, header + alike), strict=True)
        assert not any("zone" in said for said in trace.assumptions)
