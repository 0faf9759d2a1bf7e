"""What must hold for any deployment and workload, whatever vLLM does: read from our own step records."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from oracle.client import Case
from stepwise import our_records
from workloads import prompt_tokens, v0_cases, v1_cases

Records = list[dict[str, Any]]

STRATEGIES = {"v1": v1_cases(), "v0": v0_cases()}
few = settings(
    max_examples=25,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def run(case: Case) -> tuple[Records, dict[str, Any]]:
    *steps, last = our_records(case)
    return steps, last["summary"]


def usable_blocks(config: dict[str, Any]) -> int:
    """V1 keeps block 0 as its null block."""
    return int(config["num_gpu_blocks"]) - (config["engine"] == "v1")


def answer_tokens(case: Case, request: dict[str, Any]) -> int:
    """Tokens a request gets if it ends: V0 stops one token past max_model_len, V1 at it (spec 6.3, 12.19)."""
    config = case["config"]
    room = config["max_model_len"] - prompt_tokens(request) + (config["engine"] == "v0")
    return int(min(request["output_tokens"], room))


@pytest.mark.parametrize("engine", STRATEGIES)
def test_time_only_goes_forward(engine: str) -> None:
    @few
    @given(STRATEGIES[engine])
    def check(case: Case) -> None:
        steps, summary = run(case)
        now = 0.0
        for step in steps:
            assert step.get("t_sched", step["t_start"]) >= now
            assert step["t_end"] >= step["t_start"] >= step.get("t_sched", now)
            now = step.get("t_sched", step["t_start"])
        assert summary["t_end"] >= now

    check()


@pytest.mark.parametrize("engine", STRATEGIES)
def test_no_request_is_lost_or_served_twice(engine: str) -> None:
    @few
    @given(STRATEGIES[engine])
    def check(case: Case) -> None:
        steps, summary = run(case)
        tokens = Counter(rid for step in steps for rid in step["emitted"])
        ends = Counter(rid for step in steps for rid in step["finished"])
        given_up = {rid for step in steps for rid in step.get("ignored", ())}
        open_ends = {*summary["unfinished"], *summary["rejected"], *given_up}
        # A run that ends early has not seen the requests still to come.
        cut = summary["stalled"] or summary.get("error") or summary["unfinished"]
        for request in case["requests"]:
            rid = request["id"]
            if rid in ends:
                assert ends[rid] == 1 and rid not in open_ends
                assert (
                    tokens[rid] == answer_tokens(case, request) == summary["requests"][rid]["out"]
                )
            else:
                assert rid in open_ends or (cut and rid not in summary["requests"])

    check()


@pytest.mark.parametrize("engine", STRATEGIES)
def test_blocks_are_conserved_and_a_drained_cache_is_empty(engine: str) -> None:
    @few
    @given(STRATEGIES[engine])
    def check(case: Case) -> None:
        steps, summary = run(case)
        usable = usable_blocks(case["config"])
        assert all(
            0 <= step["free_sched"] <= usable and 0 <= step["free"] <= usable for step in steps
        )
        drained = not (summary["unfinished"] or summary["stalled"] or summary.get("error"))
        if steps and drained:
            assert steps[-1]["free"] == usable

    check()


@pytest.mark.parametrize("engine", STRATEGIES)
def test_a_step_keeps_to_its_budgets(engine: str) -> None:
    @few
    @given(STRATEGIES[engine])
    def check(case: Case) -> None:
        config = case["config"]
        for step in run(case)[0]:
            assert step["tokens"] <= config["max_num_batched_tokens"]
            assert len(step["scheduled"]) <= config["max_num_seqs"]
            assert all(n > 0 for n in step["scheduled"].values())

    check()


@pytest.mark.parametrize("engine", STRATEGIES)
def test_what_a_request_computed_grows_without_gaps_until_it_is_preempted(engine: str) -> None:
    @few
    @given(STRATEGIES[engine])
    def check(case: Case) -> None:
        known: dict[str, int] = {}
        for step in run(case)[0]:
            for rid in [
                *step.get("recomputed", ()),
                *(step["preempted"] if engine == "v1" else ()),
            ]:
                known.pop(rid, None)
            for rid, n in step["scheduled"].items():
                done = step["computed"][rid]
                assert known.get(rid, done) == done
                known[rid] = done + n

    check()
