"""How wrong a step model may be, and step models that are wrong by as much.

One place for it: `vsim replay`'s error bars, `vsim plan`, `vsim validate` and `vsim spotcheck` all ask here.
Single steps scatter, but their scatter averages out over the thousands of steps behind a latency; what
stays is the error that all steps share. It is drawn, not added up, because queueing amplifies it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from vsim.models.artifact import Calibration
from vsim.models.correction import NAMES, Coefficients, CorrectedStepModel
from vsim.models.load import LoadedStepModel
from vsim.models.step import StepModel, StepShape

FloatArray = npt.NDArray[np.float64]

# Standard deviation of the shared error by kind, as a share of step time, and what it rests on.
SCALE_SD = {"tables": 0.03, "engine-steps": 0.02, "corrected": 0.005, "roofline": 0.2}
EVIDENCE = {
    "tables": "summed kernel tables were 3-10 % off real engines' steps",
    "engine-steps": "repeats of a quiet machine agree within 1-3 %",
    "corrected": "corrections of a few terms left less than 1 % on real runs (docs/validation.md)",
    "roofline": "data sheets and general databases were 10-40 % off real engines, no measurement of this one",
}
SLOW_END = 1.645  # standard deviations from the middle to the end of a 90 % interval
# 95 % quantile of Student's t by degrees of freedom, from 1.
_T95 = (
    6.314,
    2.920,
    2.353,
    2.132,
    2.015,
    1.943,
    1.895,
    1.860,
    1.833,
    1.812,
    1.796,
    1.782,
    1.771,
    1.761,
    1.753,
)


@dataclass(frozen=True, slots=True)
class Uncertainty:
    """`scale_sd`: shared relative error; `prefill_sd`: that of prefill alone, on top of it.

    `covariance` (rows as in correction.NAMES) of fitted coefficients, () where none were fitted.
    `step_factors`: measured over predicted of single steps, mean 1: how they scatter about the shared error.
    `source`: what `scale_sd` rests on, a clause for the user.
    """

    scale_sd: float
    prefill_sd: float
    covariance: tuple[tuple[float, ...], ...] = ()
    step_factors: tuple[float, ...] = (1.0,)
    source: str = ""

    @property
    def dimensions(self) -> int:
        """How many independent standard normal numbers make a draw: `deviations` of this width."""
        return 2 + len(self.covariance)


def uncertainty_of(calibration: Calibration) -> Uncertainty:
    """What the artifact's own errors say, with what its kind has shown elsewhere.

    A profile's error on a serving run it was not fitted on is one draw of the error it will make on the
    next: sessions differ (memory layout, clocks, neighbours). From k such biases and the kind's own figure, which
    counts as one more, the spread of the next is Student's t with k + 1 degrees of freedom: few sessions
    make wide intervals. `scale_sd` is the standard deviation of the normal distribution with the same 90 %.
    """
    kind = calibration.kind if calibration.kind in SCALE_SD else "roofline"
    sd = own = SCALE_SD[kind]
    source = EVIDENCE[kind]
    biases = session_biases(calibration.quality)
    if biases:
        degrees = 1 + len(biases)
        spread = sqrt((sd**2 + sum(bias**2 for bias in biases)) / degrees)
        sd = spread * _t95(degrees) / SLOW_END
        listed = ", ".join(f"{bias * 100:+.1f}" for bias in biases[:6])
        what = "held-out runs were" if len(biases) > 1 else "a held-out run was"
        source = f"{what} {listed}{', …' if len(biases) > 6 else ''} % off, and {source}"
    if calibration.provenance.get("carried_over_from"):
        # The other model's matrix products timed one by one are a kernel table; scaling alone is as a database.
        timed = calibration.provenance.get("carried_over_by") == "timed matrix products"
        like = "tables" if timed else "roofline"
        sd = sqrt(sd**2 + SCALE_SD[like] ** 2)
        source += f"; carried over to another model: {EVIDENCE[like]}"
    rows = calibration.quality.get("coefficient_covariance") or ()
    return Uncertainty(
        sd,
        own,
        tuple(tuple(float(x) for x in row) for row in rows),
        step_factors(calibration.quality),
        source,
    )


def session_biases(quality: Mapping[str, Any]) -> tuple[float, ...]:
    """Shares by which serving runs that were not fitted were mispredicted, one a session; () if none is told."""
    told = quality.get("session_bias_pct")
    if isinstance(told, Sequence) and not isinstance(told, str):
        found = tuple(float(b) / 100 for b in told if isinstance(b, int | float))
        if found:
            return found
    held_out = quality.get("held_out_error")
    bias = held_out.get("bias_pct") if isinstance(held_out, Mapping) else None
    return (float(bias) / 100,) if isinstance(bias, int | float) else ()


def step_factors(quality: Mapping[str, Any]) -> tuple[float, ...]:
    """Measured over predicted of single steps, equally likely, mean 1; from held-out steps, else from the fit's."""
    found = quality.get("held_out_error") or quality.get("fit")
    if not isinstance(found, Mapping) or not isinstance(found.get("residual_pct"), Mapping):
        return (1.0,)
    quantiles = sorted(
        (float(str(name).lstrip("p")), float(value))
        for name, value in found["residual_pct"].items()
    )
    if not quantiles:
        return (1.0,)
    at = np.linspace(quantiles[0][0], quantiles[-1][0], 199)
    residual = np.interp(at, [q for q, _ in quantiles], [v for _, v in quantiles])
    factors = 1 / np.maximum(0.05, 1 + residual / 100)
    factors /= factors.mean()
    return tuple(factors.tolist())


