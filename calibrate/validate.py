"""Predicted against measured: the error of every latency cell, per request, and over the run."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from vsim.calibrate.case import Case
from vsim.calibrate.fit import Fit, fit_first
from vsim.calibrate.predict import predict
from vsim.errors import UserError
from vsim.models.artifact import Calibration
from vsim.models.correction import CorrectedStepModel
from vsim.models.load import LoadedStepModel
from vsim.models.step import StepModel
from vsim.models.uncertainty import deviations, drawn, uncertainty_of
from vsim.sim.lockstep import DUMMY, LockstepRun

FloatArray = npt.NDArray[np.float64]

SCHEMA = "vsim/validation/1"
METRICS = ("ttft", "tpot", "e2e")
CELLS = ("mean", "p50", "p90", "p95", "p99")
# Between the client's send and the engine's inbox, where the case can't teach it. In process (AsyncLLM) it
# is below 1 ms in both handed runs; over HTTP about 5-7 ms (docs/validation.md).
FRONTEND_S = {"http": 6e-3, "in-process": 0.0}


@dataclass(frozen=True, slots=True)
class Distance:
    """How one latency of the scored requests differs. Percentages are (predicted - measured) / measured."""

    measured_s: dict[str, float]
    predicted_s: dict[str, float]
    error_pct: dict[str, float]
    per_request_pct: dict[str, float]  # mean, median and p90 of |error| by request
    ks: float  # largest distance between the two distribution functions, 0..1


@dataclass(frozen=True, slots=True)
class Validation:
    """The result for one case; `as_json` is what `vsim validate --json` writes."""

    case: str
    fit: str  # "none" or "first:N"
    scored: int
    unscored: int  # predicted as rejected or unfinished
    metrics: dict[str, Distance]
    # output tokens per second: measured, predicted, error_pct; low and high of the 90 % interval, if asked
    throughput: dict[str, float]
    peer: dict[
        str, dict[str, float]
    ]  # the peer's error on the same requests, same clock, in percent
    peer_published: dict[str, dict[str, float]]  # as published, its own definition
    step_model: dict[str, Any]
    correction: dict[str, Any] = field(default_factory=dict)
    preemptions: int = 0
    assumptions: tuple[str, ...] = ()
    # metric -> cell -> (low, high) seconds of the 90 % interval; empty where none were asked for
    intervals: dict[str, dict[str, tuple[float, float]]] = field(default_factory=dict)
    coverage: float | None = None  # share of the cells whose measured value lies in its interval

    def as_json(self) -> dict[str, Any]:
        metrics = {name: asdict(distance) for name, distance in self.metrics.items()}
        return {
            "schema": SCHEMA,
            "case": self.case,
            "fit": self.fit,
            "scored_requests": self.scored,
            "unscored_requests": self.unscored,
            "error_pct": {name: d["error_pct"] for name, d in metrics.items()}
            | {"throughput": {"mean": self.throughput["error_pct"]}},
            "peer_error_pct": self.peer,
            "peer_published_error_pct": self.peer_published,
            "measured_s": {name: d["measured_s"] for name, d in metrics.items()},
            "predicted_s": {name: d["predicted_s"] for name, d in metrics.items()},
            "per_request_error_pct": {name: d["per_request_pct"] for name, d in metrics.items()},
            "ks_distance": {name: d["ks"] for name, d in metrics.items()},
            "output_throughput": self.throughput,
            "interval_90_s": self.intervals,
            "interval_coverage": self.coverage,
            "preemptions": self.preemptions,
            "step_model": self.step_model,
            "correction": self.correction,
            "assumptions": list(self.assumptions),
        }

    def text(self) -> str:
        """The JSON document as text."""
        return json.dumps(_finite(self.as_json()), indent=1) + "\n"


@dataclass(frozen=True, slots=True)
class Outcome:
    """A validation and, with a fit, the corrected profile."""

    validation: Validation
    calibration: Calibration


def parse_fit(text: str) -> int:
    """ "none" -> 0, "first:N" -> N. Raises UserError for anything else."""
    if text == "none":
        return 0
    head, _, number = text.partition(":")
    if head == "first" and number.isascii() and number.isdigit() and int(number) > 0:
        return int(number)
    raise UserError(
        f"--fit {text}: must be none or first:N with N from 1 on, for example first:100"
    )


def validate(
    case: Case,
    loaded: LoadedStepModel,
    visible: int,
    progress: Callable[[str], None] = lambda _: None,
    draws: int = 0,
    seed: int = 0,
) -> Outcome:
    """Predict `case` and score it; with `visible` > 0 learn a correction from its first requests first.

    Learning uses requests 0 .. visible - 1, scoring the others. With `draws` > 1 each cell gets a 90 %
    interval from as many predictions with step models that are wrong by as much as this one may be.
    Raises UserError if no request is left to score.
    """
    n = len(case.trace)
    if visible >= n:
        raise UserError(f"--fit first:{visible} leaves none of {n} requests to score")
    if visible and not np.isfinite(case.measured.first_token_s[:visible]).all():
        raise UserError("measured.jsonl has no arrival_s: --fit needs the clock of each request")
    frontend_s, said = _frontend(case)
    calibration, model = loaded.calibration, loaded.model
    fit: Fit | None = None
    if visible:
        fit = fit_first(case, loaded.model, visible, frontend_s, calibration.kind, progress)
        frontend_s = fit.frontend_s
        calibration = corrected(calibration, fit, case)
        model = CorrectedStepModel(loaded.model, fit.coefficients)
    progress("predicting")
    counted = LoadedStepModel(model, calibration, loaded.name)
    validation = score(case, counted, frontend_s, visible, fit, said, progress, draws, seed)
    return Outcome(validation, calibration)


def score(
    case: Case,
    counted: LoadedStepModel,
    frontend_s: float,
    visible: int,
    fit: Fit | None,
    said: Sequence[str] = (),
    progress: Callable[[str], None] = lambda _: None,
    draws: int = 0,
    seed: int = 0,
) -> Validation:
    """How far a prediction with the step model `counted` is off, over the requests from `visible` on."""
    n = len(case.trace)
    model, calibration = counted.model, counted.calibration
    run = predict(case, counted, frontend_s)
    mask = np.zeros(n, dtype=bool)
    mask[visible:] = True
    served = run.finish_ns >= 0
    intervals = _intervals(case, model, calibration, frontend_s, mask, draws, seed, progress)
    metrics = _distances(case, run, mask & served)
    throughput = _throughput(case, run, mask & served)
    for low, high in intervals.pop("throughput", {}).values():
        throughput |= {"low": low, "high": high}
    assumptions = [*case.assumptions, *said, *counted.assumptions]
    if case.ranks > 1:
        how = "step together" if case.model.moe else "run free of each other"
        assumptions.append(
            f"{case.ranks} data-parallel ranks {how}; requests go to the shortest queue, as vLLM's own "
            "balancer sends them"
        )
    if not case.scheduler.async_scheduling and not model.host_seconds(DUMMY):
        assumptions.append(
            "scheduling is synchronous: the CPU's part of each step adds to the device's, and the step "
            "model has none; predictions are too fast by it (--fit learns it)"
        )
    if case.values_not_recorded:
        assumptions.append(f"not recorded in the run: {', '.join(case.values_not_recorded)}")
    if run.ended_early:
        assumptions.append(f"the prediction {run.ended_early}")
    return Validation(
        case=case.name,
        fit=f"first:{visible}" if visible else "none",
        scored=int((mask & served).sum()),
        unscored=int((mask & ~served).sum()),
        metrics=metrics,
        intervals=intervals,
        coverage=_coverage(metrics, intervals, throughput),
        throughput=throughput,
        peer=_peer(case, mask),
        peer_published=_peer_published(case),
        step_model=counted.provenance,
        correction=_correction(fit),
        preemptions=int(run.preemptions.sum()),
        assumptions=tuple(dict.fromkeys(assumptions)),
    )


def corrected(prior: Calibration, fit: Fit, case: Case) -> Calibration:
    """The prior with the fitted correction, as an artifact of its own."""
    coefficients = asdict(fit.coefficients)
    label = f"{prior.label}, corrected from {fit.visible} requests of a real run"
    return Calibration(
        kind="corrected",
        params={
            "prior": {"kind": prior.kind, "params": prior.params},
            "coefficients": coefficients,
        },
        domain=prior.domain,
        quality={
            "samples": fit.intervals + fit.requests,
            "held_out": len(case.trace) - fit.visible,
            "stamp_conflicts": fit.conflicts,
            "coefficient_covariance": [list(row) for row in fit.covariance],
        },
        provenance={
            **prior.provenance,
            "label": label,
            "corrected_from": case.name,
            "frontend_s": round(fit.frontend_s, 9),
        },
    )


def _correction(fit: Fit | None) -> dict[str, Any]:
    if fit is None:
        return {}
    return {
        **asdict(fit.coefficients),
        "frontend_s": fit.frontend_s,
        "learned_from_requests": fit.visible,
        "intervals": fit.intervals,
        "requests_used": fit.requests,
        "stamp_conflicts": fit.conflicts,
        "median_residual_sigmas": fit.residual_p50,
    }


def _frontend(case: Case) -> tuple[float, list[str]]:
    text = str(case.engine.get("frontend") or "").lower()
    # "no HTTP" is how an in-process run says so.
    http = "http" in text.replace("no http", "").replace("without http", "")
    if http:
        return FRONTEND_S["http"], ["front end over HTTP: 6 ms from client to engine assumed"]
    return FRONTEND_S["in-process"], []


def latencies_s(case: Case, run: LockstepRun) -> dict[str, FloatArray]:
    """Predicted TTFT, TPOT, E2E by request, seconds from the client's arrival; NaN: not served."""
    sent = case.trace.arrival_ns
    done = run.finish_ns >= 0
    ttft = np.where(done, (run.first_token_ns - sent) / 1e9, np.nan)
    e2e = np.where(done, (run.finish_ns - sent) / 1e9, np.nan)
    gaps = case.trace.output_tokens - 1
    tpot = np.full(len(sent), np.nan)
    np.divide(e2e - ttft, gaps, out=tpot, where=gaps > 0)
    return {"ttft": ttft, "tpot": tpot, "e2e": e2e}


