"""Spot checks: a slice of a trace on the real engine, beside its prediction, under one clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from vsim.calibrate.design import Limits, serving_trace
from vsim.calibrate.ensemble import Band
from vsim.errors import UserError
from vsim.models.artifact import Calibration
from vsim.models.engine_steps import for_other_model
from vsim.models.model_spec import ModelSpec, spec_from_config
from vsim.models.step import StepModel
from vsim.sim.config import SchedulerConfig
from vsim.sim.engine import simulate
from vsim.sim.metrics import latencies
from vsim.sim.run import FINISHED, Run
from vsim.traces.trace import Trace, TraceSource

STATISTICS = ("mean", "p50", "p90", "p95", "p99")
TOLERANCE_PCT = 5.0
QUIET_SPREAD_PCT = 5.0  # of mean TPOT: pooled over thousands of steps, it hardly moves by itself


@dataclass(frozen=True, slots=True)
class Cell:
    """One number, predicted and measured. Latencies in ms, rates per second."""

    metric: str
    statistic: str
    predicted: float
    measured: tuple[float, ...]  # one a repeat
    interval: tuple[float, float] | None = None  # of the prediction, 90 %

    @property
    def median(self) -> float:
        return float(np.median(self.measured))

    @property
    def spread_pct(self) -> float:
        """Highest minus lowest repeat, in % of their median."""
        return (max(self.measured) - min(self.measured)) / self.median * 100 if self.median else 0.0

    @property
    def error_pct(self) -> float:
        return (self.predicted / self.median - 1) * 100 if self.median else 0.0

    @property
    def inside_noise(self) -> bool:
        """Does the prediction lie among the repeats themselves?"""
        return min(self.measured) <= self.predicted <= max(self.measured)

    @property
    def inside_interval(self) -> bool | None:
        """Does the prediction's own interval hold what was measured?"""
        if self.interval is None:
            return None
        return self.interval[0] <= self.median <= self.interval[1]

    @property
    def verdict(self) -> str:
        if self.inside_noise:
            return "inside the noise"
        return "within 5 %" if abs(self.error_pct) <= TOLERANCE_PCT else "off"

    def to_json(self) -> dict[str, Any]:
        return {
            "metric": self.metric,
            "statistic": self.statistic,
            "predicted": self.predicted,
            "measured": list(self.measured),
            "error_pct": self.error_pct,
            "spread_pct": self.spread_pct,
            "interval": None if self.interval is None else list(self.interval),
            "inside_interval": self.inside_interval,
            "verdict": self.verdict,
        }


@dataclass(slots=True)
class SpotCheck:
    """A finished comparison. `complaints`: sentences about the measurement itself; none is a good sign."""

    cells: list[Cell]
    complaints: list[str]
    step_error: dict[str, float] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """mean to p95 within 5 % or inside the noise, and nothing wrong with the measurement."""
        return not self.complaints and all(
            cell.verdict != "off" for cell in self.cells if cell.statistic != "p99"
        )

    def to_json(self) -> dict[str, Any]:
        error: dict[str, dict[str, float]] = {}
        for cell in self.cells:
            error.setdefault(cell.metric, {})[cell.statistic] = round(cell.error_pct, 4)
        held = [cell.inside_interval for cell in self.cells if cell.inside_interval is not None]
        return {
            "schema": "vsim/spot-check/1",
            "passed": self.passed,
            "error_pct": error,
            "interval_coverage": round(sum(held) / len(held), 4) if held else None,
            "cells": [cell.to_json() for cell in self.cells],
            "step_error": self.step_error,
            "complaints": self.complaints,
            "facts": self.facts,
        }


