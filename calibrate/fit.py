"""Learn a small correction of a step model from the first requests of a measured run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from vsim.calibrate.case import Case
from vsim.calibrate.follow import follow, frontend_seconds
from vsim.calibrate.predict import parts, predict_part
from vsim.models.correction import NAMES, Coefficients, CorrectedStepModel, group_features
from vsim.models.step import StepModel, StepShape, lockstep_seconds

FloatArray = npt.NDArray[np.float64]

TERMS = NAMES[:4]  # per step, per mixed step, per prefill token, per KV token
ROUNDS = 4
# A step count between two stamps is certain only while the prior is off by less than half a step.
MAX_STEPS = 5
# How far a prior is off, as a share of what the term is worth in it: summed kernel tables 3-10 %, data sheets
# and general databases 10-40 % (measured on real runs, docs/validation.md). It keeps the coefficients from
# exploding where the data can't tell two terms apart.
PRIOR_WIDTH = {"tables": 0.1, "engine-steps": 0.1, "corrected": 0.1}
OTHER_PRIOR_WIDTH = 0.4
STEP_NOISE = 0.05  # of a step's time, for one interval between stamps
DECODE_NOISE = 0.005  # of a request's decode time, for all requests together about ten times over
HUBER_K = 1.5


@dataclass(frozen=True, slots=True)
class Fit:
    """A correction and what it was learned from."""

    coefficients: Coefficients
    frontend_s: float
    visible: int
    intervals: int
    requests: int
    conflicts: int
    residual_p50: float  # median |residual| of the equations, in units of their noise
    trail: tuple[dict[str, float], ...] = field(default=())  # coefficients after each round
    covariance: tuple[tuple[float, ...], ...] = ()  # of the coefficients, in the order of TERMS


@dataclass(slots=True)
class Equations:
    """rows . coefficients = goal, each with its noise `sigma`."""

    rows: list[FloatArray] = field(default_factory=list)
    goal: list[float] = field(default_factory=list)
    sigma: list[float] = field(default_factory=list)

    def add(self, other: Equations) -> None:
        self.rows += other.rows
        self.goal += other.goal
        self.sigma += other.sigma


def fit_first(
    case: Case,
    prior: StepModel,
    visible: int,
    frontend_s: float,
    kind: str = "tables",
    progress: Callable[[str], None] = lambda _: None,
) -> Fit:
    """Fit the four-term correction of `prior`, of the given `kind`, on requests 0 .. visible - 1 of `case`.

    Two kinds of equation, both sums of steps whose shapes are known: the time between two stamps that lie
    few steps apart (calibrate/follow.py), and each request's time from first to last token in a free run.
    Robust (Huber) least squares with a wide prior around zero; the schedule is replayed with the new
    correction `ROUNDS` times. No timing of a later request is read.
    """
    learned = frontend_seconds(case, visible)
    frontend_s = frontend_s if learned is None else learned
    pieces = [(part, int((rows < visible).sum())) for part, rows in parts(case, prior, frontend_s)]
    widths = PRIOR_WIDTH.get(kind, OTHER_PRIOR_WIDTH) * worth(prior, pieces[0][0].ranks)
    coefficients = Coefficients()
    trail = []
    used = requests = conflicts = 0
    residual = 0.0
    covariance: tuple[tuple[float, ...], ...] = ()
    for turn in range(ROUNDS):
        progress(f"fit: round {turn + 1} of {ROUNDS}")
        model = CorrectedStepModel(prior, coefficients)
        near, whole, conflicts = Equations(), Equations(), 0
        for part, seen in pieces:
            found, against = interval_equations(part, prior, model, seen, frontend_s)
            near.add(found)
            conflicts += against
            # One run's request equations say much the same: their noise grows with their number.
            whole.add(_request_equations(part, prior, model, seen, frontend_s))
        used, requests = len(near.goal), len(whole.goal)
        matrix = np.array([*near.rows, *whole.rows]).reshape(-1, len(TERMS))
        goal = np.array([*near.goal, *whole.goal])
        sigma = np.array([*near.sigma, *whole.sigma])
        if len(goal) == 0:
            break
        solution, residual, spread = robust_ridge(matrix, goal, sigma, widths)
        covariance = tuple(tuple(row) for row in spread.tolist())
        coefficients = Coefficients(**dict(zip(TERMS, solution.tolist(), strict=True)))
        trail.append(dict(zip(TERMS, solution.tolist(), strict=True)))
    return Fit(
        coefficients,
        frontend_s,
        visible,
        used,
        requests,
        conflicts,
        residual,
        tuple(trail),
        covariance,
    )


def robust_ridge(
    matrix: FloatArray, goal: FloatArray, sigma: FloatArray, widths: FloatArray
) -> tuple[FloatArray, float, FloatArray]:
    """(x, median |residual| / sigma, covariance of x): least squares on `matrix` x = `goal` with Huber weights.

    `sigma`: noise of each equation, shape (m,); `widths`: standard deviation of each x around zero.
    """
    weights = np.ones(len(goal))
    pull = np.diag(1 / widths)
    solution = np.zeros(len(widths))
    residual: FloatArray = np.zeros(len(goal))
    for _ in range(20):
        a = np.vstack([matrix * (weights / sigma)[:, None], pull])
        b = np.concatenate([goal * weights / sigma, np.zeros(len(widths))])
        solution = np.linalg.lstsq(a, b, rcond=None)[0].astype(np.float64)
        residual = np.abs(goal - matrix @ solution) / sigma
        weights = np.sqrt(np.minimum(1.0, HUBER_K / np.maximum(residual, 1e-12)))
    a = np.vstack([matrix * (weights / sigma)[:, None], pull])
    covariance = np.linalg.pinv(a.T @ a).astype(np.float64)
    return solution, float(np.median(residual)), covariance


def step_terms(shapes: Sequence[StepShape]) -> tuple[float, ...]:
    return group_features(shapes)[: len(TERMS)]


def worth(prior: StepModel, ranks: int) -> FloatArray:
    """What each term is worth in the prior at an ordinary step, in seconds per unit."""

    def seconds(shape: StepShape) -> float:
        return lockstep_seconds(prior, [shape] * ranks)

    n, context = 32, 1000
    decode = seconds(StepShape((), n, n * context, context))
    longer = seconds(StepShape((), n, 2 * n * context, 2 * context))
    prompt = seconds(StepShape(((2048, 0),), 0, 0, 0)) / 2048
    return np.array([decode, decode, prompt, max((longer - decode) / (n * context), 1e-10)])


def interval_equations(
    case: Case,
    prior: StepModel,
    model: StepModel,
    visible: int,
    frontend_s: float,
    stamps_only: bool = False,
) -> tuple[Equations, int]:
    """(times between near stamps, how many stamps contradicted the schedule).

    `stamps_only` leaves out what begins with an arrival: where `frontend_s` is not known, it says nothing.
    """
    followed = follow(case, lambda shapes: lockstep_seconds(model, shapes), visible, frontend_s)
    found = Equations()
    for interval in followed.intervals:
        if len(interval.steps) > MAX_STEPS or (stamps_only and interval.from_idle):
            continue
        expected = sum(lockstep_seconds(prior, shapes) for shapes in interval.steps)
        so_far = sum(lockstep_seconds(model, shapes) for shapes in interval.steps)
        if not 0.6 < interval.measured_s / so_far < 1.6:
            continue  # a step too many or too few, or the engine's first steps, which warm it up
        found.rows.append(np.sum([step_terms(shapes) for shapes in interval.steps], axis=0))
        found.goal.append(interval.measured_s - expected)
        found.sigma.append(STEP_NOISE * expected / float(np.sqrt(len(interval.steps))))
    return found, followed.conflicts


def _request_equations(
    case: Case, prior: StepModel, model: StepModel, visible: int, frontend_s: float
) -> Equations:
    """Each request's time from first to last token, over the steps of a free run."""
    run = predict_part(case, model, frontend_s, stop_after_first=visible)
    ends = np.array([wave.end_ns for wave in run.waves])
    seconds = np.cumsum([0.0, *(lockstep_seconds(prior, wave.shapes) for wave in run.waves)])
    terms = np.vstack(
        [np.zeros(len(TERMS)), np.cumsum([step_terms(wave.shapes) for wave in run.waves], axis=0)]
    )
    found = Equations()
    measured = case.measured
    for index in range(visible):
        decode_s = float(measured.e2e_s[index] - measured.ttft_s[index])
        if run.finish_ns[index] < 0:
            continue
        begin = int(np.searchsorted(ends, run.first_token_ns[index])) + 1
        end = int(np.searchsorted(ends, run.finish_ns[index])) + 1
        if end - begin < 20:
            continue
        found.rows.append(terms[end] - terms[begin])
        found.goal.append(decode_s - float(seconds[end] - seconds[begin]))
        found.sigma.append(DECODE_NOISE * decode_s * float(np.sqrt(visible / 10)))
    return found
