"""Every V0 decision equals vLLM 0.8.5's own, step for step, on the recorded cases; also where that engine dies."""

import gzip
import json
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from vsim.commands.debug import debug
from vsim.sim.case import load_case
from vsim.sim.steplog_v0 import run_case

GOLDEN = Path(__file__).parent / "data" / "golden"
CASES = sorted(path.stem for path in GOLDEN.glob("v0*.json"))


def recorded(name: str) -> list[dict[str, Any]]:
    with gzip.open(GOLDEN / f"{name}.steps.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


def first_difference(seen: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> str | None:
    for position, (mine, theirs) in enumerate(zip_longest(seen, wanted, fillvalue={})):
        for key in {**mine, **theirs}:
            # As text: the order within an object is schedule order, and counts.
            if json.dumps(mine.get(key)) != json.dumps(theirs.get(key)):
                return f"line {position}, {key}: {mine.get(key)} instead of {theirs.get(key)}"
    return None


def test_the_cases_are_there() -> None:
    assert len(CASES) == 12


@pytest.mark.parametrize("name", CASES)
def test_every_step_equals_vllms(name: str) -> None:
    seen = list(run_case(load_case(GOLDEN / f"{name}.json")))
    assert first_difference(seen, recorded(name)) is None


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("v0-18", "RuntimeError: Aborted due to the lack of CPU swap space."),
        ("v0-22", "AssertionError: Waiting sequence group"),
    ],
)
def test_the_run_ends_where_the_real_engine_dies(name: str, error: str) -> None:
    summary = list(run_case(load_case(GOLDEN / f"{name}.json")))[-1]["summary"]
    assert summary["error"].startswith(error)
    assert summary["unfinished"]


def test_the_command_writes_the_recorded_lines(tmp_path: Path) -> None:
    out = tmp_path / "log.jsonl.gz"
    result = CliRunner().invoke(debug, ["steps", str(GOLDEN / "v0-16.json"), "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert gzip.decompress(out.read_bytes()) == gzip.decompress(
        (GOLDEN / "v0-16.steps.jsonl.gz").read_bytes()
    )
