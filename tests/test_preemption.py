"""`vsim preemption`: what SWAP and RECOMPUTE cost on a trace, and clear answers where one of them cannot be."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from vsim.commands.preemption import preemption
from vsim.errors import UserError
from vsim.models.step import StepShape
from vsim.sim.config import SchedulerConfig
from vsim.sim.preemption_study import Variant, break_even

MODEL = ["--model", "meta-llama/Llama-3.1-8B-Instruct", "--gpu", "a100", "--max-model-len", "2048"]


class LinearModel:
    """1 ms a step and 0.1 ms a prefill token."""

    def device_seconds(self, shape: StepShape) -> float:
        return 1e-3 + 1e-4 * shape.prefill_tokens

    def host_seconds(self, shape: StepShape) -> float:
        return 0.0


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty requests at once, 160 + 200 tokens each."""
    path = tmp_path_factory.mktemp("trace") / "busy.csv"
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["TIMESTAMP", "ContextTokens", "GeneratedTokens"])
        for second in range(30):
            rows.writerow([f"2023-11-16 18:00:{second / 10:010.7f}", 160, 200])
    return path


def compare(trace: Path, *arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(preemption, [str(trace), *MODEL, *arguments, "--json"])
    if result.exception is not None:
        raise result.exception
    answer: dict[str, Any] = json.loads(result.output)
    return answer


def test_each_policy_pays_in_its_own_coin(trace: Path) -> None:
    rows = compare(trace, "--num-gpu-blocks-override", "120")["rows"]
    recompute, swap, by_length = rows
    assert [row["policy"] for row in rows] == ["recompute", "swap", "swap>1024"]
    assert recompute["summary"]["preemptions"] > 0
    assert recompute["swapped_bytes"] == 0 < recompute["recompute_s"]
    assert swap["swapped_bytes"] > 0 == swap["recompute_s"] == swap["summary"]["recomputed_tokens"]
    # 2 MiB a block: 16 tokens, 32 layers, 8 heads of 128, keys and values, 2 bytes.
    assert swap["swapped_bytes"] == swap["swapped_blocks"] * 2**21
    # Nobody here is longer than 1024 tokens.
    assert by_length["summary"] == {
        **recompute["summary"],
        "assumptions": by_length["summary"]["assumptions"],
    }
    assert all(row["summary"]["completed"] == 30 for row in rows)


def test_larger_blocks_waste_more_slots(trace: Path) -> None:
    rows = compare(
        trace,
        "--kv-cache-memory-bytes",
        str(240 * 2**21),
        "--block-sizes",
        "8,16,32",
        "--policies",
        "recompute",
    )["rows"]
    waste = [row["summary"]["kv_fragmentation_mean"] for row in rows]
    assert waste == sorted(waste)
    assert waste[0] < waste[-1]


def test_swapping_without_room_on_the_cpu_ends_the_run(trace: Path) -> None:
    rows = compare(trace, "--num-gpu-blocks-override", "120", "--num-cpu-blocks", "0")["rows"]
    recompute, swap, by_length = rows
    assert recompute["summary"]["ended_early"] is None
    assert "lack of CPU swap space" in swap["summary"]["ended_early"]
    # The length rule falls back to recomputing.
    assert by_length["summary"]["completed"] == 30


def test_requests_that_never_fit_are_refused_not_waited_for(trace: Path) -> None:
    for blocks in ("1", "9"):
        rows = compare(trace, "--num-gpu-blocks-override", blocks, "--policies", "recompute,swap")[
            "rows"
        ]
        for row in rows:
            assert row["summary"]["status_counts"]["rejected"] == 30
            assert any("V0 ends prompts above" in sentence for sentence in row["warnings"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--pcie-gbps", "0"], "no bandwidth"),
        (["--pcie-gbps", "-1"], "--pcie-gbps=-1"),
        (["--num-cpu-blocks", "-5"], "--num-cpu-blocks=-5"),
        (["--policies", "swop"], "'swop' must be recompute, swap or swap>TOKENS"),
        (["--policies", "swap>"], "swap>TOKENS"),
        (["--victims", "youngest"], "victim rule 'youngest' must be one of last_in_queue"),
        (["--engine", "v1"], "always recomputes"),
        (["--preemption-mode", "swap"], "--policies"),
        (["--block-sizes", "8,16"], "--kv-cache-memory-bytes"),
    ],
)
def test_what_cannot_be_compared_is_refused(trace: Path, arguments: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words.replace(">", r"\>")):
        compare(trace, "--num-gpu-blocks-override", "120", *arguments)


def test_recompute_alone_needs_no_link(trace: Path) -> None:
    rows = compare(
        trace, "--num-gpu-blocks-override", "120", "--policies", "recompute", "--pcie-gbps", "0"
    )["rows"]
    assert rows[0]["summary"]["completed"] == 30


def test_the_table_is_plain_text(trace: Path) -> None:
    arguments = [
        str(trace),
        *MODEL,
        "--num-gpu-blocks-override",
        "120",
        "--victims",
        "last_in_queue,most_blocks",
    ]
    result = CliRunner().invoke(preemption, arguments)
    assert result.exit_code == 0, result.output
    assert "victim" in result.output and "most_blocks" in result.output
    assert "even at GB/s" in result.output
    assert "\x1b" not in result.output


def test_break_even_moves_with_link_and_prefill_speed() -> None:
    # 1 MB a block, out and in: 2 MB for 16 tokens against 1 ms + 1.6 ms.
    at = {p.tokens: p for p in break_even(LinearModel(), 16, 10**6, link_gb_s=1.0, longest=1024)}
    assert at[16].swap_s == pytest.approx(2e-3)
    assert at[16].recompute_s == pytest.approx(2.6e-3)
    assert at[16].link_gb_s == pytest.approx(2 / 2.6)
    # Swapping grows by 2 ms for each 1.6 ms of recomputing: short requests swap, long ones do not.
    cheaper = [
        tokens for tokens, p in at.items() if p.swap_s is not None and p.swap_s < p.recompute_s
    ]
    assert cheaper == [16, 32]
    assert break_even(LinearModel(), 16, 10**6, None, 16)[0].swap_s is None


def test_a_variant_overrides_the_preemption_mode() -> None:
    config = SchedulerConfig(engine="v0", preemption_mode="swap")
    assert Variant(16, "recompute").apply(config).preemption_mode == "recompute"
    assert Variant(16, "swap>9").apply(config).swap_above_tokens == 9


def test_a_deterministic_comparison(trace: Path) -> None:
    arguments = ["--num-gpu-blocks-override", "120", "--policies", "swap"]
    assert compare(trace, *arguments) == compare(trace, *arguments)


def test_a_livelock_ends_the_run_and_is_named(tmp_path: Path) -> None:
    # 1,279 tokens fill all 80 blocks of 16; the second chunk counts a block that it would not take (12.5).
    path = tmp_path / "one.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00.0000000,1279,5\n")
    row = compare(
        path,
        *("--num-gpu-blocks-override", "80", "--policies", "recompute"),
        *("--enable-chunked-prefill", "--max-num-batched-tokens", "512"),
    )["rows"][0]
    assert "livelock: 1001 preemptions" in row["summary"]["ended_early"]
    assert any("no watermark" in sentence for sentence in row["warnings"])