def deviations(draws: int, width: int, rng: np.random.Generator) -> FloatArray:
    """Standard normal numbers, shape (draws, width), each column evenly spread (Latin hypercube).

    Ends of a distribution estimated from 20 of them are as good as from some hundred independent ones.
    """
    normal = NormalDist()
    evenly = np.array([normal.inv_cdf((i + 0.5) / draws) for i in range(draws)])
    return np.stack([evenly[rng.permutation(draws)] for _ in range(width)], axis=1)


def draw(model: StepModel, uncertainty: Uncertainty, rng: np.random.Generator) -> StepModel:
    """`model` with one draw of the shared error."""
    return drawn(model, uncertainty, rng.standard_normal(uncertainty.dimensions))


def drawn(model: StepModel, uncertainty: Uncertainty, deviation: FloatArray) -> StepModel:
    """`model` off by `deviation`, in standard deviations: scale, prefill, then the coefficients' own axes."""
    added = dict.fromkeys(NAMES, 0.0)
    if uncertainty.covariance:
        matrix = np.array(uncertainty.covariance)
        # The terms differ by six orders of magnitude: draw them as shares of their own spread.
        spread = np.sqrt(np.maximum(np.diag(matrix), 1e-300))
        values, axes = np.linalg.eigh(matrix / np.outer(spread, spread))
        along = np.sqrt(np.maximum(values, 0.0)) * deviation[2 : 2 + len(matrix)]
        terms = ((axes @ along) * spread).tolist()
        added |= dict(zip(NAMES[: len(matrix)], terms, strict=True))
    added["per_prefill_token_s"] += (
        uncertainty.prefill_sd * float(deviation[1]) * _per_prompt_token(model)
    )
    return changed(model, 1 + uncertainty.scale_sd * float(deviation[0]), added)


def slowed(model: StepModel, uncertainty: Uncertainty, deviations: float) -> StepModel:
    """`model` at the slow end of its error: no drawing, so that a search needs one simulation, not many.

    Scale and prefill are independent: both are moved by `deviations` / sqrt(2), the most likely way in which
    they reach that many standard deviations together.
    """
    each = deviations / sqrt(2)
    prefill_s = each * uncertainty.prefill_sd * _per_prompt_token(model)
    return changed(model, 1 + each * uncertainty.scale_sd, {"per_prefill_token_s": prefill_s})


def changed(model: StepModel, scale: float, added: Mapping[str, float]) -> StepModel:
    """`model` x `scale` + `added` (by correction.NAMES): one correction, not one on another.

    That is what the compiled path knows. A scale below a tenth is taken as a tenth.
    """
    scale = max(0.1, scale)
    if isinstance(model, LoadedStepModel):
        inner = changed(model.model, scale, added)
        return LoadedStepModel(inner, model.calibration, model.name, notes=model.notes)
    if isinstance(model, CorrectedStepModel):
        own = model.coefficients
        terms = {name: getattr(own, name) * scale + added.get(name, 0.0) for name in NAMES}
        return CorrectedStepModel(model.prior, Coefficients(**terms, scale=own.scale * scale))
    return CorrectedStepModel(model, Coefficients(**{**added, "scale": scale}))


def _per_prompt_token(model: StepModel) -> float:
    """Seconds of a prompt token in a chunk of an ordinary size."""
    if isinstance(model, LoadedStepModel):
        model = model.model  # unasked: a look is not a step of the run
    return model.device_seconds(StepShape(((2048, 0),), 0, 0, 0)) / 2048


def _t95(degrees: int) -> float:
    return _T95[degrees - 1] if degrees <= len(_T95) else SLOW_END + 1.52 / degrees
