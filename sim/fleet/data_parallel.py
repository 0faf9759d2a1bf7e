"""vLLM's data parallelism inside one deployment: ranks behind vLLM's own balancer, in lockstep where they share experts.

Ranks of a dense model run free; those of a mixture of experts wait for each other in every step (vLLM 0.32.0
v1/engine/core.py `DPEngineCoreProc`, asserted for MoE models only). The loop of these is that of
`lockstep.run_lockstep`, with a client that can wait.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import simpy

from vsim.errors import UserError
from vsim.models.load import LoadedStepModel
from vsim.models.step import StepShape, lockstep_seconds
from vsim.sim.bounds import BoundReachedError, Bounds, Watch
from vsim.sim.client import Client
from vsim.sim.cluster import ReplicaSpec, simulate_cluster
from vsim.sim.config import SchedulerConfig
from vsim.sim.engine import NS, make_scheduler
from vsim.sim.lockstep import DUMMY, STATS_INTERVAL_NS, Wave
from vsim.sim.recorder import Recorder
from vsim.sim.router import ReplicaView
from vsim.sim.run import Run
from vsim.sim.scheduler import EngineDiedError, Scheduler
from vsim.sim.step import Step, StepOutput
from vsim.traces.trace import Trace, TraceRequest

FrontEnd = Callable[[TraceRequest], str | None]
OnStep = Callable[[int, int], None]


class RankView(Protocol):
    """What a rank reports, and what the front end counts itself."""

    in_flight: int
    scheduler: Scheduler


class DataParallelBalancer:
    """Which rank gets a request: vLLM 0.32.0 v1/engine/core_client.py, `DPLBAsyncMPClient`, one API server.

    A rank's load is the larger of its requests in flight, which the front end knows, and the waiting and
    running ones it reported last (at most every 100 ms), plus a penalty for waiting behind a full KV cache.
    The least loaded gets it; ties go round.
    """

    def __init__(self, ranks: Sequence[RankView]) -> None:
        self._ranks = ranks
        self._reported_ns = -STATS_INTERVAL_NS
        self._counts = [(0, 0, 0.0) for _ in ranks]
        self._start = 0

    def choose(self, now: int) -> int:
        """The rank for a request that comes at `now` (ns)."""
        if now - self._reported_ns >= STATS_INTERVAL_NS:
            self._reported_ns = now
            self._counts = [_reported(rank.scheduler) for rank in self._ranks]
        count = len(self._ranks)
        best, chosen = None, 0
        for i in range(count):
            rank = (self._start + i) % count
            waiting, running, usage = self._counts[rank]
            score = float(max(self._ranks[rank].in_flight, waiting + running))
            score += waiting * 6.0 * max(0.0, usage - 0.5)
            if best is None or score < best:
                best, chosen = score, rank
        waiting, running, usage = self._counts[chosen]
        self._counts[chosen] = (waiting + 1, running, usage)
        self._start = (self._start + 1) % count
        return chosen


def _reported(scheduler: Scheduler) -> tuple[int, int, float]:
    usage = 1 - scheduler.num_free_blocks / scheduler.num_usable_blocks
    return scheduler.num_waiting, scheduler.num_running, usage


def simulate_data_parallel(
    trace: Trace,
    replica: ReplicaSpec,
    ranks: int,
    *,
    in_lockstep: bool,
    max_concurrency: int | None = None,
    front_end: FrontEnd | None = None,
    on_step: OnStep | None = None,
    bounds: Bounds | None = None,
) -> Run:
    """Replay `trace` on `ranks` data-parallel ranks like `replica`; the run's `replica` is the rank.

    `in_lockstep`: they share experts. Raises UserError for what only a single engine is simulated with.
    """
    config = replica.config
    if config.engine != "v1":
        raise UserError("data_parallel_size is simulated for V1: drop it, or --engine v0")
    if not in_lockstep:
        return simulate_cluster(
            trace,
            [replica] * ranks,
            _free_route(),
            max_concurrency=max_concurrency,
            front_end=front_end,
            on_step=on_step,
            bounds=bounds,
        )
    if config.pipeline_parallel_size > 1 or config.kv_offload is not None:
        raise UserError(
            "data-parallel ranks of a mixture of experts are simulated without pipeline stages and without "
            "a CPU offload tier: drop --pipeline-parallel-size or --kv-offloading-size"
        )
    watch = None if bounds is None else Watch(bounds, len(trace), on_step)
    simulated = _Lockstep(trace, replica, ranks, max_concurrency, front_end, watch or on_step)
    return simulated.run(watch)


def sentences(in_lockstep: bool, config: SchedulerConfig, step_model: LoadedStepModel) -> list[str]:
    """What was assumed of the ranks, for the user."""
    said = ["data-parallel ranks stand behind the balancer of vLLM 0.32's API server, one of it"]
    if config.engine_version.split(".")[:2] != ["0", "32"]:
        said.append(
            f"vLLM {config.engine_version} balances data-parallel ranks by its own rule; 0.32's is used"
        )
    if not in_lockstep:
        said.append("data-parallel ranks of a dense model run free of each other")
        return said
    said.append(
        "data-parallel ranks share experts: every step of theirs ends when the slowest's does"
    )
    if step_model.calibration.kind == "roofline":
        said.append(
            "the roofline lets each rank read all experts its own tokens wake, and takes no time for "
            "passing tokens between ranks"
        )
    return said


def _free_route() -> Callable[[TraceRequest, Sequence[ReplicaView]], int]:
    balancer: list[DataParallelBalancer] = []

    def route(request: TraceRequest, replicas: Sequence[Any]) -> int:
        if not balancer:
            balancer.append(DataParallelBalancer(replicas))
        return balancer[0].choose(int(replicas[0].env.now))

    return route


@dataclass(slots=True, eq=False)
class _Rank:
    scheduler: Scheduler
    in_flight: int = 0


class _Lockstep:
    """All ranks as one SimPy process: in every wave each contributes its next batch, or a dummy one."""

    def __init__(
        self,
        trace: Trace,
        replica: ReplicaSpec,
        ranks: int,
        max_concurrency: int | None,
        front_end: FrontEnd | None,
        on_step: OnStep | None,
    ) -> None:
        self.trace, self.replica = trace, replica
        self.front_end, self.on_step = front_end, on_step
        self.env = simpy.Environment(initial_time=0)
        self.client = Client(self.env, trace, self._receive, max_concurrency)
        self.recorder = Recorder(trace, ranks)
        self.ranks = [_Rank(make_scheduler(replica.config)) for _ in range(ranks)]
        self.balancer = DataParallelBalancer(self.ranks)
        self.place: dict[int, int] = {}
        self.inbox: deque[tuple[int, int]] = deque()
        self.asleep: simpy.Event | None = None

    def run(self, watch: Watch | None) -> Run:
        self.env.process(self.client.run())
        self.env.process(self._loop())
        ended_early = None
        try:
            if watch is None:
                self.env.run()
            else:
                watch.run(self.env, lambda: self.client.num_ended)
        except EngineDiedError as death:
            ended_early = f"the engine died: {death}"
        except BoundReachedError as bound:
            ended_early = str(bound)
        left = len(self.trace) - self.client.num_ended
        if left and ended_early is None:
            ended_early = f"stalled: {left} of {len(self.trace)} requests could never be scheduled"
        counters: Counter[str] = Counter()
        for rank in self.ranks:
            counters.update(rank.scheduler.counters)
        itl_ns, itl_count = self.recorder.gaps()
        return Run(
            origin="simulated",
            requests=self.recorder.request_columns(self.client.columns()),
            steps=self.recorder.step_columns(),
            itl_ns=itl_ns,
            itl_count=itl_count,
            block_size=self.replica.config.block_size,
            num_gpu_blocks=self.ranks[0].scheduler.num_usable_blocks,
            reasons=tuple(self.recorder.reasons),
            tenant_names=self.trace.tenant_names,
            counters=dict(counters),
            preemption_spans=self.recorder.spans(),
            end_ns=int(self.env.now),
            ended_early=ended_early,
        )

    def _receive(self, index: int) -> None:
        now = int(self.env.now)
        number = self.balancer.choose(now)
        self.place[index] = number
        self.ranks[number].in_flight += 1
        if self.recorder.replica is not None:
            self.recorder.replica[index] = number
        self.inbox.append((now + round(self.replica.frontend_s * NS), index))
        if self.asleep is not None:
            self.asleep.succeed()
            self.asleep = None

    def _ended(self, index: int) -> None:
        self.ranks[self.place.pop(index)].in_flight -= 1
        self.client.finished(index)

    def _loop(self) -> Generator[simpy.Event, Any, None]:
        env = self.env
        depth = self.replica.config.max_concurrent_batches
        in_flight: deque[tuple[Wave, list[dict[str, int]]]] = deque()
        device_free = 0
        while True:
            self._drain_inbox()
            busy = any(rank.scheduler.has_requests() for rank in self.ranks)
            if not busy and not in_flight:
                yield from self._sleep()
                continue
            if busy:
                wave, rows, host, device = self._schedule()
                real = _is_real(wave)
                if depth > 1 and host:
                    yield env.timeout(host)
                    host = 0
                now = int(env.now)
                wave.start_ns = max(now + host, device_free) if real else now
                wave.end_ns = wave.start_ns + device
                device_free = max(device_free, wave.end_ns)
                in_flight.append((wave, rows))
                more = real or any(rank.scheduler.has_requests() for rank in self.ranks)
                if len(in_flight) < depth and more:
                    continue
            wave, rows = in_flight.popleft()
            if wave.end_ns > env.now:
                yield env.timeout(wave.end_ns - env.now)
                yield env.timeout(0)  # what arrives at this very instant comes first
            self._complete(wave, rows)
            preempted = any(step is not None and step.preempted for step in wave.steps)
            waits = any(rank.scheduler.has_unfinished_requests() for rank in self.ranks)
            if not _is_real(wave) and not in_flight and not preempted and waits:
                yield from self._sleep()  # only another request can change anything

    def _drain_inbox(self) -> None:
        now = int(self.env.now)
        while self.inbox and self.inbox[0][0] <= now:
            at, index = self.inbox.popleft()
            request = self.trace.request(index)
            sent = at - round(self.replica.frontend_s * NS)
            if sent != request.arrival_ns:
                request = replace(request, arrival_ns=sent)
            refusal = None if self.front_end is None else self.front_end(request)
            if refusal is None:
                refusal = self.ranks[self.place[index]].scheduler.add(request)
            if refusal is not None:
                self.recorder.rejected(index, refusal, now)
                self._ended(index)

    def _sleep(self) -> Generator[simpy.Event, Any, None]:
        if not self.inbox:
            self.asleep = self.env.event()
            yield self.asleep
        if self.inbox and self.inbox[0][0] > self.env.now:
            yield self.env.timeout(self.inbox[0][0] - self.env.now)

    def _schedule(self) -> tuple[Wave, list[dict[str, int]], int, int]:
        """(the next wave, its rows, host ns, device ns); the wave's times are still to be set."""
        now = int(self.env.now)
        steps: list[Step | None] = []
        rows: list[dict[str, int]] = []
        for rank in self.ranks:
            step = rank.scheduler.schedule() if rank.scheduler.has_requests() else None
            steps.append(step)
            if step is not None:
                self.recorder.scheduled(step, now)
            rows.append({} if step is None else _row(step, rank.scheduler))
        shapes = tuple(s.shape if s is not None and s.requests else DUMMY for s in steps)
        wave = Wave(now, now, now, tuple(steps), shapes)
        if not _is_real(wave):
            return wave, rows, 0, 0
        model = self.replica.step_model
        host = max(model.host_seconds(shape) for shape in shapes)
        return wave, rows, round(host * NS), max(1, round(lockstep_seconds(model, shapes) * NS))

    def _complete(self, wave: Wave, rows: list[dict[str, int]]) -> None:
        now = int(self.env.now)
        for number, (rank, step) in enumerate(zip(self.ranks, wave.steps, strict=True)):
            if step is None:
                continue
            output: StepOutput = rank.scheduler.complete(step)
            self.recorder.completed(output, now)
            for index in output.finished:
                self._ended(index)
            if step.requests or step.preempted:
                row = {**rows[number], "start_ns": wave.start_ns, "end_ns": now}
                self.recorder.step(row, number)
        if self.on_step is not None and _is_real(wave):
            self.on_step(now, self.client.num_ended)


def _is_real(wave: Wave) -> bool:
    """Does any rank run more than a dummy batch?"""
    return any(step is not None and step.requests for step in wave.steps)


def _row(step: Step, scheduler: Scheduler) -> dict[str, int]:
    """A step's columns and the state right after `schedule()`, as `engine.Replica` notes them."""
    shape: StepShape = step.shape
    return {
        "tokens": shape.num_tokens,
        "prefill_tokens": shape.prefill_tokens,
        "prefill_seqs": len(shape.prefills),
        "decodes": shape.num_decodes,
        "decode_context": shape.decode_context_sum,
        "running": scheduler.num_running,
        "waiting": scheduler.num_waiting,
        "kv_blocks_used": scheduler.num_usable_blocks - scheduler.num_free_blocks,
        "kv_tokens_used": scheduler.num_kv_tokens,
        "preempted": len(step.preempted),
        "swapped_blocks": 0,
    }
