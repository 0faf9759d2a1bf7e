"""A comparison as text, JSON-ready data, and one self-contained page with the plots overlaid."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np

from vsim.sim import report_series
from vsim.sim.compare import Difference, Side
from vsim.sim.report import page
from vsim.sim.report_svg import Chart, Series, esc
from vsim.sim.text import number, plain
from vsim.sim.timeline import StepClock

COLORS = 5  # of report.css; more runs than that repeat them


def render_comparison(base: Side, other: Side, differences: Sequence[Difference]) -> str:
    """One comparison as plain text in 80 columns."""
    lines = [
        f"{plain(other.name)} against {plain(base.name)}",
        f"{'':<31}{'base':>11}{'other':>11}{'change':>9}  95 % interval",
    ]
    for one in differences:
        lines.append(
            f"{one.label:<31}{_value(one.base):>11}{_value(one.other):>11}{_change(one.change):>9}"
            f"{_interval(one)}"
        )
    warning = step_times_differ(base, other)
    if warning is not None:
        lines += ["", *textwrap.wrap(warning, 80, break_on_hyphens=False)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def step_times_differ(base: Side, other: Side) -> str | None:
    """A warning where the two sides' step times come from different models; None: they do not."""
    labels = [_step_times(side) for side in (base, other)]
    if labels[0] == labels[1]:
        return None
    return (
        f"Careful: step times are {labels[0]} in {plain(base.name)} and {labels[1]} in "
        f"{plain(other.name)}. Part of the change is the models' disagreement."
    )


def _step_times(side: Side) -> str:
    if side.run is None or side.run.origin == "measured":
        return "a real engine's"
    model = side.run.provenance.get("step_model", {})
    return f"from '{plain(model.get('label') or model.get('name') or 'an unnamed model')}'"


EXPLANATION = (
    "The interval is of the change, by block bootstrap over the requests in order of\n"
    "arrival; * where it excludes 0. It answers whether the difference would survive\n"
    "another sample of such traffic.\n"
)


def _value(value: float | None) -> str:
    if value is None:
        return "–"
    if isinstance(value, int) or value == 0 or abs(value) >= 1000:
        return number(round(value))
    return f"{value:.4g}"


def _change(change: float | None) -> str:
    if change is None:
        return "–"
    if abs(change) >= 10:
        return f"x{change + 1:.1f}"
    return f"{change * 100:+.1f} %" if change else "="


def _interval(one: Difference) -> str:
    if one.interval is None:
        return ""
    low, high = (
        f"{value * 100:+.1f}" if abs(value) < 1 else f"{value * 100:+.0f}" for value in one.interval
    )
    return f"  {low}..{high}{' *' if one.significant else ''}"


def comparison_data(base: Side, other: Side, differences: Sequence[Difference]) -> dict[str, Any]:
    """The same, machine-readable; changes and intervals as fractions."""
    return {
        "base": plain(base.name),
        "other": plain(other.name),
        "warning": step_times_differ(base, other),
        "metrics": {
            one.key: {
                "base": one.base,
                "other": one.other,
                "change": one.change,
                "interval": list(one.interval) if one.interval else None,
                "significant": one.significant,
            }
            for one in differences
        },
    }


def comparison_page(
    sides: Sequence[Side], comparisons: Sequence[tuple[Side, Sequence[Difference]]]
) -> str:
    """report.html's style with the runs overlaid; the first of `sides` is the base."""
    runs = [side for side in sides if side.run is not None]
    found = overlaid(runs)
    base = sides[0]
    tables = "".join(
        f"<section><h2>{esc(other.name)} against {esc(base.name)}</h2>"
        f"<p>{esc(step_times_differ(base, other) or '')}</p>{differences_table(differences)}</section>"
        for other, differences in comparisons
    )
    names = ", ".join(side.name for side in sides)
    lead = (
        "Intervals are of the change, by block bootstrap over the requests in order of arrival; a star "
        "marks those that exclude 0. They answer whether a difference would survive another sample of "
        "such traffic."
    )
    return page(
        title=f"Comparison: {names}",
        kind="Comparison",
        head=f"<p class=lead>{esc(lead)}</p>",
        sections=[tables, *_plots(found)],
        charts=found,
    )


