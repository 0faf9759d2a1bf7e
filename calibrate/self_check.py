"""Does a measured run agree with itself, and with the scheduler's decisions?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vsim.calibrate.measure import DISTURBED_S, DISTURBED_SHARE
from vsim.calibrate.measured_run import Measured
from vsim.models.step import StepModel, StepShape
from vsim.sim.config import SchedulerConfig
from vsim.sim.engine import simulate
from vsim.sim.run import FINISHED, Run
from vsim.traces.trace import Trace

# How far apart two ways of counting the same thing may be before the measurement is doubted.
LITTLE_TOLERANCE = 0.01
DISTURBED_FACTOR = 1.35  # slower than during the calibration: no yardstick divides that out well


class _RecordedSteps:
    """A step model that answers with the real engine's own step times, in their order."""

    def __init__(self, steps: Sequence[dict[str, Any]]) -> None:
        self._steps = steps
        self._next = 0
        self.same_shapes = 0
        self.differs_at: int | None = None

    def device_seconds(self, shape: StepShape) -> float:
        if self._next >= len(self._steps):
            self.differs_at = self.differs_at or self._next
            return 1e-3
        step = self._steps[self._next]
        real = sorted(zip(step["num_tokens"], step["num_computed"], strict=True))
        chunks = sorted(pair for pair in real if pair[0] > 1)
        decodes = [context for new, context in real if new == 1]
        same = (
            sorted(shape.prefills) == chunks
            and shape.num_decodes == len(decodes)
            and shape.decode_context_sum == sum(decodes)
        )
        if same and self.differs_at is None:
            self.same_shapes += 1
        elif self.differs_at is None:
            self.differs_at = self._next
        self._next += 1
        return float(step["end_ns"] - step["start_ns"]) / 1e9

    def host_seconds(self, shape: StepShape) -> float:
        return 0.0


def same_decisions(trace: Trace, config: SchedulerConfig, measured: Measured) -> dict[str, Any]:
    """Simulate with the real step times: whatever still differs is the scheduler's doing, not the clock's.

    Only where one step follows the other (no async scheduling).
    """
    if config.max_concurrent_batches > 1:
        return {"checked": False}
    recorded = _RecordedSteps(measured.steps)
    run = simulate(trace, config, recorded)
    real = measured.run.requests
    late = np.abs(run.requests["finish_ns"] - real["finish_ns"]).max() if len(trace) else 0
    return {
        "checked": True,
        "steps": len(measured.steps),
        "equal_steps": recorded.same_shapes,
        "first_difference": recorded.differs_at,
        "largest_finish_difference_ms": round(float(late) / 1e6, 6),
        "preemptions": [int(run.requests["preemptions"].sum()), int(real["preemptions"].sum())],
    }


def self_check(trace: Trace, run: Run) -> list[str]:
    """Sentences about what can't be right in a measured run: token counts, clocks, Little's law."""
    said = []
    columns = run.requests
    done = columns["status"] == FINISHED
    if not done.all():
        said.append(f"{int((~done).sum())} of {len(trace)} requests did not finish")
    wrong = int((columns["output_tokens"][done] != np.asarray(trace.output_tokens)[done]).sum())
    if wrong:
        said.append(f"{wrong} requests gave another number of tokens than the trace has")
    gaps = int(run.itl_count.sum())
    expected = int((columns["output_tokens"][done] - 1).sum())
    if done.all() and gaps != expected:
        said.append(f"{gaps} gaps between tokens were seen, {expected} must have been")
    computed = int(run.steps["tokens"].sum())
    # The last token of each request is never fed back.
    needed = int(
        (
            columns["prompt_tokens"]
            - columns["cached_tokens"]
            + columns["output_tokens"]
            - 1
            + columns["recomputed_tokens"]
        )[done].sum()
    )
    if done.all() and computed != needed:
        said.append(f"the steps computed {computed} tokens, the requests needed {needed}")
    for early, late in (
        ("arrival_ns", "first_scheduled_ns"),
        ("first_scheduled_ns", "first_token_ns"),
        ("first_token_ns", "finish_ns"),
    ):
        backwards = int((columns[late][done] < columns[early][done]).sum())
        if backwards:
            said.append(f"in {backwards} requests {late} lies before {early}: two clocks are mixed")
    if (np.diff(run.steps["end_ns"]) < 0).any():
        said.append("steps end before their predecessors: the clock ran backwards")
    if done.all():
        said += _little(run)
    return said