def test_a_replay_whose_engine_dies_ends_with_exit_code_1(trace: Path) -> None:
    from vsim.commands.replay import replay

    args = [str(trace), "--engine", "v0", "--gpu", "a100", "--model", "meta-llama/Llama-3.1-8B"]
    args += ["--num-gpu-blocks-override", "120", "--preemption-mode", "swap"]
    args += ["--max-model-len", "1024"]
    for more, code in ((["--num-cpu-blocks", "0"], 1), (["--num-cpu-blocks", "4000"], 0)):
        for form in ([], ["--json"]):
            run = CliRunner().invoke(replay, [*args, *more, *form])
            assert run.exit_code == code, run.output
    assert "lack of CPU swap space" in CliRunner().invoke(
        replay, [*args, "--num-cpu-blocks", "0"]
    ).output.replace("\n", " ")


def test_the_host_links_speed_is_of_no_use_on_v1_and_that_is_said(trace: Path) -> None:
    from vsim.commands.replay import replay

    args = [str(trace), "--gpu", "a100", "--model", "meta-llama/Llama-3.1-8B", "--pcie-gbps", "8"]
    said = " ".join(CliRunner().invoke(replay, args).output.split())
    assert "--pcie-gbps 8 changes nothing here" in said
    offload = [*args, "--kv-offloading-size", "4"]
    assert "changes nothing here" not in CliRunner().invoke(replay, offload).output


def test_requests_that_are_too_long_can_be_clipped_here_too(trace: Path) -> None:
    few = ("--max-model-len", "300", "--policies", "recompute")
    rejected = compare(trace, *few)["rows"][0]["summary"]
    clipped = compare(trace, *few, "--overlong", "clip")["rows"][0]["summary"]
    assert clipped["completed"] > rejected["completed"]
