"""Predicted against measured: cases read strictly, errors defined once, and a fit that finds a known truth."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from synthetic_case import CASES, QWEN3_30B, moe_profile, with_rows, write_case

from vsim.calibrate.case import read_case
from vsim.calibrate.fit import fit_first, robust_ridge
from vsim.calibrate.follow import follow
from vsim.calibrate.predict import predict
from vsim.calibrate.validate import cells, errors_pct, ks_distance, parse_fit, validate
from vsim.commands.validate import validate as command
from vsim.errors import UserError
from vsim.models.artifact import read_calibration
from vsim.models.correction import Coefficients
from vsim.models.step import StepShape, lockstep_seconds
from vsim.sim.config import SchedulerConfig
from vsim.sim.engine import simulate
from vsim.sim.lockstep import DUMMY, QueueBalancer, run_lockstep
from vsim.traces.trace import Trace

TRUTH = Coefficients(1e-3, 2e-3, 2e-6, 5e-9)


class Linear:
    """1 ms a step, 10 us a prefill token, 100 us a decode."""

    def device_seconds(self, shape: StepShape) -> float:
        return 1e-3 + 1e-5 * shape.prefill_tokens + 1e-4 * shape.num_decodes

    def host_seconds(self, shape: StepShape) -> float:
        return 2e-4


def some_trace(n: int = 60, rate: float = 40.0, seed: int = 1) -> Trace:
    rng = np.random.default_rng(seed)
    return Trace.of(
        np.cumsum(rng.exponential(1 / rate, n)).tolist(),
        rng.integers(5, 600, n).tolist(),
        rng.integers(1, 60, n).tolist(),
    )


# --- lockstep -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [1000, 60])
@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("host_s", [0.0, 2e-4])
def test_one_rank_in_lockstep_is_the_single_engine(
    asynchronous: bool, blocks: int, host_s: float
) -> None:
    trace, model = some_trace(), Linear()
    model.host_seconds = lambda shape: host_s  # type: ignore[method-assign]
    config = SchedulerConfig(
        num_gpu_blocks=blocks,
        max_num_seqs=16,
        max_num_batched_tokens=256,
        async_scheduling=asynchronous,
    )
    alone = simulate(trace, config, model)
    together = run_lockstep(
        trace,
        config,
        lambda shapes: (round(host_s * 1e9), round(model.device_seconds(shapes[0]) * 1e9)),
    )
    assert together.first_token_ns.tolist() == alone.requests["first_token_ns"].tolist()
    assert together.finish_ns.tolist() == alone.requests["finish_ns"].tolist()
    assert together.preemptions.tolist() == alone.requests["preemptions"].tolist()


def test_ranks_in_lockstep_end_together_and_idle_ones_run_a_dummy() -> None:
    trace = Trace.of([0.0], [100], [5])
    run = run_lockstep(trace, SchedulerConfig(), lambda shapes: (0, 1000), ranks=2)
    assert run.finish_ns[0] == 5 * 1000
    assert all(wave.shapes[1] == DUMMY for wave in run.waves)


def test_every_request_is_served_once_by_one_rank() -> None:
    trace = some_trace()
    run = run_lockstep(trace, SchedulerConfig(max_num_seqs=8), lambda shapes: (0, 10**6), ranks=3)
    assert (run.finish_ns > 0).all()
    served = [index for wave in run.waves for step in wave.steps if step for index in step.new]
    assert sorted(served) == list(range(len(trace)))
    assert set(run.rank.tolist()) == {0, 1, 2}


def test_a_request_that_never_fits_ends_the_run_with_a_reason() -> None:
    trace = Trace.of([0.0, 0.1], [500, 10], [2, 2])
    run = run_lockstep(trace, SchedulerConfig(num_gpu_blocks=5), lambda shapes: (0, 1000))
    assert run.ended_early is not None
    assert "stalled" in run.ended_early


class Queue:
    def __init__(self, waiting: int, running: int) -> None:
        self.num_waiting, self.num_running = waiting, running


def test_the_balancer_weighs_waiting_four_times_and_counts_what_it_sent() -> None:
    balancer = QueueBalancer([Queue(1, 0), Queue(0, 3)])
    assert [balancer.route() for _ in range(3)] == [0, 1, 0]  # nothing reported yet: in turn
    balancer.report(10**9)
    assert [balancer.route() for _ in range(2)] == [1, 0]


# --- definitions ----------------------------------------------------------------------------------------


def test_error_is_predicted_less_measured_over_measured() -> None:
    assert errors_pct({"mean": 1.1}, {"mean": 1.0})["mean"] == pytest.approx(10.0)
    assert cells(np.array([1.0, 2.0, 3.0, np.nan]))["p50"] == 2.0


def test_ks_distance_of_known_samples() -> None:
    assert ks_distance(np.array([1.0, 2.0]), np.array([1.0, 2.0])) == 0.0
    assert ks_distance(np.array([1.0, 2.0]), np.array([3.0, 4.0])) == 1.0
    assert ks_distance(np.array([1.0, 3.0]), np.array([2.0, 3.0])) == 0.5


@pytest.mark.parametrize(
    "text", ["", "first", "first:", "first:0", "first:-3", "first:x", "all", "first:²"]
)
def test_a_fit_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="first:N"):
        parse_fit(text)


def test_fits_are_read() -> None:
    assert (parse_fit("none"), parse_fit("first:100")) == (0, 100)


def test_outliers_hardly_move_the_robust_fit() -> None:
    x = np.linspace(1, 2, 50)[:, None]
    y = 3 * x[:, 0]
    y[::10] += 100
    solution, _, _ = robust_ridge(x, y, np.full(50, 0.01), np.array([10.0]))
    assert solution[0] == pytest.approx(3, rel=0.01)


# --- following and fitting a known truth ---------------------------------------------------------------


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return write_case(tmp_path_factory.mktemp("dense") / "case", TRUTH, {}, requests=60)


def test_the_truth_predicts_its_own_run_to_the_microsecond(dense: Any) -> None:
    """The trace file's times and the stamps are all that stands between them."""
    from vsim.models.correction import CorrectedStepModel

    run = predict(dense, CorrectedStepModel(dense.step_model(None).model, TRUTH), 1e-3)
    assert (run.first_token_ns - dense.trace.arrival_ns) / 1e9 == pytest.approx(
        dense.measured.ttft_s
    )
    assert (run.finish_ns - dense.trace.arrival_ns) / 1e9 == pytest.approx(dense.measured.e2e_s)


