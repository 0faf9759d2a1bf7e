"""Charts as SVG and HTML: curves stretch with the page, words keep their size.

A chart is a `<figure>`. Its SVG has a fixed coordinate system that is stretched to whatever room there is
(`preserveAspectRatio="none"`); ticks and legends are HTML beside it, so they stay readable on a phone. The
numbers behind the pointer's readout travel as JSON in the page (`report.js`).
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from vsim.sim.text import plain

WIDTH, HEIGHT = 1000, 240
MAX_POINTS = 1000
FloatArray = npt.NDArray[np.float64]


def esc(value: Any) -> str:
    """Any text from outside as harmless HTML."""
    return html.escape(plain(value), quote=True)


@dataclass(frozen=True, slots=True)
class Series:
    """One curve. `y`: shape of the chart's x (edges - 1 for buckets), NaN where there is nothing.

    `peak`: the largest value inside each bucket, drawn as a pale band above the curve. `color`: 1 to 5.
    `style` "area" fills down to the curve below it (the chart stacks them), "bars" draws a bar a bucket.
    """

    name: str
    y: FloatArray
    color: int
    peak: FloatArray | None = None
    style: str = "line"


@dataclass(frozen=True, slots=True)
class Chart:
    """A figure: `x` has shape (points,) for curves. `x_kind` "time" charts share one crosshair."""

    id: str
    title: str
    unit: str
    x: FloatArray
    series: Sequence[Series]
    x_kind: str = "time"  # "time": seconds; "log_ms": milliseconds on a log axis
    y_log: bool = False
    y_max: float | None = None  # None: from the data
    note: str = ""
    marks: Sequence[tuple[float, str]] = field(default=())  # horizontal lines: value, label
    # A heat map under the curves: counts of shape (rows, len(x)), and the rows' edges (ms, geometric).
    heat: FloatArray | None = None
    heat_edges: FloatArray = field(default_factory=lambda: np.empty(0))


def render_chart(chart: Chart) -> str:
    """The chart as a `<figure>`; an empty one says that there is nothing to draw."""
    title = (
        f"<figcaption><b>{esc(chart.title)}</b> <span class=unit>{esc(chart.unit)}</span>"
        f"</figcaption>"
    )
    legend = "".join(
        f'<span class="key c{one.color}{" dash" if one.style == "dash" else ""}">{esc(one.name)}</span>'
        for one in chart.series
    )
    if not len(chart.x) or not any(np.isfinite(one.y).any() for one in chart.series):
        return f"<figure class=chart>{title}<p class=empty>Nothing to draw.</p></figure>"
    across = _XAxis(chart)
    up = _YAxis(chart)
    body = _body(chart, across, up)
    y_labels = "".join(
        f'<span style="top:{up.place(v) / HEIGHT * 100:.2f}%">{esc(text)}</span>'
        for v, text in up.ticks
    )
    crowded = len(across.ticks) > 4  # for a phone: report.css hides every other label there
    x_labels = "".join(
        f'<span class="{_x_label_class(i, across.place(v), crowded)}" '
        f'style="left:{across.place(v) / WIDTH * 100:.2f}%">{esc(text)}</span>'
        for i, (v, text) in enumerate(across.ticks)
    )
    marks = "".join(
        f'<span class=marklabel style="top:{up.place(value) / HEIGHT * 100:.2f}%">{esc(text)}</span>'
        for value, text in chart.marks
    )
    note = f"<p class=note>{esc(chart.note)}</p>" if chart.note else ""
    return (
        f'<figure class=chart id="{chart.id}" data-x="{chart.x_kind}">{title}'
        f"<div class=legend>{legend}</div>"
        f"<div class=plot><div class=ylabels>{y_labels}</div>"
        f'<div class=area><svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{esc(chart.title)}">{body}</svg>{marks}<div class=cursor hidden></div>'
        f"<div class=readout hidden></div></div>"
        f"<div class=xlabels>{x_labels}</div></div>{note}</figure>"
    )


def _body(chart: Chart, across: _XAxis, up: _YAxis) -> str:
    """Grid, curves and limits, in the fixed coordinates."""
    grid = "".join(f'<path class="grid" d="M0 {up.place(v):.1f}H{WIDTH}"/>' for v, _ in up.ticks)
    grid += "".join(
        f'<path class="grid" d="M{across.place(v):.1f} 0V{HEIGHT}"/>' for v, _ in across.ticks
    )
    limits = "".join(
        f'<path class="limit" d="M0 {up.place(value):.1f}H{WIDTH}"/>' for value, _ in chart.marks
    )
    return grid + _heat(chart, across, up) + _curves(chart, across, up) + limits


def _heat(chart: Chart, across: _XAxis, up: _YAxis) -> str:
    """One path for each of eight shades: the fuller a cell, the darker; empty cells stay empty."""
    if chart.heat is None or not chart.heat.any():
        return ""
    level = np.ceil(np.sqrt(chart.heat / chart.heat.max()) * 8).astype(int)
    wide = across.place(time_end(chart.x)) / len(chart.x)
    ys = [up.place(edge) for edge in chart.heat_edges.tolist()]
    parts = []
    for shade in range(1, 9):
        cells = "".join(
            f"M{column * wide:.1f} {ys[row]:.1f}H{(column + 1) * wide:.1f}V{ys[row + 1]:.1f}"
            f"H{column * wide:.1f}Z"
            for row, column in np.argwhere(level == shade).tolist()
        )
        if cells:
            parts.append(
                f'<path class="heat c1" style="opacity:{shade / 8 * 0.8:.2f}" d="{cells}"/>'
            )
    return "".join(parts)


def drawing(
    chart: Chart,
) -> tuple[str, list[tuple[float, str]], list[tuple[float, str]]]:
    """(SVG elements, x ticks, y ticks) of a chart with points, in coordinates of `WIDTH` x `HEIGHT`."""
    across, up = _XAxis(chart), _YAxis(chart)
    return (
        _body(chart, across, up),
        [(across.place(v), text) for v, text in across.ticks],
        [(up.place(v), text) for v, text in up.ticks],
    )


def _x_label_class(position: int, place: float, crowded: bool) -> str:
    # A label at the right end must not stick out of the page.
    return ("minor" if crowded and position % 2 else "") + (" end" if place > 0.95 * WIDTH else "")


def chart_data(chart: Chart) -> dict[str, Any]:
    """What the pointer's readout needs, numbers cut to four digits."""
    return {
        "x": [_cut(v) for v in chart.x.tolist()],
        "end": time_end(chart.x) if chart.x_kind == "time" and len(chart.x) else None,
        "unit": chart.unit,
        "series": [
            {
                "name": plain(one.name),
                "color": one.color,
                "y": [_cut(v) for v in one.y.tolist()],
                **({"peak": [_cut(v) for v in one.peak.tolist()]} if one.peak is not None else {}),
            }
            for one in chart.series
        ],
    }


