"""Samples survive: whole rows, each once, and never mixed with another machine's."""

import json
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vsim.calibrate.samples import (
    SCHEMA,
    Journal,
    StepSample,
    check_same_device,
    compact,
    journal_path,
    parquet_path,
    read_samples,
)
from vsim.errors import UserError

ABOUT = {"device": "CPU A", "vllm_version": "0.32.0", "model": {"hidden_size": 8}, "block_size": 32}


def sample(seq: int = 0, **changes: object) -> StepSample:
    base = StepSample(
        session="s",
        seq=seq,
        phase="grid",
        point="decode 2 at 64",
        repeat=0,
        index=0,
        prefill_new=(64, 16),
        prefill_context=(0, 32),
        num_decodes=2,
        decode_context_sum=130,
        decode_context_max=70,
        decode_context_sumsq=8500.0,
        block_size=32,
        kv_blocks_used=9,
        running=4,
        waiting=0,
        admitted=1,
        finished=0,
        preempted=0,
        schedule_s=0.001,
        device_s=0.02,
        update_s=0.002,
        total_s=0.023,
        cpu_s=0.023,
    )
    return replace(base, **changes)


def write(path: Path, rows: list[StepSample]) -> None:
    with Journal(path) as journal:
        journal.session("s", ABOUT)
        journal.append(rows)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    rows = [sample(0), sample(1, disturbed=True), sample(2, prefill_new=(), prefill_context=())]
    write(tmp_path / "a.json", rows)
    assert read_samples(tmp_path / "a.json").rows == rows
    compact(tmp_path / "a.json")
    assert not journal_path(tmp_path / "a.json").exists()
    again = read_samples(tmp_path / "a.json")
    assert again.rows == rows
    assert again.sessions == {"s": ABOUT}


def test_shape_is_that_of_the_cost_model() -> None:
    shape = sample().shape
    assert shape.prefills == ((64, 0), (16, 32))
    assert (shape.num_decodes, shape.decode_context_sum, shape.decode_context_max) == (2, 130, 70)


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(0, 4000), rows=st.integers(1, 5))
def test_a_kill_loses_at_most_the_line_being_written(
    cut: int, rows: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("kill") / "a.json"
    write(path, [sample(i) for i in range(rows)])
    data = journal_path(path).read_bytes()
    torn = data[: min(cut, len(data))]
    journal_path(path).write_bytes(torn)
    whole = max(0, torn.count(b"\n") - 1)  # the first line announces the session
    assert [row.seq for row in read_samples(path).rows] == list(range(whole))
    # What comes next starts on a line of its own.
    with Journal(path) as journal:
        journal.session("t", ABOUT)
        journal.append([sample(99, session="t")])
    assert [row.seq for row in read_samples(path).rows] == [*range(whole), 99]


def test_parquet_and_journal_with_the_same_rows_read_once(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write(path, [sample(0), sample(1)])
    journal = journal_path(path).read_bytes()
    compact(path)
    journal_path(path).write_bytes(journal)  # killed between the two steps of compact
    assert [row.seq for row in read_samples(path).rows] == [0, 1]


def test_disturbed_repeats_are_measured_again() -> None:
    from vsim.calibrate.samples import Samples

    rows = [
        sample(0, repeat=0),
        sample(1, repeat=1),
        sample(2, repeat=1, index=1, disturbed=True),
        sample(3, repeat=0, block_size=64),
    ]
    done = Samples(rows=rows).repeats_done()
    assert done == {("decode 2 at 64", 32): 1, ("decode 2 at 64", 64): 1}


def test_another_device_is_refused_with_the_reason(tmp_path: Path) -> None:
    write(tmp_path / "a.json", [sample(0)])
    samples = read_samples(tmp_path / "a.json")
    check_same_device(samples, ABOUT, tmp_path / "a.json")
    with pytest.raises(UserError, match="device=CPU A, this run has CPU B"):
        check_same_device(samples, {**ABOUT, "device": "CPU B"}, tmp_path / "a.json")


def test_another_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    journal_path(path).write_text(
        json.dumps({"schema": "vsim/step-samples/9", "session": "s", "about": {}}) + "\n"
    )
    with pytest.raises(UserError, match=f"step-samples/9.*{SCHEMA}"):
        read_samples(path)


@pytest.mark.parametrize("line", [b"[]\n", b"{}\n", b"\xff\xfe\n", b'{"seq": 1}\n', b"nonsense\n"])
def test_a_line_that_is_no_sample_is_named(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    journal_path(path).write_bytes(line)
    with pytest.raises(UserError, match=r"jsonl:1 is not a sample"):
        read_samples(path)


def test_a_file_that_is_no_parquet_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    parquet_path(path).write_bytes(b"PAR1 but not really")
    with pytest.raises(UserError, match="not a readable Parquet"):
        read_samples(path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(field=st.sampled_from([f.name for f in fields(StepSample)]), value=json_values)
def test_any_value_in_any_field_is_a_sample_or_one_sentence(
    field: str, value: object, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "a.json"
    entry = {**asdict(sample()), field: value}
    journal_path(path).write_text(
        json.dumps({"schema": SCHEMA, "session": "s", "about": ABOUT})
        + "\n"
        + json.dumps(entry)
        + "\n"
    )
    try:
        rows = read_samples(path).rows
    except UserError as refusal:
        assert "jsonl:2" in str(refusal)
    else:
        # Whatever is taken can be used and written.
        assert rows[0].host_s >= 0 and rows[0].shape.num_tokens >= 0
        compact(path)
        assert read_samples(path).rows == rows


def test_samples_of_an_earlier_release_have_no_yardstick(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    path = tmp_path / "a.json"
    with Journal(path) as journal:
        journal.session("s", ABOUT)
        journal.append([sample(0, slowdown=1.25), sample(1)])
    compact(path)
    assert [row.slowdown for row in read_samples(path).rows] == [1.25, 1.0]
    table = pq.read_table(parquet_path(path))
    pq.write_table(table.drop_columns(["slowdown"]), parquet_path(path))
    assert [row.slowdown for row in read_samples(path).rows] == [1.0, 1.0]
    old = tmp_path / "b.json"
    with Journal(old) as journal:
        journal.session("s", ABOUT)
    line = {k: v for k, v in asdict(sample(0)).items() if k != "slowdown"}
    with journal_path(old).open("a") as lines:
        lines.write(json.dumps(line) + "\n")
    assert [row.slowdown for row in read_samples(old).rows] == [1.0]