def test_following_a_run_reads_off_what_its_steps_took(dense: Any) -> None:
    from vsim.models.correction import CorrectedStepModel

    prior = dense.step_model(None).model
    truth = CorrectedStepModel(prior, TRUTH)
    followed = follow(dense, lambda s: 1.02 * lockstep_seconds(truth, s), 30, 1e-3)
    assert len(followed.intervals) > 15
    off = [
        abs(i.measured_s / sum(lockstep_seconds(truth, s) for s in i.steps) - 1)
        for i in followed.intervals
        if len(i.steps) <= 3
    ]
    assert np.median(off) < 0.01


def test_a_fit_finds_the_planted_correction(dense: Any) -> None:
    found = fit_first(dense, dense.step_model(None).model, 30, 0.0)
    c = found.coefficients
    assert found.frontend_s == pytest.approx(1e-3, abs=1e-5)
    assert c.per_step_s == pytest.approx(TRUTH.per_step_s, rel=0.5)
    assert c.per_mixed_step_s == pytest.approx(TRUTH.per_mixed_step_s, rel=0.5)
    assert c.per_prefill_token_s == pytest.approx(TRUTH.per_prefill_token_s, rel=0.3)


def test_what_was_fitted_predicts_the_requests_never_seen(dense: Any) -> None:
    blind = validate(dense, dense.step_model(None), 0).validation
    fitted = validate(dense, dense.step_model(None), 30).validation
    assert blind.metrics["tpot"].error_pct["mean"] < -8
    for name in ("tpot", "e2e"):
        assert abs(fitted.metrics[name].error_pct["mean"]) < 2
        assert abs(fitted.metrics[name].error_pct["p95"]) < 3
    assert fitted.scored == 30


def test_the_fit_never_looks_at_the_requests_it_is_scored_on(dense: Any) -> None:
    prior = dense.step_model(None).model
    moved = with_rows(dense, range(30, 60), 123.0)
    assert fit_first(dense, prior, 30, 0.0) == fit_first(moved, prior, 30, 0.0)


def test_two_ranks_are_fitted_like_one(tmp_path: Path) -> None:
    case = write_case(tmp_path / "tp2", TRUTH, {"tensor_parallel_size": 2}, requests=50, rate=10)
    result = validate(case, case.step_model(None), 25).validation
    assert abs(result.metrics["e2e"].error_pct["mean"]) < 2
    assert any("link between GPUs" in sentence for sentence in result.assumptions)


