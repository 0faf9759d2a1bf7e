"""A case is read strictly: what is wrong with it is said by file and key, and nothing is guessed."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from vsim.commands.debug import debug
from vsim.errors import UserError
from vsim.sim.case import load_case, parse_case


def request(**changes: Any) -> dict[str, Any]:
    return {"id": "a", "arrival": 0.0, "output_tokens": 3, "input_tokens": 10, **changes}


def case(config: dict[str, Any] | None = None, *requests: dict[str, Any]) -> dict[str, Any]:
    return {"config": {"engine": "v1", **(config or {})}, "requests": list(requests)}


def test_what_is_left_out_has_the_recorders_default() -> None:
    config = parse_case(case(), "x.json").config
    assert (config.block_size, config.num_gpu_blocks, config.max_num_batched_tokens) == (
        16,
        1000,
        2048,
    )
    assert config.scheduler_reserve_full_isl and config.enable_prefix_caching
    assert config.max_concurrent_batches == 1
    v0 = parse_case({"config": {"engine": "v0"}, "requests": []}, "x.json").config
    assert (v0.engine_version, v0.max_model_len, v0.enable_prefix_caching) == ("0.8.5", 2048, False)


def test_prompts_in_any_notation() -> None:
    requests = [
        request(id="a", segments=[[3, 5], [4, 2]]),
        request(id="b", segments=[[3, 5], ["out:a", 3]]),
        request(id="c", input_tokens=100, hash_ids=[7, 8], hash_block_tokens=64),
        request(id="d", prompt_token_ids=[9, 10, 4]),
        request(id="e"),
    ]
    for r in requests[:2]:
        del r["input_tokens"]
    del requests[3]["input_tokens"]
    parsed = parse_case(case({}, *requests), "x.json").requests
    assert [r.prompt_tokens for r in parsed] == [7, 8, 100, 3, 10]
    assert parsed[0].runs[0] == parsed[1].runs[0]
    assert parsed[3].runs == ((9, 2), (4, 1))


def test_hash_ids_beyond_the_end_of_the_prompt_name_nothing() -> None:
    exact, more = (
        parse_case(case({}, request(hash_ids=ids, hash_block_tokens=4)), "x.json").requests[0]
        for ids in ([1, 1, 2], [1, 1, 2, 5, 6])
    )
    assert more.runs == exact.runs and more.prompt_tokens == 10


def test_v0_does_not_mind_a_threshold_that_it_has_no_use_for() -> None:
    config = {"engine": "v0", "long_prefill_token_threshold": 9999}
    assert parse_case(case(config), "x.json").config.long_prefill_token_threshold == 9999


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        (case({"blocks": 3}), "x.json: config.blocks is not a key"),
        (case({"num_cpu_blocks": 3}), "config.num_cpu_blocks is not a key"),
        (case({"block_size": "16"}), 'config.block_size="16" must be a whole number'),
        (case({"block_size": True}), "config.block_size=true must be a whole number"),
        (case({"num_gpu_blocks": -1}), "config.num_gpu_blocks=-1 must be at least 1"),
        (case({"num_gpu_blocks": 1 << 60}), "must be at most 16777216"),
        (case({"pipeline_parallel_size": 1 << 60}), "must be at most 4096"),
        (case({"policy": "lifo"}), 'config.policy="lifo" must be "fcfs" or "priority"'),
        (case({"async_scheduling": 1}), "config.async_scheduling=1 must be true or false"),
        (case({"watermark": 1.0}), "config.watermark=1.0 must be at least 0 and below 1"),
        (case({"step_time": {"a": 1}}), "config.step_time.b is missing"),
        (
            case({"step_time": {"a": 1, "b": -1, "c": 0}}),
            "config.step_time.b=-1 must be at least 0",
        ),
        (case({"kv_groups": [{"type": "swa"}]}), "config.kv_groups[0].window is missing"),
        (case({"kv_offload": {"cpu_blocks": 3, "extra": {"x": 1}}}), "extra.x is not a key"),
        (case({"max_num_seqs": 64, "max_num_batched_tokens": 32}), "is below max_num_seqs=64"),
        (case({"enable_chunked_prefill": False}), "without chunked prefill"),
        (case({"max_num_active_seqs": 300}), "is above max_num_seqs=256"),
        (case({"long_prefill_token_threshold": 8193}), "is above max_model_len=8192"),
        (
            case({"engine": "v0", "max_num_partial_prefills": 2}),
            "needs enable_chunked_prefill",
        ),
        (
            case({"engine": "v0", "max_long_partial_prefills": 2}),
            "is above max_num_partial_prefills=1",
        ),
        (
            case(
                {
                    "engine": "v0",
                    "enable_chunked_prefill": True,
                    "max_num_partial_prefills": 2,
                    "long_prefill_token_threshold": 2049,
                }
            ),
            "is above max_model_len=2048",
        ),
        (case({}, request(), request()), 'requests[1].id="a" is already requests[0]'),
        (case({}, request(arrival=-0.5)), "requests[0].arrival=-0.5 must be at least 0"),
        (case({}, request(arrival=float("nan"))), "requests[0].arrival=NaN must be"),
        (case({}, request(output_tokens=0)), "requests[0].output_tokens=0 must be at least 1"),
        (case({}, request(outputs=3)), "requests[0].outputs is not a key"),
        (case({}, request(finish="eos")), 'must be "length" or "stop"'),
        (case({}, request(segments=[])), "has segments and input_tokens"),
        (case({}, {"id": "a", "arrival": 0, "output_tokens": 1}), "and has none"),
        (
            case({}, request(hash_ids=[1, 2], hash_block_tokens=4)),
            "has 2 ids, but input_tokens=10",
        ),
        (case({}, request(hash_ids=[])), "hash_block_tokens is missing"),
        (
            case(
                {},
                {k: v for k, v in request(segments=[["out:z", 1]]).items() if k != "input_tokens"},
            ),
            "out:z",
        ),
        ({"config": {}}, "x.json: requests is missing"),
        ([], "x.json: the case must be an object"),
    ],
)
def test_what_is_wrong_is_named(broken: Any, complaint: str) -> None:
    with pytest.raises(UserError) as refusal:
        parse_case(broken, "x.json")
    assert complaint in str(refusal.value)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe", "not UTF-8"),
        (b'{"config": {}, "config": {}}', 'the key "config" stands twice'),
        (b"[" * 100_000, "nested too deep"),
        (b'{"config": {"block_size": ' + b"9" * 10_000 + b"}}", "a number too long"),
    ],
)
def test_files_that_are_no_case(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=complaint):
        load_case(path)


def test_missing_and_half_gzip_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        load_case(tmp_path / "none.json")
    path = tmp_path / "x.json.gz"
    path.write_bytes(gzip.compress(json.dumps(case()).encode())[:-10])
    with pytest.raises(UserError, match="gzip"):
        load_case(path)
    path.write_bytes(gzip.compress(json.dumps(case()).encode()))
    assert load_case(path).requests == ()


def test_a_refused_case_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps(case({"prefix_cache_retention_interval": 16})))
    result = CliRunner().invoke(debug, ["steps", str(path), "--out", str(tmp_path / "log.jsonl")])
    assert isinstance(result.exception, UserError)
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
config_keys = st.sampled_from(
    [
        "engine",
        "block_size",
        "kv_groups",
        "kv_offload",
        "step_time",
        "policy",
        "watermark",
        "idle_sleep",
    ]
)
request_keys = st.sampled_from(
    [
        "id",
        "arrival",
        "output_tokens",
        "input_tokens",
        "segments",
        "hash_ids",
        "hash_block_tokens",
        "finish",
    ]
)


@given(
    st.dictionaries(config_keys, json_values, max_size=3),
    st.lists(st.dictionaries(request_keys, json_values, max_size=3), max_size=2),
)
def test_any_values_give_a_case_or_one_sentence(
    config: dict[str, Any], changes: list[dict[str, Any]]
) -> None:
    requests = [request(id=str(i)) | change for i, change in enumerate(changes)]
    try:
        parse_case({"config": config, "requests": requests}, "x.json")
    except UserError as refusal:
        assert str(refusal).startswith("x.json: ")
