"""`vsim plan` against simulating its whole space: random small ones, prompts that share beginnings included."""

from __future__ import annotations

import dataclasses
import os
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from vsim.sim.plan.candidates import Plan, Space
from vsim.sim.plan.evaluate import Question, engine_of, evaluate
from vsim.sim.plan.search import search
from vsim.sim.plan.slo import goodput_slo, parse_slo
from vsim.sim.replay import Load
from vsim.sim.sweep import Workers
from vsim.sim.sweep_space import Point
from vsim.traces.arrivals import select
from vsim.traces.readers import read_trace
from vsim.traces.trace import Trace

AZURE = Path(__file__).resolve().parent.parent / "traces" / "azure2023_conv.csv"
MODEL = "meta-llama/Llama-3.1-8B-Instruct"
CASES = int(os.environ.get("VSIM_PLAN_CASES", "6"))
MOST = 5


def azure_slice(rng: np.random.Generator) -> Trace:
    """Some 150 requests in a row of the Azure conversation trace."""
    rows = np.arange(150) + int(rng.integers(0, 2000))
    return select(read_trace(AZURE, limit=3000), rows, "a slice")


def shared_documents(rng: np.random.Generator) -> Trace:
    """Questions on a few long documents, far apart: a replica that has met a document answers sooner."""
    n, documents, pieces = 120, int(rng.integers(2, 8)), 400
    which = rng.integers(0, documents, n)
    ids = which[:, None] * 1000 + np.arange(pieces)
    trace = Trace.of(
        np.cumsum(rng.exponential(1.5, n)).tolist(),
        [pieces * 16 + 40] * n,
        rng.integers(5, 60, n).tolist(),
    )
    return dataclasses.replace(
        trace,
        prefix_ids=ids.ravel().astype(np.int64),
        prefix_offsets=np.arange(0, n * pieces + 1, pieces),
        prefix_block_tokens=16,
    )


def random_question(rng: np.random.Generator, shared: bool) -> Question:
    ttft = int(rng.choice([80, 150, 300, 600] if shared else [150, 300, 600, 2000]))
    slos = [
        parse_slo(f"ttft_p{rng.choice([50, 90, 95])}<={ttft}ms"),
        parse_slo(f"tpot_p95<={rng.choice([15, 25, 40, 100])}ms"),
    ]
    limits: dict[str, float] = {}
    if rng.random() < 0.3:
        good, limits = goodput_slo(float(rng.choice([0.8, 0.95])), slos)
        slos.append(good)
    slos.append(parse_slo("error_rate<=0"))
    return Question(tuple(slos), limits, Load(time_scale=1 / float(rng.choice([1, 3, 8]))))


def random_points(rng: np.random.Generator) -> list[Point]:
    names: list[tuple[str, list[int | str]]] = [
        ("gpu", ["a100", "h100", "l40s"]),
        ("tensor_parallel_size", [1, 2]),
        ("max_num_batched_tokens", [1024, 4096]),
        ("max_num_seqs", [16, 256]),
        ("route", ["round-robin", "least-requests"]),
    ]
    picked = []
    while len(picked) < 4:
        point: Point = {"model": MODEL}
        for name, values in names:
            point[name] = values[int(rng.integers(0, len(values)))]
        if point not in picked:
            picked.append(point)
    return picked


def planned(seed: int) -> tuple[Trace, Space, Question, Plan, dict[str, Fraction]]:
    rng = np.random.default_rng(seed)
    shared = bool(seed % 2)
    trace = shared_documents(rng) if shared else azure_slice(rng)
    question, points = random_question(rng, shared), random_points(rng)
    prices = {gpu: Fraction(int(rng.integers(1, 9))) for gpu in ("a100", "h100", "l40s")}
    space = Space(points, prices.__getitem__, MOST, survive=int(rng.random() < 0.3))
    return trace, space, question, search(trace, space, question, Workers()), prices


@pytest.mark.parametrize("seed", range(CASES))
def test_the_plan_is_the_cheapest_of_all_that_could_be_simulated(seed: int) -> None:
    trace, space, question, plan, prices = planned(seed)
    everything = []
    for number, point in enumerate(space.points):
        gpus = engine_of(point)[0].gpus
        for serving in range(1, MOST + 1 - space.survive):
            seen = evaluate(trace, point, serving, question)
            if seen.met:
                cost = prices[str(point["gpu"])] * gpus * (serving + space.survive)
                everything.append((cost, seen.worst, number, serving + space.survive))
    if not everything:
        assert plan.best is None
        return
    best = min(everything)
    assert plan.best is not None, best
    found = (plan.best.cost(plan.replicas), plan.best.number, plan.replicas)
    assert found == (best[0], *best[2:])
