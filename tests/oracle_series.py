"""A series of fresh cases on the real engine and ours, run once for the tests of that engine."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field

import pytest
from census import Census
from oracle.client import Case, RealEngine, missing
from stepwise import compare, shrink
from workloads import fresh_case


def require_oracle(engine: str) -> None:
    """Skip, saying why, where the real vLLM is missing; fail instead under VSIM_REQUIRE_ORACLE=1."""
    reason = missing(engine)
    if reason and os.environ.get("VSIM_REQUIRE_ORACLE") == "1":
        pytest.fail(f"VSIM_REQUIRE_ORACLE=1, but {reason}", pytrace=False)
    if reason:
        pytest.skip(reason)


@dataclass
class Series:
    """What came of the cases: the census of the real engine, and the first difference found."""

    census: Census = field(default_factory=Census)
    differing: list[Case] = field(default_factory=list)

    def check(self, real: RealEngine, case: Case) -> None:
        recording, difference = compare(real, case)
        self.census.add(case, recording)
        if difference:
            self.differing.append(case)


def run_series(real: RealEngine, n: int, seed: int) -> Series:
    series = Series()
    for index in range(n):
        series.check(real, fresh_case(real.engine, seed, index))
    return series


def fail_small(real: RealEngine, case: Case, limit_s: float = 60.0) -> None:
    """Fail with a small case that still differs, ready for `vsim debug steps`."""

    def differs(candidate: Case) -> bool:
        recording, difference = compare(real, candidate)
        return difference is not None and recording.crash is None

    small = shrink(case, differs, limit_s)
    _, difference = compare(real, small)
    pytest.fail(f"{difference}\nthe case: {json.dumps(small)}", pytrace=False)


def assert_reached(census: Census, minimum: dict[str, int]) -> None:
    """Every situation whose name begins so occurred at least so often."""
    short = {}
    for name, least in minimum.items():
        found = sum(n for key, n in census.events.items() if key.startswith(name))
        if found < least:
            short[name] = f"{found} of at least {least}"
    assert not short, f"the generator is too weak:\n{json.dumps(short, indent=1)}\n{census.table()}"
