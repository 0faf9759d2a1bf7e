"""Follow a measured run: replay its schedule on the measured clock, and read off what its steps took.

A request's first and last token are stamped when a step ends. The scheduler is deterministic, so replaying
it with its clock set to those stamps tells which steps lie between two of them; their sum was measured.
Only the stamps of the first `visible` requests are used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from vsim.calibrate.case import Case
from vsim.models.step import StepShape
from vsim.sim.lockstep import Wave, run_lockstep
from vsim.sim.step import StepOutput

NS = 1_000_000_000
# Stamps are taken a little after the step boundary that they belong to (clocks agree to 1-2 ms).
TOLERANCE_NS = 2_000_000
# Stamps of one step that differ by more come from two steps: the replayed schedule is another one there.
SAME_STEP_NS = 1_000_000

Seconds = Callable[[Sequence[StepShape]], float]


@dataclass(frozen=True, slots=True)
class Interval:
    """Successive steps (one tuple of shapes per step, an entry per rank) and their measured sum."""

    steps: tuple[tuple[StepShape, ...], ...]
    measured_s: float
    from_idle: bool = False  # it begins when a request reached the idle engine, not with a stamp


@dataclass(slots=True)
class _Clock:
    """Sets the end of a step to the stamps of the tokens it produced, and cuts the run into intervals."""

    first_ns: Sequence[int]
    last_ns: Sequence[int]
    visible: int
    intervals: list[Interval] = field(default_factory=list)
    conflicts: int = 0
    # (first, last wave, measured ns) between two stamps, to pace the next pass
    pieces: list[tuple[int, int, int]] = field(default_factory=list)
    _started: set[int] = field(default_factory=set)
    _anchor_ns: int = -1
    _from_idle: bool = True
    _since: list[Wave] = field(default_factory=list)
    _wave: int = 0
    _previous_end: int = 0

    def end_of(self, wave: Wave, outputs: Sequence[StepOutput]) -> int:
        if wave.start_ns > self._previous_end or self._anchor_ns < 0:
            # The engine had been idle: time starts again when it took up the request.
            self._anchor_ns = wave.start_ns + TOLERANCE_NS
            self._from_idle = True
            self._since = []
        self._since.append(wave)
        self._wave += 1
        stamps = []
        for output in outputs:
            for index in output.emitted:
                if index < self.visible and index not in self._started:
                    stamps.append(self.first_ns[index])
                self._started.add(index)
            stamps += [self.last_ns[i] for i in output.finished if i < self.visible]
        end = wave.end_ns
        if stamps:
            stamps.sort()
            stamp = stamps[len(stamps) // 2]
            agrees = stamps[-1] - stamps[0] <= SAME_STEP_NS
            self.conflicts += not agrees
            if stamp > self._anchor_ns:
                end = stamp
                taken = stamp - self._anchor_ns
                if agrees:
                    shapes = tuple(w.shapes for w in self._since)
                    self.intervals.append(Interval(shapes, taken / NS, self._from_idle))
                self.pieces.append((self._wave - len(self._since), self._wave, taken))
                self._anchor_ns = stamp
                self._from_idle = False
                self._since = []
        self._previous_end = end
        return end

    def pace(self, predicted: Sequence[float]) -> list[float]:
        """Measured over predicted time of the piece that each step lies in; 1 where nothing was measured."""
        factors = [1.0] * len(predicted)
        for begin, end, taken in self.pieces:
            expected = sum(predicted[begin:end])
            if expected > 0:
                factors[begin:end] = [min(max(taken / NS / expected, 0.3), 3.0)] * (end - begin)
        return factors


@dataclass(frozen=True, slots=True)
class Followed:
    """What was read off: intervals whose steps are known, and how often stamps and schedule disagreed."""

    intervals: tuple[Interval, ...]
    conflicts: int
    steps: int


def follow(
    case: Case, seconds: Seconds, visible: int, frontend_s: float, passes: int = 2
) -> Followed:
    """Replay `case` on the clock of its first `visible` requests.

    `seconds` predicts a step, for where the run has no stamps; each further pass scales it between two
    stamps to what was measured there, so that arrivals meet the right steps.
    """
    measured = case.measured
    first = np.round(np.nan_to_num(measured.first_token_s[:visible]) * NS).astype(np.int64).tolist()
    last = np.round(np.nan_to_num(measured.last_token_s[:visible]) * NS).astype(np.int64).tolist()
    due = due_ns(case, frontend_s)
    queued = measured.queued_s[:visible]
    for index, t in enumerate(queued.tolist()):
        if not np.isnan(t):
            due[index] = round(t * NS) - TOLERANCE_NS
    pace: list[float] = []
    for remaining in reversed(range(passes)):
        clock = _Clock(first, last, visible)
        paced = _Paced(seconds, pace)
        run = run_lockstep(
            case.trace,
            case.scheduler,
            paced.wave_ns,
            ranks=case.ranks,
            due_ns=due,
            end_of=clock.end_of,
            stop_after_first=visible,
        )
        if remaining:
            pace = clock.pace(paced.predicted)
    return Followed(tuple(clock.intervals), clock.conflicts, len(run.waves))


@dataclass(slots=True)
class _Paced:
    """Predicted step times, scaled by what the pass before measured around the same step."""

    seconds: Seconds
    factors: Sequence[float]
    predicted: list[float] = field(default_factory=list)

    def wave_ns(self, shapes: Sequence[StepShape]) -> tuple[int, int]:
        at = len(self.predicted)
        self.predicted.append(self.seconds(shapes))
        factor = self.factors[at] if at < len(self.factors) else 1.0
        return 0, max(1, round(self.predicted[at] * factor * NS))


def due_ns(case: Case, frontend_s: float) -> list[int]:
    """When each request stands in the engine's inbox, if the front end takes `frontend_s`."""
    return (case.trace.arrival_ns + round(frontend_s * NS)).tolist()


def frontend_seconds(case: Case, visible: int) -> float | None:
    """Shortest wait between arrival and inbox among the first `visible`: no running step hides in it."""
    waits = (case.measured.queued_s - case.measured.arrival_s)[:visible]
    waits = waits[~np.isnan(waits)]
    return max(0.0, float(waits.min())) if len(waits) else None
