"""Who has to give way when KV blocks run out: a victim rule is a function of the running requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vsim.sim.request import Request

VictimRule = Callable[[Sequence[Request]], Request]


def last_admitted(running: Sequence[Request]) -> Request:
    """vLLM's rule under fcfs (spec 2.8)."""
    return running[-1]


def least_urgent(running: Sequence[Request]) -> Request:
    """vLLM's rule under priority: largest (priority, arrival); ties give the one admitted first."""
    return max(running, key=lambda request: (request.priority, request.arrival))