def cells(values: FloatArray) -> dict[str, float]:
    """Mean and percentiles (linear, as `np.percentile`) of the values that are there."""
    values = values[~np.isnan(values)]
    if not len(values):
        return dict.fromkeys(CELLS, float("nan"))
    return {"mean": float(values.mean())} | {
        cell: float(np.percentile(values, int(cell[1:]))) for cell in CELLS[1:]
    }


def errors_pct(predicted: dict[str, float], measured: dict[str, float]) -> dict[str, float]:
    """(predicted - measured) / measured of each cell, in percent."""
    return {cell: _percent(predicted[cell], measured[cell]) for cell in measured}


def _percent(predicted: float, measured: float) -> float:
    return 100 * (predicted - measured) / measured if measured else float("nan")


def _distances(case: Case, run: LockstepRun, mask: npt.NDArray[np.bool_]) -> dict[str, Distance]:
    predicted = latencies_s(case, run)
    measured = {
        "ttft": case.measured.ttft_s,
        "tpot": case.measured.tpot_s,
        "e2e": case.measured.e2e_s,
    }
    result = {}
    for name in METRICS:
        both = mask & ~np.isnan(predicted[name]) & ~np.isnan(measured[name])
        p, m = predicted[name][both], measured[name][both]
        off = np.abs(p - m)[m > 0] / m[m > 0] * 100
        result[name] = Distance(
            measured_s=cells(m),
            predicted_s=cells(p),
            error_pct=errors_pct(cells(p), cells(m)),
            per_request_pct={
                "mean_abs": float(off.mean()) if len(off) else float("nan"),
                "median_abs": float(np.median(off)) if len(off) else float("nan"),
                "p90_abs": float(np.percentile(off, 90)) if len(off) else float("nan"),
            },
            ks=ks_distance(p, m),
        )
    return result