def nice_ticks(high: float, wanted: int = 5) -> list[float]:
    """Round numbers from 0 up to at least `high`, about `wanted` of them."""
    if not high > 0:
        return [0.0, 1.0]
    raw = high / wanted
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * m for m in (1, 2, 2.5, 5, 10) if size * m >= raw * 0.999)
    count = math.ceil(high / step - 1e-9)
    return [i * step for i in range(count + 1)]


def time_ticks(span_s: float, wanted: int = 7) -> list[tuple[float, str]]:
    """Round times from 0 to `span_s` with their labels, all in one unit."""
    steps = (
        1,
        2,
        5,
        10,
        15,
        30,
        60,
        120,
        300,
        600,
        900,
        1800,
        3600,
        7200,
        10800,
        21600,
        43200,
        86400,
    )
    raw = max(span_s, 1e-9) / wanted
    if raw <= 1:
        size = 10.0 ** math.floor(math.log10(raw))
        step = next(size * m for m in (1, 2, 5, 10) if size * m >= raw)
    else:
        step = next((s for s in steps if s >= raw), math.ceil(raw / 86400) * 86400)
    times = [i * step for i in range(int(span_s / step + 1e-9) + 1)]
    if step >= 86400:
        return [(t, f"{t / 86400:g} d") for t in times]
    if step >= 3600:
        return [(t, f"{t / 3600:g} h") for t in times]
    if step >= 60:
        return [(t, f"{t / 60:g} min") for t in times]
    if step >= 1:
        return [(t, f"{t:g} s") for t in times]
    return [(t, f"{t * 1000:.4g} ms") for t in times]


def time_end(x: FloatArray) -> float:
    """Where the time axis ends, from the middles of its equal buckets."""
    return float(x[-1] + (x[-1] - x[-2]) / 2) if len(x) > 1 else float(x[-1]) * 2


class _XAxis:
    def __init__(self, chart: Chart) -> None:
        self.log = chart.x_kind == "log_ms"
        self.low, self.high = float(chart.x[0]), float(chart.x[-1])
        if self.log:
            self.ticks = log_ticks(self.low, self.high)
        else:
            self.low, self.high = 0.0, time_end(chart.x)
            self.ticks = time_ticks(self.high)

    def place(self, value: float) -> float:
        if self.log:
            width = math.log(self.high / self.low) or 1.0
            return math.log(max(value, self.low) / self.low) / width * WIDTH
        return (value - self.low) / (self.high - self.low or 1.0) * WIDTH


