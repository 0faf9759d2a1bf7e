"""What a plan costs in all: GPUs decide between deployments, and storage, network and the rest come on top."""

from __future__ import annotations

from fractions import Fraction

from vsim.sim.cost import HOURS_PER_MONTH, Cost, Prices, cost_of
from vsim.sim.plan.candidates import Candidate, Plan, Space


def bill_of(plan: Plan, space: Space, prices: Prices | None) -> Cost | None:
    """The plan's bill, for traffic like that of its expected run; of the nearest miss where nothing meets.

    None without prices or where nothing was simulated. Replicas that may fail are paid for.
    """
    if prices is None:
        return None
    if plan.best is not None:
        candidate: Candidate = plan.best
        seen = plan.expected or candidate.seen[plan.replicas - space.survive]
        replicas = plan.replicas
    elif plan.nearest is not None:
        candidate, seen = plan.nearest
        replicas = seen.replicas + space.survive
    else:
        return None
    gpus = candidate.looked.gpus * replicas
    return cost_of(prices, str(candidate.point["gpu"]), gpus, seen.numbers)


def beside_gpus(bill: Cost | None) -> Fraction:
    """An hour of what costs the same whichever deployment is chosen: storage, network and other."""
    if bill is None:
        return Fraction(0)
    return bill.per_hour - bill.gpus_per_month / HOURS_PER_MONTH
