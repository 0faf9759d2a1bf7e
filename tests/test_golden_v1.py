"""Every V1 decision equals vLLM 0.32.0's own, step for step, on the recorded cases."""

import gzip
import json
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from vsim.commands.debug import debug
from vsim.sim.case import load_case
from vsim.sim.steplog import run_case

GOLDEN = Path(__file__).parent / "data" / "golden"
CASES = sorted(path.stem for path in GOLDEN.glob("v1*.json"))


def recorded(name: str) -> list[dict[str, Any]]:
    with gzip.open(GOLDEN / f"{name}.steps.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


def first_difference(seen: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> str | None:
    for position, (mine, theirs) in enumerate(zip_longest(seen, wanted, fillvalue={})):
        for key in {**mine, **theirs}:
            if mine.get(key) != theirs.get(key):
                return f"line {position}, {key}: {mine.get(key)} instead of {theirs.get(key)}"
    return None


def test_the_cases_are_there() -> None:
    assert len(CASES) == 31


@pytest.mark.parametrize("name", CASES)
def test_every_step_equals_vllms(name: str) -> None:
    records = run_case(load_case(GOLDEN / f"{name}.json"))
    seen = [json.loads(json.dumps(record)) for record in records]
    assert first_difference(seen, recorded(name)) is None


def test_the_command_writes_the_recorded_lines(tmp_path: Path) -> None:
    out = tmp_path / "log.jsonl.gz"
    result = CliRunner().invoke(debug, ["steps", str(GOLDEN / "v1-20.json"), "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert gzip.decompress(out.read_bytes()) == gzip.decompress(
        (GOLDEN / "v1-20.steps.jsonl.gz").read_bytes()
    )
    again = tmp_path / "again.jsonl.gz"
    CliRunner().invoke(debug, ["steps", str(GOLDEN / "v1-20.json"), "--out", str(again)])
    assert again.read_bytes() == out.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.jsonl.gz", "log.jsonl.gz"]


def test_a_log_can_be_cut_short() -> None:
    result = CliRunner().invoke(debug, ["steps", str(GOLDEN / "v1-20.json"), "--max-steps", "3"])
    lines = result.output.splitlines()
    assert [json.loads(line).get("step") for line in lines] == [0, 1, 2, None]
