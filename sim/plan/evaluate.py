"""One deployment at one size against the objectives: simulated with step times at their slow end."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vsim.errors import UserError
from vsim.models.load import LoadedStepModel
from vsim.models.uncertainty import slowed, uncertainty_of
from vsim.sim.deployment import Deployment
from vsim.sim.explain import explain_tail
from vsim.sim.fast.several import load_for
from vsim.sim.front_end import TOO_LONG
from vsim.sim.plan.slo import Slo
from vsim.sim.profile_defaults import resolve_with_profile
from vsim.sim.replay import Load, replay, step_model_for
from vsim.sim.run import FINISHED, REJECTED, Run
from vsim.sim.summary import summarize
from vsim.sim.sweep_space import Point
from vsim.traces.arrivals import select
from vsim.traces.trace import Trace

PROBE_REQUESTS = 400
LONE_REQUESTS = 100
# What a part of the tail's latency says about the deployment (sim/explain.PARTS).
BINDS = {
    "wait_kv": "KV cache",
    "wait_preempting": "KV cache",
    "preempted": "KV cache",
    "wait_seats": "max_num_seqs",
    "wait_budget": "token budget",
    "fleet": "fleet",
}
COMPUTE = "compute"
# Numbers of a summary that a plan keeps of each simulation.
KEPT = (
    "mean_ttft_ms",
    "p95_ttft_ms",
    "p95_tpot_ms",
    "p95_e2el_ms",
    "request_throughput",
    "output_throughput",
    "preemptions",
    "kv_usage_peak",
    # What a bill counts:
    "duration",
    "total_input_tokens",
    "total_output_tokens",
)


@dataclass(frozen=True, slots=True)
class Question:
    """What every deployment is asked: objectives, load, and how pessimistic to be about step times.

    `pessimism`: standard deviations of the step model's shared error by which steps are slowed down; 1.645
    is the upper end of a 90 % interval.
    """

    slos: tuple[Slo, ...]
    goodput: Mapping[str, float]  # limits in ms, for the share of good requests
    load: Load
    pessimism: float = 1.645

    @property
    def percentiles(self) -> tuple[float, ...]:
        asked = {slo.percentile for slo in self.slos if slo.percentile is not None}
        return tuple(sorted(asked | {95.0}))


@dataclass(frozen=True, slots=True)
class Evaluation:
    """`replicas` of one candidate under the question. `ratios`: each objective's number over its limit."""

    replicas: int
    values: tuple[float | None, ...]
    ratios: tuple[float, ...]
    binds: str
    numbers: Mapping[str, float | None]
    simulated: int  # requests
    assumptions: tuple[str, ...] = ()

    @property
    def worst(self) -> float:
        return max(self.ratios)

    @property
    def met(self) -> bool:
        return self.worst <= 1.0


@dataclass(frozen=True, slots=True)
class Probe:
    """What one replica of a candidate is and can do; `refused` says why there is none."""

    gpus: int = 0
    capacity_rps: float = 0.0  # requests per second when all wait at once, steps at their slow end
    most_rps: float = 0.0  # the same, at its best: without the drain in which the longest finish
    label: str = ""
    sd: float = 0.0
    alone: float = 0.0  # worst median over limit, of latencies with one request at a time
    alone_slo: str = ""
    refused: str | None = None
    simulated: int = 0
    telling: bool = True  # the sample lacks nothing that would make the whole trace faster


def _resolved(point: Point) -> tuple[Deployment, str | None, dict[str, Any]]:
    """The deployment that `point` names, its profile, and the flags as they were taken."""
    given = {name: value for name, value in point.items() if value is not None}
    profile = given.pop("profile", None)
    for name in ("route", "replicas"):
        given.pop(name, None)
    named = None if profile is None else str(profile)
    model, gpu = str(given.pop("model")), str(given.pop("gpu"))
    deployment, taken = resolve_with_profile(model, gpu, named, given)
    return deployment, named, taken


def engine_of(point: Point) -> tuple[Deployment, LoadedStepModel]:
    """The deployment that `point` names, and its step model. Raises UserError as vLLM would refuse it."""
    deployment, profile, _ = _resolved(point)
    return deployment, step_model_for(deployment, profile)


def as_simulated(point: Point) -> Point:
    """`point` with the flags that its profile decided where the user didn't: those belong on the line to run."""
    return {**point, **_resolved(point)[2]}


def at_slow_end(model: LoadedStepModel, pessimism: float) -> LoadedStepModel:
    """`model` with steps as long as its own error makes possible."""
    if not pessimism:
        return model
    return dataclasses.replace(
        model, model=slowed(model.model, uncertainty_of(model.calibration), pessimism)
    )


