"""A step model corrected from a client's latencies: `vllm bench serve`'s result -> `Calibration`, scored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from math import isnan
from pathlib import Path
from typing import Any

from vsim import __version__
from vsim.calibrate.bench_case import read_bench
from vsim.calibrate.fit import Fit
from vsim.calibrate.fit_latencies import USUAL_FRONTEND_S, fit_latencies
from vsim.calibrate.validate import Validation, score
from vsim.errors import UserError
from vsim.models.artifact import Calibration
from vsim.models.correction import NAMES, Coefficients, CorrectedStepModel
from vsim.models.load import LoadedStepModel
from vsim.sim.deployment import Deployment
from vsim.sim.replay import step_model_for

HELD_OUT_SHARE = 1 / 3
# A correction that fits does better; beyond it the server wasn't the same one from beginning to end.
OTHER_SPEED_PCT = 20.0


@dataclass(frozen=True, slots=True)
class BenchFit:
    """The corrected profile; how it and the prior alone did on the requests that no fit had seen."""

    calibration: Calibration
    held_out: Validation
    prior: Validation


def from_bench(
    result: Path,
    trace: Path | None,
    deployment: Deployment,
    prior: LoadedStepModel,
    reading: Mapping[str, Any],
    command: str = "",
    progress: Callable[[str], None] = lambda _: None,
) -> BenchFit:
    """Correct `prior` so that the replay of `trace` gives the latencies that the client measured.

    The first two thirds of the requests are fitted, the last third is predicted and scored.
    Raises UserError for a result or trace that can't be used (bench_case.py).
    """
    bench = read_bench(result, trace, deployment, reading)
    case = bench.case
    n = len(case.trace)
    visible = n - max(1, round(n * HELD_OUT_SHARE))
    fit = fit_latencies(case, prior.model, visible, prior.calibration.kind, progress)
    progress("predicting the requests held out")
    before = score(
        case,
        LoadedStepModel(prior.model, prior.calibration, prior.name),
        USUAL_FRONTEND_S,
        visible,
        None,
    )
    model = CorrectedStepModel(prior.model, fit.coefficients)
    after = score(
        case,
        LoadedStepModel(model, prior.calibration, prior.name),
        fit.frontend_s,
        visible,
        fit,
    )
    after = replace(after, assumptions=(*after.assumptions, *_other_speed(after)))
    calibration = _artifact(
        prior, fit, deployment, after, before, (*case.assumptions, *_other_speed(after))
    )
    calibration = replace(
        calibration,
        provenance={
            **calibration.provenance,
            "bench": bench.about,
            "bench_sha256": bench.sha256,
            "corrected_from": case.name,
            "trace": case.trace.source.name,
            "trace_sha256": case.trace.source.sha256,
            "command": command,
        },
    )
    return BenchFit(calibration, replace(after, step_model={"label": calibration.label}), before)


def prior_model(deployment: Deployment, prior: str | None) -> LoadedStepModel:
    """What is corrected: the profile named, else a bundled one that fits, else the roofline. Raises UserError if
    there is none."""
    if prior is None and deployment.gpu.platform == "cpu":
        raise UserError(
            "--prior is missing: for a CPU there is no roofline to correct; give a profile of vsim calibrate"
        )
    return step_model_for(deployment, prior)


def _artifact(
    prior: LoadedStepModel,
    fit: Fit,
    deployment: Deployment,
    after: Validation,
    before: Validation,
    said: tuple[str, ...],
) -> Calibration:
    old, scheduler = prior.calibration, deployment.scheduler
    kind, params, coefficients = old.kind, dict(old.params), fit.coefficients
    if kind == "corrected":
        # One correction, not one on another.
        earlier = Coefficients(**params["coefficients"])
        sums = {n: getattr(earlier, n) + getattr(coefficients, n) for n in NAMES}
        coefficients = Coefficients(**sums, scale=earlier.scale)
        kind, params = params["prior"]["kind"], params["prior"]["params"]
    label = (
        f"{old.label}, corrected from {fit.visible} requests of vllm bench serve "
        "(server and HTTP time included)"
    )
    return Calibration(
        kind="corrected",
        params={"prior": {"kind": kind, "params": params}, "coefficients": asdict(coefficients)},
        domain=old.domain,
        quality={
            "samples": fit.intervals + fit.requests,
            "fitted_requests": fit.visible,
            "held_out": after.scored,
            # Of the steps nothing was seen; a request's time per token is their mean.
            "held_out_error": {
                "of": "time per output token of the requests held out",
                "bias_pct": round(after.metrics["tpot"].error_pct["mean"], 3),
            },
            "held_out_requests": _scores(after),
            "prior_held_out_requests": _scores(before),
            "median_residual_sigmas": round(fit.residual_p50, 3),
            "stamp_conflicts": fit.conflicts,
            "coefficient_covariance": [list(row) for row in fit.covariance],
        },
        provenance={
            **old.provenance,
            "label": label,
            "prior": prior.name,
            "gpu": deployment.gpu.name,
            "model": deployment.model.name,
            "tensor_parallel_size": deployment.tensor_parallel_size,
            "dtype": deployment.dtype,
            "quantization": deployment.flags.get("quantization"),
            "kv_cache_dtype": deployment.kv_cache_dtype,
            "enforce_eager": deployment.enforce_eager,
            "vllm_version": scheduler.engine_version,
            "block_size": scheduler.block_size,
            "async_scheduling": scheduler.async_scheduling,
            "frontend_s": round(fit.frontend_s, 6),
            "vsim_version": __version__,
            "source": "vllm bench serve --save-detailed, requests as the client saw them",
            "assumptions": [
                *old.assumptions,
                *(sentence for sentence in said if sentence not in deployment.assumptions),
                "fitted on a client's latencies: HTTP and the server's front end are in them, "
                f"{fit.frontend_s * 1e3:.1f} ms before the engine has a request, and what they cost a step "
                "is in the correction",
            ],
        },
    )


def _other_speed(held_out: Validation) -> tuple[str, ...]:
    off = held_out.metrics["e2e"].error_pct["mean"]
    if not abs(off) > OTHER_SPEED_PCT:
        return ()
    return (
        f"the requests held out took {'longer' if off < 0 else 'less'} than those before them let expect (mean "
        f"E2E is {off:+.0f} % off): the server's speed changed during the run, or its flags are others than "
        "those given here",
    )


def _scores(validation: Validation) -> dict[str, Any]:
    """Error of each latency in percent, as JSON."""
    return {
        name: {
            **{cell: _rounded(value) for cell, value in distance.error_pct.items()},
            "by_request_median": _rounded(distance.per_request_pct["median_abs"]),
        }
        for name, distance in validation.metrics.items()
    } | {"throughput": _rounded(validation.throughput["error_pct"])}


def _rounded(value: float) -> float | None:
    """Three decimals; NaN is not JSON."""
    return None if isnan(value) else round(value, 3)
