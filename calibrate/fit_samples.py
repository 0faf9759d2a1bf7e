"""Step samples of the real engine -> `Calibration` of kind "engine-steps", with its error."""

from __future__ import annotations

import hashlib
import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from vsim import __version__
from vsim.calibrate.samples import Samples, StepSample
from vsim.errors import UserError
from vsim.models.artifact import Calibration
from vsim.models.domain import Domain
from vsim.models.engine_steps import attention_features, build_engine_steps

FloatArray = npt.NDArray[np.float64]

MIN_SAMPLES = 30
LEAST_REPEATS = 3  # of a composition, for its fastest to be believed
BUSY_SHARE = 0.1  # disturbed steps beyond which the rest is not to be trusted either
HUBER_K = 2.0  # residuals beyond this many robust standard deviations lose weight
ROUNDS = 12
SMOOTHING = 2e-3  # pull of neighbouring slopes of the token curve towards each other
QUANTILES = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)


def fit_samples(samples: Samples, provenance: dict[str, Any]) -> Calibration:
    """Fit the steps of the designed grid and of one serving run, score on those of another, held out.

    Non-negative least squares on relative errors, re-weighted so that outliers lose their say (Huber).
    `provenance` is kept as given and completed with the samples' hash. Raises UserError for too few samples.
    """
    grid, notes = _rows_to_fit(samples)
    params = fit_params(grid)
    kernels = [s["kernels"] for s in samples.sessions.values() if "kernels" in s]
    if kernels:
        params["kernels"] = kernels[-1]
    held_out = _held_out(samples)
    return Calibration(
        kind="engine-steps",
        params=params,
        domain=domain_of(samples.rows),
        quality={
            "samples": len(grid),
            "fit": errors(params, grid),
            "held_out": len(held_out),
            "held_out_error": errors(params, held_out) if held_out else None,
            "session_bias_pct": session_biases_pct(grid, held_out),
            "noise_floor": noise_floor(samples.rows),
            "slowdown": slowdown_of(samples.rows),
            "disturbed_share": round(
                sum(r.disturbed for r in samples.rows) / max(1, len(samples.rows)), 4
            ),
        },
        provenance={
            **provenance,
            "vsim_version": __version__,
            "samples_sha256": samples_hash(samples.rows),
            "assumptions": [*provenance.get("assumptions", ()), *notes],
        },
    )


def _held_out(samples: Samples) -> list[StepSample]:
    return samples.usable("serve") or [
        row for row in samples.rows if row.phase == "serve" and not row.warmup
    ]


def session_biases_pct(fitted: Sequence[StepSample], held_out: Sequence[StepSample]) -> list[float]:
    """How much too long each session's held-out run is predicted, in %, by a fit to the other sessions alone.

    A session is one start of the engine: where its memory lies, the clocks and the neighbours of that time
    make all its steps some percent faster or slower, and the next start's will be another draw of the same.
    Empty with a single session, which says nothing about the next.
    """
    sessions = sorted({row.session for row in held_out})
    found = []
    for session in sessions if len(sessions) > 1 else ():
        others = [row for row in fitted if row.session != session]
        if len(others) >= MIN_SAMPLES:
            own = [row for row in held_out if row.session == session]
            found.append(float(errors(fit_params(others), own)["bias_pct"]))
    return found


def _rows_to_fit(samples: Samples) -> tuple[list[StepSample], list[str]]:
    """The steps that can be believed, and sentences about how they were chosen."""
    everything = [row for row in samples.rows if row.phase in ("grid", "train") and not row.warmup]
    share = sum(row.disturbed for row in everything) / max(1, len(everything))
    if share <= BUSY_SHARE:
        rows, notes = [row for row in everything if not row.disturbed], []
    else:
        # Other work only ever adds time, also to steps that kept their core: caches and memory are shared.
        rows = _fastest_repeats(everything)
        how = (
            "of each step the fastest repeat was fitted, which is near to what a quiet machine does"
        )
        if len(rows) < MIN_SAMPLES:
            rows = everything
            how = "they were fitted all the same for want of repeats: expect this profile to be too slow"
        notes = [f"{share:.0%} of the steps were disturbed by other processes: {how}"]
    if len(rows) < MIN_SAMPLES:
        raise UserError(
            f"{len(rows)} step samples are too few to fit (at least {MIN_SAMPLES}): measure longer"
        )
    return rows, notes


