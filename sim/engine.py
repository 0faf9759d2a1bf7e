"""One replica on the simulated clock: vLLM's engine core loop in SimPy."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import simpy

from vsim.errors import UserError
from vsim.models.step import StepModel, StepShape
from vsim.sim.config import MAX_BLOCKS, SchedulerConfig
from vsim.sim.recorder import Recorder
from vsim.sim.run import Run
from vsim.sim.scheduler import Scheduler
from vsim.sim.step import Step
from vsim.sim.transfers import CopyChannels
from vsim.traces.trace import Trace, TraceRequest

NS = 1_000_000_000
# The engine process naps after a batch without tokens while requests remain (vLLM 0.32 v1/engine/core.py,
# `_process_engine_step`). It matters only where a copy must end before anything can run.
IDLE_SLEEP_NS = 1_000_000


@dataclass(frozen=True, slots=True)
class HostLink:
    """The link between GPU and CPU memory, one copy at a time: V0's swaps, V1's offload tier.

    `block_bytes`: one KV block over all layers of a rank. `overlap`: a step's swaps run beside its
    computation, not before it (vLLM 0.8.5 does not: worker/worker.py copies, then runs the model).
    Replicas that are given the same object share it, and wait for each other's copies.
    """

    block_bytes: int
    bytes_per_s: float
    overlap: bool = False

    def ns(self, blocks: int) -> int:
        return round(blocks * self.block_bytes / self.bytes_per_s * NS)

    def channels(self) -> CopyChannels:
        """The offload tier's two channels, on a clock in ns."""
        return CopyChannels(self._end, self._end)

    def _end(self, start: float, blocks: int) -> float:
        return start + self.ns(blocks)


@dataclass(slots=True)
class Launched:
    """A step on its way: scheduled, on the device from `start` to `end` (ns)."""

    step: Step
    row: dict[str, int]
    start: int = 0
    end: int = 0
    ended_transfers: list[int] = field(default_factory=list)
    copied: simpy.Event | None = None  # V0: its swaps are over


