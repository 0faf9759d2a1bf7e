"""What binds and what would help: a planted culprit is named by `explain` and by the report's first paragraph.

Every plant has its control: the same load without it names nothing of that kind.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from vsim.commands.explain import explain
from vsim.commands.export import export
from vsim.commands.replay import Progress
from vsim.commands.replay import replay as replay_command
from vsim.errors import UserError
from vsim.sim.advice import MOST_REQUESTS, Advice, Setup, advise
from vsim.sim.advice_rebuild import rebuilt
from vsim.sim.advice_stored import sentences, trials
from vsim.sim.advice_suspects import suspects
from vsim.sim.replay import Load, replay, step_model_for
from vsim.sim.run import Run
from vsim.sim.run_io import write_run
from vsim.sim.summary import summarize
from vsim.tests.make_run import make_run
from vsim.traces.arrivals import select
from vsim.traces.edit import merge
from vsim.traces.readers import read_trace
from vsim.traces.trace import Trace
from vsim.traces.write import write_trace

MODEL, GPU = "meta-llama/Llama-3.1-8B-Instruct", "a100"


def chats(
    n: int = 600, rate: float = 4.0, seed: int = 0, prompt: tuple[int, int] = (100, 600)
) -> Trace:
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(1 / rate, n))
    return Trace.of(
        (arrival - arrival[0]).tolist(),
        rng.integers(*prompt, n).tolist(),
        rng.integers(50, 200, n).tolist(),
    )


def with_tenants(trace: Trace, names: tuple[str, ...], seed: int = 0) -> Trace:
    codes = np.random.default_rng(seed).integers(0, len(names), len(trace)).astype(np.int32)
    return dataclasses.replace(trace, tenant=codes, tenant_names=names)


def sharing(prefix: int, piece: int, n: int = 600, seed: int = 0) -> Trace:
    """Chats that all begin with the same `prefix` tokens."""
    trace = chats(n, seed=seed, prompt=(50, 200))
    ids = np.tile(np.arange(prefix // piece), n)
    return dataclasses.replace(
        trace,
        prompt_tokens=trace.prompt_tokens + prefix,
        prefix_ids=ids,
        prefix_offsets=np.arange(n + 1) * (prefix // piece),
        prefix_block_tokens=piece,
    )


def told(trace: Trace, replicas: int = 1, **flags: object) -> Advice:
    found = advise(trace, Setup(MODEL, GPU, flags, replicas=replicas), Load())
    assert found is not None
    return found


def culprits(found: Advice) -> list[tuple[str, str]]:
    return [(v.suspect.kind, v.suspect.name) for v in found.verdicts if v.guilty]


def peak_blocks(trace: Trace, **flags: object) -> int:
    deployment = Setup(MODEL, GPU, flags).deployment()
    run = replay(trace, deployment, step_model_for(deployment), Load())
    return int(run.steps["kv_blocks_used"].max())


def says_through_the_commands(trace: Trace, folder: Path, *flags: str) -> str:
    """What `explain` prints; the report's first paragraph says the same."""
    write_trace(trace, folder / "trace.jsonl")
    args = [
        str(folder / "trace.jsonl"),
        "--model",
        MODEL,
        "--gpu",
        GPU,
        "--out",
        str(folder / "run"),
    ]
    done = CliRunner().invoke(replay_command, [*args, *flags])
    assert done.exit_code == 0, done.output
    shown = CliRunner().invoke(explain, [str(folder / "run")])
    assert shown.exit_code == 0, shown.output
    words = " ".join(shown.output.split())
    page = (folder / "run" / "report.html").read_text()
    lead = re.search(r"<p class=lead>(.*?)</p>", page, re.S)
    assert lead is not None
    first = re.sub(r"</?(b|span)[^>]*>", "", lead[1]).replace("\N{NO-BREAK SPACE}", " ")
    assert "<b>" in lead[1]
    stored = json.loads((folder / "run" / "summary.json").read_text())
    for sentence in sentences(stored):
        assert " ".join(sentence.split()) in words
        assert sentence.replace("'", "&#x27;") in first
    return words


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(("row", "tokens"), [(300, 120_000), (117, 90_000)])
def test_a_giant_prompt_among_chats_is_named_by_its_request(
    row: int, tokens: int, replicas: int, tmp_path: Path
) -> None:
    trace = chats(seed=replicas)
    prompts = trace.prompt_tokens.copy()
    prompts[row] = tokens
    planted = dataclasses.replace(trace, prompt_tokens=prompts)
    said = says_through_the_commands(planted, tmp_path, "--replicas", str(replicas))
    assert f"Request {row} with its prompt of {tokens:,} tokens is in everyone's way" in said
    assert culprits(told(trace, replicas)) == []