def _fastest_repeats(rows: Sequence[StepSample]) -> list[StepSample]:
    """Of each composition the sample that took least. A scene's decode steps differ by one token of context
    each: they count as one composition."""
    groups: dict[tuple[str, int, int, int, int], list[StepSample]] = defaultdict(list)
    for row in rows:
        if row.phase != "grid":
            continue  # a serving run has no repeats
        key = (row.point, row.block_size, row.num_decodes, row.prefill_tokens, len(row.prefill_new))
        groups[key].append(row)
    # The fastest of two says little: both may have been hit.
    often = [
        group
        for group in groups.values()
        if len({(row.session, row.repeat) for row in group}) >= LEAST_REPEATS
    ]
    if len(often) < MIN_SAMPLES:
        often = list(groups.values())
    return [min(group, key=lambda row: row.total_s) for group in often]


def fit_params(rows: Sequence[StepSample]) -> dict[str, Any]:
    """The parameters of `EngineStepModel` from step samples (no warm-up, no held-out ones)."""
    blocks = sorted({row.block_size for row in rows})
    knots = _knots([row.shape.num_tokens for row in rows])
    design = np.array([_features(row, knots, blocks) for row in rows])
    device = np.array([row.device_s for row in rows])
    coefficients = _robust_nnls(design, device, _smoothness(len(knots), design.shape[1]))
    base, ramps = coefficients[0], coefficients[1 : len(knots)]
    per_seq, per_chunk, mixed = coefficients[len(knots) : len(knots) + 3]
    attention = coefficients[len(knots) + 3 :].reshape(len(blocks), 4)
    # Knots in tokens: the curve's value at the first one is the step's fixed cost.
    seconds = np.concatenate([[base], base + np.cumsum(ramps * np.diff(knots))])
    host_design = np.array([[1.0, row.shape.num_seqs, len(row.prefill_new)] for row in rows])
    host = _robust_nnls(host_design, np.array([row.host_s for row in rows]))
    return {
        "tokens": {"tokens": list(knots), "seconds": [_short(s) for s in seconds]},
        "per_seq_s": _short(per_seq),
        "per_chunk_s": _short(per_chunk),
        "per_mixed_step_s": _short(mixed),
        "attention": [
            {
                "block_size": block,
                "per_pair_s": _short(row[0]),
                "per_chunk_context_token_s": _short(row[1]),
                "per_kv_token_s": _short(row[2]),
                "per_uneven_token_s": _short(row[3]),
            }
            for block, row in zip(blocks, attention, strict=True)
        ],
        "host": {
            "base_s": _short(host[0]),
            "per_seq_s": _short(host[1]),
            "per_chunk_s": _short(host[2]),
        },
    }


def _short(value: float) -> float:
    """Eight significant digits: beyond any measurement, and the artifact stays readable."""
    return float(f"{float(value):.8g}")


