"""What an engineer wants to know of a trace before trusting it, as JSON-ready numbers."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

import numpy as np

from vsim.traces.burstiness import autocorrelation, counts, dispersion, hurst
from vsim.traces.export import FIRST_DATE_NS
from vsim.traces.sharing import BLOCK_SIZES, sharing
from vsim.traces.trace import Int64Array, Trace

SCHEMA = "vsim/trace-facts/1"
QUANTILES = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 1.0)
WINDOWS_S = (1, 10, 60)
LAGS = (1, 2, 5, 10, 30, 60)
LONGEST = 5
MAX_NAMED = 20


def facts(trace: Trace) -> dict[str, Any]:
    """All facts of a trace. Numbers that are undefined (one request, no span) are None."""
    n = len(trace)
    span = trace.span_s
    prompt, output = trace.prompt_tokens, trace.output_tokens
    return _plain(
        {
            "schema": SCHEMA,
            "source": {
                "name": trace.source.name,
                "format": trace.source.format,
                "sha256": trace.source.sha256,
            },
            "requests": n,
            "span_s": span,
            "first_arrival": _date(trace.origin_ns),
            "tokens": {
                "prompt": int(prompt.sum()),
                "output": int(output.sum()),
                "prompt_per_s": float(prompt.sum()) / span if span else None,
                "output_per_s": float(output.sum()) / span if span else None,
                "prompt_per_output": float(prompt.sum()) / max(1.0, float(output.sum())),
            },
            "rate": _rate(trace),
            "burstiness": _burstiness(trace),
            "lengths": {
                "prompt": quantiles(prompt),
                "output": quantiles(output),
                "total": quantiles(prompt + output),
                "rank_correlation": rank_correlation(prompt, output),
                "prompt_shares": _shares(prompt),
                "output_shares": _shares(output),
                "joint": joint(prompt, output),
            },
            "longest": _longest(trace),
            "tenants": _tenants(trace),
            "sessions": _sessions(trace),
            "prefix": _prefix(trace),
            "aborted": 0 if trace.aborted is None else int(trace.aborted.sum()),
            "capped_by_max_tokens": 0
            if trace.max_tokens is None
            else int((trace.max_tokens == output).sum()),
            "dropped": dict(trace.dropped),
            "assumptions": list(trace.assumptions),
        }
    )


def _plain(value: Any) -> Any:
    """NaN to None, numpy scalars to Python's, so that the JSON is valid everywhere."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _date(origin_ns: int) -> str | None:
    if origin_ns < FIRST_DATE_NS:
        return None
    return datetime.fromtimestamp(origin_ns // 1_000_000_000, tz=UTC).strftime(
        "%Y-%m-%d %H:%M:%S UTC"
    )


def quantiles(values: Int64Array) -> dict[str, float]:
    """Mean and quantiles (linear interpolation, as numpy's) by name: min, p1 … p99.9, max."""
    at = np.quantile(values, QUANTILES)
    names = ["min", *(f"p{100 * q:g}" for q in QUANTILES[1:-1]), "max"]
    return {"mean": float(values.mean()), **dict(zip(names, at.tolist(), strict=True))}


def rank_correlation(x: Int64Array, y: Int64Array) -> float:
    """Spearman's rank correlation, ties sharing their mean rank."""
    if len(x) < 2:
        return math.nan
    step = -(
        -len(x) // 1_000_000
    )  # ranks of ten million rows would take a gigabyte and say the same
    x, y = x[::step], y[::step]
    a, b = _ranks(x), _ranks(y)
    a, b = a - a.mean(), b - b.mean()
    norm = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / norm if norm else math.nan


def _ranks(values: Int64Array) -> Any:
    _, inverse, tied = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(tied)
    return (last - (tied - 1) / 2.0)[inverse]


def _shares(values: Int64Array) -> dict[str, float]:
    """Shares of the length classes people quote."""
    n = len(values)
    return {
        "below_64": float((values < 64).sum()) / n,
        "64_to_512": float(((values >= 64) & (values <= 512)).sum()) / n,
        "above_512": float((values > 512).sum()) / n,
        "above_8192": float((values > 8192).sum()) / n,
    }


def joint(prompt: Int64Array, output: Int64Array) -> dict[str, Any]:
    """Counts by powers of two: rows are prompt lengths, columns output lengths; entry k is [2^k, 2^(k+1)).

    Length 0 counts as 1.
    """
    rows = np.floor(np.log2(np.maximum(prompt, 1))).astype(np.int64)
    columns = np.floor(np.log2(np.maximum(output, 1))).astype(np.int64)
    table = np.zeros((int(rows.max()) + 1, int(columns.max()) + 1), dtype=np.int64)
    np.add.at(table, (rows, columns), 1)
    return {"prompt_log2": len(table), "output_log2": len(table[0]), "counts": table.tolist()}


