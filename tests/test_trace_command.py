"""`vsim trace` from the shell: exit code 0 and a result, or 2 and one sentence, and never half a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from vsim.cli import vsim
from vsim.errors import UserError

ROOT = Path(__file__).parents[1]
AZURE = ROOT / "traces" / "azure2023_conv.csv"
DATA = Path(__file__).parent / "data" / "traces"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(vsim, ["trace", *map(str, arguments)])


def test_inspect_as_text_json_and_page(tmp_path: Path) -> None:
    shown = run("inspect", AZURE, "--plot", tmp_path / "p.html")
    assert shown.exit_code == 0 and "19,366 requests" in shown.stdout
    assert (tmp_path / "p.html").read_text().startswith("<!doctype html>")
    found = json.loads(run("inspect", AZURE, "--json").stdout)
    assert found["requests"] == 19_366 and found["schema"] == "vsim/trace-facts/1"


def test_convert_there_and_back(tmp_path: Path) -> None:
    assert run("convert", AZURE, tmp_path / "a.parquet").exit_code == 0
    assert (
        run("convert", tmp_path / "a.parquet", tmp_path / "b.csv", "--to", "azure").exit_code == 0
    )
    assert (tmp_path / "b.csv").read_bytes() == AZURE.read_bytes()


def test_the_whole_chain_of_makers(tmp_path: Path) -> None:
    code = DATA / "azure2023_code_head.csv"
    steps = [
        ("fit", code, "-o", tmp_path / "r.json"),
        ("generate", "--recipe", tmp_path / "r.json", "-o", tmp_path / "g.jsonl"),
        (
            "generate",
            "--rate",
            5,
            "--requests",
            50,
            "--turns",
            "uniform:1:3",
            "-o",
            tmp_path / "h.parquet",
        ),
        ("merge", tmp_path / "g.jsonl", tmp_path / "h.parquet", "-o", tmp_path / "m.jsonl"),
        ("scale", tmp_path / "m.jsonl", "--load", 2, "--time", 0.5, "-o", tmp_path / "s.jsonl"),
        ("slice", tmp_path / "s.jsonl", "--to", 30, "-o", tmp_path / "p.jsonl"),
        ("anonymize", tmp_path / "p.jsonl", "-o", tmp_path / "q.jsonl.zst"),
        ("inspect", tmp_path / "q.jsonl.zst"),
    ]
    for step in steps:
        result = run(*step)
        assert result.exit_code == 0, (step, result.output, result.exception)


@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect", "nothing.csv"),
        ("inspect", AZURE, "--map", "input_tokens"),
        ("inspect", AZURE, "--map", "bogus=x"),
        ("inspect", AZURE, "--output-tokens", "0"),
        ("inspect", AZURE, "--format", "bogus"),
        ("convert", AZURE, "/no/such/folder/x.jsonl"),
        ("generate", "-o", "OUT"),
        ("generate", "-o", "OUT", "--rate", "nan", "--requests", "5"),
        ("generate", "-o", "OUT", "--rate", "5", "--requests", "5", "--tenants", "a"),
        ("generate", "-o", "OUT", "--rate", "5", "--requests", "5", "--turns", "x"),
        ("generate", "-o", "OUT", "--recipe", AZURE),
        ("slice", AZURE, "-o", "OUT", "--from", "nan"),
        ("slice", AZURE, "-o", "OUT", "--from", "1e300"),
        ("scale", AZURE, "-o", "OUT", "--time", "0"),
        ("scale", AZURE, "-o", "OUT", "--load", "nan"),
        ("fit", DATA / "bailian_doc_example.jsonl", "-o", "OUT"),
    ],
)
def test_bad_input_is_one_sentence_and_no_file(
    tmp_path: Path, arguments: tuple[object, ...]
) -> None:
    out = tmp_path / "out.jsonl"
    result = run(*(out if argument == "OUT" else argument for argument in arguments))
    assert isinstance(result.exception, UserError | SystemExit), result.exception
    assert result.exit_code != 0
    if isinstance(result.exception, UserError):
        assert str(result.exception).isprintable()
    assert list(tmp_path.iterdir()) == []
