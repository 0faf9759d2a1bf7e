"""Where more replicas make an objective worse after all: found out, and every size looked at.

Behind round-robin each replica meets every shared prefix for the first time, and near a limit a tail may be
a little longer with one replica more. The search rests on the contrary, and is held to account here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vsim.sim.plan.candidates import Candidate, Space
from vsim.sim.plan.evaluate import Evaluation

Look = Callable[[Candidate, int], Evaluation]


def settle_doubts(
    candidates: Sequence[Candidate], space: Space, look: Look, say: Callable[[str], None]
) -> int:
    """Simulate what could be cheaper if more replicas are not better; how many candidates were in doubt.

    The winner is simulated with two replicas fewer than it needs (one fewer misses). A candidate whose
    simulations contradict the assumption is simulated at every size that costs no more than the best plan.
    """
    scanned: set[int] = set()
    while True:
        best = _best(candidates, space)
        if best is not None:
            candidate, needed = best
            if needed > 2:
                look(candidate, needed - 2)
        doubtful = [c for c in candidates if c.number not in scanned and c.doubtful()]
        if not doubtful:
            return len(scanned)
        for candidate in doubtful:
            scanned.add(candidate.number)
            best = _best(candidates, space)
            most = space.most(candidate)
            if best is not None:
                limit = best[0].cost(best[1] + space.survive)
                most = min(most, candidate.affordable(limit) - space.survive)
            say(f"more replicas were worse: every size of candidate {candidate.number + 1}")
            for replicas in range(1, most + 1):
                if look(candidate, replicas).met:
                    break
            if candidate.smallest_met() is not None:
                candidate.skipped = None


def _best(candidates: Sequence[Candidate], space: Space) -> tuple[Candidate, int] | None:
    met = [
        (c.cost(n + space.survive), c.seen[n].worst, c.number, c, n)
        for c in candidates
        if (n := c.smallest_met()) is not None
    ]
    if not met:
        return None
    *_, candidate, replicas = min(met, key=lambda found: found[:3])
    return candidate, replicas
