"""V1 decides what vLLM 0.32.0's own scheduler classes decide, step for step, on generated workloads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from oracle.client import Case, RealEngine
from oracle_series import Series, assert_reached, fail_small, require_oracle, run_series
from stepwise import MAX_STEPS, compare
from workloads import fresh_case, v1_cases

pytestmark = [pytest.mark.oracle, pytest.mark.xdist_group("oracle-v1")]

# A tenth of what `make exact` runs, always the same cases. The census below says what they reach.
CASES, SEED = 200, 32
DRAWN = 40


@pytest.fixture(scope="module")
def real() -> Iterator[RealEngine]:
    require_oracle("v1")
    with RealEngine("v1") as engine:
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
    @given(v1_cases())
    def check(case: Case) -> None:
        _, difference = compare(real, case)
        if difference:
            fail_small(real, case)

    check()


def test_recordings_do_not_depend_on_the_hash_seed_or_on_earlier_cases(real: RealEngine) -> None:
    fresh = [fresh_case("v1", SEED, index) for index in range(CASES)]
    cases = [case for case in fresh if case["config"].get("kv_offload")][:12]
    with RealEngine("v1", hash_seed="1234") as other:
        for case in reversed(cases):
            assert other.run(case, MAX_STEPS).steps == real.run(case, MAX_STEPS).steps


def test_a_case_that_the_real_classes_refuse_leaves_the_worker_alive(real: RealEngine) -> None:
    case = fresh_case("v1", SEED, 0)
    broken = {**case, "config": {**case["config"], "no_such_flag": 1}}
    assert "no_such_flag" in str(real.run(broken).crash)
    assert real.run(case).crash is None


# At least so many events in the series above, on the real engine: about half of what was measured.
MINIMUM: dict[str, int] = {
    "preemptions: ": 600,
    "preemptions: async": 100,
    "preemptions: sync": 40,
    "preemptions: priority": 100,
    "preemptions: hybrid": 40,
    "preemptions: offload": 40,
    "preemptions: pipeline": 20,
    "steps with several victims": 6,
    "steps that only preempt": 20,
    "victim had been scheduled in the same step": 7,
    "victim's output still in flight": 50,
    "requests that finish while preempted": 7,
    "resumed on cached blocks": 120,
    "resumed from nothing": 130,
    "cached block evicted on reuse": 5000,
    "partial prefix hits": 400,
    "hits of a whole block-aligned prompt": 120,
    "hits on generated tokens": 150,
    "hits on a prompt admitted in the same step": 3,
    "steps that exhaust the token budget": 7000,
    "steps in which a running request gets nothing": 1700,
    "partial prefill chunks": 15000,
    "steps with several partial prefills": 2500,
    "chunks cut by the long-prefill threshold": 5000,
    "threshold waived for a lone request": 80,
    "refused for the full prompt, its first chunk would fit": 3000,
    "refused though the chunk fits, watermark set": 1000,
    "steps with all max_num_seqs slots taken, others waiting": 9000,
    "admissions that overtake by priority": 130,
    "requests tied in arrival and priority": 600,
    "arrivals at the very end of a step": 80,
    "wasted rows after EOS": 200,
    "answers cut at max_model_len": 100,
    "prompts of the longest accepted length": 30,
    "prompts refused by the front end": 30,
    "one-token answers": 700,
    "run stalls with requests left": 6,
    "offload: load": 80,
    "offload: store": 350,
    "offload: flush": 30,
    "runs: pipeline": 12,
    "runs: hybrid": 20,
    "runs: offload": 24,
    "runs: async with model runner V1": 8,
    "block size   1": 9,
    "block size  24": 9,
    "block size 128": 12,
}
