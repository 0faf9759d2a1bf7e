"""`vsim calibrate --from-steps`: logs of engine steps, as vLLM and recorders write them, to a step model."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from vsim.calibrate.samples import Journal, read_samples
from vsim.calibrate.step_logs import read_step_log
from vsim.commands.calibrate import calibrate
from vsim.commands.replay import replay as replay_command
from vsim.errors import UserError
from vsim.models.artifact import read_calibration
from vsim.models.step import StepShape
from vsim.sim.deployment import resolve
from vsim.sim.replay import step_model_for

FLAGS = ["--gpu", "rtx4090", "--model", "meta-llama/Llama-3.1-8B", "--max-model-len", "8192"]
POOL = 50_000  # tokens of the KV cache in the made-up server log


def shapes(n: int = 240, seed: int = 3) -> list[tuple[list[int], list[int]]]:
    """(new tokens, tokens computed before) of each request, by step."""
    rng = np.random.default_rng(seed)
    steps = []
    for _ in range(n):
        decodes, chunks = int(rng.integers(0, 60)), int(rng.integers(0, 3))
        chunks = chunks or int(decodes == 0)
        new = [1] * decodes + rng.integers(2, 1000, chunks).tolist()
        computed = rng.integers(1, 3000, decodes).tolist() + [0] * chunks
        steps.append((new, computed))
    return steps


def shape_of(new: list[int], computed: list[int]) -> StepShape:
    contexts = [c for n, c in zip(new, computed, strict=True) if n == 1]
    chunks = tuple((n, c) for n, c in zip(new, computed, strict=True) if n > 1)
    return StepShape(chunks, len(contexts), sum(contexts), max(contexts, default=0))


def seconds(shape: StepShape) -> float:
    """A machine's true step time, within what an "engine-steps" model can say."""
    return (
        4e-3
        + 3e-5 * shape.num_tokens
        + 5e-5 * shape.num_seqs
        + 2e-8 * shape.decode_context_sum
        + 1e-9 * shape.prefill_work
    )


def golden_lines(steps: list[tuple[list[int], list[int]]]) -> str:
    rows = []
    for at, (new, computed) in enumerate(steps):
        row = {
            "step": at,
            "scheduled": {f"r{i}": n for i, n in enumerate(new)},
            "computed": {f"r{i}": c for i, c in enumerate(computed)},
            "dt": seconds(shape_of(new, computed)),
        }
        rows.append(json.dumps(row))
    return "\n".join([*rows, json.dumps({"summary": {"steps": len(rows)}})]) + "\n"


def recorder_lines(steps: list[tuple[list[int], list[int]]]) -> str:
    rows = [json.dumps({"hello": {}})]
    for new, computed in steps:
        ns = round(seconds(shape_of(new, computed)) * 1e9)
        told = {
            "num_tokens": new,
            "num_computed": computed,
            "device_ns": ns,
            "total_ns": ns + 10**5,
        }
        rows.append(json.dumps({"step": told}))
    return "\n".join(rows) + "\n"


def server_lines(steps: list[tuple[list[int], list[int]]], milliseconds: list[float]) -> str:
    rows = [
        "INFO 12-01 10:00:00 [kv_cache_utils.py:1307] GPU KV cache size: 50,000 tokens",
        "INFO 12-01 10:00:01 [loggers.py:259] Engine 000: Avg prompt throughput: 0.0 tokens/s",
    ]
    for at, ((new, computed), ms) in enumerate(zip(steps, milliseconds, strict=True)):
        shape = shape_of(new, computed)
        use = (shape.decode_context_sum + shape.prefill_tokens) / POOL * 100
        rows.append(
            f"(APIServer pid=7) INFO 12-01 10:00:02 [loggers.py:199] Engine 000: Iteration({at}): "
            f"{len(shape.prefills)} context requests, {shape.prefill_tokens} context tokens, "
            f"{shape.num_decodes} generation requests, {shape.num_decodes} generation tokens, "
            f"iteration elapsed time: {ms:.2f} ms, GPU KV cache usage: {use:.1f}%"
        )
    return "\n".join(rows) + "\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(log: str | bytes, *more: str, name: str = "steps.jsonl") -> Result:
    Path(name).write_bytes(log if isinstance(log, bytes) else log.encode())
    return CliRunner().invoke(calibrate, [*FLAGS, "--from-steps", name, "--out", "p.json", *more])


