"""A case on V0's virtual clock: one log record per step (`vsim debug steps`).

The loop is LLMEngine.step of vLLM 0.8.5 in its synchronous form: arrivals, schedule, execute, outputs. Times
are float seconds, summed as the recorded cases sum them, and rounded to 1 ns in records.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

from vsim.sim.block_manager_v0 import BlockAllocatorV0
from vsim.sim.case import Case
from vsim.sim.scheduler_v0 import LIVELOCK_AFTER, SchedulerV0
from vsim.sim.step_v0 import EngineDiedV0Error, LivelockError, StepV0


def run_case(case: Case, max_steps: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the step records of a V0 case, then {"summary": ...}; docs/exactness.md documents the keys.

    Where 0.8.5 would have crashed, the records end there and `summary.error` is what it would have said. A
    livelock is followed for `max_steps` if that is given, else it ends the log in the same way.
    """
    return _Run(case, None if max_steps is not None else LIVELOCK_AFTER).records(max_steps)


class _Run:
    """The state of one case under way."""

    def __init__(self, case: Case, livelock_after: int | None) -> None:
        self.case = case
        self.scheduler = SchedulerV0(case.config, livelock_after=livelock_after)
        self.t = 0.0
        self.arrivals = sorted(
            case.requests, key=lambda request: (request.arrival_s, request.index)
        )
        self.next_arrival = 0
        self.ids = [request.id for request in case.requests]
        self.stats: dict[str, dict[str, Any]] = {}
        self.rejected: list[str] = []
        self.num_steps = 0

    def records(self, max_steps: int | None) -> Iterator[dict[str, Any]]:
        scheduler = self.scheduler
        stalled, error = False, None
        while max_steps is None or self.num_steps < max_steps:
            if not scheduler.has_unfinished_requests() and not self._jump():
                break
            self._add_arrivals()
            if not scheduler.has_unfinished_requests():
                continue
            try:
                record = self._step()
            except EngineDiedV0Error as death:
                kind, _, message = death.said.partition(": ")
                error = f"{kind}: {message[:120]}"
                break
            except LivelockError as livelock:
                error = str(livelock)
                break
            if record is not None:
                yield record
                self.num_steps += 1
            elif not self._jump():
                stalled = True
                break
        yield {"summary": self._summary(stalled, error)}

    def _jump(self) -> bool:
        """Nothing can happen before the next arrival: go there. False if there is none."""
        if self.next_arrival >= len(self.arrivals):
            return False
        self.t = max(self.t, self.arrivals[self.next_arrival].arrival_s)
        return True

    def _add_arrivals(self) -> None:
        while self.next_arrival < len(self.arrivals):
            request = self.arrivals[self.next_arrival]
            if request.arrival_s > self.t:
                break
            self.next_arrival += 1
            if self.scheduler.add(request) is not None:  # type: ignore[arg-type]
                self.rejected.append(request.id)
                continue
            self.stats[request.id] = {
                "arrival": request.arrival_s,
                "prompt": request.prompt_tokens,
                "first_sched": None,
                "hit0": None,
                "first_token": None,
                "finish": None,
                "out": 0,
                "recompute": 0,
                "swap": 0,
                "ignored": False,
            }

    def _step(self) -> dict[str, Any] | None:
        """One step and its record; None if nothing changed."""
        scheduler, stats = self.scheduler, self.stats
        queues = scheduler.queues
        step = scheduler.schedule(self.t)
        names = self._names
        scheduled = names(step.requests)
        hits = {name: hit for name, hit in zip(scheduled, step.hits, strict=True) if hit}
        for name in names(step.new):
            stats[name]["first_sched"] = round(self.t, 9)
            stats[name]["hit0"] = hits.get(name, 0)
        for name in names(step.recomputed):
            stats[name]["recompute"] += 1
        for name in names(step.swapped_out_requests):
            stats[name]["swap"] += 1
        for name in names(step.ignored):
            stats[name]["ignored"] = True
        dt = self._duration(step)
        record: dict[str, Any] = {
            "step": self.num_steps,
            "t_start": round(self.t, 9),
            "dt": round(dt, 9),
            "t_end": round(self.t + dt, 9),
            "scheduled": {
                name: new + hit
                for name, new, hit in zip(scheduled, step.num_tokens, step.hits, strict=True)
            },
            "computed": {
                name: before - hit
                for name, before, hit in zip(scheduled, step.num_computed, step.hits, strict=True)
            },
            "prompt": [
                name for name, prompt in zip(scheduled, step.is_prefill, strict=True) if prompt
            ],
            "num_batched_tokens": step.num_batched_tokens,
            "tokens": step.total_tokens,
            "new": names(step.new),
            "recomputed": names(step.recomputed),
            "swapped_out": names(step.swapped_out_requests),
            "swapped_in": names(step.swapped_in_requests),
            "ignored": names(step.ignored),
            "swap_in": [list(pair) for pair in step.swap_in],
            "swap_out": [list(pair) for pair in step.swap_out],
            "copy": [],
            "preempted": step.num_preempted,
            "cum_preempt": scheduler.num_cumulative_preemption,
            "q": [len(queues.running), len(queues.swapped), len(queues.waiting)],
            "free_sched": scheduler.num_free_blocks,
            "free_cpu_sched": scheduler.num_free_cpu_blocks,
        }
        if hits:
            record["hits"] = hits
        self.t += dt
        output = scheduler.complete(step)
        for name in names(output.emitted):
            stats[name]["out"] += 1
            if stats[name]["first_token"] is None:
                stats[name]["first_token"] = round(self.t, 9)
        for name in names(output.finished):
            stats[name]["finish"] = round(self.t, 9)
        record["emitted"] = names(output.emitted)
        record["finished"] = names(output.finished)
        record["free"] = scheduler.num_free_blocks
        record["free_cpu"] = scheduler.num_free_cpu_blocks
        record["fq"] = _crc(scheduler.blocks.gpu)
        record["fq_cpu"] = _crc(scheduler.blocks.cpu)
        changed = scheduled or step.preempted or step.swapped_in_requests or step.ignored
        return record if changed else None

    def _duration(self, step: StepV0) -> float:
        case = self.case
        dt = 0.0
        if step.requests:
            time = case.step_time
            dt = time.a + time.b * step.total_tokens + time.c * len(step.requests)
        dt += case.swap_in_s * len(step.swap_in)
        dt += case.swap_out_s * len(step.swap_out)
        return dt

    def _names(self, indices: list[int]) -> list[str]:
        ids = self.ids
        return [ids[index] for index in indices]

    def _summary(self, stalled: bool, error: str | None) -> dict[str, Any]:
        unfinished = sorted(
            name
            for name, stat in self.stats.items()
            if stat["finish"] is None and not stat["ignored"]
        )
        return {
            "steps": self.num_steps,
            "t_end": round(self.t, 9),
            "stalled": stalled,
            "error": error,
            "rejected": self.rejected,
            "unfinished": unfinished,
            "cum_preempt": self.scheduler.num_cumulative_preemption,
            "requests": self.stats,
        }


def _crc(blocks: BlockAllocatorV0) -> int:
    """CRC-32 of the free stack's block ids, top first."""
    return zlib.crc32(",".join(map(str, blocks.hashless_free_ids())).encode())
