"""A profile of something else than the deployment: refused where it is certain, said where it is doubtful."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from vsim.calibrate.spot import check_profile
from vsim.commands.replay import replay
from vsim.commands.sweep import sweep
from vsim.errors import UserError
from vsim.models.artifact import SCHEMA, Calibration
from vsim.models.domain import Domain
from vsim.models.profile_check import Asked, block_sizes, doubts, other_engine
from vsim.sim.deployment import Deployment, resolve
from vsim.sim.profile_defaults import resolve_with_profile
from vsim.sim.replay import step_model_for

LLAMA = "meta-llama/Llama-3.1-8B"
PARAMS = {
    "tokens": {"tokens": [1, 1024], "seconds": [0.01, 0.05]},
    "per_seq_s": 0.0,
    "per_chunk_s": 0.0,
    "per_mixed_step_s": 0.0,
    "attention": [
        {
            "block_size": 32,
            "per_pair_s": 1e-9,
            "per_chunk_context_token_s": 0.0,
            "per_kv_token_s": 1e-9,
            "per_uneven_token_s": 0.0,
        }
    ],
    "host": {"base_s": 0.0, "per_seq_s": 0.0, "per_chunk_s": 0.0},
}
SAYS: dict[str, Any] = {
    "gpu": "A100-80GB",
    "model": LLAMA,
    "tensor_parallel_size": 1,
    "dtype": "bfloat16",
    "quantization": None,
    "kv_cache_dtype": "auto",
    "vllm_version": "0.32.0",
    "enforce_eager": False,
    "block_sizes": [16, 32],
}


def profile(folder: Path, name: str = "p.json", **says: Any) -> str:
    data = {
        "schema": SCHEMA,
        "kind": "engine-steps",
        "domain": {},
        "params": PARAMS,
        "provenance": {key: v for key, v in {**SAYS, **says}.items() if v != "not said"},
    }
    (folder / name).write_text(json.dumps(data))
    return str(folder / name)


def deployment(**flags: Any) -> Deployment:
    return resolve(LLAMA, "a100", **flags)


def why(folder: Path, says: dict[str, Any], **flags: Any) -> str:
    with pytest.raises(UserError, match="does not fit this deployment") as caught:
        step_model_for(deployment(**flags), profile(folder, **says))
    return str(caught.value)


def notes(folder: Path, says: dict[str, Any], **flags: Any) -> str:
    return " ".join(step_model_for(deployment(**flags), profile(folder, **says)).assumptions)


@pytest.mark.parametrize(
    ("says", "flags", "reason"),
    [
        ({"gpu": "H100-SXM"}, {}, "measured on H100-SXM, not on A100-80GB"),
        ({"model": "meta-llama/Llama-3.1-70B"}, {}, "with meta-llama/Llama-3.1-70B, not with"),
        ({"tensor_parallel_size": 2}, {}, "tensor_parallel_size=2, not 1"),
        ({"dtype": "float32"}, {}, "measured in float32, this deployment computes in bfloat16"),
        ({}, {"dtype": "float32"}, "measured in bfloat16, this deployment computes in float32"),
        ({"quantization": "fp8"}, {}, "fp8 weights, this deployment has weights that are not"),
        ({}, {"quantization": "awq"}, "not quantized, this deployment has awq weights"),
        ({"kv_cache_dtype": "fp8"}, {}, "an fp8 KV cache, this deployment's is bfloat16"),
        ({"vllm_version": "0.25.1"}, {}, "vLLM 0.25.1, not of 0.32.0: replay that release"),
        ({}, {"engine_version": "0.19.0"}, "vLLM 0.32.0, not of 0.19.0"),
        ({"vllm_version": "0.32.0+cpu"}, {"engine": "v0"}, "this deployment's engine is V0"),
        ({"vllm_version": "0.6.3"}, {}, "this deployment's engine is V1"),
    ],
)
def test_a_profile_of_something_else_is_refused_with_the_reason(
    tmp_path: Path, says: dict[str, Any], flags: dict[str, Any], reason: str
) -> None:
    assert reason in why(tmp_path, says, **flags)


def test_a_profile_of_another_schema_is_refused(tmp_path: Path) -> None:
    path = Path(profile(tmp_path))
    path.write_text(path.read_text().replace(SCHEMA, "vsim/step-model/9"))
    with pytest.raises(UserError, match="schema 'vsim/step-model/9'; this version reads"):
        step_model_for(deployment(), str(path))


@pytest.mark.parametrize(
    ("says", "flags", "sentence"),
    [
        ({"gpu": "not said"}, {}, "does not say which GPU"),
        ({"model": "not said", "gpu": "not said"}, {}, "does not say which GPU and model"),
        ({"dtype": "half"}, {}, "measured in float16; its step times are taken for bfloat16"),
        ({"enforce_eager": True}, {}, "without CUDA graphs, this deployment has them"),
        ({}, {"enforce_eager": True}, "with CUDA graphs, this deployment has none of them"),
        ({}, {"kv_cache_dtype": "fp8"}, "KV cache is narrower"),
    ],
)
def test_what_is_only_doubtful_is_said(
    tmp_path: Path, says: dict[str, Any], flags: dict[str, Any], sentence: str
) -> None:
    assert sentence in notes(tmp_path, says, **flags)


def test_a_profile_of_this_deployment_leaves_nothing_to_say(tmp_path: Path) -> None:
    assert "profile" not in notes(tmp_path, {"block_sizes": [32]}, block_size=32)
    assert "profile" not in notes(
        tmp_path, {"vllm_version": "0.32.1", "block_sizes": [32]}, block_size=32
    )
    quantized = {"quantization": "awq_marlin", "block_sizes": [32]}
    assert "profile" not in notes(tmp_path, quantized, quantization="awq", block_size=32)


def test_kernel_tables_are_taken_for_other_releases_and_block_sizes_and_that_is_said() -> None:
    tables = Calibration(
        "tables", {}, Domain(), provenance={"vllm_version": "0.19.0", "block_size": 16, "gpu": "x"}
    )
    assert other_engine(tables, Asked(engine="v1", engine_version="0.32.0")) is None
    assert "block size 16; its step times are taken for 64" in " ".join(
        doubts(tables, "t", Asked(block_size=64))
    )


@pytest.mark.parametrize(
    ("says", "sizes"),
    [
        ({"block_sizes": [32, 16, 16]}, (16, 32)),
        ({"block_size": 16}, (16,)),
        ({}, ()),
        ({"block_sizes": ["x", True, -1, 1 << 40]}, ()),
        ({"block_sizes": "16"}, ()),
    ],
)
def test_block_sizes_are_what_the_profile_says(
    says: dict[str, Any], sizes: tuple[int, ...]
) -> None:
    assert block_sizes(Calibration("tables", {}, Domain(), provenance=says)) == sizes


# --- the only measured block size is the default ---------------------------------------------------------


def test_the_only_measured_block_size_is_taken_and_said(tmp_path: Path) -> None:
    only = profile(tmp_path, block_sizes=[32])
    found, flags = resolve_with_profile(LLAMA, "a100", only, {})
    assert found.scheduler.block_size == 32 == flags["block_size"]
    assert any("block size 32, the only one" in sentence for sentence in found.assumptions)
    assert found.origins["block_size"] == "profile p"


def test_a_given_block_size_several_and_none_leave_the_default(tmp_path: Path) -> None:
    only, several = profile(tmp_path, block_sizes=[32]), profile(tmp_path, "q.json")
    for path, flags, size in (
        (only, {"block_size": 64}, 64),
        (several, {}, 16),
        (None, {}, 16),
        (profile(tmp_path, "r.json", block_sizes=[7]), {}, 16),  # no kernel takes it
    ):
        found, taken = resolve_with_profile(LLAMA, "a100", path, flags)
        assert found.scheduler.block_size == size and taken == flags
        assert not any("the only one" in sentence for sentence in found.assumptions)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    (tmp_path / "t.csv").write_text("timestamp,input_tokens,output_tokens\n0,100,20\n1,200,30\n")
    return str(tmp_path / "t.csv")


def test_replay_and_sweep_take_it_and_refuse_what_is_anothers(tmp_path: Path, trace: str) -> None:
    only = profile(tmp_path, block_sizes=[32])
    shown = CliRunner().invoke(replay, [trace, "--profile", only])
    assert shown.exit_code == 0, shown.output
    assert "block size 32, the only one" in " ".join(shown.output.split())
    other = profile(tmp_path, "h.json", gpu="H100-SXM")
    args = [trace, "--gpu", "a100", "--model", LLAMA, "--profile", other]
    refused = CliRunner().invoke(replay, args)
    assert isinstance(refused.exception, UserError)
    table = tmp_path / "sweep"
    swept = CliRunner().invoke(
        sweep, [*args[:-1], only, "--vary", "max_num_seqs=8,16", "--out", str(table)]
    )
    assert swept.exit_code == 0, swept.output


# --- the engine at hand ----------------------------------------------------------------------------------

STARTED = {
    "dtype": "bfloat16",
    "quantization": None,
    "kv_cache_dtype": "auto",
    "tensor_parallel_size": 1,
    "enforce_eager": True,
}


@pytest.mark.parametrize(
    ("says", "refused"),
    [
        ({"vllm_version": "0.32.0", "kv_cache_dtype": "bfloat16"}, False),
        ({"vllm_version": "0.31.0"}, True),
        ({"kv_cache_dtype": "fp8"}, True),
        ({"dtype": "float32"}, True),
        ({"gpu_name": "another CPU"}, True),
        ({"enforce_eager": False}, True),
    ],
)
def test_a_spot_check_takes_the_profile_of_this_engine_only(
    says: dict[str, Any], refused: bool
) -> None:
    found = Calibration("engine-steps", {}, Domain(), provenance=says)
    hello = {"device": "this CPU", "vllm_version": "0.32.0+cpu"}
    if not refused:
        check_profile(found, hello, STARTED)
        return
    with pytest.raises(UserError, match="the engine here has"):
        check_profile(found, hello, STARTED)
