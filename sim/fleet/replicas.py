"""A fleet's replicas and their lives: engines that start, fail, drain, and are more or fewer by autoscaling."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import simpy

from vsim.sim.client import Client
from vsim.sim.cluster import ReplicaSpec
from vsim.sim.engine import NS, Replica, make_scheduler
from vsim.sim.fleet import spec as says
from vsim.sim.fleet.autoscale import Autoscaler
from vsim.sim.fleet.disaggregation import FleetReplica, Pools
from vsim.sim.fleet.recorder import FleetRecorder
from vsim.sim.fleet.spec import FleetSpec, Outage
from vsim.sim.scheduler import Scheduler
from vsim.traces.trace import Trace, TraceRequest


@dataclass(slots=True, eq=False)
class Slot:
    """A place for a replica: the engine that runs there now, and the requests it has."""

    number: int
    engine: FleetReplica
    since_ns: int = 0  # paid for from here on
    process: simpy.Process | None = None
    starting: bool = False
    down: bool = False
    hidden: bool = False  # down, and the router does not know
    draining: bool = False  # as the fleet file asks
    leaving: bool = False  # one too many: goes once it is empty
    requests: dict[int, None] = field(default_factory=dict)  # sent here and not ended, in order

    @property
    def takes(self) -> bool:
        """Does it get requests?"""
        return not (self.starting or self.down or self.draining or self.leaving)


class Lives:
    """What the fleet's clock and the fleet file do to replicas; the requests' side is `simulate._Fleet`."""

    env: simpy.Environment
    trace: Trace
    template: ReplicaSpec
    spec: FleetSpec
    recorder: FleetRecorder
    client: Client
    gpus_per_replica: int
    pools: Pools | None
    slots: list[Slot]  # in order of their numbers
    num_places: int  # highest number in use + 1
    replica_ns: int  # paid for, of replicas that have gone
    scaler: Autoscaler | None
    # (when it is known, the metric of each slot that was ready), latest last
    scraped: deque[tuple[int, dict[Slot, float]]]
    changed_ns: int  # the last decision to have more or fewer
    schedulers: list[Scheduler]  # of all engines that ever ran
    held: deque[int]  # at the router, first come first served
    place: dict[int, Slot]
    front_end: Callable[[TraceRequest], str | None] | None
    on_step: Callable[[int, int], None] | None

    # What becomes of requests meanwhile:

    def _ended(self, index: int) -> None:
        raise NotImplementedError

    def _prefilled(self, index: int) -> None:
        raise NotImplementedError

    def _release(self) -> None:
        raise NotImplementedError

    def _try_again(self, index: int) -> bool:
        raise NotImplementedError

    def _over(self, index: int, at_once: bool = True) -> None:
        raise NotImplementedError

    def _run_clock(self) -> None:
        """Let time pass; the autoscaler looks at fixed times while there is anyone left to serve."""
        if self.scaler is None:
            self.env.run()
            return
        spec = self.scaler.spec
        scrape, sync = round(spec.scrape_s * NS), round(spec.sync_s * NS)
        # Where nothing else can happen any more, the windows pass and that is that.
        patience = round((spec.scale_down_window_s + spec.scale_up_window_s) * NS)
        patience += 2 * (scrape + sync) + round(spec.scrape_delay_s * NS)
        now, lively = 0, 0
        while not self._all_ended:
            if self.env.peek() != float("inf"):
                lively = now
            elif now - max(lively, self.changed_ns) > patience:
                break
            now = min((now // scrape + 1) * scrape, (now // sync + 1) * sync)
            self.env.run(until=now)
            if self.env.peek() == now:
                self.env.step()  # SimPy puts what stopped it back at the head of its queue
            if self._all_ended:
                break
            if now % scrape == 0:
                self._scrape(now)
            if now % sync == 0:
                self._scale(now)
        self.env.run()

    def _engine(self, number: int) -> FleetReplica:
        template, on_step = self.template, self.on_step
        link = None if template.host_link is None else simpy.Resource(self.env)
        trace, recorder, ended = self.trace, self.recorder, self._ended
        front_end, channels = self.front_end, None
        if self.pools is None:
            scheduler: Scheduler = make_scheduler(template.config)
        else:
            side = self.pools.side(number)
            scheduler, trace, channels = side.scheduler, side.trace, side.channels
            recorder = side.recorder  # type: ignore[assignment]
            front_end = side.front_end(front_end)
            if side.is_prefill:
                ended = self._prefilled
        engine = FleetReplica(
            self.env,
            trace,
            scheduler,
            template.config,
            template.step_model,
            recorder,
            ended,
            frontend_ns=round(template.frontend_s * NS),
            front_end=front_end,
            host_link=template.host_link,
            on_step=None
            if on_step is None
            else lambda: on_step(int(self.env.now), self.client.num_ended),
            number=number,
            link=link,
        )
        if channels is not None:
            engine.pull_over(channels)
        self.schedulers.append(engine.scheduler)
        return engine

    def _start(self, slot: Slot) -> None:
        slot.process = self.env.process(_until_killed(slot.engine))

    # --- replicas go and come ----------------------------------------------------------------------

    def _failure(self, outage: Outage) -> Generator[simpy.Event, Any, None]:
        yield self.env.timeout(round(outage.at_s * NS))
        slot = self._slot(outage.replica)
        if self._all_ended or slot is None:
            return  # nobody is there to fail
        self._fail(slot)
        if outage.noticed_after_s and not slot.leaving and not slot.starting:
            slot.hidden = True
            self.env.process(self._notice(slot, round(outage.noticed_after_s * NS)))
        if slot.leaving:
            self._gone(slot)
            return
        if outage.for_s is None:
            return
        yield self.env.timeout(round(outage.for_s * NS))
        if self._all_ended or slot not in self.slots:
            return
        slot.starting = False
        slot.down = slot.hidden = False
        self._start(slot)
        self.recorder.event(int(self.env.now), "replica_up", slot.number)
        self._release()

    def _notice(self, slot: Slot, after_ns: int) -> Generator[simpy.Event, Any, None]:
        """The router's health check finds out."""
        engine = slot.engine
        yield self.env.timeout(after_ns)
        if slot.engine is engine:
            slot.hidden = False

    def _fail(self, slot: Slot) -> None:
        """The replica is gone, with its KV cache and all that it had under way."""
        if slot.process is not None and slot.process.is_alive:
            slot.process.interrupt()
        slot.down = True
        slot.engine = self._engine(slot.number)  # what will start there, empty
        victims, slot.requests = list(slot.requests), {}
        self.recorder.event(
            int(self.env.now), "replica_down", slot.number, f"{len(victims)} requests lost"
        )
        for index in victims:
            del self.place[index]
            self.recorder.broke_off(index)
            if not self._try_again(index):
                self.recorder.gave_up(index, says.REPLICA_FAILED, int(self.env.now))
                self._over(index)

    def _drain(self, outage: Outage) -> Generator[simpy.Event, Any, None]:
        yield self.env.timeout(round(outage.at_s * NS))
        slot = self._slot(outage.replica)
        if self._all_ended or slot is None:
            return
        slot.draining = True
        self.recorder.event(
            int(self.env.now), "drain_begins", slot.number, f"{len(slot.requests)} requests left"
        )
        if outage.for_s is None:
            return
        yield self.env.timeout(round(outage.for_s * NS))
        if self._all_ended or slot not in self.slots:
            return
        slot.draining = False
        self.recorder.event(int(self.env.now), "drain_ends", slot.number)
        self._release()

    def _slot(self, number: int) -> Slot | None:
        return next((slot for slot in self.slots if slot.number == number), None)

    def _scrape(self, now: int) -> None:
        """Prometheus asks every replica that is ready."""
        assert self.scaler is not None
        spec = self.scaler.spec
        seen = {slot: self._metric(slot, spec.metric) for slot in self.slots if slot.takes}
        self.scraped.append((now + round(spec.scrape_delay_s * NS), seen))

    def _metric(self, slot: Slot, name: str) -> float:
        if name == "kv_usage":
            return slot.engine.kv_cache_usage
        if name == "in_flight_per_replica":
            return float(slot.engine.in_flight)
        # Those held at the router wait for somebody: everybody's share.
        held = len(self.held) / max(1, sum(other.takes for other in self.slots))
        return (waiting_at(slot.engine) + held) / self.gpus_per_replica

    def _scale(self, now: int) -> None:
        """The autoscaler looks, and acts."""
        assert self.scaler is not None
        while len(self.scraped) > 1 and self.scraped[1][0] <= now:
            self.scraped.popleft()
        known: dict[Slot, float] = {}
        if self.scraped and self.scraped[0][0] <= now:
            known = self.scraped[0][1]
        here = [slot for slot in self.slots if not slot.leaving]
        ready = [known.get(slot) for slot in here if slot.takes]
        wanted = self.scaler.decide(now / NS, len(here), ready, len(here) - len(ready))
        if wanted != len(here):
            self.changed_ns = now
        for _ in range(wanted - len(here)):
            self.env.process(self._appear(self._new_slot(now)))
        # Those that do not serve yet go first, then the youngest.
        here.sort(key=lambda slot: (slot.takes, -slot.since_ns, -slot.number))
        for slot in here[: max(0, len(here) - wanted)]:
            self._leave(slot)

    def _new_slot(self, now: int) -> Slot:
        taken = {slot.number for slot in self.slots}
        number = next(n for n in range(len(taken) + 1) if n not in taken)
        slot = Slot(number, self._engine(number), since_ns=now, starting=True)
        self.slots.append(slot)
        self.slots.sort(key=lambda slot: slot.number)
        self.num_places = max(self.num_places, number + 1)
        self.recorder.event(now, "replica_asked_for", number)
        return slot

    def _appear(self, slot: Slot) -> Generator[simpy.Event, Any, None]:
        """One more replica serves once it has started."""
        assert self.scaler is not None
        yield self.env.timeout(round(self.scaler.spec.cold_start_s * NS))
        if slot.leaving or slot.down or not slot.starting or self._all_ended:
            return
        slot.starting = False
        self._start(slot)
        self.recorder.event(int(self.env.now), "replica_ready", slot.number)
        self._release()

    def _leave(self, slot: Slot) -> None:
        """One too many: it finishes what it has."""
        slot.leaving = True
        text = f"{len(slot.requests)} requests left"
        self.recorder.event(int(self.env.now), "replica_leaves", slot.number, text)
        if not slot.requests:
            self._gone(slot)

    def _gone(self, slot: Slot) -> None:
        now = int(self.env.now)
        self.slots.remove(slot)
        self.replica_ns += now - slot.since_ns
        self.recorder.event(now, "replica_gone", slot.number)

    @property
    def _all_ended(self) -> bool:
        return self.client.num_ended == len(self.trace)


def _until_killed(engine: Replica) -> Generator[simpy.Event, Any, None]:
    with contextlib.suppress(simpy.Interrupt):
        yield from engine.run()


def waiting_at(engine: Replica) -> int:
    """Requests at a replica that do not run: its inbox counts."""
    return engine.in_flight - engine.scheduler.num_running