def _knots(tokens: Sequence[int]) -> list[int]:
    """Corners of the token curve: powers of two and their midpoints that samples lie near."""
    top = max(tokens)
    seen = sorted(set(tokens))
    knots = [1]
    size = 2
    while size < top:
        for knot in (size, size * 3 // 2):
            # A segment needs samples of its own, else its slope is anybody's guess.
            if knots[-1] < knot < top and any(knots[-1] < t <= knot for t in seen):
                knots.append(knot)
        size *= 2
    if top > knots[-1]:
        knots.append(top)
    return knots


def _features(row: StepSample, knots: Sequence[int], blocks: Sequence[int]) -> list[float]:
    """1, ramps between the knots, sequences, chunks, mixed, then attention for each block size."""
    shape = row.shape
    tokens = shape.num_tokens
    ramps = [
        float(min(max(tokens - low, 0), high - low)) for low, high in itertools.pairwise(knots)
    ]
    mixed = 1.0 if shape.prefills and shape.num_decodes else 0.0
    attention = [0.0] * (4 * len(blocks))
    at = 4 * blocks.index(row.block_size)
    attention[at : at + 4] = attention_features(shape)
    return [1.0, *ramps, float(shape.num_seqs), float(len(shape.prefills)), mixed, *attention]


def _smoothness(num_knots: int, width: int) -> FloatArray:
    """Rows that pull each slope of the token curve towards its neighbour's; column 0 is the constant."""
    rows = np.zeros((max(0, num_knots - 2), width))
    for i in range(len(rows)):
        rows[i, 1 + i], rows[i, 2 + i] = 1.0, -1.0
    return rows


def _robust_nnls(
    design: FloatArray, target: FloatArray, smooth: FloatArray | None = None
) -> FloatArray:
    """Non-negative coefficients for small relative errors, outliers down-weighted."""
    weights = 1.0 / np.maximum(target, 1e-9)
    # Columns differ by nine orders of magnitude: scale them, or the solver drops the small ones.
    scale = np.maximum(np.abs(design * weights[:, None]).max(axis=0), 1e-300)
    coefficients = np.zeros(design.shape[1])
    huber = np.ones(len(target))
    for _ in range(ROUNDS):
        w = weights * huber
        a, b = design * w[:, None] / scale, target * w
        if smooth is not None and len(smooth):
            pull = (
                smooth / scale * float(np.median(target / np.maximum(design[:, 1:].sum(axis=1), 1)))
            )
            norm = np.abs(pull).max(axis=1, keepdims=True)
            pull = pull / np.maximum(norm, 1e-300) * SMOOTHING * np.sqrt(len(target))
            a, b = np.vstack([a, pull]), np.concatenate([b, np.zeros(len(pull))])
        solution, _ = nnls(a, b, maxiter=50 * a.shape[1])
        coefficients = solution / scale
        residual = (design @ coefficients - target) * weights
        spread = 1.4826 * float(np.median(np.abs(residual - np.median(residual)))) + 1e-6
        huber = np.sqrt(np.minimum(1.0, HUBER_K * spread / np.maximum(np.abs(residual), 1e-12)))
    return coefficients


def predict(params: dict[str, Any], rows: Sequence[StepSample]) -> FloatArray:
    """Total seconds of each sample's step by the model; shape (n,)."""
    models = {
        block: build_engine_steps(params, block) for block in {row.block_size for row in rows}
    }
    return np.array(
        [
            models[row.block_size].device_seconds(row.shape)
            + models[row.block_size].host_seconds(row.shape)
            for row in rows
        ]
    )


def errors(params: dict[str, Any], rows: Sequence[StepSample]) -> dict[str, Any]:
    """Error of the total step time, predicted against measured (`errors_of`)."""
    return errors_of(predict(params, rows), np.array([row.total_s for row in rows]))


def errors_of(predicted: FloatArray, measured: FloatArray) -> dict[str, Any]:
    """How far step times are off; percentages are of the measured value.

    `bias_pct` is of the sum of all steps: how much too long a whole run would take.
    """
    relative = (predicted - measured) / measured * 100
    return {
        "median_abs_pct": round(float(np.median(np.abs(relative))), 3),
        "p95_abs_pct": round(float(np.percentile(np.abs(relative), 95)), 3),
        "bias_pct": round(float(predicted.sum() / measured.sum() - 1) * 100, 3),
        "residual_pct": {
            f"p{q * 100:g}": round(float(np.quantile(relative, q)), 3) for q in QUANTILES
        },
    }


def noise_floor(rows: Sequence[StepSample]) -> dict[str, Any]:
    """How far repeats of the very same step lie apart: no model can be better than this.

    Deviations are from the median of the other repeats of a (point, step, block size).
    """
    groups: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    for row in rows:
        if row.phase == "grid" and row.usable:
            groups[row.point, row.index, row.block_size].append(row.total_s)
    deviations = []
    for times in groups.values():
        for i, seconds in enumerate(times):
            others = times[:i] + times[i + 1 :]
            if others:
                deviations.append(abs(seconds / float(np.median(others)) - 1) * 100)
    if not deviations:
        return {"pairs": 0, "median_abs_pct": None, "p95_abs_pct": None}
    return {
        "pairs": len(deviations),
        "median_abs_pct": round(float(np.median(deviations)), 3),
        "p95_abs_pct": round(float(np.percentile(deviations, 95)), 3),
    }


def slowdown_of(rows: Sequence[StepSample]) -> dict[str, float] | None:
    """How much slower than at its best the machine was while it was measured; None without a yardstick.

    The step times are those at its best: multiply by the median for this machine as it was.
    """
    factors = [row.slowdown for row in rows if row.slowdown != 1.0]
    if not factors:
        return None
    p50, p95 = np.percentile(factors, [50, 95])
    return {"p50": round(float(p50), 4), "p95": round(float(p95), 4)}


def domain_of(rows: Sequence[StepSample]) -> Domain:
    """The largest value of each feature among the samples."""
    mixed = [r.num_decodes for r in rows if r.prefill_new]
    contexts = [r.decode_context_sum / r.num_decodes for r in rows if r.num_decodes]
    return Domain(
        max_tokens=max(r.shape.num_tokens for r in rows),
        max_seqs=max(r.shape.num_seqs for r in rows),
        max_mixed_decodes=max(mixed, default=0),
        max_prefill_context=max((c for r in rows for c in r.prefill_context), default=0),
        max_decode_context=int(max(contexts, default=0)),
    )


def samples_hash(rows: Sequence[StepSample]) -> str:
    """SHA-256 over what was measured, independent of file layout."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(
            f"{row.session}:{row.seq}:{row.prefill_new}:{row.prefill_context}:{row.num_decodes}:"
            f"{row.decode_context_sum}:{row.block_size}:{row.device_s!r}:{row.total_s!r}\n".encode()
        )
    return digest.hexdigest()