class Replica:
    """vLLM's EngineCore: drain the inbox, schedule, execute, update.

    With a batch queue (async scheduling, pipeline parallelism) up to `config.max_concurrent_batches` steps
    are in flight: the queue is filled before any output is awaited (vLLM 0.32 v1/engine/core.py,
    `step_with_batch_queue`; spec 1.3). Without, the queue has one place and the same loop is `step`.
    """

    def __init__(
        self,
        env: simpy.Environment,
        trace: Trace,
        scheduler: Scheduler,
        config: SchedulerConfig,
        step_model: StepModel,
        recorder: Recorder,
        ended: Callable[[int], None],
        frontend_ns: int = 0,
        front_end: Callable[[TraceRequest], str | None] | None = None,
        host_link: HostLink | None = None,
        on_step: Callable[[], None] | None = None,
        number: int = 0,
        link: simpy.Resource | None = None,
    ) -> None:
        self.number = number
        self.in_flight = (
            0  # requests sent here and not ended: all that a router can know by counting
        )
        self.in_flight_prompt_tokens = 0
        self.env = env
        self.trace = trace
        self.scheduler = scheduler
        self.config = config
        self.step_model = step_model
        self.recorder = recorder
        self._tell_client = ended
        self._frontend_ns = frontend_ns
        self._front_end = front_end
        self._host_link = host_link
        self._link = link
        self._on_step = on_step
        self._inbox: deque[tuple[int, int]] = deque()
        self._asleep: simpy.Event | None = None
        # When each pipeline stage is free again.
        self._stage_free = [0] * config.pipeline_parallel_size
        self._channels: CopyChannels | None = None
        if config.kv_offload is not None:
            if host_link is None:
                raise UserError("kv_offloading_size needs a host link: this GPU has none on record")
            self._channels = host_link.channels()
        self._vain_steps = 0  # in a row

    def receive(self, index: int) -> None:
        """A request leaves the client; the engine can see it once the front end has handled it."""
        self.in_flight += 1
        self.in_flight_prompt_tokens += int(self.trace.prompt_tokens[index])
        self._inbox.append((int(self.env.now) + self._frontend_ns, index))
        if self._asleep is not None:
            self._asleep.succeed()
            self._asleep = None

    def run(self) -> Generator[simpy.Event, Any, None]:
        scheduler, env = self.scheduler, self.env
        depth = self.config.max_concurrent_batches
        in_flight: deque[Launched] = deque()
        while True:
            self._drain_inbox()
            if not scheduler.has_requests() and not in_flight:
                yield from self._sleep()
                continue
            if scheduler.has_requests():
                step = scheduler.schedule()
                shape = step.shape
                launched = Launched(step, self._note(step, shape))
                host, device = self._durations(step, shape)
                moved = launched.row["swapped_blocks"]
                if moved and self._host_link is not None:
                    launched.copied = env.process(self._copy(self._host_link.ns(moved)))
                    if not self._host_link.overlap:
                        yield launched.copied
                if depth > 1 and host:
                    # The CPU is busy meanwhile; what is in flight goes on.
                    yield env.timeout(host)
                    host = 0
                self._launch(launched, int(env.now) + host, device)
                in_flight.append(launched)
                if len(in_flight) < depth and (step.requests or scheduler.has_requests()):
                    continue
            launched = in_flight.popleft()
            if launched.end > env.now:
                yield env.timeout(launched.end - env.now)
                # What arrives at this very instant comes before the next schedule(): let it.
                yield env.timeout(0)
            if launched.copied is not None and not launched.copied.processed:
                yield launched.copied
            self._complete(launched)
            if self._in_vain(launched, in_flight):
                yield from self._wait_for_change()

    @property
    def kv_cache_usage(self) -> float:
        """Share of KV blocks in use (vllm:kv_cache_usage_perc)."""
        return 1 - self.scheduler.num_free_blocks / self.scheduler.num_usable_blocks

    @property
    def num_waiting(self) -> int:
        """vllm:num_requests_waiting."""
        return self.scheduler.num_waiting

    def _ended(self, index: int) -> None:
        self.in_flight -= 1
        self.in_flight_prompt_tokens -= int(self.trace.prompt_tokens[index])
        self._tell_client(index)

    def _drain_inbox(self) -> None:
        now = int(self.env.now)
        while self._inbox and self._inbox[0][0] <= now:
            at, index = self._inbox.popleft()
            sent = at - self._frontend_ns
            request = self.trace.request(index)
            if sent != request.arrival_ns:
                # Held back by the client (a gate, a turn before it): the engine sees when it came.
                request = replace(request, arrival_ns=sent)
            refusal = None if self._front_end is None else self._front_end(request)
            if refusal is None:
                refusal = self.scheduler.add(request)
            if refusal is not None:
                self.recorder.rejected(index, refusal, now)
                self._ended(index)

    def _sleep(self) -> Generator[simpy.Event, Any, None]:
        """Until something is in the inbox."""
        if self._inbox:
            yield self.env.timeout(max(0, self._inbox[0][0] - self.env.now))
            return
        self._asleep = self.env.event()
        yield self._asleep
        if self._inbox and self._inbox[0][0] > self.env.now:
            yield self.env.timeout(self._inbox[0][0] - self.env.now)

    def _copy(self, duration_ns: int) -> Generator[simpy.Event, Any, None]:
        """Swap blocks over the host link, when it is this replica's turn."""
        assert self._link is not None
        with self._link.request() as turn:
            yield turn
            yield self.env.timeout(duration_ns)

    def _durations(self, step: Step, shape: StepShape) -> tuple[int, int]:
        """(host, device) ns of a step; a step without requests takes none."""
        if not step.requests:
            return 0, 0
        host = round(self.step_model.host_seconds(shape) * NS)
        device = round(self.step_model.device_seconds(shape) * NS)
        # Time moves: a model that answers 0 must not stop the clock.
        return host, max(1, device)

    def _launch(self, launched: Launched, ready: int, device_ns: int) -> None:
        """Put a step on the device, stage by stage."""
        stages = self._stage_free
        start = max(ready, stages[0]) if device_ns else ready
        transfers = launched.step.transfers
        if self._channels is not None and transfers is not None:
            outcome = self._channels.start_step(transfers, start)
            start = int(outcome.start)
            launched.ended_transfers = outcome.ended
            self.recorder.offloaded(sum(outcome.loads.values()), sum(outcome.stores.values()))
        end = start
        if device_ns:
            share, rest = divmod(device_ns, len(stages))
            for stage in range(len(stages)):
                end = max(end, stages[stage]) + share + (rest if stage == 0 else 0)
                stages[stage] = end
        launched.start, launched.end = start, end

    def _note(self, step: Step, shape: StepShape) -> dict[str, int]:
        """Record what `schedule()` decided, and the state right after it."""
        self.recorder.scheduled(step, int(self.env.now))
        for index in step.ignored:
            self.recorder.rejected(index, "can never fit the KV cache", int(self.env.now))
            self._ended(index)
        scheduler = self.scheduler
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
            "swapped_blocks": sum(step.swapped_in.values()) + sum(step.swapped_out.values()),
        }

    def _complete(self, launched: Launched) -> None:
        step = launched.step
        output = self.scheduler.complete(step, launched.ended_transfers)
        self.recorder.completed(output, int(self.env.now))
        for index in output.finished:
            self._ended(index)
        if step.requests or step.preempted or launched.row["swapped_blocks"]:
            self.recorder.step(
                {**launched.row, "start_ns": launched.start, "end_ns": int(self.env.now)},
                self.number,
            )
            if self._on_step is not None:
                self._on_step()

    def _in_vain(self, launched: Launched, in_flight: deque[Launched]) -> bool:
        """Would the engine go on scheduling nothing until something comes from outside (spec 8.1)?"""
        step = launched.step
        if (
            step.requests
            or step.preempted
            or step.swapped_in
            or step.swapped_out
            or step.ignored
            or launched.ended_transfers
            # A copy that ended with a later step, or blocks that it took from somebody, are news once that
            # one completes.
            or any(
                other.step.requests or other.step.preempted or other.ended_transfers
                for other in in_flight
            )
        ):
            self._vain_steps = 0
            return False
        self._vain_steps += 1
        # With several batches in flight a request may sit out a few schedule() calls (spec 3.10).
        patience = self.config.max_concurrent_batches if self.scheduler.num_running else 0
        return self._vain_steps > patience and self.scheduler.has_unfinished_requests()

    def _wait_for_change(self) -> Generator[simpy.Event, Any, None]:
        if self._channels is not None and self._channels.busy:
            yield self.env.timeout(IDLE_SLEEP_NS)
            return
        yield from self._sleep()


