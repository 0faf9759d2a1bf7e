"""Calibrate on two request rates of a public H100 sweep, predict the others: errors of TTFT and E2E.

    python benchmarks/h100_rate_sweep.py              # one pair of rates a server
    python benchmarks/h100_rate_sweep.py --all-pairs  # every pair: leave-two-in cross-validation

Three servers (vLLM 0.11 without and with prefix caching, 0.9 with the V0 engine) were each driven at seven
rates for a minute. Only percentiles are public, so the roofline gets five terms, none negative, that are
fitted to the request-level figures (mean, median, p90, p99 of TTFT and E2E) of the two rates:

    step = roofline + per step + per prefill token x tokens + per sequence x sequences
    TTFT and E2E = simulated + front end

A sixth, the roofline's own scale, stays at 1: the shape is the data sheet's. No figure of another rate is read.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls

from vsim.models.correction import Coefficients, CorrectedStepModel
from vsim.models.step import StepModel, StepShape
from vsim.sim.deployment import Deployment, resolve
from vsim.sim.engine import simulate
from vsim.sim.replay import step_model_for
from vsim.sim.run import Run
from vsim.traces.trace import Trace, TraceSource

DATA = Path(__file__).parent / "data" / "h100_rate_sweep.jsonl"
MODEL, GPU = "meta-llama/Llama-3.1-8B-Instruct", "h100"
SERVERS: dict[str, dict[str, Any]] = {
    "KC-vllm": {
        "engine_version": "0.11.0",
        "enable_prefix_caching": False,
        "enable_chunked_prefill": False,
    },
    "KC-vllm+v0_engine": {
        "engine": "v0",  # 0.9.0; the V0 that vsim has is 0.8.5's
        "enable_prefix_caching": False,
        "enable_chunked_prefill": False,
    },
    "KC-vllm+chunking_and_prefix_caching": {"engine_version": "0.11.0"},
}
# The workload, as the rows tell it: 10 groups of 10 prompts, drawn in turn.
SYSTEM, QUESTION, OUTPUT, GROUPS, PER_GROUP = 128, 64, 64, 10, 10
IN_FLIGHT = 440
PAIR = (
    1,
    5,
)  # the default pair, by position: a light load shows fixed costs, an overload the capacity
METRICS = ("ttft_ms", "e2e_ms")
FIGURES = ("mean", "median", "p90", "p99")
TERMS = ("per_step_s", "per_prefill_token_s", "per_seq_s", "frontend_s")
START = [0.001, 0.0, 30e-6, 0.015]
ROUNDS = 12
SHARES = (1.0, 0.5, 0.25, 0.1, 0.03)
# A tail tells less than a mean: one disturbed second of sixty makes a p99.
WEIGHTS = {"mean": 1.0, "median": 1.0, "p90": 0.5, "p99": 0.25}
NOISE = 0.03  # of a figure, as a share of it


@dataclass(frozen=True)
class Stage:
    """One rate of one server: what was asked of it, what its clients measured."""

    position: int
    rate: float
    requests: int
    measured: dict[str, dict[str, float]]
    keeps_up: bool = True  # served at least 95 % of the rate asked for


def read_stages(path: Path = DATA) -> dict[str, list[Stage]]:
    """Stages by server, ascending rate."""
    found: dict[str, list[Stage]] = {name: [] for name in SERVERS}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        name, _, position = row["id"].rpartition("-")
        measured = {metric: row[metric] for metric in METRICS}
        rate = row["requested_rate"]
        keeps_up = row["req_s"] >= 0.95 * rate
        found[name].append(Stage(int(position), rate, row["n"], measured, keeps_up))
    return found


def trace_of(stage: Stage) -> Trace:
    """Constant arrivals; 100 prompts in turn, of which ten at a time begin alike (blocks of 16 tokens)."""
    n = stage.requests
    prompt = np.arange(n) % (GROUPS * PER_GROUP)
    shared, own = SYSTEM // 16, QUESTION // 16
    ids = np.empty((n, shared + own), dtype=np.int64)
    ids[:, :shared] = (prompt // PER_GROUP)[:, None] * shared + np.arange(shared)
    ids[:, shared:] = 10_000 + prompt[:, None] * own + np.arange(own)
    return Trace(
        arrival_ns=np.round(np.arange(n) / stage.rate * 1e9).astype(np.int64),
        prompt_tokens=np.full(n, SYSTEM + QUESTION, dtype=np.int64),
        output_tokens=np.full(n, OUTPUT, dtype=np.int64),
        prefix_ids=ids.ravel(),
        prefix_offsets=np.arange(n + 1, dtype=np.int64) * (shared + own),
        prefix_block_tokens=16,
        source=TraceSource(f"{stage.rate:g} requests/s", "made", "0" * 64),
    )


class Server:
    """One server's simulator: a deployment, its roofline, and a memory of what was simulated."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.deployment: Deployment = resolve(
            MODEL,
            GPU,
            max_model_len=512,
            gpu_memory_utilization=0.9,
            max_num_seqs=128,
            **SERVERS[name],
        )
        self.prior: StepModel = step_model_for(self.deployment).model
        self._known: dict[tuple[int, tuple[float, ...]], Run] = {}

    def run(self, stage: Stage, terms: Sequence[float]) -> Run:
        key = (stage.position, tuple(terms))
        if key not in self._known:
            if len(self._known) > 40:
                self._known.clear()
            step, token, seq, frontend = terms
            coefficients = Coefficients(per_step_s=step, per_prefill_token_s=token, per_seq_s=seq)
            self._known[key] = simulate(
                trace_of(stage),
                self.deployment.scheduler,
                CorrectedStepModel(self.prior, coefficients),
                max_concurrency=IN_FLIGHT,
                frontend_s=frontend,
            )
        return self._known[key]


