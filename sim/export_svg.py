"""Each plot of the report as an SVG file of its own, with words inside, for slides and papers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vsim.sim import report_series
from vsim.sim.report_svg import HEIGHT, WIDTH, Chart, drawing, esc
from vsim.sim.run import Run
from vsim.sim.timeline import StepClock

LEFT, TOP, RIGHT, BOTTOM = 70, 58, 20, 34
WIDE, HIGH = 760, 300
STYLE = (
    "text{font:13px 'DejaVu Sans',Helvetica,Arial,sans-serif;fill:#1c2430}.soft{fill:#5b6675;font-size:12px}"
    "path{vector-effect:non-scaling-stroke;fill:none}.grid{stroke:#d9dee5}"
    ".line{stroke:currentColor;stroke-width:1.6;stroke-linejoin:round}.dash{stroke-dasharray:5 3}"
    ".band{fill:currentColor;opacity:.18}.fill{fill:currentColor;opacity:.75}.heat{fill:currentColor}.limit{stroke:#9a3412}"
    ".c1{color:#2563eb}.c2{color:#c2570c}.c3{color:#047857}.c4{color:#9333ea}.c5{color:#64748b}"
)


def render_svgs(run: Run, summary: Mapping[str, Any]) -> dict[str, str]:
    """Chart id -> a standalone SVG document, of every chart that has something to draw."""
    found = report_series.charts(run, summary, StepClock(run))
    return {chart.id: render_svg(chart) for chart in found if len(chart.x)}


def render_svg(chart: Chart) -> str:
    """One chart with title, legend and axes, on white."""
    body, x_ticks, y_ticks = drawing(chart)
    plot_wide, plot_high = WIDE - LEFT - RIGHT, HIGH - TOP - BOTTOM
    parts = [
        f'<text x="{LEFT}" y="20" font-weight="bold">{esc(chart.title)}'
        f'<tspan class="soft" dx="8" font-weight="normal">{esc(chart.unit)}</tspan></text>'
    ]
    across = LEFT
    for one in chart.series:
        parts.append(
            f'<path class="line c{one.color}" d="M{across} 40h16"/>'
            f'<text class="soft" x="{across + 21}" y="44">{esc(one.name)}</text>'
        )
        across += 40 + 8 * len(one.name)
    parts.append(
        f'<svg x="{LEFT}" y="{TOP}" width="{plot_wide}" height="{plot_high}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none">{body}</svg>'
    )
    for place, label in y_ticks:
        y = TOP + place / HEIGHT * plot_high + 4
        parts.append(
            f'<text class="soft" text-anchor="end" x="{LEFT - 8}" y="{y:.1f}">{esc(label)}</text>'
        )
    for place, label in x_ticks:
        x = LEFT + place / WIDTH * plot_wide
        anchor = "end" if place > 0.97 * WIDTH else "middle"
        parts.append(
            f'<text class="soft" text-anchor="{anchor}" x="{x:.1f}" y="{HIGH - 12}">{esc(label)}</text>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {HIGH}" width="{WIDE}" '
        f'height="{HIGH}"><style>{STYLE}</style><rect width="100%" height="100%" fill="#ffffff"/>'
        f"{''.join(parts)}</svg>\n"
    )