def scheduler_config(started: dict[str, Any], vllm_version: str) -> SchedulerConfig:
    """The simulated scheduler's configuration, from what the real engine says of itself."""
    return SchedulerConfig(
        engine="v1",
        engine_version=vllm_version.split("+", maxsplit=1)[0],
        block_size=started["block_size"],
        num_gpu_blocks=started["num_gpu_blocks"],
        max_num_seqs=started["max_num_seqs"],
        max_num_batched_tokens=started["max_num_batched_tokens"],
        max_model_len=started["max_model_len"],
        enable_prefix_caching=started["enable_prefix_caching"],
        enable_chunked_prefill=started["enable_chunked_prefill"],
        policy=started["policy"],
        scheduler_reserve_full_isl=started["scheduler_reserve_full_isl"],
        watermark=started["watermark"],
        async_scheduling=started["async_scheduling"],
        v2_model_runner=started["v2_model_runner"],
    )


def check_profile(calibration: Calibration, hello: dict[str, Any], started: dict[str, Any]) -> None:
    """Refuse a profile that was not measured on this device, engine version and precision."""
    says = calibration.provenance
    here = {
        "gpu_name": hello["device"],
        "vllm_version": hello["vllm_version"],
        "dtype": started["dtype"],
        "quantization": started["quantization"],
        "kv_cache_dtype": started["kv_cache_dtype"],
        "tensor_parallel_size": started["tensor_parallel_size"],
        "enforce_eager": started["enforce_eager"],
    }
    for name, value in here.items():
        if name in says and _told(name, says[name]) != _told(name, value):
            raise UserError(
                f"the profile was measured with {name}={says[name]}, the engine here has {name}={value}: "
                "calibrate on this engine, or check another profile"
            )


def _told(name: str, value: Any) -> Any:
    """A setting as it is compared: builds of one release are alike, and a cache in the model's own precision is
    called "auto" or by its name."""
    if name == "vllm_version":
        return str(value).split("+")[0]
    if name == "kv_cache_dtype" and not str(value).startswith("fp8"):
        return "auto"
    return value


def transferred(
    calibration: Calibration, other: ModelSpec, kernels: dict[str, Any] | None = None
) -> Calibration:
    """The profile carried over to a model of another shape, and labelled so.

    `kernels`: the other model's matrix products, timed on this device.

    Raises UserError if it does not say which model it was measured with, or is of another kind.
    """
    config = calibration.provenance.get("model_config")
    if calibration.kind != "engine-steps" or not isinstance(config, dict):
        raise UserError(
            "only a profile that `vsim calibrate` wrote can be carried over to another model"
        )
    measured = spec_from_config(config, str(calibration.provenance.get("model", "model")))
    if measured.moe or other.moe or measured.mla or other.mla:
        raise UserError("a profile can be carried over between dense models only (no MoE, no MLA)")
    how = "scaled" if kernels is None else "carried over by its timed matrix products"
    note = f"step times were measured with {measured.name} and {how} to {other.name}: an estimate"
    said = calibration.provenance.get("assumptions", ())
    return replace(
        calibration,
        params=for_other_model(calibration.params, measured, other, kernels),
        provenance={
            **calibration.provenance,
            "label": f"{calibration.label}, scaled from {measured.name}",
            "model": other.name,
            "carried_over_from": measured.name,
            "carried_over_by": "scaling" if kernels is None else "timed matrix products",
            "assumptions": [*said, note],
        },
    )


def random_trace(limits: Limits, requests: int, rate_per_s: float, seed: int) -> Trace:
    """A reproducible serving load that fits the engine: Poisson arrivals, lognormal lengths."""
    rows = serving_trace(limits, requests, rate_per_s, seed)
    return Trace(
        arrival_ns=np.array([row[0] for row in rows], dtype=np.int64),
        prompt_tokens=np.array([row[1] for row in rows], dtype=np.int64),
        output_tokens=np.array([row[2] for row in rows], dtype=np.int64),
        source=TraceSource(name=f"random, seed {seed}", format="generated"),
        assumptions=(f"{requests} random requests at {rate_per_s:.4g} per second, seed {seed}",),
    )


