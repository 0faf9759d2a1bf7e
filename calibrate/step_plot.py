"""Predicted against measured steps, as one SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

# phase -> (legend, colour); colours keep apart for the colour-blind and on dark paper.
PHASES = {
    "grid": ("designed grid", "#0072b2"),
    "train": ("serving run, fitted", "#cc79a7"),
    "serve": ("serving run, held out", "#d55e00"),
    "spot": ("spot check", "#009e73"),
}
SIZE, LEFT, TOP, SPAN = 640, 70, 46, 520
MOST_POINTS = 4000  # a phase; more only makes the file heavy


def step_plot(points: Sequence[tuple[str, float, float]], title: str) -> str:
    """An SVG of (phase, measured seconds, predicted seconds) on log axes, with the line of equality.

    Raises ValueError for no points or a time that is not positive.
    """
    times = [t for _, measured, predicted in points for t in (measured, predicted)]
    if not times or min(times) <= 0:
        raise ValueError("a plot needs steps, and their times must be positive")
    low, high = math.log10(min(times)), math.log10(max(times))
    pad = max(0.05, (high - low) * 0.04)
    low, high = low - pad, high + pad

    def place(seconds: float) -> float:
        return (math.log10(seconds) - low) / (high - low) * SPAN

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {SIZE} {SIZE}" role="img" '
        'font-family="system-ui, sans-serif" font-size="13">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{SIZE}" height="{SIZE}" fill="#fff"/>',
        f'<text x="{LEFT}" y="22" font-size="15">{escape(title)}</text>',
        f'<rect x="{LEFT}" y="{TOP}" width="{SPAN}" height="{SPAN}" fill="none" stroke="#999"/>',
    ]
    for seconds in _ticks(low, high):
        at = place(seconds)
        label = f"{seconds * 1e3:g}"
        x, y = LEFT + at, TOP + SPAN - at
        parts += [
            f'<path d="M{x:.1f} {TOP}V{TOP + SPAN}M{LEFT} {y:.1f}H{LEFT + SPAN}" stroke="#e5e5e5"/>',
            f'<text x="{x:.1f}" y="{TOP + SPAN + 18}" text-anchor="middle">{label}</text>',
            f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>',
        ]
    parts.append(
        f'<path d="M{LEFT} {TOP + SPAN}L{LEFT + SPAN} {TOP}" stroke="#444" stroke-dasharray="5 4"/>'
    )
    shown = [phase for phase in PHASES if any(p == phase for p, _, _ in points)]
    for row, phase in enumerate(shown):
        legend, colour = PHASES[phase]
        mine = [(m, p) for name, m, p in points if name == phase]
        every = -(-len(mine) // MOST_POINTS)
        marks = "".join(
            f'<circle cx="{LEFT + place(m):.1f}" cy="{TOP + SPAN - place(p):.1f}" r="2.5"/>'
            for m, p in mine[::every]
        )
        y = TOP + 18 + 20 * row
        parts += [
            f'<g fill="{colour}" fill-opacity=".55">{marks}</g>',
            f'<circle cx="{LEFT + 16}" cy="{y - 4}" r="5" fill="{colour}"/>',
            f'<text x="{LEFT + 28}" y="{y}">{legend} ({len(mine):,} steps)</text>',
        ]
    middle = TOP + SPAN / 2
    parts += [
        f'<text x="{LEFT + SPAN / 2}" y="{SIZE - 20}" text-anchor="middle">measured, ms</text>',
        f'<text transform="translate(18 {middle}) rotate(-90)" text-anchor="middle">predicted, ms</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 of each decade between 10^low and 10^high; fewer if that is many."""
    decades = range(math.floor(low), math.ceil(high) + 1)
    steps = (1, 2, 5) if high - low < 3 else (1,)
    found = [step * 10.0**decade for decade in decades for step in steps]
    return [t for t in found if low <= math.log10(t) <= high]