def latencies_s(run: Run) -> dict[str, np.ndarray]:
    columns = run.requests
    return {
        "ttft_ms": (columns["first_token_ns"] - columns["sent_ns"]) / 1e9,
        "e2e_ms": (columns["finish_ns"] - columns["sent_ns"]) / 1e9,
    }


def figure(values: np.ndarray, name: str) -> float:
    if name == "mean":
        return float(values.mean())
    return float(np.percentile(values, 50 if name == "median" else float(name[1:])))


def sensitivities(run: Run) -> dict[str, np.ndarray]:
    """d latency / d term of each request, with the schedule as it is; shape (requests, terms).

    A request's latency is the steps between two moments (of the first and the last, its share), so its
    derivative by a term is what that term multiplies, summed over those steps.
    """
    steps = run.steps
    order = np.argsort(steps["end_ns"], kind="stable")
    start, end = steps["start_ns"][order], steps["end_ns"][order]
    per_step = np.column_stack(
        [
            np.ones(len(order)),
            steps["prefill_tokens"][order],
            steps["prefill_seqs"][order] + steps["decodes"][order],
        ]
    ).astype(float)
    # Each feature as a function of time: it accrues while its step runs, and not in between.
    at = np.column_stack([start, end]).ravel()
    grown = np.vstack([np.zeros((1, 3)), np.cumsum(per_step, axis=0)])
    values = np.empty((2 * len(order), 3))
    values[0::2], values[1::2] = grown[:-1], grown[1:]

    def accrued(moment: np.ndarray) -> np.ndarray:
        return np.column_stack([np.interp(moment, at, values[:, i]) for i in range(3)])

    columns = run.requests
    begin = accrued(columns["sent_ns"])
    front = np.ones((len(begin), 1))
    return {
        "ttft_ms": np.hstack([accrued(columns["first_token_ns"]) - begin, front]),
        "e2e_ms": np.hstack([accrued(columns["finish_ns"]) - begin, front]),
    }


def near(values: np.ndarray, name: str) -> np.ndarray:
    """The requests that make a figure: all for the mean, those around a percentile for it."""
    if name == "mean":
        return np.arange(len(values))
    share = 0.5 if name == "median" else float(name[1:]) / 100
    order = np.argsort(values, kind="stable")
    middle, width = share * (len(order) - 1), max(1, round(0.01 * len(order)))
    low, high = int(max(0, middle - width)), int(min(len(order), middle + width + 1))
    return order[low:high]


def widths(prior: StepModel) -> np.ndarray:
    """How large each term may be expected to be, s: two fifths of what it adds to; a front end of 50 ms."""
    decode = prior.device_seconds(StepShape((), 32, 32 * 224, 256))
    prompt = prior.device_seconds(StepShape(((2048, 0),), 0, 0, 0)) / 2048
    return np.array([0.4 * decode, 0.4 * prompt, 0.4 * decode / 32, 0.05])


def fit(server: Server, stages: Sequence[Stage], log: Callable[[str], None]) -> list[float]:
    """The four terms, none negative, that bring the figures of `stages` closest, in relative error.

    Each round solves for the terms with the schedule as it was simulated, and goes as far in that direction
    as the figures really get closer: beyond the knee the schedule is another one.
    """
    terms = START
    least = loss(server, stages, terms)
    for turn in range(ROUNDS):
        log(
            f"round {turn + 1}: "
            + ", ".join(f"{v * 1e6:,.0f}" for v in terms)
            + f" µs, {least:.1%}"
        )
        direction = solve(server, stages, terms)
        for share in SHARES:
            tried = [old + share * (new - old) for old, new in zip(terms, direction, strict=True)]
            found = loss(server, stages, tried)
            if found < least:
                break
        else:
            break
        terms, least, before = tried, found, least
        if least > before - 1e-4:
            break
    return terms