def _intervals(
    case: Case,
    model: StepModel,
    calibration: Calibration,
    frontend_s: float,
    mask: npt.NDArray[np.bool_],
    draws: int,
    seed: int,
    progress: Callable[[str], None],
) -> dict[str, dict[str, tuple[float, float]]]:
    """metric -> cell -> 90 % interval: latencies in seconds, throughput in tokens per second.

    From predictions with step models that are wrong by as much as this one may be.
    """
    if draws < 2:
        return {}
    uncertainty = uncertainty_of(calibration)
    rows = deviations(draws, uncertainty.dimensions, np.random.default_rng([67867967, seed]))
    seen: dict[tuple[str, str], list[float]] = {}
    for turn, row in enumerate(rows):
        progress(f"intervals: prediction {turn + 1} of {draws}")
        run = predict(case, drawn(model, uncertainty, row), frontend_s)
        for name, values in latencies_s(case, run).items():
            for cell, value in cells(values[mask]).items():
                seen.setdefault((name, cell), []).append(value)
        rate = _throughput(case, run, mask & (run.finish_ns >= 0))["predicted"]
        seen.setdefault(("throughput", "mean"), []).append(rate)
    result: dict[str, dict[str, tuple[float, float]]] = {}
    for (name, cell), found in seen.items():
        # Hazen: the draws are the middles of equally likely strata.
        low, high = np.percentile(found, [5.0, 95.0], method="hazen")
        result.setdefault(name, {})[cell] = (float(low), float(high))
    return result