class _YAxis:
    def __init__(self, chart: Chart) -> None:
        values = [one.y for one in chart.series] + [
            one.peak for one in chart.series if one.peak is not None
        ]
        together = np.concatenate(values)
        together = together[np.isfinite(together)]
        top = float(together.max()) if chart.y_max is None else chart.y_max
        self.log = False
        if chart.heat is not None:
            self.log = True
            self.low, self.high = float(chart.heat_edges[0]), float(chart.heat_edges[-1])
            self.ticks = log_ticks(self.low, self.high, decades_only=self.high > 20 * self.low)
            return
        if chart.y_log:
            positive = together[together > 0]
            if len(positive) and positive.max() / positive.min() > 20:
                self.log = True
                self.low = 10 ** math.floor(math.log10(float(positive.min())))
                self.high = 10 ** math.ceil(math.log10(float(positive.max())))
                self.ticks = log_ticks(self.low, self.high, decades_only=True)
                return
        marks = nice_ticks(top)
        self.low, self.high = 0.0, marks[-1]
        self.ticks = [(v, _tick(v)) for v in marks]

    def place(self, value: float) -> float:
        if self.log:
            share = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        else:
            share = value / self.high
        return HEIGHT * (1 - min(max(share, 0.0), 1.0))


def log_ticks(low: float, high: float, decades_only: bool = False) -> list[tuple[float, str]]:
    """1, 2, 5 per decade of milliseconds between low and high, as time labels; fewer over many decades."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1,) if decades_only or len(decades) > 4 else (1, 2, 5)
    values = [f * 10.0**d for d in decades for f in factors]
    inside = [v for v in values if low * 0.999 <= v <= high * 1.001]
    return [(v, _ms(v)) for v in inside or [low, high]]


def _curves(chart: Chart, across: _XAxis, up: _YAxis) -> str:
    xs = [across.place(v) for v in chart.x.tolist()]
    parts: list[str] = []
    floor = np.zeros(len(chart.x))
    for one in chart.series:
        if one.style == "area":
            top = floor + np.nan_to_num(one.y)
            outline = _path(xs, top, up) + _path(xs[::-1], floor[::-1], up).replace("M", "L", 1)
            parts.append(f'<path class="fill c{one.color}" d="{outline}Z"/>')
            floor = top
            continue
        if one.style == "bars":
            parts.append(f'<path class="fill c{one.color}" d="{_bars(xs, one.y, up)}"/>')
            continue
        if one.peak is not None:
            band = _band(xs, one.peak, one.y, up)
            parts.append(f'<path class="band c{one.color}" d="{band}"/>')
        dash = " dash" if one.style == "dash" else ""
        parts.append(f'<path class="line c{one.color}{dash}" d="{_path(xs, one.y, up)}"/>')
    return "".join(parts)


def _path(xs: Sequence[float], ys: FloatArray, up: _YAxis) -> str:
    """A polyline that breaks where there is nothing; a lone point becomes a dash."""
    parts: list[str] = []
    pen_up = True
    for i, (x, y) in enumerate(zip(xs, ys.tolist(), strict=True)):
        if not math.isfinite(y):
            pen_up = True
            continue
        alone = pen_up and (i + 1 == len(xs) or not math.isfinite(ys[i + 1]))
        # A lone point is drawn as a dash that can be seen on a phone.
        at = x - 6 if alone else x
        parts.append(f"{'M' if pen_up else 'L'}{at:.1f} {up.place(y):.1f}")
        if alone:
            parts.append("h12")
        pen_up = False
    return "".join(parts)


def _band(xs: Sequence[float], top: FloatArray, floor: FloatArray, up: _YAxis) -> str:
    """The room between two curves, a closed outline for each stretch where both exist."""
    there = np.isfinite(top) & np.isfinite(floor)
    turns = np.flatnonzero(np.diff(there.astype(int), prepend=0, append=0))
    parts: list[str] = []
    for begin, end in zip(turns[::2].tolist(), turns[1::2].tolist(), strict=True):
        there_and_back = [*range(begin, end), *range(end - 1, begin - 1, -1)]
        heights = [*top[begin:end].tolist(), *floor[begin:end][::-1].tolist()]
        points = " ".join(
            f"{xs[i]:.1f} {up.place(y):.1f}" for i, y in zip(there_and_back, heights, strict=True)
        )
        parts.append(f"M{points}Z")
    return "".join(parts)


def _bars(xs: Sequence[float], ys: FloatArray, up: _YAxis) -> str:
    width = max(2.0, (xs[1] - xs[0]) * 0.8 if len(xs) > 1 else 20.0)
    return "".join(
        f"M{x - width / 2:.1f} {HEIGHT}V{up.place(y):.1f}h{width:.1f}V{HEIGHT}Z"
        for x, y in zip(xs, np.nan_to_num(ys).tolist(), strict=True)
        if y > 0
    )


def _tick(value: float) -> str:
    if value >= 1e6:
        return f"{value / 1e6:g}M"
    if value >= 1e4:
        return f"{value / 1e3:g}k"
    return f"{value:g}"


def _ms(value: float) -> str:
    if value >= 1000:
        return f"{value / 1000:g} s"
    if value >= 0.999:
        return f"{value:.4g} ms"
    return f"{value * 1000:.3g} µs"


def _cut(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    short = float(f"{value:.4g}")
    return int(short) if short.is_integer() else short
