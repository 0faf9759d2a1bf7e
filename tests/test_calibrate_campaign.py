"""`vsim calibrate` and `vsim spotcheck` from end to end, on an imagined machine."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from fake_worker import HELLO, FakeWorker

from vsim.calibrate import campaign, live
from vsim.calibrate.campaign import Plan, calibrate, check_device, engine_args
from vsim.calibrate.live import LivePlan, live_check
from vsim.calibrate.samples import journal_path, read_samples
from vsim.calibrate.self_check import self_check
from vsim.calibrate.spot import Cell, SpotCheck, fitting
from vsim.calibrate.worker import find_vllm_python
from vsim.errors import UserError
from vsim.models.artifact import read_calibration
from vsim.models.hardware import find_gpu
from vsim.traces.trace import Trace


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> type[FakeWorker]:
    monkeypatch.setattr(campaign, "Worker", FakeWorker)
    monkeypatch.setattr(live, "Worker", FakeWorker)
    for module in (campaign, live):
        monkeypatch.setattr(module, "find_vllm_python", lambda given: Path(sys.executable))
    monkeypatch.setattr(campaign, "LEAST_GRID_S", 0.2)
    for name, value in (
        ("noise", 0.0),
        ("drift", 0.0),
        ("slower", 1.0),
        ("engines", 0),
        ("slowdowns", []),
        ("wall_over_cpu", 1.0),
        ("after_scene", None),
        ("scenes", 0),
    ):
        monkeypatch.setattr(FakeWorker, name, value)
    return FakeWorker


def plan(out: Path, budget_s: float = 1.0, **changes: object) -> Plan:
    base = Plan(
        gpu=find_gpu("cpu"), model="tiny", out=out, block_sizes=(32,), budget_s=budget_s, repeats=2
    )
    return replace(base, **changes)


def quiet(*_: object) -> None:
    pass


def test_a_profile_comes_out_and_knows_its_error(machine: type[FakeWorker], tmp_path: Path) -> None:
    machine.noise = 0.01
    outcome = calibrate(plan(tmp_path / "p.json", 5.0), quiet)
    assert outcome.calibration is not None
    quality = outcome.calibration.quality
    # How much fits into five seconds depends on the host.
    assert quality["held_out"] > 0
    assert quality["held_out_error"]["median_abs_pct"] < 5
    assert abs(quality["held_out_error"]["bias_pct"]) < 5
    assert 0.3 < quality["noise_floor"]["median_abs_pct"] < 2
    says = read_calibration(tmp_path / "p.json").provenance
    assert (says["gpu"], says["gpu_name"], says["model"]) == ("cpu", "Imagined CPU", "tiny")
    assert str(tmp_path) not in (tmp_path / "p.json").read_text(), "an artifact carries no paths"
    assert not journal_path(tmp_path / "p.json").exists()


def test_ctrl_c_keeps_what_was_measured_and_a_rerun_goes_on(
    machine: type[FakeWorker], tmp_path: Path
) -> None:
    def stop(count: int) -> None:
        if count == 12:
            raise KeyboardInterrupt

    machine.after_scene = stop
    first = calibrate(plan(tmp_path / "p.json", 60.0), quiet)
    assert first.interrupted
    kept = {(r.session, r.seq) for r in first.samples.rows}
    assert len(kept) > 20
    machine.after_scene = None
    second = calibrate(plan(tmp_path / "p.json"), quiet)
    rows = read_samples(tmp_path / "p.json").rows
    assert kept < {(r.session, r.seq) for r in rows}
    assert second.calibration is not None
    # What the first session had measured undisturbed was not measured again.
    first_points = {(r.point, r.repeat) for r in first.samples.rows if r.point != "warm-up"}
    later = {(r.point, r.repeat) for r in rows if (r.session, r.seq) not in kept}
    assert not first_points & later


def test_a_busy_machine_is_called_busy(machine: type[FakeWorker], tmp_path: Path) -> None:
    machine.wall_over_cpu = 1.5
    outcome = calibrate(plan(tmp_path / "p.json"), quiet)
    assert outcome.warning is not None and "busy" in outcome.warning
    assert outcome.calibration is not None
    assert any("busy" in sentence for sentence in outcome.calibration.assumptions)


def test_samples_of_another_device_are_not_mixed(machine: type[FakeWorker], tmp_path: Path) -> None:
    calibrate(plan(tmp_path / "p.json"), quiet)
    with pytest.raises(UserError, match="samples of both can't be mixed"):
        calibrate(plan(tmp_path / "p.json", model="Qwen/Qwen2.5-0.5B"), quiet)


def test_another_gpu_than_the_one_present_is_refused() -> None:
    with pytest.raises(UserError, match="a CPU only"):
        check_device(find_gpu("a100"), HELLO)
    cuda = {**HELLO, "platform": "cuda", "device": "NVIDIA H100 80GB HBM3", "device_count": 1}
    check_device(find_gpu("h100"), cuda)
    with pytest.raises(UserError, match="this machine has NVIDIA H100"):
        check_device(find_gpu("h200"), cuda)
    with pytest.raises(UserError, match="tensor_parallel_size=4"):
        check_device(find_gpu("h100"), cuda, tensor_parallel_size=4)
    with pytest.raises(UserError, match="--gpu cpu names"):
        check_device(find_gpu("cpu"), cuda)


def test_engine_arguments_are_vllms_own() -> None:
    args = engine_args(Path("m"), 32, on_cpu=True, flags={"max_num_seqs": 8, "dtype": None})
    assert args["max_num_seqs"] == 8 and args["dtype"] == "bfloat16"
    assert args["enforce_eager"] is True and args["async_scheduling"] is False
    gpu = engine_args(Path("m"), 16, on_cpu=False, tensor_parallel_size=2)
    assert gpu["enforce_eager"] is False and gpu["distributed_executor_backend"] == "mp"


def test_no_vllm_says_how_to_name_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from vsim.calibrate import worker

    monkeypatch.delenv("VSIM_VLLM_PYTHON", raising=False)
    monkeypatch.setattr(worker, "ROOT", tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="--vllm-python PATH"):
        find_vllm_python()
    with pytest.raises(UserError, match="not a Python interpreter"):
        find_vllm_python(str(tmp_path))


# --- spot checks -----------------------------------------------------------------------------------------


@pytest.fixture
def profile(machine: type[FakeWorker], tmp_path: Path) -> Path:
    machine.noise = 0.003
    calibrate(plan(tmp_path / "p.json"), quiet)
    return tmp_path / "p.json"


def spot(profile: Path, **changes: object) -> LivePlan:
    base = LivePlan(
        profile=profile,
        requests=60,
        load=0.8,
        draws=2,
        block_size=32,
        engine_flags={"num_gpu_blocks_override": 60, "max_num_seqs": 32},
    )
    return replace(base, **changes)


def test_a_good_profile_passes_with_preemptions_occurring(profile: Path) -> None:
    result = live_check(spot(profile), quiet)
    check = result.check
    assert check.complaints == []
    assert min(check.facts["preemptions"]["measured"]) > 0, "the scene must reach preemption"
    # How many scenes fit into a budget of a second depends on the host; the means must hold anyway.
    assert all(abs(c.error_pct) < 10 for c in check.cells if c.statistic == "mean")
    assert {run.origin for run in result.measured} == {"measured"}
    for same in check.facts["same_decisions"]:
        assert same["equal_steps"] == same["steps"], "given the real step times nothing may differ"
        assert same["largest_finish_difference_ms"] == 0


@pytest.mark.parametrize(
    ("predicted", "statistic", "verdict", "passed"),
    [
        (104.0, "p95", "within 5 %", True),
        (106.0, "p95", "off", False),
        (106.0, "p99", "off", True),  # the tail's tail is shown, not judged
        (101.0, "mean", "inside the noise", True),
    ],
)
def test_the_verdict(predicted: float, statistic: str, verdict: str, passed: bool) -> None:
    cell = Cell("ttft", statistic, predicted, (98.0, 100.0, 102.0))
    assert (cell.verdict, cell.spread_pct) == (verdict, pytest.approx(4.0))
    assert SpotCheck([cell], []).passed is passed
    assert not SpotCheck([cell], ["the machine was busy"]).passed


def test_a_machine_that_changed_fails_the_check(
    profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "fake_worker.imagined_seconds", lambda shape: 0.004 + 4e-5 * shape.num_tokens
    )
    check = live_check(spot(profile), quiet).check
    assert not check.passed
    assert check.step_error["bias_pct"] < -20


def test_interference_is_seen_and_the_cpu_clock_does_without_it(
    profile: Path, machine: type[FakeWorker]
) -> None:
    machine.wall_over_cpu = 1.4
    disturbed = live_check(spot(profile), quiet).check
    assert any("busy" in sentence for sentence in disturbed.complaints)
    by_cpu = live_check(spot(profile, clock="cpu"), quiet).check
    assert by_cpu.complaints == []
    assert abs(by_cpu.step_error["bias_pct"]) < 2
    assert abs(disturbed.step_error["bias_pct"]) > 15


def test_repeats_far_apart_are_doubted(profile: Path, machine: type[FakeWorker]) -> None:
    machine.drift = 0.1
    check = live_check(spot(profile, clock="cpu"), quiet).check
    assert any("between the repeats" in sentence for sentence in check.complaints)


def test_each_repeat_on_a_cpu_has_an_engine_of_its_own(
    profile: Path, machine: type[FakeWorker]
) -> None:
    machine.engines = 0
    assert len(live_check(spot(profile), quiet).measured) == machine.engines == 3


def test_a_repeat_in_a_slow_moment_of_the_machine_is_left_out_and_measured_again(
    profile: Path, machine: type[FakeWorker]
) -> None:
    machine.slowdowns = [1.0, 1.7, 1.0, 1.0]
    result = live_check(spot(profile), quiet)
    assert result.check.facts["left_out_slowdown"] == [1.7]
    assert len(result.measured) == 3 and machine.engines >= 4
    assert not any("slower than during the calibration" in c for c in result.check.complaints)


def test_a_machine_that_stays_slow_is_doubted_not_measured_for_ever(
    profile: Path, machine: type[FakeWorker]
) -> None:
    machine.slowdowns = [1.7] * 50
    result = live_check(spot(profile), quiet)
    assert len(result.measured) == 3
    assert any("70% slower than during the calibration" in c for c in result.check.complaints)
    assert not result.check.passed


def test_a_cpu_with_time_for_it_is_measured_with_two_engines_per_block_size() -> None:
    minutes = replace(plan(Path("p.json"), 300.0), block_sizes=(32, 128))
    assert campaign._rounds(minutes) == 2
    assert campaign._rounds(replace(minutes, budget_s=200.0)) == 1
    assert campaign._rounds(replace(minutes, gpu=find_gpu("a100"))) == 1


def test_two_repeats_are_too_few_to_know_the_noise(profile: Path) -> None:
    check = live_check(spot(profile, repeats=2), quiet).check
    assert any("2 repeats" in sentence for sentence in check.complaints)


def test_another_model_is_scaled_and_says_so(profile: Path) -> None:
    check = live_check(spot(profile, model="Qwen/Qwen2.5-0.5B"), quiet).check
    assert any(
        "timed matrix products to Qwen/Qwen2.5-0.5B" in sentence
        for sentence in check.facts["assumptions"]
    )


def test_a_profile_of_another_engine_is_refused(profile: Path) -> None:
    text = json.loads(profile.read_text())
    text["provenance"]["vllm_version"] = "0.25.1"
    profile.write_text(json.dumps(text))
    with pytest.raises(UserError, match=r"vllm_version=0\.25\.1.*0\.32\.0"):
        live_check(spot(profile), quiet)


def test_a_measurement_that_contradicts_itself_is_doubted(profile: Path) -> None:
    run = live_check(spot(profile), quiet).measured[0]
    trace = Trace.of(
        (run.requests["arrival_ns"] / 1e9).tolist(),
        run.requests["prompt_tokens"].tolist(),
        run.requests["output_tokens"].tolist(),
    )
    assert self_check(trace, run) == []
    lost = replace(run, steps={k: v[: len(v) // 2] for k, v in run.steps.items()})
    assert any("tokens" in s for s in self_check(trace, lost))
    assert any("Little" in s for s in self_check(trace, lost))
    shifted = replace(
        run, requests={**run.requests, "first_token_ns": run.requests["finish_ns"] + 1}
    )
    assert any("two clocks" in s for s in self_check(trace, shifted))


def test_requests_that_cannot_fit_are_left_out_and_counted() -> None:
    limits = campaign.Limits(1024, 8, 100, 4096, 16)
    trace = Trace.of([0, 1, 2], [50, 99, 10], [10, 10, 10])
    kept, said = fitting(trace, limits)
    assert len(kept) == 2
    assert "1 of 3 requests" in said[0]
    with pytest.raises(UserError, match="no request"):
        fitting(Trace.of([0], [200], [10]), limits)


# --- commands --------------------------------------------------------------------------------------------


def test_commands_end_to_end(machine: type[FakeWorker], tmp_path: Path) -> None:
    from vsim.cli import vsim

    out = tmp_path / "p.json"
    runner = CliRunner()
    arguments = ["calibrate", "--gpu", "cpu", "--model", "tiny", "--out", str(out)]
    done = runner.invoke(vsim, [*arguments, "--budget-minutes", "0.02"], catch_exceptions=False)
    assert done.exit_code == 0
    assert "held-out steps" in done.output and "noise floor" in done.output
    again = runner.invoke(vsim, [*arguments, "--refit", "--json"], catch_exceptions=False)
    assert json.loads(again.stdout)["samples"] > 30
    check = [
        *(
            "spotcheck",
            "--profile",
            str(out),
            "--requests",
            "40",
            "--block-size",
            "32",
            "--draws",
            "2",
        ),
        *("--num-gpu-blocks-override", "60", "--json", str(tmp_path / "s.json")),
        *("--out", str(tmp_path / "runs")),
    ]
    done = runner.invoke(vsim, check, catch_exceptions=False)
    assert done.exit_code in (0, 1), done.output
    result = json.loads((tmp_path / "s.json").read_text())
    assert set(result["error_pct"]["ttft"]) == {"mean", "p50", "p90", "p95", "p99"}
    assert (tmp_path / "runs" / "measured-3" / "summary.json").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--gpu", "h100", "--model", "tiny"], "a CPU only"),
        (["--gpu", "nonsense", "--model", "tiny"], "unknown GPU"),
        (["--gpu", "cpu", "--model", "no/such"], "unknown model"),
        (["--gpu", "cpu", "--model", "tiny", "--block-sizes", "16,x"], "block-sizes"),
        (["--gpu", "cpu", "--model", "tiny", "--out", "x.txt"], "must end in .json"),
    ],
)
def test_bad_input_is_one_sentence(
    machine: type[FakeWorker],
    arguments: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vsim.cli import vsim

    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=says):
        CliRunner().invoke(
            vsim, ["calibrate", *arguments], catch_exceptions=False, standalone_mode=False
        )
    assert list(tmp_path.iterdir()) == []


def test_exit_codes_reach_the_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    import click

    from vsim import cli

    @click.command()
    def fails() -> None:
        raise click.exceptions.Exit(1)

    monkeypatch.setattr(cli, "vsim", fails)
    monkeypatch.setattr(sys, "argv", ["vsim"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 1


def test_a_load_before_the_measurement_is_said_and_its_own_is_not() -> None:
    from vsim.calibrate.measure import busy_warning
    from vsim.calibrate.samples import Samples

    quiet_start = Samples(sessions={"a": {"load_average": 0.2}, "b": {"load_average": None}})
    assert busy_warning(quiet_start, cores=2) is None
    busy_start = Samples(sessions={"a": {"load_average": 3.0}})
    assert "load average was 3.0 on 2 cores" in str(busy_warning(busy_start, cores=2))
