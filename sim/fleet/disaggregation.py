"""Prefill and decode on engines of their own: KV handed over as vLLM's NIXL connector pulls it.

vLLM 0.32.0 distributed/kv_transfer/kv_connector/v1/nixl (pull_scheduler.py, base_scheduler.py) and
v1/core/sched/scheduler.py: the prefill engine is asked for one token and keeps the prompt's blocks until
they have been read; the decode engine allocates blocks for the whole prompt, pulls what its own prefix cache
lacks while others run, and computes the last token it knows again to say the next one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import simpy

from vsim.errors import UserError
from vsim.sim.config import SchedulerConfig
from vsim.sim.engine import IDLE_SLEEP_NS, Replica
from vsim.sim.fleet.recorder import FleetRecorder
from vsim.sim.fleet.spec import Disaggregation
from vsim.sim.kvcache import KVCache
from vsim.sim.request import FINISHED, Request
from vsim.sim.scheduler_v1 import SchedulerV1
from vsim.sim.step import Step, StepOutput, Transfers
from vsim.sim.transfers import Outcome
from vsim.traces.trace import Trace, TraceRequest

NS = 1_000_000_000
FrontEnd = Callable[[TraceRequest], str | None]


def check_engine(config: SchedulerConfig) -> None:
    """Raises UserError for an engine whose KV nobody here knows how to hand over."""
    if config.engine != "v1":
        raise UserError(
            "disaggregation hands KV over as vLLM V1's connector does: drop --engine v0"
        )
    if config.kv_offload is not None:
        raise UserError(
            "disaggregation beside a CPU offload tier is not simulated: drop one of them"
        )
    if any(group.type != "full" for group in config.kv_groups):
        raise UserError(
            "disaggregation is simulated for full attention only, not for sliding windows"
        )


def answer_tokens(trace: Trace, max_model_len: int) -> np.ndarray:
    """Output tokens of each request as an engine will say them; shape (n,)."""
    wanted = trace.output_tokens
    if trace.max_tokens is not None:
        wanted = np.minimum(wanted, trace.max_tokens)
    return np.maximum(1, np.minimum(wanted, max_model_len - trace.prompt_tokens))


def prefill_trace(trace: Trace) -> Trace:
    """What the prefill engines are asked: one token each."""
    one = np.ones(len(trace), dtype=np.int64)
    return dataclasses.replace(trace, output_tokens=one, max_tokens=one)


def decode_trace(trace: Trace) -> Trace:
    """What the decode engines are asked where the first token came from prefill: it is prompt to them."""
    capped = trace.max_tokens
    return dataclasses.replace(
        trace,
        prompt_tokens=trace.prompt_tokens + 1,
        output_tokens=np.maximum(1, trace.output_tokens - 1),
        max_tokens=None if capped is None else np.maximum(1, capped - 1),
    )


class FleetReplica(Replica):
    """A replica that others can wake, and whose loads may come over a link."""

    _link_channels: LinkChannels | None = None

    def wake(self) -> None:
        """Blocks came free by something that this engine did not do."""
        if self._asleep is not None:
            self._asleep.succeed()
            self._asleep = None

    def pull_over(self, channels: LinkChannels) -> None:
        """Time loads on `channels`."""
        self._link_channels = channels
        self._channels = channels  # type: ignore[assignment]

    def _wait_for_change(self) -> Generator[simpy.Event, Any, None]:
        """As an engine that looks every millisecond, without the looks that can find nothing."""
        ended = self._link_channels.next_end if self._link_channels is not None else None
        if ended is None or self._inbox:
            yield from super()._wait_for_change()
            return
        began = int(self.env.now)
        looks = max(1, math.ceil((ended - began) / IDLE_SLEEP_NS))
        self._asleep = self.env.event()
        yield self._asleep | self.env.timeout(looks * IDLE_SLEEP_NS)
        self._asleep = None
        early = -(int(self.env.now) - began) % IDLE_SLEEP_NS
        if early:
            yield self.env.timeout(early)


class PrefillScheduler(SchedulerV1):
    """Keeps a finished request's blocks while `goes_on(index)` and until `release(index)`."""

    def __init__(self, config: SchedulerConfig, goes_on: Callable[[int], bool]) -> None:
        super().__init__(config)
        self._goes_on = goes_on
        self._kept: dict[int, Request] = {}

    def _free(self, request: Request) -> None:
        if request.status == FINISHED and self._goes_on(request.index):
            self._kept[request.index] = request
        else:
            super()._free(request)

    def release(self, index: int) -> None:
        """The other side has read them."""
        self.cache.free(self._kept.pop(index))