def test_experts_shared_by_two_replicas_step_together(tmp_path: Path) -> None:
    profile = moe_profile(tmp_path / "profile")
    engine = {
        "model": "Qwen/Qwen3-30B-A3B",
        "hf_config": QWEN3_30B,
        "data_parallel_size": 2,
        "enable_expert_parallel": True,
    }
    case = write_case(tmp_path / "moe", TRUTH, engine, requests=50, rate=10, profile=profile)
    assert case.ranks == 2
    result = validate(case, case.step_model(None), 25).validation
    assert abs(result.metrics["e2e"].error_pct["mean"]) < 2
    assert any("data-parallel ranks step together" in sentence for sentence in result.assumptions)


def test_intervals_hold_the_truth_and_narrow_with_what_was_learned(dense: Any) -> None:
    blind = validate(dense, dense.step_model(None), 0, draws=6).validation
    fitted = validate(dense, dense.step_model(None), 30, draws=6).validation

    def width(result: Any) -> float:
        low, high = result.intervals["e2e"]["mean"]
        return (high - low) / result.metrics["e2e"].predicted_s["mean"]

    assert width(fitted) < width(blind)
    low, high = fitted.intervals["e2e"]["mean"]
    assert low < fitted.metrics["e2e"].predicted_s["mean"] < high
    again = validate(dense, dense.step_model(None), 0, draws=6).validation
    assert again.intervals == blind.intervals  # same seed, same numbers


def test_replicas_of_a_dense_model_run_free_and_are_fitted_together(tmp_path: Path) -> None:
    case = write_case(tmp_path / "dp2", TRUTH, {"data_parallel_size": 2}, requests=60, rate=14)
    assert case.ranks == 2
    result = validate(case, case.step_model(None), 30).validation
    assert abs(result.metrics["e2e"].error_pct["mean"]) < 2
    assert any("run free of each other" in sentence for sentence in result.assumptions)


# --- the handed cases -----------------------------------------------------------------------------------


def test_rtx_pro_6000_from_tables_alone_is_no_worse_than_the_peer() -> None:
    case = read_case(CASES / "rtxpro6000-llama-3.1-8b")
    result = validate(case, case.step_model(None), 0).validation
    for name in ("ttft", "e2e"):
        for cell, error in result.metrics[name].error_pct.items():
            assert abs(error) <= abs(result.peer[name][cell]) + 0.05, (name, cell)
    assert all(abs(e) < 1 for e in result.metrics["tpot"].error_pct.values())


def test_rtx_4090_under_preemption_stays_within_two_percent_from_tables_alone() -> None:
    case = read_case(CASES / "rtx4090-llama-3.1-8b")
    result = validate(case, case.step_model(None), 0).validation
    assert result.preemptions > 100
    assert result.peer["ttft"]["mean"] == pytest.approx(0.51, abs=0.01)
    for name, distance in result.metrics.items():
        assert all(abs(error) < 2 for error in distance.error_pct.values()), name


def test_a_hundred_requests_of_the_rtx_pro_6000_teach_every_cell_within_two_percent() -> None:
    """The RTX 4090's figures are in docs/validation.md; its fit takes too long for every test run."""
    case = read_case(CASES / "rtxpro6000-llama-3.1-8b")
    result = validate(case, case.step_model(None), 100).validation
    assert result.scored == 200
    for name, distance in result.metrics.items():
        assert all(abs(error) < 2 for error in distance.error_pct.values()), name


