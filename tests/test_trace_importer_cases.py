"""What a trace importer must survive: one scene per known trap (numbers T1 … T28)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vsim.errors import UserError
from vsim.traces.readers import read_trace
from vsim.traces.trace import Trace


@pytest.fixture
def read(tmp_path: Path):  # type: ignore[no-untyped-def]
    def _read(text: str | list[dict[str, object]], **options: object) -> Trace:
        path = tmp_path / "t"
        if not isinstance(text, str):
            text = "\n".join(json.dumps(row) for row in text) + "\n"
        path.write_bytes(text.encode())
        return read_trace(path, **options)  # type: ignore[arg-type]

    return _read


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"


def mooncake(**row: object) -> dict[str, object]:
    return {"timestamp": 0, "input_length": 10, "output_length": 2, **row}


def test_t1_seven_digit_fractions_are_exact(read) -> None:  # type: ignore[no-untyped-def]
    trace = read(AZURE + "2024-01-02 10:00:00.1234567,374,44\r\n2024-01-02 10:00:00.1234569,10,5")
    assert trace.arrival_ns.tolist() == [0, 200]
    assert trace.prompt_tokens.tolist() == [374, 10]
    assert trace.origin_ns == 1_704_189_600_123_456_700


@pytest.mark.parametrize(
    "fraction", ["", ".5", ".123456789", ".1234567894", ".000001", ".9999999996"]
)
def test_t1_any_number_of_digits(read, fraction: str) -> None:  # type: ignore[no-untyped-def]
    trace = read(AZURE + f"2024-02-29 23:59:59,1,1\n2024-02-29 23:59:59{fraction},1,1\n")
    expected = round(int((fraction[1:] + "0").ljust(10, "0")[:10]) / 10) if fraction else 0
    assert trace.arrival_ns.tolist() == [0, expected]


def test_t1_zones_are_honoured_and_styles_may_mix(read) -> None:  # type: ignore[no-untyped-def]
    trace = read(
        AZURE
        + "2024-01-02 10:00:00+00:00,1,1\n2024-01-02T12:00:01.5+02:00,1,1\n2024-01-02 10:00:02Z,1,1\n"
    )
    assert trace.arrival_ns.tolist() == [0, 1_500_000_000, 2_000_000_000]


def test_t1_dates_that_do_not_exist_are_refused(read) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError, match=r"t:3: TIMESTAMP: .*2023-02-29"):
        read(AZURE + "2024-02-29 10:00:00,1,1\n2023-02-29 10:00:00,1,1\n")


def test_t3_disorder_is_sorted_and_reported(read) -> None:  # type: ignore[no-untyped-def]
    rows = [mooncake(timestamp=t, input_length=i) for i, t in enumerate((3000, 1000, 2000), 1)]
    trace = read(rows)
    assert trace.arrival_ns.tolist() == [0, 1_000_000_000, 2_000_000_000]
    assert trace.prompt_tokens.tolist() == [2, 3, 1]
    assert any("2 of 3 timestamps out of order, max 2 s" in said for said in trace.assumptions)
    with pytest.raises(UserError, match="out of order"):
        read(rows, strict=True)


def test_t4_equal_times_keep_file_order_and_all_rows(read) -> None:  # type: ignore[no-untyped-def]
    trace = read([mooncake(timestamp=3000, input_length=n) for n in (9, 3, 7, 3)])
    assert trace.prompt_tokens.tolist() == [9, 3, 7, 3]
    assert trace.arrival_ns.tolist() == [0, 0, 0, 0]


def test_t5_an_unsaid_unit_is_announced_with_the_rates_it_means(read) -> None:  # type: ignore[no-untyped-def]
    rows = [mooncake(timestamp=t) for t in (0, 27482, 30535)]
    trace = read(rows)
    assert trace.arrival_ns.tolist() == [0, 27_482_000_000, 30_535_000_000]
    (said,) = [said for said in trace.assumptions if "unit" in said or "taken as ms" in said]
    assert "0.0655 req/s if ms" in said and "6.55e-05 req/s if s" in said
    assert read(rows, time_unit="s").span_s == 30535.0
    assert not read(rows, time_unit="s").assumptions


def test_t5_a_plain_csv_without_a_unit_is_a_guess_that_strict_refuses(read) -> None:  # type: ignore[no-untyped-def]
    text = "time,prompt_tokens,completion_tokens\n0,1,1\n27482,1,1\n30535,1,1\n"
    assert any("does not say the unit" in said for said in read(text).assumptions)
    with pytest.raises(UserError, match="--time-unit"):
        read(text, strict=True)
    with pytest.raises(UserError, match="'fortnight' is not one of s, ms, us, ns"):
        read(text, time_unit="fortnight")


BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


def test_t6_failures_are_not_completions(read) -> None:  # type: ignore[no-untyped-def]
    text = BURST + "5,ChatGPT,472,0,472,Conversation log\n6,ChatGPT,10,3,13,Conversation log\n"
    trace = read(text)
    assert trace.output_tokens.tolist() == [3]
    assert trace.dropped == {"failed_in_trace": 1}
    assert any("failed_in_trace" in said for said in trace.assumptions)
    kept = read(text, zero_output="prefill-only")
    assert kept.prompt_tokens.tolist() == [472, 10]
    with pytest.raises(UserError, match=r"t:2: 0 output tokens"):
        read(text, zero_output="error")


def test_t7_one_output_token_is_a_request_like_any_other(read) -> None:  # type: ignore[no-untyped-def]
    assert read([mooncake(output_length=1)]).output_tokens.tolist() == [1]


def test_t10_more_ids_than_blocks(read) -> None:  # type: ignore[no-untyped-def]
    rows = [mooncake(input_length=20, output_length=8, hash_ids=[0, 1])]
    trace = read(rows)
    assert trace.request(0).prefix_ids == (0,)
    assert any("1 row: more hash_ids" in said for said in trace.assumptions)
    with pytest.raises(
        UserError, match=r"t:1: has 2 hash_ids, but 20 prompt tokens in blocks of 512 need 1"
    ):
        read(rows, strict=True)
    assert read(rows, hash_block_tokens=16, strict=True).request(0).prefix_ids == (0, 1)


def test_t10_a_whole_file_of_16_token_ids_is_seen_and_said(read) -> None:  # type: ignore[no-untyped-def]
    rows = [mooncake(input_length=n, hash_ids=list(range(-(-n // 16)))) for n in range(600, 620)]
    trace = read(rows)
    assert trace.prefix_block_tokens == 16
    assert any("blocks of 16 in all" in said for said in trace.assumptions)


def test_t12_a_cut_block_shares_its_tokens(read) -> None:  # type: ignore[no-untyped-def]
    trace = read(
        [mooncake(input_length=512, hash_ids=[5]), mooncake(input_length=300, hash_ids=[5])]
    )
    assert trace.request(1).prefix_ids == (5,)
    assert trace.request(1).prefix_block_tokens == 512


def test_t14_a_cut_tail_is_left_out_but_a_broken_middle_is_an_error(read) -> None:  # type: ignore[no-untyped-def]
    good, cut = json.dumps(mooncake()), '{"timestamp": 12.5, "input_len'
    trace = read(f"{good}\n{cut}")
    assert len(trace) == 1 and trace.dropped == {"truncated_tail": 1}
    assert any("last line (2) is cut off" in said for said in trace.assumptions)
    with pytest.raises(UserError, match=r"t:2: .*cut off"):
        read(f"{good}\n{cut}", strict=True)
    broken = f"{good}\n" + f"{cut}\n" * 7 + f"{good}\n"
    with pytest.raises(UserError, match="t:2: is not JSON"):
        read(broken)
    skipped = read(broken, on_error="skip")
    assert len(skipped) == 2 and skipped.dropped == {"bad_row": 7}
    (said,) = [said for said in skipped.assumptions if "unusable" in said]
    assert said.count("is not JSON") == 5 and "2 more" in said


def test_t14_a_csv_cut_in_its_last_line(read) -> None:  # type: ignore[no-untyped-def]
    trace = read(AZURE + "2024-01-02 10:00:00,374,44\r\n2024-01-02 10:0")
    assert len(trace) == 1 and trace.dropped == {"truncated_tail": 1}
    with pytest.raises(UserError, match="t:2: has 1 fields, the header has 3"):
        read(AZURE + "2024-01-02 10:0\n2024-01-02 10:00:00,374,44\r\n")


def test_t15_each_bad_field_is_named(read) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(
        UserError, match=r"t:1: timestamp is NaN, not a finite number; input_length is negative"
    ):
        read('{"timestamp":NaN,"input_length":-3,"output_length":"12"}\n')
    trace = read('{"timestamp":1.0,"input_length":3.0,"output_length":"12"}\n')
    assert (int(trace.prompt_tokens[0]), int(trace.output_tokens[0])) == (3, 12)
    assert any("written as text" in said for said in trace.assumptions)
    with pytest.raises(UserError, match="refused by --strict"):
        read('{"timestamp":1.0,"input_length":3,"output_length":"12"}\n', strict=True)


@pytest.mark.parametrize(
    "value", ["NaN", "Infinity", "-Infinity", "-1", "1.5", '"x"', "true", "[1]", "{}", "1e400", "null", "9" * 5000]
)  # fmt: skip
def test_t15_no_odd_number_becomes_tokens(read, value: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError, match=r"^t:1: "):
        read('{"timestamp":0,"output_length":1,"input_length":' + value + "}\n")


@pytest.mark.parametrize(
    "value", ["nan", "inf", "-3", "1.5", "", "abc", "0x10", "1_000", "99999999999999999999"]
)
def test_t15_in_csv(read, value: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError, match=r"^t:2: ContextTokens: "):
        read(AZURE + f"2024-01-02 10:00:00,{value},44\n")
    assert (
        len(
            read(
                AZURE + f"2024-01-02 10:00:00,{value},44\n2024-01-02 10:00:00,1,4", on_error="skip"
            )
        )
        == 1
    )


def test_t19_an_aborted_request_is_load_not_a_completion(read) -> None:  # type: ignore[no-untyped-def]
    trace = read([mooncake(max_tokens=512, output_length=37, status="aborted"), mooncake()])
    assert trace.aborted is not None and trace.aborted.tolist() == [True, False]
    assert trace.output_tokens.tolist() == [37, 2]
    assert trace.request(0).aborted and trace.request(0).max_tokens == 512
    assert any("no completion" in said for said in trace.assumptions)


def test_t26_a_cap_is_not_a_length(read) -> None:  # type: ignore[no-untyped-def]
    rows = [{"timestamp": 0, "input_length": 10, "max_tokens": 64}]
    with pytest.raises(UserError, match="max_tokens is a cap, not a length"):
        read(rows)
    trace = read(rows, output_tokens_model="upper-bound")
    assert trace.output_tokens.tolist() == [64]
    assert any("upper bound" in said for said in trace.assumptions)
    assert read(rows, output_tokens_model=20).output_tokens.tolist() == [20]


@pytest.mark.parametrize("text", [AZURE, AZURE.strip(), BURST, '{"schema": "vsim/trace/1"}\n'])
def test_t28_no_rows_is_an_error(read, text: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError, match="no requests"):
        read(text)


def test_t26_without_any_arrival_time_the_cap_is_still_what_matters(read) -> None:  # type: ignore[no-untyped-def]
    rows = [{"input_length": 100, "max_tokens": 64}]
    with pytest.raises(UserError, match="is a cap, not a length"):
        read(rows)
    said = " ".join(read(rows, output_tokens_model="upper-bound").assumptions)
    assert "upper bounds" in said and "no arrival times" in said


@pytest.mark.parametrize(
    "row",
    [
        {"arrival": 100.0, "first_token": 99.998, "end": 101.2},
        {"ttft": 0.2, "itls": [0.03, 0.03, 0.03], "output_tokens": 9, "latency": 0.29},
    ],
)
def test_t17_t20_a_latency_log_without_lengths_is_no_trace(read, row: dict[str, object]) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError, match="a log of measured latencies"):
        read([row])


def test_a_csv_without_a_header_says_so(read) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError, match="first line holds values"):
        read("5,ChatGPT,472,0,472,Conversation log\n")


def test_all_failed_is_no_trace(read) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError, match=r"all rows \(1\) have 0 output tokens"):
        read(BURST + "5,ChatGPT,472,0,472,Conversation log\n")


def test_some_rows_without_a_timestamp_are_errors(read) -> None:  # type: ignore[no-untyped-def]
    rows = [mooncake(), {"input_length": 10, "output_length": 2}]
    with pytest.raises(UserError, match="t:2: timestamp is missing"):
        read(rows)
    with pytest.raises(UserError, match="t:2: has a timestamp, unlike the rows before"):
        read(rows[::-1])


def test_more_output_than_the_cap_allows_is_said(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"timestamp":0,"input_length":100,"max_tokens":5,"output_length":37}\n')
    assert any(
        "more output tokens than max_tokens" in said for said in read_trace(path).assumptions
    )
    with pytest.raises(UserError, match=r"t\.jsonl:1: more output tokens"):
        read_trace(path, strict=True)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (((1, -1), (2, 99)), "parent_chat_id names no earlier row"),
        (((1, 2), (2, 1)), "parent_chat_id names no earlier row"),
        (((1, -1), (1, -1), (2, 1)), "chat_id has occurred before"),
        (((1, -1), (2, 1)), None),
    ],
)
def test_missing_circular_and_doubled_parents_are_said(
    tmp_path: Path, rows: tuple[tuple[int, int], ...], said: str | None
) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(
        "".join(
            f'{{"chat_id":{chat},"parent_chat_id":{parent},"timestamp":{at}.5,"input_length":5,'
            f'"output_length":2,"type":"text","turn":1,"hash_ids":[3]}}\n'
            for at, (chat, parent) in enumerate(rows)
        )
    )
    trace = read_trace(path)
    assert len(trace) == len(rows)
    found = [line for line in trace.assumptions if "chat_id" in line]
    assert (len(found) == 1 and said in found[0]) if said else not found


def test_a_turn_with_both_timestamp_and_delay_is_said(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(
        '{"session_id":"a","timestamp":0,"input_length":50,"output_length":5}\n'
        '{"session_id":"a","timestamp":50,"delay":5,"input_length":60,"output_length":5}\n'
    )
    trace = read_trace(path)
    assert trace.arrival_ns.tolist() == [0, 50_000_000]
    assert any("both a timestamp and a delay" in said for said in trace.assumptions)


def test_a_column_of_dates_is_never_taken_for_no_arrival_times(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("date,input_tokens,output_tokens\n01/02/2024 10:00:00,3,4\n")
    with pytest.raises(UserError, match=r"t\.csv:2: date: '01/02/2024 10:00:00' is not a"):
        read_trace(path)


def test_json_dates_with_and_without_zone_in_one_file_are_announced(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    row = '{{"timestamp":"2024-05-10T00:00:00.{}","input_tokens":3,"output_tokens":3}}\n'
    path.write_text(row.format("1+00:00") + row.format("2"))
    trace = read_trace(path)
    assert trace.arrival_ns.tolist() == [0, 100_000_000]
    assert any("those without are read as UTC (first at line 2)" in a for a in trace.assumptions)
    with pytest.raises(UserError, match=r"t\.jsonl:2: .*--strict"):
        read_trace(path, strict=True)
    path.write_text(row.format("1Z") + row.format("2+00:00"))
    read_trace(path, strict=True)
