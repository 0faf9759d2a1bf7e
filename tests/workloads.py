"""Random deployments and workloads in the golden input schema, made to reach the hard places.

A case is `{"config": ..., "requests": [...]}` as tests/oracle/README.md describes it. Everything is drawn
relative to the block size and to the workload's own needs: lengths sit on and beside block boundaries,
pools go from "barely one request" up, token budgets from "one token per sequence" up, arrivals meet the end
of a step. `tests/census.py` counts on the real engine whether the cases get where they should.

Choices come from a `Picker`: hypothesis for tests that shrink (`v1_cases`, `v0_cases` are strategies), a seeded
generator for long series in which case i is the same whatever ran before it (`fresh_case`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from hypothesis import strategies as st

Case = dict[str, Any]
Request = dict[str, Any]

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
GAPS_S: dict[str, list[float]] = {
    "bursts": [0.0, 0.0, 0.0, 0.0, 0.05, 0.4],
    "grid": [0.0, GRID_S, GRID_S, 2 * GRID_S, 3 * GRID_S, 8 * GRID_S],
    "spread": [0.0, 0.001, 0.004, 0.01, 0.013, 0.03, 0.1],
    "gaps": [0.0, 0.01, 0.02, 0.7, 5.0],
    "unsorted": [0.0, 0.01, 0.02, 0.03],
}


class Picker(Protocol):
    """Where choices come from. The first option and the lowest number are the simplest, for shrinking."""

    def integer(self, low: int, high: int) -> int:
        """From `low` to `high`, both included."""
        ...

    def one_of(self, options: Sequence[Any]) -> Any: ...

    def shuffled(self, items: list[Any]) -> list[Any]: ...


class RandomPicker:
    def __init__(self, seed: str) -> None:
        self._rng = random.Random(seed)

    def integer(self, low: int, high: int) -> int:
        return self._rng.randint(low, high)

    def one_of(self, options: Sequence[Any]) -> Any:
        return self._rng.choice(options)

    def shuffled(self, items: list[Any]) -> list[Any]:
        return self._rng.sample(items, len(items))


class HypothesisPicker:
    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
        self._draw = draw

    def integer(self, low: int, high: int) -> int:
        return int(self._draw(st.integers(low, high)))

    def one_of(self, options: Sequence[Any]) -> Any:
        return self._draw(st.sampled_from(options))

    def shuffled(self, items: list[Any]) -> list[Any]:
        return list(self._draw(st.permutations(items)))


def fresh_case(engine: str, seed: int, index: int) -> Case:
    """Case `index` of a seed's series for `engine` "v1" or "v0"."""
    return CASES[engine](RandomPicker(f"{engine}/{seed}/{index}"))


@st.composite
def v1_cases(draw: Callable[[st.SearchStrategy[Any]], Any]) -> Case:
    return v1_case(HypothesisPicker(draw))


@st.composite
def v0_cases(draw: Callable[[st.SearchStrategy[Any]], Any]) -> Case:
    return v0_case(HypothesisPicker(draw))


# ---- requests ---------------------------------------------------------------


def one_in(pick: Picker, n: int) -> bool:
    return pick.integer(0, n - 1) == n - 1


