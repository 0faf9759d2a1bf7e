"""What a plan is made of: candidates, the space they come from, and the search's result."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from vsim.sim.plan.evaluate import Evaluation, Probe
from vsim.sim.sweep_space import Point

# By how much an objective must be missed more with more replicas before that counts as a contradiction.
NOISE = 1.02


@dataclass(slots=True)
class Candidate:
    """A point of the space without its number of replicas, and all that was found out about it."""

    number: int
    point: Point
    price: Fraction  # of one GPU-hour, or 1: then cost counts GPUs
    looked: Probe
    seen: dict[int, Evaluation] = field(default_factory=dict)
    skipped: str | None = None

    def cost(self, replicas: int) -> Fraction:
        """Per hour, of `replicas` replicas."""
        return self.price * self.looked.gpus * replicas

    def affordable(self, cost: Fraction) -> int:
        """The most replicas that cost no more than `cost` an hour."""
        each = self.cost(1)
        return int(cost // each) if each else 1 << 30

    def worsened(self) -> tuple[int, int] | None:
        """(few, many) replicas of which the few met the objectives and the many did not; None: as assumed."""
        few = self.smallest_met()
        many = [n for n, seen in self.seen.items() if few is not None and n > few and not seen.met]
        return None if few is None or not many else (few, min(many))

    def doubtful(self) -> bool:
        """Do more replicas miss the objectives by more than fewer do? Then no size stands for another."""
        sizes = sorted(self.seen)
        best = math.inf
        for n in sizes:
            worst = self.seen[n].worst
            if worst > 1 and (best <= 1 or worst > best * NOISE):
                return True
            best = min(best, worst)
        return False

    def smallest_met(self) -> int | None:
        return min((n for n, seen in self.seen.items() if seen.met), default=None)


@dataclass(slots=True)
class Space:
    """Where to look: points without replicas, prices by GPU (None: count GPUs), and limits."""

    points: Sequence[Point]
    price_of: Callable[[str], Fraction] | None = None
    max_replicas: int = 64
    survive: int = 0  # replicas that may fail with every objective still met
    assumed: tuple[str, ...] = ()  # about the space, in sentences

    def most(self, candidate: Candidate) -> int:
        """Replicas of `candidate` that may serve; data-parallel ranks have a balancer of their own: one."""
        ranks = candidate.point.get("data_parallel_size") or 1
        return (1 if int(ranks) > 1 else self.max_replicas) - self.survive


@dataclass(slots=True)
class Plan:
    """A finished search. `best` None: nothing meets the objectives; `nearest` is who misses least."""

    candidates: list[Candidate]
    best: Candidate | None
    replicas: int  # of `best`, those that may fail included
    nearest: tuple[Candidate, Evaluation] | None
    offered_rps: float
    headroom: float | None = None  # traffic times this is still served; None if not asked
    knee: float | None = None  # traffic times this is not; None: all that was tried is served
    expected: Evaluation | None = None  # of the plan, with step times as predicted
    simulated: int = 0  # requests, in the search
    afterwards: int = 0  # requests, for headroom and frontier
    scanned: int = (
        0  # candidates of which every size was simulated, more replicas having made one worse
    )
