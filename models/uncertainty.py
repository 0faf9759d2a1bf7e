"""How wrong a step model may be as a whole, and step models that are wrong by as much.

Single steps scatter, but their scatter averages out over the thousands of steps behind a latency; what
stays is the error that all steps share. It is drawn, not added up, because queueing amplifies it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from vsim.models.artifact import Calibration
from vsim.models.correction import NAMES, Coefficients, CorrectedStepModel
from vsim.models.step import StepModel, StepShape

# Standard deviation of the shared error by kind, as a share of step time. Summed kernel tables were 3-10 %
# off real engines, general databases 10-40 %, a four-term correction of either below 1 % (docs/validation.md).
SCALE_SD = {"tables": 0.03, "engine-steps": 0.02, "corrected": 0.005, "roofline": 0.2}


@dataclass(frozen=True, slots=True)
class Uncertainty:
    """`scale_sd`: shared relative error; `prefill_sd`: that of prefill alone, on top of it.

    `covariance` (rows as in correction.NAMES) of fitted coefficients, () where none were fitted.
    """

    scale_sd: float
    prefill_sd: float
    covariance: tuple[tuple[float, ...], ...] = ()


def uncertainty_of(calibration: Calibration) -> Uncertainty:
    """What the artifact's own errors say; where it has none, what its kind has shown elsewhere."""
    quality = calibration.quality
    sd = SCALE_SD.get(calibration.kind, SCALE_SD["roofline"])
    held_out = quality.get("held_out_error")
    if isinstance(held_out, Mapping) and isinstance(held_out.get("bias_pct"), int | float):
        sd = max(sd, abs(float(held_out["bias_pct"])) / 100)
    rows = quality.get("coefficient_covariance") or ()
    return Uncertainty(sd, sd, tuple(tuple(float(x) for x in row) for row in rows))


def draw(model: StepModel, uncertainty: Uncertainty, rng: np.random.Generator) -> StepModel:
    """`model` with one draw of the shared error."""
    scale = 1 + uncertainty.scale_sd * float(rng.standard_normal())
    prompt = StepShape(((2048, 0),), 0, 0, 0)
    per_token = model.device_seconds(prompt) / 2048
    added: dict[str, Any] = dict.fromkeys(NAMES, 0.0)
    if uncertainty.covariance:
        matrix = np.array(uncertainty.covariance)
        terms = NAMES[: len(matrix)]
        # The terms differ by six orders of magnitude: draw them as shares of their own spread.
        spread = np.sqrt(np.maximum(np.diag(matrix), 1e-300))
        drawn = rng.multivariate_normal(
            np.zeros(len(matrix)), matrix / np.outer(spread, spread), method="eigh"
        )
        added |= dict(zip(terms, (drawn * spread).tolist(), strict=True))
    added["per_prefill_token_s"] += (
        uncertainty.prefill_sd * float(rng.standard_normal()) * per_token
    )
    return CorrectedStepModel(model, Coefficients(**added, scale=max(0.1, scale)))


def slowed(model: StepModel, uncertainty: Uncertainty, deviations: float) -> StepModel:
    """`model` at the slow end of its error: no drawing, so that a search needs one simulation, not many.

    Scale and prefill are independent: both are moved by `deviations` / sqrt(2), the most likely way in which
    they reach that many standard deviations together.
    """
    each = deviations / 2**0.5
    factor = 1 + each * uncertainty.scale_sd
    prompt = StepShape(((2048, 0),), 0, 0, 0)
    prefill_s = each * uncertainty.prefill_sd * model.device_seconds(prompt) / 2048
    if isinstance(model, CorrectedStepModel):
        # One correction, not one on another: that is what the compiled path knows.
        c = model.coefficients
        terms = {name: getattr(c, name) * factor for name in NAMES}
        terms["per_prefill_token_s"] += prefill_s
        return CorrectedStepModel(model.prior, Coefficients(**terms, scale=c.scale * factor))
    return CorrectedStepModel(model, Coefficients(per_prefill_token_s=prefill_s, scale=factor))
