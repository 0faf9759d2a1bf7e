"""Run a case on a virtual clock and write down every step, in the schema of the golden logs.

The loop and its float arithmetic are those of the recorder that drove vLLM's own classes (EngineCore.step
and step_with_batch_queue, v1/engine/core.py, 0.32.0; spec section 1), so that equal decisions give equal
lines. docs/exactness.md documents the schema.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from vsim.errors import UserError
from vsim.sim.case import Case, CaseRequest
from vsim.sim.scheduler_v1 import SchedulerV1
from vsim.sim.step import Step
from vsim.sim.transfers import CopyChannels

Record = dict[str, Any]


def run_case(
    case: Case, max_steps: int | None = None, scheduler: SchedulerV1 | None = None
) -> Iterator[Record]:
    """Yield the step records of a V1 case, then `{"summary": ...}`. Raises UserError for a bad case.

    `scheduler` drives another one than `case.config` describes: one that is watched, or with another rule.
    """
    return _Run(case, scheduler or SchedulerV1(case.config)).records(max_steps)


def rounded(seconds: float) -> float:
    """Times are logged to the nanosecond."""
    return round(seconds, 9)


@dataclass(slots=True)
class _Batch:
    """A scheduled step on its way through the engine."""

    step: Step
    record: Record
    end: float
    ended_transfers: list[int] = field(default_factory=list)


class _Run:
    """One case on its way. `now` is the engine core's CPU clock."""

    def __init__(self, case: Case, scheduler: SchedulerV1) -> None:
        self.case = case
        self.scheduler = scheduler
        self.now = 0.0
        self.stage_free = [0.0] * case.config.pipeline_parallel_size
        self.in_flight: deque[_Batch] = deque()  # oldest first
        self.arrivals: deque[CaseRequest] = deque(
            sorted(case.requests, key=lambda request: (request.arrival_s, request.index))
        )
        self.ids = [request.id for request in case.requests]
        self.stats: dict[int, Record] = {}
        self.rejected: list[str] = []
        self.channels: CopyChannels | None = None
        if case.config.kv_offload is not None:
            load, store = case.load_time, case.store_time
            self.channels = CopyChannels(load.end, store.end)
        self.stalled = False
        self.num_steps = 0

    def records(self, max_steps: int | None) -> Iterator[Record]:
        scheduler = self.scheduler
        depth = self.case.config.max_concurrent_batches
        while max_steps is None or self.num_steps < max_steps:
            if not (scheduler.has_requests() or self.in_flight):
                if not self.arrivals:
                    break
                self.now = max(self.now, self.arrivals[0].arrival_s)
            self._add_arrivals()
            executed = progressed = False
            if scheduler.has_requests():
                announced = scheduler.has_finish_to_announce
                batch = self._launch(self._schedule())
                executed = bool(batch.step.requests)
                progressed = bool(
                    executed or batch.step.preempted or batch.ended_transfers or announced
                )
                self.in_flight.append(batch)
                if len(self.in_flight) < depth and (executed or scheduler.has_requests()):
                    # Fill the queue before waiting for anything.
                    self._idle(executed, progressed)
                    if self.stalled:
                        break
                    continue
            if self.in_flight:
                oldest = self.in_flight.popleft()
                record = self._complete(oldest)
                if depth > 1:
                    progressed = progressed or bool(oldest.step.requests)
                if record["tokens"] or record["preempted"] or record.get("xfer"):
                    yield {"step": self.num_steps, **record}
                    self.num_steps += 1
            self._idle(executed, progressed)
            if self.stalled:
                break
        yield {"summary": self._summary()}

    def _add_arrivals(self) -> None:
        while self.arrivals and self.arrivals[0].arrival_s <= self.now:
            request = self.arrivals.popleft()
            if self.scheduler.add(request) is not None:
                self.rejected.append(request.id)
                continue
            self.stats[request.index] = {
                "arrival": request.arrival_s,
                "prompt": request.prompt_tokens,
                "first_sched": None,
                "hit0": None,
                "first_token": None,
                "finish": None,
                "out": 0,
                "preempt": 0,
            }

    def _schedule(self) -> _Batch:
        """One schedule() call at the present instant."""
        scheduler, ids = self.scheduler, self.ids
        step = scheduler.schedule()
        at = rounded(self.now)
        computed = dict(zip(step.requests, step.num_computed, strict=True))
        for index in step.new:
            self.stats[index]["first_sched"] = at
            self.stats[index]["hit0"] = computed[index]
        for index in step.preempted:
            self.stats[index]["preempt"] += 1
        record: Record = {
            "t_sched": at,
            "scheduled": {
                ids[i]: tokens for i, tokens in zip(step.requests, step.num_tokens, strict=True)
            },
            "computed": {ids[i]: tokens for i, tokens in computed.items()},
            "tokens": step.total_tokens,
            "new": [ids[i] for i in step.new],
            "resumed": [ids[i] for i in step.resumed],
            "preempted": [ids[i] for i in step.preempted],
            "running": scheduler.num_running,
            "waiting": scheduler.num_waiting,
            "free_sched": scheduler.num_free_blocks,
        }
        hits = {ids[i]: computed[i] for i in (*step.new, *step.resumed) if computed[i] > 0}
        if hits:
            record["hits"] = hits
        self.now += self.case.sched_time
        return _Batch(step, record, self.now)

    def _launch(self, batch: _Batch) -> _Batch:
        """Put a batch on the device: stages are first in, first out."""
        tokens, record = batch.step.total_tokens, batch.record
        start = self.now
        if tokens:
            start = max(start, self.stage_free[0])
        if self.channels is not None and batch.step.transfers is not None:
            outcome = self.channels.start_step(batch.step.transfers, start)
            start = outcome.start
            batch.ended_transfers = outcome.ended
            moved = {
                "load": {self.ids[i]: blocks for i, blocks in outcome.loads.items()},
                "store": {self.ids[i]: blocks for i, blocks in outcome.stores.items()},
                "flush": list(batch.step.transfers.flush),
                "recv": sorted(self.ids[i] for i in outcome.loaded),
            }
            if any(moved.values()):
                record["xfer"] = {what: value for what, value in moved.items() if value}
        end = start
        dt = 0.0
        if tokens:
            time = self.case.step_time
            dt = time.a + time.b * tokens + time.c * len(batch.step.requests)
            per_stage = dt / len(self.stage_free)
            for stage, free in enumerate(self.stage_free):
                end = max(end, free) + per_stage
                self.stage_free[stage] = end
        record["t_start"] = rounded(start)
        record["dt"] = rounded(dt)
        record["t_end"] = rounded(end)
        batch.end = end
        return batch

    def _complete(self, batch: _Batch) -> Record:
        """Wait for a batch and process its output."""
        self.now = max(self.now, batch.end)
        record, ids = batch.record, self.ids
        output = self.scheduler.complete(batch.step, batch.ended_transfers)
        for index in output.emitted:
            stats = self.stats[index]
            stats["out"] += 1
            if stats["first_token"] is None:
                stats["first_token"] = record["t_end"]
        for index in output.finished:
            self.stats[index]["finish"] = record["t_end"]
        record["emitted"] = [ids[i] for i in output.emitted]
        record["finished"] = [ids[i] for i in output.finished]
        if output.wasted:
            record["wasted"] = [ids[i] for i in output.wasted]
        pool = self.scheduler.cache.pool
        record["free"] = pool.num_free
        record["cached"] = pool.num_cached_keys
        record["fq"] = pool.free_list_crc()
        self.now += self.case.update_time
        return record

    def _idle(self, executed: bool, progressed: bool) -> None:
        """After a batch without tokens the engine naps; if nothing can change, until the next arrival."""
        scheduler = self.scheduler
        if executed or not scheduler.has_requests():
            return
        began = self.now
        nap = self.case.idle_sleep
        self.now += nap
        if progressed or not scheduler.has_unfinished_requests():
            return
        if any(batch.step.requests for batch in self.in_flight):
            return
        if self.channels is not None and self.channels.busy:
            if nap == 0:
                raise UserError(
                    f"{self.case.name}: config.idle_sleep=0 stops the clock while the engine waits for a copy"
                    " of kv_offload; set it above 0 (real vLLM naps 0.001 s)"
                )
            return
        if not self.arrivals:
            self.stalled = True
            return
        arrival = self.arrivals[0].arrival_s
        if nap > 0:
            naps = max(1, -(-int((arrival - began) * 1e9) // int(nap * 1e9)))
            self.now = began + naps * nap
        else:
            self.now = max(self.now, arrival)

    def _summary(self) -> Record:
        stats = {self.ids[index]: entry for index, entry in self.stats.items()}
        return {
            "steps": self.num_steps,
            "t_end": rounded(self.now),
            "stalled": self.stalled,
            "rejected": self.rejected,
            "unfinished": sorted(name for name, entry in stats.items() if entry["finish"] is None),
            "preemptions": sum(entry["preempt"] for entry in stats.values()),
            "requests": stats,
        }
