"""Two tracks beside each other: what an offline benchmark promises, and what the recorded traffic gets."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from vsim.errors import UserError
from vsim.sim.cost import Prices, cost_of
from vsim.sim.deployment import Deployment
from vsim.sim.fast.several import load_for
from vsim.sim.front_end import Overlong
from vsim.sim.replay import Load, replay, step_model_for
from vsim.sim.summary import summarize
from vsim.sim.text import number, percent, plain, short
from vsim.traces.trace import Trace

SCHEMA = "vsim/dualtrack/1"
CONCURRENCY = (32, 64, 128)
COMPRESSED = 0.5
RULE_OF_THUMB = 0.65  # the guides: production capacity over offline throughput
# How close the search for the knee comes: the load found and the next one that fails differ by this much.
RESOLUTION = 1.05
MAX_SPEED = 4096.0
KEPT = (
    "completed",
    "failed",
    "duration",
    "request_throughput",
    "output_throughput",
    "total_token_throughput",
    "max_concurrent_requests",
    "median_ttft_ms",
    "p95_ttft_ms",
    "p99_ttft_ms",
    "p95_tpot_ms",
    "p95_e2el_ms",
    "kv_usage_mean",
    "kv_usage_peak",
    "kv_fragmentation_mean",
    "kv_fragmentation_peak",
    "preemptions",
    "recomputed_tokens",
    "prefix_cache_hit_rate",
    "ended_early",
)
DISTORTED = (
    "output_throughput",
    "median_ttft_ms",
    "p95_ttft_ms",
    "p99_ttft_ms",
    "p95_tpot_ms",
    "kv_fragmentation_mean",
    "preemptions",
)
Numbers = dict[str, Any]
OnRun = Callable[[str], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Targets:
    """What a load must still meet to count as capacity, p95, ms (facts: the guides' interactive targets)."""

    ttft_p95_ms: float = 2000.0
    tpot_p95_ms: float = 100.0

    def met(self, numbers: Numbers) -> bool:
        """Are both percentiles within the targets, in a run that came to its end?"""
        ttft, tpot = numbers["p95_ttft_ms"], numbers["p95_tpot_ms"]
        return (
            numbers["ended_early"] is None
            and ttft is not None
            and ttft <= self.ttft_p95_ms
            and (tpot is None or tpot <= self.tpot_p95_ms)
        )


def dual_track(
    trace: Trace,
    deployment: Deployment,
    *,
    offline_trace: Trace | None = None,
    profile: str | None = None,
    concurrency: Sequence[int] = CONCURRENCY,
    overlong: Overlong = "reject",
    seed: int = 0,
    time_scale: float = COMPRESSED,
    targets: Targets | None = Targets(),
    prices: Prices | None = None,
    on_run: OnRun | None = None,
) -> dict[str, Any]:
    """The offline benchmark and the replay of `trace` on one replica of `deployment`, JSON-ready.

    Offline: all requests of `offline_trace` (default: the trace's own, without their sessions, as a
    benchmark sends prompts) at once, and at each fixed `concurrency`. Replay: the trace's own times, and
    the same with its gaps times `time_scale`. With `targets` the largest load of this arrival pattern that
    still meets them is searched by compressing or stretching time; the derating factor is its output throughput over the
    offline one. Raises UserError for a load that makes no sense, and for a time scale of 1.
    """
    if len(set(concurrency)) != len(concurrency):
        raise UserError("--concurrency names a number twice")
    for level in concurrency:
        if level < 1:
            raise UserError(f"concurrency={level} must be at least 1")
    if time_scale == 1:
        raise UserError("--time-scale 1 compresses nothing: give another one, e.g. 0.5")
    benchmark = dataclasses.replace(
        trace if offline_trace is None else offline_trace, sessions=None
    )
    # The tracks, and a search of about ten steps.
    load_for(trace, len(concurrency) + 3 + (10 if targets is not None else 0))
    # Of the tracks only: the search for the knee would add one about each speed it tried.
    assumptions: dict[str, None] = {}
    label = ""

    def simulate(name: str, requests: Trace, load: Load, told: bool = False) -> Numbers:
        nonlocal label
        if on_run is not None:
            on_run(name)
        # A fresh one each time: it counts the steps outside what was measured.
        step_model = step_model_for(deployment, profile)
        label = step_model.label
        run = replay(requests, deployment, step_model, load)
        if told:
            assumptions.update(dict.fromkeys(run.assumptions))
        summary = summarize(run)
        numbers = {key: summary[key] for key in KEPT}
        if prices is not None:
            gpus = deployment.gpus
            numbers |= cost_of(prices, deployment.gpu.name, gpus, summary).as_dict()
        return numbers

    def paced(speed: float) -> Numbers:
        scale = 1.0 / speed
        return simulate(
            f"replay at {speed:.3g} times the speed",
            trace,
            Load(time_scale=scale, overlong=overlong, seed=seed),
        )

    at_once = Load(request_rate=math.inf, overlong=overlong, seed=seed)
    tracks: list[dict[str, Any]] = []

    def track(name: str, kind: str, requests: Trace, load: Load) -> Numbers:
        numbers = simulate(name, requests, load, told=True)
        tracks.append({"name": name, "kind": kind, **numbers})
        return numbers

    all_at_once = track("offline, all at once", "offline", benchmark, at_once)
    for level in concurrency:
        closed = dataclasses.replace(at_once, max_concurrency=level)
        track(f"offline, concurrency {level}", "offline", benchmark, closed)
    own = Load(overlong=overlong, seed=seed)
    replayed = track("replay", "replay", trace, own)
    half = dataclasses.replace(own, time_scale=time_scale)
    compressed = track(f"replay, time scale {time_scale:g}", "replay", trace, half)
    derating = None
    if targets is not None:
        lightest = dataclasses.replace(at_once, max_concurrency=1)

        def alone() -> Numbers:
            return simulate("one request at a time", trace, lightest)

        burst = (
            simulate("the trace all at once", trace, at_once)
            if offline_trace is not None or trace.sessions is not None
            else all_at_once
        )
        known = {1.0: replayed, 1 / time_scale: compressed, math.inf: burst}
        derating = _derating(trace, targets, paced, alone, known)
        for entry in tracks:
            if entry["kind"] == "offline":
                entry["derating"] = _ratio(
                    derating["output_throughput"], entry["output_throughput"]
                )
    return {
        "schema": SCHEMA,
        "model": deployment.model.name,
        "gpu": deployment.gpu.name,
        "gpus": deployment.gpus,
        "step_time": label,
        "trace": trace.source.name,
        "offline_trace": None if offline_trace is None else offline_trace.source.name,
        "requests": len(trace),
        "offline_requests": len(benchmark),
        "unfilled_concurrency": [level for level in concurrency if level >= len(benchmark)],
        "tracks": tracks,
        "replay_share_of_offline": _ratio(
            replayed["output_throughput"], all_at_once["output_throughput"]
        ),
        "derating": derating,
        "time_compression": {
            "time_scale": time_scale,
            "values": {key: [replayed[key], compressed[key]] for key in DISTORTED},
            "relative_change": {
                key: None if (r := _ratio(compressed[key], replayed[key])) is None else r - 1
                for key in DISTORTED
            },
        },
        "assumptions": list(assumptions),
    }


def _derating(
    trace: Trace,
    targets: Targets,
    paced: Callable[[float], Numbers],
    alone: Callable[[], Numbers],
    known: dict[float, Numbers],
) -> dict[str, Any]:
    """The largest speed at which `trace` meets `targets`, by bisection, and its throughput.

    `paced(speed)` and `alone()` simulate; `known`: speeds already simulated, with 1 and infinity (all at
    once). Assumes that latency grows with speed.
    """
    tried = dict(known)

    def met(speed: float) -> bool:
        if speed not in tried:
            tried[speed] = paced(speed)
        return targets.met(tried[speed])

    def found(speed: float | None, next_speed: float | None, note: str) -> dict[str, Any]:
        numbers = tried[speed] if speed is not None else {}
        return {
            "targets_ms": {
                "p95_ttft": targets.ttft_p95_ms,
                "p95_tpot": targets.tpot_p95_ms,
            },
            "speed": None if speed == math.inf else speed,
            "first_failing_speed": next_speed,
            "output_throughput": numbers.get("output_throughput"),
            "request_throughput": numbers.get("request_throughput"),
            "note": note,
        }

    if trace.span_s == 0:
        return found(None, None, "the trace has no times of its own: nothing to compress")
    if met(math.inf):
        return found(math.inf, None, "even all at once meets them: so short a trace shows no limit")
    if met(1.0):
        low, high = 1.0, 2.0
        while met(high):
            low, high = high, high * 2
            if high > MAX_SPEED:
                return found(low, None, f"they are met even at {low:g} times the speed")
    else:
        if not targets.met(alone()):
            return found(None, None, "one request at a time already misses them")
        low, high = 0.5, 1.0
        while not met(low):
            low, high = low / 2, low
            if low < 1 / MAX_SPEED:
                return found(None, high, f"they are missed even at {high:.2g} times the speed")
    while high / low > RESOLUTION:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if met(middle) else (low, middle)
    return found(low, high, "")


def _ratio(over: float | None, under: float | None) -> float | None:
    return over / under if over is not None and under else None


def fixed_lengths(trace: Trace, prompt_tokens: int, output_tokens: int) -> Trace:
    """As many requests as `trace` has, all of these lengths, sharing nothing: the synthetic benchmark.

    Raises UserError unless both are at least 1.
    """
    if prompt_tokens < 1 or output_tokens < 1:
        raise UserError(f"lengths {prompt_tokens}/{output_tokens}: both must be at least 1")
    n = len(trace)
    return Trace(
        arrival_ns=np.zeros(n, dtype=np.int64),
        prompt_tokens=np.full(n, prompt_tokens, dtype=np.int64),
        output_tokens=np.full(n, output_tokens, dtype=np.int64),
        source=dataclasses.replace(
            trace.source, name=f"{n} requests of {prompt_tokens}/{output_tokens} tokens", sha256=""
        ),
        assumptions=(
            f"The offline track sends {prompt_tokens} prompt and {output_tokens} output tokens a request.",
        ),
    )


def render(result: Mapping[str, Any]) -> str:
    """`result` of `dual_track` as text for a terminal."""
    tracks = result["tracks"]
    money = next((entry["currency"] for entry in tracks if "currency" in entry), None)
    head = ["", "req/s", "tok/s", "TTFT p95 ms", "TPOT p95 ms", "fragm.", "preempt."]
    head += ["derate"] * (result["derating"] is not None)
    head += [f"{plain(money)}/Mtok out"] * (money is not None)
    rows = [head]
    for entry in tracks:
        row = [
            entry["name"] + (" *" if entry["ended_early"] else ""),
            short(entry["request_throughput"]),
            number(entry["output_throughput"], 0),
            number(entry["p95_ttft_ms"], 0),
            number(entry["p95_tpot_ms"], 1),
            percent(entry["kv_fragmentation_mean"]),
            number(entry["preemptions"]),
        ]
        if result["derating"] is not None:
            factor = entry.get("derating")
            row.append("" if factor is None else f"{factor:.2f}")
        if money is not None:
            row.append(short(entry["cost_per_million_output_tokens"]))
        rows.append(row)
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = [
        row[0].ljust(widths[0])
        + "".join("  " + cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        for row in rows
    ]
    lines += ["", *_sentences(result)]
    lines += [f"* ended early: {plain(e['ended_early'])}" for e in tracks if e["ended_early"]]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _sentences(result: Mapping[str, Any]) -> list[str]:
    share = percent(result["replay_share_of_offline"])
    said = [f"At its own pace the trace uses {share} of the offline throughput (all at once)."]
    derating = result["derating"]
    if derating is not None:
        limits = derating["targets_ms"]
        within = f"TTFT p95 <= {limits['p95_ttft']:g} ms and TPOT p95 <= {limits['p95_tpot']:g} ms"
        if derating["output_throughput"] is None:
            said.append(f"No derating factor for {within}: {derating['note']}.")
        elif derating["speed"] is None:
            said.append(f"{within}: {derating['note']}.")
        else:
            bound = derating["first_failing_speed"]
            upto = f" ({bound:.3g} times misses them)" if bound else f" ({derating['note']})"
            said.append(
                f"Within {within} this trace can be played {derating['speed']:.3g} times as fast{upto}: "
                f"{number(derating['output_throughput'], 0)} tok/s. Column derate: that over the offline figure."
            )
    factors = [
        f"{entry['derating']:.2f} ({entry['name'].removeprefix('offline, ')})"
        for entry in result["tracks"]
        if entry.get("derating") is not None
    ]
    if factors:
        said.append(
            f"Derating factor of this trace: {', '.join(factors)}. The rule of thumb says {RULE_OF_THUMB:g}."
        )
    unfilled = result["unfilled_concurrency"]
    if unfilled:
        said.append(
            f"The offline track has only {result['offline_requests']:,} requests: concurrency "
            f"{', '.join(map(str, unfilled))} holds them all at once, and does not show a full engine. Neither "
            "does the derating factor over it: send more requests."
        )
    said.append(_distortion(result["time_compression"]))
    return said


def _distortion(compression: Mapping[str, Any]) -> str:
    """What playing the trace faster (or slower) did to it, in words."""
    parts = []
    for key, word, form in (
        ("median_ttft_ms", "median TTFT", "{:,.0f} -> {:,.0f} ms"),
        ("p95_ttft_ms", "p95", "{:,.0f} -> {:,.0f} ms"),
        ("p99_ttft_ms", "p99", "{:,.0f} -> {:,.0f} ms"),
        ("p95_tpot_ms", "TPOT p95", "{:,.1f} -> {:,.1f} ms"),
        ("output_throughput", "throughput", "{:,.0f} -> {:,.0f} tok/s"),
        ("kv_fragmentation_mean", "fragmentation", "{:.1%} -> {:.1%}"),
        ("preemptions", "preemptions", "{:,} -> {:,}"),
    ):
        before, after = compression["values"][key]
        if before is None or after is None or before == after:
            continue
        change = compression["relative_change"][key]
        share = "" if change is None else f" ({change * 100:+.0f} %)"
        parts.append(f"{word} {form.format(before, after)}{share}")
    scale = compression["time_scale"]
    verb = "Compressing" if scale < 1 else "Stretching"
    return f"{verb} time (--time-scale {scale:g}): {', '.join(parts) or 'nothing changes'}."
