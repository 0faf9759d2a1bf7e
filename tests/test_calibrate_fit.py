"""The fit finds the machine it is shown, through noise and outliers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vsim.calibrate.design import Limits, order, random_scene, scenes, serving_trace
from vsim.calibrate.fit_samples import errors, fit_params, fit_samples, noise_floor, predict
from vsim.calibrate.samples import Samples, StepSample
from vsim.errors import UserError
from vsim.models.artifact import parse_calibration
from vsim.models.engine_steps import block_size_note, build_engine_steps, for_other_model
from vsim.models.model_spec import load_model
from vsim.models.step import StepShape
from vsim.models.table_params import StepContext

LIMITS = Limits(
    max_num_batched_tokens=2048,
    max_num_seqs=64,
    max_model_len=4096,
    kv_tokens=131072,
    block_size=32,
)


def machine(shape: StepShape, block_size: int) -> tuple[float, float]:
    """(device, host) seconds of an imagined engine: GEMMs with a memory floor, attention by block size."""
    tokens = shape.num_tokens
    device = 0.004 + max(0.002, tokens * 1.0e-4) + shape.num_seqs * 5e-5
    attention = 1e-8 if block_size == 32 else 1.5e-8
    device += shape.prefill_work * attention + shape.decode_context_sum * 20 * attention
    return device, 3e-4 + 1e-5 * shape.num_seqs


def measure(
    noise: float,
    seed: int,
    block_sizes: tuple[int, ...] = (32,),
    outliers: float = 0.0,
    repeats: int = 2,
) -> list[StepSample]:
    rng = np.random.default_rng(seed)
    rows = []
    for block_size in block_sizes:
        limits = Limits(2048, 64, 4096, 131072, block_size)
        grid = [*order(scenes(limits), repeats), *((random_scene(limits, i), 0) for i in range(30))]
        for scene, repeat in grid:
            for index in range(3):
                chunks = scene.prefills if index or not scene.decodes else ()
                decodes = [c + index for c in scene.decodes]
                shape = StepShape(chunks, len(decodes), sum(decodes), max(decodes, default=0))
                if not shape.num_tokens:
                    continue
                device, host = machine(shape, block_size)
                factor = 1 + noise * rng.standard_normal()
                if rng.random() < outliers:
                    factor *= 4
                rows.append(
                    StepSample(
                        session="s",
                        seq=len(rows),
                        phase="grid",
                        point=scene.name,
                        repeat=repeat,
                        index=index,
                        prefill_new=tuple(n for n, _ in chunks),
                        prefill_context=tuple(c for _, c in chunks),
                        num_decodes=len(decodes),
                        decode_context_sum=sum(decodes),
                        decode_context_max=max(decodes, default=0),
                        decode_context_sumsq=float(sum(c * c for c in decodes)),
                        block_size=block_size,
                        kv_blocks_used=0,
                        running=0,
                        waiting=0,
                        admitted=0,
                        finished=0,
                        preempted=0,
                        schedule_s=host / 2,
                        device_s=device * factor,
                        update_s=host / 2,
                        total_s=device * factor + host,
                        cpu_s=device * factor + host,
                    )
                )
    return rows


def test_a_noiseless_machine_is_found_again() -> None:
    rows = measure(0.0, seed=1)
    quality = errors(fit_params(rows), rows)
    assert quality["median_abs_pct"] < 0.5
    assert abs(quality["bias_pct"]) < 0.5


def test_outliers_do_not_bend_the_model() -> None:
    clean = measure(0.0, seed=1)
    spoiled = measure(0.01, seed=1, outliers=0.05)
    ours = predict(fit_params(spoiled), clean)
    real = np.array([row.total_s for row in clean])
    assert float(np.median(np.abs(ours / real - 1))) < 0.01
    assert abs(float(ours.sum() / real.sum()) - 1) < 0.01


def test_each_block_size_has_its_own_attention() -> None:
    params = fit_params(measure(0.0, seed=2, block_sizes=(32, 128)))
    shape = StepShape((), 32, 32 * 3000, 3000)
    at = {b: build_engine_steps(params, b).device_seconds(shape) for b in (16, 32, 64, 128, 256)}
    assert at[32] == pytest.approx(machine(shape, 32)[0], rel=0.02)
    assert at[128] == pytest.approx(machine(shape, 128)[0], rel=0.02)
    assert at[32] < at[64] < at[128], "between two measured sizes lies between"
    assert at[16] == at[32] and at[256] == at[128], "beyond them the nearest holds"
    assert block_size_note(params, 32) is None
    assert "interpolated from 32, 128" in str(block_size_note(params, 64))
    assert "nearest of 32, 128" in str(block_size_note(params, 256))


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(2, 4000),
    more=st.integers(1, 500),
    decodes=st.integers(0, 64),
    context=st.integers(0, 4000),
)
def test_more_work_never_takes_less_time(
    tokens: int, more: int, decodes: int, context: int
) -> None:
    model = build_engine_steps(_params(), 32)
    less = StepShape(((tokens, context),), decodes, decodes * context, context if decodes else 0)
    longer = StepShape(
        ((tokens + more, context),), decodes, decodes * context, context if decodes else 0
    )
    assert model.device_seconds(longer) >= model.device_seconds(less) > 0


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 64), context=st.integers(1, 4000), steps=st.integers(1, 50))
def test_a_run_of_decodes_equals_its_steps_in_every_bit(n: int, context: int, steps: int) -> None:
    model = build_engine_steps(_params(), 32)
    shape = StepShape((), n, n * context - n // 2, context)
    run = model.decode_run_seconds(shape, steps)
    assert run.tolist() == [model.device_seconds(shape.after_decodes(i)) for i in range(steps)]


_cache: dict[str, object] = {}


def _params() -> dict:  # type: ignore[type-arg]
    if "params" not in _cache:
        _cache["params"] = fit_params(measure(0.02, seed=3))
    return _cache["params"]  # type: ignore[return-value]


def test_artifact_round_trip_and_error_on_held_out_steps() -> None:
    import json
    from dataclasses import replace

    rows = measure(0.02, seed=4)
    held_out = [replace(r, phase="serve", session="t") for r in measure(0.02, seed=5)]
    calibration = fit_samples(Samples(rows=rows + held_out), {"label": "imagined", "gpu": "cpu"})
    assert calibration.quality["held_out"] == len(held_out)
    assert calibration.quality["held_out_error"]["median_abs_pct"] < 3
    assert 0.5 < calibration.quality["noise_floor"]["median_abs_pct"] < 4
    again = parse_calibration(json.dumps(calibration.to_json()), "x.json")
    shape = StepShape(((100, 0),), 3, 300, 120)
    context = StepContext(block_size=32)
    assert again.step_model(context).device_seconds(shape) == calibration.step_model(
        context
    ).device_seconds(shape)


def test_each_session_is_predicted_by_the_others() -> None:
    """A session on a machine that was 10 % slower is predicted too fast by the others, and the other way round."""
    from dataclasses import replace

    fields = ("schedule_s", "device_s", "update_s", "total_s", "cpu_s")
    sessions = []
    for name, slower, seed in (("a", 1.0, 6), ("b", 1.1, 7)):
        for phase in ("grid", "serve"):
            sessions += [
                replace(
                    row,
                    session=name,
                    phase=phase,
                    **{field: getattr(row, field) * slower for field in fields},
                )
                for row in measure(0.02, seed=seed)
            ]
    biases = fit_samples(Samples(rows=sessions), {}).quality["session_bias_pct"]
    assert biases == pytest.approx([10.0, -9.1], abs=1.0)
    alone = [row for row in sessions if row.session == "a"]
    assert fit_samples(Samples(rows=alone), {}).quality["session_bias_pct"] == []


def test_too_few_samples_are_no_model() -> None:
    with pytest.raises(UserError, match="too few"):
        fit_samples(Samples(rows=measure(0.0, seed=1)[:10]), {})


def test_a_busy_machine_is_fitted_but_says_so() -> None:
    from dataclasses import replace

    # Interference doubles every second step; the repeats hit by chance tell what is beneath.
    rng = np.random.default_rng(1)
    clean = measure(0.002, seed=6, repeats=4)
    rows = []
    for row in clean:
        factor = rng.choice([1.0, 2.0])
        rows.append(
            replace(
                row,
                disturbed=bool(factor > 1),
                device_s=row.device_s * factor,
                total_s=row.device_s * factor + row.host_s,
            )
        )
    calibration = fit_samples(Samples(rows=rows), {})
    assert any("disturbed" in sentence for sentence in calibration.assumptions)
    assert abs(errors(calibration.params, clean)["bias_pct"]) < 5  # type: ignore[arg-type]


def test_noise_floor_needs_repeats() -> None:
    assert noise_floor(measure(0.0, seed=1)[:1])["pairs"] == 0
    assert noise_floor(measure(0.05, seed=1))["median_abs_pct"] > 1


def test_a_model_twice_as_deep_takes_twice_as_long_on_the_device() -> None:
    tiny = load_model("tiny")
    from dataclasses import replace

    deep = replace(tiny, layers=tiny.layers * 2)
    params = _params()
    there = for_other_model(params, tiny, deep)
    shape = StepShape(((256, 0),), 0, 0, 0)
    ours = build_engine_steps(params, 32)
    other = build_engine_steps(there, 32)
    head = ours.per_seq_s * shape.num_seqs
    assert other.device_seconds(shape) - head == pytest.approx(
        2 * (ours.device_seconds(shape) - head)
    )
    assert other.host_seconds(shape) == ours.host_seconds(shape)


def test_decodes_of_a_model_with_a_quarter_of_the_kv_heads_read_a_quarter_of_the_cache() -> None:
    from dataclasses import replace

    tiny = load_model("tiny")
    wide = replace(tiny, num_kv_heads=tiny.num_attention_heads)
    narrow = replace(wide, num_kv_heads=wide.num_kv_heads // 4)
    params = _params()
    there = for_other_model(params, wide, narrow)
    for before, after in zip(params["attention"], there["attention"], strict=True):
        assert after["per_kv_token_s"] == pytest.approx(before["per_kv_token_s"] / 4)
        # A chunk's query-key pairs are as many as there are query heads, whoever shares the keys.
        assert after["per_pair_s"] == pytest.approx(before["per_pair_s"])


def test_with_timed_kernels_only_the_rest_is_scaled() -> None:
    from dataclasses import replace

    tiny = load_model("tiny")
    rows = [1, 64, 1024]
    here = {"rows": rows, "linear_s": [0.001, 0.002, 0.04], "head_s": [1e-4, 2e-4, 1e-3]}
    there = {"rows": rows, "linear_s": [0.003, 0.004, 0.09], "head_s": [1e-4, 2e-4, 1e-3]}
    params = {**_params(), "kernels": here}
    same = for_other_model(params, tiny, tiny, here)
    shape = StepShape(((512, 0),), 0, 0, 0)
    ours = build_engine_steps(params, 32).device_seconds(shape)
    assert build_engine_steps(same, 32).device_seconds(shape) == pytest.approx(ours, rel=0.02)
    # Wider matrices alone: the step grows by just what they take longer.
    other = build_engine_steps(for_other_model(params, tiny, replace(tiny), there), 32)
    assert other.device_seconds(StepShape(((1024, 0),), 0, 0, 0)) - build_engine_steps(
        params, 32
    ).device_seconds(StepShape(((1024, 0),), 0, 0, 0)) == pytest.approx(0.05, rel=0.05)


@settings(max_examples=50, deadline=None)
@given(
    tokens=st.integers(64, 16384),
    seqs=st.integers(1, 1024),
    length=st.integers(128, 131072),
    blocks=st.integers(8, 20000),
    block_size=st.sampled_from([8, 16, 32, 64, 128]),
)
def test_every_scene_fits_its_engine(
    tokens: int, seqs: int, length: int, blocks: int, block_size: int
) -> None:
    limits = Limits(tokens, seqs, length, blocks * block_size, block_size)
    for scene in [*scenes(limits), random_scene(limits, 1)]:
        if scene.name.startswith("random") and len(scene.decodes) == 1:
            continue
        assert scene.fits(limits), scene
        assert all(context % block_size == 0 for context in scene.decodes)
        assert all(context % block_size == 0 and new >= 2 for new, context in scene.prefills)


def test_the_first_wave_alone_spans_the_engine() -> None:
    first = [scene for scene, _ in order(scenes(LIMITS), 3)][
        : len([s for s in scenes(LIMITS) if s.level == 0])
    ]
    assert all(scene.level == 0 for scene in first)
    assert max(len(s.decodes) for s in first) == LIMITS.max_num_seqs
    assert max(n for s in first for n, _ in s.prefills) == LIMITS.max_num_batched_tokens
    assert any(s.decodes and s.prefills for s in first)


def test_a_full_step_is_measured_even_where_no_sequence_fills_it() -> None:
    short = Limits(2048, 64, 512, 131072, 32)
    fullest = max(sum(n for n, _ in s.prefills) for s in scenes(short))
    assert fullest > 0.95 * short.max_num_batched_tokens


def test_each_scene_is_measured_as_often_as_asked() -> None:
    from collections import Counter

    counts = Counter(scene.name for scene, _ in order(scenes(LIMITS), 3))
    assert set(counts.values()) == {3}


def test_the_serving_run_is_reproducible_and_fits() -> None:
    rows = serving_trace(LIMITS, 50, 4.0, seed=1)
    assert rows == serving_trace(LIMITS, 50, 4.0, seed=1)
    assert rows != serving_trace(LIMITS, 50, 4.0, seed=2)
    assert all(prompt + output <= LIMITS.max_model_len for _, prompt, output, _ in rows)


@pytest.mark.parametrize(
    "spoil",
    [
        {"per_seq_s": float("nan")},
        {"per_seq_s": -1.0},
        {"per_seq_s": "fast"},
        {"tokens": {"tokens": [1, 2], "seconds": [0.1, float("inf")]}},
        {"tokens": {"tokens": [], "seconds": []}},
        {"tokens": []},
        {"attention": []},
        {"attention": [{"block_size": 0}, {"block_size": 64}]},
        {"attention": [{"block_size": 32, "strange": 1.0}]},
        {"host": None},
        {"host": {"base_s": 1e300}},
    ],
    ids=str,
)
def test_parameters_that_are_none_are_refused(spoil: dict) -> None:  # type: ignore[type-arg]
    from vsim.models.artifact import Calibration
    from vsim.models.domain import Domain

    broken = Calibration("engine-steps", {**_params(), **spoil}, Domain())
    with pytest.raises(UserError, match="can't be used"):
        broken.step_model(StepContext(block_size=32))