# --- what enters from outside ---------------------------------------------------------------------------


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    target = tmp_path / "case"
    shutil.copytree(CASES / "rtx4090-llama-3.1-8b", target, ignore=shutil.ignore_patterns("skew*"))
    return target


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("engine.json", None, "no engine.json"),
        ("engine.json", "{", "not JSON"),
        ("engine.json", "[]", "no JSON object"),
        ("engine.json", '{"model": "nobody/knows"}', "hf_config"),
        (
            "engine.json",
            '{"model": "meta-llama/Llama-3.1-8B", "gpu": "a100", "data_parallel_size": "2"}',
            "data_parallel_size",
        ),
        (
            "engine.json",
            '{"model": "meta-llama/Llama-3.1-8B", "gpu": "a100", "max_num_seqs": "x"}',
            "engine.json|max_num_seqs",
        ),
        (
            "engine.json",
            '{"model": "m", "hf_config": {"hidden_size": []}}',
            "hf_config|hidden_size",
        ),
        ("trace.jsonl", None, "no trace.jsonl"),
        ("trace.jsonl", "", "empty"),
        ("trace.jsonl", "{}\n", "trace.jsonl:1: timestamp"),
        (
            "trace.jsonl",
            '{"timestamp": 1, "input_tokens": 0, "output_tokens": 1}\n',
            "input_tokens=0",
        ),
        ("trace.jsonl", '{"timestamp": NaN, "input_tokens": 1, "output_tokens": 1}\n', "timestamp"),
        ("measured.jsonl", '{"ttft_s": 1}\n', "1 rows"),
        ("measured.jsonl", "x\n", "measured.jsonl:1: not JSON"),
    ],
)
def test_a_broken_case_is_one_clear_sentence(
    copy: Path, name: str, content: str | None, says: str
) -> None:
    if content is None:
        (copy / name).unlink()
    else:
        (copy / name).write_text(content)
    with pytest.raises(UserError, match=says):
        read_case(copy)


def test_a_gpu_nobody_knows_needs_its_block_count(copy: Path) -> None:
    engine = json.loads((copy / "engine.json").read_text())
    engine |= {"gpu": "Z9", "gpu_name": "Zed 9"}
    (copy / "engine.json").write_text(json.dumps(engine))
    case = read_case(copy)
    assert case.gpu is None
    assert any("Z9" in sentence for sentence in case.assumptions)
    (copy / "engine.json").write_text(json.dumps(engine | {"num_gpu_blocks": None}))
    with pytest.raises(UserError, match="num_gpu_blocks"):
        read_case(copy)


def test_a_case_without_tables_takes_a_profile(copy: Path) -> None:
    shutil.rmtree(copy / "profile")
    case = read_case(copy)
    assert case.step_model("rtx4090-llama-3.1-8b").name == "rtx4090-llama-3.1-8b"
    assert case.step_model(None).name == "rtx4090-llama-3.1-8b"  # the bundled one that fits
    with pytest.raises(UserError, match="nothing-here"):
        case.step_model("nothing-here")


def test_a_fit_that_leaves_nothing_to_score_is_refused(copy: Path) -> None:
    case = read_case(copy)
    with pytest.raises(UserError, match="leaves none of 300"):
        validate(case, case.step_model(None), 300)


def test_the_command_prints_a_table_and_writes_json(tmp_path: Path, dense: Any) -> None:
    out, saved = tmp_path / "v.json", tmp_path / "corrected.json"
    arguments = [
        str(dense.folder),
        "--fit",
        "first:20",
        "--json",
        str(out),
        "--save-profile",
        str(saved),
    ]
    done = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    assert "TTFT" in done.output
    assert "learned from the first 20 requests" in done.output
    data = json.loads(out.read_text())
    assert set(data["error_pct"]) == {"ttft", "tpot", "e2e", "throughput"}
    assert set(data["error_pct"]["ttft"]) == {"mean", "p50", "p90", "p95", "p99"}
    assert data["scored_requests"] == 40
    assert read_calibration(saved).kind == "corrected"
    again = CliRunner().invoke(
        command, [str(dense.folder), "--profile", str(saved)], catch_exceptions=False
    )
    assert "corrected from 20 requests" in again.output


def test_the_command_refuses_bad_input(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a folder"):
        CliRunner().invoke(command, [str(tmp_path / "none")], catch_exceptions=False)
    with pytest.raises(UserError, match="save-profile"):
        CliRunner().invoke(
            command,
            [str(tmp_path), "--save-profile", str(tmp_path / "x.json")],
            catch_exceptions=False,
        )


def test_a_case_in_the_current_folder_has_its_folders_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_case(tmp_path / "mine", TRUTH, {}, requests=20)
    monkeypatch.chdir(tmp_path / "mine")
    assert read_case(Path(".")).name == "mine"


def test_a_profile_of_another_gpu_or_release_is_not_validated(tmp_path: Path) -> None:
    case = write_case(tmp_path / "mine", TRUTH, {}, requests=20)
    with pytest.raises(UserError, match="is not of this run: it was measured on NVIDIA GeForce"):
        case.step_model("rtx4090-llama-3.1-8b")
    assert case.step_model("rtxpro6000-llama-3.1-8b").label