def test_two_giants_are_both_named() -> None:
    trace = chats(1500, 2.0, seed=5)
    prompts = trace.prompt_tokens.copy()
    prompts[400], prompts[1100] = 120_000, 110_000
    found = told(dataclasses.replace(trace, prompt_tokens=prompts))
    assert sorted(v.suspect.requests for v in found.verdicts if v.guilty) == [(400,), (1100,)]


def test_many_giants_of_which_no_single_one_matters_are_named_together() -> None:
    trace = chats(1200, 8.0)
    prompts = trace.prompt_tokens.copy()
    prompts[100::140] = 40_000
    found = told(dataclasses.replace(trace, prompt_tokens=prompts))
    (guilty,) = [v for v in found.verdicts if v.guilty]
    assert guilty.suspect.requests == tuple(range(100, 1200, 140))


def with_burst(
    trace: Trace,
    name: str,
    at_s: float,
    n: int = 300,
    seed: int = 4,
    prompt: tuple[int, int] = (500, 1500),
) -> Trace:
    names = trace.tenant_names
    burst = chats(n, 60.0, seed, prompt)
    burst = dataclasses.replace(
        burst,
        arrival_ns=burst.arrival_ns + int(at_s * 1e9),
        tenant=np.full(n, names.index(name), dtype=np.int32),
        tenant_names=names,
    )  # fmt: skip
    return dataclasses.replace(merge([trace, burst]), assumptions=())


def test_two_bursts_that_hide_each_other_are_both_named() -> None:
    calm = with_tenants(chats(800, 6.0), ("a", "b", "c"))
    found = told(with_burst(with_burst(calm, "c", 30), "a", 90, seed=9))
    guilty = [v for v in found.verdicts if v.guilty]
    assert sorted(v.suspect.name for v in guilty) == ["a", "c"]
    assert all(v.others == 1 for v in guilty)  # neither is to be seen while the other is there
    assert "where the 1 other suspect is taken out" in " ".join(found.sentences)


def test_a_burst_and_a_giant_prompt_are_both_named() -> None:
    planted = with_burst(with_tenants(chats(800, 6.0), ("a", "b", "c")), "b", 60)
    prompts = planted.prompt_tokens.copy()
    prompts[1000] = 120_000
    found = told(dataclasses.replace(planted, prompt_tokens=prompts))
    assert {kind for kind, _ in culprits(found)} == {"prompt", "tenant"}


def test_a_tenant_is_not_blamed_for_the_giant_prompt_in_its_small_burst() -> None:
    planted = with_burst(
        with_tenants(chats(800, 4.0), ("a", "b", "c")), "c", 60, 30, prompt=(100, 300)
    )
    prompts = planted.prompt_tokens.copy()
    row = int(np.flatnonzero(planted.arrival_ns >= 60.2 * 1e9)[0])
    prompts[row] = 120_000
    tenant = np.array(planted.tenant)
    tenant[row] = 2
    found = told(dataclasses.replace(planted, prompt_tokens=prompts, tenant=tenant))
    assert culprits(found) == [("prompt", "120,000")]


def test_a_burst_on_a_cache_too_small_for_the_calm_names_both() -> None:
    calm, flags = with_tenants(chats(800, 6.0), ("a", "b", "c")), {"max_model_len": 2048}
    blocks = int(0.8 * peak_blocks(calm, num_gpu_blocks_override=50_000, **flags))
    found = told(with_burst(calm, "c", 60, 200), num_gpu_blocks_override=blocks, **flags)
    assert culprits(found) == [("tenant", "c")]
    assert "The KV cache size is too small" in " ".join(found.sentences)


def test_a_block_too_large_on_a_cache_too_small_names_both() -> None:
    trace, flags = sharing(1500, 500), {"max_model_len": 4096, "block_size": 512}
    blocks = int(0.8 * peak_blocks(trace, num_gpu_blocks_override=50_000, **flags))
    said = " ".join(told(trace, num_gpu_blocks_override=blocks, **flags).sentences)
    assert "The block size is too large" in said
    assert "The KV cache size is a limit too" in said


