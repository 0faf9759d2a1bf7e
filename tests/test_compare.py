"""`vsim compare`: differences, chance, and gates for CI."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from vsim.commands.compare import compare as command
from vsim.errors import UserError
from vsim.sim.bench_json import bench_run, load_bench, render_bench
from vsim.sim.block_correlation import widening
from vsim.sim.compare import Side, compare, gate_key, latency_intervals, parse_gate, relative
from vsim.sim.run import Run
from vsim.sim.run_io import write_run
from vsim.sim.summary import summarize
from vsim.tests.make_run import MS, S, make_run, random_run


def slower(run: Run, factor: float) -> Run:
    """The same requests, every latency `factor` times as long."""
    changed = {name: column.copy() for name, column in run.requests.items()}
    for name in ("first_token_ns", "finish_ns"):
        known = changed[name] >= 0
        sent = changed["sent_ns"][known]
        changed[name][known] = sent + ((changed[name][known] - sent) * factor).astype(np.int64)
    return make_run(
        changed, dict(run.steps), itl=np.repeat((run.itl_ns * factor).astype(int), run.itl_count),
        reasons=run.reasons, num_gpu_blocks=run.num_gpu_blocks,
    )  # fmt: skip


def side(run: Run, name: str = "run") -> Side:
    return Side(name, summarize(run), run)


def by_key(base: Run, other: Run) -> dict[str, object]:
    return {one.key: one for one in compare(side(base), side(other))}


def test_a_run_does_not_differ_from_itself() -> None:
    for one in compare(side(random_run(300)), side(random_run(300))):
        assert one.change in (0.0, None)
        assert one.interval in (None, (0.0, 0.0))
        assert not one.significant


def test_the_same_requests_served_ten_percent_slower_are_significantly_slower() -> None:
    run = random_run(500)
    found = by_key(run, slower(run, 1.1))
    for key in ("mean_ttft_ms", "p50_ttft_ms", "p95_e2el_ms", "mean_tpot_ms"):
        assert found[key].change == pytest.approx(0.1, rel=0.01)  # type: ignore[attr-defined]
        low, high = found[key].interval  # type: ignore[attr-defined]
        assert 0.09 < low <= high < 0.11
        assert found[key].significant and found[key].better is False  # type: ignore[attr-defined]


def test_another_sample_of_the_same_traffic_is_seldom_called_a_difference() -> None:
    intervals = [
        latency_intervals(random_run(400, 1, seed), random_run(400, 1, seed + 1000))
        for seed in range(40)
    ]
    alarms = [not low <= 0 <= high for found in intervals for low, high in found.values()]
    # 95 % intervals: one in twenty errs; the statistics of one pair err together, hence the room.
    assert len(alarms) == 40 * 15 and np.mean(alarms) < 0.1


def in_a_drifting_queue(seed: int, n: int = 1000) -> Run:
    """TTFT follows a slow wave that outlasts the bootstrap's blocks: runs differ by where it was."""
    rng = np.random.default_rng(seed)
    steps = rng.normal(0, 1, n)
    wave = np.empty(n)
    wave[0] = steps[0] * 10
    for i in range(1, n):
        wave[i] = 0.99 * wave[i - 1] + steps[i]
    arrival = np.arange(n) * S
    first = arrival + (100 * MS * np.exp(wave / 10)).astype(np.int64)
    return make_run(
        {"arrival_ns": arrival, "first_token_ns": first, "finish_ns": first + S,
         "output_tokens": np.full(n, 2), "prompt_tokens": rng.integers(10, 100, n)}
    )  # fmt: skip


def test_queues_that_outlast_a_block_do_not_make_a_difference() -> None:
    found = [
        latency_intervals(in_a_drifting_queue(seed), in_a_drifting_queue(seed + 500))
        for seed in range(60)
    ]
    alarms = [not low <= 0 <= high for one in found for low, high in (one["mean_ttft_ms"],)]
    assert np.mean(alarms) <= 0.15  # 53 % without the widening


def test_the_widening_is_that_of_an_autoregressive_process() -> None:
    rng = np.random.default_rng(0)
    assert widening([np.zeros(40)]) == 1.0
    found = {}
    for r in (0.0, 0.5):
        factors = []
        for _ in range(300):
            blocks = np.zeros(40)
            for i in range(1, 40):
                blocks[i] = r * blocks[i - 1] + rng.normal()
            factors.append(widening([blocks]))
        found[r] = float(np.median(factors))
    assert found[0.0] == pytest.approx(1.0, abs=0.1)
    assert found[0.5] == pytest.approx(np.sqrt(3), rel=0.2)