def probe(trace: Trace, point: Point, question: Question) -> Probe:
    """What `point`'s engine gets done when a sample of the trace waits all at once.

    And what its latencies are when they come one by one: no number of replicas makes them shorter. The
    sample is every k-th request, without sessions. Where the whole trace shares prefixes or has sessions, the
    sample is not `telling`: it only orders the search and sizes the first guess. Else a margin of it also
    rules out what is hopeless.
    """
    load_for(trace, 20)
    try:
        deployment, model = engine_of(point)
        sample, few = _sample(trace, PROBE_REQUESTS), _sample(trace, LONE_REQUESTS)
        load = dataclasses.replace(question.load, request_rate=math.inf, time_scale=1.0)
        slow = at_slow_end(model, question.pessimism)
        run = replay(sample, deployment, slow, load)
        one = replay(few, deployment, slow, dataclasses.replace(load, max_concurrency=1))
    except UserError as error:
        return Probe(refused=str(error))
    seconds = run.end_ns / 1e9
    simulated = len(sample) + len(few)
    done = int((run.requests["status"] != REJECTED).sum())
    if run.ended_early or not seconds or not done:
        return Probe(
            refused=run.ended_early or "it takes none of the requests", simulated=simulated
        )
    ends_s = np.sort(run.requests["finish_ns"][run.requests["status"] == FINISHED]) / 1e9
    half = len(ends_s) // 2
    rates = np.arange(half + 1, len(ends_s) + 1) / np.maximum(ends_s[half:], 1e-9)
    alone, slo_text = _alone(summarize(one, (50.0,)), question)
    return Probe(
        gpus=deployment.gpus,
        capacity_rps=done / seconds,
        most_rps=max(done / seconds, float(rates.max(initial=0.0))),
        label=model.label,
        sd=uncertainty_of(model.calibration).scale_sd,
        alone=alone,
        alone_slo=slo_text,
        simulated=simulated,
        telling=not _shares(trace),
    )


def _sample(trace: Trace, requests: int) -> Trace:
    rows = np.linspace(0, len(trace) - 1, min(len(trace), requests)).astype(np.int64)
    sample = select(trace, np.unique(rows), "sampled for a first look")
    return dataclasses.replace(sample, sessions=None)


def _alone(summary: Mapping[str, Any], question: Question) -> tuple[float, str]:
    """(median over limit, objective) where that is largest: a small sample knows its median, not its tail."""
    floors = [(0.0, "")]
    for slo in question.slos:
        median = None if slo.latency is None else summary.get(f"median_{slo.latency}_ms")
        if median is not None and slo.limit > 0 and (slo.percentile or 50.0) >= 50:
            floors.append((float(median) / slo.limit, slo.text))
    return max(floors)


def _shares(trace: Trace) -> bool:
    """Prompts that repeat others', or turns that wait for turns: what a sample makes look slower than it is."""
    return trace.sessions is not None or (
        trace.prefix_ids is not None and len(trace.prefix_ids) > 0
    )


def evaluate(trace: Trace, point: Point, replicas: int, question: Question) -> Evaluation:
    """Simulate the whole trace on `replicas` of `point`. Raises UserError as `replay` does."""
    load_for(trace, 20)
    deployment, model = engine_of(point)
    run = replay(
        trace,
        deployment,
        at_slow_end(model, question.pessimism),
        question.load,
        replicas=replicas,
        route=str(point.get("route") or "round-robin"),
    )
    summary = summarize(run, question.percentiles, question.goodput or None)
    summary["error_rate"] = _error_rate(run)
    ratios = tuple(slo.ratio(summary) for slo in question.slos)
    if run.ended_early:
        ratios = (math.inf,) * len(ratios)
    return Evaluation(
        replicas=replicas,
        values=tuple(slo.value(summary) for slo in question.slos),
        ratios=ratios,
        binds=_binds(run, question.slos[ratios.index(max(ratios))], summary),
        numbers={name: summary.get(name) for name in KEPT},
        simulated=len(trace),
        assumptions=tuple(run.assumptions),
    )


def _error_rate(run: Run) -> float:
    """Share of requests that failed, those aside that are too long for the model anywhere."""
    failed = run.requests["status"] != 0
    if TOO_LONG in run.reasons:
        failed = failed & (run.requests["reason"] != run.reasons.index(TOO_LONG))
    return float(failed.mean())


def _binds(run: Run, slo: Slo, summary: Mapping[str, Any]) -> str:
    """What the tail of the tightest objective spends its time on, in a word or two."""
    if run.ended_early:
        return run.ended_early
    by = "ttft" if slo.latency == "ttft" else "e2el"
    try:
        parts = explain_tail(run, slo.percentile or 90.0, by).parts_ns
    except UserError:
        return "errors"
    if slo.latency in ("tpot", "itl"):
        parts = {key: ns for key, ns in parts.items() if key.startswith(("decode", "preempted"))}
    return BINDS.get(max(parts, key=lambda key: parts[key]), COMPUTE)


# Settings that are no flag of `vllm serve`.
NO_SERVE_FLAGS = ("gpu", "profile", "route", "replicas", "usage", "engine", "engine_version")


def serve_line(point: Sequence[tuple[str, Any]] | Mapping[str, Any]) -> str:
    """`vllm serve` with the flags that `point` sets, ready for a shell; V0 is asked for as 0.8.5 wants it."""
    import shlex

    settings = dict(point)
    words = ["vllm", "serve", str(settings.pop("model"))]
    is_v0 = settings.get("engine") == "v0"
    for name in NO_SERVE_FLAGS:
        settings.pop(name, None)
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", str(value)]
    return "VLLM_USE_V1=0 " * is_v0 + shlex.join(words)
