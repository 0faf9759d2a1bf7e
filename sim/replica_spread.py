"""How evenly a run's work fell on its replicas: one row of numbers a replica."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vsim.sim import metrics, timeline
from vsim.sim.run import FINISHED, Column, Run
from vsim.sim.text import number, percent

MAX_ROWS = 8  # more replicas than this are told as smallest, median and largest
Row = dict[str, float | int | None]


def _whole(value: float | None) -> str:
    return number(None if value is None else round(value))


def _tenth(value: float | None) -> str:
    return "–" if value is None else f"{value:,.1f}"


def _share(value: float | None) -> str:
    return percent(value, 0)


# Key, heading, how to write it.
_COLUMNS = (
    ("requests", "requests", _whole),
    ("output_tokens", "out tok", _whole),
    ("p95_ttft_ms", "TTFT p95", _whole),
    ("p95_tpot_ms", "TPOT p95", _tenth),
    ("busy", "busy", _share),
    ("kv_usage_mean", "KV mean", _share),
    ("kv_usage_peak", "KV peak", _share),
    ("preemptions", "preempt", _whole),
)


def per_replica(run: Run, replicas: int) -> list[Row]:
    """One row for each of `replicas`, idle ones included; empty for a run that does not tell them apart.

    `requests` (finished), `output_tokens` of those, `p95_ttft_ms`, `p95_tpot_ms`, `busy` (share of the
    run's duration in which a step was under way), `kv_usage_mean` over that duration and `kv_usage_peak`,
    `waiting_peak`, `preemptions`.
    """
    served, ran = run.requests.get("replica"), run.steps.get("replica")
    if served is None or ran is None:
        return []
    span_ns = metrics.duration_ns(run)
    begin = int(run.requests["arrival_ns"].min()) if run.num_requests else 0
    usable = max(run.num_gpu_blocks, 1)
    rows: list[Row] = []
    for which in range(replicas):
        part = _part(run, served == which, ran == which)
        latency = metrics.latencies(part)
        done = part.requests["status"] == FINISHED
        blocks, waiting = part.steps["kv_blocks_used"], part.steps["waiting"]
        held = timeline.StepClock(part).state(blocks).mean(begin, begin + span_ns)
        rows.append(
            {
                "replica": which,
                "requests": int(done.sum()),
                "output_tokens": int(part.requests["output_tokens"][done].sum()),
                "p95_ttft_ms": metrics.stats(latency.ttft_ns, (95.0,)).percentiles[0][1],
                "p95_tpot_ms": metrics.stats(latency.tpot_ns, (95.0,)).percentiles[0][1],
                "busy": _busy_ns(part.steps) / span_ns if span_ns else None,
                "kv_usage_mean": (held or 0.0) / usable,
                "kv_usage_peak": int(blocks.max()) / usable if len(blocks) else 0.0,
                "waiting_peak": int(waiting.max()) if len(waiting) else 0,
                "preemptions": int(part.requests["preemptions"].sum()),
            }
        )
    return rows


def _part(run: Run, requests: Column, steps: Column) -> Run:
    """What one replica served and did; masks of shape (requests,) and (steps,)."""
    return dataclasses.replace(
        run,
        requests={name: column[requests] for name, column in run.requests.items()},
        steps={name: column[steps] for name, column in run.steps.items() if name != "replica"},
    )


def _busy_ns(steps: Mapping[str, Column]) -> int:
    """Length of the union of the steps' intervals: with several batches in flight they overlap."""
    if not len(steps["start_ns"]):
        return 0
    order = np.argsort(steps["start_ns"], kind="stable")
    start, end = steps["start_ns"][order], steps["end_ns"][order]
    reached = np.concatenate([start[:1], np.maximum.accumulate(end)[:-1]])
    return int(np.maximum(end - np.maximum(start, reached), 0).sum())


def spread_lines(rows: Sequence[Row]) -> list[str]:
    """`rows` as a table of at most 80 columns; many replicas as least, median and most of each column."""
    shown: list[tuple[str, Row]]
    if len(rows) <= MAX_ROWS:
        shown = [(str(row["replica"]), row) for row in rows]
    else:
        shown = [
            (name, {key: _over(rows, key, pick) for key, _, _ in _COLUMNS})
            for name, pick in (("least", np.min), ("median", np.median), ("most", np.max))
        ]
    cells = [["replica", *(title for _, title, _ in _COLUMNS)]]
    cells += [[name, *(form(row[key]) for key, _, form in _COLUMNS)] for name, row in shown]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    return [
        line[0].ljust(widths[0])
        + "".join(
            "  " + cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)
        )
        for line in cells
    ]


def _over(rows: Sequence[Row], key: str, pick: Any) -> float | None:
    values = [row[key] for row in rows if row[key] is not None]
    return float(pick(values)) if values else None
