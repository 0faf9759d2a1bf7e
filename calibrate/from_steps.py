"""A step model from a log of engine steps that somebody else wrote -> `Calibration`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from vsim import __version__
from vsim.calibrate.campaign import check_device
from vsim.calibrate.fit import OTHER_PRIOR_WIDTH, PRIOR_WIDTH, STEP_NOISE, robust_ridge, worth
from vsim.calibrate.fit_samples import (
    MIN_SAMPLES,
    FloatArray,
    domain_of,
    errors_of,
    fit_samples,
    noise_floor,
    samples_hash,
)
from vsim.calibrate.from_bench import prior_model
from vsim.calibrate.samples import StepSample
from vsim.calibrate.step_logs import StepLog, read_step_log
from vsim.errors import UserError
from vsim.models.artifact import Calibration
from vsim.models.correction import NAMES, Coefficients, CorrectedStepModel, features
from vsim.models.load import LoadedStepModel
from vsim.models.step import StepModel
from vsim.sim.deployment import Deployment


def from_steps(
    path: Path,
    deployment: Deployment,
    model_config: dict[str, Any],
    prior: str | None,
    kv_cache_tokens: int | None = None,
    command: str = "",
) -> Calibration:
    """The step model that the log's steps make: kind "engine-steps" where each step's composition is known
    to the last token, else (or with `prior`) a prior corrected by them.

    The last third of the steps is held out and scored; of samples, the serving run. Raises UserError for a
    log that is none, that was measured on something else, or that has too few steps.
    """
    log = read_step_log(path, deployment.scheduler.block_size, kv_cache_tokens)
    _check_sessions(log, deployment, model_config)
    about = _provenance(log, deployment, model_config, path.name, command)
    if log.exact and prior is None:
        return fit_samples(log.samples, about)
    return _corrected(log, prior_model(deployment, prior), about)


def _check_sessions(log: StepLog, deployment: Deployment, model_config: dict[str, Any]) -> None:
    """Refuse samples of another model, device or tensor-parallel size than the ones named."""
    for session in log.samples.sessions.values():
        if session.get("model") != model_config:
            raise UserError(
                f"--from-steps: the samples were measured with another model than {deployment.model.name}"
            )
        check_device(
            deployment.gpu, {"device_count": 1 << 20, **session}, deployment.tensor_parallel_size
        )
        tp = session.get("tensor_parallel_size")
        if tp != deployment.tensor_parallel_size:
            raise UserError(
                f"--from-steps: the samples were measured with tensor_parallel_size={tp}, not "
                f"{deployment.tensor_parallel_size}"
            )


def _provenance(
    log: StepLog,
    deployment: Deployment,
    model_config: dict[str, Any],
    name: str,
    command: str,
) -> dict[str, Any]:
    sessions = list(log.samples.sessions.values())
    last: dict[str, Any] = sessions[-1] if sessions else {}
    version = last.get("vllm_version") or deployment.scheduler.engine_version
    what = {
        "samples": f"measured on {last.get('device')} with vLLM {version}",
        "steps": f"from a log of engine steps ({name})",
        "vllm": f"from vLLM's own log of its iterations ({name})",
    }[log.kind]
    source = {
        "samples": "steps of the real engine, recorded elsewhere by vsim calibrate",
        "steps": "a log of engine steps: composition and duration, not measured here",
        "vllm": "vllm serve --enable-logging-iteration-details: composition and waiting time, not measured here",
    }[log.kind]
    return {
        "label": what,
        "gpu": deployment.gpu.name,
        "gpu_name": last.get("device", deployment.gpu.device_name),
        "model": deployment.model.name,
        "model_config": model_config,
        "tensor_parallel_size": deployment.tensor_parallel_size,
        "dtype": last.get("dtype", deployment.dtype),
        "quantization": last.get("quantization", deployment.flags.get("quantization")),
        "kv_cache_dtype": last.get("kv_cache_dtype", deployment.kv_cache_dtype),
        "vllm_version": version,
        "block_sizes": sorted({row.block_size for row in log.samples.rows}),
        "enforce_eager": last.get("enforce_eager", deployment.enforce_eager),
        "yardstick_ns": last.get("yardstick_ns"),
        "measured_at": last.get("date", ""),
        "log": name,
        "source": source,
        "command": command,
        "assumptions": list(log.notes),
    }


def _corrected(log: StepLog, prior: LoadedStepModel, about: dict[str, Any]) -> Calibration:
    """`prior` plus linear terms, robust least squares over the steps."""
    rows = [row for row in log.samples.rows if row.usable and row.phase != "serve"]
    held_out = [row for row in log.samples.rows if row.usable and row.phase == "serve"]
    if len(rows) < MIN_SAMPLES:
        raise UserError(
            f"{about['log']}: {len(rows)} steps are too few to fit (at least {MIN_SAMPLES})"
        )
    kind = prior.calibration.kind
    width = PRIOR_WIDTH.get(kind, OTHER_PRIOR_WIDTH)
    per_term = worth(prior.model, 1)
    # A sequence's own share: an ordinary step of 32 decodes, divided among them.
    widths = width * np.array([*per_term, per_term[0] / 32])
    expected, measured = _totals(prior.model, rows), np.array([row.total_s for row in rows])
    matrix = np.array([features(row.shape) for row in rows])
    solution, _, spread = robust_ridge(matrix, measured - expected, STEP_NOISE * measured, widths)
    coefficients = Coefficients(**dict(zip(NAMES, solution.tolist(), strict=True)))
    model = CorrectedStepModel(prior.model, coefficients)
    held = None
    if held_out:
        held = errors_of(_totals(model, held_out), np.array([r.total_s for r in held_out]))
        before = errors_of(_totals(prior.model, held_out), np.array([r.total_s for r in held_out]))
    params = {"prior": {"kind": kind, "params": prior.calibration.params}}
    if kind == "corrected":
        # One correction, not one on another.
        earlier = Coefficients(**prior.calibration.params["coefficients"])
        sums = {n: getattr(earlier, n) + getattr(coefficients, n) for n in NAMES}
        coefficients = Coefficients(**sums, scale=earlier.scale)
        params = {"prior": prior.calibration.params["prior"]}
    domain = domain_of(log.samples.rows)
    if not log.exact:
        # What was before a chunk is not in the log, so nothing can be said to lie outside it.
        domain = replace(domain, max_prefill_context=prior.calibration.domain.max_prefill_context)
    return Calibration(
        kind="corrected",
        params={**params, "coefficients": asdict(coefficients)},
        domain=domain,
        quality={
            "samples": len(rows),
            "fit": errors_of(_totals(model, rows), measured),
            "held_out": len(held_out),
            "held_out_error": held,
            "prior_held_out_error": before if held_out else None,
            "noise_floor": noise_floor(log.samples.rows),
            "coefficient_covariance": [list(row) for row in spread.tolist()],
        },
        provenance={
            **about,
            "label": f"{prior.calibration.label}, corrected {about['label']}",
            "prior": prior.name,
            "vsim_version": __version__,
            "samples_sha256": samples_hash(log.samples.rows),
            "assumptions": [*prior.calibration.assumptions, *about["assumptions"]],
        },
    )


def _totals(model: StepModel, rows: Sequence[StepSample]) -> FloatArray:
    """Seconds of each sample's whole step by the model; shape (n,)."""
    return np.array([model.device_seconds(r.shape) + model.host_seconds(r.shape) for r in rows])
