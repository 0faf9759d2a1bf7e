"""The report's curves: a run of any size, brought down to a few hundred points a series."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from vsim.sim import metrics, timeline
from vsim.sim.fleet.report import replicas_chart
from vsim.sim.report_svg import Chart, Series
from vsim.sim.run import FINISHED, REJECTED, Run

BUCKETS = 300  # along the time axis, for states that hold
HEAT_ROWS = 28
COARSE = 100  # for rates and percentiles, where a bucket needs many samples
FloatArray = npt.NDArray[np.float64]
# Where the CDF is drawn: every half percent, and finer in the tail people look at.
CDF_PERCENTILES = np.concatenate(
    [np.arange(0, 99, 0.5), np.arange(99, 100, 0.1), [99.95, 99.99, 100.0]]
)


def charts(run: Run, summary: Mapping[str, Any], clock: timeline.StepClock) -> list[Chart]:
    """All charts of a run, in the order of the page. Every series has at most a few hundred points."""
    found = cdf_charts(run)
    span_ns = metrics.duration_ns(run) if run.num_requests else 0
    if span_ns <= 0:
        return found
    start = int(run.requests["arrival_ns"].min())
    fine = _edges(start, span_ns, BUCKETS)
    # Percentiles of a handful of requests are noise: fewer, wider buckets for a small run.
    coarse = _edges(start, span_ns, min(COARSE, max(10, run.num_requests // 8)))
    found += latency_over_time(run, coarse)
    if (heat := heat_map(run, coarse)) is not None:
        found.append(heat)
    if len(run.steps["start_ns"]):
        found += [queue_chart(run, clock, fine), *kv_charts(run, clock, fine, summary)]
        found += [throughput_chart(run, coarse), batch_chart(run, clock, fine)]
    found.append(request_rate_chart(run, coarse))
    if summary["preemptions"] or summary["rejected_reasons"]:
        found.append(trouble_chart(run, coarse))
    if (fleet := replicas_chart(run, fine)) is not None:
        found.append(fleet)
    return found


def cdf_charts(run: Run) -> list[Chart]:
    """Cumulative distributions: what share of requests (or gaps) was at most so slow."""
    latency = metrics.latencies(run)
    itl: FloatArray = np.empty(0)
    if len(run.itl_ns) and run.itl_count.sum():
        itl = metrics.weighted_percentile(
            run.itl_ns.astype(float), run.itl_count, CDF_PERCENTILES.tolist()
        )
    return [
        _cdf("cdf-request", "TTFT and end-to-end latency, CDF", [
            ("TTFT", _quantiles(latency.ttft_ns), 1),
            ("E2EL", _quantiles(latency.e2el_ns), 2),
            ("Queue time", _quantiles(latency.queue_ns), 5),
        ]),
        _cdf("cdf-token", "Time per output token and inter-token latency, CDF", [
            ("TPOT", _quantiles(latency.tpot_ns), 3),
            ("ITL", itl, 4),
        ]),
    ]  # fmt: skip


def _quantiles(values: npt.NDArray[np.int64] | FloatArray) -> FloatArray:
    return np.percentile(values, CDF_PERCENTILES) if len(values) else np.empty(0)


def _cdf(name: str, title: str, curves: list[tuple[str, FloatArray, int]]) -> Chart:
    """Curves given by their quantiles (ns) become share over one log axis of milliseconds."""
    known = [q / 1e6 for _, q, _ in curves if len(q)]
    if not known:
        return Chart(name, title, "% of samples", np.empty(0), [])
    low = min(max(float(q[0]), 1e-3) for q in known)
    high = max(float(q[-1]) for q in known)
    # The very fastest stragglers would push everything else into a corner.
    low = max(low, high / 1e6) * 0.999
    x = np.geomspace(low, max(high, low * 1.1), BUCKETS)
    series = []
    for label, quantiles, color in curves:
        if not len(quantiles):
            continue
        # Where several quantiles share a value, the highest one is the share at most so slow.
        values, last = np.unique(quantiles[::-1] / 1e6, return_index=True)
        shares = CDF_PERCENTILES[::-1][last]
        y = np.interp(x, values, shares, left=0.0, right=100.0)
        series.append(Series(label, y, color))
    return Chart(name, title, "% at most this slow", x, series, x_kind="log_ms", y_max=100.0)


def latency_over_time(run: Run, edges: npt.NDArray[np.int64]) -> list[Chart]:
    """p50 and p95 of TTFT, TPOT and E2EL of the requests sent in each stretch of the run."""
    done = run.requests["status"] == FINISHED
    if not done.any():
        return []
    latency = metrics.latencies(run)
    sent = run.requests["sent_ns"][done]
    bucket = np.clip(np.searchsorted(edges, sent, side="right") - 1, 0, len(edges) - 2)
    several = run.requests["output_tokens"][done] > 1
    x = _middles(edges)
    charts = []
    for key, title, values, where in (
        ("ttft", "TTFT by time of sending", latency.ttft_ns / 1e6, bucket),
        ("tpot", "TPOT by time of sending", latency.tpot_ns / 1e6, bucket[several]),
        ("e2el", "End-to-end latency by time of sending", latency.e2el_ns / 1e6, bucket),
    ):
        p50, p95, top = grouped_percentiles(values, where, len(x), (50, 95, 100))
        charts.append(
            Chart(
                f"{key}-time",
                title,
                "ms",
                x,
                [Series("p95", p95, 2, peak=top), Series("p50", p50, 1)],
                y_log=True,
                note="The pale band reaches up to the slowest request.",
            )
        )
    return charts


def heat_map(run: Run, edges: npt.NDArray[np.int64]) -> Chart | None:
    """How many requests sent in each stretch saw which TTFT."""
    done = run.requests["status"] == FINISHED
    ttft_ms = metrics.latencies(run).ttft_ns / 1e6
    if not (ttft_ms > 0).any():
        return None
    low, high = float(ttft_ms[ttft_ms > 0].min()) * 0.999, float(ttft_ms.max()) * 1.001
    rows = np.geomspace(max(low, high / 1e6), high, HEAT_ROWS + 1)
    row = np.clip(np.searchsorted(rows, ttft_ms, side="right") - 1, 0, HEAT_ROWS - 1)
    column = np.searchsorted(edges, run.requests["sent_ns"][done], side="right") - 1
    columns = len(edges) - 1
    column = np.clip(column, 0, columns - 1)
    counts = np.bincount(row * columns + column, minlength=HEAT_ROWS * columns)
    (p50,) = grouped_percentiles(ttft_ms, column, columns, (50,))
    return Chart(
        "ttft-heat",
        "TTFT heat map",
        "requests sent then, by TTFT",
        _middles(edges),
        [Series("p50", p50, 2)],
        note="The stronger the colour, the more requests.",
        heat=counts.reshape(HEAT_ROWS, columns).astype(float),
        heat_edges=rows,
    )


def grouped_percentiles(
    values: FloatArray,
    group: npt.NDArray[np.generic],
    groups: int,
    percentiles: tuple[float, ...],
) -> list[FloatArray]:
    """`np.percentile` (linear) of `values` in each group, NaN for an empty one; each of shape (groups,)."""
    order = np.lexsort((values, group))
    ordered = np.asarray(values, dtype=float)[order]
    count = np.bincount(np.asarray(group, dtype=np.int64), minlength=groups)
    first = np.cumsum(count) - count
    result = []
    for p in percentiles:
        place = np.maximum(count - 1, 0) * (p / 100)
        low = np.minimum(first + np.floor(place).astype(np.int64), max(len(ordered) - 1, 0))
        high = np.minimum(first + np.ceil(place).astype(np.int64), max(len(ordered) - 1, 0))
        if not len(ordered):
            result.append(np.full(groups, np.nan))
            continue
        mixed = ordered[low] + (ordered[high] - ordered[low]) * (place - np.floor(place))
        result.append(np.where(count > 0, mixed, np.nan))
    return result


def queue_chart(run: Run, clock: timeline.StepClock, edges: npt.NDArray[np.int64]) -> Chart:
    """Requests running in and waiting for the engine."""
    running, running_peak = clock.state(run.steps["running"]).buckets(edges)
    waiting, waiting_peak = clock.state(run.steps["waiting"]).buckets(edges)
    return Chart(
        "queue",
        "Running and waiting requests",
        "requests",
        _middles(edges),
        [
            Series("running", running, 1, peak=running_peak),
            Series("waiting", waiting, 2, peak=waiting_peak),
        ],
        note="Curves are time-weighted means; the pale band reaches up to the maximum.",
    )


def kv_charts(
    run: Run, clock: timeline.StepClock, edges: npt.NDArray[np.int64], summary: Mapping[str, Any]
) -> list[Chart]:
    """KV-cache usage and internal fragmentation."""
    steps, x = run.steps, _middles(edges)
    slots = steps["kv_blocks_used"].astype(np.int64) * run.block_size
    replicas = 1 if "replica" not in steps else len(np.unique(steps["replica"]))
    usable = max(1, run.num_gpu_blocks * run.block_size * replicas)
    held, held_peak = clock.state(slots).buckets(edges)
    filled, _ = clock.state(steps["kv_tokens_used"]).buckets(edges)
    wasted, wasted_peak = clock.state(slots - steps["kv_tokens_used"]).buckets(edges)
    with np.errstate(invalid="ignore", divide="ignore"):
        share = np.where(held > 0, wasted / held * 100, np.nan)
    return [
        Chart(
            "kv",
            "KV cache usage",
            "% of usable blocks",
            x,
            [
                Series("allocated blocks", held / usable * 100, 1, peak=held_peak / usable * 100),
                Series("slots holding a token", filled / usable * 100, 3, style="dash"),
            ],
            y_max=100.0,
        ),
        Chart(
            "fragmentation",
            "Internal fragmentation",
            "slots allocated but empty, tokens",
            x,
            [Series("wasted slots", wasted, 4, peak=wasted_peak)],
            note=f"Mean over the run: {_share(summary['kv_fragmentation_mean'])} of allocated slots.",
        ),
        Chart(
            "fragmentation-share",
            "Internal fragmentation, share",
            "% of allocated slots",
            x,
            [Series("wasted share", share, 4)],
        ),
    ]


def throughput_chart(run: Run, edges: npt.NDArray[np.int64]) -> Chart:
    """Tokens per second: generated, and prompt tokens computed (recomputation included)."""
    steps = run.steps
    output = steps.get("emitted", steps["decodes"])
    return Chart(
        "throughput",
        "Token throughput",
        "tokens/s",
        _middles(edges),
        [
            Series("output", _rate(run, output, edges), 1),
            Series("prefill", _rate(run, steps["prefill_tokens"], edges), 2),
        ],
    )


def batch_chart(run: Run, clock: timeline.StepClock, edges: npt.NDArray[np.int64]) -> Chart:
    """What a step is made of: tokens of prompt chunks and of decodes."""
    prefill, _ = clock.state(run.steps["prefill_tokens"]).buckets(edges)
    decode, _ = clock.state(run.steps["decodes"]).buckets(edges)
    total = prefill + decode
    return Chart(
        "batch",
        "Batch composition",
        "tokens in the running step",
        _middles(edges),
        [
            Series("decode", decode, 1, style="area"),
            Series("prefill chunks", prefill, 2, style="area"),
        ],
        y_max=float(total.max()) if len(total) else None,
    )


def request_rate_chart(run: Run, edges: npt.NDArray[np.int64]) -> Chart:
    """Requests per second coming in and going out."""
    width_s = np.diff(edges) / 1e9
    arrival = run.requests["arrival_ns"]
    done = run.requests["finish_ns"][run.requests["status"] == FINISHED]
    return Chart(
        "rate",
        "Request rate",
        "requests/s",
        _middles(edges),
        [
            Series("arrived", _count(arrival, edges) / width_s, 5),
            Series("finished", _count(done, edges) / width_s, 1),
        ],
    )


def trouble_chart(run: Run, edges: npt.NDArray[np.int64]) -> Chart:
    """When requests were preempted and rejected."""
    series = []
    if len(run.steps["start_ns"]) and run.steps["preempted"].any():
        preempted = _count(run.steps["start_ns"], edges, run.steps["preempted"])
        series.append(Series("preemptions", preempted, 4, style="bars"))
    rejected = run.requests["finish_ns"][run.requests["status"] == REJECTED]
    if len(rejected):
        series.append(Series("rejections", _count(rejected, edges), 2, style="bars"))
    return Chart(
        "trouble",
        "Preemptions and rejections",
        f"per {(edges[1] - edges[0]) / 1e9:.3g} s",
        _middles(edges),
        series,
    )


def _edges(start_ns: int, span_ns: int, buckets: int) -> npt.NDArray[np.int64]:
    edges = start_ns + np.arange(buckets + 1, dtype=float) * (span_ns / buckets)
    return np.unique(np.round(edges).astype(np.int64))


def _middles(edges: npt.NDArray[np.int64]) -> FloatArray:
    return (edges[:-1] + edges[1:]) / 2e9 - edges[0] / 1e9


def _count(
    when_ns: npt.NDArray[np.int64],
    edges: npt.NDArray[np.int64],
    weight: npt.NDArray[np.generic] | None = None,
) -> FloatArray:
    bucket = np.clip(np.searchsorted(edges, when_ns, side="right") - 1, 0, len(edges) - 2)
    weights = None if weight is None else np.asarray(weight, dtype=float)
    return np.bincount(bucket, weights=weights, minlength=len(edges) - 1).astype(float)


def _rate(run: Run, tokens: npt.NDArray[np.generic], edges: npt.NDArray[np.int64]) -> FloatArray:
    """Tokens per second in each bucket; a step's tokens are spread over the step."""
    steps = run.steps
    replica = steps.get("replica")
    parts = [slice(None)] if replica is None else [replica == r for r in np.unique(replica)]
    total = np.zeros(len(edges))
    for part in parts:
        start, end = steps["start_ns"][part], steps["end_ns"][part]
        sums = np.cumsum(np.asarray(tokens[part], dtype=float))
        when = np.column_stack([start, end]).ravel()
        level = np.column_stack([np.append(0.0, sums[:-1]), sums]).ravel()
        # With steps in flight at once a start may lie before the previous end.
        total += np.interp(edges, np.maximum.accumulate(when), level, left=0.0)
    return np.diff(total) / (np.diff(edges) / 1e9)


def _share(value: float | None) -> str:
    return "unknown" if value is None else f"{value * 100:.2f} %"