def make_scheduler(config: SchedulerConfig) -> Scheduler:
    """The scheduler of `config.engine`. Raises UserError for what it cannot run."""
    for name, blocks in (
        ("num_gpu_blocks", config.num_gpu_blocks),
        ("num_cpu_blocks", config.num_cpu_blocks),
    ):
        if blocks > MAX_BLOCKS:
            raise UserError(
                f"{name}={blocks} KV blocks are more than a simulation keeps ({MAX_BLOCKS}): use a larger "
                "--block-size, or less memory for them (--num-gpu-blocks-override, --swap-space)"
            )
    if config.engine == "v0":
        if config.pipeline_parallel_size > 1:
            raise UserError(
                f"pipeline_parallel_size={config.pipeline_parallel_size}: V0 runs one scheduler a pipeline stage, "
                "which vsim does not simulate; use -pp 1 or --engine v1"
            )
        from vsim.sim.scheduler_v0 import SchedulerV0

        return SchedulerV0(config)
    from vsim.sim.scheduler_v1 import SchedulerV1

    return SchedulerV1(config)


def simulate(
    trace: Trace,
    config: SchedulerConfig,
    step_model: StepModel,
    *,
    max_concurrency: int | None = None,
    frontend_s: float = 0.0,
    front_end: Callable[[TraceRequest], str | None] | None = None,
    host_link: HostLink | None = None,
    on_step: Callable[[int, int], None] | None = None,
    engine: Literal["fast", "reference"] | None = None,
) -> Run:
    """Replay `trace` on one replica and return what happened, on the client's clock.

    `max_concurrency`: closed loop, as `vllm bench serve --max-concurrency`. `frontend_s`: seconds between
    the client's send and the engine's inbox. `front_end` may refuse a request: it returns the reason.
    `on_step(now_ns, requests_ended)` is called after each step, or each few thousand of them on the
    compiled path. `engine` is as in `cluster.simulate_cluster`.
    A run that cannot go on (the head of the queue never fits; the real engine would have died) ends there
    and says so in `Run.ended_early`.
    """
    from vsim.sim.cluster import ReplicaSpec, simulate_cluster

    return simulate_cluster(
        trace,
        [ReplicaSpec(config, step_model, host_link, frontend_s)],
        max_concurrency=max_concurrency,
        front_end=front_end,
        on_step=on_step,
        engine=engine,
    )
