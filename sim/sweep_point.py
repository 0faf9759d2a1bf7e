"""One point of a sweep: its settings to a simulated run to one row of numbers."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from vsim import __version__
from vsim.errors import UserError
from vsim.models.load import LoadedStepModel, read_profile
from vsim.models.model_spec import load_model
from vsim.sim.deployment import Deployment
from vsim.sim.profile_defaults import resolve_with_profile
from vsim.sim.replay import (
    Load,
    replay,
    step_model_for,
    with_preemption,
)
from vsim.sim.run import Run
from vsim.sim.summary import summarize
from vsim.sim.sweep_space import Point
from vsim.traces.trace import Trace

DONE, REFUSED = "done", "refused"
_PREEMPTION = ("swap_above_tokens", "victim_rule", "num_cpu_blocks", "pcie_gbps")
_LOAD_FIELDS = tuple(field.name for field in dataclasses.fields(Load))
# A summary's own words for settings of the load, and what is no number.
_NOT_NUMBERS = {
    "backend",
    "endpoint_type",
    "date",
    "label",
    "model_id",
    "tokenizer_id",
    "request_rate",
    "burstiness",
    "max_concurrency",
    "schema",
    "origin",
    "percentiles",
    "goodput_slo_ms",
    "rejected_reasons",
    "rtfx",
    "ended_early",
    "assumptions",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """What every point of a sweep is asked for: `summarize`'s percentiles, and goodput limits in ms."""

    percentiles: tuple[float, ...] = (50.0, 90.0, 95.0, 99.0)
    goodput: Mapping[str, float] = dataclasses.field(default_factory=dict)


def simulate_point(trace: Trace, point: Point) -> tuple[Run, Deployment, LoadedStepModel]:
    """The run of `trace` under `point`'s settings (names: `sweep_space.dimensions`).

    One replica is `sim.replay.replay` itself; several stand behind `route`. Raises UserError for what vLLM,
    or the load, would refuse.
    """
    given = {name: value for name, value in point.items() if value is not None}
    replicas = int(given.pop("replicas", 1))
    route = str(given.pop("route", "round-robin"))
    profile = given.pop("profile", None)
    load = Load(**{name: given.pop(name) for name in _LOAD_FIELDS if name in given})  # type: ignore[arg-type]
    model, gpu = str(given.pop("model")), str(given.pop("gpu"))
    overlap = bool(given.pop("overlap_swaps", False))
    beyond = {name: given.pop(name) for name in _PREEMPTION if name in given}
    named = None if profile is None else str(profile)
    resolved, _ = resolve_with_profile(model, gpu, named, given)
    deployment = with_preemption(resolved, **beyond)  # type: ignore[arg-type]
    step_model = step_model_for(deployment, named)
    run = replay(
        trace,
        deployment,
        step_model,
        load,
        overlap_swaps=overlap,
        replicas=replicas,
        route=route,
    )
    return run, deployment, step_model


def run_point(trace: Trace, point: Point, asked: Asked) -> dict[str, Any]:
    """One point's result, JSON-ready: status, reason, GPUs, label of the step times, the summary's numbers.

    A point that vLLM would refuse is a result too: status "refused" with the sentence as reason.
    """
    try:
        run, deployment, step_model = simulate_point(trace, point)
        summary = summarize(run, asked.percentiles, asked.goodput)
    except UserError as error:
        return {"status": REFUSED, "reason": str(error)}
    return {
        "status": DONE,
        "reason": None,
        "gpus": deployment.gpus * int(point.get("replicas") or 1),
        "step_time": step_model.label,
        "ended_early": run.ended_early,
        "assumptions": list(run.assumptions),
        "numbers": numbers_of(summary),
    }


def numbers_of(summary: Mapping[str, Any]) -> dict[str, Any]:
    """What a table keeps of a summary: its numbers, and the counts of outcomes as `requests_finished`, …"""
    numbers = {name: value for name, value in summary.items() if name not in _NOT_NUMBERS}
    for name, count in numbers.pop("status_counts").items():
        numbers[f"requests_{name}"] = count
    return numbers


def trace_sha256(trace: Trace) -> str:
    """Hash of all that a simulation reads of `trace`: the file's own hash would miss how it was read."""
    digest = hashlib.sha256()

    def add(name: str, value: Any) -> None:
        if isinstance(value, np.ndarray):
            digest.update(f"{name}:{value.dtype.str}:{value.shape}:".encode())
            digest.update(np.ascontiguousarray(value).tobytes())
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            for field in dataclasses.fields(value):
                add(f"{name}.{field.name}", getattr(value, field.name))
        else:
            digest.update(f"{name}={value!r};".encode())

    add("trace", trace)
    return digest.hexdigest()


def point_key(point: Point, trace_hash: str, asked: Asked) -> str:
    """Identity of a point's work: settings, what they name, trace, what is asked, version of vsim.

    Points with one key have one result: a route between one replica is no choice.
    """
    work = {name: value for name, value in point.items() if value is not None}
    if work.get("replicas", 1) == 1:
        work.pop("replicas", None)
        work.pop("route", None)
    profile = work.get("profile")
    told = {
        "point": work,
        # A folder or a profile of the user's may hold something else tomorrow.
        "model": _model_says(str(point["model"])),
        "profile": None if profile is None else _profile_says(str(profile)),
        "trace": trace_hash,
        "percentiles": list(asked.percentiles),
        "goodput": dict(asked.goodput),
        "vsim": __version__,
    }
    text = json.dumps(told, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


@functools.lru_cache
def _model_says(name: str) -> str:
    return repr(load_model(name))


@functools.lru_cache
def _profile_says(name: str) -> str:
    return repr(read_profile(name)[1])