def _plots(found: Sequence[Chart]) -> list[str]:
    from vsim.sim.report_svg import render_chart

    if not found:
        return []
    drawn = "".join(render_chart(chart) for chart in found)
    return [f"<section><h2>Overlaid</h2><div class=grid2>{drawn}</div></section>"]


def differences_table(
    differences: Sequence[Difference], base: str = "base", other: str = "other", judged: bool = True
) -> str:
    """As an HTML table; `judged`: colour says whether a change is for the better."""
    rows = "".join(
        f"<tr><th scope=row>{esc(one.label)}</th><td>{esc(_value(one.base))}</td>"
        f"<td>{esc(_value(one.other))}</td>"
        f"<td class={_judgement(one) if judged else 'same'}>"
        f"{esc(_change(one.change))}</td><td>{esc(_interval(one).strip())}</td></tr>"
        for one in differences
    )
    return (
        f"<div class=scroll><table class=numbers><thead><tr><th></th><th>{esc(base)}</th><th>{esc(other)}</th>"
        f"<th>change</th><th>95 % interval, %</th></tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _judgement(one: Difference) -> str:
    if one.better is None or one.significant is False:
        return "same"
    return "good" if one.better else "bad"


def overlaid(sides: Sequence[Side]) -> list[Chart]:
    """The report's charts with one curve a run: CDFs, TTFT and E2EL over time, waiting, KV usage."""
    per_run = []
    for side in sides:
        assert side.run is not None
        drawn = report_series.charts(side.run, side.summary, StepClock(side.run))
        per_run.append((side.name, {chart.id: chart for chart in drawn}))
    wanted = (
        ("cdf-request", "TTFT", "TTFT, CDF"),
        ("cdf-token", "TPOT", "TPOT, CDF"),
        ("cdf-request", "E2EL", "End-to-end latency, CDF"),
        ("ttft-time", "p95", "TTFT p95 by time of sending"),
        ("e2el-time", "p95", "End-to-end latency p95 by time of sending"),
        ("queue", "waiting", "Waiting requests"),
        ("kv", "allocated blocks", "KV cache usage"),
        ("throughput", "output", "Output token throughput"),
    )
    return [
        chart
        for source, series, title in wanted
        if (chart := _overlay(per_run, source, series, title)) is not None
    ]


def _overlay(
    per_run: Sequence[tuple[str, dict[str, Chart]]], source: str, series: str, title: str
) -> Chart | None:
    curves = []
    for i, (name, drawn) in enumerate(per_run):
        chart = drawn.get(source)
        own = [one for one in chart.series if one.name == series] if chart is not None else []
        if chart is not None and own and len(chart.x):
            curves.append((name, chart, own[0].y, i % COLORS + 1))
    if not curves:
        return None
    first = curves[0][1]
    log = first.x_kind == "log_ms"
    low, high = float("inf"), 0.0
    for _, chart, y, _ in curves:
        # A CDF's axis may reach far beyond this one curve: show where something happens.
        moves = np.flatnonzero((y > 0) & (y < 100)) if log else np.arange(len(y))
        if len(moves):
            low = min(low, float(chart.x[max(0, moves[0] - 1)]))
            high = max(high, float(chart.x[min(len(y) - 1, moves[-1] + 1)]))
    points = report_series.BUCKETS
    if not low < high:
        low, high = float(first.x[0]), float(first.x[-1])
    even = (np.arange(points) + 0.5) / points
    x = low * (high / low) ** even if log else even * high
    beyond = 100.0 if log else float("nan")
    return Chart(
        f"{source}-{series.split(maxsplit=1)[0]}".lower(),
        title,
        first.unit,
        x,
        [
            Series(name, np.interp(x, chart.x, y, left=0.0 if log else y[0], right=beyond), color)
            for name, chart, y, color in curves
        ],
        x_kind=first.x_kind,
        y_log=first.y_log,
        y_max=first.y_max,
    )
