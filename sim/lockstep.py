"""Replicas that step together: data-parallel ranks whose MoE blocks wait for each other, on a plain clock.

The loop is that of `engine.Replica`, once for all ranks: in every wave each rank contributes its next batch,
or a dummy one if it has nothing to do, and all of them end at the same time. With one rank it gives what
`engine.simulate` gives. It also takes its times from outside, so that a measured run can be followed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from vsim.models.step import StepShape
from vsim.sim.config import SchedulerConfig
from vsim.sim.engine import make_scheduler
from vsim.sim.step import Step, StepOutput
from vsim.traces.trace import Trace

Int64Array = npt.NDArray[np.int64]

# What a rank without requests runs so that the others can go on: one token (vLLM `execute_dummy_batch`).
DUMMY = StepShape((), 1, 0, 0)
# How often the front end learns the ranks' queue lengths (vLLM 0.19 v1/engine/coordinator.py).
STATS_INTERVAL_NS = 100_000_000


@dataclass(slots=True)
class Wave:
    """One step of all ranks. `shapes` has an entry per rank; times in ns."""

    scheduled_ns: int
    start_ns: int
    end_ns: int
    steps: tuple[Step | None, ...]
    shapes: tuple[StepShape, ...]


@dataclass(slots=True)
class LockstepRun:
    """Per request (arrays of shape (n,), ns, -1: never): first and last token, first admission, preemptions."""

    first_scheduled_ns: Int64Array
    first_token_ns: Int64Array
    finish_ns: Int64Array
    preemptions: Int64Array
    rank: Int64Array
    refused: dict[int, str] = field(default_factory=dict)
    waves: list[Wave] = field(default_factory=list)
    ended_early: str | None = None


class Queues(Protocol):
    """What a rank reports: requests waiting and running."""

    @property
    def num_waiting(self) -> int: ...

    @property
    def num_running(self) -> int: ...


class QueueBalancer:
    """vLLM's own routing between data-parallel ranks: least 4 x waiting + running, lowest rank first.

    The counts are as old as the last report; in between only the requests sent count (v0.19
    v1/engine/core_client.py, `DPLBAsyncMPClient.get_core_engine_for_request`).
    """

    def __init__(self, ranks: Sequence[Queues]) -> None:
        self._ranks = ranks
        self._counts = [[0, 0] for _ in ranks]
        self._reported_ns = -STATS_INTERVAL_NS

    def report(self, now: int) -> None:
        """A step ended at `now`: the ranks report, at most once an interval."""
        if now - self._reported_ns >= STATS_INTERVAL_NS:
            self._reported_ns = now
            self._counts = [[s.num_waiting, s.num_running] for s in self._ranks]

    def route(self) -> int:
        scores = [4 * waiting + running for waiting, running in self._counts]
        rank = scores.index(min(scores))
        self._counts[rank][0] += 1
        return rank


def run_lockstep(
    trace: Trace,
    config: SchedulerConfig,
    wave_ns: Callable[[Sequence[StepShape]], tuple[int, int]],
    *,
    ranks: int = 1,
    due_ns: Sequence[int] | None = None,
    end_of: Callable[[Wave, Sequence[StepOutput]], int] | None = None,
    route: Sequence[int] | None = None,
    stop_after_first: int | None = None,
) -> LockstepRun:
    """Run `trace` on `ranks` replicas of `config` that step together.

    `wave_ns(shapes)` gives (host, device) ns of a wave. `due_ns`: when each request stands in the engine's
    inbox (default: its arrival). `route`: each request's rank, where it is known. `end_of(wave, outputs)`
    may move the end of a wave, given what it produced: that is how a measured run is followed. With
    `stop_after_first=k` the run ends once requests 0 .. k - 1 have ended.
    """
    n = len(trace)
    due = [int(t) for t in (trace.arrival_ns if due_ns is None else due_ns)]
    inbox = deque(sorted(range(n), key=lambda index: (due[index], index)))
    schedulers = [make_scheduler(config) for _ in range(ranks)]
    balancer = QueueBalancer(schedulers)
    marks = {name: [-1] * n for name in ("scheduled", "first", "finish", "rank")}
    preemptions = [0] * n
    refused: dict[int, str] = {}
    waves: list[Wave] = []
    ended_early: str | None = None
    depth = config.max_concurrent_batches
    in_flight: deque[Wave] = deque()
    now = device_free = 0
    awaited = n if stop_after_first is None else min(stop_after_first, n)
    while awaited:
        while inbox and due[inbox[0]] <= now:
            index = inbox.popleft()
            rank = balancer.route() if route is None else route[index]
            marks["rank"][index] = rank
            refusal = schedulers[rank].add(trace.request(index))
            if refusal is not None:
                refused[index] = refusal
                awaited -= stop_after_first is None or index < stop_after_first
        busy = any(s.has_requests() for s in schedulers)
        if not busy and not in_flight:
            if not inbox:
                break
            now = max(now, due[inbox[0]])
            continue
        if busy:
            steps = tuple(s.schedule() if s.has_requests() else None for s in schedulers)
            shapes = tuple(s.shape if s is not None and s.requests else DUMMY for s in steps)
            real = any(s is not None and s.requests for s in steps)
            host, device = wave_ns(shapes) if real else (0, 0)
            for step in steps:
                for index in step.new if step is not None else ():
                    marks["scheduled"][index] = now
                for index in step.preempted if step is not None else ():
                    preemptions[index] += 1
            if depth > 1:
                now += host
                host = 0
            start = max(now + host, device_free) if real else now
            device_free = max(device_free, start + device)
            in_flight.append(Wave(now, start, start + device, steps, shapes))
            if len(in_flight) < depth and (real or any(s.has_requests() for s in schedulers)):
                continue
        wave = in_flight.popleft()
        outputs = [
            scheduler.complete(step) if step is not None else StepOutput([], [])
            for scheduler, step in zip(schedulers, wave.steps, strict=True)
        ]
        real = any(step is not None and step.requests for step in wave.steps)
        if real and end_of is not None:
            end = end_of(wave, outputs)
            # What is queued behind moves along.
            shift, wave.end_ns = end - wave.end_ns, end
            for behind in in_flight:
                behind.start_ns += shift
                behind.end_ns += shift
            device_free += shift
            now = end
        now = max(now, wave.end_ns)
        for output in outputs:
            for index in output.emitted:
                if marks["first"][index] < 0:
                    marks["first"][index] = now
            for index in output.finished:
                marks["finish"][index] = now
                awaited -= stop_after_first is None or index < stop_after_first
        balancer.report(now)
        if real:
            waves.append(wave)
        elif not in_flight and not any(s is not None and s.preempted for s in wave.steps):
            # Nothing could be scheduled, nothing runs: only another request can change that.
            if not inbox:
                left = sum(s.num_running + s.num_waiting for s in schedulers)
                if left:
                    ended_early = f"stalled: {left} of {n} requests could never be scheduled"
                    break
                continue
            now = max(now, due[inbox[0]])
    return LockstepRun(
        first_scheduled_ns=np.asarray(marks["scheduled"], dtype=np.int64),
        first_token_ns=np.asarray(marks["first"], dtype=np.int64),
        finish_ns=np.asarray(marks["finish"], dtype=np.int64),
        rank=np.asarray(marks["rank"], dtype=np.int64),
        preemptions=np.asarray(preemptions, dtype=np.int64),
        refused=refused,
        waves=waves,
        ended_early=ended_early,
    )
