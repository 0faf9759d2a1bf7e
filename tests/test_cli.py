"""The command line as its user meets it: one sentence for bad input, the same bytes for the same input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from vsim.cli import COMMANDS, main, vsim

TINY = ["--model", "meta-llama/Llama-3.1-8B-Instruct", "--gpu", "a100"]


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: str):
    """(exit code, stdout, stderr) of `vsim ARGS`, in this process."""
    monkeypatch.setattr(sys, "argv", ["vsim", *args])
    code = 0
    try:
        main()
    except SystemExit as stop:
        code = int(stop.code or 0)
    out = capsys.readouterr()
    return code, out.out, out.err


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    return lambda *args: run(monkeypatch, capsys, *[str(arg) for arg in args])


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "small.csv"
    rows = [f"2024-01-02 10:00:{i:02d}.5000000,{100 + 40 * i},{5 + i}" for i in range(20)]
    path.write_text("\r\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    return path


def test_help_and_import_load_no_heavy_library() -> None:
    heavy = "numpy pandas pyarrow scipy sklearn simpy plotly vllm torch"
    code = (
        "import sys, vsim, vsim.cli\n"
        "try:\n    vsim.cli.vsim.main(['--help'], standalone_mode=False)\n"
        "except BaseException: pass\n"
        f"print([m for m in '{heavy}'.split() if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
    assert "replay" in done.stdout


def test_without_a_command_the_help_is_shown_as_help(call) -> None:
    code, out, err = call()
    assert code == 2 and out == "" and err.startswith("Usage: vsim")


@pytest.mark.parametrize("arguments", [["catalog"], ["--help"], ["catalog", "gpus", "--json"]])
def test_a_full_disk_behind_stdout_is_one_sentence(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "vsim.cli", *arguments],
            check=False,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 2
    assert done.stderr == "error: the output: No space left on device\n"


def test_a_name_too_long_for_the_file_system_is_one_sentence(call, trace: Path) -> None:
    code, out, err = call("replay", trace, *TINY, "--out", "x" * 300)
    assert (code, out) == (2, "") and "File name too long" in err and err.count("\n") == 1


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_has_help(call, name: str) -> None:
    code, out, err = call(name, "--help")
    assert code == 0 and "Usage: vsim " + name in out, err
    assert vsim.get_command(None, name) is not None  # type: ignore[arg-type]


def test_replay_prints_a_table_with_what_was_assumed(call, trace: Path) -> None:
    code, out, _ = call("replay", trace, *TINY)
    assert code == 0
    assert "TTFT" in out and "Successful requests:" in out and "roofline, not measured" in out
    assert "\x1b" not in out


def test_replay_writes_a_run_and_the_same_bytes_again(call, trace: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        code, _, err = call(
            "replay", trace, *TINY, "--out", tmp_path / name, "--request-rate", "3", "--seed", "4"
        )
        assert code == 0, err
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert {"summary.json", "requests.parquet", "timeline.parquet", "report.html"} <= set(files)
    for name in files:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), (
            name
        )


def test_json_is_the_summary_and_nothing_else(call, trace: Path) -> None:
    code, out, _ = call(
        "replay", trace, *TINY, "--json", "--goodput", "ttft:500", "--goodput", "tpot:50"
    )
    summary = json.loads(out)
    assert code == 0
    assert summary["completed"] == 20
    assert summary["request_goodput"] is not None
    assert {"mean_ttft_ms", "p99_itl_ms", "output_throughput"} <= set(summary)


def test_the_offline_track_sends_everything_at_once(call, trace: Path, tmp_path: Path) -> None:
    code, _, err = call(
        "replay", trace, *TINY, "--request-rate", "inf", "--out", tmp_path / "offline"
    )
    assert code == 0, err
    assert json.loads((tmp_path / "offline" / "summary.json").read_text())["request_rate"] == "inf"


REFUSED = [
    (["missing.jsonl", *TINY], "missing.jsonl"),
    (["{trace}", "--model", "meta-llama/Llama-3.1-8B-Instruct", "--gpu", "a1000"], "a1000"),
    (["{trace}", "--model", "no/such-model", "--gpu", "a100"], "no/such-model"),
    (["{trace}", "--gpu", "a100"], "--model"),
    (["{trace}", *TINY, "--max-model-len", "999999999"], "max_model_len"),
    (["{trace}", *TINY, "--num-gpu-blocks-override", "100"], "131072"),
    (["{trace}", *TINY, "--swap-space", "4"], "--swap-space"),
    (["{trace}", *TINY, "--block-size", "0"], "block_size"),
    (["{trace}", *TINY, "--max-num-seqs", "0"], "max_num_seqs"),
    (["{trace}", *TINY, "--gpu-memory-utilization", "1.5"], "gpu_memory_utilization"),
    (["{trace}", *TINY, "-tp", "3"], "divisible"),
    (["{trace}", *TINY, "--scheduling-policy", "sjf"], "sjf"),
    (["{trace}", *TINY, "--request-rate", "0"], "request_rate"),
    (["{trace}", *TINY, "--request-rate", "nan"], "request_rate"),
    (["{trace}", *TINY, "--time-scale", "-1"], "time_scale"),
    (["{trace}", *TINY, "--max-concurrency", "0"], "max_concurrency"),
    (["{trace}", *TINY, "--limit", "0"], "limit"),
    (["{trace}", *TINY, "--goodput", "latency:5"], "latency"),
    (["{trace}", *TINY, "--metric-percentiles", "101"], "101"),
    (["{trace}", *TINY, "--profile", "nowhere.json"], "nowhere.json"),
    (["{trace}", *TINY, "--no-such-flag"], "--no-such-flag"),
    (["{notes}", *TINY], "notes.txt"),
]


@pytest.mark.parametrize(("args", "names"), REFUSED, ids=[" ".join(a[-2:]) for a, _ in REFUSED])
def test_bad_input_is_one_sentence_and_leaves_nothing(
    call, trace: Path, tmp_path: Path, args: list[str], names: str
) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("dear diary\n")
    asked = [arg.format(trace=trace, notes=notes) for arg in args]
    before = sorted(tmp_path.iterdir())
    code, out, err = call("replay", *asked, "--out", tmp_path / "never")
    assert code == 2 and out == ""
    assert err.startswith("error: ") and names in err and err.count("\n") == 1
    assert "Traceback" not in err
    assert sorted(tmp_path.iterdir()) == before


def test_a_folder_that_is_not_a_run_is_never_replaced(call, trace: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    code, _, err = call("replay", trace, *TINY, "--out", precious, "--overwrite")
    assert code == 2 and "precious" in err
    assert [path.name for path in precious.iterdir()] == ["thesis.txt"]