def refused(log: str | bytes, *more: str, name: str = "steps.jsonl") -> str:
    found = run(log, *more, name=name)
    assert found.exit_code != 0 and not Path("p.json").exists()
    assert found.exception is None or isinstance(found.exception, UserError | SystemExit)
    return str(found.exception) + found.output


@pytest.mark.parametrize("lines", [golden_lines, recorder_lines])
def test_a_log_with_tokens_by_request_becomes_a_step_model(here: Path, lines: object) -> None:
    made = run(lines(shapes()), "--block-sizes", "32")  # type: ignore[operator]
    assert made.exit_code == 0, made.output
    found = read_calibration(here / "p.json")
    assert found.kind == "engine-steps"
    assert found.quality["held_out"] == 80, "the last third is scored, not fitted"
    assert found.quality["held_out_error"]["p95_abs_pct"] < 0.5
    assert found.provenance["block_sizes"] == [32]
    assert "not measured here" in found.provenance["source"]


def test_logs_are_read_compressed_and_torn(here: Path) -> None:
    whole = golden_lines(shapes())
    assert run(gzip.compress(whole.encode()), name="steps.jsonl.gz").exit_code == 0
    found = read_calibration(here / "p.json").quality
    torn = whole[: whole.rindex('{"summary"') - 30]
    assert run(torn).exit_code == 0
    assert read_calibration(here / "p.json").quality["samples"] in (
        found["samples"],
        found["samples"] - 1,
    )


def test_vllms_own_log_corrects_a_prior(here: Path) -> None:
    prior = step_model_for(resolve("meta-llama/Llama-3.1-8B", "rtx4090", max_model_len=8192)).model
    steps = shapes()
    true = [
        (prior.device_seconds(shape_of(*step)) + 5e-3 + 4e-5 * len(step[0])) * 1e3 for step in steps
    ]
    made = run(server_lines(steps, true), name="server.log")
    assert made.exit_code == 0, made.output
    found = read_calibration(here / "p.json")
    assert found.kind == "corrected" and found.params["prior"]["kind"] == "tables"
    # The log has no contexts, so that a few percent stay.
    assert found.quality["held_out_error"]["median_abs_pct"] < 3
    assert found.quality["prior_held_out_error"]["median_abs_pct"] > 8
    assert any("no contexts" in sentence for sentence in found.assumptions)
    (here / "t.csv").write_text("timestamp,input_tokens,output_tokens\n0,100,20\n1,200,30\n")
    replayed = CliRunner().invoke(replay_command, ["t.csv", *FLAGS, "--profile", "p.json"])
    assert replayed.exit_code == 0, replayed.output


def test_a_log_that_does_not_say_how_large_the_cache_is_needs_its_blocks(here: Path) -> None:
    steps = shapes()
    log = server_lines(steps, [20.0] * len(steps)).split("\n", 1)[1]
    assert "--num-gpu-blocks-override" in refused(log, name="server.log")
    assert run(log, "--num-gpu-blocks-override", "3125", name="server.log").exit_code == 0


def test_dummy_and_speculative_steps_are_left_out(here: Path) -> None:
    steps = shapes()
    lines = server_lines(steps, [20.0] * len(steps)).splitlines()
    lines[10] = lines[10].replace("20.00 ms", "20.00 ms (dummy)")
    head, tail = lines[12].rsplit(" generation tokens", 1)
    lines[12] = head.rsplit(" ", 1)[0] + " 999 generation tokens" + tail
    log = read_step_log(_written("server.log", "\n".join(lines)), 16)
    assert len(log.samples.rows) == len(steps) - 2
    assert any("dummy" in note for note in log.notes)
    assert any("speculative" in note for note in log.notes)


