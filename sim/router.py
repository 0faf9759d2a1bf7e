"""Where a request goes: a route is a function of the request and of what a router can see of each replica.

No route may read how long an answer will be: `TraceRequest.output_tokens` is the model's secret.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from typing import Protocol

from vsim.errors import UserError
from vsim.traces.trace import TraceRequest


class ReplicaView(Protocol):
    """What a router knows of a replica: its own counts, and the gauges that vLLM's /metrics would show."""

    in_flight: int  # requests sent there and not ended
    in_flight_prompt_tokens: int

    @property
    def kv_cache_usage(self) -> float:
        """Share of KV blocks in use, 0 to 1 (vllm:kv_cache_usage_perc)."""
        ...

    @property
    def num_waiting(self) -> int:
        """vllm:num_requests_waiting."""
        ...


Route = Callable[[TraceRequest, Sequence[ReplicaView]], int]


def round_robin() -> Route:
    """One after the other."""
    turn = -1

    def route(request: TraceRequest, replicas: Sequence[ReplicaView]) -> int:
        nonlocal turn
        turn = (turn + 1) % len(replicas)
        return turn

    return route


def least_requests(request: TraceRequest, replicas: Sequence[ReplicaView]) -> int:
    """Fewest requests in flight; ties go to the lowest number."""
    return min(range(len(replicas)), key=lambda i: replicas[i].in_flight)


def least_tokens(request: TraceRequest, replicas: Sequence[ReplicaView]) -> int:
    """Fewest prompt tokens in flight, then fewest requests."""
    return min(
        range(len(replicas)),
        key=lambda i: (replicas[i].in_flight_prompt_tokens, replicas[i].in_flight),
    )


def power_of_two(seed: int = 0) -> Route:
    """The less loaded of two replicas drawn at random (Mitzenmacher 2001)."""
    draw = random.Random(seed)

    def route(request: TraceRequest, replicas: Sequence[ReplicaView]) -> int:
        if len(replicas) == 1:
            return 0
        one, other = draw.sample(range(len(replicas)), 2)
        return other if replicas[other].in_flight < replicas[one].in_flight else one

    return route


def prefix_affinity(request: TraceRequest, replicas: Sequence[ReplicaView]) -> int:
    """Same beginning of the prompt, same replica (rendezvous hashing); without one, `least_requests`."""
    if not request.prefix_ids:
        return least_requests(request, replicas)
    key = request.prefix_ids[0]

    def weight(replica: int) -> bytes:
        return hashlib.blake2b(f"{key}/{replica}".encode(), digest_size=8).digest()

    return max(range(len(replicas)), key=weight)


def kv_aware(request: TraceRequest, replicas: Sequence[ReplicaView]) -> int:
    """Fewest waiting, then least KV cache in use."""
    return min(
        range(len(replicas)),
        key=lambda i: (replicas[i].num_waiting, replicas[i].kv_cache_usage, replicas[i].in_flight),
    )


ROUTES = (
    "round-robin",
    "least-requests",
    "least-tokens",
    "power-of-two",
    "prefix-affinity",
    "kv-aware",
)


def named_route(name: str, seed: int = 0) -> Route:
    """A fresh route by its name on the command line. Raises UserError."""
    if name == "round-robin":
        return round_robin()
    if name == "power-of-two":
        return power_of_two(seed)
    plain: dict[str, Route] = {
        "least-requests": least_requests,
        "least-tokens": least_tokens,
        "prefix-affinity": prefix_affinity,
        "kv-aware": kv_aware,
    }
    if name not in plain:
        raise UserError(f"route {name!r} is not known; known are {', '.join(ROUTES)}")
    return plain[name]
