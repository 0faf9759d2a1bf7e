"""How unevenly requests arrive: counts in windows, index of dispersion, autocorrelation, Hurst estimate."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from vsim.traces.trace import Int64Array

Floats = npt.NDArray[np.float64]


# Above this many windows a series of counts is not laid out: a trace may span a century.
MAX_WINDOWS = 1_000_000


def counts(arrival_ns: Int64Array, window_s: float) -> Int64Array:
    """Arrivals in each whole window from the first arrival on; a partial last window is left out.

    Shape (max(1, floor(span / window)),); a trace shorter than one window gives one count of all. Only the
    first million windows are given.
    """
    window_ns = max(1, round(window_s * 1e9))
    span = int(arrival_ns[-1] - arrival_ns[0]) if len(arrival_ns) else 0
    whole = min(span // window_ns, MAX_WINDOWS)
    if whole < 1:
        return np.asarray([len(arrival_ns)], dtype=np.int64)
    edges = arrival_ns[0] + np.arange(whole + 1, dtype=np.int64) * window_ns
    return np.diff(np.searchsorted(arrival_ns, edges, side="left")).astype(np.int64)


def dispersion(arrival_ns: Int64Array, window_s: float) -> tuple[float, int]:
    """Index of dispersion of the counts in all whole windows, and the highest count.

    Variance over mean: 1 for Poisson, above for bursts, below for regular; NaN for fewer than 2 windows.
    Empty windows are counted, not laid out.
    """
    window_ns = max(1, round(window_s * 1e9))
    span = int(arrival_ns[-1] - arrival_ns[0]) if len(arrival_ns) else 0
    whole = span // window_ns
    if whole < 1:
        return math.nan, len(arrival_ns)
    at = (arrival_ns - arrival_ns[0]) // window_ns
    _, filled = np.unique(at[at < whole], return_counts=True)
    mean = float(filled.sum()) / whole
    top = int(filled.max(initial=0))
    if whole < 2 or mean == 0:
        return math.nan, top
    return float((filled.astype(float) ** 2).sum()) / whole / mean - mean, top


def index_of_dispersion(window_counts: Int64Array) -> float:
    """Variance over mean of a series of counts; NaN for fewer than 2."""
    mean = float(window_counts.mean()) if len(window_counts) else 0.0
    if len(window_counts) < 2 or mean == 0:
        return math.nan
    return float(window_counts.var()) / mean


def autocorrelation(values: npt.NDArray[np.generic], lag: int) -> float:
    """Correlation of a series with itself `lag` steps later (biased estimator); NaN where undefined."""
    series = values.astype(float)
    centred = series - series.mean() if len(series) else series
    total = float(centred @ centred)
    if lag >= len(series) or total == 0:
        return math.nan
    return float(centred[:-lag] @ centred[lag:]) / total if lag else 1.0


def hurst(window_counts: Int64Array) -> float:
    """Hurst exponent by aggregated variance: 0.5 for independent counts, towards 1 for long memory.

    The slope of log variance of the means of m counts against log m is 2H - 2 (Leland et al., 1994).
    NaN for fewer than 64 counts. A trend or a daily cycle raises it as well.
    """
    series = window_counts.astype(float)
    n = len(series)
    if n < 64:
        return math.nan
    sizes, variances = [], []
    size = 1
    while n // size >= 16:
        means = series[: n // size * size].reshape(-1, size).mean(axis=1)
        variance = float(means.var())
        if variance > 0:
            sizes.append(math.log(size))
            variances.append(math.log(variance))
        size *= 2
    if len(sizes) < 3:
        return math.nan
    slope = float(np.polyfit(sizes, variances, 1)[0])
    return min(1.0, max(0.0, 1 + slope / 2))
