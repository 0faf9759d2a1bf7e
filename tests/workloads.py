"""Random deployments and workloads in the golden input schema, made to reach the hard places.

Hypothesis strategies `v1_cases()` and `v0_cases()` draw (config, requests) cases as tests/oracle/README.md
describes them. Everything is drawn relative to the block size and to the workload's own needs: lengths sit
on and beside block boundaries, pools go from "barely one request" up, token budgets from "one token per
sequence" up. `tests/census.py` counts on the real engine whether they get there.

`for_each` runs a function over fresh cases of a seed: the same cases for the test suite (fixed seed) and
for `tests/exact.py` (any seed).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st

Case = dict[str, Any]
Request = dict[str, Any]
Draw = Callable[[st.SearchStrategy[Any]], Any]

# Sums of 1/64 are exact in binary: arrivals on that grid meet the very end of a step.
GRID_S = 1 / 64
STEP_TIMES: list[dict[str, float]] = [
    {"a": 0.01, "b": 1e-5, "c": 1e-5},
    {"a": 0.005, "b": 5e-5, "c": 1e-4},
    {"a": 0.01, "b": 0.0, "c": 0.0},
    {"a": GRID_S, "b": 0.0, "c": 0.0},
    {"a": GRID_S, "b": GRID_S / 16, "c": 0.0},
    {"a": 0.02, "b": 2e-4, "c": 0.0},
]


def for_each(
    strategy: st.SearchStrategy[Case], n: int, seed: int, visit: Callable[[Case], None]
) -> None:
    """Call `visit` with `n` fresh cases; the same `seed` gives the same cases. No shrinking, no database."""

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=n,
        phases=(Phase.generate,),
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @hypothesis.given(strategy)
    def visit_all(case: Case) -> None:
        visit(case)

    visit_all()


def usually(value: Any, *rare: Any, share: int = 8) -> st.SearchStrategy[Any]:
    """`value` in `share` of 10 draws, else one of `rare`."""
    return st.integers(0, 9).flatmap(
        lambda k: st.just(value) if k < share else st.sampled_from(rare)
    )


# ---- requests ---------------------------------------------------------------


@st.composite
def lengths(draw: Draw, block_size: int, most: int) -> int:
    """A token count from 1 to about `most`, often on a block boundary or one beside it."""
    blocks = draw(st.integers(0, max(0, most // block_size)))
    beside = draw(st.sampled_from([0, 0, 1, -1, None]))
    extra = draw(st.integers(0, min(block_size, most))) if beside is None else beside
    return max(1, min(most, blocks * block_size + extra))


@st.composite
def arrivals(draw: Draw, n: int) -> list[float]:
    """All at zero, in bursts with ties, spread, or in file order that is not arrival order."""
    kind = draw(st.sampled_from(["zero", "bursts", "grid", "spread", "spread", "gaps", "unsorted"]))
    if kind == "zero":
        return [0.0] * n
    steps = {
        "bursts": [0.0, 0.0, 0.0, 0.0, 0.05, 0.4],
        "grid": [0.0, GRID_S, GRID_S, 2 * GRID_S, 3 * GRID_S, 8 * GRID_S],
        "spread": [0.0, 0.001, 0.004, 0.01, 0.013, 0.03, 0.1],
        "gaps": [0.0, 0.01, 0.02, 0.7, 5.0],
        "unsorted": [0.0, 0.01, 0.02, 0.03],
    }[kind]
    now, out = 0.0, []
    for _ in range(n):
        now = round(now + draw(st.sampled_from(steps)), 9)
        out.append(now)
    return draw(st.permutations(out)) if kind == "unsorted" else out


def request_ids(style: str, n: int) -> list[str]:
    """Names whose string order differs from file order (from ten requests on, or at once)."""
    if style == "reversed":
        return [f"q{n - i:03d}" for i in range(n)]
    if style == "mixed":
        return [f"{'zamkb'[i % 5]}{i}" for i in range(n)]
    return [f"r{i}" for i in range(n)]


def prompt_tokens(request: Request) -> int:
    if "prompt_token_ids" in request:
        return len(request["prompt_token_ids"])
    if "segments" in request:
        return sum(tokens for _, tokens in request["segments"])
    return int(request["input_tokens"])


@st.composite
def workloads(draw: Draw, block_size: int, *, policy: str) -> list[Request]:
    """Requests whose prompts share prefixes in one way per workload, or not at all."""
    n = draw(st.integers(1, 20)) if draw(st.integers(0, 4)) else draw(st.integers(12, 40))
    ids = request_ids(draw(st.sampled_from(["plain", "plain", "reversed", "mixed"])), n)
    at = draw(arrivals(n))
    share = draw(
        st.sampled_from(["none", "system", "tree", "tree", "chat", "chat", "chunks", "twins"])
    )
    longest = draw(st.sampled_from([2, 4, 4, 8])) * block_size
    prompts = lengths(block_size, max(8, min(longest, 640)))
    # Decodes make pressure only if they cross block boundaries: long answers for small blocks.
    answers = lengths(
        block_size, draw(st.sampled_from([6, 24, 60, 60, min(120, max(40, 4 * block_size))]))
    )
    stops = draw(st.sampled_from([0, 0, 1, 2, 4]))  # in 4 requests
    urgencies = draw(st.sampled_from([[0, 1, 2, 5], [0, 0, 0, 1], list(range(8)), "later first"]))
    trunk = [draw(prompts) for _ in range(2)]
    requests: list[Request] = []
    for i in range(n):
        request: Request = {"id": ids[i], "arrival": at[i]}
        own = [1000 + i, draw(prompts)]
        if share == "system":
            stream = draw(st.integers(0, 1))
            request["segments"] = [[stream, trunk[stream]], own]
        elif share == "tree":
            segments = [[0, trunk[0]], [10 + draw(st.integers(0, 1)), draw(prompts)]]
            if i and draw(st.integers(0, 4)) == 0:
                segments = [list(s) for s in requests[draw(st.integers(0, i - 1))]["segments"]]
            elif draw(st.booleans()):
                segments.append(own)
            request["segments"] = segments
        elif share == "chat":
            turn = draw(st.integers(0, i)) if i else 0
            if i and turn < i and sum(s[1] for s in requests[turn]["segments"]) < 8 * longest:
                before = requests[turn]
                request["segments"] = [
                    *[list(s) for s in before["segments"]],
                    [
                        "out:" + before["id"],
                        draw(st.sampled_from([0, 0, 1])) or before["output_tokens"],
                    ],
                    own,
                ]
            else:
                request["segments"] = [[draw(st.integers(0, 1)), trunk[0]], own]
        elif share == "chunks":
            step = draw(st.sampled_from([block_size, 2 * block_size, block_size + 1]))
            tokens = max(own[1], 1)
            chunks = -(-tokens // step)
            same = draw(st.integers(0, chunks))
            request.update(
                input_tokens=tokens,
                hash_ids=[*range(same), *(10_000 + 50 * i + k for k in range(same, chunks))],
                hash_block_tokens=step,
            )
        elif share == "twins":
            # Few different prompts, whole blocks: full-prompt hits, duplicates in one step.
            request["segments"] = [[draw(st.integers(0, 2)), block_size * draw(st.integers(1, 3))]]
        elif draw(st.integers(0, 9)) == 0:
            request["prompt_token_ids"] = list(range(own[1]))
        else:
            request["input_tokens"] = own[1]
        request["output_tokens"] = draw(answers) if draw(st.integers(0, 9)) else 1
        if policy == "priority":
            # Later and more urgent: victims are then requests that run, even ones scheduled in this very step.
            request["priority"] = (
                n - i if urgencies == "later first" else draw(st.sampled_from(urgencies))
            )
        if stops and draw(st.integers(1, 4)) <= stops:
            request["finish"] = "stop"
        requests.append(request)
    return requests


def block_need(request: Request, block_size: int) -> int:
    return -(-(prompt_tokens(request) + request["output_tokens"]) // block_size)


def draw_model_len(
    draw: Draw, requests: list[Request], block_size: int, *, longest_prompt: int
) -> int:
    """Mostly roomy; else cutting answers short, with the longest prompt just accepted, or refused.

    `longest_prompt` is the longest that the front end accepts, relative to max_model_len: -1 in V1, 0 in V0.
    """
    prompts = max(map(prompt_tokens, requests))
    whole = max(prompt_tokens(r) + r["output_tokens"] for r in requests)
    choice = draw(st.sampled_from(["roomy"] * 5 + ["exact", "short", "prompt", "refuse"]))
    length = {
        "roomy": whole + 50,
        "exact": whole,
        "short": (prompts + whole) // 2,
        "prompt": prompts - longest_prompt,
        "refuse": prompts - longest_prompt - 1,
    }
    return max(2, length[choice])


def draw_pool(draw: Draw, requests: list[Request], block_size: int, max_model_len: int) -> int:
    """Usable blocks, from "barely the largest request" (rarely less: it can never end) to plenty."""
    fits = [r for r in requests if prompt_tokens(r) < max_model_len] or requests
    needs = sorted(min(block_need(r, block_size), -(-max_model_len // block_size)) for r in fits)
    slack = draw(
        st.sampled_from(
            [
                0,
                0,
                1,
                1,
                2,
                3,
                needs[-1] // 2,
                needs[-1] // 2,
                needs[-1],
                2 * needs[-1],
                sum(needs),
                -1,
            ]
        )
    )
    return max(1, needs[-1] + slack)


# ---- vLLM V1 ----------------------------------------------------------------


@st.composite
def v1_cases(draw: Draw) -> Case:
    """Cases for the V1 scheduler of vLLM 0.32.0."""
    block_size = draw(st.sampled_from([16, 16, 8, 8, 1, 2, 24, 32, 64, 128]))
    policy = draw(st.sampled_from(["fcfs", "fcfs", "priority"]))
    requests = draw(workloads(block_size, policy=policy))
    max_model_len = draw_model_len(draw, requests, block_size, longest_prompt=-1)
    seqs = draw(st.sampled_from([1, 2, 3, 4, 4, 6, 8, 8, 16, 32]))
    budget = max(seqs, draw(st.sampled_from([1, 8, 12, 16, 24, 64, 64, 100, 256, 2048])))
    usable = draw_pool(draw, requests, block_size, max_model_len)
    config: dict[str, Any] = {
        "engine": "v1",
        "block_size": block_size,
        "max_num_seqs": seqs,
        "max_num_batched_tokens": budget,
        "max_model_len": max_model_len,
        "policy": policy,
        "enable_prefix_caching": draw(usually(True, False)),
        "async_scheduling": draw(st.booleans()),
        "step_time": draw(st.sampled_from(STEP_TIMES)),
    }
    if draw(st.integers(0, 9)) == 0:
        config["enable_chunked_prefill"] = False
        config["max_num_batched_tokens"] = max(budget, max_model_len)
    if draw(st.integers(0, 3)) == 0:
        config["long_prefill_token_threshold"] = min(
            max_model_len, draw(st.sampled_from([1, 5, 16, 24, 40]))
        )
        config["long_prefill_token_threshold_adaptive"] = draw(st.booleans())
    if draw(st.integers(0, 4)) == 0:
        config["scheduler_reserve_full_isl"] = False
    if draw(st.integers(0, 4)) == 0:
        config["watermark"] = draw(st.sampled_from([0.02, 0.1, 0.25, 0.5]))
    if draw(st.integers(0, 9)) == 0:
        config["max_num_active_seqs"] = max(1, seqs // 2)
    if draw(st.integers(0, 9)) == 0:
        config["max_num_scheduled_tokens"] = max(seqs, config["max_num_batched_tokens"] // 2)
    if draw(st.integers(0, 7)) == 0:
        config["sched_time"], config["update_time"] = 0.0007, 0.0003
    if draw(st.integers(0, 3)) == 0:
        config["idle_sleep"] = 0.001
    groups = 1
    kind = draw(st.sampled_from(["plain"] * 5 + ["pp", "pp", "hybrid", "hybrid", "offload"]))
    if kind == "pp":
        config["pipeline_parallel_size"] = draw(st.integers(2, 4))
    elif kind == "hybrid":
        window = draw(st.sampled_from([1, block_size, 2 * block_size, 2 * block_size + 3, 100]))
        swa = {"type": "swa", "window": window}
        full = {"type": "full"}
        config["kv_groups"] = draw(
            st.sampled_from([[full, swa], [full, swa, swa], [full, swa], [swa]])
        )
        groups = len(config["kv_groups"])
    elif kind == "offload":
        config["kv_offload"] = {
            "cpu_blocks": max(4, int(usable * draw(st.sampled_from([0.3, 1, 2, 4])))),
            "load": {"base": 1e-3, "per_block": draw(st.sampled_from([0.0, 1e-4, 5e-3]))},
            "store": {"base": 1e-3, "per_block": draw(st.sampled_from([0.0, 1e-4, 5e-3]))},
        }
        if draw(st.integers(0, 3)) == 0:
            config["kv_offload"]["blocks_per_chunk"] = 2
        config["idle_sleep"] = 0.001
    if kind != "pp" and config["async_scheduling"] and draw(st.integers(0, 3)) == 0:
        config["v2_model_runner"] = False
    config["num_gpu_blocks"] = usable * groups + 1
    return {"config": config, "requests": requests}


# ---- vLLM V0 ----------------------------------------------------------------


@st.composite
def v0_cases(draw: Draw) -> Case:
    """Cases for the V0 scheduler of vLLM 0.8.5: SWAP and RECOMPUTE, default and chunked policies."""
    block_size = draw(st.sampled_from([16, 16, 8, 8, 1, 24, 32, 64]))
    policy = draw(st.sampled_from(["fcfs"] * 4 + ["priority"]))
    requests = draw(workloads(block_size, policy=policy))
    max_model_len = draw_model_len(draw, requests, block_size, longest_prompt=0)
    seqs = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 8, 16, 32]))
    usable = draw_pool(draw, requests, block_size, max_model_len)
    chunked = policy == "fcfs" and draw(st.booleans())
    if policy == "priority":
        # Swapping under the priority policy corrupts 0.8.5's own state: rare, but it must end the same way.
        mode = draw(usually("recompute", None, "swap"))
    else:
        mode = draw(st.sampled_from([None, "recompute", "swap", "swap"]))
    if chunked:
        budget = max(seqs, draw(st.sampled_from([8, 16, 24, 64, 64, 128, 256, 2048])))
    else:
        budget = max(seqs, max_model_len + draw(st.sampled_from([0, 0, 64, 1024])))
    config: dict[str, Any] = {
        "engine": "v0",
        "block_size": block_size,
        "num_gpu_blocks": usable + draw(st.sampled_from([0, 0, 0, 150])),
        "num_cpu_blocks": draw(
            st.sampled_from([4 * usable, 4 * usable, 8 * usable, usable, usable // 2, 1, 0])
        ),
        "max_num_seqs": seqs,
        "max_num_batched_tokens": budget,
        "max_model_len": max_model_len,
        "policy": policy,
        "enable_chunked_prefill": chunked,
        "enable_prefix_caching": draw(st.integers(0, 2)) == 0,
        "preemption_mode": mode,
        "step_time": draw(st.sampled_from(STEP_TIMES)),
    }
    if chunked and draw(st.integers(0, 2)) == 0:
        config["max_num_partial_prefills"] = draw(st.sampled_from([2, 3, 4]))
        config["max_long_partial_prefills"] = draw(st.integers(1, 2))
        config["long_prefill_token_threshold"] = min(
            max_model_len, draw(st.sampled_from([0, 8, 64]))
        )
    if draw(st.booleans()):
        config["swap_time"] = {
            "in": draw(st.sampled_from([0.0, 1e-4])),
            "out": draw(st.sampled_from([1e-4, 2e-3])),
        }
    return {"config": config, "requests": requests}
