"""Each plot of the report as a PNG of its own: the drawing of `export_svg`, put into pixels by Pillow."""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vsim.errors import UserError
from vsim.sim import report_series
from vsim.sim.export_svg import BOTTOM, HIGH, LEFT, RIGHT, TOP, WIDE
from vsim.sim.report_svg import HEIGHT, WIDTH, Chart, drawing
from vsim.sim.run import Run
from vsim.sim.text import plain
from vsim.sim.timeline import StepClock

if TYPE_CHECKING:
    from PIL import Image, ImageDraw, ImageFont

SCALE = 2  # pixels of the file for one of the drawing
SMOOTH = 2  # and so many times finer while drawing, for smooth edges
INK, SOFT, GRID, LIMIT = (28, 36, 48), (91, 102, 117), (217, 222, 229), (154, 52, 18)
COLORS = {
    "c1": (37, 99, 235),
    "c2": (194, 87, 12),
    "c3": (4, 120, 87),
    "c4": (147, 51, 234),
    "c5": (100, 116, 139),
}
OPACITY = {"band": 0.18, "fill": 0.75}

# What Pillow's own font lacks.
SPELLED = str.maketrans({"µ": "u", "≤": "<=", "≥": ">=", "−": "-", "\N{NO-BREAK SPACE}": " "})

Point = tuple[float, float]


def render_pngs(run: Run, summary: Mapping[str, Any]) -> dict[str, bytes]:
    """Chart id -> a PNG file, of every chart that has something to draw. Raises UserError without Pillow."""
    try:
        import PIL  # noqa: F401
    except ImportError:
        raise UserError(
            'PNG needs Pillow, which is not installed: pip install "vsim[png]", or take --format svg'
        ) from None
    found = report_series.charts(run, summary, StepClock(run))
    return {chart.id: render_png(chart) for chart in found if len(chart.x)}


def render_png(chart: Chart) -> bytes:
    """One chart with title, legend and axes, on white. The same chart gives the same bytes."""
    from PIL import Image, ImageDraw, ImageFont

    unit = SCALE * SMOOTH
    image = Image.new("RGB", (WIDE * unit, HIGH * unit), "white")
    body, x_ticks, y_ticks = drawing(chart)
    wide, high = WIDE - LEFT - RIGHT, HIGH - TOP - BOTTOM

    def place(point: Point) -> Point:
        return (
            (LEFT + point[0] / WIDTH * wide) * unit,
            (TOP + point[1] / HEIGHT * high) * unit,
        )

    for kinds, opacity, path in _PATH.findall(body):
        image = _draw(image, kinds.split(), opacity, [[*map(place, p)] for p in polylines(path)])
    pen = ImageDraw.Draw(image)
    title, text = (ImageFont.load_default(size=size * unit) for size in (14, 12))
    pen.text((LEFT * unit, 8 * unit), _words(chart.title), fill=INK, font=title)
    after = LEFT * unit + pen.textlength(_words(chart.title), font=title) + 8 * unit
    pen.text((after, 10 * unit), _words(chart.unit), fill=SOFT, font=text)
    _legend(pen, chart, text)
    for at, label in y_ticks:
        x, y = place((0.0, at))
        pen.text((x - 8 * unit, y), _words(label), fill=SOFT, font=text, anchor="rm")
    for at, label in x_ticks:
        x, _ = place((at, 0.0))
        anchor = "rm" if at > 0.97 * WIDTH else "mm"
        pen.text((x, (HIGH - 16) * unit), _words(label), fill=SOFT, font=text, anchor=anchor)
    image = image.resize((WIDE * SCALE, HIGH * SCALE), Image.Resampling.LANCZOS)
    out = io.BytesIO()
    image.save(out, format="PNG", optimize=True)
    return out.getvalue()


def _words(value: str) -> str:
    return plain(value).translate(SPELLED)


_PATH = re.compile(r'<path class="([^"]*)"(?: style="opacity:([\d.]+)")? d="([^"]*)"/>')
_STEP = re.compile(r"([MLHVhZ])([^MLHVhZ]*)")


def polylines(path: str) -> Iterator[list[Point]]:
    """The strokes of a path as `report_svg` writes them: M, L, H, V, h and Z, more pairs after M."""
    points: list[Point] = []
    for letter, rest in _STEP.findall(path):
        numbers = [float(part) for part in rest.split()]
        if letter == "M":
            if points:
                yield points
            points = list(zip(numbers[::2], numbers[1::2], strict=True))
        elif letter == "L":
            points += zip(numbers[::2], numbers[1::2], strict=True)
        elif letter == "H":
            points.append((numbers[0], points[-1][1]))
        elif letter == "V":
            points.append((points[-1][0], numbers[0]))
        elif letter == "h":
            points.append((points[-1][0] + numbers[0], points[-1][1]))
        else:
            points.append(points[0])
    if points:
        yield points


def _draw(
    image: Image.Image, kinds: list[str], opacity: str, strokes: list[list[Point]]
) -> Image.Image:
    """`image` with one path of the drawing: a line, or areas that let through what is below."""
    from PIL import Image, ImageDraw

    unit = SCALE * SMOOTH
    color = next((COLORS[kind] for kind in kinds if kind in COLORS), INK)
    if "grid" in kinds or "limit" in kinds or "line" in kinds:
        pen = ImageDraw.Draw(image)
        width = round((1.6 if "line" in kinds else 1.0) * unit)
        color = GRID if "grid" in kinds else LIMIT if "limit" in kinds else color
        for stroke in strokes:
            for piece in _dashes(stroke, 5.0 * unit, 3.0 * unit) if "dash" in kinds else [stroke]:
                pen.line(piece, fill=color, width=width, joint="curve")
        return image
    mask = Image.new("L", image.size, 0)
    pen = ImageDraw.Draw(mask)
    share = float(opacity) if opacity else next(OPACITY[k] for k in kinds if k in OPACITY)
    for stroke in strokes:
        if len(stroke) > 1:
            pen.polygon(stroke, fill=round(255 * share))
    image.paste(Image.new("RGB", image.size, color), mask=mask)
    return image


def _dashes(stroke: list[Point], on: float, off: float) -> Iterator[list[Point]]:
    """The stroke cut into dashes."""
    left, drawing_now = on, True
    piece = [stroke[0]]
    for (x0, y0), (x1, y1) in itertools.pairwise(stroke):
        length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
        done = 0.0
        while length - done > left:
            done += left
            point = (x0 + (x1 - x0) * done / length, y0 + (y1 - y0) * done / length)
            if drawing_now:
                yield [*piece, point]
            piece = [point]
            drawing_now = not drawing_now
            left = on if drawing_now else off
        left -= length - done
        piece.append((x1, y1))
    if drawing_now and len(piece) > 1:
        yield piece


def _legend(pen: ImageDraw.ImageDraw, chart: Chart, font: ImageFont.FreeTypeFont | Any) -> None:
    unit = SCALE * SMOOTH
    across: float = LEFT * unit
    for one in chart.series:
        color = COLORS[f"c{one.color}"]
        pen.line([(across, 40 * unit), (across + 16 * unit, 40 * unit)], fill=color, width=2 * unit)
        name = _words(one.name)
        pen.text((across + 21 * unit, 40 * unit), name, fill=SOFT, font=font, anchor="lm")
        across += 36 * unit + pen.textlength(name, font=font)
