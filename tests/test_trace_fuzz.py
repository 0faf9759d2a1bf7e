"""Any bytes give a trace or one clear sentence: never a traceback, whatever the format is said to be."""

from __future__ import annotations

import gzip
import json
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from vsim.errors import UserError
from vsim.traces.readers import FORMATS, read_trace
from vsim.traces.trace import Trace
from vsim.traces.write import write_trace

DATA = Path(__file__).parent / "data" / "traces"
SAMPLES = sorted(path for path in DATA.rglob("*.*") if path.name != "README.md")
TEXTS = [path.read_bytes()[:4000] for path in SAMPLES]
# VSIM_FUZZ_EXAMPLES: how many inputs each test tries; more than the default is a job of its own.
BOUNDED = settings(
    max_examples=int(os.environ.get("VSIM_FUZZ_EXAMPLES", "25")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

NUMBERS = st.one_of(
    st.integers(-(10**30), 10**30),
    st.floats(),
    st.sampled_from(["NaN", "1e999", "-1", "", "9" * 400, "1_0", "٣", "0x1", "+5", " 7 "]),
)
FIELDS = st.sampled_from(
    [
        "timestamp",
        "timestamp_ns",
        "input_tokens",
        "output_tokens",
        "input_length",
        "output_length",
        "hash_ids",
        "tenant",
        "session",
        "priority",
        "max_tokens",
        "status",
        "aborted",
        "after",
        "think_ns",
        "hash_block_tokens",
        "schema",
        "session_id",
        "delay",
        "chat_id",
        "parent_chat_id",
        "input_toks",
        "output_toks",
        "arrival_time_ns",
        "sub_requests",
        "tool_duration_ns",
        "input_tok_ids",
        "custom_id",
        "body",
        "messages",
        "content",
        "max_completion_tokens",
        "conversations",
        "from",
        "value",
        "id",
        "completed",
        "total_input_tokens",
        "input_lens",
        "output_lens",
        "errors",
        "start_times",
        "resourceSpans",
        "scopeSpans",
        "spans",
        "attributes",
        "startTimeUnixNano",
        "start_time",
        "status",
        "gen_ai.usage.input_tokens",
        "gen_ai.usage.output_tokens",
        "key",
        "intValue",
    ]
)
JSON = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.floats(),
        st.text(max_size=5),
        NUMBERS,
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(FIELDS, inner, max_size=6),
        st.dictionaries(st.text(max_size=3), inner, max_size=2),
    ),
    max_leaves=20,
)


def reads_or_says_why(data: bytes, **options: object) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t"
        path.write_bytes(data)
        try:
            trace = read_trace(path, **options)  # type: ignore[arg-type]
        except UserError as error:
            assert str(error).isprintable()
            return
        check(trace)


def check(trace: Trace) -> None:
    """What every reader promises of what it returns."""
    n = len(trace)
    assert n > 0
    assert trace.arrival_ns[0] == 0 and (trace.arrival_ns[1:] >= trace.arrival_ns[:-1]).all()
    assert (trace.prompt_tokens >= 0).all() and (trace.output_tokens > 0).all()
    for column in (trace.max_tokens, trace.priority, trace.tenant, trace.session, trace.aborted):
        assert column is None or len(column) == n
    if trace.prefix_offsets is not None:
        assert trace.prefix_ids is not None and trace.prefix_block_tokens > 0
        assert (
            trace.prefix_offsets[-1] == len(trace.prefix_ids) and len(trace.prefix_offsets) == n + 1
        )
    if trace.sessions is not None:
        assert ((trace.sessions.after < range(n)) & (trace.sessions.after >= -1)).all()
        assert (trace.sessions.think_ns >= 0).all()


options = st.fixed_dictionaries(
    {},
    optional={
        "strict": st.booleans(),
        "on_error": st.sampled_from(["fail", "skip"]),
        "zero_output": st.sampled_from(["drop", "prefill-only", "error"]),
        "time_unit": st.sampled_from(["s", "ms", "us", "ns"]),
        "limit": st.integers(1, 5),
        "output_tokens_model": st.sampled_from(["upper-bound", 7]),
        "hash_block_tokens": st.sampled_from([1, 16, 512]),
    },
)


@pytest.mark.parametrize("form", [None, *FORMATS])
def test_any_bytes(form: str | None) -> None:
    @BOUNDED
    @given(st.binary(max_size=200), options)
    @example(b"PAR1" + b"\0" * 20 + b"PAR1", {})
    def run(data: bytes, chosen: dict[str, object]) -> None:
        reads_or_says_why(data, format=form, **chosen)

    run()


@pytest.mark.parametrize("form", [None, *FORMATS])
def test_deep_nesting_and_long_numbers(form: str | None) -> None:
    for data in (b"[" * 100_000, b'{"a":' * 100_000, b'{"timestamp":' + b"9" * 100_000 + b"}"):
        reads_or_says_why(data, format=form)


