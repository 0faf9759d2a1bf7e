"""Where a request goes: a route is a function of the request and of what a router can see of each replica.

No route may read how long an answer will be: `TraceRequest.output_tokens` is the model's secret.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from typing import Any, Protocol

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


class RoundRobin:
    """One after the other. `turn`: who got the last one."""

    def __init__(self) -> None:
        self.turn = -1

    def __call__(self, request: TraceRequest, replicas: Sequence[ReplicaView]) -> int:
        self.turn = (self.turn + 1) % len(replicas)
        return self.turn


def round_robin() -> Route:
    """One after the other."""
    return RoundRobin()


def least_requests(request: TraceRequest, replicas: Sequence[ReplicaView]) -> int:
    """Fewest requests in flight; ties go to the lowest number."""
    return min(range(len(replicas)), key=lambda i: replicas[i].in_flight)


def least_tokens(request: TraceRequest, replicas: Sequence[ReplicaView]) -> int:
    """Fewest prompt tokens in flight, then fewest requests."""
    return min(
        range(len(replicas)),
        key=lambda i: (replicas[i].in_flight_prompt_tokens, replicas[i].in_flight),
    )


class PowerOfTwo:
    """The less loaded of two replicas drawn at random (Mitzenmacher 2001)."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def draws(self, again: Any = None) -> Any:
        """The state of the draws; with `again`, go back to one."""
        if again is not None:
            self._random.setstate(again)
        return self._random.getstate()

    def draw(self, count: int) -> tuple[int, int]:
        """The next two of `count` replicas."""
        one, other = self._random.sample(range(count), 2)
        return one, other

    def __call__(self, request: TraceRequest, replicas: Sequence[ReplicaView]) -> int:
        if len(replicas) == 1:
            return 0
        one, other = self.draw(len(replicas))
        return other if replicas[other].in_flight < replicas[one].in_flight else one


def power_of_two(seed: int = 0) -> Route:
    """The less loaded of two replicas drawn at random (Mitzenmacher 2001)."""
    return PowerOfTwo(seed)


def prefix_affinity(request: TraceRequest, replicas: Sequence[ReplicaView]) -> int:
    """Same beginning of the prompt, same replica (rendezvous hashing); without one, `least_requests`."""
    if not request.prefix_ids:
        return least_requests(request, replicas)
    return _home(request.prefix_ids[0], replicas)


def session_affinity(request: TraceRequest, replicas: Sequence[ReplicaView]) -> int:
    """Same session, same replica (rendezvous hashing); for a request of none, `least_requests`."""
    if request.session < 0:
        return least_requests(request, replicas)
    return _home(request.session, replicas)


def _home(content: int, replicas: Sequence[ReplicaView]) -> int:
    """`home_of`, by the replicas' own numbers: when one goes, only what was at home there moves."""
    numbers = [getattr(view, "number", place) for place, view in enumerate(replicas)]
    if numbers == list(range(len(numbers))):
        return home_of(content, len(numbers))
    return max(range(len(numbers)), key=lambda place: _weight(content, numbers[place]))


def home_of(content: int, count: int) -> int:
    """The replica, of `count`, at which prompts that begin with `content` are at home."""
    return max(range(count), key=lambda replica: _weight(content, replica))


def _weight(content: int, replica: int) -> bytes:
    return hashlib.blake2b(f"{content}/{replica}".encode(), digest_size=8).digest()


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
    "session-affinity",
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
        "session-affinity": session_affinity,
        "kv-aware": kv_aware,
    }
    if name not in plain:
        raise UserError(f"route {name!r} is not known; known are {', '.join(ROUTES)}")
    return plain[name]
