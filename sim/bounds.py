"""Bounds on a simulation: how far its clock may go and how many steps its engines may take.

A bounded run is the beginning of the unbounded one, with what had not ended by then left unfinished; it says so
in `Run.ended_early`. Several replicas share the bounds: one clock, and the sum of their steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from vsim.errors import UserError
from vsim.sim.run import Run

NS = 1_000_000_000
MAX_SIM_TIME_S = 4e9  # below 2**62 ns, the largest time of a trace
OnStep = Callable[[int, int], None]


class Clock(Protocol):
    """What a SimPy environment is asked for: the next event's time, `inf` without one, and to let it happen."""

    def peek(self) -> float: ...
    def step(self) -> None: ...


class BoundReachedError(Exception):
    """A bound was reached with requests left; says which and how many. No error of the user's."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """None: no bound. Raises UserError for numbers that leave nothing to simulate."""

    max_sim_time_s: float | None = None
    max_steps: int | None = None

    def __post_init__(self) -> None:
        time_s, steps = self.max_sim_time_s, self.max_steps
        if time_s is not None and not (math.isfinite(time_s) and 0 < time_s <= MAX_SIM_TIME_S):
            raise UserError(
                f"max_sim_time_s={time_s:g} must be above 0 and at most {MAX_SIM_TIME_S:g} seconds"
            )
        if steps is not None and steps < 1:
            raise UserError(f"max_steps={steps} must be at least 1")

    @property
    def end_ns(self) -> int:
        """The last instant that is simulated."""
        return 1 << 62 if self.max_sim_time_s is None else round(self.max_sim_time_s * NS)

    def hold_for(self, run: Run) -> bool:
        """Did `run`, simulated without bounds, stay clear of them?"""
        steps = len(run.steps["start_ns"])
        return run.end_ns <= self.end_ns and (self.max_steps is None or steps < self.max_steps)


class Watch:
    """One simulation under `bounds`, of `total` requests; passes each step on to `on_step`."""

    def __init__(self, bounds: Bounds, total: int, on_step: OnStep | None = None) -> None:
        self.bounds, self._total, self._on_step = bounds, total, on_step
        self._end_ns = bounds.end_ns
        self._steps = 0

    def __call__(self, now_ns: int, ended: int) -> None:
        """After each step. Raises BoundReachedError if it was the last one and requests are left."""
        self._steps += 1
        if self._on_step is not None:
            self._on_step(now_ns, ended)
        most = self.bounds.max_steps
        if most is not None and self._steps >= most and ended < self._total:
            raise BoundReachedError(self._sentence(f"--max-steps {most}", now_ns, ended))
        self._check_time(now_ns, ended)

    def glance(self, now_ns: int, ended: int) -> None:
        """As `__call__` where steps come thousands at a time: only the clock is looked at."""
        if self._on_step is not None:
            self._on_step(now_ns, ended)
        self._check_time(now_ns, ended)

    def run(self, env: Clock, ended: Callable[[], int]) -> None:
        """`env.run()` up to the bound. Raises BoundReachedError if something would have happened later."""
        while env.peek() <= self._end_ns:
            env.step()
        if env.peek() != float("inf") and ended() < self._total:
            self._check_time(self._end_ns + 1, ended())

    def _check_time(self, now_ns: int, ended: int) -> None:
        if now_ns > self._end_ns:
            text = f"--max-sim-time-s {self.bounds.max_sim_time_s:g}"
            raise BoundReachedError(self._sentence(text, min(now_ns, self._end_ns), ended))

    def _sentence(self, bound: str, now_ns: int, ended: int) -> str:
        return (
            f"{bound} was reached at {now_ns / NS:,.3f} s of simulated time, when {ended:,} of {self._total:,} "
            "requests had ended; the rest is left out of all latencies"
        )