@pytest.mark.parametrize("model, gpu, ranks", [(MODEL, "h100", 1), ("meta-llama/Llama-3.1-70B-Instruct", "h100", 4)])  # fmt: skip
@pytest.mark.parametrize("replicas", [1, 3])
def test_culprits_are_named_on_other_models_and_fleets_under_azures_traffic(
    model: str, gpu: str, ranks: int, replicas: int
) -> None:
    azure = read_trace(Path(__file__).parent.parent / "traces/azure2023_conv.csv", limit=600)
    flags = {"tensor_parallel_size": ranks}

    def judged(trace: Trace) -> Advice:
        setup = Setup(model, gpu, flags, replicas=replicas, route="least-requests")
        found = advise(trace, setup, Load())
        assert found is not None
        return found

    steady = with_tenants(dataclasses.replace(azure, assumptions=()), ("a", "b", "c"))
    assert culprits(judged(steady)) == []
    prompts = steady.prompt_tokens.copy()
    prompts[300] = 120_000
    assert culprits(judged(dataclasses.replace(steady, prompt_tokens=prompts))) == [
        ("prompt", "120,000")
    ]
    burst = with_burst(steady, "b", 60, 300 * replicas, prompt=(1000, 3000))
    assert culprits(judged(burst)) == [("tenant", "b")]


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("name", ["acme", "b"])
def test_a_burst_is_named_by_its_tenant(name: str, replicas: int, tmp_path: Path) -> None:
    names = ("a", "b", "acme")
    steady = with_tenants(chats(800, seed=3), names)
    burst = chats(400, 60.0 * replicas, seed=4, prompt=(500, 1500))
    burst = dataclasses.replace(
        burst,
        arrival_ns=burst.arrival_ns + 80 * 10**9,
        tenant=np.full(400, names.index(name), dtype=np.int32),
        tenant_names=names,
    )
    late = dataclasses.replace(
        merge([steady, dataclasses.replace(burst, arrival_ns=burst.arrival_ns)]), assumptions=()
    )
    said = says_through_the_commands(late, tmp_path, "--replicas", str(replicas))
    assert f"Tenant {name} sent" in said and "in everyone's way" in said
    assert culprits(told(steady, replicas)) == []


@pytest.mark.parametrize("short_by", [0.2, 0.3])
@pytest.mark.parametrize("block", [16, 32])
def test_a_kv_cache_somewhat_too_small_is_named(
    short_by: float, block: int, tmp_path: Path
) -> None:
    trace, flags = chats(rate=6), {"max_model_len": 2048, "block_size": block}
    enough = peak_blocks(trace, num_gpu_blocks_override=50_000, **flags) + 1
    blocks = int(enough * (1 - short_by))
    said = says_through_the_commands(
        trace, tmp_path, "--num-gpu-blocks-override", str(blocks),
        "--max-model-len", "2048", "--block-size", str(block),
    )  # fmt: skip
    assert "KV cache size" in said
    assert f"--num-gpu-blocks-override {-(-blocks * 5 // 4)} instead of {blocks}" in said
    control = " ".join(told(trace, num_gpu_blocks_override=enough, **flags).sentences)
    assert "KV cache" not in control


@pytest.mark.parametrize(
    ("prefix", "piece", "block"), [(1500, 500, 2048), (1500, 500, 512), (200, 200, 256)]
)
def test_a_block_far_too_large_for_the_shared_prefix_is_named(
    prefix: int, piece: int, block: int, tmp_path: Path
) -> None:
    trace = sharing(prefix, piece)
    said = says_through_the_commands(trace, tmp_path, "--block-size", str(block))
    assert "The block size is too large for the beginnings that prompts share." in said
    assert f"block size 16 instead of {block}" in said
    assert "block size" not in " ".join(told(trace, block_size=16).sentences)


def test_a_small_gain_of_a_larger_kv_cache_is_told_as_such() -> None:
    trace, flags = chats(800, 8, prompt=(500, 1500)), {"max_model_len": 4096}
    enough = peak_blocks(trace, num_gpu_blocks_override=50_000, **flags) + 1
    found = told(trace, num_gpu_blocks_override=int(0.9 * enough), **flags)
    kv = next(t for t in found.trials if t.change.kind == "kv")
    assert 0.03 <= kv.gain < 0.10
    assert "The KV cache size is a limit too" in " ".join(found.sentences)


def test_a_quiet_deployment_is_told_that_no_flag_helps() -> None:
    found = told(with_tenants(chats(), ("a", "b")))
    assert found.best is None and culprits(found) == []
    said = " ".join(found.sentences)
    assert "not waiting" in said
    assert f"all 600 requests, {found.replays} times" in said


