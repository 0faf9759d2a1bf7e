"""What surrounds a plan: the next larger ones, step times as predicted, and how much more traffic it bears."""

from __future__ import annotations

import dataclasses

from vsim.sim.plan.candidates import Plan, Space
from vsim.sim.plan.evaluate import Question, evaluate
from vsim.sim.plan.search import each
from vsim.sim.sweep import Workers
from vsim.traces.trace import Trace

HEADROOM_STEPS = 5
MOST_TRAFFIC = 4.0


def look_around(
    trace: Trace, plan: Plan, space: Space, question: Question, workers: Workers
) -> None:
    """After the search: one and two replicas more for the frontier, and how much more traffic the plan bears."""
    best = plan.best
    assert best is not None
    serving = plan.replicas - space.survive
    more = [n for n in (serving + 1, serving + 2) if n not in best.seen and n <= space.most(best)]
    tasks = [(evaluate, (trace, best.point, n, question)) for n in more]
    for n, seen in zip(more, each(tasks, workers), strict=True):
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
            plan.headroom = high
            return
        low, high = (factor, high) if seen.met else (low, factor)
    plan.headroom, plan.knee = low, high