def test_overloaded_runs_of_different_requests_have_no_interval() -> None:
    def overloaded(seed: int) -> Run:
        arrival = np.arange(400) * 100 * MS
        rng = np.random.default_rng(seed)
        return make_run(
            {"arrival_ns": arrival, "first_token_ns": 2 * arrival + S, "finish_ns": 2 * arrival + 2 * S,
             "prompt_tokens": rng.integers(10, 100, 400)}
        )  # fmt: skip

    assert latency_intervals(overloaded(0), overloaded(1)) == {}
    assert latency_intervals(overloaded(0), overloaded(0)) != {}


def test_a_run_too_short_to_say_has_no_interval() -> None:
    assert all(one.interval is None for one in compare(side(random_run(40)), side(random_run(40))))


def test_relative_change_of_zero() -> None:
    assert relative(0, 0) == 0.0
    assert relative(0, 5) is None
    assert relative(None, 5) is None
    assert relative(4, 5) == 0.25


@pytest.mark.parametrize(
    "text, base, other, fails",
    [
        ("ttft_p95>+5%", {"p95_ttft_ms": 100}, {"p95_ttft_ms": 106}, True),
        ("ttft_p95>+5%", {"p95_ttft_ms": 100}, {"p95_ttft_ms": 105}, False),
        ("ttft_p95>5%", {"p95_ttft_ms": 100}, {"p95_ttft_ms": 106}, True),
        ("output_throughput<-3%", {"output_throughput": 100}, {"output_throughput": 96}, True),
        ("output_throughput < -3 %".replace(" %", "%"), {"output_throughput": 100}, {"output_throughput": 98}, False),
        ("preemptions>+10", {"preemptions": 5}, {"preemptions": 16}, True),
        ("preemptions>100", {}, {"preemptions": 99}, False),
        ("e2e_p99.9>=2000", {}, {"p99.9_e2el_ms": 2000}, True),
        ("preemptions>0%", {"preemptions": 0}, {"preemptions": 1}, True),
        ("preemptions>0%", {"preemptions": 0}, {"preemptions": 0}, False),
    ],
)  # fmt: skip
def test_gates(text: str, base: dict[str, float], other: dict[str, float], fails: bool) -> None:
    gate = parse_gate(text)
    assert gate.fails(gate.value(base, other)) is fails


@pytest.mark.parametrize(
    "text", ["", "ttft_p95", "ttft_p95>", ">5%", "ttft_p95=5", "ttft_p95>5%%", "x>nan"]
)
def test_a_gate_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="--fail-if"):
        parse_gate(text)


def test_gate_names() -> None:
    assert gate_key("ttft_p95") == "p95_ttft_ms"
    assert gate_key("e2e_mean") == gate_key("e2el_mean_ms") == "mean_e2el_ms"
    assert gate_key("kv_usage_peak") == "kv_usage_peak"


def save(run: Run, folder: Path) -> str:
    write_run(run, folder, summarize(run), report=False)
    return str(folder)


def call(*arguments: str) -> Result:
    return CliRunner().invoke(command, list(arguments))


def test_exit_codes(tmp_path: Path) -> None:
    base = save(random_run(300), tmp_path / "base")
    worse = save(slower(random_run(300), 1.2), tmp_path / "worse")
    assert call(base, worse).exit_code == 0
    assert call(base, worse, "--fail-if", "ttft_p95>+50%").exit_code == 0
    failed = call(base, worse, "--fail-if", "ttft_p95>+50%", "--fail-if", "e2e_p99.5>+5%")
    assert failed.exit_code == 1 and "FAILED: e2e_p99.5>+5%" in failed.output
    for bad in (
        [base],
        [base, str(tmp_path / "nothing")],
        [base, worse, "--fail-if", "nonsense>1"],
    ):
        assert isinstance(call(*bad).exception, UserError)


def test_json_says_what_the_table_says(tmp_path: Path) -> None:
    base = save(random_run(300), tmp_path / "base")
    worse = save(slower(random_run(300), 1.2), tmp_path / "worse")
    told = call(base, worse, "--json", "--fail-if", "ttft_mean>+10%")
    assert told.exit_code == 1
    data = json.loads(told.output)
    ttft = data["comparisons"][0]["metrics"]["mean_ttft_ms"]
    assert ttft["change"] == pytest.approx(0.2, rel=1e-3) and ttft["significant"] is True
    assert data["failed"] is True and data["gates"][0]["failed"] is True
    assert told.output == call(base, worse, "--json", "--fail-if", "ttft_mean>+10%").output


