"""The compiled path gives the step-by-step path's runs, byte for byte, or leaves them to it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from deployments import PROFILES, Deployment, deployment, difference, hard_deployment
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from workloads import HypothesisPicker, RandomPicker

from vsim.errors import UserError
from vsim.models import kernel_params
from vsim.models.load import read_profile
from vsim.models.roofline import RooflineStepModel
from vsim.models.step import StepShape
from vsim.models.table_params import StepContext, build_tables
from vsim.sim.cluster import ReplicaSpec, simulate_cluster
from vsim.sim.config import KVGroup, SchedulerConfig
from vsim.sim.engine import simulate
from vsim.sim.fast import compiled, dispatch, kernel, places
from vsim.sim.fast import simulate as fast_simulate
from vsim.sim.fast.gaps import Gaps
from vsim.traces.trace import Sessions, Trace

ROOFLINE = RooflineStepModel(32, 1.4e10, 1.4e10, 1e9, 1e9, 5e5, 131072, 312e12, 2e12)


@st.composite
def deployments(draw: st.DrawFn) -> Deployment:
    return deployment(HypothesisPicker(draw))


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(deployments())
def test_any_deployment_gives_the_same_run_on_both_paths(case: Deployment) -> None:
    assert difference(case) is None


@pytest.mark.parametrize("index", range(25))
def test_drawn_deployments_give_the_same_run(index: int) -> None:
    """Fixed draws, so that preemption, prefix hits, stalls and several replicas occur in each test run."""
    assert difference(deployment(RandomPicker(f"fast/1/{index}"))) is None


@pytest.mark.parametrize("index", range(40))
def test_decodes_side_by_side_that_are_disturbed_in_every_way_give_the_same_run(index: int) -> None:
    """What the kernel takes together comes apart exactly where the reference path would see it."""
    assert difference(hard_deployment(RandomPicker(f"fast/1/{index}"))) is None


@pytest.mark.parametrize("index", range(100, 112))
def test_a_run_in_many_slices_with_arrays_that_grow_is_the_same(
    index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = fast_simulate._World._advance

    def grown(world: fast_simulate._World, task: int = 0) -> bool:
        if len(world.hot) < 4000:
            world._more_slots(1)  # twice as many
        return whole(world, task)

    monkeypatch.setattr(fast_simulate, "ROWS", 5)
    monkeypatch.setattr(fast_simulate._World, "_advance", grown)
    assert difference(deployment(RandomPicker(f"fast/1/{index}"))) is None


def test_the_kernel_reads_a_step_models_numbers_where_they_are_written() -> None:
    """Machine code is kept by the hash of the files beside it alone, so these repeat the model's places."""
    place = {name: value for name, value in vars(places).items() if name[:2] in ("M_", "P_")}
    integers = [name for name in place if name.startswith("M_")]
    floats = [name for name in place if name.startswith("P_")]
    assert [place[name] for name in integers] == list(range(len(kernel_params.INTEGERS)))
    assert [place[name] for name in floats] == list(range(1, len(kernel_params.FLOATS)))
    for constants, names in ((integers, kernel_params.INTEGERS), (floats, kernel_params.FLOATS)):
        for constant, name in zip(constants, names[-len(constants) :], strict=True):
            words = constant[2:].lower().replace("reduce_token", "reduce").split("_")
            assert words[0].rstrip("s") in name, (constant, name)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("eager", [False, True])
def test_exported_seconds_are_the_models_own_answers(profile: str, eager: bool) -> None:
    params = dict(read_profile(profile)[1].params)
    for tp in (1, 2):
        context = StepContext(max_num_seqs=64, enforce_eager=eager)
        model = build_tables(params | {"tensor_parallel_size": tp}, context)
        seconds = kernel_params._by_tokens(model, 1500)
        expected = [
            model._token_seconds(model.padded(n), model.padded(n)) if n else 0.0
            for n in range(1501)
        ]
        assert seconds.tolist() == expected


def tiny() -> Trace:
    return Trace.of([0.0, 0.1], [100, 20], [5, 3])


class Fixed:
    def device_seconds(self, shape: StepShape) -> float:
        return 0.01

    def host_seconds(self, shape: StepShape) -> float:
        return 0.0


def test_what_the_kernel_does_not_know_goes_step_by_step() -> None:
    two_groups = SchedulerConfig(kv_groups=(KVGroup(), KVGroup("swa", 128)))
    shared = dataclasses.replace(
        tiny(),
        prefix_offsets=np.array([0, 1, 2]),
        prefix_ids=np.array([7, 7]),
        prefix_block_tokens=16,
    )
    for trace, config in ((tiny(), SchedulerConfig(engine="v0")), (shared, two_groups)):
        run = simulate(trace, config, ROOFLINE)
        assert run.requests["output_tokens"].tolist() == [5, 3]
        with pytest.raises(UserError, match="compiled kernel"):
            simulate(trace, config, ROOFLINE, engine="fast")


