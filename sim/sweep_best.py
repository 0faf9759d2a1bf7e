"""The end of a sweep for a person: its best rows."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vsim.errors import UserError
from vsim.sim.cost import COST_KEYS
from vsim.sim.metrics import percentile_word
from vsim.sim.run import REQUEST_COLUMNS, STEP_COLUMNS, Run
from vsim.sim.summary import summarize
from vsim.sim.sweep_point import DONE, Asked, numbers_of
from vsim.sim.sweep_space import dimensions
from vsim.sim.text import number, percent, plain, short
from vsim.traces.options import printable

# Of these the largest value is best, of every other number the smallest.
_LARGEST = ("throughput", "goodput", "completed", "hit_rate", "tokens_per_s")
MAX_WIDTH = 30  # of a setting's value: a model's folder may have a long name


def sort_key(name: str | None, varied: Sequence[str], asked: Asked, priced: bool) -> str:
    """The number by which a sweep's rows are ranked: `name`, or the default.

    A varied setting that is a number will do, too, and "point", the order of the grid. The default is the
    cost per million output tokens where there are prices, else goodput where it was asked for, else the
    TTFT percentile nearest to p95. Raises UserError for a name that the table will not have.
    """
    if name is None:
        if priced:
            return "cost_per_million_output_tokens"
        return "request_goodput" if asked.goodput else f"{_tail(asked)}_ttft_ms"
    kinds = dimensions()
    if name != "point" and not (name in varied and kinds[name] in (int, float)):
        check_numbers("--sort-by", (name,), asked, priced)
    return name


def check_numbers(option: str, names: Sequence[str], asked: Asked, priced: bool) -> None:
    """Raises UserError unless each of `names` will be a number of the sweep's table."""
    nothing = Run(
        origin="simulated",
        requests={key: np.empty(0, kind) for key, kind in REQUEST_COLUMNS.items()},
        steps={key: np.empty(0, kind) for key, kind in STEP_COLUMNS.items()},
        itl_ns=np.empty(0, np.int64),
        itl_count=np.empty(0, np.int64),
        block_size=16,
        num_gpu_blocks=1,
    )
    known = [*numbers_of(summarize(nothing, asked.percentiles, asked.goodput)), "gpus", "gpu_hours"]
    known += COST_KEYS if priced else ()
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
            hint = f"it has {', '.join(near)}" if near else "docs/metrics.md lists them"
            raise UserError(f"{option} {printable(name)}: the table has no such number; {hint}")


def render_best(
    path: str | Path,
    varied: Sequence[str],
    asked: Asked,
    key: str,
    show: Sequence[str] = (),
    top: int = 5,
) -> str:
    """The `top` best of the finished rows of the table at `path` by `key`, as text ending in a newline.

    `varied`: settings that differ between points, shown first; `show`: further numbers, shown last.
    """
    import pyarrow.parquet as pq

    rows = pq.read_table(path).to_pylist()
    done = [row for row in rows if row["status"] == DONE]
    lines: list[str] = []
    if done and top > 0:
        lines = [*_best(done, key, varied, show, _tail(asked), top), ""]
    if rows and not done:
        lines += [f"Every point was refused; the first: {plain(rows[0]['reason'])}", ""]
    if top > 0 and any(row["ended_early"] for row in done):
        lines += ["* ended early (column ended_early says why): numbers of a part of the run", ""]
    return "".join(line.rstrip() + "\n" for line in lines)


def _tail(asked: Asked) -> str:
    """The percentile nearest to 95 among those asked for, as its columns are called."""
    if not asked.percentiles:
        return "mean"
    return "p" + percentile_word(min(asked.percentiles, key=lambda p: (abs(p - 95), p)))


def _rounded(value: float | None) -> str:
    return number(None if value is None else round(value))


def _tenth(value: float | None) -> str:
    return "–" if value is None else f"{value:,.1f}"


def _best(
    rows: Sequence[Mapping[str, Any]],
    key: str,
    varied: Sequence[str],
    show: Sequence[str],
    tail: str,
    top: int,
) -> list[str]:
    sign = -1 if any(word in key for word in _LARGEST) else 1
    order = sorted(rows, key=lambda row: (row[key] is None, sign * (row[key] or 0), row["point"]))
    shown: list[tuple[str, str, Any]] = [
        ("gpus", "GPUs", number),
        ("output_throughput", "tok/s", _rounded),
        (f"{tail}_ttft_ms", f"TTFT {tail}", _rounded),
        (f"{tail}_tpot_ms", f"TPOT {tail}", _tenth),
        ("preemptions", "preempt.", number),
    ]
    if rows[0].get("goodput_fraction") is not None:
        shown.append(("goodput_fraction", "good", percent))
    if "cost_per_month" in rows[0]:
        currency = plain(rows[0]["currency"])
        shown.append(("cost_per_month", f"{currency}/month", _rounded))
        shown.append(("cost_per_million_output_tokens", f"{currency}/Mtok out", short))
    settings = [name for name in varied if name in rows[0]]
    for name in (key, *show):
        if name not in ("point", *settings, *(known for known, _, _ in shown)):
            shown.append((name, name, short))
    cells = [["point", *settings, *(title for _, title, _ in shown)]]
    for row in order[:top]:
        mark = " *" if row["ended_early"] else ""
        cells.append(
            [
                f"{row['point']}{mark}",
                *(_value(row[name]) for name in settings),
                *(form(row.get(name)) for name, _, form in shown),
            ]
        )
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    return [
        f"Best {min(top, len(rows))} of {len(rows):,} by {key}, "
        f"{'largest' if sign < 0 else 'smallest'} first (latencies in ms):",
        *(
            "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
            for line in cells
        ),
    ]


def _value(value: Any) -> str:
    if value is None:
        return "default"
    text = f"{value:g}" if isinstance(value, float) else plain(value)
    return text if len(text) <= MAX_WIDTH else "…" + text[1 - MAX_WIDTH :]
