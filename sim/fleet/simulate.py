"""A fleet on one simulated clock: clients, a network, a router with limits, and replicas that come and go."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import simpy

from vsim.errors import UserError
from vsim.sim.bounds import BoundReachedError, Bounds, Watch
from vsim.sim.client import Client
from vsim.sim.cluster import ReplicaSpec
from vsim.sim.engine import NS
from vsim.sim.fleet import spec as says
from vsim.sim.fleet.autoscale import Autoscaler
from vsim.sim.fleet.disaggregation import Pools
from vsim.sim.fleet.recorder import FleetRecorder
from vsim.sim.fleet.replicas import Lives, Slot, waiting_at
from vsim.sim.fleet.spec import FleetSpec
from vsim.sim.fleet.tenants import Account, Accounts
from vsim.sim.router import Route, named_route, round_robin
from vsim.sim.run import REJECTED, Run
from vsim.sim.scheduler import EngineDiedError
from vsim.traces.trace import Trace, TraceRequest


def simulate_fleet(
    trace: Trace,
    replica: ReplicaSpec,
    fleet: FleetSpec,
    route: Route | None = None,
    *,
    seed: int = 0,
    max_concurrency: int | None = None,
    front_end: Callable[[TraceRequest], str | None] | None = None,
    on_step: Callable[[int, int], None] | None = None,
    gpus_per_replica: int = 1,
    block_bytes: int = 0,
    bounds: Bounds | None = None,
) -> Run:
    """Replay `trace` on `fleet.replicas` replicas like `replica`, under the fleet's limits and events.

    As `cluster.simulate_cluster`, to which it is equal in every column where the fleet file asks for
    nothing. Every request ends exactly once: finished, rejected or aborted, the latter two with a reason.
    `seed` draws the network's jitter; `block_bytes`: one KV block of a rank, for handing it over. Raises UserError for a fleet without replicas.
    """
    if fleet.replicas is None:
        raise UserError(f"{fleet.name}: replicas is missing: state it there or with --replicas")
    simulated = _Fleet(
        trace,
        replica,
        fleet,
        route or round_robin(),
        seed,
        max_concurrency,
        gpus_per_replica,
        block_bytes,
    )
    # A fleet's own events go on without steps, but end by themselves: its clock is looked at after each step.
    return simulated.run(
        front_end, on_step if bounds is None else Watch(bounds, len(trace), on_step)
    )


def one_way_ns(network: says.Network, requests: int, seed: int) -> list[int] | None:
    """ns between client and fleet, for each request; None where there is no network to speak of."""
    if not network.latency_s and not network.jitter_s:
        return None
    drawn = np.random.default_rng([seed, 0x6E6574]).exponential(1.0, requests)
    return [round(ns) for ns in ((network.latency_s + network.jitter_s * drawn) * NS).tolist()]


class _Fleet(Lives):
    def __init__(
        self,
        trace: Trace,
        replica: ReplicaSpec,
        fleet: FleetSpec,
        route: Route,
        seed: int,
        max_concurrency: int | None,
        gpus_per_replica: int = 1,
        block_bytes: int = 0,
    ) -> None:
        self.trace, self.template, self.spec, self.route = trace, replica, fleet, route
        self.limits = fleet.admission
        self.env = simpy.Environment(initial_time=0)
        way = one_way_ns(fleet.network, len(trace), seed)
        self.retry = fleet.retry
        self.recorder = FleetRecorder(
            trace,
            fleet.slots,
            way,
            breaks=bool(fleet.failures),
            retries=bool(fleet.failures) or fleet.retry.attempts > 1,
        )
        if not fleet.is_plain:
            self.recorder.routed_ns = [-1] * len(trace)
        self.accounts = None
        if fleet.tenants is not None:
            self.accounts = Accounts(fleet.tenants, trace.tenant_names)
        self.client = Client(self.env, trace, self._send, max_concurrency)
        self.gpus_per_replica = gpus_per_replica
        self.pools = None
        if fleet.disaggregation is not None:
            self.pools = Pools(
                trace, replica.config, fleet.disaggregation, block_bytes, self.recorder
            )
            self.decode_route = named_route(
                fleet.disaggregation.decode_route or fleet.route or "round-robin", seed + 1
            )
        self.slots = []
        self.num_places = fleet.replicas or 0
        self.replica_ns = 0
        self.scaler = None if fleet.autoscale is None else Autoscaler(fleet.autoscale)
        self.scraped = deque()
        self.changed_ns = 0
        self.schedulers = []
        self.held = deque()
        self.place = {}
        self.charged: set[int] = set()  # requests in the fleet on a tenant's account
        self.refilling: list[Account] = []  # those with a timer
        self.front_end = self.on_step = None

    # --- the run -----------------------------------------------------------------------------------

    def run(
        self,
        front_end: Callable[[TraceRequest], str | None] | None,
        on_step: Callable[[int, int], None] | None,
    ) -> Run:
        self.front_end, self.on_step = front_end, on_step
        assert self.spec.replicas is not None
        for number in range(self.spec.replicas):
            self.slots.append(Slot(number, self._engine(number)))
        self.env.process(self.client.run())
        for slot in self.slots:
            self._start(slot)
        for outage in self.spec.failures:
            self.env.process(self._failure(outage))
        for outage in self.spec.drains:
            self.env.process(self._drain(outage))
        ended_early = None
        try:
            self._run_clock()
        except EngineDiedError as death:
            ended_early = f"the engine died: {death}"
        except BoundReachedError as bound:
            ended_early = str(bound)
        return self._result(ended_early or self._stalled())

    # --- a request's way ---------------------------------------------------------------------------

    def _send(self, index: int) -> None:
        """The client sends; the fleet's side of the network is `one_way_ns` away."""
        way = self.recorder.one_way_ns
        self._after(0 if way is None else way[index], self._arrive, index)

    def _arrive(self, index: int) -> None:
        """At the router: what its tenant may have comes first."""
        account = self._account(index)
        if account is None:
            self._admit(index)
            return
        now = int(self.env.now)
        refusal = account.refusal(now)
        if account.limit.over_limit == "wait":
            account.waiting.append(index)
            self._let_in(account)
        elif refusal is not None:
            self._reject(index, refusal)
        else:
            self._take(account, index)

    def _account(self, index: int) -> Account | None:
        if self.accounts is None:
            return None
        tenant = self.trace.tenant
        return self.accounts.of(0 if tenant is None else int(tenant[index]))

    def _take(self, account: Account, index: int) -> None:
        account.take(int(self.env.now), int(self.trace.prompt_tokens[index]))
        self.charged.add(index)
        self._admit(index)

    def _let_in(self, account: Account) -> None:
        """Of a tenant's waiting requests, those that may go now."""
        if account.letting_in:
            return  # one that went in was refused at once: the loop that let it in goes on
        account.letting_in = True
        refusal = None
        while account.waiting and refusal is None:
            refusal = account.refusal(int(self.env.now))
            if refusal is None:
                self._take(account, account.waiting.popleft())
        account.letting_in = False
        if refusal == says.TENANT_TOKENS and account not in self.refilling:
            self.refilling.append(account)
            self.env.process(self._refill(account))

    def _refill(self, account: Account) -> Generator[simpy.Event, Any, None]:
        yield self.env.timeout(account.ns_until_tokens(int(self.env.now)))
        self.refilling.remove(account)
        self._let_in(account)

    def _settle(self, index: int) -> None:
        """A request has left the fleet: its tenant pays for the answer, or gets back what it paid."""
        account = self._account(index)
        if account is None or index not in self.charged:
            return
        self.charged.remove(index)
        account.in_fleet -= 1
        if self.recorder.status[index] == REJECTED:
            account.pay(int(self.env.now), -int(self.trace.prompt_tokens[index]))
        else:
            account.pay(int(self.env.now), self.recorder.output_tokens[index])
        self._let_in(account)

    def _admit(self, index: int) -> None:
        limit = self.limits.max_waiting
        if limit is not None and self._num_waiting() >= limit:
            self._reject(index, says.FLEET_FULL)
            return
        self._pass_on(index)

    def _pass_on(self, index: int) -> None:
        """Send a request to a replica, hold it at the router, or refuse it."""
        open_slots = self._open_slots()
        if not open_slots:
            if self.limits.when_full == "wait":
                self.held.append(index)
            else:
                some = any(slot.takes for slot in self.slots)
                self._reject(index, says.FLEET_FULL if some else says.NO_REPLICA)
            return
        engines = [slot.engine for slot in open_slots]
        chosen = self.route(self.trace.request(index), engines) if self.spec.slots > 1 else 0
        slot = open_slots[chosen]
        if self.recorder.replica is not None:
            self.recorder.replica[index] = slot.number
        if self.recorder.prefill_replica is not None:
            self.recorder.prefill_replica[index] = slot.number
        if self.recorder.attempts is not None:
            self.recorder.attempts[index] += 1
        if slot.hidden:
            if not self._try_again(index):
                self.recorder.gave_up(index, says.REPLICA_FAILED, int(self.env.now))
                self._over(index, at_once=False)
            return
        refusal = self._refusal(slot, index)
        if refusal is not None:
            if not (self.retry.refused and self._try_again(index)):
                self._reject(index, refusal)
            return
        slot.requests[index] = None
        self.place[index] = slot
        if self.recorder.routed_ns is not None:
            self.recorder.routed_ns[index] = int(self.env.now)
        slot.engine.receive(index)

    def _open_slots(self) -> list[Slot]:
        """Replicas that may get another request."""
        most = self.limits.max_in_flight_per_replica
        return [
            slot
            for slot in self.slots
            if (slot.takes or slot.hidden)
            and self._is_entrance(slot)
            and (most is None or slot.engine.in_flight < most)
        ]

    def _is_entrance(self, slot: Slot) -> bool:
        """Do requests come here first?"""
        return self.pools is None or slot.number < self.pools.link.prefill_replicas

    def _refusal(self, slot: Slot, index: int) -> str | None:
        """What the replica's own front end says to one more request."""
        limits, engine = self.limits, slot.engine
        most = limits.max_num_queued_reqs
        if most is not None and engine.in_flight + 1 > most:
            return says.QUEUED_REQS
        most = limits.max_num_queued_tokens
        if most is not None:
            first, prompt = self.recorder.first_token_ns, self.trace.prompt_tokens
            if sum(int(prompt[i]) for i in slot.requests if first[i] < 0) >= most:
                return says.QUEUED_TOKENS
        most = limits.max_waiting_per_replica
        if most is not None and waiting_at(engine) >= most:
            return says.QUEUE_FULL
        return None

    def _try_again(self, index: int) -> bool:
        """An attempt came to nothing: is there another one?"""
        attempts = self.recorder.attempts
        if attempts is None or attempts[index] >= self.retry.attempts:
            return False
        self.recorder.again(index)
        self._after(round(self.retry.delay_s * NS), self._pass_on, index)
        return True

    def _reject(self, index: int, reason: str) -> None:
        self.recorder.rejected(index, reason, int(self.env.now))
        # By an event of its own: a client that sends the next one at once must not grow the stack.
        self._over(index, at_once=False)

    def _ended(self, index: int) -> None:
        """The replica is through with a request: served, or refused as too long."""
        slot = self.place.pop(index)
        del slot.requests[index]
        if slot.leaving and not slot.requests:
            self._gone(slot)
        elif slot.draining and not slot.requests:
            self.recorder.event(int(self.env.now), "drained", slot.number)
        self._over(index)
        self._release()

    def _prefilled(self, index: int) -> None:
        """A prefill engine is through with a request: on to a decode engine, unless that was all."""
        assert self.pools is not None
        if self.recorder.status[index] == REJECTED or not self.pools.goes_on(index):
            self._ended(index)
            return
        slot = self.place.pop(index)
        del slot.requests[index]
        decoders = self.slots[self.pools.link.prefill_replicas :]
        engines = [other.engine for other in decoders]
        chosen = self.decode_route(self.trace.request(index), engines) if len(engines) > 1 else 0
        self.pools.hand_over(index, slot.engine, int(self.env.now))
        self.place[index] = decoders[chosen]
        decoders[chosen].requests[index] = None
        assert self.recorder.replica is not None
        self.recorder.replica[index] = decoders[chosen].number
        engines[chosen].receive(index)
        self._release()

    def _over(self, index: int, at_once: bool = True) -> None:
        """The fleet has answered; the client will know once the answer has travelled."""
        way = self.recorder.one_way_ns
        self._after(0 if way is None else way[index], self.client.finished, index, at_once)
        if self.accounts is not None:
            self._settle(index)

    def _release(self) -> None:
        """A place came free: the longest held go on."""
        while self.held and self._open_slots():
            self._pass_on(self.held.popleft())

    def _after(
        self, delay_ns: int, call: Callable[[int], None], index: int, at_once: bool = True
    ) -> None:
        if delay_ns <= 0 and at_once:
            call(index)
            return

        def later() -> Generator[simpy.Event, Any, None]:
            yield self.env.timeout(delay_ns)
            call(index)

        self.env.process(later())

    def _num_waiting(self) -> int:
        """Requests in the fleet that do not run."""
        return len(self.held) + sum(waiting_at(slot.engine) for slot in self.slots)

    # --- what came out -----------------------------------------------------------------------------

    def _stalled(self) -> str | None:
        left = len(self.trace) - self.client.num_ended
        if not left:
            return None
        if self.held:
            return f"stalled: {len(self.held)} requests wait at the router for a replica that never comes"
        schedulers = [slot.engine.scheduler for slot in self.slots]
        return (
            f"stalled: {left} of {len(self.trace)} requests could never be scheduled "
            f"({sum(s.num_waiting for s in schedulers)} waiting, "
            f"{sum(s.num_free_blocks for s in schedulers)} of "
            f"{sum(s.num_usable_blocks for s in schedulers)} KV blocks free)"
        )

    def _result(self, ended_early: str | None) -> Run:
        config, recorder = self.template.config, self.recorder
        counters: Counter[str] = Counter()
        for scheduler in self.schedulers:
            counters.update(scheduler.counters)
        if config.kv_offload is not None:
            counters["offload_loaded_blocks"] = recorder.loaded_blocks
            counters["offload_stored_blocks"] = recorder.stored_blocks
        if self.pools is not None:
            counters["kv_transfers"] = self.pools.transfers
            counters["kv_transferred_blocks"] = recorder.loaded_blocks
            counters["kv_transfer_ns"] = round(sum(c.busy_ns for c in self.pools.channels))
        if self.scaler is not None:
            end = self._end_ns()
            counters["replica_slots"] = self.num_places
            counters["replica_ns"] = self.replica_ns + sum(end - s.since_ns for s in self.slots)
        if self.spec.failures:
            counters["lost_tokens"] = recorder.lost_tokens
            counters["lost_output_tokens"] = recorder.lost_output_tokens
        itl_ns, itl_count = recorder.gaps()
        return Run(
            origin="simulated",
            requests=recorder.request_columns(self.client.columns()),
            steps=recorder.step_columns(),
            itl_ns=itl_ns,
            itl_count=itl_count,
            block_size=config.block_size,
            num_gpu_blocks=self.schedulers[0].num_usable_blocks,
            reasons=tuple(recorder.reasons),
            tenant_names=self.trace.tenant_names,
            counters=dict(counters),
            preemption_spans=recorder.spans(),
            events=tuple(recorder.events),
            end_ns=self._end_ns(),
            ended_early=ended_early,
        )

    def _end_ns(self) -> int:
        """When the last thing happened; timers of failures to come after the last request are none."""
        if not self.spec.failures and not self.spec.drains and self.scaler is None:
            return int(self.env.now)
        recorder, way = self.recorder, self.recorder.one_way_ns
        ends = [t + (0 if way is None else way[i]) for i, t in enumerate(recorder.finish_ns)]
        return max([0, *ends, *recorder.steps["end_ns"]])
