"""A fixed piece of work, timed around and within steps: how fast is this machine right now?

A CPU that others share (hyper-threads, memory channels, clock rates) slows down by a third for a tenth of a
second or for minutes, without one moment of it showing up as time stolen from this process. The same work
done beside a step slows down with it; the step's time divided by that slowdown is what it takes on the
undisturbed machine. The work is what a step of a small model is made of: mostly matrix products of bfloat16
weights that don't fit the second-level cache, and a share of plain Python. Either alone suffers otherwise
than a step does: over 1,890 equal decode steps on a machine in heavy use, means of 200 of them lay 39 %
apart as they were, 4.5 % by the matrix products alone, 15 % by Python alone, 2.2 % by both.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

ROWS = 16
SHAPES = ((1536, 512), (512, 512), (3072, 512), (512, 1536))  # 6.8 MB of weights
LOOPS = 2800  # of Python: about a sixth of the time
COPIES = 4  # of the weights, in turn: where one set happens to lie in memory makes it 2-5 % slower or faster
WARM_UP = 20
EVERY_NS = 8_000_000  # within long steps: what goes on lasts some ten milliseconds
REFERENCE_QUANTILE = 0.05  # near the fastest, but not one lucky run


class Yardstick:
    """The work, and a clock that runs at the undisturbed machine's speed.

    `reference_ns` is the work's time on the undisturbed machine. Durations of two sessions are comparable
    only under one reference; None until `learn_reference`.
    """

    def __init__(self, reference_ns: int | None = None) -> None:
        import torch

        self._torch = torch
        generator = torch.Generator().manual_seed(0)
        self._copies = itertools.cycle(
            [
                [
                    (
                        torch.randn(ROWS, width, generator=generator).to(torch.bfloat16),
                        torch.randn(out, width, generator=generator).to(torch.bfloat16),
                    )
                    for out, width in SHAPES
                ]
                for _ in range(COPIES)
            ]
        )
        self.reference_ns = reference_ns
        self._seen_ns: list[int] = []
        for _ in range(WARM_UP):
            self._run_ns()
        self._seen_ns.clear()
        self.begin()

    def learn_reference(self) -> None:
        """Take the reference from the runs so far, if none was given.

        They must have been made between steps of the engine: right after each other they would find their weights
        in the cache, and be faster than they ever are beside a step.
        """
        if self.reference_ns is None:
            times = sorted(self._seen_ns)
            self.reference_ns = times[int(REFERENCE_QUANTILE * len(times))]

    def begin(self) -> None:
        """A stretch of work begins."""
        self._last_ns = self._run_ns()
        self._open()

    def _open(self) -> None:
        self.own_ns = 0  # time that the yardstick itself took since the stretch began
        self.own_cpu_ns = 0  # less than that where another process had the core meanwhile
        self._work_ns = 0.0
        self._at_best_ns = 0.0
        self._since = time.perf_counter_ns()

    def within(self) -> None:
        """In the middle of a stretch: look again if the last look was long ago."""
        if time.perf_counter_ns() - self._since >= EVERY_NS:
            self._lap()

    def end(self) -> float:
        """Mean slowdown of the stretch that ends here, weighted by time; the next one begins."""
        self._lap()
        slowdown = self._work_ns / self._at_best_ns
        self._open()
        return slowdown

    def _lap(self) -> None:
        start, cpu = time.perf_counter_ns(), time.process_time_ns()
        work = max(1, start - self._since)
        now_ns = self._run_ns()
        around = (self._last_ns + now_ns) / 2 / (self.reference_ns or now_ns)
        self._work_ns += work
        self._at_best_ns += work / around
        self._last_ns = now_ns
        self._since = time.perf_counter_ns()
        self.own_ns += self._since - start
        self.own_cpu_ns += time.process_time_ns() - cpu

    def _run_ns(self) -> int:
        """CPU time of one run: a moment in which another process has the core says nothing about its speed."""
        linear: Any = self._torch.nn.functional.linear
        layers = next(self._copies)
        with self._torch.inference_mode():
            start = time.thread_time_ns()
            for rows, weights in layers:
                linear(rows, weights)
            total = 0
            for i in range(LOOPS):
                total += i * i
            took = max(1, time.thread_time_ns() - start)
        if self.reference_ns is None:
            self._seen_ns.append(took)
        return took
