"""Block bootstrap: would a number survive another sample of such traffic?

Neighbouring requests wait in the same queue, so whole stretches of `BLOCKS` equal ones are drawn, not
single requests (Kuensch 1989). Shorter blocks would cut queues apart and make intervals too narrow.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vsim.sim import metrics
from vsim.sim.run import FINISHED, Run

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

RESAMPLES = 400
BLOCKS = 40
BINS = 4000  # of the resampled histograms: 0.4 % wide over seven decades
LEAST_REQUESTS = 100  # finished ones; with fewer a block is an anecdote


def block_draws(rng: np.random.Generator) -> FloatArray:
    """How often each block is drawn in each resample, shape (RESAMPLES, BLOCKS)."""
    return rng.multinomial(BLOCKS, np.full(BLOCKS, 1 / BLOCKS), RESAMPLES).astype(float)


def blocks_of(run: Run) -> IntArray:
    """Block of each request, shape (n,): the run cut by order of arrival."""
    order = np.argsort(run.requests["arrival_ns"], kind="stable")
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    return rank * BLOCKS // max(1, len(order))


def latencies_by_block(run: Run, name: str) -> tuple[FloatArray, IntArray]:
    """(ms, block) of the finished requests; `name`: ttft, tpot (of several tokens) or e2el."""
    latency = metrics.latencies(run)
    done = run.requests["status"] == FINISHED
    block = blocks_of(run)[done]
    if name == "ttft":
        return latency.ttft_ns / 1e6, block
    if name == "e2el":
        return latency.e2el_ns / 1e6, block
    return latency.tpot_ns / 1e6, block[run.requests["output_tokens"][done] > 1]


def bin_edges(positive: FloatArray) -> FloatArray:
    """Edges of `BINS` bins, evenly spaced on a logarithmic axis, around the values."""
    return np.geomspace(positive.min() * 0.999, positive.max() * 1.001, BINS + 1)


def resampled(
    values: FloatArray,
    block: IntArray,
    edges: FloatArray,
    picks: FloatArray,
    percentiles: Sequence[float] = (50, 90, 95, 99),
    weights: FloatArray | None = None,
) -> dict[str, FloatArray]:
    """mean and percentiles ("p95") of each resample, each of shape (len(picks),).

    `picks`: as `block_draws`; a row of ones is the sample itself. `weights`: how often each value counts.
    """
    once = np.ones(len(values)) if weights is None else weights
    where = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, BINS - 1)
    histogram = np.bincount(block * BINS + where, once, minlength=BLOCKS * BINS)
    totals = np.bincount(block, weights=values * once, minlength=BLOCKS)
    counts = picks @ histogram.reshape(BLOCKS, BINS)
    cumulative = np.cumsum(counts, axis=1)
    size = cumulative[:, -1]
    result = {
        "mean": np.divide(picks @ totals, size, out=np.full(len(size), np.nan), where=size > 0)
    }
    centres = np.sqrt(edges[:-1] * edges[1:])
    for p in percentiles:
        # The first bin in which the share reached is at least p.
        reached = (cumulative >= size[:, None] * (p / 100)).argmax(axis=1)
        result[f"p{metrics.percentile_word(float(p))}"] = centres[reached]
    return result