def test_an_unknown_step_model_goes_step_by_step() -> None:
    with pytest.raises(UserError, match="compiled kernel"):
        simulate(tiny(), SchedulerConfig(), Fixed(), engine="fast")


def test_a_turn_is_sent_when_the_one_before_has_ended_and_was_thought_about() -> None:
    turns = Sessions(np.array([-1, 0]), np.array([0, 10]))
    run = simulate(
        dataclasses.replace(tiny(), sessions=turns), SchedulerConfig(), ROOFLINE, engine="fast"
    )
    assert run.requests["sent_ns"][1] == run.requests["finish_ns"][0] + 10


def test_a_model_that_answers_nonsense_is_refused_in_its_own_words() -> None:
    from vsim.models.artifact import Calibration
    from vsim.models.domain import Domain
    from vsim.models.load import LoadedStepModel

    endless = dataclasses.replace(ROOFLINE, bytes_per_s=1e-3)
    model = LoadedStepModel(endless, Calibration("roofline", {}, Domain()), "endless")
    with pytest.raises(UserError, match="profile endless: its params can't be used"):
        simulate_cluster(tiny(), [ReplicaSpec(SchedulerConfig(), model)], engine=None)
    with pytest.raises(UserError):
        simulate(tiny(), SchedulerConfig(), model, engine="fast")


def test_the_environment_can_ask_for_either_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(dispatch.VARIABLE, "reference")
    assert dispatch.chosen(None) == "reference"
    assert dispatch.chosen("fast") == "fast"
    monkeypatch.setenv(dispatch.VARIABLE, "quick")
    with pytest.raises(UserError, match="VSIM_ENGINE=quick"):
        simulate(tiny(), SchedulerConfig(), ROOFLINE)


def test_progress_is_told_in_between_and_may_stop_the_run() -> None:
    n = 3000
    trace = Trace.of(np.arange(n) * 0.5, np.full(n, 10), np.full(n, 40))
    seen: list[tuple[int, int]] = []
    run = simulate(
        trace,
        SchedulerConfig(),
        ROOFLINE,
        on_step=lambda now, done: seen.append((now, done)),
        engine="fast",
    )
    assert len(run.steps["start_ns"]) > 100_000
    assert len(seen) > 2
    assert seen == sorted(seen)
    assert seen[-1] == (run.end_ns, n)

    def stop(now: int, done: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(trace, SchedulerConfig(), ROOFLINE, on_step=stop, engine="fast")


def test_gaps_add_up_whatever_their_order() -> None:
    rng = np.random.default_rng(5)
    gaps = Gaps()
    drawn = [rng.integers(0, 50, (k, 2)) + 1 for k in (0, 1, 300, 7)]
    for pairs in drawn:
        gaps.add(pairs)
    values, counts = gaps.result()
    everything = np.concatenate([np.repeat(p[:, 0], p[:, 1]) for p in drawn])
    expected, times = np.unique(everything, return_counts=True)
    assert values.tolist() == expected.tolist()
    assert counts.tolist() == times.tolist()


def test_the_arrays_are_handed_over_in_the_kernels_order() -> None:
    code = kernel.advance.py_func.__code__
    assert code.co_varnames[: code.co_argcount] == fast_simulate.ARRAYS[:-1]


def test_machine_code_of_another_machine_or_half_a_file_is_not_run(tmp_path: Path) -> None:
    whole = compiled.kept_file()
    assert whole is not None
    assert compiled._read(whole) is not None
    content = whole.read_bytes()
    other = tmp_path / "kernel.bin"
    for wrong in (content[:-1], content[:40], b"", content.replace(b'"cpu": "', b'"cpu": "x', 1)):
        other.write_bytes(wrong)
        assert compiled._read(other) is None


def test_where_nothing_can_be_compiled_runs_go_step_by_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> None:
        raise compiled.CompileError("no compiler for this machine")

    monkeypatch.setattr(fast_simulate, "entry", refuse)
    monkeypatch.setattr("vsim.sim.cluster.worthwhile", lambda *_: True)
    run = simulate(tiny(), SchedulerConfig(), ROOFLINE)
    assert run.requests["output_tokens"].tolist() == [5, 3]


def test_a_compiler_that_fails_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fail() -> None:
        asked.append(1)
        raise compiled.CompileError("no compiler for this machine")

    monkeypatch.setattr(compiled, "_code", fail)
    compiled._entry_or_error.cache_clear()
    try:
        for _ in range(3):
            with pytest.raises(compiled.CompileError):
                compiled.entry()
    finally:
        compiled._entry_or_error.cache_clear()
    assert len(asked) == 1