def test_the_table_fits_80_columns_and_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one, two = (
        save(random_run(300), tmp_path / "a/run"),
        save(random_run(300, seed=1), tmp_path / "b/run"),
    )
    text = call(one, two).output
    assert "run (2) against run (1)" in text
    assert max(len(line) for line in text.splitlines()) <= 80


def test_the_page_overlays_the_runs(tmp_path: Path) -> None:
    one, two = (
        save(random_run(300), tmp_path / "<one>"),
        save(random_run(300, seed=1), tmp_path / "two"),
    )
    page = tmp_path / "page.html"
    assert call(one, two, "--report", str(page)).exit_code == 0
    text = page.read_text(encoding="utf-8")
    assert "<one>" not in text and "&lt;one&gt;" in text
    assert text.count('<path class="line c2') >= 6


# `vllm bench serve` results


def bench_result() -> dict[str, object]:
    return {
        "model_id": "m", "backend": "openai", "request_rate": "inf", "max_concurrency": None,
        "completed": 2, "failed": 1, "duration": 1.0, "mean_ttft_ms": 150.0, "median_ttft_ms": 150.0,
        "p99_ttft_ms": 199.0, "output_throughput": 5.0,
        "input_lens": [10, 20, 30], "output_lens": [3, 2, 0], "ttfts": [0.1, 0.2, 0.0],
        "itls": [[0.01, 0.03], [0.05], []], "start_times": [100.0, 100.5, 100.6],
        "latencies": [0.14, 0.25, 0.0], "errors": ["", "", "HTTP 500"],
    }  # fmt: skip


def test_a_detailed_bench_result_is_a_measured_run() -> None:
    run = bench_run(bench_result(), "file.json")
    assert run is not None and run.origin == "measured"
    s = summarize(run)
    assert (s["completed"], s["failed"]) == (2, 1)
    assert s["mean_ttft_ms"] == pytest.approx(150)
    assert s["mean_itl_ms"] == pytest.approx(30)
    assert run.requests["sent_ns"].tolist() == [0, 500 * MS, 600 * MS]


def test_a_bench_result_without_details_is_compared_by_its_totals(tmp_path: Path) -> None:
    plain = {k: v for k, v in bench_result().items() if not isinstance(v, list)}
    file = tmp_path / "real.json"
    file.write_text(json.dumps(plain))
    simulated = save(random_run(300), tmp_path / "sim")
    told = call(str(file), simulated)
    assert told.exit_code == 0 and "Mean TTFT (ms)" in told.output
    assert bench_run(plain, "x") is None


def test_a_simulated_run_written_as_a_bench_result_says_the_same(tmp_path: Path) -> None:
    run = random_run(200)
    file = tmp_path / "bench.json"
    file.write_text(render_bench(run, summarize(run)))
    back = load_bench(file)
    assert back["mean_ttft_ms"] == summarize(run)["mean_ttft_ms"]
    finished = [t for t, e in zip(back["ttfts"], back["errors"], strict=True) if not e]
    assert np.mean(finished) * 1000 == pytest.approx(back["mean_ttft_ms"])
    assert np.percentile([v for v in back["latencies"] if v], 99) * 1000 == pytest.approx(
        back["p99_e2el_ms"]
    )


def test_bytes_that_are_no_text_are_refused_in_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not text"):
        load_bench(file)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"completed": 1}', "\x00", "[" * 100_000])
def test_another_file_is_refused_in_one_sentence(tmp_path: Path, text: str) -> None:
    file = tmp_path / "x.json"
    file.write_text(text)
    with pytest.raises(UserError, match=r"x\.json"):
        load_bench(file)


@pytest.mark.parametrize(
    "key, value",
    [
        ("ttfts", [0.1]),
        ("ttfts", ["a", "b", "c"]),
        ("itls", [1, 2, 3]),
        ("start_times", [1, 2, float("nan")]),
    ],
)
def test_lists_that_do_not_fit_are_refused(key: str, value: object) -> None:
    with pytest.raises(UserError):
        bench_run({**bench_result(), key: value}, "x.json")


def test_runs_timed_by_different_models_are_compared_with_a_warning(tmp_path: Path) -> None:
    import dataclasses

    from vsim.sim.compare_page import step_times_differ

    def timed_by(label: str) -> Side:
        provenance = {"step_model": {"label": label}}
        return side(dataclasses.replace(random_run(50), provenance=provenance), label)

    tables, roofline = timed_by("layerwise kernel tables"), timed_by("roofline, not measured")
    assert step_times_differ(tables, timed_by("layerwise kernel tables")) is None
    warning = step_times_differ(tables, roofline)
    assert warning is not None and "layerwise kernel tables" in warning and "roofline" in warning