def _coverage(
    metrics: dict[str, Distance],
    intervals: dict[str, dict[str, tuple[float, float]]],
    throughput: dict[str, float],
) -> float | None:
    inside = [
        low <= metrics[name].measured_s[cell] <= high
        for name, bounds in intervals.items()
        for cell, (low, high) in bounds.items()
    ]
    if "low" in throughput:
        inside.append(throughput["low"] <= throughput["measured"] <= throughput["high"])
    return sum(inside) / len(inside) if inside else None


def ks_distance(a: FloatArray, b: FloatArray) -> float:
    """Kolmogorov-Smirnov distance of two samples: largest gap between their distribution functions."""
    if not len(a) or not len(b):
        return float("nan")
    points = np.concatenate([a, b])
    below_a = np.searchsorted(np.sort(a), points, side="right") / len(a)
    below_b = np.searchsorted(np.sort(b), points, side="right") / len(b)
    return float(np.abs(below_a - below_b).max())


def _throughput(case: Case, run: LockstepRun, mask: npt.NDArray[np.bool_]) -> dict[str, float]:
    """Output tokens of the scored requests per second from their first arrival to their last token."""
    if not mask.any():
        return dict.fromkeys(("measured", "predicted", "error_pct"), float("nan"))
    tokens = float(case.trace.output_tokens[mask].sum())
    sent_s = case.trace.arrival_ns[mask] / 1e9
    measured = tokens / float((sent_s + case.measured.e2e_s[mask]).max() - sent_s.min())
    predicted = tokens / float(run.finish_ns[mask].max() / 1e9 - sent_s.min())
    return {
        "measured": measured,
        "predicted": predicted,
        "error_pct": _percent(predicted, measured),
    }


def _peer(case: Case, mask: npt.NDArray[np.bool_]) -> dict[str, dict[str, float]]:
    """The peer's error from the client's arrival: on the scored requests if it is given by request."""
    measured = {
        "ttft": case.measured.ttft_s,
        "tpot": case.measured.tpot_s,
        "e2e": case.measured.e2e_s,
    }
    if case.peer_sim is not None and not np.isnan(case.peer_sim["ttft"][mask]).any():
        return {
            name: errors_pct(cells(case.peer_sim[name][mask]), cells(measured[name][mask]))
            for name in METRICS
        }
    recomputed = (case.peer or {}).get("recomputed_from_arrival")
    if not isinstance(recomputed, dict):
        return {}
    return {
        name: {cell: float(recomputed[name]["diff_pct"][cell]) for cell in CELLS}
        for name in METRICS
        if name in recomputed
    }


def _peer_published(case: Case) -> dict[str, dict[str, float]]:
    published = (case.peer or {}).get("published")
    if not isinstance(published, dict):
        return {}
    names = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "Latency"}
    words = {"mean": "Mean", "p50": "Median", "p90": "P90", "p95": "P95", "p99": "P99"}
    return {
        name: {
            cell: float(published[theirs][word]["diff_pct"])
            for cell, word in words.items()
            if word in published[theirs]
        }
        for name, theirs in names.items()
        if isinstance(published.get(theirs), dict)
    }


def _finite(value: Any) -> Any:
    """NaN and infinity as null: they are not JSON."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value
