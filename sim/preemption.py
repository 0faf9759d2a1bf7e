"""Who gives way when V0's KV blocks run out, and how: rules as functions. (V1's victim rules: victims.py.)

A `PreemptionRule` looks at a victim and says "recompute" (drop its KV, prefill again later) or "swap" (move
its KV to the CPU and back). A `VictimRule` picks the victim among the running requests that are not yet part
of the step. vLLM 0.8.5's own are `auto` and `last_in_queue`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from vsim.errors import UserError
from vsim.sim.request_v0 import RequestV0

PreemptionMode = Literal["recompute", "swap"]


@dataclass(frozen=True, slots=True)
class Victim:
    """The request that gives way.

    `is_prefill`: its prompt (or its recomputation) is not through yet. `can_swap_out`: does the CPU have
    room for its blocks. `forced`: it gives way to a more urgent request (priority policy). `swap` asks for
    none of them, because vLLM 0.8.5 does not.
    """

    num_tokens: int
    num_computed_tokens: int
    num_blocks: int
    num_preemptions: int
    is_prefill: bool
    can_swap_out: bool
    forced: bool = False


PreemptionRule = Callable[[Victim], PreemptionMode]
VictimRule = Callable[[Sequence[RequestV0]], RequestV0]


def recompute(victim: Victim) -> PreemptionMode:
    """`--preemption-mode recompute`."""
    return "recompute"


def swap(victim: Victim) -> PreemptionMode:
    """`--preemption-mode swap`. Without room on the CPU the engine dies, as 0.8.5 does."""
    return "swap"


def auto(victim: Victim) -> PreemptionMode:
    """0.8.5 without `--preemption-mode`: recompute, since every request here is a single sequence.

    (core/scheduler.py `_preempt`: swap is for groups of several sequences, which 0.8.5 splits into
    groups of one before they reach the scheduler.)
    """
    return "recompute"


def swap_above_tokens(threshold: int) -> PreemptionRule:
    """Swap victims with more computed tokens than `threshold`, recompute the others; not a rule of vLLM's.

    It keeps out of 0.8.5's traps: a victim in mid-prefill, a forced one, or one for which the CPU has no
    room, is recomputed. Raises UserError for a negative threshold.
    """
    if threshold < 0:
        raise UserError(f"swap-above-tokens={threshold} must not be negative")

    def rule(victim: Victim) -> PreemptionMode:
        sound = victim.can_swap_out and not victim.is_prefill and not victim.forced
        return "swap" if sound and victim.num_computed_tokens > threshold else "recompute"

    return rule


def preemption_rule(
    mode: Literal["recompute", "swap"] | None, swap_above: int | None = None
) -> PreemptionRule:
    """The rule that `--preemption-mode` and `--swap-above-tokens` name; the latter wins where it is given."""
    if swap_above is not None:
        return swap_above_tokens(swap_above)
    if mode is None:
        return auto
    return swap if mode == "swap" else recompute


def last_in_queue(running: Sequence[RequestV0]) -> RequestV0:
    """vLLM's choice: the tail of the running queue."""
    return running[-1]


def most_blocks(running: Sequence[RequestV0]) -> RequestV0:
    """Frees most at once; of equals the one further back."""
    return max(reversed(running), key=lambda request: len(request.table))


def fewest_computed(running: Sequence[RequestV0]) -> RequestV0:
    """Throws least work away; of equals the one further back."""
    return min(reversed(running), key=lambda request: request.num_computed_tokens)


def least_preempted(running: Sequence[RequestV0]) -> RequestV0:
    """Spreads the harm: whoever was preempted least often; of equals the one further back."""
    return min(reversed(running), key=lambda request: request.num_preemptions)


VICTIM_RULES: dict[str, VictimRule] = {
    rule.__name__: rule for rule in (last_in_queue, most_blocks, fewest_computed, least_preempted)
}
