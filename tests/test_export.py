"""Runs in other tools' formats: right, strict, and harmless."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from vsim.commands.export import FORMATS
from vsim.commands.export import export as command
from vsim.errors import UserError
from vsim.sim.export_markdown import md, render_markdown
from vsim.sim.export_openmetrics import render_openmetrics
from vsim.sim.export_perfetto import render_perfetto
from vsim.sim.export_png import COLORS, polylines, render_pngs
from vsim.sim.export_svg import HIGH, WIDE, render_svgs
from vsim.sim.run import Run
from vsim.sim.run_io import write_run
from vsim.sim.summary import summarize
from vsim.tests.make_run import MS, S, make_run, random_run

EVIL = '</svg><script>alert(1)</script> [x](http://evil) `x` |a| @user #1 "q" \\ \x1b[31m \u202e\n# EOF\nvllm:x 1'


def evil_run() -> Run:
    return random_run(
        60, 200, reasons=(EVIL,), tenant_names=(EVIL,), config={"model": EVIL, EVIL: EVIL}, assumptions=(EVIL,)
    )  # fmt: skip


# OpenMetrics


def exposition(run: Run, **options: float) -> str:
    return "".join(render_openmetrics(run, **options))


def samples(text: str) -> dict[str, dict[float, float]]:
    """name{labels} -> time -> value."""
    found: dict[str, dict[float, float]] = defaultdict(dict)
    for line in text.splitlines():
        if not line.startswith("#"):
            series, value, stamp = line.rsplit(" ", 2)
            assert float(stamp) not in found[series], "a sample is given twice"
            found[series][float(stamp)] = float(value)
    return found


def test_openmetrics_passes_prometheus_own_parser() -> None:
    parser = pytest.importorskip("prometheus_client.openmetrics.parser")
    text = exposition(evil_run(), interval_s=10)
    stamps = {line.rsplit(" ", 1)[1] for line in text.splitlines() if not line.startswith("#")}
    assert len(stamps) > 3
    # One moment at a time: this parser takes a histogram's second moment for duplicates of the first.
    for stamp in sorted(stamps):
        kept = [
            line for line in text.splitlines() if line.startswith("#") or line.endswith(f" {stamp}")
        ]
        families = {
            family.name for family in parser.text_string_to_metric_families("\n".join(kept) + "\n")
        }
        assert {"vllm:num_requests_running", "vllm:time_to_first_token_seconds"} <= families


def test_promtool_makes_blocks_of_every_sample(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("needs promtool (Debian: the package prometheus)")
    fleet = random_run(200, 800)
    fleet.steps["replica"] = (np.arange(800) % 4).astype(np.int32)
    fleet.requests["replica"] = (np.arange(200) % 4).astype(np.int32)
    for name, run in (("evil", evil_run()), ("fleet", fleet), ("one", random_run(1, 2))):
        text = exposition(run, start_time=1_750_000_000)
        file = tmp_path / f"{name}.om"
        file.write_text(text, encoding="utf-8")
        made = subprocess.run(
            [promtool, "tsdb", "create-blocks-from", "openmetrics", file, tmp_path / name],
            capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip
        assert made.returncode == 0, made.stderr
        blocks = [json.loads(meta.read_text()) for meta in tmp_path.glob(f"{name}/*/meta.json")]
        given = sum(len(moments) for moments in samples(text).values())
        assert sum(block["stats"]["numSamples"] for block in blocks) == given > 0


def test_openmetrics_keeps_families_and_moments_together_and_time_ascending() -> None:
    text = exposition(random_run(100, 300), interval_s=5)
    assert text.endswith("# EOF\n") and text.count("# EOF") == 1
    families = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(families) == len(set(families))
    current, last = "", {}
    for line in text.splitlines()[:-1]:
        if line.startswith("# TYPE"):
            current = line.split()[2]
            last = {}
        elif not line.startswith("#"):
            assert line.startswith(current)
            group = re.sub(r',le="[^"]*"', "", line.split("{")[1].split("}")[0])
            stamp = float(line.rsplit(" ", 1)[1])
            assert stamp >= last.get(group, -1.0)
            last[group] = stamp


def test_openmetrics_ends_with_the_totals_of_the_run() -> None:
    run = random_run(300, 1000)
    run.steps["emitted"] = run.steps["decodes"]
    final = {
        series: list(values.values())[-1] for series, values in samples(exposition(run)).items()
    }
    labels = '{model_name="unknown",engine="0"'
    s = summarize(run)
    assert final[f"vllm:num_preemptions_total{labels}}}"] == run.steps["preempted"].sum()
    assert final[f"vllm:generation_tokens_total{labels}}}"] == run.steps["emitted"].sum()
    assert final[f'vllm:request_success_total{labels},finished_reason="length"}}'] == s["completed"]
    assert final[f"vllm:time_to_first_token_seconds_count{labels}}}"] == s["completed"]
    mean_ttft = final[f"vllm:time_to_first_token_seconds_sum{labels}}}"] / s["completed"] * 1000
    assert mean_ttft == pytest.approx(s["mean_ttft_ms"])
    assert final[f"vllm:inter_token_latency_seconds_count{labels}}}"] == run.itl_count.sum()


def test_openmetrics_counters_never_fall_and_gauges_show_the_state() -> None:
    run = make_run(
        {"arrival_ns": [0], "first_token_ns": [2 * S], "finish_ns": [5 * S], "output_tokens": [2]},
        {"start_ns": [500 * MS, 3 * S], "end_ns": [2 * S, 5 * S], "running": [1, 2], "kv_blocks_used": [10, 50]},
    )  # fmt: skip
    found = samples(exposition(run, interval_s=1, start_time=1_700_000_000))
    running = found['vllm:num_requests_running{model_name="unknown",engine="0"}']
    assert list(running.values()) == [0, 1, 1, 2, 2, 0]
    assert min(running) == 1_700_000_000
    usage = found['vllm:kv_cache_usage_perc{model_name="unknown",engine="0"}']
    assert list(usage.values()) == [0, 0.1, 0.1, 0.5, 0.5, 0]
    for series, values in found.items():
        if "_total{" in series or "_bucket{" in series:
            assert (np.diff(list(values.values())) >= 0).all()


def test_openmetrics_tells_replicas_apart() -> None:
    run = make_run(
        {"arrival_ns": [0, 0], "first_token_ns": [S, S], "finish_ns": [2 * S, 2 * S]},
        {"start_ns": [0, 0], "end_ns": [2 * S, 2 * S], "running": [1, 7], "replica": [0, 1]},
    )
    run.requests["replica"] = np.array([0, 1], dtype=np.int32)
    found = samples(exposition(run, interval_s=1))
    assert found['vllm:num_requests_running{model_name="unknown",engine="1"}'][1.0] == 7


@pytest.mark.parametrize("interval", [0, -1, 1e-9])
def test_openmetrics_refuses_an_interval_that_makes_no_sense(interval: float) -> None:
    with pytest.raises(UserError, match="--interval"):
        exposition(random_run(20, 20), interval_s=interval)


def test_openmetrics_of_an_empty_run_is_valid() -> None:
    assert exposition(make_run()).endswith("# EOF\n")


# Perfetto


def events(run: Run, **options: float) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads("".join(render_perfetto(run, **options)))[
        "traceEvents"
    ]
    return found


def test_perfetto_slices_of_a_lane_never_overlap() -> None:
    run = make_run(
        {"arrival_ns": [0], "finish_ns": [9 * S]},
        {"start_ns": [0, 1 * S, 4 * S], "end_ns": [2 * S, 3 * S, 5 * S], "decodes": [1, 1, 1]},
    )
    free: dict[int, float] = defaultdict(float)
    slices = [event for event in events(run) if event["ph"] == "X"]
    assert len(slices) == 3 and {event["tid"] for event in slices} == {1, 2}
    for event in slices:
        assert event["ts"] >= free[event["tid"]]
        free[event["tid"]] = event["ts"] + event["dur"]


def test_perfetto_requests_nest_and_their_phases_fill_them() -> None:
    run = random_run(100, 300)
    rows = np.flatnonzero(run.requests["finish_ns"] - run.requests["first_scheduled_ns"] > 20 * MS)
    out = run.requests["first_scheduled_ns"][rows] + 5 * MS
    run = dataclasses.replace(
        run, preemption_spans=np.stack([rows, out, out + 10 * MS], axis=1).astype(np.int64)
    )
    stacks: dict[str, list[tuple[str, float]]] = defaultdict(list)
    spans: dict[str, dict[str, float]] = defaultdict(dict)
    ended: dict[str, float] = defaultdict(lambda: -1.0)
    for event in events(run):
        if event["ph"] == "b":
            stack = stacks[event["id2"]["local"]]
            # One request at a time in a lane, and in no lane anything before the last thing's end.
            assert (not stack) == event["name"].startswith("request ")
            stack.append((event["name"], event["ts"]))
        elif event["ph"] == "e":
            lane = event["id2"]["local"]
            name, began = stacks[lane].pop()
            assert name == event["name"] and event["ts"] >= began
            if not stacks[lane]:
                assert began > ended[lane]
                ended[lane] = event["ts"]
            if name != "preempted":
                spans[(stacks[lane] or [(name, began)])[0][0]][name] = event["ts"] - began
    assert not any(stacks.values())
    assert len(spans) == 100
    for request, phases in spans.items():
        whole = phases.pop(request)
        if phases:
            assert sum(phases.values()) == pytest.approx(whole)
    most = max(
        int(((run.requests["sent_ns"] <= at) & (run.requests["finish_ns"] >= at)).sum())
        for at in run.requests["sent_ns"].tolist()
    )
    assert len(stacks) == most  # as many lanes as were in flight at once


def test_perfetto_shows_a_stretch() -> None:
    run = random_run(200, 1000)
    inside = [event for event in events(run, start_s=10, end_s=12) if event["ph"] == "X"]
    assert 0 < len(inside) < 100
    with pytest.raises(UserError, match="--to"):
        events(run, start_s=5, end_s=5)


def test_perfetto_escapes_and_empty_runs_load() -> None:
    assert len(events(evil_run())) > 100
    assert "\x1b" not in json.dumps(events(evil_run()), ensure_ascii=False)
    assert events(make_run())


def keeps_the_rules(event: dict[str, Any]) -> None:
    """What the Trace Event Format document asks of each phase that is used here."""
    number = (int, float)
    needed = {
        "M": {"name", "pid", "args"},
        "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
        "C": {"name", "pid", "ts", "args"},
        "i": {"name", "pid", "tid", "ts", "s", "args"},
        "b": {"name", "cat", "pid", "tid", "ts", "id2"},
        "e": {"name", "cat", "pid", "tid", "ts", "id2"},
        "n": {"name", "cat", "pid", "tid", "ts", "id2"},
    }[event["ph"]]
    allowed = needed | {"ph", "args"} | ({"tid"} if event["ph"] == "M" else set())
    assert needed <= set(event) <= allowed
    if event["ph"] in "ben":
        assert int(event["id2"]["local"], 16) > 0
    assert isinstance(event["name"], str) and event["name"]
    for key in ("pid", "tid"):
        assert type(event.get(key, 0)) is int and event.get(key, 0) >= 0
    assert isinstance(event.get("ts", 0), number) and event.get("ts", 0) >= 0
    assert isinstance(event.get("dur", 0), number) and event.get("dur", 0) >= 0
    if event["ph"] == "M":
        assert event["name"] in ("process_name", "thread_name") and list(event["args"]) == ["name"]
    if event["ph"] == "C":
        assert event["args"] and all(isinstance(v, number) for v in event["args"].values())
    if event["ph"] == "i":
        assert event["s"] in ("g", "p", "t")


def test_perfetto_events_keep_the_formats_rules() -> None:
    for run in (random_run(100, 300), evil_run(), make_run()):
        told = events(run)
        for event in told:
            keeps_the_rules(event)
        # Counters of one name keep their series, or a viewer drops some.
        series: dict[str, set[tuple[str, ...]]] = defaultdict(set)
        for event in told:
            if event["ph"] == "C":
                series[event["name"]].add(tuple(event["args"]))
        assert all(len(kinds) == 1 for kinds in series.values())


# Markdown, SVG, PNG, the command


def test_markdown_names_the_step_model() -> None:
    label = "roofline, not measured"
    run = random_run(50, 100, provenance={"step_model": {"label": label}})
    assert f"Step time: {label}" in render_markdown(run, summarize(run)).splitlines()
    assert "Step time" not in render_markdown(random_run(50, 100), summarize(random_run(50, 100)))


def test_every_svg_has_a_png_that_draws_the_same() -> None:
    image = pytest.importorskip("PIL.Image")
    run = evil_run()
    svgs, pngs = render_svgs(run, summarize(run)), render_pngs(run, summarize(run))
    assert set(pngs) == set(svgs)
    for name, content in pngs.items():
        picture = image.open(io.BytesIO(content))
        assert picture.size == (2 * WIDE, 2 * HIGH)
        shown = np.asarray(picture.convert("RGB")).reshape(-1, 3).astype(int)
        drawn = {c for c in COLORS if f'class="line {c}"' in svgs[name]}
        near = {c for c in drawn if (np.abs(shown - COLORS[c]).max(axis=1) < 24).any()}
        assert drawn and near == drawn, name


def test_the_strokes_of_a_path_are_those_an_svg_viewer_draws() -> None:
    assert list(polylines("M0 1L2 3H5V6h-1ZM7 8 9 10Z")) == [
        [(0, 1), (2, 3), (5, 3), (5, 6), (4, 6), (0, 1)],
        [(7, 8), (9, 10), (7, 8)],
    ]


def test_without_a_format_the_formats_are_listed(tmp_path: Path) -> None:
    write_run(random_run(10, 10), tmp_path / "run", summarize(random_run(10, 10)), report=False)
    bad = CliRunner().invoke(command, [str(tmp_path / "run")])
    assert isinstance(bad.exception, UserError)
    assert str(bad.exception) == f"--format is missing: one of {', '.join(FORMATS)}"
    assert CliRunner().invoke(command, [str(tmp_path / "run"), "--format", "png"]).exit_code == 1


def test_markdown_renders_foreign_strings_as_words() -> None:
    run = evil_run()
    text = render_markdown(run, summarize(run))
    for danger in ("<script", "[x](", "@user", "`x`", "://evil", "|a|", " #1", "\x1b", "\u202e"):
        assert danger not in text, danger
    assert "alert(1)" in text
    # A table row has as many cells as its head.
    assert md("a|b") == "a&#124;b"


def test_svgs_are_well_formed_and_carry_their_words() -> None:
    run = random_run(100, 300)
    found = render_svgs(run, summarize(run))
    assert {"cdf-request", "queue", "kv", "throughput"} <= found.keys()
    for text in found.values():
        ET.fromstring(text)
    assert "Running and waiting requests" in found["queue"]


def test_the_command_writes_each_format(tmp_path: Path) -> None:
    run = random_run(50, 100)
    write_run(run, tmp_path / "run", summarize(run, (50, 99.9), {"ttft": 500}), report=False)
    for form, first in (
        ("openmetrics", "# TYPE"),
        ("perfetto", "{"),
        ("markdown", "###"),
        ("bench", "{"),
    ):
        out = CliRunner().invoke(command, [str(tmp_path / "run"), "--format", form])
        assert out.exit_code == 0 and out.output.startswith(first), out.output[:200]
        file = tmp_path / f"x.{form}"
        CliRunner().invoke(command, [str(tmp_path / "run"), "--format", form, "--out", str(file)])
        assert file.read_text(encoding="utf-8") == out.output
    assert "p99.9" in (tmp_path / "x.markdown").read_text()
    assert "goodput" in (tmp_path / "x.markdown").read_text()
    CliRunner().invoke(
        command, [str(tmp_path / "run"), "--format", "svg", "--out", str(tmp_path / "svg")]
    )
    assert (tmp_path / "svg" / "kv.svg").exists()
    bad = CliRunner().invoke(command, [str(tmp_path / "run"), "--format", "svg"])
    assert isinstance(bad.exception, UserError)


def test_the_grafana_dashboard_asks_only_for_series_that_the_export_has() -> None:
    dashboard = json.loads((Path(__file__).parent.parent / "docs/grafana/vllm.json").read_text())
    run = random_run(100, 300)
    run.steps["emitted"] = run.steps["decodes"]
    exported = {series.split("{")[0] for series in samples(exposition(run))}
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"vllm:\w+", target["expr"])
    }
    assert len(asked) > 10 and asked <= exported
