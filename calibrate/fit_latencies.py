"""Learn a correction and the front end's time from a client's latencies: nothing of the engine was recorded."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vsim.calibrate.case import Case
from vsim.calibrate.fit import (
    DECODE_NOISE,
    HUBER_K,
    OTHER_PRIOR_WIDTH,
    PRIOR_WIDTH,
    TERMS,
    Equations,
    Fit,
    FloatArray,
    interval_equations,
    robust_ridge,
    step_terms,
    worth,
)
from vsim.calibrate.follow import TOLERANCE_NS
from vsim.calibrate.predict import parts, predict_part
from vsim.models.correction import Coefficients, CorrectedStepModel
from vsim.models.step import StepModel

NS = 1_000_000_000
ROUNDS = 8
WHOLE_STEPS = 3
# Before anything is known: HTTP cost 5-7 ms on a quiet machine (docs/validation.md), more on a busy one.
USUAL_FRONTEND_S = 6e-3
FRONTEND_WIDTH_S = 20e-3
# What a client's stamp is off by: event loops, sockets, several tokens in one chunk.
STAMP_NOISE_S = 2e-3
# Errors that the requests of one run share, so that many of them say little more than ten: of a TTFT, and of
# the wait in a queue before it, which is a sum of what went before with all of its errors.
TTFT_NOISE = 0.01
WAIT_NOISE = 0.1
# Beyond this share of a TTFT in the queue, milliseconds of a front end drown in the queue's own error.
MOST_WAIT = 0.2
# A server's first requests warm it up (0.2 s and more each on a handed run): their TTFT is not the front end's.
WARM_UP_SHARE = 0.1
LEAST_DECODE_STEPS = 5


def fit_latencies(
    case: Case,
    prior: StepModel,
    visible: int,
    kind: str,
    progress: Callable[[str], None] = lambda _: None,
) -> Fit:
    """Fit the four terms of `fit.TERMS` and the front end's seconds on requests 0 .. visible - 1 of `case`.

    Gauss-Newton through the simulator: each round replays the trace with the correction so far, and takes
    for each request the steps that lay in its TTFT and between its first and last token as the derivative
    of these two times. The times between stamps of the client that lie few steps apart (follow.py) come
    on top where the schedule is sure. Robust (Huber) least squares with a wide prior around zero. No
    timing of a later request is read.
    """
    frontend_s = USUAL_FRONTEND_S
    pieces = [(part, int((rows < visible).sum())) for part, rows in parts(case, prior, frontend_s)]
    terms = PRIOR_WIDTH.get(kind, OTHER_PRIOR_WIDTH) * worth(prior, pieces[0][0].ranks)
    widths = np.array([*terms, FRONTEND_WIDTH_S])
    x = np.zeros(len(TERMS) + 1)
    best_x, least = x, float("inf")
    used = requests = conflicts = 0
    residual = 0.0
    covariance: tuple[tuple[float, ...], ...] = ()
    trail = []
    for turn in range(ROUNDS + 1):
        progress(f"fit: round {turn + 1} of {ROUNDS + 1}")
        frontend_s = USUAL_FRONTEND_S + float(x[-1])
        model = CorrectedStepModel(prior, _coefficients(x))
        near, whole, against = Equations(), Equations(), 0
        for part, seen in pieces:
            whole.add(_latency_equations(part, model, x, seen, frontend_s))
            if part.scheduler.async_scheduling and turn < ROUNDS:
                # Off, the host's part of a step hides in the stamps and not in the step model's time.
                at = max(0.0, frontend_s - TOLERANCE_NS / NS)
                found, clashes = interval_equations(part, prior, model, seen, at, stamps_only=True)
                for row in found.rows:
                    near.rows.append(np.array([*row, 0.0]))
                near.goal += found.goal
                near.sigma += found.sigma
                against += clashes
        if not whole.goal:
            break
        cost = _cost(whole, x)
        trail.append(
            dict(zip((*TERMS, "frontend_s", "cost"), [*x[:-1], frontend_s, cost], strict=True))
        )
        if cost < least:
            best_x, least = x, cost
        if turn == ROUNDS:
            break
        used, requests, conflicts = len(near.goal), len(whole.goal), against
        matrix = np.array([*near.rows, *whole.rows]).reshape(-1, len(x))
        goal = np.array([*near.goal, *whole.goal])
        sigma = np.array([*near.sigma, *whole.sigma])
        solution, residual, spread = robust_ridge(matrix, goal, sigma, widths)
        covariance = tuple(tuple(row[: len(TERMS)]) for row in spread[: len(TERMS)].tolist())
        # Where queues make the latencies bend, whole steps overshoot: the later ones are shorter, and from the best.
        share = 1.0 if turn < WHOLE_STEPS else 0.5
        x = (1 - share) * best_x + share * solution
        x[-1] = max(x[-1], -USUAL_FRONTEND_S)
    return Fit(
        _coefficients(best_x),
        USUAL_FRONTEND_S + float(best_x[-1]),
        visible,
        used,
        requests,
        conflicts,
        residual,
        tuple(trail),
        covariance,
    )


def _cost(equations: Equations, x: FloatArray) -> float:
    """Mean Huber loss of the latencies themselves at `x`, in units of their noise."""
    off = np.abs(np.array(equations.goal) - np.array(equations.rows) @ x)
    off /= np.array(equations.sigma)
    loss = np.where(off < HUBER_K, off**2 / 2, HUBER_K * (off - HUBER_K / 2))
    return float(loss.mean())


def _coefficients(x: FloatArray) -> Coefficients:
    return Coefficients(**dict(zip(TERMS, x[: len(TERMS)].tolist(), strict=True)))


def _latency_equations(
    case: Case, model: StepModel, x: FloatArray, visible: int, frontend_s: float
) -> Equations:
    """Each request's TTFT and its time from first to last token, around a replay with the correction `x`."""
    run = predict_part(case, model, frontend_s, stop_after_first=visible)
    found = Equations()
    if not run.waves:
        return found
    starts = np.array([wave.start_ns for wave in run.waves])
    ends = np.array([wave.end_ns for wave in run.waves])
    each = np.array([step_terms(wave.shapes) for wave in run.waves])
    sums = np.vstack([np.zeros(len(TERMS)), np.cumsum(each, axis=0)])
    measured, sent = case.measured, case.trace.arrival_ns
    many = float(np.sqrt(max(visible, 10) / 10))
    for index in range(visible):
        first, last = int(run.first_token_ns[index]), int(run.finish_ns[index])
        if last < 0:
            continue
        at = int(np.searchsorted(ends, first))
        due = int(sent[index]) + round(frontend_s * NS)
        begin = int(np.searchsorted(ends, due, side="right"))
        row = sums[at + 1] - sums[begin]
        catch_s = 0.0
        if begin <= at and starts[begin] < due:
            # It came while a step ran: only the rest of that one was waited for. Which step it just caught or
            # missed is luck, and only the mean over many requests tells anything.
            step_ns = max(1, int(ends[begin] - starts[begin]))
            row = row - each[begin] * (due - starts[begin]) / step_ns
            catch_s = step_ns / 2 / NS
        ttft_s = (first - int(sent[index])) / NS
        wait_s = max(0, int(run.first_scheduled_ns[index]) - due) / NS
        slope = np.array([*row, 1.0 if wait_s <= MOST_WAIT * ttft_s else 0.0])
        if index >= WARM_UP_SHARE * visible:
            shared = (TTFT_NOISE * ttft_s + WAIT_NOISE * wait_s) * many
            found.rows.append(slope)
            found.goal.append(float(measured.ttft_s[index]) - ttft_s + float(slope @ x))
            found.sigma.append(float(np.hypot(np.hypot(STAMP_NOISE_S, catch_s), shared)))
        end = int(np.searchsorted(ends, last))
        if end - at < LEAST_DECODE_STEPS:
            continue
        decode_s = float(measured.e2e_s[index] - measured.ttft_s[index])
        slope = np.array([*(sums[end + 1] - sums[at + 1]), 0.0])
        found.rows.append(slope)
        found.goal.append(decode_s - (last - first) / NS + float(slope @ x))
        found.sigma.append(float(np.hypot(STAMP_NOISE_S, DECODE_NOISE * decode_s)) * many)
    return found
