"""The search: which candidates need simulating at all, and at how many replicas.

Two things make it cheap. More replicas never make an objective worse, so a candidate's smallest number is
bisected, and one simulation at the most that still costs no more than the best plan so far rules a candidate
out. And a quick look at each engine, a few hundred requests all at once, sizes the first guess and drops
what is hopelessly overloaded.

Every wave's work is settled before it starts and collected in order: the plan does not depend on how many
processes there are, or where.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

from vsim.errors import UserError
from vsim.sim.plan.candidates import Candidate, Plan, Space
from vsim.sim.plan.doubt import settle_doubts
from vsim.sim.plan.evaluate import Evaluation, Question, evaluate, probe
from vsim.sim.sweep import Workers, check_workers, joblib_backend
from vsim.sim.sweep_space import Point
from vsim.traces.trace import Trace

# Offered load over the first look's capacity beyond which a candidate is not simulated. The look is short
# and shares no prefixes: it may be off by a lot, but not by this much.
HOPELESS = 2.0
# How far the objectives must be missed by requests that come one by one, likewise.
TOO_SLOW = 1.1
# A rival that misses at the plan's price by less than this is tried with one replica fewer as well.
NEAR_MISS = 1.05

Say = Callable[[str], None]


def search(
    trace: Trace, space: Space, question: Question, workers: Workers, say: Say = lambda _: None
) -> Plan:
    """The cheapest candidate and number of replicas that meet every objective.

    Ties in cost go to the larger margin (the smaller worst ratio), then to the earlier point. Raises
    UserError for an empty trace or where vLLM refuses every candidate.
    """
    check_workers(workers)
    if not len(trace):
        raise UserError(f"{trace.source.name}: no requests to plan for")
    sent = question.load.apply(trace)
    offered = len(sent) / sent.span_s if sent.span_s > 0 else math.inf
    looked = []
    tasks = [(probe, (trace, point, question)) for point in space.points]
    for found in each(tasks, workers):
        looked.append(found)
        say(f"first look at {len(looked)} of {len(tasks)} engines")
    candidates = [
        Candidate(number, point, _price(space, point), seen, skipped=seen.refused)
        for number, (point, seen) in enumerate(zip(space.points, looked, strict=True))
    ]
    able = [c for c in candidates if c.skipped is None]
    for candidate in able:
        look = candidate.looked
        if look.telling and look.alone > TOO_SLOW:
            candidate.skipped = (
                f"too slow at any size: {look.alone_slo} is {look.alone:.3g} times its limit for the median of requests "
                "that come one by one"
            )
    if not able:
        reasons = list(dict.fromkeys(str(c.skipped) for c in candidates))
        raise UserError(f"vLLM refuses every candidate: {reasons[0]}")
    able.sort(key=lambda c: (c.cost(_guess(c, offered)), c.number))
    best = _first(trace, able, space, question, offered, say)
    if best is None and not any(c.seen for c in able):
        _simulate_one(trace, able, question, offered, space)
        if any(seen.met for c in able for seen in c.seen.values()):
            # The first look was wrong about this trace: look at everything.
            for candidate in able:
                candidate.looked = dataclasses.replace(candidate.looked, telling=False)
                candidate.skipped = None
            best = _first(trace, able, space, question, offered, say)
    if best is not None:
        rivals = [c for c in able if c is not best]
        _rivals(trace, rivals, best, space, question, offered, workers, say)
    scanned = settle_doubts(
        able, space, lambda candidate, n: _look(trace, candidate, n, question), say
    )
    plan = _settle(candidates, space, offered)
    plan.scanned = scanned
    plan.simulated = sum(c.looked.simulated for c in candidates)
    plan.simulated += sum(seen.simulated for c in candidates for seen in c.seen.values())
    return plan


def _price(space: Space, point: Point) -> Fraction:
    return Fraction(1) if space.price_of is None else space.price_of(str(point["gpu"]))


def _guess(candidate: Candidate, offered: float) -> int:
    if not math.isfinite(offered):
        return 1
    return max(1, math.ceil(offered / candidate.looked.capacity_rps))


def _hopeless(candidate: Candidate, replicas: int, offered: float) -> str | None:
    capacity = candidate.looked.most_rps * replicas
    if not candidate.looked.telling or not math.isfinite(offered) or offered <= HOPELESS * capacity:
        return None
    return (
        f"hopeless: {offered:.3g} requests/s offered, at most about {capacity:.3g} served by "
        f"{replicas} {'replica' if replicas == 1 else 'replicas'}"
    )


def _first(
    trace: Trace,
    able: Sequence[Candidate],
    space: Space,
    question: Question,
    offered: float,
    say: Say,
) -> Candidate | None:
    """The first candidate, in the order of guessed cost, that meets the objectives at any size."""
    for candidate in able:
        if candidate.skipped is not None:
            continue
        most = space.most(candidate)
        if most < 1:
            candidate.skipped = "one group of data-parallel ranks: nothing is left when it fails"
            continue
        hopeless = _hopeless(candidate, most, offered)
        if hopeless is not None:
            candidate.skipped = hopeless
            continue
        say(f"sizing {_name(candidate)}")
        smallest(trace, candidate, question, min(_guess(candidate, offered), most), most)
        if candidate.smallest_met() is not None:
            return candidate
        candidate.skipped = "missed with " + _sizes(candidate)
    return None


def _rivals(
    trace: Trace,
    rivals: Sequence[Candidate],
    best: Candidate,
    space: Space,
    question: Question,
    offered: float,
    workers: Workers,
    say: Say,
) -> None:
    """One simulation for each rival that could be as cheap; those that pass are sized as well.

    One more with fewer replicas where fewer may be better: prefixes or sessions are shared, or it is a near miss.
    """
    smallest_n = best.smallest_met()
    assert smallest_n is not None
    limit = best.cost(smallest_n + space.survive)
    tried: list[tuple[Candidate, int]] = []
    for rival in rivals:
        if rival.skipped is not None or rival.seen:
            continue
        most = min(rival.affordable(limit) - space.survive, space.most(rival))
        if most < 1:
            rival.skipped = f"dearer than the plan with {1 + space.survive} already"
            continue
        hopeless = _hopeless(rival, most, offered)
        if hopeless is not None:
            rival.skipped = f"for the plan's price {hopeless}"
            continue
        tried.append((rival, most))
    tasks = [(evaluate, (trace, rival.point, most, question)) for rival, most in tried]
    for done, ((rival, most), seen) in enumerate(zip(tried, each(tasks, workers), strict=True), 1):
        rival.seen[most] = seen
        if not seen.met:
            rival.skipped = "misses at the plan's price"
        say(f"simulated {done} of {len(tried)} rivals")
    fewer = [(rival, n) for rival, most in tried if (n := _fewer(rival, most, offered))]
    tasks = [(evaluate, (trace, rival.point, n, question)) for rival, n in fewer]
    for (rival, n), seen in zip(fewer, each(tasks, workers), strict=True):
        rival.seen[n] = seen
    passed = [(rival, most) for rival, most in tried if rival.seen[most].met and most > 1]
    sized = [(_sized, (trace, rival, question, most)) for rival, most in passed]
    for (rival, _), seen_by_size in zip(passed, each(sized, workers), strict=True):
        rival.seen |= seen_by_size


def _fewer(rival: Candidate, most: int, offered: float) -> int:
    """A number of replicas below `most`, which misses, that is worth a simulation; 0: none."""
    if rival.seen[most].met or most < 2:
        return 0
    if not rival.looked.telling:
        return min(_guess(rival, offered), most - 1)
    return most - 1 if rival.seen[most].worst < NEAR_MISS else 0


def _sized(
    trace: Trace, candidate: Candidate, question: Question, most: int
) -> dict[int, Evaluation]:
    smallest(trace, candidate, question, most, most)
    return candidate.seen


def _look(trace: Trace, candidate: Candidate, replicas: int, question: Question) -> Evaluation:
    """That many replicas, simulated unless they have been."""
    if replicas not in candidate.seen:
        candidate.seen[replicas] = evaluate(trace, candidate.point, replicas, question)
    return candidate.seen[replicas]


def smallest(
    trace: Trace, candidate: Candidate, question: Question, guess: int, most: int
) -> int | None:
    """The least replicas, up to `most`, that meet the objectives; every simulation stays in `seen`."""

    def met(replicas: int) -> bool:
        return _look(trace, candidate, replicas, question).met

    low, high, stride = 0, None, 1  # `low` misses, `high` meets
    at = guess
    while True:
        if met(at):
            high = at
            at = high - stride
            if at <= low:
                break
        else:
            low = at
            if high is not None or at >= most:
                break
            at = min(most, low + stride)
        stride *= 2
    if high is None:
        if candidate.looked.telling:
            return None
        # Fewer may be better here: prefixes are met again sooner.
        at = guess
        while at > 1:
            at = at // 2
            if met(at):
                return at
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if met(middle) else (middle, high)
    return high


def _settle(candidates: list[Candidate], space: Space, offered: float) -> Plan:
    """The winner among all that was simulated, or the nearest miss."""
    met = [
        (c.cost(n + space.survive), c.seen[n].worst, c.number, c, n)
        for c in candidates
        if (n := c.smallest_met()) is not None
    ]
    if met:
        *_, winner, replicas = min(met, key=lambda found: found[:3])
        return Plan(candidates, winner, replicas + space.survive, None, offered)
    missed = [(seen.worst, c.number, c, seen) for c in candidates for seen in c.seen.values()]
    if not missed:
        return Plan(candidates, None, 0, None, offered)
    *_, nearest, seen = min(missed, key=lambda found: found[:2])
    return Plan(candidates, None, 0, (nearest, seen), offered)


def _simulate_one(
    trace: Trace, able: Sequence[Candidate], question: Question, offered: float, space: Space
) -> None:
    """Where everything was ruled out unsimulated, the least hopeless is simulated: a miss with a number."""
    possible = [c for c in able if space.most(c) >= 1]
    if not possible:
        return
    least = min(possible, key=lambda c: (c.looked.alone, c.number))
    replicas = min(2 * _guess(least, offered), space.most(least))
    least.seen[replicas] = evaluate(trace, least.point, replicas, question)


def _sizes(candidate: Candidate) -> str:
    """The numbers of replicas that were simulated, in words."""
    sizes = sorted(candidate.seen)
    return ", ".join(map(str, sizes)) + (" replica" if sizes == [1] else " replicas")


def _name(candidate: Candidate) -> str:
    return f"{candidate.point['gpu']}, candidate {candidate.number + 1}"


def _run(task: tuple[Callable[..., object], tuple[object, ...]]) -> object:
    function, arguments = task
    return function(*arguments)


def each(tasks: Sequence[tuple], workers: Workers) -> Iterator:  # type: ignore[type-arg]
    """Results in the order of `tasks`, each a function and its arguments, from one process or many."""
    if len(tasks) < 2 or (workers.backend in ("loky", "threading") and (workers.jobs or 1) == 1):
        yield from map(_run, tasks)
        return
    import joblib

    with joblib_backend(workers) as jobs:
        yield from joblib.Parallel(n_jobs=jobs, batch_size=1)(
            [joblib.delayed(_run)(task) for task in tasks]
        )
