"""How much wider an interval must be because neighbouring blocks of a run resemble each other.

A block bootstrap takes its blocks for independent. Where a queue outlasts a block they are not, and its
intervals come out too narrow. The variance of a mean over blocks that follow each other like an AR(1)
process of lag-one correlation r is (1 + r) / (1 − r) times what independent blocks would give.
"""

from __future__ import annotations

import numpy as np

from vsim.sim.block_bootstrap import BLOCKS, FloatArray, IntArray

MOST = 0.9  # correlation beyond which forty blocks say nothing about it


def influence(values: FloatArray, block: IntArray, percentile: float | None) -> FloatArray:
    """What each block does to a statistic: its mean over the whole mean, or its share beyond the percentile."""
    if percentile is not None:
        values = (values > np.percentile(values, percentile)).astype(float)
    count = np.bincount(block, minlength=BLOCKS)
    total = np.bincount(block, weights=values, minlength=BLOCKS)
    whole = float(values.mean())
    means = np.divide(total, count, out=np.full(BLOCKS, whole), where=count > 0)
    return means / whole - 1 if whole > 0 else np.zeros(BLOCKS)


def widening(series: list[FloatArray]) -> float:
    """Factor of at least 1 for the interval of a statistic whose blocks are `series` (one a sample drawn alone)."""
    variances = [float(one.var()) for one in series]
    if not sum(variances) > 0:
        return 1.0
    factors = [_variance_factor(one) for one in series]
    return float(np.sqrt(np.average(factors, weights=variances)))


def _variance_factor(blocks: FloatArray) -> float:
    centred = blocks - blocks.mean()
    power = float(centred @ centred)
    if not power > 0:
        return 1.0
    found = float(centred[1:] @ centred[:-1]) / power
    found += (1 + 4 * found) / len(blocks)  # the estimate's bias (Kendall 1954)
    r = min(max(found, 0.0), MOST)
    return (1 + r) / (1 - r)
