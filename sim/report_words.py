"""The report's first paragraph: what happened, in plain words, nothing that was not measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from vsim.sim import metrics, timeline
from vsim.sim.run import Run
from vsim.sim.summary import setting
from vsim.sim.text import duration, number, percent, reason, short

FULL = 0.9  # of the KV blocks: a waiting prompt, which must fit whole, often doesn't


def paragraph(run: Run, summary: Mapping[str, Any], clock: timeline.StepClock) -> list[str]:
    """Sentences: how much was served, how fast, what the engine was short of, what went wrong."""
    sentences = [_served(run, summary)]
    if summary["completed"]:
        sentences.append(_speed(summary))
    if summary["goodput_slo_ms"]:
        limits = " and ".join(
            f"{k.upper()} ≤ {v:g} ms" for k, v in summary["goodput_slo_ms"].items()
        )
        share = percent(summary["goodput_fraction"])
        sentences.append(f"{share} of all requests met {limits}.")
    sentences += _shortage(run, summary, clock)
    if summary["preemptions"]:
        sentences.append(_preemptions(run, summary))
    if summary["rejected_reasons"]:
        code, count = next(iter(summary["rejected_reasons"].items()))
        total = sum(summary["rejected_reasons"].values())
        other = "" if count == total else f" (most often, {number(count)} times)"
        sentences.append(f"{_requests(total)} rejected{other}: {reason(code)}.")
    if summary["ended_early"]:
        sentences.append(f"The run ended early: {summary['ended_early']}.")
    return sentences


def _served(run: Run, s: Mapping[str, Any]) -> str:
    run_kind = "measured run" if run.origin == "measured" else "simulation"
    if not s["num_prompts"]:
        return f"The trace of this {run_kind} holds no requests, so nothing happened."
    if not s["completed"]:
        return f"In this {run_kind} none of {_requests(s['num_prompts'], were=False)} finished."
    if s["num_prompts"] == 1:
        return f"In this {run_kind} the one request finished in {duration(s['duration'])}."
    every = "all" if s["completed"] == s["num_prompts"] else f"{number(s['completed'])} of"
    rate = f" ({short(s['request_throughput'])} requests/s)" if s["request_throughput"] else ""
    return (
        f"In this {run_kind} {every} {_requests(s['num_prompts'], were=False)} finished "
        f"in {duration(s['duration'])}{rate}, with {short(s['output_throughput'])} output tokens/s."
    )


def _speed(s: Mapping[str, Any]) -> str:
    if s["completed"] == 1:
        after = (
            f"; after that a token took {_ms(s['median_tpot_ms'])}" if s["median_tpot_ms"] else ""
        )
        return f"Its first token came after {_ms(s['median_ttft_ms'])}{after}."
    tail = max(s["percentiles"], default=None)
    text = f"Half of the requests saw their first token within {_ms(s['median_ttft_ms'])}"
    if tail is not None and tail > 50:
        word = metrics.percentile_word(tail)
        text += f", {word} % within {_ms(s[f'p{word}_ttft_ms'])}"
    if s["median_tpot_ms"] is not None:
        text += f"; after that a token took {_ms(s['median_tpot_ms'])} in the median request"
    return text + f", and half were complete within {_ms(s['median_e2el_ms'])}."


def _shortage(run: Run, s: Mapping[str, Any], clock: timeline.StepClock) -> list[str]:
    """When requests waited, what was used up at that time: seats, KV blocks, or the token budget."""
    steps = run.steps
    if not len(steps["start_ns"]) or not s["duration"]:
        return []
    start = int(run.requests["arrival_ns"].min())
    end = start + round(s["duration"] * 1e9)
    waiting = steps["waiting"] > 0
    share = clock.state(waiting).mean(start, end) or 0.0
    peak = f"KV cache usage peaked at {percent(s['kv_usage_peak'], 0)}"
    if share < 0.01:
        return [f"Requests hardly ever waited for the engine; {peak}."]
    causes = shortages(run)
    text = f"Requests were waiting for {percent(share, 0)} of the time; {peak}."
    found = {
        name: (clock.state(waiting & mask).mean(start, end) or 0.0) / share
        for name, mask in causes.items()
    }
    name, most = max(found.items(), key=lambda item: item[1])
    if most >= 0.2:
        text = text[:-1] + f", and {name} during {percent(most, 0)} of that waiting."
    return [text, *_growing(run, clock, start, end)]


def shortages(run: Run) -> dict[str, npt.NDArray[np.bool_]]:
    """What may have been used up in each step, in words: a mask of shape (steps,) for each."""
    steps = run.steps
    nothing = np.zeros(len(steps["start_ns"]), dtype=bool)
    seats = setting(run.config, "max_num_seqs")
    budget = setting(run.config, "max_num_batched_tokens")
    return {
        "the KV cache was at least 90 % full": steps["kv_blocks_used"] >= FULL * run.num_gpu_blocks,
        f"all {number(seats)} seats (max_num_seqs) were taken": (
            steps["running"] >= seats if isinstance(seats, int) else nothing
        ),
        "the step's token budget (max_num_batched_tokens) was used up": (
            steps["tokens"] >= budget if isinstance(budget, int) else nothing
        ),
    }


def _growing(run: Run, clock: timeline.StepClock, start: int, end: int) -> list[str]:
    """Did the queue still grow when the last request came in? Then the load was above capacity."""
    last = int(run.requests["arrival_ns"].max())
    waiting = clock.state(run.steps["waiting"])
    if last > start and end - last > 0.5 * (last - start):
        left = int(waiting.at(np.array([last]))[0])
        if left <= 10:
            return []
        return [
            f"When the last request arrived {number(left)} others were waiting, and it took another "
            f"{duration((end - last) / 1e9)} to serve them all: the load is above capacity."
        ]
    edges = np.linspace(start, last, 5).round().astype(np.int64)
    quarter = np.diff(waiting.integral(edges)) / np.maximum(np.diff(edges), 1)
    if quarter[-1] > 10 and bool((np.diff(quarter) > 0).all()) and quarter[-1] > 2 * quarter[1]:
        return [
            f"The queue kept growing (on average {short(float(quarter[0]))} waiting in the first quarter "
            f"of the arrivals, {short(float(quarter[-1]))} in the last): the load is above capacity."
        ]
    return []


def _preemptions(run: Run, s: Mapping[str, Any]) -> str:
    computed = int(run.steps["tokens"].sum()) if len(run.steps["tokens"]) else 0
    share = f" ({percent(s['recomputed_tokens'] / computed)} of all computed)" if computed else ""
    return (
        f"{number(s['preemptions'])} preemption{'' if s['preemptions'] == 1 else 's'} hit {_requests(s['preempted_requests'], were=False)}; "
        f"{number(s['recomputed_tokens'])} tokens were computed again{share}."
    )


def _requests(count: int, were: bool = True) -> str:
    verb = (" was" if count == 1 else " were") if were else ""
    return f"{number(count)} {'request' if count == 1 else 'requests'}{verb}"


def _ms(value: float | None) -> str:
    return duration(None if value is None else value / 1000)