@BOUNDED
@given(JSON, st.binary(max_size=60))
def test_servegen_with_odd_tables_beside(table: object, noise: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c-trace.csv"
        path.write_bytes((DATA / "servegen" / "chunk-0-trace.csv").read_bytes()[:200] + noise)
        good = json.loads((DATA / "servegen" / "chunk-0-dataset.json").read_text())["0"]
        tables = {"0": {"input_tokens": table, "output_tokens": "{1: 0.5, 2: 0.5}"}, "600": good}
        (Path(folder) / "c-dataset.json").write_text(json.dumps(tables))
        try:
            check(read_trace(path, on_error="skip"))
        except UserError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize("form", [None, *FORMATS])
def test_json_of_the_right_words_in_the_wrong_places(form: str | None) -> None:
    @BOUNDED
    @given(st.lists(JSON, max_size=4), st.booleans(), options)
    def run(rows: list[object], as_array: bool, chosen: dict[str, object]) -> None:
        text = json.dumps(rows) if as_array else "\n".join(map(json.dumps, rows))
        reads_or_says_why(text.encode(), format=form, **chosen)

    run()


@pytest.mark.parametrize("at", range(len(SAMPLES)), ids=[path.name for path in SAMPLES])
def test_real_samples_with_damage(at: int) -> None:
    @BOUNDED
    @given(
        st.lists(st.tuples(st.integers(0, 3999), st.binary(max_size=4)), max_size=4),
        st.integers(1, 4000),
        options,
    )
    def run(edits: list[tuple[int, bytes]], length: int, chosen: dict[str, object]) -> None:
        data = bytearray(TEXTS[at][:length])
        for place, new in edits:
            data[place : place + len(new)] = new
        reads_or_says_why(bytes(data), **chosen)

    run()


HEADERS = [
    "TIMESTAMP,ContextTokens,GeneratedTokens",
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
    "arrived_at,num_prefill_tokens,num_decode_tokens",
    "time,prompt_tokens,completion_tokens,status,user",
    "request_type,arrival_timestamp,prompt_size,token_size",
]
CELLS = st.one_of(
    NUMBERS.map(str),
    st.integers(0, 99999).map(str),
    st.sampled_from(
        ["2024-01-02 10:00:00.1234567", "2024-02-30 10:00:00", "2024-01-02T10:00:00Z", '"a,b"', '"']
    ),
    st.text(max_size=4),
)


@BOUNDED
@given(st.sampled_from(HEADERS), st.lists(st.lists(CELLS, max_size=6), max_size=6), options)
def test_csv_with_odd_cells(header: str, rows: list[list[str]], chosen: dict[str, object]) -> None:
    text = "\n".join([header, *(",".join(row) for row in rows)])
    reads_or_says_why(text.encode("utf-8", "surrogatepass"), **chosen)


@BOUNDED
@given(st.integers(0, 200), st.integers(0, 255))
def test_damaged_compression(place: int, byte: int) -> None:
    import zstandard

    raw = TEXTS[0]
    for packed in (gzip.compress(raw, mtime=0), zstandard.ZstdCompressor().compress(raw)):
        data = bytearray(packed)
        data[place % len(data)] = byte
        reads_or_says_why(bytes(data))
        reads_or_says_why(bytes(data[:place]))


def parquet_sample() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.parquet"
        write_trace(read_trace(DATA / "mooncake_conversation_head.jsonl"), path)
        return path.read_bytes()


PARQUET = parquet_sample()


@BOUNDED
@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.binary(min_size=1, max_size=4)), max_size=4),
    options,
)
def test_damaged_parquet(edits: list[tuple[int, bytes]], chosen: dict[str, object]) -> None:
    data = bytearray(PARQUET)
    for place, new in edits:
        at = place % len(data)
        data[at : at + len(new)] = new[: len(data) - at]
    reads_or_says_why(bytes(data), **chosen)
    reads_or_says_why(bytes(data[: len(data) // 2]), **chosen)


ODD_VALUES = st.one_of(
    st.none(),
    st.integers(-5, 2**62),
    st.floats(),
    st.text(max_size=3),
    st.booleans(),
    st.lists(st.integers(0, 9), max_size=2),
)
COLUMNS = ("timestamp", "timestamp_ns", "input_tokens", "output_tokens", "max_tokens", "priority", "tenant", "session",
           "status", "aborted", "after", "think_ns", "hash_ids")  # fmt: skip


@BOUNDED
@given(st.data(), options)
def test_parquet_with_odd_columns(data: st.DataObject, chosen: dict[str, object]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = data.draw(st.integers(0, 3))
    columns = {}
    for name in data.draw(st.lists(st.sampled_from(COLUMNS), unique=True, max_size=8)):
        values = data.draw(st.lists(ODD_VALUES, min_size=rows, max_size=rows))
        try:
            columns[name] = pa.array(values)
        except (pa.ArrowException, OverflowError, TypeError):
            columns[name] = pa.array([1] * rows)
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink)
    reads_or_says_why(sink.getvalue().to_pybytes(), **chosen)
