"""Step time from layerwise kernel tables."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vsim.calibrate.from_tables import from_tables
from vsim.errors import UserError
from vsim.models.attention import AttentionGrid, SkewAlpha
from vsim.models.curve import Curve
from vsim.models.hardware import find_gpu
from vsim.models.links import Link, link_figures
from vsim.models.load import load_step_model
from vsim.models.step import StepShape, decode_run_seconds
from vsim.models.table_params import StepContext
from vsim.models.tables import ExpertTable, capture_sizes

CASES = Path(__file__).parent / "data" / "cases"
RTX4090 = load_step_model("rtx4090-llama-3.1-8b").model
RTXPRO = load_step_model("rtxpro6000-llama-3.1-8b").model


def decodes(n: int, context: int) -> StepShape:
    return StepShape((), n, n * context, context)


# --- curves ---------------------------------------------------------------------------------------------


def test_a_curve_is_straight_between_its_points_and_flat_below() -> None:
    curve = Curve([10, 20, 40], [1.0, 2.0, 8.0])
    assert [curve(x) for x in (0, 10, 15, 20, 30, 40)] == [1.0, 1.0, 1.5, 2.0, 5.0, 8.0]


def test_above_its_points_a_curve_keeps_the_slope_of_its_upper_half() -> None:
    assert Curve([1, 2, 4, 8], [1.0, 2.0, 4.0, 8.0])(16) == 16.0
    noisy_end = Curve([1, 1000, 1999, 2000], [0.0, 1000.0, 2100.0, 2000.0])
    assert noisy_end(3000) == 3000.0


@settings(deadline=None)  # a shared machine may stop for longer than any deadline
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30))
def test_many_values_equal_single_ones_in_every_bit(xs: list[float]) -> None:
    curve = Curve([1, 3, 10, 100, 5000], [0.3, 0.7, 0.71, 9.3, 77.7])
    assert curve.many(np.array(xs)).tolist() == [curve(x) for x in xs]


# --- attention ------------------------------------------------------------------------------------------


def grid() -> AttentionGrid:
    """us = 10 + query-key pairs / 1000 + 2 us per decode and 1000 tokens."""
    points = {}
    for chunk in (0, 16, 1024, 2048):
        for context in (0, 1024, 4096) if chunk else (0,):
            pairs = chunk * (context + chunk / 2)
            for n in (0, 1, 64) if chunk else (1, 64):
                for kv in (16, 1024, 4096) if n else (0,):
                    points[chunk, context, n, kv] = 10 + pairs / 1000 + 2 * n * kv / 1000
    return AttentionGrid(points)


@settings(deadline=None)  # a shared machine may stop for longer than any deadline
@given(
    st.lists(st.tuples(st.integers(16, 500), st.integers(0, 4096)), min_size=1, max_size=4),
    st.integers(0, 64),
    st.integers(16, 4096),
)
def test_several_chunks_cost_their_query_key_pairs(
    chunks: list[tuple[int, int]], n: int, context: int
) -> None:
    shape = StepShape(tuple(chunks), n, n * context, context if n else 0)
    expected = 10 + shape.prefill_work / 1000 + 2 * n * context / 1000
    assert grid().us(shape) == pytest.approx(expected, rel=0.02, abs=1)


def test_unequal_decodes_go_part_of_the_way_to_the_longest() -> None:
    alpha = SkewAlpha({(0, 0, 0, 0, 0): 0.25}, 0.0, (0,), (), (), (), ())
    plain, skewed = grid(), AttentionGrid(grid().points, alpha)
    shape = StepShape((), 4, 4 * 100, 1000)
    at_mean = plain.us(decodes(4, 100))
    at_longest = plain.us(decodes(4, 1000))
    assert skewed.us(shape) == pytest.approx(at_mean + 0.25 * (at_longest - at_mean))
    assert skewed.us(decodes(4, 100)) == at_mean


# --- the whole step -------------------------------------------------------------------------------------


@settings(deadline=None)  # a shared machine may stop for longer than any deadline
@given(st.integers(1, 256), st.integers(0, 20000), st.integers(0, 9000), st.integers(1, 60))
def test_a_run_of_decodes_equals_its_steps_in_every_bit(
    n: int, mean: int, spread: int, steps: int
) -> None:
    shape = StepShape((), n, n * mean, mean + spread)
    for model in (RTX4090, RTXPRO):
        run = decode_run_seconds(model, shape, steps)
        assert run.tolist() == [model.device_seconds(shape.after_decodes(i)) for i in range(steps)]


def test_a_measured_point_is_answered_as_measured() -> None:
    """64 decodes of 1024 tokens on an RTX 4090: rows of dense.csv, attention.csv, per_sequence.csv."""
    model = RTX4090
    tables = CASES / "rtx4090-llama-3.1-8b" / "profile" / "tp1"
    dense = {
        r["layer"]: float(r["time_us"])
        for r in csv.DictReader((tables / "dense.csv").open())
        if r["tokens"] == "64"
    }
    layer = sum(dense.values()) + dense["layernorm"] - dense["embedding"] - dense["final_layernorm"]
    layer += 333.295  # attention.csv: 0,0,64,1024
    head = 1211.84 + 46.8363  # per_sequence.csv: lm_head and sampler at 64
    total = 32 * layer + head + dense["embedding"] + dense["final_layernorm"]
    assert model.device_seconds(decodes(64, 1024)) == pytest.approx(total * 1e-6, rel=1e-6)


@settings(deadline=None)  # a shared machine may stop for longer than any deadline
@given(
    st.lists(st.tuples(st.integers(2, 700), st.integers(0, 9000)), max_size=3),
    st.integers(0, 128),
    st.integers(0, 9000),
)
def test_every_step_takes_a_finite_positive_time(
    chunks: list[tuple[int, int]], n: int, context: int
) -> None:
    shape = StepShape(tuple(chunks), n, n * context, context if n else 0)
    for model in (RTX4090, RTXPRO):
        seconds = model.device_seconds(shape)
        assert (0.005 < seconds < 5) if shape.num_seqs else seconds == 0.0


def test_tokens_are_padded_to_the_next_captured_graph() -> None:
    model = load_step_model("rtx4090-llama-3.1-8b", context=StepContext(256, 2048)).model
    assert [model.padded(t) for t in (1, 3, 9, 250, 257, 512, 513)] == [
        1,
        4,
        16,
        256,
        272,
        512,
        513,
    ]  # type: ignore[attr-defined]
    eager = load_step_model(
        "rtx4090-llama-3.1-8b", context=StepContext(256, 2048, enforce_eager=True)
    ).model
    assert eager.padded(9) == 9  # type: ignore[attr-defined]


def test_capture_sizes_are_those_the_real_run_printed() -> None:
    """cases/rtx4090-llama-3.1-8b/meta.raw.json: cudagraph_capture_sizes of vLLM 0.19.0."""
    raw = json.loads((CASES / "rtx4090-llama-3.1-8b" / "meta.raw.json").read_text())
    printed = raw["resolved_config"]["compilation_config"]["cudagraph_capture_sizes"]
    assert list(capture_sizes(256, 2048)) == printed
    assert capture_sizes(128, 2048)[-1] == 256


def test_an_all_reduce_of_two_ranks_sends_the_tensor_once_each_way() -> None:
    assert Link(2, 20e-6, 32e9).all_reduce_s(32e6) == pytest.approx(20e-6 + 1e-3)
    assert Link(4, 0.0, 1e9).all_reduce_s(4e9) == pytest.approx(6.0)


@pytest.mark.parametrize(
    ("kib", "us"), [(4, 12.7), (64, 14.8), (256, 21.7), (1024, 41.0), (4096, 124.9), (16384, 471.1)]
)
def test_the_measured_link_is_met_within_ten_percent(kib: int, us: float) -> None:
    figures = link_figures(find_gpu("RTXPRO6000"))
    link = Link(2, figures.latency_s, figures.bytes_per_s)
    assert link.all_reduce_s(kib * 1024) * 1e6 == pytest.approx(us, rel=0.1)


def test_experts_wake_with_the_tokens() -> None:
    rows = ((1, Curve([1, 8, 128], [3, 10, 100])), (256, Curve([1, 8, 128], [3, 10, 100])))
    table = ExpertTable(rows, 128, 8)
    assert table.activated(1) == pytest.approx(8)
    assert 100 < table.activated(32) < 128
    assert table.us(256) == pytest.approx(100, rel=0.01)


def test_two_ranks_hold_half_the_experts_each_and_see_all_tokens() -> None:
    rows = tuple((t, Curve([1, 64, 128], [t + 1, t + 64, t + 128])) for t in (1, 2048))
    alone, shared = ExpertTable(rows, 128, 8), ExpertTable(rows, 128, 8, ranks=2)
    assert shared.activated(100) == pytest.approx(alone.activated(100) / 2)
    assert shared.us(2000) == pytest.approx(1000 + 64)
    assert alone.us(1000) == pytest.approx(1000 + 128)


def test_in_lockstep_the_slowest_rank_sets_the_pace() -> None:
    busy, idle = decodes(64, 2000), StepShape((), 1, 0, 0)
    alone = RTX4090.device_seconds(busy)
    assert RTX4090.lockstep_seconds([busy, idle]) == pytest.approx(alone, rel=1e-9)  # type: ignore[attr-defined]
    assert RTX4090.lockstep_seconds([busy]) == pytest.approx(alone, rel=1e-9)  # type: ignore[attr-defined]


# --- reading the tables ---------------------------------------------------------------------------------


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    target = tmp_path / "profile"
    shutil.copytree(CASES / "rtx4090-llama-3.1-8b" / "profile", target)
    return target


def test_reading_the_tables_again_gives_the_bundled_profile(profile: Path) -> None:
    calibration = from_tables(profile, num_layers=32, hidden_size=4096)
    shape = StepShape(((100, 5), (700, 0)), 30, 30000, 2000)
    assert calibration.step_model(StepContext()).device_seconds(shape) == RTX4090.device_seconds(
        shape
    )


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("tp1/attention.csv", None, "missing"),
        ("tp1/attention.csv", "a,b\n1,2\n", "no column"),
        (
            "tp1/attention.csv",
            "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\n",
            "needs rows",
        ),
        ("tp1/dense.csv", "layer,tokens,time_us\nqkv,x,1\n", "dense.csv:2: 'x' is not a number"),
        ("tp1/dense.csv", "layer,tokens,time_us\n", "no rows"),
        ("tp1/per_sequence.csv", "layer,sequences,time_us\nlm_head,1,nan\n", "out of range"),
        ("meta.yaml", None, "no meta.yaml"),
        ("meta.yaml", "- 1\n", "no mapping"),
        ("meta.yaml", "skew_fit: {enabled: true}\n", "bucket_axes"),
        ("meta.yaml", ": :\n :", "not YAML"),
    ],
)
def test_broken_tables_are_one_clear_sentence(
    profile: Path, name: str, content: str | None, says: str
) -> None:
    if content is None:
        (profile / name).unlink()
    else:
        (profile / name).write_text(content)
    with pytest.raises(UserError, match=says):
        from_tables(profile, num_layers=32, hidden_size=4096)


def test_tables_of_another_size_are_not_taken_for_this_one(profile: Path) -> None:
    with pytest.raises(UserError, match="tensor_parallel_size=2"):
        from_tables(profile, num_layers=32, hidden_size=4096, tensor_parallel_size=2)


def test_two_ranks_add_collectives_that_are_called_assumed() -> None:
    folder = CASES / "rtxpro6000-llama-3.1-8b" / "profile"
    calibration = from_tables(folder, num_layers=32, hidden_size=4096, tensor_parallel_size=2)
    assert any(
        "link between GPUs is not measured" in sentence for sentence in calibration.assumptions
    )
    two = calibration.step_model(StepContext(128, 2048)).device_seconds(decodes(64, 1000))
    assert two < RTXPRO.device_seconds(decodes(64, 1000))


def test_two_ranks_gather_the_logits_of_every_sequence() -> None:
    folder = CASES / "rtxpro6000-llama-3.1-8b" / "profile"

    def seconds(vocab: int) -> float:
        calibration = from_tables(
            folder, num_layers=32, hidden_size=4096, vocab_size=vocab, tensor_parallel_size=2
        )
        return calibration.step_model(StepContext(128, 2048)).device_seconds(decodes(64, 1000))

    assert seconds(128256) - seconds(0) == pytest.approx(64 * 128256 / 2 * 2 / 32e9, rel=1e-3)


def test_experts_come_from_their_own_table(profile: Path) -> None:
    rows = ["tokens,activated_experts,time_us"]
    rows += [f"{t},{e},{10 * e + t}" for t in (1, 64, 2048) for e in (2, 8, 64)]
    (profile / "tp1" / "moe.csv").write_text("\n".join(rows) + "\n")
    with pytest.raises(UserError, match="number of experts"):
        from_tables(profile, num_layers=32, hidden_size=4096)
    calibration = from_tables(
        profile, num_layers=32, hidden_size=4096, num_experts=64, experts_per_token=2
    )
    few, many = (
        calibration.step_model(StepContext()).device_seconds(decodes(n, 16)) for n in (1, 64)
    )
    assert many - few > 32 * 10e-6 * (0.8 * 64 - 2)


def test_calibrate_makes_an_artifact_of_tables_and_refuses_those_of_another_gpu(
    tmp_path: Path,
) -> None:
    from click.testing import CliRunner

    from vsim.commands.calibrate import calibrate

    folder = str(CASES / "rtx4090-llama-3.1-8b" / "profile")

    def run(gpu: str, out: Path) -> None:
        arguments = ["--gpu", gpu, "--model", "meta-llama/Llama-3.1-8B", "--from-tables", folder]
        done = CliRunner().invoke(
            calibrate, [*arguments, "--out", str(out)], catch_exceptions=False
        )
        assert done.exit_code == 0

    run("rtx4090", tmp_path / "mine.json")
    made = load_step_model(tmp_path / "mine.json").model
    assert made.device_seconds(decodes(9, 500)) == RTX4090.device_seconds(decodes(9, 500))
    with pytest.raises(UserError, match=r"RTX 4090.*A100"):
        run("a100", tmp_path / "other.json")
    assert not (tmp_path / "other.json").exists()


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(["meta.yaml", "tp1/attention.csv", "tp1/dense.csv", "tp1/per_sequence.csv"]),
    st.one_of(
        st.binary(max_size=200),
        st.text(max_size=200).map(str.encode),
        st.sampled_from(
            [
                b"skew_fit: 3\n",
                b"skew_fit: {enabled: true, per_tp: [1]}\n",
                b"engine_effective: x\n",
            ]
        ),
    ),
)
def test_any_bytes_are_tables_or_a_sentence(name: str, content: bytes) -> None:
    import contextlib
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "profile"
        (profile / "tp1").mkdir(parents=True)
        (profile / "meta.yaml").write_text("gpu: X\n")
        rows = ["0,0,1,16,5", "16,0,0,0,5", "16,0,1,16,6"]
        header = "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us"
        (profile / "tp1" / "attention.csv").write_text("\n".join([header, *rows]))
        (profile / "tp1" / "dense.csv").write_text(
            "layer,tokens,time_us\nqkv_proj,1,5\nqkv_proj,8,6\n"
        )
        (profile / "tp1" / "per_sequence.csv").write_text("layer,sequences,time_us\nlm_head,1,5\n")
        (profile / name).write_bytes(content)
        with contextlib.suppress(UserError):
            made = from_tables(profile, num_layers=2, hidden_size=64)
            assert made.step_model(StepContext()).device_seconds(decodes(2, 100)) >= 0
