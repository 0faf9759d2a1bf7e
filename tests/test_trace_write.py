"""What goes out and comes back is the same trace."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vsim.errors import UserError
from vsim.traces.readers import read_trace
from vsim.traces.trace import Sessions, Trace, TraceSource
from vsim.traces.write import write_trace

NAMES = st.text(min_size=1, max_size=8).filter(lambda name: name.isprintable())


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    n = draw(st.integers(1, 12))

    def column(low: int, high: int) -> np.ndarray:  # type: ignore[type-arg]
        return np.asarray(draw(st.lists(st.integers(low, high), min_size=n, max_size=n)), np.int64)

    arrival = np.sort(column(0, 2**60))
    arrival -= arrival[0]
    output = column(1, 10_000)
    trace = Trace(arrival, column(0, 10_000), output, TraceSource("x", "inline", "ab"))
    changes: dict[str, object] = {"origin_ns": draw(st.integers(0, 2**60))}
    if draw(st.booleans()):
        changes["max_tokens"] = output + column(0, 5)
    if draw(st.booleans()) and n > 1:
        changes["priority"] = np.concatenate(([1], column(-5, 5)[1:])).astype(np.int32)
    if draw(st.booleans()):
        names = tuple(dict.fromkeys(draw(st.lists(NAMES, min_size=n, max_size=n))))
        changes["tenant_names"] = names
        changes["tenant"] = np.minimum(np.arange(n), len(names) - 1).astype(np.int32)
        changes["session_names"] = names[:1]
        changes["session"] = np.where(np.arange(n) == 0, 0, -1).astype(np.int32)
    if draw(st.booleans()) and n > 1:
        after = np.where(np.arange(n) == n - 1, n - 2, -1)
        changes["sessions"] = Sessions(after, np.where(after >= 0, 77, 0))
    if draw(st.booleans()):
        changes["aborted"] = np.arange(n) == 0
    if draw(st.booleans()):
        block = draw(st.sampled_from([16, 512]))
        lengths = -(-trace.prompt_tokens // block)
        if lengths.sum():
            changes["prefix_offsets"] = np.concatenate(([0], np.cumsum(lengths)))
            changes["prefix_ids"] = np.arange(int(lengths.sum())) - 3
            changes["prefix_block_tokens"] = block
    changes["assumptions"] = tuple(draw(st.lists(NAMES, max_size=2, unique=True)))
    changes["dropped"] = {"failed_in_trace": 3} if draw(st.booleans()) else {}
    return dataclasses.replace(trace, **changes)  # type: ignore[arg-type]


def same(left: object, right: object) -> bool:
    if isinstance(left, np.ndarray):
        return (
            isinstance(right, np.ndarray)
            and left.dtype == right.dtype
            and np.array_equal(left, right)
        )
    if isinstance(left, Sessions):
        return (
            isinstance(right, Sessions)
            and same(left.after, right.after)
            and same(left.think_ns, right.think_ns)
        )
    return left == right


def assert_same(left: Trace, right: Trace) -> None:
    for field in dataclasses.fields(Trace):
        assert same(getattr(left, field.name), getattr(right, field.name)), field.name


@settings(max_examples=60, deadline=None)
@given(traces(), st.sampled_from([".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet"]))
def test_our_own_forms_are_lossless(trace: Trace, suffix: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"t{suffix}"
        write_trace(trace, path)
        assert_same(read_trace(path, strict=True), trace)


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    bad = dataclasses.replace(Trace.of([0, 1], [1, 2], [3, 4]), output_tokens=np.asarray([1]))
    with pytest.raises(IndexError):
        write_trace(bad, tmp_path / "t.jsonl")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match="can't be written"):
        write_trace(Trace.of([0], [1], [1]), tmp_path / "no" / "t.jsonl")


def test_the_same_trace_gives_the_same_bytes(tmp_path: Path) -> None:
    trace = Trace.of([0, 0.5], [5, 6], [7, 8])
    for suffix in (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet"):
        one, two = tmp_path / f"a{suffix}", tmp_path / f"b{suffix}"
        write_trace(trace, one)
        write_trace(trace, two)
        assert one.read_bytes() == two.read_bytes()