class DecodeScheduler(SchedulerV1):
    """Pulls the KV of `prompt_tokens(index)` tokens before a request's first step here."""

    def __init__(
        self,
        config: SchedulerConfig,
        prompt_tokens: Callable[[int], int],
        pulled: Callable[[int], None],
    ) -> None:
        super().__init__(config)
        self.offload = _Pulls(self.cache, prompt_tokens, pulled)  # type: ignore[assignment]
        self._defers_frees = config.max_concurrent_batches > 1


class _Pulls:
    """The connector's side of a decode scheduler: what is pulled is like a load from another tier."""

    def __init__(
        self,
        cache: KVCache,
        prompt_tokens: Callable[[int], int],
        pulled: Callable[[int], None],
    ) -> None:
        self._cache = cache
        self._prompt_tokens = prompt_tokens
        self._pulled = pulled
        self._remote: set[int] = set()  # whose KV still lies with prefill only
        self._local: dict[int, int] = {}
        self._jobs: dict[int, int] = {}  # job -> request
        self._loads: dict[int, tuple[int, int]] = {}
        self._count = 0

    def add(self, request: Request) -> None:
        self._remote.add(request.index)

    def lookup(self, request: Request, local_tokens: int) -> int | None:
        """Tokens to pull beyond `local_tokens`. Once pulled or computed, a request is like any other."""
        index = request.index
        if index not in self._remote:
            return 0
        count = self._prompt_tokens(index) - local_tokens
        self._local[index] = local_tokens
        if count > 0:
            return count
        # The decode engine has it all: nothing is read, and prefill may let go.
        self._remote.discard(index)
        self._pulled(index)
        return 0

    def start_load(self, request: Request, external_tokens: int) -> None:
        index = request.index
        self._remote.discard(index)
        local = self._local.pop(index)
        blocks = sum(
            -(-(local + external_tokens) // group.block_size) - local // group.block_size
            for group in self._cache.groups
        )
        self._jobs[self._count] = index
        self._loads[self._count] = (index, blocks)
        self._count += 1

    def request_finished(self, request: Request) -> None:
        self._local.pop(request.index, None)

    def transfers(
        self,
        scheduled: dict[Request, int],
        preempted: Iterable[Request],
        finished: Iterable[int],
    ) -> Transfers:
        loads, self._loads = self._loads, {}
        return Transfers(loads, {}, ())

    def complete(self, jobs: Sequence[int]) -> list[int]:
        done = [self._jobs.pop(number) for number in jobs]
        for index in done:
            self._pulled(index)
        return done

    @property
    def has_jobs(self) -> bool:
        return bool(self._jobs)


class LinkChannels:
    """Transfers into one decode engine, one at a time; in place of `transfers.CopyChannels`. Times in ns."""

    def __init__(self, block_bytes: int, link: Disaggregation) -> None:
        self._ns_per_block = block_bytes / (link.bandwidth_gb_s * 1e9) * NS
        self._latency_ns = round(link.latency_s * NS)
        self._free = 0.0
        self._running: dict[int, float] = {}
        self.busy_ns = 0.0  # of all transfers, latency included

    @property
    def busy(self) -> bool:
        return bool(self._running)

    @property
    def next_end(self) -> float | None:
        """When the next of the transfers under way ends; None: there are none."""
        return min(self._running.values(), default=None)

    def start_step(self, transfers: Transfers, now: float) -> Outcome:
        outcome = Outcome(now)
        for number, (request, blocks) in transfers.loads.items():
            outcome.loads[request] = blocks
            taken = round(blocks * self._ns_per_block)
            self._free = max(now, self._free) + taken
            self._running[number] = self._free + self._latency_ns
            self.busy_ns += taken + self._latency_ns
        outcome.ended = sorted(n for n, end in self._running.items() if end <= now)
        for number in outcome.ended:
            del self._running[number]
        return outcome


class PrefillRecorder:
    """The fleet's recorder as a prefill engine may use it: its token is the first one, or none."""

    def __init__(
        self, recorder: FleetRecorder, goes_on: Callable[[int], bool], says_it: bool
    ) -> None:
        self._recorder, self._goes_on, self._says_it = recorder, goes_on, says_it
        self.scheduled, self.rejected = recorder.scheduled, recorder.rejected
        self.offloaded, self.step = recorder.offloaded, recorder.step

    def completed(self, output: StepOutput, now: int) -> None:
        over = [index for index in output.finished if not self._goes_on(index)]
        said = output.emitted if self._says_it else over
        self._recorder.completed(StepOutput(said, over), now)


class DecodeRecorder:
    """The fleet's recorder as a decode engine may use it: who comes has been admitted before."""

    def __init__(self, recorder: FleetRecorder) -> None:
        self._recorder = recorder
        self.completed, self.rejected = recorder.completed, recorder.rejected
        self.offloaded, self.step = recorder.offloaded, recorder.step

    def scheduled(self, step: Step, now: int) -> None:
        self._recorder.scheduled(dataclasses.replace(step, new=[]) if step.new else step, now)


@dataclass(slots=True)
class Side:
    """What an engine of one pool is made of."""

    is_prefill: bool
    trace: Trace
    scheduler: SchedulerV1
    recorder: PrefillRecorder | DecodeRecorder
    asked: Trace  # what the client asked
    channels: LinkChannels | None = None

    def front_end(self, refuse: FrontEnd | None) -> FrontEnd | None:
        """Prefill's front end judges what the client asked; decode's has nothing left to refuse."""
        if refuse is None or not self.is_prefill:
            return None
        return lambda request: refuse(self.asked.request(request.index))


class Pools:
    """Who has a request's KV, and what the engines of both pools are made of."""

    def __init__(
        self,
        trace: Trace,
        config: SchedulerConfig,
        link: Disaggregation,
        block_bytes: int,
        recorder: FleetRecorder,
    ) -> None:
        check_engine(config)
        self.link = link
        self.channels: list[LinkChannels] = []
        self.transfers = 0
        self._trace, self._config, self._block_bytes = trace, config, block_bytes
        self._recorder = recorder
        recorder.pools()
        self._says_it = link.first_token == "prefill"
        self._answer = answer_tokens(trace, config.max_model_len).tolist()
        self._prompt: list[int] = trace.prompt_tokens.tolist()
        self._prefill = prefill_trace(trace)
        self._decode = decode_trace(trace) if self._says_it else trace
        self._holder: dict[int, FleetReplica] = {}  # whose prefill engine still has the KV

    def goes_on(self, index: int) -> bool:
        """Is there anything to decode once the prompt is through?"""
        return not self._says_it or self._answer[index] > 1

    def side(self, number: int) -> Side:
        """What replica `number` is made of."""
        if number < self.link.prefill_replicas:
            return Side(
                True,
                self._prefill,
                PrefillScheduler(self._config, self.goes_on),
                PrefillRecorder(self._recorder, self.goes_on, self._says_it),
                self._trace,
            )
        self.channels.append(LinkChannels(self._block_bytes, self.link))
        return Side(
            False,
            self._decode,
            DecodeScheduler(self._config, self._prompt.__getitem__, self._pulled),
            DecodeRecorder(self._recorder),
            self._trace,
            self.channels[-1],
        )

    def hand_over(self, index: int, holder: FleetReplica, now: int) -> None:
        """The prompt is computed: its KV waits at `holder` until it has been read."""
        self._holder[index] = holder
        self._recorder.handed_over_ns[index] = now
        self.transfers += 1

    def _pulled(self, index: int) -> None:
        holder = self._holder.pop(index)
        assert isinstance(holder.scheduler, PrefillScheduler)
        holder.scheduler.release(index)
        holder.wake()
