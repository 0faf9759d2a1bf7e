"""Traces are read with the right counts, span and units, or refused with the true reason."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from vsim.errors import UserError
from vsim.traces.readers import read_trace
from vsim.traces.trace import Trace

DATA = Path(__file__).parent / "data" / "traces"
SHIPPED = Path(__file__).parents[1] / "traces" / "azure2023_conv.csv"


def read_text(tmp_path: Path, text: str | bytes, name: str = "t.txt", **options: object) -> Trace:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_trace(path, **options)  # type: ignore[arg-type]


def test_the_shipped_azure_trace_is_whole() -> None:
    trace = read_trace(SHIPPED)
    assert trace.source.format == "azure"
    assert len(trace) == 19_366
    assert trace.arrival_ns[-1] == 3_501_721_937_000
    assert int(trace.prompt_tokens.max()) == 14_050
    assert int(trace.output_tokens.min()) > 0
    assert trace.arrival_ns[1] == 4_314_579_000
    assert trace.assumptions == () and trace.dropped == {}


@pytest.mark.parametrize(
    ("name", "form", "rows", "last_ns", "prompt", "output"),
    [
        ("azure2023_code_head.csv", "azure", 199, 199_073_379_000, 414_150, 4_897),
        ("azure2024_code_1week_rows.csv", "azure", 10, 604_799_919_571_000, 24_016, 180),
        ("azure2024_conv_1week_rows.csv", "azure", 10, 604_799_994_297_000, 12_767, 856),
        ("burstgpt_6col_rows.csv", "burstgpt", 3, 113_000_000_000, 1_976, 524),
        ("mooncake_conversation_head.jsonl", "mooncake", 60, 15_000_000_000, 743_189, 21_759),
        ("aiperf_precise_schedule.jsonl", "mooncake", 8, 5_000_000_000, 2_800, 2_056),
        ("aiperf_production_trace.jsonl", "mooncake", 10, 1_500_000_000, 7_680, 1_856),
        ("bailian_doc_example.jsonl", "bailian", 1, 0, 521, 132),
        ("vidur_splitwise_code_head.csv", "vidur", 200, 199_089_585_000, 414_215, 4_907),
        ("vidur_arxiv_lengths_500.csv", "vidur", 499, 0, 1_268_564, 148_728),
        ("splitwise_sim_test_trace.csv", "splitwise-sim", 3, 3_000_000_000, 8_192, 56),
        ("vsim_case_head.jsonl", "vsim-jsonl", 20, 1_740_929_000, 24_725, 13_787),
    ],
)
def test_public_samples_read_with_their_counts_and_spans(
    name: str, form: str, rows: int, last_ns: int, prompt: int, output: int
) -> None:
    trace = read_trace(DATA / name)
    assert trace.source.format == form
    assert (len(trace), int(trace.arrival_ns[-1])) == (rows, last_ns)
    assert (int(trace.prompt_tokens.sum()), int(trace.output_tokens.sum())) == (prompt, output)


def test_our_own_case_traces_have_one_id_per_full_block_of_16() -> None:
    trace = read_trace(DATA / "vsim_case_head.jsonl")
    assert trace.prefix_block_tokens == 16
    assert trace.prefix_offsets is not None
    assert (np.diff(trace.prefix_offsets) == trace.prompt_tokens // 16).all()
    assert trace.origin_ns == 83_795_000


def test_mooncake_keeps_one_id_per_512_tokens_with_the_partial_last_block() -> None:
    trace = read_trace(DATA / "mooncake_conversation_head.jsonl")
    assert trace.prefix_block_tokens == 512
    assert trace.prefix_offsets is not None
    assert (np.diff(trace.prefix_offsets) == -(-trace.prompt_tokens // 512)).all()
    assert trace.request(0).prefix_ids == tuple(range(14))


def test_a_format_is_known_by_content_not_by_name(tmp_path: Path) -> None:
    raw = (DATA / "mooncake_conversation_head.jsonl").read_bytes()
    assert read_text(tmp_path, raw, "trace.csv").source.format == "mooncake"


def test_gzip_and_zstd_read_like_the_plain_file(tmp_path: Path) -> None:
    import zstandard

    raw = (DATA / "azure2023_code_head.csv").read_bytes()
    plain = read_text(tmp_path, raw)
    for packed in (gzip.compress(raw), zstandard.ZstdCompressor().compress(raw)):
        trace = read_text(tmp_path, packed, "whatever")
        assert (trace.arrival_ns == plain.arrival_ns).all()
        assert (trace.prompt_tokens == plain.prompt_tokens).all()


def test_a_zip_bomb_is_refused_before_it_fills_memory(tmp_path: Path) -> None:
    row = b"2024-01-02 10:00:00,374,44\n"
    raw = gzip.compress(b"TIMESTAMP,ContextTokens,GeneratedTokens\n" + row * 100_000)
    with pytest.raises(UserError, match="decompresses to more than"):
        read_text(tmp_path, raw, max_bytes=1_000_000)
    endless_line = gzip.compress(b'{"a":"' + b"x" * (70 << 20))
    with pytest.raises(UserError, match="line is longer than"):
        read_text(tmp_path, endless_line, format="mooncake")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b"\n\n  \n", "is empty"),
        (b"\x7fELF\x00\x01\x02", "binary file"),
        ("TIMESTAMP,ContextTokens\n".encode("utf-16"), "UTF-16"),
        (b"hello world\n", "no trace format known"),
        (b"a,b,c\n1,2,3\n", "columns a, b, c"),
        (b'{"foo": 1}\n', "JSON with fields foo"),
        (b"[1, 2, 3]\n", "no trace format known"),
        (b"PAR1 and then nothing", "can't be read as Parquet"),
        (b"\x1f\x8b\x08 not gzip at all", "damaged gzip"),
        (b"\x28\xb5\x2f\xfd not zstd at all", "damaged zstd"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens", "no requests"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n", "no requests"),
    ],
)
def test_what_is_no_trace_is_refused_with_the_reason(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    with pytest.raises(UserError, match=reason):
        read_text(tmp_path, content)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        read_trace(tmp_path / "nothing.csv")
    with pytest.raises(UserError, match="is a folder"):
        read_trace(tmp_path)


def test_an_unknown_format_name_lists_what_is_known(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="known are azure"):
        read_trace(SHIPPED, format="azur")


def test_a_byte_order_mark_is_no_part_of_the_header(tmp_path: Path) -> None:
    raw = b"\xef\xbb\xbf" + (DATA / "burstgpt_6col_rows.csv").read_bytes()
    assert len(read_text(tmp_path, raw)) == 3


def test_a_wrong_encoding_is_named_with_its_line(tmp_path: Path) -> None:
    raw = (DATA / "burstgpt_6col_rows.csv").read_bytes().replace(b"GPT-4", b"GPT-\xe4")
    with pytest.raises(UserError, match=r"t\.txt:4: Model: is not UTF-8"):
        read_text(tmp_path, raw)


def test_columns_can_be_named_and_access_logs_are_such_csv(tmp_path: Path) -> None:
    log = (
        "time,client,code,plen,glen\n"
        "2026-01-05T10:00:00.5Z,acme,200,120,40\n"
        "2026-01-05T10:00:01.5Z,blue,499,300,7\n"
        "2026-01-05T10:00:02.5Z,acme,503,300,0\n"
    )
    names = {
        "input_tokens": "plen",
        "output_tokens": "glen",
        "tenant": "client",
        "status": "code",
        "timestamp": "time",
    }
    trace = read_text(tmp_path, log, column_map=names)
    assert trace.arrival_ns.tolist() == [0, 1_000_000_000]
    assert trace.tenant_names == ("acme", "blue")
    assert trace.aborted is not None and trace.aborted.tolist() == [False, True]
    assert trace.dropped == {"failed_in_trace": 1}


def test_usual_column_names_are_understood_and_announced(tmp_path: Path) -> None:
    trace = read_text(tmp_path, "arrival_ms,prompt_len,output_len\n0,5,6\n1500,7,8\n",
                      column_map={"timestamp": "arrival_ms"})  # fmt: skip
    assert trace.arrival_ns.tolist() == [0, 1_500_000_000]
    assert any("prompt_len as input_tokens" in sentence for sentence in trace.assumptions)


def test_a_map_to_a_missing_column_says_which_there_are(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no column 'plen'; there are a, b"):
        read_text(tmp_path, "a,b\n1,2\n", column_map={"input_tokens": "plen"})


def test_the_limit_takes_the_first_usable_requests(tmp_path: Path) -> None:
    trace = read_trace(SHIPPED, limit=100)
    assert len(trace) == 100
    assert any("first 100" in sentence for sentence in trace.assumptions)
    rows = "\n".join(
        json.dumps({"timestamp": t, "input_length": 5, "output_length": t % 2}) for t in range(9)
    )
    assert read_text(tmp_path, rows, limit=2).arrival_ns.tolist() == [0, 2_000_000]


def test_the_hash_of_the_file_and_no_path_is_kept(tmp_path: Path) -> None:
    import hashlib

    source = read_trace(SHIPPED).source
    assert source.name == "azure2023_conv.csv"
    assert source.sha256 == hashlib.sha256(SHIPPED.read_bytes()).hexdigest()


def test_eight_columns_of_burstgpt_have_sessions_and_an_elapsed_time(tmp_path: Path) -> None:
    trace = read_text(
        tmp_path,
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5270414,abc,3.2,GPT-4,472,18,490,Conversation log\n"
        "5270420.5,abc,1.0,GPT-4,1087,230,1317,Conversation log\n"
        "5270421,,0.4,ChatGPT,417,276,693,API log\n",
    )
    assert trace.source.format == "burstgpt"
    assert trace.arrival_ns.tolist() == [0, 6_500_000_000, 7_000_000_000]
    assert trace.session is not None and trace.session.tolist() == [0, 0, -1]
    assert trace.tenant_names == ("GPT-4", "ChatGPT")


@pytest.mark.parametrize("mark", [";", "\t"])
def test_semicolons_and_tabs_separate_as_well(tmp_path: Path, mark: str) -> None:
    raw = (DATA / "azure2023_code_head.csv").read_text().replace(",", mark)
    assert len(read_text(tmp_path, raw)) == 199


def test_quoted_fields_may_hold_the_separator(tmp_path: Path) -> None:
    trace = read_text(
        tmp_path,
        'timestamp_ns,tenant,input_tokens,output_tokens\n0,"Smith, Jones",5,6\n"7",x,"8",9\n',
    )
    assert trace.prompt_tokens.tolist() == [5, 8]
    assert trace.tenant_names == ("Smith, Jones", "x")


def test_epoch_milliseconds_are_not_taken_for_seconds(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 1_700_000_000_000 + ms, "input_tokens": 5, "output_tokens": 6}
        for ms in (0, 1500)
    ]
    trace = read_text(tmp_path, "\n".join(map(json.dumps, rows)))
    assert trace.arrival_ns.tolist() == [0, 1_500_000_000]
    assert any("taken as ms" in said for said in trace.assumptions)


def test_our_schemas_seconds_are_announced_unless_the_file_says_so_itself(tmp_path: Path) -> None:
    row = '{"timestamp": 0, "input_tokens": 5, "output_tokens": 6}\n'
    rows = row + row.replace("0,", "2.5,")
    assert any(
        "taken as s, as vsim/trace/1" in said for said in read_text(tmp_path, rows).assumptions
    )
    assert read_text(tmp_path, '{"schema": "vsim/trace/1"}\n' + rows).assumptions == ()


def test_prompts_with_too_few_ids_or_none_are_private_from_there_on(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 0, "input_length": 2000, "output_length": 6, "hash_ids": [1, 2]},
        {"timestamp": 1, "input_length": 2000, "output_length": 6},
        {"timestamp": 2, "input_length": 1000, "output_length": 6, "hash_ids": [1, 2]},
    ]
    said = " ".join(read_text(tmp_path, "\n".join(map(json.dumps, rows))).assumptions)
    assert "1 row: fewer hash_ids than the prompt has full blocks of 512" in said
    assert "1 of 3 rows have no hash_ids" in said


def test_parquet_of_others_is_read_by_usual_names_or_by_map(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    when = pa.array([1_000_000, 2_500_000], pa.timestamp("us"))
    table = pa.table({"arrival_time": when, "prompt_tokens": [5, 6], "n_out": [7, 8]})
    pq.write_table(table, tmp_path / "t")
    trace = read_trace(tmp_path / "t", column_map={"output_tokens": "n_out"})
    assert trace.arrival_ns.tolist() == [0, 1_500_000_000]
    assert (trace.prompt_tokens.tolist(), trace.output_tokens.tolist()) == ([5, 6], [7, 8])
    with pytest.raises(
        UserError, match="has no column output_tokens; its columns are arrival_time"
    ):
        read_trace(tmp_path / "t")