def _little(run: Run) -> list[str]:
    """Requests in the engine over time, counted by the scheduler and by the requests' own stamps."""
    start, end = run.steps["start_ns"], run.steps["end_ns"]
    inside = (run.steps["running"] + run.steps["waiting"]).astype(float)
    by_steps = float((inside * (end - start)).sum())
    # A request is seen by the scheduler at the first step that starts once it has arrived.
    seen = start[np.minimum(np.searchsorted(start, run.requests["arrival_ns"]), len(start) - 1)]
    by_requests = float((run.requests["finish_ns"] - seen).sum())
    if by_requests and abs(by_steps / by_requests - 1) > LITTLE_TOLERANCE:
        return [
            f"Little's law fails: the scheduler counted {by_steps / 1e9:.3f} request-seconds, "
            f"the requests' stamps give {by_requests / 1e9:.3f}"
        ]
    return []


def step_error(model: StepModel, measured: Sequence[Measured]) -> dict[str, float]:
    """Error of single steps, predicted against measured, over all repeats; % of the measured time."""
    relative, predicted_sum, measured_sum = [], 0.0, 0.0
    for one in measured:
        for step in one.steps:
            shape = shape_of(step)
            real = (step["end_ns"] - step["start_ns"]) / 1e9
            ours = model.device_seconds(shape) + model.host_seconds(shape)
            relative.append((ours / real - 1) * 100)
            predicted_sum += ours
            measured_sum += real
    if not relative:
        return {}
    size = np.abs(relative)
    return {
        "steps": float(len(relative)),
        "median_abs_pct": round(float(np.median(size)), 3),
        "p95_abs_pct": round(float(np.percentile(size, 95)), 3),
        "bias_pct": round((predicted_sum / measured_sum - 1) * 100, 3),
    }


def shape_of(step: dict[str, Any]) -> StepShape:
    """A recorder's step as the cost model sees it."""
    pairs = list(zip(step["num_tokens"], step["num_computed"], strict=True))
    contexts = [context for new, context in pairs if new == 1]
    return StepShape(
        tuple((new, context) for new, context in pairs if new > 1),
        len(contexts),
        sum(contexts),
        max(contexts, default=0),
    )


def noisy(measured: Sequence[Measured], single_thread: bool) -> str | None:
    """One sentence if other work had the core during the repeats, else None."""
    if not single_thread:
        return None
    steps = [step for one in measured for step in one.steps]
    hit = sum(
        step["total_ns"] - step["cpu_ns"]
        > max(DISTURBED_S * 1e9, DISTURBED_SHARE * step["total_ns"])
        for step in steps
    )
    share = hit / max(1, len(steps))
    if share <= 0.1:
        return None
    return (
        f"this machine was busy: in {share:.0%} of {len(steps)} steps another process had the engine's core; "
        "check again when nothing else runs, or with --clock cpu"
    )


def slowdowns(measured: Sequence[Measured]) -> list[dict[str, float]]:
    """By how much the machine was slower than at its best in each repeat, where a yardstick told; else none."""
    found = []
    for one in measured:
        factors = [step["slowdown"] for step in one.steps if step.get("slowdown", 1.0) != 1.0]
        if factors:
            p50, p95 = np.percentile(factors, [50, 95])
            found.append({"p50": round(float(p50), 4), "p95": round(float(p95), 4)})
    return found


def median_slowdown(one: Measured) -> float:
    """How much slower than at its best the machine was around a repeat's steps; 1 where no yardstick told."""
    found = slowdowns([one])
    return found[0]["p50"] if found else 1.0


def usual_slowdown(quality: Mapping[str, Any]) -> float:
    """The same while the profile was measured, from the artifact's `quality`."""
    told = quality.get("slowdown")
    return float(told["p50"]) if isinstance(told, Mapping) and "p50" in told else 1.0


def undisturbed(
    measured: Sequence[Measured], usual: float
) -> tuple[list[Measured], list[Measured]]:
    """(repeats to count, repeats to leave out).

    A yardstick divides out what slows it and the engine alike. While the machine is slower than during the
    calibration by over a third, what it is slow at is something else, and durations come out up to a quarter
    too long or too short. Decided by the yardstick alone, never by how the engine did.
    """
    limit = usual * DISTURBED_FACTOR
    return (
        [one for one in measured if median_slowdown(one) <= limit],
        [one for one in measured if median_slowdown(one) > limit],
    )


def disturbed_doubt(measured: Sequence[Measured], usual: float) -> list[str]:
    """One sentence if repeats are among these that should have been left out."""
    _, bad = undisturbed(measured, usual)
    if not bad:
        return []
    worst = max(median_slowdown(one) for one in bad) / usual - 1
    return [
        f"during {len(bad)} of {len(measured)} repeats the machine was up to {worst:.0%} slower than during the "
        "calibration, by the yardstick, and there was no quieter moment: check again when nothing else runs"
    ]
