"""V0 decides what vLLM 0.8.5's own scheduler classes decide, step for step, on generated workloads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from oracle.client import Case, RealEngine
from oracle_series import Series, assert_reached, fail_small, require_oracle, run_series
from stepwise import MAX_STEPS, compare
from workloads import fresh_case, v0_cases

pytestmark = [pytest.mark.oracle, pytest.mark.xdist_group("oracle-v0")]

# A tenth of what `make exact` runs, always the same cases. The census below says what they reach.
CASES, SEED = 200, 85
DRAWN = 40


@pytest.fixture(scope="module")
def real() -> Iterator[RealEngine]:
    require_oracle("v0")
    with RealEngine("v0") as engine:
        yield engine


@pytest.fixture(scope="module")
def series(real: RealEngine) -> Series:
    return run_series(real, CASES, SEED)


def test_every_step_of_fresh_cases_is_vllms_own(real: RealEngine, series: Series) -> None:
    if series.differing:
        fail_small(real, series.differing[0])


def test_fresh_cases_reach_every_hard_place(series: Series) -> None:
    assert_reached(series.census, MINIMUM)


def test_every_step_of_drawn_cases_is_vllms_own(real: RealEngine) -> None:
    @settings(
        max_examples=DRAWN,
        derandomize=True,
        deadline=None,
        database=None,
        phases=(Phase.generate,),  # `fail_small` shrinks: it keeps what it does not understand
        suppress_health_check=list(HealthCheck),
    )
    @given(v0_cases())
    def check(case: Case) -> None:
        _, difference = compare(real, case)
        if difference:
            fail_small(real, case)

    check()


def test_recordings_do_not_depend_on_the_hash_seed_or_on_earlier_cases(real: RealEngine) -> None:
    fresh = [fresh_case("v0", SEED, index) for index in range(CASES)]
    cases = [case for case in fresh if case["config"].get("enable_prefix_caching")][:12]
    with RealEngine("v0", hash_seed="1234") as other:
        for case in reversed(cases):
            assert other.run(case, MAX_STEPS).steps == real.run(case, MAX_STEPS).steps


def test_a_case_that_the_real_classes_refuse_leaves_the_worker_alive(real: RealEngine) -> None:
    case = fresh_case("v0", SEED, 0)
    broken = {**case, "config": {**case["config"], "no_such_flag": 1}}
    assert "no_such_flag" in str(real.run(broken).crash)
    assert real.run(case).crash is None


# At least so many events in the series above, on the real engine: about half of what was measured.
MINIMUM: dict[str, int] = {
    "recomputed: default": 400,
    "recomputed: default cached": 100,
    "recomputed: chunked": 900,
    "recomputed: chunked cached": 25,
    "swapped out: default": 140,
    "swapped out: default cached": 20,
    "swapped out: chunked": 80,
    "swapped out: chunked cached": 30,
    "swapped in: default": 140,
    "swapped in: chunked": 70,
    "victims in mid-prefill": 800,
    "victims forced by priority": 15,
    "steps with several victims": 7,
    "steps that move blocks and run nothing": 60,
    "steps in which the swapped queue blocks prefills": 1200,
    "prefill steps while decodes pause": 450,
    "mixed steps": 600,
    "partial prefill chunks": 2200,
    "steps with several partial prefills": 140,
    "partial prefix hits": 120,
    "hits of a whole block-aligned prompt": 40,
    "hits on generated tokens": 35,
    "hits of a request that comes back": 120,
    "requests given up: can never fit": 5,
    "engine dies: RuntimeError": 6,
    "engine dies: AssertionError": 2,
    "run stalls with requests left": 4,
    "runs: pool large enough for a watermark": 19,
    "requests tied in arrival and priority": 550,
    "arrivals at the very end of a step": 80,
    "answers cut at max_model_len": 70,
    "prompts of the longest accepted length": 35,
    "prompts refused by the front end": 40,
    "block size   1": 14,
    "block size  24": 10,
    "block size  64": 11,
}
