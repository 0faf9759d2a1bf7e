"""A sweep loses nothing, repeats nothing, and its table does not tell how it came about."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from test_cli import call  # noqa: F401  (a fixture)

from vsim.errors import UserError
from vsim.sim.sweep import Workers, sweep
from vsim.sim.sweep_journal import journal_path
from vsim.sim.sweep_point import simulate_point
from vsim.sim.sweep_space import Point, Range, dimensions, parse_vary, points_of, read_grid
from vsim.traces.readers import read_trace
from vsim.traces.trace import Trace, TraceSource

MODEL, GPU = "meta-llama/Llama-3.1-8B-Instruct", "a100"
TINY = {"model": MODEL, "gpu": GPU}
# Two points that vLLM runs and one that it refuses.
POINTS = points_of(TINY, dict([parse_vary("block_size=16,0,32")]))


def small_trace(count: int = 12, output: int = 5) -> Trace:
    return Trace(
        arrival_ns=np.arange(count, dtype=np.int64) * 20_000_000,
        prompt_tokens=np.full(count, 200, dtype=np.int64) + np.arange(count, dtype=np.int64),
        output_tokens=np.full(count, output, dtype=np.int64),
        source=TraceSource("small.jsonl", "test", "0" * 64),
    )


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    path = tmp_path / "small.jsonl"
    rows = [
        {"timestamp": 20 * i, "input_length": 200 + i, "output_length": 40, "hash_ids": [i]}
        for i in range(60)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def table(path: Path) -> dict[str, list]:
    return pq.read_table(path).to_pydict()


def journal_keys(out: Path) -> list[str]:
    lines = journal_path(out).read_text().splitlines()[1:]
    return [json.loads(line)["key"] for line in lines]


def test_a_grid_is_every_combination_first_name_slowest() -> None:
    space = dict([parse_vary("block-size=16,32"), parse_vary("--max-num-seqs=64,128")])
    found = [(p["block_size"], p["max_num_seqs"]) for p in points_of(TINY, space)]
    assert found == [(16, 64), (16, 128), (32, 64), (32, 128)]


def test_every_flag_of_replay_can_vary() -> None:
    from vsim.commands.replay import replay
    from vsim.commands.trace_options import NAMES as READING

    # How a trace is read, what is reported and where it goes are no what-ifs.
    same = {"trace", "metric_percentiles", "goodput", "out", "overwrite", "report", "as_json"}
    same |= {"prices", "fleet", "advise", "error_bars", "max_steps", "max_sim_time_s"}
    same |= set(READING) - {"limit"}
    flags = {parameter.name for parameter in replay.params} - same
    assert flags <= set(dimensions()), flags - set(dimensions())
    assert {"replicas", "route"} <= set(dimensions())


def test_preemption_rules_of_v0_vary_and_v1_refuses_them(tmp_path: Path) -> None:
    out = tmp_path / "t.parquet"
    space = [parse_vary("engine=v0,v1"), parse_vary("victim_rule=most_blocks")]
    sweep(small_trace(4), points_of({**TINY, "max_model_len": 4096}, dict(space)), out)
    assert table(out)["status"] == ["done", "refused"]
    assert "victim-rule" in table(out)["reason"][1]


def test_words_become_values_of_the_right_type() -> None:
    assert parse_vary("enable_prefix_caching=true,false")[1] == [True, False]
    assert parse_vary("request_rate=2,inf")[1] == [2.0, float("inf")]
    assert parse_vary("engine_version=0.19.0,default")[1] == ["0.19.0", None]
    assert parse_vary("tp=1,2") == ("tensor_parallel_size", [1, 2])
    assert parse_vary("request_rate=1..20:log")[1] == Range(1.0, 20.0, log=True, whole=False)


def test_random_points_differ_and_a_longer_draw_begins_with_a_shorter_one() -> None:
    space = dict([parse_vary("request_rate=1..20:log"), parse_vary("max_num_seqs=1..64")])
    few, many = points_of(TINY, space, 5, seed=3), points_of(TINY, space, 40, seed=3)
    assert many[:5] == few
    assert len({tuple(p.values()) for p in many}) == 40
    assert all(1 <= p["request_rate"] <= 20 and 1 <= p["max_num_seqs"] <= 64 for p in many)
    assert points_of(TINY, space, 5, seed=4) != few


def test_a_yaml_grid_says_the_same_as_the_command_line(tmp_path: Path) -> None:
    grid = tmp_path / "grid.yaml"
    grid.write_text("block_size: [16, 32]\nroute: round-robin\nrequest_rate: 1..20\n")
    assert read_grid(grid) == dict(
        parse_vary(text) for text in ("block_size=16,32", "route=round-robin", "request_rate=1..20")
    )


def test_one_row_a_point_and_a_refusal_is_a_row_with_its_reason(tmp_path: Path) -> None:
    out = tmp_path / "t.parquet"
    assert sweep(small_trace(), POINTS, out) == {"done": 2, "refused": 1, "from_journal": 0}
    rows = table(out)
    assert rows["point"] == [0, 1, 2] and rows["block_size"] == [16, 0, 32]
    assert rows["status"] == ["done", "refused", "done"]
    assert rows["reason"][0] is None and "block_size=0" in rows["reason"][1]
    assert rows["completed"] == [12, None, 12]
    assert rows["step_time"][0] == "roofline, not measured"


def test_one_replica_in_a_sweep_is_vsim_replay(call, trace_file: Path, tmp_path: Path) -> None:  # noqa: F811
    load = ["--request-rate", "30", "--seed", "5", "--max-concurrency", "4"]
    code, out, err = call("replay", trace_file, "--model", MODEL, "--gpu", GPU, *load, "--json")
    assert code == 0, err
    told = json.loads(out)
    path = tmp_path / "t.parquet"
    code, _, err = call(
        *("sweep", trace_file, "--model", MODEL, "--gpu", GPU, *load),
        *("--vary", "replicas=1,2", "--out", path),
    )
    assert code == 0, err
    rows = table(path)
    shared = [name for name in told if name in rows and name not in ("assumptions", "ended_early")]
    assert len(shared) > 50
    assert {name: rows[name][0] for name in shared} == {name: told[name] for name in shared}
    assert rows["assumptions"][0] == told["assumptions"]
    assert rows["gpus"] == [1, 2] and rows["completed"] == [60, 60]


def test_two_replicas_share_the_work_as_routed() -> None:
    point: Point = {**TINY, "replicas": 2, "route": "round-robin"}
    run, _, _ = simulate_point(small_trace(), point)
    assert run.requests["replica"].tolist() == [0, 1] * 6


def test_jobs_and_backends_leave_the_same_bytes(tmp_path: Path) -> None:
    ways = {
        "one": Workers(1),
        "two": Workers(2),
        "threads": Workers(3, "threading"),
    }
    for name, workers in ways.items():
        sweep(small_trace(), POINTS, tmp_path / f"{name}.parquet", workers=workers)
    tables = {(tmp_path / f"{name}.parquet").read_bytes() for name in ways}
    assert len(tables) == 1


def test_a_journal_cut_anywhere_resumes_to_the_same_table(tmp_path: Path) -> None:
    whole = tmp_path / "whole.parquet"
    sweep(small_trace(), POINTS, whole)
    written = journal_path(whole).read_bytes()
    for cut in {*range(0, len(written), max(1, len(written) // 6)), 5, len(written) - 1}:
        out = tmp_path / f"{cut}.parquet"
        journal_path(out).write_bytes(written[:cut])
        counted = sweep(small_trace(), POINTS, out)
        assert counted["from_journal"] == max(written[:cut].count(b"\n") - 1, 0)
        assert out.read_bytes() == whole.read_bytes()
        assert sorted(journal_keys(out)) == sorted(journal_keys(whole))


def test_a_damaged_line_costs_one_simulation_only(tmp_path: Path) -> None:
    out = tmp_path / "t.parquet"
    sweep(small_trace(), POINTS, out)
    before = out.read_bytes()
    lines = journal_path(out).read_bytes().splitlines(keepends=True)
    lines[2] = b"\0" * 40 + b"\n"
    journal_path(out).write_bytes(b"".join(lines))
    assert sweep(small_trace(), POINTS, out)["from_journal"] == 2
    assert out.read_bytes() == before


def test_a_wider_grid_reuses_what_a_smaller_one_simulated(tmp_path: Path) -> None:
    out = tmp_path / "t.parquet"
    sweep(small_trace(), POINTS, out)
    wider = points_of(TINY, dict([parse_vary("block_size=64,32,16")]))
    assert sweep(small_trace(), wider, out)["from_journal"] == 2
    assert table(out)["block_size"] == [64, 32, 16]


def test_another_trace_or_question_is_other_work(tmp_path: Path) -> None:
    out = tmp_path / "t.parquet"
    sweep(small_trace(), POINTS, out)
    assert sweep(small_trace(output=6), POINTS, out)["from_journal"] == 0
    assert sweep(small_trace(), POINTS, out)["from_journal"] == 3


def test_a_route_between_one_replica_is_no_choice(tmp_path: Path) -> None:
    out = tmp_path / "t.parquet"
    space = dict([parse_vary("route=round-robin,kv-aware")])
    sweep(small_trace(), points_of(TINY, space), out)
    assert len(journal_keys(out)) == 1 and len(table(out)["route"]) == 2


def command(trace: Path, out: Path, *more: str) -> list[str]:
    return [
        *(sys.executable, "-m", "vsim", "sweep", str(trace), "--model", MODEL, "--gpu", GPU),
        *("--vary", "max_num_seqs=1,2,4,8", "--vary", "replicas=1,2", "--out", str(out), *more),
    ]


def kill_after(lines: int, arguments: list[str], out: Path) -> int:
    """Start a sweep, kill -9 it once its journal has so many results; how many were whole."""
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    journal = journal_path(out)
    limit = time.monotonic() + 120
    while time.monotonic() < limit and process.poll() is None:
        if journal.exists() and journal.read_bytes().count(b"\n") > lines:
            break
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    # Workers hold the pipe as well: none may outlive the sweep.
    process.communicate(timeout=60)
    return max(journal.read_bytes().count(b"\n") - 1, 0)


def test_kill_9_at_several_moments_loses_and_repeats_nothing(
    trace_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "killed.parquet"
    seen: list[str] = []
    # Killed as the journal appears, after the first result, then in the middle with two processes at work.
    for lines, jobs in ((0, "1"), (1, "1"), (4, "2")):
        whole = kill_after(lines, command(trace_file, out, "--jobs", jobs), out)
        keys = [
            json.loads(line)["key"]
            for line in journal_path(out).read_text().splitlines()[1 : whole + 1]
        ]
        assert keys[: len(seen)] == seen  # what was kept before is still there
        seen = keys
    ended = subprocess.run(
        command(trace_file, out, "--jobs", "1"), capture_output=True, text=True, check=True
    )
    assert f"{len(seen)} of them from the journal" in ended.stdout or not seen
    keys = journal_keys(out)
    assert len(keys) == len(set(keys)) == 8 and keys[: len(seen)] == seen
    rows = table(out)
    assert rows["point"] == list(range(8)) and set(rows["status"]) == {"done"}

    calm = tmp_path / "calm.parquet"
    space = dict([parse_vary("max_num_seqs=1,2,4,8"), parse_vary("replicas=1,2")])
    sweep(read_trace(trace_file), points_of({**TINY, "seed": 0}, space), calm)
    assert out.read_bytes() == calm.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_two_sweeps_never_write_one_table(tmp_path: Path) -> None:
    out = tmp_path / "t.parquet"
    sweep(small_trace(), POINTS, out)
    before, journal = out.read_bytes(), journal_path(out).read_bytes()
    other = os.open(journal_path(out), os.O_RDWR)
    fcntl.flock(other, fcntl.LOCK_EX)
    try:
        with pytest.raises(UserError, match="another vsim sweep"):
            sweep(small_trace(output=9), POINTS, out)
    finally:
        os.close(other)
    assert out.read_bytes() == before and journal_path(out).read_bytes() == journal


def test_nothing_but_a_sweep_is_ever_overwritten(tmp_path: Path) -> None:
    precious = tmp_path / "thesis.parquet"
    precious.write_text("years of work")
    with pytest.raises(UserError, match="not a table of vsim sweep"):
        sweep(small_trace(), POINTS, precious)
    out = tmp_path / "t.parquet"
    journal_path(out).write_text("dear diary\n")
    with pytest.raises(UserError, match="not a journal"):
        sweep(small_trace(), POINTS, out)
    assert precious.read_text() == "years of work"
    assert journal_path(out).read_text() == "dear diary\n"


def test_prices_add_columns_and_no_simulation(tmp_path: Path) -> None:
    from vsim.sim.cost import read_prices

    out, price_file = tmp_path / "t.parquet", tmp_path / "prices.json"
    sweep(small_trace(), POINTS, out)
    assert not any(name.startswith("cost") for name in table(out))
    price_file.write_text('{"currency": "EUR", "a100": 1.5}')
    counted = sweep(small_trace(), POINTS, out, prices=read_prices(price_file))
    assert counted["from_journal"] == 3
    assert table(out)["cost_per_month"] == [1095.0, None, 1095.0]


REFUSED = [
    (["--vary", "block_size"], "NAME=VALUE"),
    (["--vary", "colour=red"], "colour"),
    (["--vary", "block_size=16,sixteen"], "sixteen"),
    (["--vary", "block_size=16,16"], "twice"),
    (["--vary", "block_size=16.5"], "whole number"),
    (["--vary", "block_size=16", "--block-size", "32"], "both fixed"),
    (["--vary", "block_size=16", "--vary", "block-size=32"], "twice"),
    (["--vary", "request_rate=1..5"], "--random"),
    (["--vary", "request_rate=5..1", "--random", "2"], "range"),
    (["--vary", "request_rate=nan"], "request_rate"),
    (["--vary", "gpu=a1000"], "a1000"),
    (["--vary", "route=nearest"], "nearest"),
    (["--vary", "replicas=0"], "replicas"),
    (["--vary", "max_num_seqs=1,2", "--random", "0"], "random"),
    (["--vary", "block_size=16", "--prices", "nowhere.yaml"], "nowhere.yaml"),
    (["--grid", "nowhere.yaml"], "nowhere.yaml"),
    (["--vary", "block_size=16", "--backend", "loky", "--address", "x", "--jobs", "2"], "address"),
    (["--vary", "block_size=16", "--backend", "dask", "--jobs", "2"], "dask"),
    (["--vary", "block_size=16", "--jobs", "0"], "jobs"),
    (["--vary", "profile=nowhere.json"], "nowhere.json"),
    (["--vary", "block_size=16", "--route", "nearest"], "nearest"),
]


@pytest.mark.parametrize(("args", "names"), REFUSED, ids=[" ".join(a[1:]) for a, _ in REFUSED])
def test_bad_input_is_one_sentence_and_leaves_no_table(
    call,  # noqa: F811
    trace_file: Path,
    tmp_path: Path,
    args: list[str],
    names: str,
) -> None:
    gpu = [] if "gpu=" in args[1] else ["--gpu", GPU]
    out = tmp_path / "never.parquet"
    code, said, err = call("sweep", trace_file, "--model", MODEL, *gpu, *args, "--out", out)
    assert code == 2 and said == ""
    assert err.startswith("error: ") and names in err and err.count("\n") == 1
    assert not out.exists()
