"""Stretches of a run that are worth a look, and what came together with them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vsim.sim import advice_stored, metrics
from vsim.sim.explain import dominant_tenant
from vsim.sim.report_series import grouped_percentiles
from vsim.sim.report_words import paragraph, shortages
from vsim.sim.run import FINISHED, Run
from vsim.sim.summary import num_replicas
from vsim.sim.text import number, percent, short
from vsim.sim.timeline import StepClock, StepFunction

QUEUE = 50  # requests waiting
KV_USAGE = 0.85
HIT_RATE = 0.6
JUMP = 3.0  # a bucket's p95 TTFT against the median bucket's
JUMP_MS = 100.0  # and at least so much above it
BUCKETS = 60
MOST = 3  # stretches of a kind that are shown, the longest

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Anomaly:
    """Something notable from `start_s` to `end_s` after the first arrival; `together`: what went with it."""

    what: str
    start_s: float
    end_s: float
    together: str


def anomalies(run: Run, summary: Mapping[str, Any], clock: StepClock) -> list[Anomaly]:
    """In order of time: long queues, a nearly full KV cache, jumps of TTFT; a poor prefix-hit rate last."""
    if not run.num_requests or not summary["duration"]:
        return []
    start = int(run.requests["arrival_ns"].min())
    end = start + round(summary["duration"] * 1e9)
    found: list[tuple[str, int, int]] = []
    if len(run.steps["start_ns"]):
        waiting = clock.state(run.steps["waiting"])
        for a, b, peak in stretches(waiting, QUEUE, end):
            found.append((f"more than {QUEUE} requests waiting (up to {number(int(peak))})", a, b))
        usable = max(1, run.num_gpu_blocks * num_replicas(run))
        for a, b, peak in stretches(
            clock.state(run.steps["kv_blocks_used"] / usable), KV_USAGE, end
        ):
            found.append((f"KV cache over {KV_USAGE:.0%} (up to {percent(peak, 0)})", a, b))
    found += _jumps(run, start, end)
    rows = [
        Anomaly(what, (a - start) / 1e9, (b - start) / 1e9, together(run, clock, a, b))
        for what, a, b in sorted(found, key=lambda row: (row[1], row[0]))
    ]
    rate = summary["prefix_cache_hit_rate"]
    if rate is not None and 0 < rate < HIT_RATE:
        rows.append(
            Anomaly(
                f"prefix cache hit rate {percent(rate)}, under {HIT_RATE:.0%}",
                0.0,
                summary["duration"],
                "over the whole run; without sharing in the trace it can't be higher",
            )
        )
    return rows


def story(
    run: Run, summary: Mapping[str, Any], clock: StepClock, notable: Sequence[Anomaly]
) -> list[str]:
    """The first paragraph, with the most telling of the notable stretches: one with a culprit, else a jump.

    Last comes what would help, where the run was told to find out (`sim.advice`).
    """
    # `together` puts facts side by side; some begin with who was there.
    named = [a for a in notable if re.search(r"(^|; )(request|tenant) ", a.together)]
    jumps = [a for a in notable if "jumped" in a.what]
    chosen = next(iter([a for a in named if a in jumps] or named or jumps), None)
    sentences = paragraph(run, summary, clock)
    if chosen is not None:
        when = f"From {clock_time(chosen.start_s)} to {clock_time(chosen.end_s)}"
        sentences.append(f"{when}: {chosen.what}, together with this: {chosen.together}.")
    return [*sentences, *advice_stored.sentences(summary)]


def clock_time(seconds: float) -> str:
    """Time since the first arrival, 1:02:03 or 2:03."""
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    if hours:
        return f"{hours}:{rest // 60:02d}:{rest % 60:02d}"
    return f"{rest // 60}:{rest % 60:02d}"


def stretches(state: StepFunction, limit: float, end_ns: int) -> list[tuple[int, int, float]]:
    """(start, end, peak) of the longest stretches above `limit`; short dips don't cut one. Times in ns."""
    above = state.value > limit
    if not above.any():
        return []
    until = np.append(state.at_ns[1:], max(end_ns, int(state.at_ns[-1])))
    edges = np.diff(above.astype(np.int8), prepend=0, append=0)
    first, last = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1) - 1
    starts, ends = state.at_ns[first], until[last]
    dip = max(1, (int(until[-1]) - int(state.at_ns[0])) // 100)
    cut = np.flatnonzero(starts[1:] - ends[:-1] > dip) + 1
    groups = zip(np.append(0, cut).tolist(), np.append(cut, len(starts)).tolist(), strict=True)
    found = [
        (int(starts[a]), int(ends[b - 1]), float(state.value[first[a] : last[b - 1] + 1].max()))
        for a, b in groups
    ]
    longest = sorted(found, key=lambda row: (row[0] - row[1], row[0]))[:MOST]
    return sorted(longest)


def _jumps(run: Run, start: int, end: int) -> list[tuple[str, int, int]]:
    """Stretches in which TTFT was far above the run's usual."""
    done = run.requests["status"] == FINISHED
    if done.sum() < 100:
        return []
    ttft_ms = metrics.latencies(run).ttft_ns / 1e6
    edges = np.linspace(start, end, BUCKETS + 1)
    sent = run.requests["sent_ns"][done]
    bucket = np.clip(np.searchsorted(edges, sent, side="right") - 1, 0, BUCKETS - 1)
    (p95,) = grouped_percentiles(ttft_ms, bucket, BUCKETS, (95,))
    usual = float(np.nanmedian(p95))
    high = np.nan_to_num(p95) > max(JUMP * usual, usual + JUMP_MS)
    change = np.diff(high.astype(np.int8), prepend=0, append=0)
    found = []
    for a, b in zip(np.flatnonzero(change == 1), np.flatnonzero(change == -1), strict=True):
        top = float(np.nanmax(p95[a:b]))
        words = f"TTFT p95 jumped to {short(top)} ms (usually {short(usual)} ms)"
        found.append((top, (words, int(edges[a]), int(edges[b]))))
    return [row for _, row in sorted(found, key=lambda item: -item[0])[:MOST]]


def together(run: Run, clock: StepClock, start: int, end: int) -> str:
    """What else was special from a little before `start` to `end`: facts, side by side, no more."""
    columns = run.requests
    arrival = columns["arrival_ns"]
    before = start - max((end - start) // 4, int(arrival.max() - arrival.min()) // 50)
    inside = (arrival >= before) & (arrival <= end)
    facts: list[str] = []
    span, own = float(arrival.max() - arrival.min()), float(end - before)
    if span > 0 and own > 0 and inside.any():
        ratio = (inside.sum() / own) / (run.num_requests / span)
        if ratio > 1.5:
            facts.append(f"arrivals at {ratio:.1f} times the mean rate")
    prompts = columns["prompt_tokens"]
    if inside.any():
        row = int(np.flatnonzero(inside)[prompts[inside].argmax()])
        if prompts[row] > 8 * np.median(prompts) and prompts[row] > 4096:
            facts.append(
                f"request {int(columns['request'][row])} brought a prompt of "
                f"{number(int(prompts[row]))} tokens"
            )
    facts += dominant_tenant(run, inside)
    if len(run.steps["start_ns"]):
        waiting = run.steps["waiting"] > 0
        share = clock.state(waiting).mean(start, end) or 0.0
        if share > 0.05:
            for name, mask in shortages(run).items():
                part = (clock.state(waiting & mask).mean(start, end) or 0.0) / share
                if part >= 0.3:
                    facts.append(f"{name} during {percent(part, 0)} of the waiting")
        within = (run.steps["start_ns"] >= start) & (run.steps["start_ns"] <= end)
        preempted = int(run.steps["preempted"][within].sum())
        if preempted:
            facts.append(f"{number(preempted)} preemptions")
    return "; ".join(facts) if facts else "nothing else out of the ordinary"
