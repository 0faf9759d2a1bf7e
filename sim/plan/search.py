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
from dataclasses import dataclass, field
from fractions import Fraction

from vsim.errors import UserError
from vsim.sim.plan.evaluate import Evaluation, Probe, Question, evaluate, probe
from vsim.sim.sweep import Workers, check_workers, joblib_backend
from vsim.sim.sweep_space import Point
from vsim.traces.trace import Trace

# Offered load over the first look's capacity beyond which a candidate is not simulated. The look is short
# and shares no prefixes: it may be off by a lot, but not by this much.
HOPELESS = 2.0
# How far the objectives must be missed by requests that come one by one, likewise.
TOO_SLOW = 1.1
HEADROOM_STEPS = 5
MOST_TRAFFIC = 4.0

Say = Callable[[str], None]


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
    expected: Evaluation | None = None  # of the plan, with step times as predicted
    headroom_beyond: bool = False  # it was still served at the most that was tried
    simulated: int = 0  # requests, in the search
    afterwards: int = 0  # requests, for headroom and frontier


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
    for found in _each(tasks, workers):
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
        _rivals(trace, [c for c in able if c is not best], best, space, question, workers, say)
    plan = _settle(candidates, space, offered)
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
        candidate.skipped = "missed with " + (
            "1 replica" if most == 1 else f"each number of replicas up to {most}"
        )
    return None


def _rivals(
    trace: Trace,
    rivals: Sequence[Candidate],
    best: Candidate,
    space: Space,
    question: Question,
    workers: Workers,
    say: Say,
) -> None:
    """One simulation for each rival that could be as cheap; those that pass are sized as well."""
    smallest_n = best.smallest_met()
    assert smallest_n is not None
    limit = best.cost(smallest_n + space.survive)
    offered = len(trace) / max(question.load.apply(trace).span_s, 1e-9)
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
    for done, ((rival, most), seen) in enumerate(zip(tried, _each(tasks, workers), strict=True), 1):
        rival.seen[most] = seen
        if not seen.met:
            rival.skipped = "misses at the plan's price"
        say(f"simulated {done} of {len(tried)} rivals")
    passed = [(rival, most) for rival, most in tried if rival.seen[most].met and most > 1]
    sized = [(_sized, (trace, rival, question, most)) for rival, most in passed]
    for (rival, _), seen_by_size in zip(passed, _each(sized, workers), strict=True):
        rival.seen |= seen_by_size


def _sized(
    trace: Trace, candidate: Candidate, question: Question, most: int
) -> dict[int, Evaluation]:
    smallest(trace, candidate, question, most, most)
    return candidate.seen


def smallest(
    trace: Trace, candidate: Candidate, question: Question, guess: int, most: int
) -> int | None:
    """The least replicas, up to `most`, that meet the objectives; every simulation stays in `seen`."""

    def met(replicas: int) -> bool:
        if replicas not in candidate.seen:
            candidate.seen[replicas] = evaluate(trace, candidate.point, replicas, question)
        return candidate.seen[replicas].met

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


def look_around(
    trace: Trace, plan: Plan, space: Space, question: Question, workers: Workers
) -> None:
    """After the search: one and two replicas more for the frontier, and how much more traffic the plan bears."""
    best = plan.best
    assert best is not None
    serving = plan.replicas - space.survive
    more = [n for n in (serving + 1, serving + 2) if n not in best.seen and n <= space.most(best)]
    tasks = [(evaluate, (trace, best.point, n, question)) for n in more]
    for n, seen in zip(more, _each(tasks, workers), strict=True):
        best.seen[n] = seen
        plan.afterwards += seen.simulated
    as_predicted = dataclasses.replace(question, pessimism=0.0)
    plan.expected = evaluate(trace, best.point, serving, as_predicted)
    plan.afterwards += plan.expected.simulated
    low, high = 1.0, MOST_TRAFFIC
    for step in range(HEADROOM_STEPS + 1):
        factor = high if not step else (low * high) ** 0.5
        load = question.load
        if load.request_rate is not None:
            load = dataclasses.replace(load, request_rate=load.request_rate * factor)
        else:
            load = dataclasses.replace(load, time_scale=load.time_scale / factor)
        seen = evaluate(trace, best.point, serving, dataclasses.replace(question, load=load))
        plan.afterwards += seen.simulated
        if seen.met and not step:
            plan.headroom_beyond, low = True, high
            break
        low, high = (factor, high) if seen.met else (low, factor)
    plan.headroom = low


def _name(candidate: Candidate) -> str:
    return f"{candidate.point['gpu']}, candidate {candidate.number + 1}"


def _run(task: tuple[Callable[..., object], tuple[object, ...]]) -> object:
    function, arguments = task
    return function(*arguments)


def _each(tasks: Sequence[tuple], workers: Workers) -> Iterator:  # type: ignore[type-arg]
    """Results in the order of `tasks`, each a function and its arguments, from one process or many."""
    if len(tasks) < 2 or (workers.backend in ("loky", "threading") and (workers.jobs or 1) == 1):
        yield from map(_run, tasks)
        return
    import joblib

    with joblib_backend(workers) as jobs:
        yield from joblib.Parallel(n_jobs=jobs, batch_size=1)(
            [joblib.delayed(_run)(task) for task in tasks]
        )
