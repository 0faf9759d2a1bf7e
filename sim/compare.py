"""Runs side by side: differences, whether they exceed chance, and gates for CI."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vsim.errors import UserError
from vsim.sim.bench_json import bench_run, load_bench
from vsim.sim.block_bootstrap import (
    LEAST_REQUESTS,
    RESAMPLES,
    bin_edges,
    block_draws,
    latencies_by_block,
    resampled,
)
from vsim.sim.block_correlation import influence, widening
from vsim.sim.run import Run
from vsim.sim.run_io import read_run
from vsim.sim.stability import stability
from vsim.sim.summary import summarize

FloatArray = npt.NDArray[np.float64]
LATENCIES = ("ttft", "tpot", "e2el")
CONFIDENCE = 0.95

# What is shown: key of the summary, label, is more better? (None: neither)
ROWS: tuple[tuple[str, str, bool | None], ...] = (
    ("completed", "Successful requests", True),
    ("failed", "Failed requests", False),
    ("duration", "Benchmark duration (s)", False),
    ("request_throughput", "Request throughput (req/s)", True),
    ("request_goodput", "Request goodput (req/s)", True),
    ("output_throughput", "Output token throughput (tok/s)", True),
    *(
        (f"{stat}_{name}_ms", f"{stat.capitalize()} {name.upper()} (ms)", False)
        for name in ("ttft", "tpot", "itl", "e2el")
        for stat in ("mean", "p50", "p90", "p95", "p99")
    ),
    ("mean_queue_time_ms", "Mean queue time (ms)", False),
    ("preemptions", "Preemptions", False),
    ("recomputed_tokens", "Tokens recomputed", False),
    ("kv_usage_mean", "KV cache usage, mean", None),
    ("kv_usage_peak", "KV cache usage, peak", None),
    ("kv_fragmentation_mean", "Internal fragmentation, mean", False),
    ("prefix_cache_hit_rate", "Prefix cache hit rate", True),
    ("running_peak", "Running requests, peak", None),
    ("waiting_peak", "Waiting requests, peak", False),
)


@dataclass(frozen=True, slots=True)
class Side:
    """One run to compare. `run` is None where only a summary is known (bench result without details)."""

    name: str
    summary: dict[str, Any]
    run: Run | None


@dataclass(frozen=True, slots=True)
class Difference:
    """One metric of two runs. `interval`: 95 % confidence interval of the relative change, if known."""

    key: str
    label: str
    base: float | None
    other: float | None
    change: float | None  # (other - base) / base
    interval: tuple[float, float] | None
    better: bool | None  # does the change go the good way? None: equal, unknown, or neither

    @property
    def significant(self) -> bool | None:
        """Is 0 outside the interval? None: no interval."""
        if self.interval is None:
            return None
        return not self.interval[0] <= 0 <= self.interval[1]


def load_side(
    path: str | Path,
    percentiles: Sequence[float] = (50, 90, 95, 99),
    goodput: Mapping[str, float] | None = None,
) -> Side:
    """A run folder, or a `vllm bench serve` result file. Raises UserError if it is neither."""
    where = Path(path)
    name = where.name or str(where)
    if where.is_dir():
        run = read_run(where)
        return Side(name, summarize(run, percentiles, goodput), run)
    result = load_bench(where)
    found = bench_run(result, name)
    if found is not None:
        return Side(name, summarize(found, percentiles, goodput), found)
    numbers = {
        key: value
        for key, value in result.items()
        if value is None or (isinstance(value, int | float) and np.isfinite(value))
    }
    for metric in ("ttft", "tpot", "itl", "e2el"):
        if f"median_{metric}_ms" in numbers:
            numbers.setdefault(f"p50_{metric}_ms", numbers[f"median_{metric}_ms"])
    return Side(name, numbers, None)


def load_sides(
    paths: Sequence[str | Path],
    percentiles: Sequence[float] = (50, 90, 95, 99),
    goodput: Mapping[str, float] | None = None,
) -> list[Side]:
    """`load_side` of each; sides of the same name are numbered."""
    sides = [load_side(path, percentiles, goodput) for path in paths]
    names = [side.name for side in sides]
    return [
        replace(side, name=f"{side.name} ({i})") if names.count(side.name) > 1 else side
        for i, side in enumerate(sides, 1)
    ]


def compare(base: Side, other: Side, seed: int = 0) -> list[Difference]:
    """Every row of `ROWS` that at least one side knows, `other` against `base`."""
    intervals = latency_intervals(base.run, other.run, seed)
    found = []
    for key, label, more_is_better in ROWS:
        one, two = base.summary.get(key), other.summary.get(key)
        if one is None and two is None:
            continue
        change = relative(one, two)
        better = None
        if more_is_better is not None and change:
            better = (change > 0) == more_is_better
        found.append(Difference(key, label, one, two, change, intervals.get(key), better))
    return found


def relative(base: float | None, other: float | None) -> float | None:
    """(other - base) / base; 0 for two zeros, None where base alone is 0 or either is unknown."""
    if base is None or other is None:
        return None
    if base == 0:
        return 0.0 if other == 0 else None
    return (other - base) / base


def same_requests(base: Run, other: Run) -> bool:
    """Did both runs serve the same requests? Then they are resampled together."""
    return all(
        np.array_equal(base.requests[name], other.requests[name])
        for name in ("request", "prompt_tokens")
    )


def latency_intervals(
    base: Run | None, other: Run | None, seed: int = 0
) -> dict[str, tuple[float, float]]:
    """95 % intervals of the relative change of mean and percentiles of TTFT, TPOT and E2EL.

    Block bootstrap: neighbouring requests wait in the same queue, so whole stretches of `BLOCKS` equal
    ones are drawn, not single requests; the same ones on both sides when both served the same requests.
    Where neighbouring blocks still resemble each other the interval is widened (`block_correlation`).
    The question answered: would the difference survive another sample of such traffic? Empty for runs too
    short to say (fewer than 100 finished requests on either side), and for runs of different requests of
    which one is overloaded: how far its queue got is chance. Bins make it accurate to 0.4 %.
    """
    if base is None or other is None:
        return {}
    rng = np.random.default_rng(seed)
    paired = same_requests(base, other)
    found: dict[str, tuple[float, float]] = {}
    if not paired and any(stability(run).stable is False for run in (base, other)):
        return {}
    picks = (block_draws(rng), block_draws(rng))
    if paired:
        picks = (picks[0], picks[0])
    for name in LATENCIES:
        sides = [latencies_by_block(run, name) for run in (base, other)]
        if min(len(values) for values, _ in sides) < LEAST_REQUESTS:
            continue
        positive = np.concatenate([values[values > 0] for values, _ in sides])
        if not len(positive):
            continue
        edges = bin_edges(positive)
        one, two = (
            resampled(values, block, edges, pick)
            for (values, block), pick in zip(sides, picks, strict=True)
        )
        for stat, before in one.items():
            percentile = None if stat == "mean" else float(stat[1:])
            parts = [influence(values, block, percentile) for values, block in sides]
            wider = widening([parts[1] - parts[0]] if paired else parts)
            with np.errstate(divide="ignore", invalid="ignore"):
                ratio = two[stat] / before - 1
            ratio = ratio[np.isfinite(ratio)]
            if len(ratio) < RESAMPLES // 2:
                continue
            tail = (1 - CONFIDENCE) / 2 * 100
            low, high = np.percentile(ratio, [tail, 100 - tail])
            middle = float(np.median(ratio))
            found[f"{stat}_{name}_ms"] = (
                middle + wider * (float(low) - middle),
                middle + wider * (float(high) - middle),
            )
    return found


# Gates

_GATE = re.compile(
    r"^\s*([A-Za-z_][A-Za-z0-9_.]*)\s*(>=|<=|>|<)\s*([+-]?)(\d+(?:\.\d+)?|\.\d+)\s*(%?)\s*$"
)


@dataclass(frozen=True, slots=True)
class Gate:
    """A condition that fails a comparison: `ttft_p95>+5%`, `output_throughput<-3%`, `preemptions>100`."""

    text: str
    key: str
    operator: str
    limit: float
    kind: str  # "percent": change in %; "change": change in the metric's unit; "value": the value itself

    def value(self, base: Mapping[str, Any], other: Mapping[str, Any]) -> float:
        """What is held against the limit. Raises UserError where a side does not know the metric."""
        after = other.get(self.key)
        before = base.get(self.key)
        known = (int, float)
        if not isinstance(after, known) or (self.kind != "value" and not isinstance(before, known)):
            raise UserError(f"--fail-if {self.text}: a run has no value for {self.key}")
        if self.kind == "value" or not isinstance(before, known):
            return float(after)
        if self.kind == "change":
            return float(after) - float(before)
        if before == 0:
            return 0.0 if after == 0 else float("inf") * (1 if after > 0 else -1)
        return (float(after) - float(before)) / abs(float(before)) * 100

    def fails(self, value: float) -> bool:
        return {
            ">": value > self.limit,
            ">=": value >= self.limit,
            "<": value < self.limit,
            "<=": value <= self.limit,
        }[self.operator]


def parse_gate(text: str) -> Gate:
    """`NAME OPERATOR [+-]NUMBER[%]`. NAME is METRIC_STATISTIC (ttft_p95, e2e_mean) or a summary key.

    With % the limit is a relative change against the first run, with a sign alone an absolute change,
    with neither a limit on the value itself (ms for latencies). Raises UserError for another form.
    """
    found = _GATE.match(text)
    if found is None:
        raise UserError(
            f"--fail-if {text!r}: give NAME, > or <, and a number, for example ttft_p95>+5% "
            "or output_throughput<-3%"
        )
    name, operator, sign, number, per_cent = found.groups()
    limit = float(number) * (-1 if sign == "-" else 1)
    kind = "percent" if per_cent else ("change" if sign else "value")
    return Gate(text.strip(), gate_key(name), operator, limit, kind)


def gate_key(name: str) -> str:
    """ttft_p95 -> p95_ttft_ms; a summary key stays as it is."""
    found = re.match(
        r"^(ttft|tpot|itl|e2el?|queue_time)_(mean|median|std|p\d+(?:\.\d+)?)(?:_ms)?$", name
    )
    if not found:
        return name
    metric = "e2el" if found.group(1) == "e2e" else found.group(1)
    return f"{found.group(2)}_{metric}_ms"


def gate_percentiles(gates: Sequence[Gate]) -> list[float]:
    """Percentiles that the gates need, so that the summaries hold them."""
    wanted = [re.match(r"^p(\d+(?:\.\d+)?)_", gate.key) for gate in gates]
    return [float(found.group(1)) for found in wanted if found]
