"""Error bars of a replay: the same trace with step models that are wrong by as much as this one may be.

Two parts, joined in the root of the sum of their squares. *Step times*: simulations in which the whole model is
off by a draw of its error (`models/uncertainty.py`), and single steps scatter. *Sampling*: another stretch
of such traffic, by block bootstrap over the requests (`sim/block_bootstrap.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, hypot, log
from typing import Any

import numpy as np
import numpy.typing as npt

from vsim.errors import UserError
from vsim.models.load import LoadedStepModel
from vsim.models.uncertainty import Uncertainty, changed, deviations, drawn, uncertainty_of
from vsim.sim import block_bootstrap as bootstrap
from vsim.sim import metrics
from vsim.sim.fast.several import load_for
from vsim.sim.run import Run
from vsim.sim.summary import with_intervals
from vsim.traces.trace import Trace

FloatArray = npt.NDArray[np.float64]
Bounds = dict[str, tuple[float, float]]

LEVEL = 0.9
DRAWS = 20
LEAST_DRAWS = 5
LATENCIES = ("ttft", "tpot", "itl", "e2el")
THROUGHPUTS = ("request_throughput", "output_throughput", "total_token_throughput")
# By default only where all draws together are a fraction of a second compiled, and some seconds step by step
# (sim/fast/dispatch.py has the rates). A limit in seconds would make the output of a command differ from machine
# to machine.
FREE_WORK = 2_000_000
FREE_WORK_STEP_BY_STEP = 200_000
SCATTER_POINTS = 25  # equally likely factors by which a single gap between tokens is multiplied
KNEE_SLOWER = 0.02
KNEE_MOVES = 0.10


@dataclass(frozen=True, slots=True)
class Knee:
    """What steps 2 % slower do to the TTFT percentile that they move most, in ms."""

    percentile: str  # "p95"
    ttft_ms: float
    slower_ms: float
    near: bool

    @property
    def moves(self) -> float:
        return self.slower_ms / self.ttft_ms - 1 if self.ttft_ms else 0.0


@dataclass(frozen=True, slots=True)
class ErrorBars:
    """90 % intervals by summary key; `parts` holds the two that they join."""

    bounds: Bounds
    parts: dict[str, Bounds]
    draws: int
    seed: int
    uncertainty: Uncertainty
    knee: Knee | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def source(self) -> str:
        """What the intervals cover, for the user."""
        sd = self.uncertainty.scale_sd * 100
        said = (
            f"Step times off by {sd:.2g} % (one standard deviation: {self.uncertainty.source}), "
            f"{self.draws} replays"
        )
        if self.parts["sampling"]:
            said += "; and another stretch of such traffic (block bootstrap)"
        widths = self._widths()
        if widths:
            said += f". {widths}"
        return ". ".join([said, *self.notes]) + "."

    def _widths(self) -> str:
        """The parts of one tail, side by side."""
        for word in ("p95", "p99", "p90", "p50"):
            key = f"{word}_ttft_ms"
            if all(key in part for part in self.parts.values()):
                times, picked = self.parts["step_times"][key], self.parts["sampling"][key]
                return (
                    f"{word} TTFT by step times alone {number_ms(times[0])} to {number_ms(times[1])}, "
                    f"by sampling alone {number_ms(picked[0])} to {number_ms(picked[1])}"
                )
        return ""

    def add_to(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        """`summary` with `intervals` and, where it was looked for, `knee` (docs/metrics.md)."""
        result = with_intervals(summary, self.bounds, LEVEL, self.source)
        result["intervals"] |= {
            "parts": {
                name: {key: list(bounds) for key, bounds in part.items()}
                for name, part in self.parts.items()
            },
            "draws": self.draws,
            "seed": self.seed,
            "step_time_sd_pct": _short(self.uncertainty.scale_sd * 100),
        }
        if self.knee is not None:
            result["knee"] = {
                "steps_slower_pct": KNEE_SLOWER * 100,
                "percentile": self.knee.percentile,
                "ttft_ms": _short(self.knee.ttft_ms),
                "ttft_ms_with_slower_steps": _short(self.knee.slower_ms),
                "near": self.knee.near,
            }
        return result


def number_ms(value: float) -> str:
    return f"{value:,.3g} ms" if value < 1000 else f"{value / 1000:,.3g} s"


def knee_lines(summary: Mapping[str, Any]) -> list[str]:
    """The warning, where the deployment stands near saturation."""
    knee = summary.get("knee")
    if not knee or not knee["near"]:
        return []
    before, after = knee["ttft_ms"], knee["ttft_ms_with_slower_steps"]
    return [
        f"Near the saturation knee: with steps only {knee['steps_slower_pct']:g} % slower, {knee['percentile']} TTFT is "
        f"{(after / before - 1) * 100:.0f} % longer ({number_ms(before)} -> {number_ms(after)}), so small errors of capacity are "
        "large errors of TTFT here."
    ]


def without_lines(asked: int | None, draws: int) -> list[str]:
    """Where error bars were left out for their cost: how to get them."""
    if draws or asked is not None:
        return []
    return [
        f"No error bars for a trace of this size unless asked for: --error-bars {DRAWS} replays it {DRAWS + 2} times more."
    ]


def work(trace: Trace, draws: int = DRAWS) -> int:
    """What `draws` replays cost, in tokens; a request counts as twenty more."""
    return draws * (int(trace.output_tokens.sum()) + 20 * len(trace))


def settled(asked: int | None, trace: Trace, compiled: bool) -> int:
    """How many draws: as asked; by default `DRAWS` where they cost next to nothing, else none.

    `compiled`: the compiled path knows what is asked. Raises UserError for too few.
    """
    if asked is None:
        free = FREE_WORK if compiled else FREE_WORK_STEP_BY_STEP
        return DRAWS if work(trace) <= free else 0
    if 0 < asked < LEAST_DRAWS:
        raise UserError(
            f"--error-bars {asked}: the ends of a 90 % interval need at least {LEAST_DRAWS} replays; 0 leaves it out"
        )
    if asked and compiled:
        load_for(trace, asked + 2)
    return asked


def find_error_bars(
    run: Run,
    again: Callable[[LoadedStepModel], Run],
    model: LoadedStepModel,
    percentiles: Sequence[float],
    draws: int = DRAWS,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda _, __: None,
) -> ErrorBars:
    """Intervals of every latency statistic and throughput of `run`.

    `again(step_model)` replays the same trace on the same deployment; it is called `draws` + 2 times, the
    last two with steps 2 % slower and faster (`Knee`). The same arguments give the same numbers.
    """
    uncertainty = uncertainty_of(model.calibration)
    rng = np.random.default_rng([86028121, seed])
    rows = deviations(draws, uncertainty.dimensions, rng)
    nominal = numbers(run, percentiles)
    seen: dict[str, list[float]] = {key: [] for key in nominal}
    for turn, row in enumerate(rows):
        progress(turn + 1, draws + 2)
        found = numbers(
            again(_loaded(drawn(model, uncertainty, row))),
            percentiles,
            uncertainty.step_factors,
            np.random.default_rng([86028121, seed, turn]),
        )
        for key, values in seen.items():
            if key in found:
                values.append(found[key])
    step_times: Bounds = {}
    for key, values in seen.items():
        if len(values) >= LEAST_DRAWS:
            # Hazen: the draws are the middles of equally likely strata.
            low, high = np.percentile(values, [5.0, 95.0], method="hazen")
            # What scattering steps add to a tail is in the draws and not in the number itself.
            step_times[key] = (min(float(low), nominal[key]), max(float(high), nominal[key]))
    picked = sampling(run, nominal, percentiles, rng)
    joined = {
        key: _joined(nominal[key], [bounds, *([picked[key]] if key in picked else [])])
        for key, bounds in step_times.items()
    }
    progress(draws + 1, draws + 2)
    knee = _knee(run, nominal, again, model, percentiles)
    few = _finished(run)
    notes = () if picked else (f"No sampling part: {few} finished requests are too few for it",)
    return ErrorBars(
        {key: _rounded(bounds) for key, bounds in joined.items()},
        {
            "step_times": {key: _rounded(bounds) for key, bounds in step_times.items()},
            "sampling": {key: _rounded(bounds) for key, bounds in picked.items()},
        },
        draws,
        seed,
        uncertainty,
        knee,
        notes,
    )


def numbers(
    run: Run,
    percentiles: Sequence[float],
    step_factors: tuple[float, ...] = (1.0,),
    rng: np.random.Generator | None = None,
) -> dict[str, float]:
    """The headline numbers of `run` by summary key: latencies in ms, throughputs per second.

    With `step_factors` single steps scatter: a latency of k steps by the factor's deviation over sqrt(k). The
    compiled path knows no scatter within a run; where it matters, in latencies of few steps, this is it.
    """
    done = metrics.finished(run)
    if not len(run.requests["status"][done]):
        return {}
    tpot, several = metrics.tpot_ns(run, done), run.requests["output_tokens"][done] > 1
    latencies: dict[str, npt.NDArray[Any]] = {
        "ttft": metrics.ttft_ns(run, done),
        "tpot": tpot,
        "e2el": metrics.e2el_ns(run, done),
    }
    itl_ns, itl_count = run.itl_ns, run.itl_count
    if len(step_factors) > 1 and rng is not None:
        factors = np.asarray(step_factors)
        ends = np.sort(run.steps["end_ns"])
        replica = run.steps.get("replica")
        replicas = 1 if replica is None else max(1, len(np.unique(replica)))
        start, first, end = (
            run.requests[n][done] for n in ("sent_ns", "first_token_ns", "finish_ns")
        )
        for name, since, until in (
            ("ttft", start, first),
            ("tpot", first, end),
            ("e2el", start, end),
        ):
            drawn_factors = rng.choice(factors, len(since))
            steps = np.searchsorted(ends, until, "right") - np.searchsorted(ends, since, "right")
            steps = np.maximum(steps / replicas, 1.0)
            latencies[name] = latencies[name] * (1 + (drawn_factors - 1) / np.sqrt(steps))
        itl_ns, itl_count = _scattered_gaps(run, factors)
    latencies["tpot"] = latencies["tpot"][several]
    flat: dict[str, float | None] = {}
    for name, values in latencies.items():
        flat |= metrics.stats(values, percentiles).flat(name)
    flat |= metrics.weighted_stats(itl_ns, itl_count, percentiles).flat("itl")
    span_s = metrics.duration_ns(run) / 1e9
    if span_s > 0:
        given, got = (int(run.requests[n][done].sum()) for n in ("prompt_tokens", "output_tokens"))
        flat["request_throughput"] = len(latencies["ttft"]) / span_s
        flat["output_throughput"] = got / span_s
        flat["total_token_throughput"] = (given + got) / span_s
    return {
        key: float(value)
        for key, value in flat.items()
        if value is not None and not key.startswith("std_")
    }


def _finished(run: Run) -> int:
    """Finished requests."""
    return len(run.requests["status"][metrics.finished(run)])


def _scattered_gaps(run: Run, factors: FloatArray) -> tuple[Any, Any]:
    """The gaps between tokens, a step each, as a multiset with the scatter of single steps."""
    points = SCATTER_POINTS if len(run.itl_ns) * SCATTER_POINTS < 5_000_000 else 5
    likely = np.quantile(factors, (np.arange(points) + 0.5) / points)
    likely *= factors.mean() / likely.mean()
    values = np.rint(run.itl_ns[:, None] * likely).astype(np.int64).ravel()
    distinct, where = np.unique(values, return_inverse=True)
    counts = np.bincount(where, np.repeat(run.itl_count, points)).astype(np.int64)
    return distinct, counts


def sampling(
    run: Run, nominal: Mapping[str, float], percentiles: Sequence[float], rng: np.random.Generator
) -> Bounds:
    """90 % intervals of another sample of such traffic; {} for fewer than 100 finished requests."""
    if _finished(run) < bootstrap.LEAST_REQUESTS:
        return {}
    picks = bootstrap.block_draws(rng)
    itself = np.ones((1, bootstrap.BLOCKS))
    asked = tuple(sorted({50.0, *percentiles}))
    found: Bounds = {}
    for name in LATENCIES:
        values, block, weights = _by_block(run, name)
        if not len(values) or not (values > 0).any():
            continue
        edges = bootstrap.bin_edges(values[values > 0])
        many = bootstrap.resampled(values, block, edges, picks, asked, weights)
        one = bootstrap.resampled(values, block, edges, itself, asked, weights)
        for statistic, sample in many.items():
            with np.errstate(divide="ignore", invalid="ignore"):
                ratio = sample / one[statistic]
            ratio = ratio[np.isfinite(ratio)]
            if len(ratio) < bootstrap.RESAMPLES // 2:
                continue
            low, high = np.percentile(ratio, [5.0, 95.0])
            keys = [f"{statistic}_{name}_ms"] + [f"median_{name}_ms"] * (statistic == "p50")
            for key in keys:
                if key in nominal:
                    value = nominal[key]
                    found[key] = (min(value, value * float(low)), max(value, value * float(high)))
    return found | _throughput_sampling(run, nominal, picks)


def _by_block(run: Run, name: str) -> tuple[FloatArray, npt.NDArray[np.int64], FloatArray | None]:
    """(ms, block, weight) of one latency."""
    if name != "itl":
        return *bootstrap.latencies_by_block(run, name), None
    # Gaps are not kept by request; between two steps of a replica every sequence in both has the same one.
    ends, tokens = run.steps["end_ns"], run.steps.get("emitted", run.steps["decodes"])
    replica = run.steps.get("replica", np.zeros(len(ends), dtype=np.int64))
    order = np.lexsort((ends, replica))
    gaps = np.diff(ends[order]) / 1e6
    same = np.diff(replica[order]) == 0
    weights = np.minimum(tokens[order][1:], run.steps["decodes"][order][1:]).astype(float)
    kept = same & (weights > 0) & (gaps > 0)
    when = np.argsort(np.argsort(ends[order][1:][kept], kind="stable"), kind="stable")
    block = when * bootstrap.BLOCKS // max(1, len(when))
    return gaps[kept], block, weights[kept]


def _throughput_sampling(run: Run, nominal: Mapping[str, float], picks: FloatArray) -> Bounds:
    """Tokens over time of drawn blocks; nothing where the engine, not the traffic, sets the pace."""
    arrival = np.sort(run.requests["arrival_ns"])
    if (arrival[-1] - arrival[0]) < 0.5 * metrics.duration_ns(run):
        return {}
    block = bootstrap.blocks_of(run)
    first = np.array(
        [run.requests["arrival_ns"][block == b].min() for b in range(bootstrap.BLOCKS)]
    )
    spans = np.diff([*first.tolist(), int(arrival[-1])]).astype(float)
    done = metrics.finished(run)
    given, got = (run.requests[n][done].astype(float) for n in ("prompt_tokens", "output_tokens"))
    amounts = {
        "request_throughput": np.ones(len(got)),
        "output_throughput": got,
        "total_token_throughput": given + got,
    }
    found: Bounds = {}
    for key, amount in amounts.items():
        if key not in nominal:
            continue
        of_block = np.bincount(block[done], amount, minlength=bootstrap.BLOCKS)
        rate = (picks @ of_block) / np.maximum(picks @ spans, 1.0)
        ratio = rate / (of_block.sum() / max(spans.sum(), 1.0))
        low, high = np.percentile(ratio, [5.0, 95.0])
        value = nominal[key]
        found[key] = (min(value, value * float(low)), max(value, value * float(high)))
    return found


def _knee(
    run: Run,
    nominal: Mapping[str, float],
    again: Callable[[LoadedStepModel], Run],
    model: LoadedStepModel,
    percentiles: Sequence[float],
) -> Knee | None:
    """The TTFT tail that steps 2 % slower move most; None where no tail has ten requests beyond it.

    Near saturation it grows without bound as capacity falls. A lottery (which request just catches a step) moves a
    tail either way, so steps 2 % faster must shorten it as well.
    """
    count = _finished(run)
    tails = [p for p in percentiles if p >= 90 and count * (100 - p) / 100 >= 10]
    if not tails:
        return None
    slower, faster = (
        numbers(again(_loaded(changed(model, factor, {}))), percentiles)
        for factor in (1 + KNEE_SLOWER, 1 - KNEE_SLOWER)
    )
    worst: Knee | None = None
    for p in tails:
        word = f"p{metrics.percentile_word(p)}"
        key = f"{word}_ttft_ms"
        if key not in nominal or key not in slower or key not in faster:
            continue
        near = slower[key] > (1 + KNEE_MOVES) * nominal[key] and nominal[key] > faster[key]
        knee = Knee(word, nominal[key], slower[key], near)
        if worst is None or (knee.near, knee.moves) > (worst.near, worst.moves):
            worst = knee
    return worst


def _joined(value: float, parts: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Independent half-widths, in logarithms, joined in the root of the sum of squares."""
    if value <= 0 or any(low <= 0 for low, _ in parts):
        return min(low for low, _ in parts), max(high for _, high in parts)
    below = hypot(*(log(value / low) for low, _ in parts))
    above = hypot(*(log(high / value) for _, high in parts))
    return value * exp(-below), value * exp(above)


def _loaded(model: Any) -> LoadedStepModel:
    assert isinstance(model, LoadedStepModel)
    return model


def _short(value: float) -> float:
    """Six significant digits: BLAS sums in as many parts as it has threads, and the last bits with it."""
    return float(f"{value:.6g}")


def _rounded(bounds: tuple[float, float]) -> tuple[float, float]:
    return _short(bounds[0]), _short(bounds[1])