def test_too_few_seats_are_named_and_more_of_them_are_proved_to_help() -> None:
    found = told(chats(rate=6), max_num_seqs=8)
    assert found.binding == "seats"
    assert found.best is not None and found.best.change.flags == {"max_num_seqs": 16}
    assert found.best.after.e2el_ns < found.best.before.e2el_ns


def test_advice_is_the_same_twice_and_each_figure_is_of_one_population() -> None:
    trace = chats(200, 8.0)
    one, two = (told(trace, num_gpu_blocks_override=300, max_model_len=2048) for _ in range(2))
    assert one.data() == two.data()
    assert json.loads(json.dumps(one.data(), allow_nan=False)) == one.data()


def test_of_a_long_trace_the_stretch_with_the_slow_requests_is_simulated() -> None:
    calm = chats(MOST_REQUESTS + 3000, 4.0)
    prompts = calm.prompt_tokens.copy()
    prompts[6000] = 120_000
    trace, setup = dataclasses.replace(calm, prompt_tokens=prompts), Setup(MODEL, GPU, {})
    deployment = setup.deployment()
    run = replay(trace, deployment, step_model_for(deployment), Load())
    found = advise(trace, setup, Load(), run)
    assert found is not None
    assert found.simulated <= MOST_REQUESTS < found.of == len(calm)
    # Named as the user's trace numbers it, not as the stretch does.
    assert [v.suspect.requests for v in found.verdicts if v.guilty] == [(6000,)]
    assert f"of {len(calm):,} requests" in found.sentences[-1]


def test_too_few_requests_are_not_advised_upon() -> None:
    assert advise(select(chats(), np.arange(10), ""), Setup(MODEL, GPU, {}), Load()) is None


def test_many_long_prompts_are_the_load_and_no_culprit() -> None:
    n = 200
    prompts = np.where(np.arange(n) % 10 == 0, 20_000, 200)
    run = make_run({"arrival_ns": np.arange(n) * 10**9, "prompt_tokens": prompts})
    assert suspects(run) == []
    prompts[77] = 180_000
    run = make_run({"arrival_ns": np.arange(n) * 10**9, "prompt_tokens": prompts})
    assert [s.requests for s in suspects(run)] == [(77,)]


def test_a_tenant_in_proportion_to_its_usual_rate_is_no_suspect() -> None:
    rng = np.random.default_rng(0)
    arrival = np.sort(rng.integers(0, 1000 * 10**9, 2000))
    run = make_run({"arrival_ns": arrival, "tenant": rng.integers(0, 2, 2000)})
    assert suspects(run) == []


@pytest.mark.parametrize(
    "stored", [None, {}, {"sentences": 3}, {"sentences": [1, "x\x1b[2J"], "trials": [4, {"before": 1}]}]
)  # fmt: skip
def test_advice_that_someone_else_wrote_is_read_with_care(stored: object) -> None:
    summary = {"advice": stored}
    assert all("\x1b" not in s for s in sentences(summary))
    assert all(len(values) == 4 for _, values in trials(summary))


def test_advice_is_given_with_a_report_or_when_asked_for(tmp_path: Path) -> None:
    write_trace(chats(60), tmp_path / "t.jsonl")
    args = [str(tmp_path / "t.jsonl"), "--model", MODEL, "--gpu", GPU, "--json"]

    def advised(*more: str) -> bool:
        done = CliRunner().invoke(replay_command, [*args, *more])
        assert done.exit_code == 0, done.output
        return "advice" in json.loads(done.stdout)

    assert not advised()
    assert advised("--advise")
    assert advised("--out", str(tmp_path / "a"))
    assert not advised("--out", str(tmp_path / "b"), "--no-advise")


@pytest.mark.parametrize("watched", [True, False])
def test_progress_is_for_a_terminal_and_leaves_no_escape_in_a_pipe(
    watched: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: watched)
    progress = Progress(1000)
    monkeypatch.setattr("time.monotonic", lambda: progress._began + 10.0)
    progress(90 * 10**9, 250)
    progress.advising(3)
    progress.done()
    out, err = capsys.readouterr()
    assert out == ""
    if watched:
        assert "250 of 1,000 requests, 90 s simulated, about 30 s left" in err
        assert "replay 3" in err and err.endswith("\r\x1b[K")
    else:
        assert err == ""


