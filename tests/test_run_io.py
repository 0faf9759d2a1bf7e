"""A run folder is written whole or not at all, and comes back without loss."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vsim.errors import UserError
from vsim.sim import run_io
from vsim.sim.export_markdown import render_markdown
from vsim.sim.export_openmetrics import render_openmetrics
from vsim.sim.export_perfetto import render_perfetto
from vsim.sim.report import render_report
from vsim.sim.run import Run
from vsim.sim.run_io import check_target, read_run, write_run
from vsim.sim.summary import summarize, summary_json
from vsim.sim.table import render_table
from vsim.tests.make_run import make_run, random_run


def save(run: Run, folder: Path, **options: bool) -> Path:
    write_run(run, folder, summarize(run), **options)
    return folder


def full_run() -> Run:
    return random_run(
        60,
        tenant_names=("a", "<b>"),
        config={"engine": {"max_num_seqs": {"value": 8, "origin": "--max-num-seqs"}}},
        provenance={"seed": 0, "trace": {"name": "x.csv"}},
        assumptions=("one", "zwei – „drei“"),
        ended_early="stalled: 1 of 60",
    )


@pytest.mark.parametrize(
    "run", [full_run(), make_run(), random_run(1, 1)], ids=["full", "empty", "one"]
)
def test_what_is_written_is_read_back(run: Run, tmp_path: Path) -> None:
    back = read_run(save(run, tmp_path / "run"))
    for field in Run.__dataclass_fields__:
        ours, theirs = getattr(run, field), getattr(back, field)
        if field in ("requests", "steps"):
            assert list(ours) == list(theirs)
            for name in ours:
                assert ours[name].dtype == theirs[name].dtype
                np.testing.assert_array_equal(ours[name], theirs[name])
        elif isinstance(ours, np.ndarray):
            np.testing.assert_array_equal(ours, theirs)
            assert ours.dtype == theirs.dtype
        else:
            assert ours == theirs, field
    assert summarize(back) == summarize(run)


def test_the_same_run_gives_the_same_bytes(tmp_path: Path) -> None:
    one, two = save(full_run(), tmp_path / "here"), save(full_run(), tmp_path / "elsewhere")
    names = sorted(os.listdir(one))
    assert names == [
        "itl.parquet",
        "report.html",
        "requests.parquet",
        "run.json",
        "summary.json",
        "timeline.parquet",
    ]
    for name in names:
        assert (one / name).read_bytes() == (two / name).read_bytes(), name


def test_a_run_may_replace_a_run_but_nothing_else(tmp_path: Path) -> None:
    folder = save(random_run(5), tmp_path / "run")
    save(random_run(7), folder)
    assert read_run(folder).num_requests == 7
    with pytest.raises(UserError, match="already holds a run"):
        save(random_run(5), folder, overwrite=False)
    mine = tmp_path / "thesis"
    mine.mkdir()
    (mine / "chapter1.txt").write_text("years of work")
    with pytest.raises(UserError, match="not a vsim run"):
        save(random_run(5), mine)
    assert (mine / "chapter1.txt").read_text() == "years of work"
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(UserError, match="not a folder"):
        check_target(file)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "run", "thesis"]


def test_a_failed_write_leaves_the_earlier_run_and_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(random_run(5), tmp_path / "run")

    def disk_full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_io, "_write_columns", disk_full)
    with pytest.raises(UserError, match="No space left"):
        save(random_run(7), folder)
    with pytest.raises(UserError, match="No space left"):
        save(random_run(7), tmp_path / "other")
    assert read_run(folder).num_requests == 5
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_another_schema_is_refused_naming_both(tmp_path: Path) -> None:
    folder = save(random_run(5), tmp_path / "run")
    text = (folder / "run.json").read_text().replace("vsim/run/1", "vsim/run/9")
    (folder / "run.json").write_text(text)
    with pytest.raises(UserError, match=r"vsim/run/9.*vsim/run/1"):
        read_run(folder)


def test_damage_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a vsim run"):
        read_run(tmp_path / "nowhere")
    for name in ("run.json", "requests.parquet", "timeline.parquet", "itl.parquet"):
        for damage in (b"", b"garbage", b"[]", None):
            folder = save(random_run(5), tmp_path / "run", report=False)
            if damage is None:
                (folder / name).unlink()
            else:
                (folder / name).write_bytes(damage)
            with pytest.raises(UserError, match=name):
                read_run(folder)
            # A folder without its run.json is no longer recognised as ours, and so not replaced.
            for path in folder.iterdir():
                path.unlink()


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@given(field=st.sampled_from(list(Run.__dataclass_fields__)), value=JSON_VALUES)
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_value_in_run_json_gives_a_report_or_one_sentence(
    tmp_path: Path, field: str, value: object
) -> None:
    folder = tmp_path / "run"
    if not folder.exists():
        save(random_run(20, 20), folder, report=False)
        (tmp_path / "good.json").write_bytes((folder / "run.json").read_bytes())
    head = json.loads((tmp_path / "good.json").read_text())
    head[field] = value
    (folder / "run.json").write_text(json.dumps(head))
    reads_or_refuses(folder)


def reads_or_refuses(folder: Path) -> None:
    """Everything made from a stored run either works or says what is wrong."""
    try:
        run = read_run(folder)
    except UserError:
        return
    s = summarize(run)
    assert render_table(s) and render_report(run, s) and render_markdown(run, s)
    assert "".join(render_openmetrics(run, max(1.0, s["duration"] / 10)))
    assert "".join(render_perfetto(run))
    summary_json(s)


@given(
    table=st.sampled_from(["requests", "timeline"]),
    column=st.integers(0, 20),
    value=st.integers(-(1 << 62), 1 << 62) | st.integers(-3, 5),
    row=st.integers(0, 9),
)
@settings(max_examples=150, deadline=None)
def test_any_value_in_a_column_gives_a_report_or_one_sentence(
    table: str, column: int, value: int, row: int
) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        run = random_run(10, 10)
        columns = run.requests if table == "requests" else run.steps
        target = columns[sorted(columns)[column % len(columns)]]
        limit = np.iinfo(target.dtype)
        target[row] = min(max(value, limit.min), limit.max)
        folder = Path(scratch) / "run"
        folder.mkdir()
        run_io._write_files(run, folder, {}, report=False)
        reads_or_refuses(folder)


def test_a_kill_at_any_moment_leaves_a_whole_run(tmp_path: Path) -> None:
    """A child replaces the run over and over and is killed, unasked, five times."""
    folder = save(random_run(1, 1), tmp_path / "run")
    child = (
        "import sys; from vsim.tests.make_run import random_run\n"
        "from vsim.sim.run_io import write_run; from vsim.sim.summary import summarize\n"
        "runs = [random_run(n, 300) for n in (20, 30)]\n"
        "summaries = [summarize(run) for run in runs]\n"
        "print('ready', flush=True)\n"
        "while True:\n"
        "    for run, summary in zip(runs, summaries): write_run(run, sys.argv[1], summary, report=False)\n"
    )
    rng = random.Random(1)
    for _ in range(5):
        with subprocess.Popen(
            [sys.executable, "-c", child, str(folder)], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            time.sleep(rng.uniform(0, 0.2))
            process.kill()
        assert read_run(folder).num_requests in (1, 20, 30)


def test_two_writers_of_one_folder_leave_one_whole_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with ThreadPoolExecutor(4) as pool:
        for done in [
            pool.submit(save, random_run(n, 50), folder, report=False) for n in range(5, 25)
        ]:
            done.result()
    assert read_run(folder).num_requests in range(5, 25)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_infinity_is_written_as_a_word(tmp_path: Path) -> None:
    run = make_run({"arrival_ns": [0]}, config={"request_rate": float("inf")})
    folder = save(run, tmp_path / "run")
    assert json.loads((folder / "run.json").read_text())["config"]["request_rate"] == "inf"
    assert json.loads((folder / "summary.json").read_text())["request_rate"] == "inf"
