"""Model shapes: published parameter counts from config.json alone, and honest refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vsim.errors import UserError
from vsim.models.hf_config import family_note
from vsim.models.model_spec import bundled_models, load_model, spec_from_config
from vsim.models.weights import parameters, stage_layers


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        # Published parameter counts (model cards and safetensors indices).
        ("meta-llama/Llama-2-7b-hf", 6.738, 6.738),
        ("meta-llama/Llama-2-70b-hf", 68.977, 68.977),
        ("meta-llama/Llama-3.1-8B", 8.030, 8.030),
        ("meta-llama/Llama-3.1-70B", 70.554, 70.554),
        ("meta-llama/Llama-3.2-1B", 1.236, 1.236),
        ("mistralai/Mistral-7B-v0.1", 7.242, 7.242),
        ("mistralai/Mixtral-8x7B-v0.1", 46.703, 12.88),
        ("mistralai/Mixtral-8x22B-v0.1", 140.62, 39.15),
        ("Qwen/Qwen2.5-0.5B", 0.494, 0.494),
        ("Qwen/Qwen2.5-7B", 7.616, 7.616),
        ("Qwen/Qwen2.5-72B", 72.706, 72.706),
        ("Qwen/Qwen3-0.6B", 0.596, 0.596),
        ("Qwen/Qwen3-30B-A3B", 30.532, 3.35),
        ("Qwen/Qwen3-235B-A22B", 235.09, 22.2),
        ("deepseek-ai/DeepSeek-V3", 671.03, 37.55),
        ("openai/gpt-oss-20b", 20.91, 4.2),
        ("openai/gpt-oss-120b", 116.83, 5.75),
        ("google/gemma-2-2b", 2.614, 2.614),
        ("google/gemma-3-1b-it", 1.000, 1.000),
    ],
)
def test_parameter_counts_are_the_published_ones(name: str, billions: float, active: float) -> None:
    model = load_model(name)
    assert model.num_parameters / 1e9 == pytest.approx(billions, rel=1e-3)
    assert model.num_active_parameters / 1e9 == pytest.approx(active, rel=1e-2)


def test_names_are_found_without_case_or_organisation() -> None:
    assert load_model("META-LLAMA/llama-3.1-8b").num_layers == 32
    assert load_model("Llama-3.1-8B-Instruct").num_layers == 32
    assert load_model("meta-llama/Meta-Llama-3.1-8B").max_model_len == 131072


def test_an_unknown_model_is_refused_with_near_matches_and_the_remedy() -> None:
    with pytest.raises(
        UserError, match=r"unknown model.*near matches: .*Llama-3\.1-8B.*config\.json"
    ):
        load_model("meta-llama/Llama-3.1-9B")


def test_a_folder_with_a_config_is_a_model(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    row = bundled_models()["Qwen/Qwen2.5-7B"]
    (folder / "config.json").write_text(json.dumps(row["config"]))
    assert load_model(str(folder)).num_parameters == load_model("Qwen/Qwen2.5-7B").num_parameters
    assert load_model(str(folder)).name == "mine"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "not valid JSON"),
        ("[]", "must hold a JSON object"),
        ("{}", "hidden_size is missing"),
        ('{"hidden_size": -1}', "must be an integer of at least 1"),
        ('{"hidden_size": "big"}', "must be an integer"),
        ('{"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "is_encoder_decoder": true}',
         "encoder-decoder"),
        ('{"hidden_size": 64, "num_hidden_layers": 2, "mamba_d_state": 128}', "state-space"),
        ('{"hidden_size": 64, "num_hidden_layers": 100000000}', "beyond any model"),
    ],
)  # fmt: skip
def test_a_broken_config_is_one_sentence(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=complaint):
        load_model(str(tmp_path))


SMALL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 1000,
}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model_type": "xlm-roberta"}, "is an encoder"),
        ({"layer_types": 5}, "layer_types=5 must be a list"),
        ({"num_key_value_heads": 8}, "must be a multiple of num_key_value_heads=8"),
        ({"num_local_experts": 8, "num_experts_per_tok": 99}, "99 of only 8 experts"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 1e400}}, "beyond any model"),
        (
            {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": "x"},
            "original_max_position_embeddings='x' must be an integer",
        ),
    ],
)
def test_a_senseless_shape_is_one_sentence(changes: dict[str, Any], complaint: str) -> None:
    assert spec_from_config(SMALL, "small").num_layers == 2
    with pytest.raises(UserError, match=complaint):
        spec_from_config({**SMALL, **changes}, "small")


def test_a_family_that_nobody_checked_is_said() -> None:
    assert family_note(spec_from_config(SMALL, "small")) is None
    note = family_note(spec_from_config({**SMALL, "model_type": "foobar"}, "small"))
    assert note is not None and "'foobar' is none that was checked" in note
    for name in bundled_models():
        assert family_note(load_model(name)) is None


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no config\.json"):
        load_model(str(tmp_path))


CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
}


@given(
    st.dictionaries(
        st.sampled_from([*CONFIG, "head_dim", "sliding_window", "num_experts", "layer_types", "rope_scaling"]),
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.lists(st.integers(), max_size=3)),
        max_size=4,
    )
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_any_config_gives_a_model_or_one_sentence(changes: dict[str, Any]) -> None:
    try:
        spec_from_config({**CONFIG, **changes}, "fuzzed")
    except UserError as error:
        assert "\n" not in str(error)


def test_layer_kinds_of_the_hybrid_families() -> None:
    def windows(name: str) -> list[int | None]:
        return [layer.window for layer in load_model(name).layers]

    assert windows("google/gemma-2-2b")[:4] == [4096, None, 4096, None]
    assert windows("google/gemma-3-27b-it")[:7] == [1024, 1024, 1024, 1024, 1024, None, 1024]
    assert windows("openai/gpt-oss-20b")[:2] == [128, None]
    assert set(windows("mistralai/Mistral-7B-v0.1")) == {4096}
    assert set(windows("Qwen/Qwen2.5-7B")) == {None}
    assert windows("google/gemma-3-27b-it").count(None) == 10


def test_rope_scaling_stretches_the_length_as_vllm_does() -> None:
    def length(rope: dict[str, Any]) -> int:
        return spec_from_config({**CONFIG, "rope_scaling": rope}, "x").max_model_len

    assert length({"rope_type": "linear", "factor": 2.0}) == 8192
    assert length({"rope_type": "llama3", "factor": 8.0}) == 4096
    assert length({"type": "yarn", "factor": 4.0}) == 4096


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_tensor_parallel_ranks_share_the_big_matrices(tp: int) -> None:
    model = load_model("meta-llama/Llama-3.1-70B")
    whole = sum(t.count for t in parameters(model) if t.kind != "norm")
    rank = sum(t.count for t in parameters(model, tp=tp) if t.kind != "norm")
    assert rank * tp == whole  # 8 KV heads and 128,256 rows divide evenly up to 8 ranks


def test_kv_heads_are_replicated_beyond_their_number() -> None:
    model = load_model("Qwen/Qwen3-30B-A3B")  # 4 KV heads
    eight = {t.name: t.count for t in parameters(model, tp=8)}
    assert eight["qkv_proj"] == 2048 * (4 + 2) * 128


def test_pipeline_stages_give_the_remainder_to_the_middle() -> None:
    assert [len(r) for r in stage_layers(61, 4)] == [15, 15, 16, 15]
    assert [len(r) for r in stage_layers(32, 3)] == [11, 11, 10]
    assert sum(len(r) for r in stage_layers(94, 8)) == 94


def test_what_a_family_s_config_leaves_out_is_filled_in_as_transformers_does() -> None:
    """google/gemma-3-4b-it's config.json names no heads and no vocabulary: its class does."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    }
    model = spec_from_config({"model_type": "gemma3", "text_config": text}, "gemma-3-4b-it")
    assert model.num_parameters == load_model("google/gemma-3-4b-it").num_parameters
    assert (model.num_kv_heads, model.head_size, model.max_model_len) == (4, 256, 131072)


def test_mistral_s_window_is_on_unless_the_config_says_null() -> None:
    """transformers' MistralConfig has 4,096 by default; v0.2 and v0.3 say null."""
    assert load_model("mistralai/Mistral-7B-Instruct-v0.2").layers[0].window is None
    assert load_model("mistralai/Mistral-7B-v0.3").layers[0].window is None
    config = dict(bundled_models()["mistralai/Mistral-7B-v0.3"]["config"])
    del config["sliding_window"]
    assert spec_from_config(config, "x").layers[0].window == 4096
