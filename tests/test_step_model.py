"""Step time from formulas: roofline, correction, domain."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vsim.errors import UserError
from vsim.models.correction import Coefficients, CorrectedStepModel
from vsim.models.domain import Domain
from vsim.models.hardware import find_gpu
from vsim.models.load import LABEL, load_step_model
from vsim.models.model_spec import ModelSpec, load_model
from vsim.models.roofline import RooflineStepModel, roofline_params
from vsim.models.step import StepModel, StepShape, decode_run_seconds

GPU = replace(find_gpu("a100"), name="TestGPU", bf16_tflops=300.0, memory_bandwidth_gb_s=2000.0)
LLAMA_8B = load_model("meta-llama/Llama-3.1-8B")
MOE = load_model("Qwen/Qwen3-30B-A3B")


def roofline(model: ModelSpec = LLAMA_8B, tp: int = 1) -> RooflineStepModel:
    return RooflineStepModel(**roofline_params(GPU, model, tensor_parallel_size=tp))


def decodes(n: int, context: int) -> StepShape:
    return StepShape((), n, n * context, context)


def test_one_decode_takes_about_the_time_to_read_the_weights_once() -> None:
    read_s = 15.0e9 / 2000e9  # 8B parameters less the embedding, 2 bytes each
    assert roofline().device_seconds(decodes(1, 100)) == pytest.approx(read_s / 0.85, rel=0.1)


def test_a_long_prompt_takes_about_its_flops() -> None:
    flops = 2 * 7.0e9 * 2048
    assert roofline().device_seconds(StepShape(((2048, 0),), 0, 0, 0)) == pytest.approx(
        flops / (300e12 * 0.75), rel=0.1
    )


def test_two_ranks_are_faster_than_one_but_not_twice() -> None:
    one, two = (roofline(tp=tp).device_seconds(decodes(64, 1000)) for tp in (1, 2))
    assert one / 2 < two < one


def test_few_tokens_wake_few_experts() -> None:
    few, many = (roofline(MOE).device_seconds(decodes(n, 1)) for n in (1, 256))
    assert many > 5 * few


def test_a_step_without_tokens_takes_no_time() -> None:
    assert roofline().device_seconds(StepShape((), 0, 0, 0)) == 0.0


@settings(deadline=None)  # a shared machine may stop for longer than any deadline
@given(st.integers(1, 300), st.integers(0, 9000), st.integers(0, 3000), st.integers(1, 40))
def test_a_run_of_decodes_equals_its_steps_in_every_bit(
    n: int, mean: int, spread: int, steps: int
) -> None:
    shape = StepShape((), n, n * mean, mean + spread)
    corrected = CorrectedStepModel(roofline(), Coefficients(1e-4, 2e-4, 1e-7, 1e-10, 1e-6, 1.01))
    models: list[StepModel] = [roofline(), corrected]
    for model in models:
        seconds = decode_run_seconds(model, shape, steps)
        assert seconds.tolist() == [
            model.device_seconds(shape.after_decodes(i)) for i in range(steps)
        ]


@settings(deadline=None)  # a shared machine may stop for longer than any deadline
@given(
    st.lists(st.tuples(st.integers(2, 2048), st.integers(0, 20000)), max_size=4),
    st.integers(0, 256),
    st.integers(0, 9000),
)
def test_more_work_never_takes_less_time(
    chunks: list[tuple[int, int]], n: int, context: int
) -> None:
    def seconds(extra: int) -> float:
        shape = StepShape(
            tuple((new + extra, before) for new, before in chunks),
            n + extra,
            (n + extra) * context,
            context,
        )
        return roofline().device_seconds(shape)

    assert seconds(0) <= seconds(1)


def test_a_mixed_step_carries_its_own_term() -> None:
    prior = roofline()
    model = CorrectedStepModel(prior, Coefficients(per_mixed_step_s=1e-3))
    alone, mixed = StepShape(((100, 0),), 0, 0, 0), StepShape(((100, 0),), 1, 50, 50)
    assert model.device_seconds(alone) == prior.device_seconds(alone)
    assert model.device_seconds(mixed) == prior.device_seconds(mixed) + 1e-3


def test_a_correction_never_makes_time_run_backwards() -> None:
    model = CorrectedStepModel(roofline(), Coefficients(per_step_s=-1.0))
    assert model.device_seconds(decodes(1, 1)) > 0
    assert (decode_run_seconds(model, decodes(1, 1), 3) > 0).all()


def test_a_gpu_without_measurements_says_roofline() -> None:
    loaded = load_step_model(gpu=GPU, model=LLAMA_8B)
    assert loaded.label == LABEL == "roofline, not measured"
    assert any("roofline, not measured" in sentence for sentence in loaded.assumptions)


def test_a_gpu_without_data_sheet_is_refused() -> None:
    nothing = replace(GPU, name="X1", bf16_tflops=None, fp16_tflops=None)
    with pytest.raises(UserError, match="X1"):
        load_step_model(gpu=nothing, model=LLAMA_8B)


def test_without_a_gpu_a_profile_is_asked_for() -> None:
    with pytest.raises(UserError, match="--profile"):
        load_step_model()


@settings(deadline=None)  # a shared machine may stop for longer than any deadline
@given(st.integers(1, 8), st.integers(0, 60), st.integers(1, 60))
def test_the_steps_of_a_run_inside_the_domain_are_counted(n: int, context: int, steps: int) -> None:
    domain = Domain(max_decode_context=50, max_seqs=6)
    shape = decodes(n, context)
    outside = [bool(domain.outside(shape.after_decodes(i))) for i in range(steps)]
    inside = domain.decode_steps_inside(shape)
    assert inside is not None
    assert outside == [i >= inside for i in range(steps)]


def test_prefill_work_counts_query_key_pairs() -> None:
    assert StepShape(((4, 10), (2, 0)), 0, 0, 0).prefill_work == 4 * 12 + 2 * 1


def test_after_decodes_grows_every_context() -> None:
    assert decodes(3, 7).after_decodes(5) == StepShape((), 3, 36, 12)


def test_a_model_without_runs_is_asked_step_by_step() -> None:
    class Constant:
        def device_seconds(self, shape: StepShape) -> float:
            return 1.0 * shape.decode_context_sum

        def host_seconds(self, shape: StepShape) -> float:
            return 0.0

    assert np.array_equal(decode_run_seconds(Constant(), decodes(2, 3), 3), [6.0, 8.0, 10.0])
