"""Whole blocks of JSON lines at a time: the same trace, or the same complaint, as row by row."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vsim.errors import UserError
from vsim.traces import files, own_jsonl
from vsim.traces.clock import MAX_NS
from vsim.traces.draft import MAX_TOKENS
from vsim.traces.readers import read_trace
from vsim.traces.trace import Trace
from vsim.traces.write import write_trace

HEADER = json.dumps(
    {"schema": "vsim/trace/1", "origin_ns": 7, "assumptions": ["so 1 says."], "dropped": {"x": 2}}
)
whole = st.integers(0, 30) | st.sampled_from([MAX_TOKENS, MAX_TOKENS + 1, MAX_NS, 2**63, 10**19])
row = st.builds(
    lambda at, prompt, output: f'{{"timestamp_ns":{at},"input_tokens":{prompt},"output_tokens":{output}}}',
    whole, whole, whole,
)  # fmt: skip
# A slip of a writer's pen: (what, put for it) in one line.
slips: list[tuple[str, str]] = [
    (":", ": "), (":", ":0"), (":", ":-"), (":", ':"'), (":", ":null,"), ("}", ".5}"), ("}", "e2}"),
    ("}", ',"tenant":"a"}'), ("}", ',"output_tokens":3}'), ("}", ""), ("{", '{"schema":1,'), ("{", "\ufeff{"),
    ("tokens", "tokens2"), ('"input_tokens":', '"input_tokens":1 '), (",", ",\n"), ("}", "}\n"), ("}", "}\r"),
    ('"input_tokens":', '"input_tokens2":'), ("input_tokens", "output_tokens"), ("1", ""), ("1", "1 1"),
]  # fmt: skip


def outcome(path: Path, **options: Any) -> tuple[Any, ...] | str:
    try:
        trace = read_trace(path, **options)
    except UserError as error:
        return str(error)
    return told(trace)


def told(trace: Trace) -> tuple[Any, ...]:
    columns = (trace.arrival_ns, trace.prompt_tokens, trace.output_tokens)
    others = (trace.max_tokens, trace.priority, trace.tenant, trace.aborted, trace.prefix_ids)
    return (
        [column.tolist() for column in columns],
        [None if column is None else column.tolist() for column in others],
        trace.assumptions,
        trace.dropped,
        trace.source,
        trace.origin_ns,
        trace.prefix_block_tokens,
    )


@given(
    rows=st.lists(row, min_size=1, max_size=12),
    described=st.booleans(),
    slip=st.none() | st.tuples(st.integers(0, 11), st.sampled_from(slips)),
    ended=st.booleans(),
    limit=st.none() | st.integers(1, 6),
    block=st.sampled_from([40, 200, 1 << 20]),
    options=st.sampled_from([{}, {"strict": True}, {"on_error": "skip"}, {"zero_output": "prefill-only"}]),
)  # fmt: skip
def test_a_block_of_lines_reads_as_its_lines_do(
    rows: list[str],
    described: bool,
    slip: tuple[int, tuple[str, str]] | None,
    ended: bool,
    limit: int | None,
    block: int,
    options: dict[str, Any],
) -> None:
    lines = [HEADER] * described + rows
    if slip is not None:
        at, (what, instead) = slip
        lines[at % len(lines)] = lines[at % len(lines)].replace(what, instead, 1)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        path = Path(folder) / "trace.jsonl"
        path.write_bytes(("\n".join(lines) + "\n" * ended).encode())
        patch.setattr(files, "BLOCK_BYTES", block)
        found = outcome(path, format="vsim-jsonl", limit=limit, **options)
        patch.setattr(own_jsonl, "read_plain_rows", lambda *_: None)
        assert found == outcome(path, format="vsim-jsonl", limit=limit, **options)


def test_what_we_write_is_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = Trace.of([0.0, 0.5, 0.5], [1, 20, 300], [7, 8, 9])
    write_trace(trace, tmp_path / "t.jsonl")
    not_row_by_row(monkeypatch)
    assert told(read_trace(tmp_path / "t.jsonl"))[0] == told(trace)[0]


@pytest.mark.parametrize(
    "spaced",
    [lambda text: text.replace(":", ": "), lambda text: re.sub(r"([:,])", r" \1 ", text)],
    ids=["after colons", "everywhere"],
)
def test_spaces_and_another_order_of_fields_do_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spaced: Callable[[str], str]
) -> None:
    path = tmp_path / "t.jsonl"
    line = '{"output_tokens":%d,"timestamp_ns":%d,"input_tokens":%d}\r\n'
    path.write_bytes("".join(spaced(line % (k + 1, 1000 * k, 5)) for k in range(200)).encode())
    not_row_by_row(monkeypatch)
    trace = read_trace(path)
    assert trace.output_tokens.tolist() == list(range(1, 201))
    assert trace.arrival_ns.tolist() == [1000 * k for k in range(200)]
    assert set(np.unique(trace.prompt_tokens)) == {5}


def not_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("read row by row")

    monkeypatch.setattr("vsim.traces.jsonl.read_rows", refuse)
