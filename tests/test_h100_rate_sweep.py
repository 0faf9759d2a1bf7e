"""The public H100 sweep: what the page quotes is what the benchmark computes, and the fit finds what was planted."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "examples" / "h100-rate-sweep.md"
SERVER = "KC-vllm+chunking_and_prefix_caching"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    path = ROOT / "benchmarks" / "h100_rate_sweep.py"
    spec = importlib.util.spec_from_file_location("h100_rate_sweep", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_data_are_three_servers_at_seven_rates(bench: ModuleType) -> None:
    stages = bench.read_stages()
    assert [len(found) for found in stages.values()] == [7, 7, 7]
    for found in stages.values():
        rates = [stage.rate for stage in found]
        assert rates == sorted(rates) and found[0].requests == 60


def test_prompts_share_as_the_workload_says(bench: ModuleType) -> None:
    trace = bench.trace_of(bench.Stage(0, 50.0, 250, {}))
    ids = trace.prefix_ids.reshape(250, 12)
    assert (ids[0] == ids[100]).all()  # the same prompt again
    assert (ids[0, :8] == ids[9, :8]).all() and (ids[0, 8:] != ids[9, 8:]).all()  # one group
    assert (ids[0] != ids[10]).all()  # another


def test_the_page_quotes_what_a_run_gives(bench: ModuleType) -> None:
    block = PAGE.read_text().split(f"{SERVER}: ", 1)[1]
    told = re.search(r"calibrated on .+?: (.+?); median", block)
    assert told is not None
    terms = [float(v.replace(",", "")) / 1e6 for v in re.findall(r"\w+ ([\d,.]+) µs", told[1])]
    assert len(terms) == 4
    server = bench.Server(SERVER)
    for stage in bench.read_stages()[SERVER][:2]:
        row = re.search(rf"^ *{stage.rate:.1f} \w+ +(.+)$", block, re.M)
        assert row is not None
        quoted = [float(cell) for cell in re.findall(r"([-+][\d.]+)%", row[1])]
        found = list(bench.errors_pct(server.run(stage, terms), stage).values())
        # The page rounds the terms to a tenth of a microsecond.
        assert quoted == pytest.approx(found, abs=0.15), stage


def test_the_fit_finds_planted_terms_and_none_is_negative(bench: ModuleType) -> None:
    server = bench.Server(SERVER)
    planted = [0.002, 0.0, 20e-6, 0.012]
    stages = []
    for position, (rate, count) in enumerate(((20.0, 60), (150.0, 300))):
        shape = bench.Stage(position, rate, count, {})
        predicted = bench.latencies_s(server.run(shape, planted))
        measured = {
            metric: {name: bench.figure(predicted[metric], name) * 1e3 for name in bench.FIGURES}
            for metric in bench.METRICS
        }
        stages.append(bench.Stage(position, rate, count, measured))
    server = bench.Server(SERVER)
    found = bench.fit(server, stages, lambda _: None)
    assert min(found) >= 0
    errors = [abs(e) for s in stages for e in bench.errors_pct(server.run(s, found), s).values()]
    assert np.mean(errors) < 1.0 and max(errors) < 5.0, (found, errors)
