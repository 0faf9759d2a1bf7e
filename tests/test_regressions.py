"""Cases that once differed from vLLM, shrunk and kept with its own steps: they need no vLLM to be checked."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from oracle.client import Recording
from stepwise import first_difference, our_records

DATA = Path(__file__).parent / "data" / "regressions"
CASES = sorted(path.stem for path in DATA.glob("*.json"))


@pytest.mark.parametrize("name", CASES)
def test_a_case_that_once_differed_stays_equal(name: str) -> None:
    case = json.loads((DATA / f"{name}.json").read_text())
    with gzip.open(DATA / f"{name}.steps.jsonl.gz", "rt") as lines:
        *steps, last = map(json.loads, lines)
    assert first_difference(Recording(steps, last["summary"]), our_records(case)) is None


def test_a_difference_is_named_by_step_and_key() -> None:
    case = json.loads((DATA / f"{CASES[0]}.json").read_text())
    *steps, last = our_records(case)
    steps[2] = {**steps[2], "free_sched": -1}
    found = first_difference(Recording(steps, last["summary"]), our_records(case))
    assert found is not None
    assert found.startswith("step 2, free_sched: real -1, ours ")
