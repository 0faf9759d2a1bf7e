"""The benchmarks run, on a few requests each, and report what they were asked to measure."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


workloads = load("speed_workloads")


@pytest.mark.parametrize("name", list(workloads.WORKLOADS))
def test_a_workload_is_measured(name: str) -> None:
    row = workloads.measure(name, 40, "fast")
    assert abs(row["requests"] - 40) <= (10 if name in ("sharing", "turn-by-turn") else 0)
    assert row["steps"] > 40 and row["ended_early"] is None
    assert row["cpu_s"] > 0 and 0 < row["peak_mib_before"] <= row["peak_mib"]


def test_workloads_are_what_they_are_named_for() -> None:
    assert workloads.measure("preempting", 200, "fast")["preemptions"] > 10
    assert workloads.measure("sharing", 200, "fast")["prefix_cache_hit_rate"] > 0.5
    assert workloads.measure("azure", 200, "fast")["prefix_cache_hit_rate"] in (None, 0)


def test_the_azure_trace_repeated_keeps_its_rate_and_lengths() -> None:
    once, twice = workloads.azure(19366), workloads.azure(2 * 19366)
    assert twice.prompt_tokens[19366:].tolist() == once.prompt_tokens.tolist()
    assert (twice.arrival_ns[1:] >= twice.arrival_ns[:-1]).all()
    assert twice.span_s / once.span_s == pytest.approx(2, rel=1e-3)


def test_both_paths_give_the_same_steps() -> None:
    fast, slow = (workloads.measure("preempting", 60, path) for path in ("fast", "reference"))
    assert (fast["kernel"], slow["kernel"]) == (True, False)
    assert fast["sha256"] == slow["sha256"]


def test_the_share_of_simpy_is_a_share() -> None:
    row = workloads.simpy_share("azure-roofline", 30)
    assert row["events"] > 100 and 0 < row["share"] < 1


def test_one_command_prints_the_table_and_writes_the_figures(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "replay_speed.py"), "--quick", "--only", "mooncake", "--json", str(figures)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(figures.read_text())["workloads"]
    assert row["workload"] == "mooncake"
    assert f"{row['steps']:,}" in done.stdout


def test_an_unknown_part_is_refused() -> None:
    command = [sys.executable, str(BENCHMARKS / "replay_speed.py"), "--only", "speed"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "known are workloads" in done.stderr


def test_figures_go_between_their_marks_on_a_page(tmp_path: Path) -> None:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        put_on_page = load("replay_speed").put_on_page
    finally:
        sys.path.remove(str(BENCHMARKS))
    page = tmp_path / "page.md"
    marks = "<!-- figures: {} -->\nold\n<!-- end of figures -->\n"
    page.write_text(f"# Speed\n{marks.format('growth')}and\n{marks.format('sweep')}end\n")
    put_on_page(page, "sweep", "1,000 in 3 s\n")
    assert page.read_text() == (
        f"# Speed\n{marks.format('growth')}and\n{marks.format('sweep')}end\n".replace(
            "sweep -->\nold\n", "sweep -->\n```text\n1,000 in 3 s\n```\n"
        )
    )
    with pytest.raises(SystemExit, match="shell"):
        put_on_page(page, "shell", "2 s")
