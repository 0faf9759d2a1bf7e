"""`vsim plan` against simulating its whole grid: the same plan, and how many requests each simulated.

    python benchmarks/plan_vs_sweep.py TRACE [--limit N] [--max-replicas 12]

Prices are made up for this comparison (they decide nothing about real GPUs). Both sides judge a deployment
by the same rule: every objective met with step times at their slow end, cheapest first, then the larger margin.
"""

from __future__ import annotations

import argparse
import time
from fractions import Fraction
from pathlib import Path

from vsim.sim.plan.candidates import Space
from vsim.sim.plan.evaluate import Question, engine_of, evaluate
from vsim.sim.plan.search import search
from vsim.sim.plan.slo import parse_slo
from vsim.sim.replay import Load
from vsim.sim.sweep import Workers
from vsim.traces.readers import read_trace

PRICES = {"a100": Fraction(20), "h100": Fraction(31), "l40s": Fraction(9)}
SLOS = ("ttft_p95<=500ms", "tpot_p95<=20ms", "error_rate<=0")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--max-replicas", type=int, default=12)
    parser.add_argument("--traffic", type=float, default=4.0)
    asked = parser.parse_args()
    trace = read_trace(asked.trace, limit=asked.limit)
    question = Question(
        tuple(map(parse_slo, SLOS)), {}, Load(time_scale=1 / asked.traffic), pessimism=1.645
    )
    points = [
        {
            "model": "meta-llama/Llama-3.1-8B-Instruct",
            "gpu": gpu,
            "tensor_parallel_size": tp,
            "max_num_batched_tokens": budget,
            "block_size": block,
        }
        for gpu in PRICES
        for tp in (1, 2)
        for budget in (2048, 8192)
        for block in (16, 32)
    ]
    began = time.perf_counter()
    space = Space(points, PRICES.__getitem__, asked.max_replicas)
    plan = search(trace, space, question, Workers())
    planned_s = time.perf_counter() - began
    assert plan.best is not None
    found = (plan.best.number, plan.replicas)
    print(
        f"plan:  candidate {found[0]}, {found[1]} replicas; {plan.simulated:,} requests, {planned_s:.1f} s"
    )

    began = time.perf_counter()
    met = []
    simulated = 0
    for number, point in enumerate(points):
        gpus = engine_of(point)[0].gpus
        for replicas in range(1, asked.max_replicas + 1):
            seen = evaluate(trace, point, replicas, question)
            simulated += seen.simulated
            if seen.met:
                cost = PRICES[str(point["gpu"])] * gpus * replicas
                met.append((cost, seen.worst, number, replicas))
    best = min(met)
    swept_s = time.perf_counter() - began
    print(
        f"sweep: candidate {best[2]}, {best[3]} replicas; {simulated:,} requests, {swept_s:.1f} s, "
        f"{len(points) * asked.max_replicas} points"
    )
    share = plan.simulated / simulated
    print(
        f"{'the same' if best[2:] == found else 'DIFFERENT'}; plan simulated {share:.1%} of the sweep's requests"
    )


if __name__ == "__main__":
    main()
