"""What a fleet is told: the sections of a fleet file, in its own words. All durations in seconds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from vsim.errors import UserError
from vsim.sim.fleet.autoscale import Autoscale

# What the router does with a request that it may not pass on now.
Full = Literal["reject", "wait"]

# Why a request did not get its answer: codes in `Run.reasons`, with the status a client would have read.
QUEUE_FULL = "rejected_queue_full"  # 503, of the replica
QUEUED_REQS = "rejected_max_num_queued_reqs"  # 503, vLLM's own limit
QUEUED_TOKENS = "rejected_max_num_queued_tokens"  # 503, vLLM's own limit
FLEET_FULL = "rejected_fleet_queue_full"  # 429, of the router
NO_REPLICA = "rejected_no_replica"  # 503, of the router
TENANT_IN_FLIGHT = "rejected_tenant_in_flight"  # 429, of the router
TENANT_TOKENS = "rejected_tenant_tokens"  # 429, of the router
REPLICA_FAILED = "aborted_replica_failed"  # the stream breaks off


@dataclass(frozen=True, slots=True)
class Network:
    """One way between client and fleet: `latency_s` plus, per request, an exponential of mean `jitter_s`."""

    latency_s: float = 0.0
    jitter_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Admission:
    """Limits on queues; None: no such limit, as in vLLM by default.

    A replica refuses what would exceed its limits: `max_waiting_per_replica` requests not running,
    `max_num_queued_reqs` requests in all, or `max_num_queued_tokens` prompt tokens still in prefill (the
    last two as vLLM 0.32's flags of that name, v1/engine/async_llm.py `check_admission`).
    The router refuses beyond `max_waiting` requests waiting in the whole fleet. Replicas with
    `max_in_flight_per_replica` requests get no more; with none to send to, `when_full` decides.
    """

    max_waiting_per_replica: int | None = None
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    max_waiting: int | None = None
    max_in_flight_per_replica: int | None = None
    when_full: Full = "reject"


@dataclass(frozen=True, slots=True)
class Outage:
    """Replica `replica` is out from `at_s` on, for `for_s` seconds (None: for good).

    A failure may be `noticed_after_s`: until then the router sends it requests, which break off at once.
    """

    replica: int
    at_s: float
    for_s: float | None = None
    noticed_after_s: float = 0.0

    @property
    def end_s(self) -> float:
        return math.inf if self.for_s is None else self.at_s + self.for_s


@dataclass(frozen=True, slots=True)
class Retry:
    """A request is tried `attempts` times in all, `delay_s` after an attempt broke off.

    With `refused`, also after a replica refused it (a 503); otherwise only when its replica failed.
    """

    attempts: int = 1
    delay_s: float = 0.0
    refused: bool = False


@dataclass(frozen=True, slots=True)
class Disaggregation:
    """Two pools and the link between them.

    A transfer takes `latency_s` plus its bytes over `bandwidth_gb_s` (1e9 bytes/s, of one GPU's link; each
    rank pulls its own share), one at a time into a decode engine. `first_token` "prefill": the client gets
    the prefill engine's token, and the decode engine goes on from there. "decode": that token is thrown away
    and the decode engine says all of them, as with vLLM's example proxy.
    """

    prefill_replicas: int
    decode_replicas: int
    bandwidth_gb_s: float
    latency_s: float = 0.0
    first_token: Literal["prefill", "decode"] = "prefill"
    decode_route: str | None = None

    @property
    def replicas(self) -> int:
        return self.prefill_replicas + self.decode_replicas


@dataclass(frozen=True, slots=True)
class TenantLimit:
    """What one tenant may have; None: no such limit.

    `max_in_flight`: requests in the fleet at once. `tokens_per_s`: a bucket of `burst_tokens` (None: a
    minute's worth), refilled at that rate. A request goes in while anything is left; its prompt is paid for
    then, its answer when it has ended. Beyond either limit `over_limit` decides.
    """

    max_in_flight: int | None = None
    tokens_per_s: float | None = None
    burst_tokens: float | None = None
    over_limit: Full = "reject"

    @property
    def burst(self) -> float:
        """Most tokens that can be saved up."""
        if self.burst_tokens is not None:
            return self.burst_tokens
        return 60.0 * (self.tokens_per_s or 0.0)


@dataclass(frozen=True, slots=True)
class Tenants:
    """Limits by name, and for every other tenant, each for itself."""

    each: TenantLimit | None = None
    named: dict[str, TenantLimit] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FleetSpec:
    """A fleet file. `replicas` and `route` None: left to the command line. `name`: the file's, for messages."""

    name: str = "fleet"
    replicas: int | None = None
    route: str | None = None
    network: Network = field(default_factory=Network)
    admission: Admission = field(default_factory=Admission)
    failures: tuple[Outage, ...] = ()
    drains: tuple[Outage, ...] = ()
    retry: Retry = field(default_factory=Retry)
    autoscale: Autoscale | None = None
    disaggregation: Disaggregation | None = None
    tenants: Tenants | None = None

    @property
    def is_plain(self) -> bool:
        """Does it ask for nothing beyond equal replicas behind a route?"""
        return self == FleetSpec(self.name, self.replicas, self.route)

    @property
    def slots(self) -> int:
        """Most replicas that can exist at once; `replicas` must be settled."""
        assert self.replicas is not None
        return self.replicas if self.autoscale is None else self.autoscale.max_replicas

    def settled(self, replicas: int, route: str) -> FleetSpec:
        """With what the file leaves open taken from the command line, where 1 replica says nothing.

        Raises UserError for replicas outside autoscaling's bounds, and outages of replicas that never are.
        """
        number = replicas if self.replicas is None else self.replicas
        if self.autoscale is not None:
            low, high = self.autoscale.min_replicas, self.autoscale.max_replicas
            number = low if number == 1 else number
            if not low <= number <= high:
                raise UserError(
                    f"{number} replicas to begin with, and {self.name} keeps {low} to {high}: start within that"
                )
        settled = dataclasses.replace(
            self, replicas=number, route=route if self.route is None else self.route
        )
        for outage in (*self.failures, *self.drains):
            if outage.replica >= settled.slots:
                raise UserError(
                    f"{self.name} lets replica {outage.replica} fail or drain, and replicas run from 0 to "
                    f"{settled.slots - 1}: change that number, or --replicas"
                )
        return settled

    def as_dict(self) -> dict[str, Any]:
        """What the file asks for, JSON-ready: sections that differ from the defaults."""
        nothing = FleetSpec()
        return {
            name: _plain(value)
            for name in (f.name for f in dataclasses.fields(self))
            if (value := getattr(self, name)) != getattr(nothing, name)
        }

    def sentences(self, tenant_names: Sequence[str] = ()) -> list[str]:
        """What was assumed of this fleet, for the user; `tenant_names`: those of the trace."""
        said = []
        if self.tenants is not None:
            absent = [name for name in self.tenants.named if name not in tenant_names]
            if absent:
                said.append(
                    f"the trace has no tenant {', '.join(absent)}: that limit changes nothing"
                )
        if self.network != Network():
            said.append(
                f"network: {self.network.latency_s:g} s each way"
                + (
                    f" plus an exponential of mean {self.network.jitter_s:g} s drawn per request"
                    if self.network.jitter_s
                    else ""
                )
                + "; latencies are the client's, so TTFT holds both ways"
            )
        if self.failures:
            again = (
                f"are tried again, up to {self.retry.attempts} times in all, and the latency counts from the "
                "first"
                if self.retry.attempts > 1
                else "are not tried again"
            )
            said.append(
                "a replica that fails loses its KV cache and its requests at once, and whoever had sent them "
                f"knows it then; these {again}"
            )
        if self.disaggregation is not None:
            of = self.disaggregation
            said.append(
                f"the first {of.prefill_replicas} of {of.replicas} replicas prefill, the others decode; "
                f"handing over takes "
                f"{of.latency_s:g} s plus the KV blocks' bytes at {of.bandwidth_gb_s:g} GB/s per GPU"
            )
            said.append(
                "the client's first token is the prefill engine's, and the decode engine goes on from it; "
                "vLLM's example proxy throws that token away (first_token: decode)"
                if of.first_token == "prefill"
                else "the prefill engine's token is thrown away, and the decode engine says the first one"
            )
        if self.autoscale is not None:
            said.append(
                "autoscaling: GPUs are paid for from the moment a replica is asked for until it has finished "
                "what it had; every start takes the same time"
            )
        return said


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            f.name: _plain(getattr(value, f.name))
            for f in dataclasses.fields(value)
            if getattr(value, f.name) is not None
        }
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    return value