def rate_for_load(
    limits: Limits, requests: int, seed: int, load: float, config: SchedulerConfig, model: StepModel
) -> float:
    """Requests per second that keep the engine busy for `load` of the time, by its prediction.

    Capacity is the rate at which the engine gets through the same requests when all wait at once.
    """
    at_once = random_trace(limits, requests, 1e9, seed)
    run = simulate(at_once, config, model)
    if not run.end_ns:
        raise UserError("the prediction ended before it began: nothing could be scheduled")
    return load * requests / (run.end_ns / 1e9)


def fitting(trace: Trace, limits: Limits) -> tuple[Trace, list[str]]:
    """The requests of `trace` that the engine can take, and sentences about those left out."""
    from vsim.traces.arrivals import select

    fits = (trace.prompt_tokens + trace.output_tokens <= limits.max_model_len) & (
        trace.prompt_tokens + trace.output_tokens <= limits.kv_tokens
    )
    said = []
    if not fits.all():
        said.append(
            f"{int((~fits).sum())} of {len(trace)} requests need more than max_model_len="
            f"{limits.max_model_len} or the KV cache's {limits.kv_tokens} tokens: left out"
        )
        trace = select(trace, np.flatnonzero(fits), "too long for the spot check's engine")
    if trace.sessions is not None:
        trace = replace(trace, sessions=None)
        said.append(
            "turns of a session are sent at the trace's own times, not after their predecessor"
        )
    if not len(trace):
        raise UserError(
            "no request of the trace fits the engine: raise --max-model-len or shorten them"
        )
    return trace, said


def serve_command(trace: Trace, clock: str) -> dict[str, Any]:
    """`trace` as the recorder takes it."""
    requests = [[r.arrival_ns, r.prompt_tokens, r.output_tokens, r.priority] for r in trace]
    command: dict[str, Any] = {"requests": requests, "clock": clock}
    if trace.prefix_ids is not None:
        command["prefix"] = [list(r.prefix_ids) for r in trace]
        command["prefix_block_tokens"] = trace.prefix_block_tokens
    return command


# --- comparing -------------------------------------------------------------------------------------------


def numbers(run: Run) -> dict[tuple[str, str], float]:
    """(metric, statistic) -> value: latencies in ms by the client's clock, throughput per second."""
    latency = latencies(run)
    found: dict[tuple[str, str], float] = {}
    for metric, values in (
        ("ttft", latency.ttft_ns),
        ("tpot", latency.tpot_ns),
        ("e2e", latency.e2el_ns),
    ):
        if not len(values):
            continue
        in_ms = np.asarray(values, dtype=float) / 1e6
        found[metric, "mean"] = float(in_ms.mean())
        for statistic in STATISTICS[1:]:
            found[metric, statistic] = float(np.percentile(in_ms, float(statistic[1:])))
    done = run.requests["status"] == FINISHED
    span_s = (int(run.requests["finish_ns"].max()) - int(run.requests["sent_ns"].min())) / 1e9
    if span_s > 0:
        found["request_throughput", "mean"] = float(done.sum()) / span_s
        found["output_throughput", "mean"] = (
            float(run.requests["output_tokens"][done].sum()) / span_s
        )
    return found


def spread_doubt(cells: Sequence[Cell]) -> list[str]:
    """A sentence if the repeats lie further apart than a quiet machine's would."""
    for cell in cells:
        if (cell.metric, cell.statistic) == ("tpot", "mean") and cell.spread_pct > QUIET_SPREAD_PCT:
            return [
                f"mean TPOT differs by {cell.spread_pct:.1f} % between the repeats, where a quiet machine "
                f"keeps it within {QUIET_SPREAD_PCT:g} %: the spread says little about the engine"
            ]
    return []


def compare(predicted: Mapping[tuple[str, str], Band], measured: Sequence[Run]) -> list[Cell]:
    """Each number of the prediction beside those of the repeats."""
    theirs = [numbers(run) for run in measured]
    return [
        Cell(*key, band.median, tuple(one[key] for one in theirs), (band.low, band.high))
        for key, band in predicted.items()
        if all(key in one for one in theirs)
    ]