def solve(server: Server, stages: Sequence[Stage], terms: Sequence[float]) -> list[float]:
    """Non-negative least squares on the figures' relative errors, with the schedule of `terms`."""
    rows, goal = [], []
    for stage in stages:
        run = server.run(stage, terms)
        predicted, slopes = latencies_s(run), sensitivities(run)
        for metric, name in itertools.product(METRICS, FIGURES):
            measured = stage.measured[metric][name] / 1e3
            slope = slopes[metric][near(predicted[metric], name)].mean(axis=0)
            weight = WEIGHTS[name] / measured
            missing = measured - figure(predicted[metric], name)
            rows.append(slope * weight)
            goal.append((missing + float(slope @ np.array(terms))) * weight)
    # What the figures can't tell apart stays near zero: a data sheet is off by a tenth to two fifths
    # (calibrate/fit.py), so an extra term of that size is as likely as NOISE in a figure.
    scale = widths(server.prior)
    matrix = np.vstack([np.array(rows) * scale, NOISE * np.eye(len(TERMS))])
    solution = nnls(matrix, np.array([*goal, *[0.0] * len(TERMS)]))[0] * scale
    return [float(value) for value in solution]


def loss(server: Server, stages: Sequence[Stage], terms: Sequence[float]) -> float:
    """Mean weighted |log(predicted / measured)|: a queue too long and one too short count alike."""
    found = []
    for stage in stages:
        predicted = latencies_s(server.run(stage, terms))
        for metric, name in itertools.product(METRICS, FIGURES):
            ratio = figure(predicted[metric], name) * 1e3 / stage.measured[metric][name]
            found.append(WEIGHTS[name] * abs(float(np.log(ratio))))
    return float(np.mean(found))


def errors_pct(run: Run, stage: Stage) -> dict[tuple[str, str], float]:
    """(predicted - measured) / measured of each figure, in percent."""
    predicted = latencies_s(run)
    return {
        (metric, name): 100
        * (figure(predicted[metric], name) * 1e3 / stage.measured[metric][name] - 1)
        for metric, name in itertools.product(METRICS, FIGURES)
    }


def table(server: Server, stages: Sequence[Stage], seen: Sequence[int], terms: list[float]) -> str:
    head = f"{'rate/s':>8} {'':<9}" + "".join(
        f"{m[:-3].upper() + ' ' + f:>13}" for m in METRICS for f in FIGURES
    )
    lines = [head]
    for stage in stages:
        found = errors_pct(server.run(stage, terms), stage)
        mark = "fitted" if stage.position in seen else "predicted"
        cells = "".join(f"{found[m, f]:>+12.1f}%" for m in METRICS for f in FIGURES)
        lines.append(f"{stage.rate:>8.1f} {mark:<9}{cells}")
    return "\n".join(lines)


def summarise(what: str, found: Sequence[tuple[float, str, bool]]) -> None:
    for metric in METRICS:
        mine = [error for error, of, _ in found if of == metric]
        print(
            f"{metric[:-3].upper():>5}, {what}: median {statistics.median(mine):.1f} %, "
            f"p75 {np.percentile(mine, 75):.1f} %, p90 {np.percentile(mine, 90):.1f} %, "
            f"worst {max(mine):.1f} % of {len(mine)} figures"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--all-pairs", action="store_true", help="every pair of rates, not one")
    parser.add_argument("--part", metavar="I/N", help="of every N pairs only the I-th, from 0")
    parser.add_argument("--server", action="append", choices=list(SERVERS), help="only this one")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all errors there")
    parser.add_argument("--verbose", action="store_true", help="the fit's rounds")
    asked = parser.parse_args()
    log = print if asked.verbose else lambda _: None
    result: dict[str, Any] = {}
    for name, stages in read_stages().items():
        if asked.server and name not in asked.server:
            continue
        server = Server(name)
        pairs = list(itertools.combinations(range(len(stages)), 2)) if asked.all_pairs else [PAIR]
        if asked.part:
            first, of = (int(number) for number in asked.part.split("/"))
            pairs = pairs[first::of]
        every: list[tuple[float, str, bool]] = []
        print(f"\n{name}: {MODEL} on {GPU}, errors (predicted - measured) / measured")
        for pair in pairs:
            terms = fit(server, [stages[i] for i in pair], log)
            fitted = ", ".join(
                f"{t[:-2]} {v * 1e6:,.1f} µs" for t, v in zip(TERMS, terms, strict=True)
            )
            rates = " and ".join(f"{stages[i].rate:g}/s" for i in pair)
            errors = {
                stage.position: errors_pct(server.run(stage, terms), stage) for stage in stages
            }
            light = any(stages[i].keeps_up for i in pair)
            held = [
                (abs(error), metric, light)
                for i, found in errors.items()
                if i not in pair
                for (metric, _), error in found.items()
            ]
            every += held
            median = statistics.median(error for error, _, _ in held)
            print(f"calibrated on {rates}: {fitted}; median error elsewhere {median:.1f} %")
            if not asked.all_pairs:
                print(table(server, stages, pair, terms))
            result.setdefault(name, []).append(
                {
                    "pair": list(pair),
                    "terms_s": dict(zip(TERMS, terms, strict=True)),
                    "errors_pct": {
                        stages[i].rate: {f"{m[:-3]}_{f}": e for (m, f), e in found.items()}
                        for i, found in errors.items()
                    },
                }
            )
        summarise("rates not seen", every)
        if asked.all_pairs:
            summarise("from pairs with a rate that keeps up", [one for one in every if one[2]])
    if asked.json is not None:
        asked.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