def test_on_a_cpu_a_prior_must_be_named(here: Path) -> None:
    steps = shapes()
    Path("server.log").write_text(server_lines(steps, [20.0] * len(steps)))
    args = ["--gpu", "cpu", "--model", "tiny", "--from-steps", "server.log", "--out", "p.json"]
    found = CliRunner().invoke(calibrate, args)
    assert "--prior is missing" in str(found.exception)


def test_a_prior_can_be_corrected_by_exact_steps(here: Path) -> None:
    made = run(golden_lines(shapes()), "--prior", "rtx4090-llama-3.1-8b")
    assert made.exit_code == 0, made.output
    found = read_calibration(here / "p.json")
    assert found.kind == "corrected"
    held, before = found.quality["held_out_error"], found.quality["prior_held_out_error"]
    assert held["median_abs_pct"] < before["median_abs_pct"]


def test_samples_of_another_machine_are_refitted_and_another_models_refused(here: Path) -> None:
    source = read_step_log(_written("steps.jsonl", golden_lines(shapes())), 16).samples
    from vsim.calibrate.campaign import model_and_config

    about = {
        "model": model_and_config("meta-llama/Llama-3.1-8B")[1],
        "device": "NVIDIA GeForce RTX 4090",
        "platform": "cuda",
        "tensor_parallel_size": 1,
        "vllm_version": "0.31.0",
        "dtype": "bfloat16",
        "block_size": 16,
    }
    with Journal(Path("there.json")) as journal:
        journal.session("log", about)
        journal.append(source.rows)
    assert read_samples(Path("there.json")).rows
    path = "there.samples.jsonl"
    text = Path(path).read_text()
    made = run(text, name=path)
    assert made.exit_code == 0, made.output
    assert read_calibration(here / "p.json").provenance["vllm_version"] == "0.31.0"
    (here / "p.json").unlink()
    other = ["--gpu", "rtx4090", "--model", "tiny", "--from-steps", path, "--out", "p.json"]
    assert "another model" in str(CliRunner().invoke(calibrate, other).exception)
    h100 = ["--gpu", "h100", *FLAGS[2:4], "--from-steps", path, "--out", "p.json"]
    assert "this machine has NVIDIA GeForce RTX 4090" in str(
        CliRunner().invoke(calibrate, h100).exception
    )


def _written(name: str, text: str) -> Path:
    Path(name).write_text(text)
    return Path(name)


GOOD = '{"scheduled":{"a":5},"computed":{"a":0},"dt":0.01}\n'


@pytest.mark.parametrize(
    ("log", "says"),
    [
        ("hello\nworld\n", "no engine steps"),
        (GOOD + '{"scheduled":{"a":1},"computed":{}}\n' + GOOD, "steps.jsonl:2: a request"),
        (GOOD + '{"scheduled":{"a":-1},"computed":{"a":0},"dt":1}\n' + GOOD, "-1 is no number"),
        (GOOD + '{"scheduled":{"a":1},"computed":{"a":1.5},"dt":1}\n' + GOOD, "1.5 is no number"),
        (GOOD + '{"scheduled":{"a":1},"computed":{"a":3},"dt":-1}\n' + GOOD, "no duration"),
        (GOOD + '{"scheduled":{"a":1},"computed":{"a":3},"dt":NaN}\n' + GOOD, "no duration"),
        (GOOD + '{"scheduled":{"a":1},"computed":{"a":3}}\n' + GOOD, "must be a time"),
        (GOOD + '{"other":1}\n' + GOOD, "docs/exactness.md"),
        (GOOD + "[1,2]\n" + GOOD, "not a JSON object"),
        (GOOD + "{broken\n" + GOOD, "steps.jsonl:2: not JSON"),
        (GOOD * 10, "too few to fit"),
        ("", "empty"),
    ],
)
def test_what_is_no_log_of_steps_is_refused_with_its_line(here: Path, log: str, says: str) -> None:
    assert says in refused(log)


@given(st.binary(max_size=400))
def test_any_bytes_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, raw: bytes
) -> None:
    path = tmp_path_factory.mktemp("any") / "steps.jsonl"
    path.write_bytes(GOOD.encode() + raw)
    try:
        read_step_log(path, 16)
    except UserError as error:
        assert str(error)