def length(pick: Picker, block_size: int, most: int) -> int:
    """A token count from 1 to `most`, often on a block boundary or one beside it."""
    blocks = pick.integer(0, most // block_size)
    beside = pick.one_of([0, 0, 1, -1, None])
    extra = pick.integer(0, min(block_size, most)) if beside is None else beside
    return max(1, min(most, blocks * block_size + extra))


def arrivals(pick: Picker, n: int) -> list[float]:
    """All at zero, in bursts with ties, spread, or in a file order that is not arrival order."""
    kind = pick.one_of(["zero", "bursts", "grid", "spread", "spread", "gaps", "unsorted"])
    if kind == "zero":
        return [0.0] * n
    now, at = 0.0, []
    for _ in range(n):
        now = round(now + pick.one_of(GAPS_S[kind]), 9)
        at.append(now)
    return pick.shuffled(at) if kind == "unsorted" else at


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


def workload(pick: Picker, block_size: int, *, priorities: bool) -> list[Request]:
    """Requests whose prompts share prefixes in one way per workload, or not at all."""
    n = pick.integer(12, 40) if one_in(pick, 4) else pick.integer(1, 20)
    ids = request_ids(pick.one_of(["plain", "plain", "reversed", "mixed"]), n)
    at = arrivals(pick, n)
    share = pick.one_of(
        ["none", "none", "system", "tree", "tree", "chat", "chat", "chunks", "twins"]
    )
    longest = max(8, min(640, block_size * pick.one_of([2, 4, 4, 8])))
    # Decodes make pressure only if they cross block boundaries: long answers for small blocks.
    answer = pick.one_of([6, 24, 60, 60, min(120, max(40, 4 * block_size))])
    stops = pick.one_of([0, 0, 1, 2, 4])  # in 4 requests
    urgencies = pick.one_of([[0, 1, 2, 5], [0, 0, 0, 1], list(range(8)), None])
    trunk = [length(pick, block_size, longest) for _ in range(2)]
    requests: list[Request] = []
    for i in range(n):
        request: Request = {"id": ids[i], "arrival": at[i]}
        request.update(prompt(pick, share, i, requests, trunk, longest, block_size))
        request["output_tokens"] = 1 if one_in(pick, 10) else length(pick, block_size, answer)
        if priorities:
            # None: the later, the more urgent. Victims then run, even in this very step.
            request["priority"] = pick.one_of(urgencies) if urgencies else n - i
        if stops and pick.integer(1, 4) <= stops:
            request["finish"] = "stop"
        requests.append(request)
    return requests


def prompt(
    pick: Picker,
    share: str,
    i: int,
    before: list[Request],
    trunk: list[int],
    longest: int,
    block_size: int,
) -> Request:
    """Prompt fields of request `i`, sharing a prefix with those `before` it in the way named `share`."""
    own = [1000 + i, length(pick, block_size, longest)]
    if share == "system":
        stream = pick.integer(0, 1)
        return {"segments": [[stream, trunk[stream]], own]}
    if share == "tree":
        segments = [[0, trunk[0]], [10 + pick.integer(0, 1), length(pick, block_size, longest)]]
        if before and one_in(pick, 5):
            segments = [list(s) for s in pick.one_of(before)["segments"]]
        elif one_in(pick, 2):
            segments.append(own)
        return {"segments": segments}
    if share == "chat":
        turn = pick.integer(0, i)
        if turn < i and prompt_tokens(before[turn]) < 6 * longest:
            said = before[turn]["output_tokens"] if pick.integer(0, 3) else 1
            return {
                "segments": [
                    *[list(s) for s in before[turn]["segments"]],
                    ["out:" + before[turn]["id"], said],
                    own,
                ]
            }
        return {"segments": [[pick.integer(0, 1), trunk[0]], own]}
    if share == "chunks":
        step = pick.one_of([block_size, 2 * block_size, block_size + 1])
        chunks = -(-own[1] // step)
        same = pick.integer(0, chunks)
        private = [10_000 + 50 * i + k for k in range(same, chunks)]
        return {
            "input_tokens": own[1],
            "hash_ids": [*range(same), *private],
            "hash_block_tokens": step,
        }
    if share == "twins":
        # Few different prompts of whole blocks: full-prompt hits, and duplicates in one step.
        return {"segments": [[pick.integer(0, 2), block_size * pick.integer(1, 3)]]}
    if one_in(pick, 10):
        return {"prompt_token_ids": list(range(own[1]))}
    return {"input_tokens": own[1]}


def model_len(pick: Picker, requests: list[Request], *, longest_prompt: int) -> int:
    """Mostly roomy; else cutting answers short, with the longest prompt just accepted, or refused.

    `longest_prompt` is the longest that the front end accepts, relative to max_model_len: -1 in V1, 0 in V0.
    """
    prompts = max(map(prompt_tokens, requests))
    whole = max(prompt_tokens(r) + r["output_tokens"] for r in requests)
    choice = pick.one_of(["roomy"] * 5 + ["exact", "short", "prompt", "refuse"])
    lengths = {
        "roomy": whole + 50,
        "exact": whole,
        "short": (prompts + whole) // 2,
        "prompt": prompts - longest_prompt,
        "refuse": prompts - longest_prompt - 1,
    }
    return max(2, lengths[choice])


def pool(pick: Picker, requests: list[Request], block_size: int, max_model_len: int) -> int:
    """Usable blocks, from "barely the largest request" (rarely less: it can never end) to plenty."""
    fits = [r for r in requests if prompt_tokens(r) < max_model_len] or requests
    tokens = [min(prompt_tokens(r) + r["output_tokens"], max_model_len) for r in fits]
    needs = sorted(-(-t // block_size) for t in tokens)
    most = needs[-1]
    slacks = [0, 0, 1, 1, 2, 3, most // 2, most // 2, most, 2 * most, sum(needs)]
    return max(1, most + (-1 if one_in(pick, 25) else pick.one_of(slacks)))


# ---- vLLM V1 ----------------------------------------------------------------


def v1_case(pick: Picker) -> Case:
    """A case for the V1 scheduler of vLLM 0.32.0."""
    block_size = pick.one_of([16, 16, 8, 8, 1, 2, 24, 32, 64, 128])
    policy = pick.one_of(["fcfs", "fcfs", "priority"])
    requests = workload(pick, block_size, priorities=policy == "priority")
    max_model_len = model_len(pick, requests, longest_prompt=-1)
    seqs = pick.one_of([1, 2, 3, 4, 4, 6, 8, 8, 16, 32])
    budget = max(seqs, pick.one_of([1, 8, 12, 16, 24, 64, 64, 100, 256, 2048]))
    usable = pool(pick, requests, block_size, max_model_len)
    config: dict[str, Any] = {
        "engine": "v1",
        "block_size": block_size,
        "max_num_seqs": seqs,
        "max_num_batched_tokens": budget,
        "max_model_len": max_model_len,
        "policy": policy,
        "enable_prefix_caching": not one_in(pick, 5),
        "async_scheduling": pick.one_of([False, True]),
        "step_time": pick.one_of(STEP_TIMES),
    }
    if one_in(pick, 10):
        config["enable_chunked_prefill"] = False
        config["max_num_batched_tokens"] = max(budget, max_model_len)
    if one_in(pick, 4):
        config["long_prefill_token_threshold"] = min(max_model_len, pick.one_of([1, 5, 16, 24, 40]))
        config["long_prefill_token_threshold_adaptive"] = pick.one_of([False, True])
    if one_in(pick, 4):
        config["scheduler_reserve_full_isl"] = False
    if one_in(pick, 5):
        config["watermark"] = pick.one_of([0.02, 0.1, 0.25, 0.5])
    if one_in(pick, 10):
        config["max_num_active_seqs"] = max(1, seqs // 2)
    if one_in(pick, 10):
        config["max_num_scheduled_tokens"] = max(seqs, config["max_num_batched_tokens"] // 2)
    if one_in(pick, 8):
        config["sched_time"], config["update_time"] = 0.0007, 0.0003
    if one_in(pick, 4):
        config["idle_sleep"] = 0.001
    groups = 1
    # vsim refuses a CPU tier under sliding windows: never both.
    kind = pick.one_of(["plain"] * 6 + ["hybrid", "hybrid", "offload", "offload"])
    if kind == "hybrid":
        config["kv_groups"] = kv_groups(pick, block_size)
        groups = len(config["kv_groups"])
        if one_in(pick, 4):
            config["prefix_cache_retention_interval"] = block_size * pick.one_of([1, 2, 4])
    elif kind == "offload":
        config["kv_offload"] = kv_offload(pick, usable)
        config["idle_sleep"] = 0.001
    if one_in(pick, 4):
        config["pipeline_parallel_size"] = pick.integer(2, 4)
    elif config["async_scheduling"] and one_in(pick, 4):
        config["v2_model_runner"] = False
    config["num_gpu_blocks"] = usable * groups + 1
    return {"config": config, "requests": requests}


def kv_groups(pick: Picker, block_size: int) -> list[Case]:
    window = pick.one_of([1, block_size, 2 * block_size, 2 * block_size + 3, 100])
    swa = {"type": "swa", "window": window}
    full = {"type": "full"}
    return list(pick.one_of([[full, swa], [full, swa, swa], [full, swa], [swa]]))


def kv_offload(pick: Picker, usable: int) -> Case:
    offload = {
        "cpu_blocks": max(4, int(usable * pick.one_of([0.3, 1, 2, 4]))),
        "load": {"base": 1e-3, "per_block": pick.one_of([0.0, 1e-4, 5e-3])},
        "store": {"base": 1e-3, "per_block": pick.one_of([0.0, 1e-4, 5e-3])},
    }
    if one_in(pick, 4):
        offload["blocks_per_chunk"] = 2
    return offload


# ---- vLLM V0 ----------------------------------------------------------------


def v0_case(pick: Picker) -> Case:
    """A case for the V0 scheduler of vLLM 0.8.5: SWAP and RECOMPUTE, default and chunked policies."""
    block_size = pick.one_of([16, 16, 8, 8, 1, 24, 32, 64])
    policy = pick.one_of(["fcfs"] * 4 + ["priority"])
    requests = workload(pick, block_size, priorities=policy == "priority")
    max_model_len = model_len(pick, requests, longest_prompt=0)
    seqs = pick.one_of([1, 2, 3, 4, 6, 8, 8, 16, 32])
    usable = pool(pick, requests, block_size, max_model_len)
    chunked = policy == "fcfs" and pick.one_of([False, True])
    if policy == "priority":
        # Swapping under the priority policy corrupts 0.8.5's own state: rare, but it must end the same way.
        mode = pick.one_of(["recompute"] * 5 + [None, None, "swap"])
    else:
        mode = pick.one_of([None, "recompute", "swap", "swap"])
    if chunked:
        budget = max(seqs, pick.one_of([8, 16, 24, 64, 64, 128, 256, 2048]))
    else:
        budget = max(seqs, max_model_len + pick.one_of([0, 0, 64, 1024]))
    cpu_blocks = [4 * usable, 4 * usable, 8 * usable, 8 * usable, usable, usable // 2, 1, 0]
    config: dict[str, Any] = {
        "engine": "v0",
        "block_size": block_size,
        "num_gpu_blocks": usable + pick.one_of([0, 0, 0, 0, 0, 150]),
        "num_cpu_blocks": pick.one_of(cpu_blocks),
        "max_num_seqs": seqs,
        "max_num_batched_tokens": budget,
        "max_model_len": max_model_len,
        "policy": policy,
        "enable_chunked_prefill": chunked,
        "enable_prefix_caching": one_in(pick, 3),
        "preemption_mode": mode,
        "step_time": pick.one_of(STEP_TIMES),
    }
    if chunked and one_in(pick, 3):
        config["max_num_partial_prefills"] = pick.one_of([2, 3, 4])
        config["max_long_partial_prefills"] = pick.integer(1, 2)
        config["long_prefill_token_threshold"] = min(max_model_len, pick.one_of([0, 8, 64]))
    if one_in(pick, 2):
        config["swap_time"] = {"in": pick.one_of([0.0, 1e-4]), "out": pick.one_of([1e-4, 2e-3])}
    return {"config": config, "requests": requests}


CASES: dict[str, Callable[[Picker], Case]] = {"v1": v1_case, "v0": v0_case}