def test_what_replay_prints_fits_80_columns_and_says_reasons_in_words(tmp_path: Path) -> None:
    trace = chats(40)
    prompts = trace.prompt_tokens.copy()
    prompts[7] = 9000
    file = tmp_path / f"{'a-long-name-' * 6}.jsonl"
    write_trace(dataclasses.replace(trace, prompt_tokens=prompts), file)
    done = CliRunner().invoke(
        replay_command,
        [str(file), "--model", MODEL, "--gpu", GPU, "--max-model-len", "4096", "--replicas", "2", "--advise"],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    words = [line for line in done.output.splitlines() if file.name not in line]
    assert max(map(len, words)) <= 80
    assert "1 x longer than max_model_len allows" in words
    assert "rejected_too_long" not in done.output


def test_a_stored_run_is_advised_upon_later_with_its_trace(tmp_path: Path) -> None:
    trace = chats(rate=6)
    write_trace(trace, tmp_path / "t.jsonl")
    args = [str(tmp_path / "t.jsonl"), "--model", MODEL, "--gpu", GPU, "--out"]
    flags = ["--num-gpu-blocks-override", "350", "--max-model-len", "2048", "--replicas", "1"]
    for name, more in (("with", []), ("without", ["--no-advise"])):
        done = CliRunner().invoke(replay_command, [*args, str(tmp_path / name), *flags, *more])
        assert done.exit_code == 0, done.output
    stored = json.loads((tmp_path / "with" / "summary.json").read_text())["advice"]
    bare = CliRunner().invoke(explain, [str(tmp_path / "without")])
    assert "With --trace FILE" in bare.output
    later = CliRunner().invoke(
        explain, [str(tmp_path / "without"), "--trace", str(tmp_path / "t.jsonl"), "--json"]
    )
    assert later.exit_code == 0, later.output
    assert json.loads(later.output)["advice"] == stored
    write_trace(chats(599), tmp_path / "other.jsonl")
    wrong = CliRunner().invoke(
        explain, [str(tmp_path / "without"), "--trace", str(tmp_path / "other.jsonl")]
    )
    assert isinstance(wrong.exception, UserError) and "not what this run replayed" in str(
        wrong.exception
    )


def test_a_run_that_cannot_be_built_again_is_refused_with_the_reason(tmp_path: Path) -> None:
    write_trace(chats(50), tmp_path / "t.jsonl")
    args = [
        str(tmp_path / "t.jsonl"),
        "--model",
        MODEL,
        "--gpu",
        GPU,
        "--no-advise",
        "--engine",
        "v0",
    ]
    done = CliRunner().invoke(replay_command, [*args, "--out", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    wrong = CliRunner().invoke(
        explain, [str(tmp_path / "run"), "--trace", str(tmp_path / "t.jsonl")]
    )
    assert isinstance(wrong.exception, UserError) and "replay it with --advise" in str(
        wrong.exception
    )


@pytest.mark.parametrize(
    "damage",
    [{"load": {"limit": "x"}}, {"load": {"request_rate": []}}, {"flags": 3}, {"kv_cache": 1}],
)
def test_a_run_file_that_vsim_did_not_write_is_one_sentence(damage: dict[str, object]) -> None:
    trace, deployment = chats(30), Setup(MODEL, GPU, {}).deployment()
    run = replay(trace, deployment, step_model_for(deployment), Load())
    with pytest.raises(UserError):
        rebuilt(dataclasses.replace(run, config={**run.config, **damage}), trace)


def test_a_measured_run_is_put_beside_the_prediction(tmp_path: Path) -> None:
    trace = chats(150)
    for gpu in ("a100", "h100"):
        deployment = Setup(MODEL, gpu, {}).deployment()
        run = replay(trace, deployment, step_model_for(deployment), Load())
        write_run(run, tmp_path / gpu, summarize(run), report=False)
    args = [str(tmp_path / "a100"), "--format", "report"]
    page = CliRunner().invoke(export, [*args, "--against", str(tmp_path / "h100")])
    assert page.exit_code == 0, page.output
    section = page.output.split("<h2>Prediction against measurement</h2>")[1].split("</section>")[0]
    assert "<th>measured</th><th>predicted</th>" in section
    row = re.search(r"P95 TTFT \(ms\)</th><td>([\d.,]+)</td><td>([\d.,]+)</td>", section)
    assert row is not None and float(row[1]) < float(row[2])  # the H100's is the shorter
    alone = CliRunner().invoke(export, args)
    assert "Prediction against measurement" not in alone.output
    wrong = CliRunner().invoke(export, [args[0], "--format", "bench", "--against", args[0]])
    assert isinstance(wrong.exception, UserError)


def test_a_summary_without_advice_still_makes_a_report() -> None:
    run: Run = make_run({"arrival_ns": [0]})
    assert sentences(summarize(run)) == []