def _rate(trace: Trace) -> dict[str, Any]:
    arrival, span = trace.arrival_ns, trace.span_s
    window = _nice_window(span)
    series = counts(arrival, window)
    peaks = {
        f"peak_{seconds}s_per_s": dispersion(arrival, seconds)[1] / seconds
        if span >= seconds
        else None
        for seconds in WINDOWS_S
    }
    return {
        "mean_per_s": (len(trace) - 1) / span if span else None,
        **peaks,
        "over_time": {"window_s": window, "requests": series.tolist()},
    }


def _nice_window(span_s: float) -> float:
    """A round window that cuts the span into some 60 to 150 pieces."""
    steps = (0.001, 0.01, 0.1, 1, 5, 10, 30, 60, 300, 600, 1800, 3600, 6 * 3600, 86400, 7 * 86400)
    return next(
        (step for step in steps if span_s / step <= 150),
        30 * 86400 * max(1, span_s // (150 * 30 * 86400)),
    )


def _burstiness(trace: Trace) -> dict[str, Any]:
    gaps = np.diff(trace.arrival_ns) / 1e9
    per_second = counts(trace.arrival_ns, 1)
    mean = float(gaps.mean()) if len(gaps) else math.nan
    return {
        "gap_mean_s": mean,
        "gap_cv": float(gaps.std()) / mean if len(gaps) and mean > 0 else None,
        "gap_max_s": float(gaps.max()) if len(gaps) else None,
        "same_time_as_previous": int((gaps == 0).sum()),
        "index_of_dispersion": {
            f"{seconds}s": dispersion(trace.arrival_ns, seconds)[0] for seconds in WINDOWS_S
        },
        "autocorrelation_1s_counts": {
            str(lag): autocorrelation(per_second, lag) for lag in LAGS if len(per_second) > 2 * lag
        },
        "hurst_1s_counts": hurst(per_second),
    }


def _longest(trace: Trace) -> list[dict[str, Any]]:
    total = trace.prompt_tokens + trace.output_tokens
    rows = np.argsort(-total, kind="stable")[:LONGEST].tolist()
    return [
        {
            "request": row,
            "arrival_s": float(trace.arrival_ns[row]) / 1e9,
            "prompt": int(trace.prompt_tokens[row]),
            "output": int(trace.output_tokens[row]),
        }
        for row in rows
    ]


def _tenants(trace: Trace) -> list[dict[str, Any]]:
    """Busiest tenants first."""
    if trace.tenant is None:
        return []
    number = np.bincount(trace.tenant, minlength=len(trace.tenant_names))
    prompt = np.bincount(trace.tenant, trace.prompt_tokens, len(trace.tenant_names))
    output = np.bincount(trace.tenant, trace.output_tokens, len(trace.tenant_names))
    order = np.argsort(-number, kind="stable")[:MAX_NAMED].tolist()
    return [
        {
            "name": trace.tenant_names[code],
            "requests": int(number[code]),
            "prompt_tokens": int(prompt[code]),
            "output_tokens": int(output[code]),
        }
        for code in order
    ]


def _sessions(trace: Trace) -> dict[str, Any] | None:
    if trace.session is None and trace.sessions is None:
        return None
    out: dict[str, Any] = {}
    if trace.session is not None:
        turns = np.bincount(trace.session[trace.session >= 0], minlength=len(trace.session_names))
        out["sessions"] = len(trace.session_names)
        out["turns"] = quantiles(turns.astype(np.int64)) if len(turns) else None
    if trace.sessions is not None:
        dependent = trace.sessions.after >= 0
        out["turns_that_wait_for_another"] = int(dependent.sum())
        out["think_s"] = quantiles(trace.sessions.think_ns[dependent]) if dependent.any() else None
        if out["think_s"] is not None:
            out["think_s"] = {name: value / 1e9 for name, value in out["think_s"].items()}
    return out


def _prefix(trace: Trace) -> dict[str, Any] | None:
    shared = sharing(trace)
    if shared is None or trace.prefix_ids is None:
        return None
    total = max(1, int(trace.prompt_tokens.sum()))
    smallest = BLOCK_SIZES[0]
    useful = np.minimum(shared.common_tokens, np.maximum(shared.prompt_tokens - 1, 0))
    return {
        "tokens_per_id": trace.prefix_block_tokens,
        "ids": len(trace.prefix_ids),
        "distinct_ids": len(np.unique(trace.prefix_ids)),
        "shared_with_earlier_prompt": int(shared.common_tokens.sum()) / total,
        "requests_sharing": int((shared.common_tokens > 0).sum()),
        "hit_ceiling": {str(size): shared.ceiling(size) for size in BLOCK_SIZES},
        "shared_but_shorter_than_a_block": {
            str(size): int(useful[useful < size].sum()) / total
            for size in (smallest, *BLOCK_SIZES[1:])
        },
    }
