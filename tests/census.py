"""How often each hard situation occurred, counted from the real engine's own step records.

A generator that never preempts proves nothing about preemption. `Census` adds up one `Recording` after the
other and prints a table; `MINIMUM` in test_oracle_*.py holds a weak generator to account.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from oracle.client import Case, Recording
from workloads import prompt_tokens

# Counted inside the real classes, because step records cannot show it (see tests/oracle/v1.py).
EVENTS = {
    "admission_refused": "waiting head refused for lack of blocks",
    "refused_though_chunk_fits": "refused for the full prompt, its first chunk would fit",
    "refused_under_watermark": "refused though the chunk fits, watermark set",
    "running_allocation_failed": "running request found no block",
    "cached_block_evicted": "cached block evicted on reuse",
    "victim_already_scheduled": "victim had been scheduled in the same step",
    "victim_with_output_in_flight": "victim's output still in flight",
}


class Census:
    """Events and cases per situation, over all recordings added."""

    def __init__(self) -> None:
        self.events: Counter[str] = Counter()
        self.cases: Counter[str] = Counter()
        self.num_cases = self.num_steps = self.num_requests = 0

    def add(self, case: Case, recording: Recording) -> None:
        self.num_cases += 1
        self.num_steps += len(recording.steps)
        self.num_requests += len(case["requests"])
        seen = situations(case, recording)
        self.events.update(seen)
        self.cases.update(name for name, count in seen.items() if count)

    def table(self) -> str:
        lines = [f"{self.num_cases} cases, {self.num_requests} requests, {self.num_steps} steps"]
        if self.events:
            width = max(map(len, self.events))
            lines.append(f"{'situation':<{width}}  {'events':>8}  {'cases':>6}")
            lines += [
                f"{name:<{width}}  {self.events[name]:>8}  {self.cases[name]:>6}"
                for name in sorted(self.events)
                if self.events[name]
            ]
        return "\n".join(lines)


def situations(case: Case, recording: Recording) -> Counter[str]:
    """Counts per situation in one case."""
    seen: Counter[str] = Counter()
    config = case["config"]
    seen[f"block size {config['block_size']:>3}"] += 1
    if recording.crash:
        seen["the real classes raised"] += 1
    seen.update(_requests(case, recording))
    seen.update((_steps_v1 if config["engine"] == "v1" else _steps_v0)(case, recording.steps))
    for event, name in EVENTS.items():
        seen[name] += recording.events.get(event, 0)
    return seen


def _requests(case: Case, recording: Recording) -> Counter[str]:
    seen: Counter[str] = Counter()
    config, summary = case["config"], recording.summary
    by_id = {r["id"]: r for r in case["requests"]}
    ties = Counter((r["arrival"], r.get("priority", 0)) for r in case["requests"])
    seen["requests tied in arrival and priority"] += sum(n for n in ties.values() if n > 1)
    seen["one-token answers"] += sum(r["output_tokens"] == 1 for r in case["requests"])
    limit = config["max_model_len"] - (config["engine"] == "v1")
    seen["prompts of the longest accepted length"] += sum(
        prompt_tokens(r) == limit for r in case["requests"]
    )
    ends = {step["t_end"] for step in recording.steps}
    seen["arrivals at the very end of a step"] += sum(
        r["arrival"] > 0 and round(r["arrival"], 9) in ends for r in case["requests"]
    )
    if summary is None:
        return seen
    seen["prompts refused by the front end"] += len(summary["rejected"])
    seen["run stalls with requests left"] += summary["stalled"]
    seen["run cut at the step limit"] += bool(
        summary["unfinished"] and not summary["stalled"] and not summary.get("error")
    )
    if summary.get("error"):
        seen["engine dies: " + summary["error"][:46]] += 1
    for rid, outcome in summary["requests"].items():
        if outcome["finish"] is None:
            continue
        if outcome["out"] < by_id[rid]["output_tokens"]:
            seen["answers cut at max_model_len"] += 1
        elif by_id[rid].get("finish") == "stop":
            seen["answers ended by EOS"] += 1
    return seen


def _hits(case: Case, step: dict[str, Any], admitted: Iterable[str]) -> Counter[str]:
    seen: Counter[str] = Counter()
    size = case["config"]["block_size"]
    requests = {r["id"]: r for r in case["requests"]}
    for rid in admitted:
        hit = step.get("hits", {}).get(rid, 0)
        tokens = prompt_tokens(requests[rid])
        if not hit:
            continue
        seen["prefix hits at first admission"] += 1
        seen["partial prefix hits"] += hit < (tokens - 1) // size * size
        seen["hits of a whole block-aligned prompt"] += tokens % size == 0 and hit >= tokens - size
        said = 0
        for stream, n in requests[rid].get("segments", []):
            if isinstance(stream, str) and hit > said:
                seen["hits on generated tokens"] += 1
                break
            said += n
        seen["hits on a prompt admitted in the same step"] += step["step"] == 0
    return seen


def _steps_v1(case: Case, steps: list[dict[str, Any]]) -> Counter[str]:
    seen: Counter[str] = Counter()
    config = case["config"]
    requests = {r["id"]: r for r in case["requests"]}
    prompts = {rid: prompt_tokens(r) for rid, r in requests.items()}
    mode = "async" if config.get("async_scheduling") else "sync"
    depth = config.get("pipeline_parallel_size", 1)
    budget = config.get("max_num_scheduled_tokens") or config["max_num_batched_tokens"]
    slots = config.get("max_num_active_seqs") or config["max_num_seqs"]
    threshold = config.get("long_prefill_token_threshold", 0)
    special = "hybrid " * bool(config.get("kv_groups")) + "offload " * bool(
        config.get("kv_offload")
    )
    where = special + (f"pipeline {depth} " if depth > 1 else "") + mode
    seen[f"runs: {where}"] += 1
    if config["async_scheduling"] and not config.get("v2_model_runner", True):
        seen["runs: async with model runner V1"] += 1
    admitted: set[str] = set()
    finished: set[str] = set()
    for step in steps:
        victims = step["preempted"]
        seen[f"preemptions: {where}"] += len(victims)
        seen[f"preemptions: {config['policy']}"] += len(victims)
        seen["steps with several victims"] += len(victims) > 1
        seen["steps that only preempt"] += bool(victims) and not step["tokens"]
        for rid in step["resumed"]:
            seen[
                "resumed on cached blocks"
                if rid in step.get("hits", {})
                else "resumed from nothing"
            ] += 1
        seen.update(_hits(case, step, step["new"]))
        if config["policy"] == "priority":
            for rid in step["new"]:
                mine = requests[rid]
                seen["admissions that overtake by priority"] += any(
                    other["arrival"] < mine["arrival"] and other["priority"] > mine["priority"]
                    for key, other in requests.items()
                    if key not in admitted and key not in step["new"]
                )
        admitted.update(step["new"])
        full = step["tokens"] == budget
        seen["steps that exhaust the token budget"] += full
        seen["steps in which a running request gets nothing"] += step["running"] > len(
            step["scheduled"]
        )
        seen["steps with all max_num_seqs slots taken, others waiting"] += (
            step["running"] >= slots and step["waiting"] > 0
        )
        chunks = 0
        for rid, n in step["scheduled"].items():
            chunk = step["computed"][rid] + n < prompts[rid]
            chunks += chunk
            seen["chunks cut by the long-prefill threshold"] += chunk and n == threshold
            seen["threshold waived for a lone request"] += 0 < threshold < n and not config.get(
                "long_prefill_token_threshold_adaptive"
            )
        seen["partial prefill chunks"] += chunks
        seen["steps with several partial prefills"] += chunks > 1
        # Records are in batch order: a victim whose finish is already written got its last token while it waited.
        seen["requests that finish while preempted"] += len(finished.intersection(victims))
        finished.update(step["finished"])
        seen["wasted rows after EOS"] += len(step.get("wasted", ()))
        moves = step.get("xfer", {})
        for kind in ("load", "store", "flush", "recv"):
            seen[f"offload: {kind}"] += len(moves.get(kind, ()))
    return seen


def _steps_v0(case: Case, steps: list[dict[str, Any]]) -> Counter[str]:
    seen: Counter[str] = Counter()
    config = case["config"]
    policy = "chunked" if config.get("enable_chunked_prefill") else "default"
    prompts = {r["id"]: prompt_tokens(r) for r in case["requests"]}
    where = f"{policy}{' cached' * bool(config.get('enable_prefix_caching'))}"
    seen[f"runs: {where}"] += 1
    seen["runs: pool large enough for a watermark"] += config["num_gpu_blocks"] >= 100
    done: dict[str, int] = {}
    forced_before = 0
    for step in steps:
        seen[f"recomputed: {where}"] += len(step["recomputed"])
        seen[f"swapped out: {where}"] += len(step["swapped_out"])
        seen[f"swapped in: {where}"] += len(step["swapped_in"])
        victims = [*step["recomputed"], *step["swapped_out"]]
        seen["steps with several victims"] += len(victims) > 1
        seen["victims in mid-prefill"] += sum(done.get(rid, 0) < prompts[rid] for rid in victims)
        forced = step["cum_preempt"] - forced_before - step["preempted"]
        forced_before = step["cum_preempt"]
        seen["victims forced by priority"] += max(0, forced)
        seen["steps that move blocks and run nothing"] += not step["scheduled"] and bool(
            step["swap_in"] or step["swap_out"]
        )
        running, swapped, waiting = step["q"]
        seen["steps in which the swapped queue blocks prefills"] += swapped > 0 and waiting > 0
        seen["requests given up: can never fit"] += len(step["ignored"])
        decodes = len(step["scheduled"]) - len(step["prompt"])
        seen["mixed steps"] += bool(step["prompt"]) and decodes > 0
        seen["prefill steps while decodes pause"] += bool(step["prompt"]) and running > len(
            step["scheduled"]
        )
        chunks = 0
        for rid, n in step["scheduled"].items():
            done[rid] = step["computed"][rid] + n
            chunks += done[rid] < prompts[rid]
        for rid in step["recomputed"]:
            done[rid] = 0
        seen["partial prefill chunks"] += chunks
        seen["steps with several partial prefills"] += chunks > 1
        seen.update(_hits(case, step, step["new"]))
        seen["hits of a request that comes back"] += sum(
            rid not in step["new"] for rid in step.get("hits", {})
        )
    return seen
