"""Trace facts as one self-contained HTML page: inline SVG, no script, no network."""

from __future__ import annotations

import html
from typing import Any

from vsim.traces.facts_text import duration, number

STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --paper: #ffffff; --soft: #667085; --bar: #2f6fde; --grid: #d8dde6 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ef; --paper: #14181f; --soft: #98a2b3; --bar: #6ea0ff; --grid: #333b48 } }
body { margin: 0 auto; max-width: 60rem; padding: 1rem; font: 15px/1.5 system-ui, sans-serif;
  color: var(--ink); background: var(--paper) }
h1 { font-size: 1.3rem; overflow-wrap: anywhere } h2 { font-size: 1.05rem; margin-top: 2rem }
svg { width: 100%; height: auto; display: block } .bar { fill: var(--bar) } .axis { stroke: var(--grid) }
svg text { fill: var(--soft); font-size: 11px }
@media (max-width: 32rem) { svg text { font-size: 19px } }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-variant-numeric: tabular-nums }
td, th { padding: .15rem .6rem; text-align: right; border-bottom: 1px solid var(--grid) }
td:first-child, th:first-child { text-align: left } p.soft, li { color: var(--soft); overflow-wrap: anywhere }
"""
WIDTH, HEIGHT, LEFT, BOTTOM = 720, 200, 56, 28


def page(facts: dict[str, Any]) -> str:
    """The page. Everything that comes from the file is escaped."""
    source, rate = facts["source"], facts["rate"]
    over = rate["over_time"]
    lengths = facts["lengths"]
    parts = [
        f"<h1>{_safe(source['name'])}</h1>",
        f"<p>{facts['requests']:,} requests over {_safe(duration(facts['span_s']))}, read as {_safe(source['format'])}; "
        f"mean {_safe(number(rate['mean_per_s']))} req/s, peak {_safe(number(rate['peak_1s_per_s']))} in one second.</p>",
        "<h2>Requests over time</h2>",
        _bars(
            [value / over["window_s"] for value in over["requests"]],
            "requests per second",
            ("0", duration(over["window_s"] * len(over["requests"]))),
        ),
        "<h2>Burstiness</h2>",
        _bursts(facts["burstiness"]),
        "<h2>Lengths in tokens</h2>",
        _quantiles(lengths),
        "<h2>Prompt lengths</h2>",
        _powers([sum(row) for row in lengths["joint"]["counts"]]),
        "<h2>Output lengths</h2>",
        _powers([sum(column) for column in zip(*lengths["joint"]["counts"], strict=True)]),
        "<h2>Joint shape</h2>",
        _heat(lengths["joint"]["counts"]),
        *_prefix(facts["prefix"]),
        *_tenants(facts["tenants"]),
        "<h2>What was assumed and left out</h2>",
        _list(
            [
                *(f"{count:,} {reason}" for reason, count in facts["dropped"].items()),
                *facts["assumptions"],
            ]
        ),
        f"<p class=soft>sha256 {_safe(source['sha256'])}</p>",
    ]
    title = _safe(source["name"])
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Trace {title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head><body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _safe(value: object) -> str:
    return html.escape(str(value))


def _list(items: list[str]) -> str:
    if not items:
        return "<p class=soft>Nothing: every row of the file is used as it stands.</p>"
    return "<ul>" + "".join(f"<li>{_safe(item)}</li>" for item in items) + "</ul>"


def _svg(body: str, label: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{_safe(label)}">{body}</svg>'
    )


def _bars(
    values: list[float], label: str, ends: tuple[str, str], names: list[str] | None = None
) -> str:
    """Bars from zero up, the top value on the left, the ends of the axis below."""
    top = max(values, default=0) or 1
    plot = HEIGHT - BOTTOM - 12
    step = (WIDTH - LEFT) / max(1, len(values))
    gap = 1 if step > 3 else 0
    bars = "".join(
        f'<rect class="bar" x="{LEFT + at * step:.2f}" y="{12 + plot * (1 - value / top):.2f}" '
        f'width="{max(0.5, step - gap):.2f}" height="{plot * value / top:.2f}"/>'
        for at, value in enumerate(values)
    )
    base = HEIGHT - BOTTOM
    axis = f'<line class="axis" x1="{LEFT}" x2="{WIDTH}" y1="{base}" y2="{base}"/>'
    marks = f'<text x="{LEFT - 6}" y="20" text-anchor="end">{_safe(number(top, 3))}</text><text x="{LEFT - 6}" y="{base}" text-anchor="end">0</text>'
    if names:
        marks += "".join(
            f'<text x="{LEFT + (at + 0.5) * step:.1f}" y="{HEIGHT - 10}" text-anchor="middle">{_safe(name)}</text>'
            for at, name in enumerate(names)
        )
    else:
        marks += f'<text x="{LEFT}" y="{HEIGHT - 10}">{_safe(ends[0])}</text><text x="{WIDTH}" y="{HEIGHT - 10}" text-anchor="end">{_safe(ends[1])}</text>'
    return _svg(axis + bars + marks, label) + f"<p class=soft>{_safe(label)}</p>"


def _powers(values: list[int]) -> str:
    """A histogram over powers of two, without its empty beginning."""
    first = next((at for at, value in enumerate(values) if value), 0)
    names = [f"{2**at}" if at < 10 else f"{2 ** (at - 10)}k" for at in range(first, len(values))]
    return _bars(
        [float(value) for value in values[first:]],
        "requests by length, from … tokens",
        ("", ""),
        names,
    )


def _heat(table: list[list[int]]) -> str:
    """The joint table: prompt down, output across, darker is more."""
    top = max(map(max, table)) or 1
    rows = [at for at, row in enumerate(table) if any(row)]
    columns = [at for at in range(len(table[0])) if any(row[at] for row in table)]
    head = "".join(f"<th>{2**at:,}</th>" for at in range(columns[0], columns[-1] + 1))
    body = "".join(
        f"<tr><td>{2**row:,}</td>"
        + "".join(
            f'<td style="background:color-mix(in srgb, var(--bar) {round(70 * (table[row][at] / top) ** 0.5)}%, transparent)">'
            f"{table[row][at] or ''}</td>"
            for at in range(columns[0], columns[-1] + 1)
        )
        + "</tr>"
        for row in range(rows[0], rows[-1] + 1)
    )
    return (
        f'<div class="scroll"><table><tr><th>prompt \\ output from</th>{head}</tr>{body}</table></div>'
        "<p class=soft>requests by prompt length (down) and output length (across)</p>"
    )


def _quantiles(lengths: dict[str, Any]) -> str:
    names = ("min", "p5", "p25", "p50", "p75", "p95", "p99", "p99.9", "max", "mean")
    head = "".join(f"<th>{name}</th>" for name in names)
    rows = "".join(
        f"<tr><td>{kind}</td>"
        + "".join(f"<td>{_safe(number(round(lengths[kind][name], 1)))}</td>" for name in names)
        + "</tr>"
        for kind in ("prompt", "output", "total")
    )
    return f'<div class="scroll"><table><tr><th></th>{head}</tr>{rows}</table></div>'


def _bursts(bursts: dict[str, Any]) -> str:
    rows = [
        (f"index of dispersion, {window}", value)
        for window, value in bursts["index_of_dispersion"].items()
    ]
    rows += [
        (f"autocorrelation, lag {lag} s", value)
        for lag, value in bursts["autocorrelation_1s_counts"].items()
    ]
    rows += [("Hurst estimate", bursts["hurst_1s_counts"]), ("CV of gaps", bursts["gap_cv"])]
    body = "".join(
        f"<tr><td>{_safe(name)}</td><td>{_safe(number(value, 3))}</td></tr>" for name, value in rows
    )
    return f"<table>{body}</table><p class=soft>An index of dispersion of 1 is Poisson; a Hurst estimate of 0.5 has no long memory.</p>"


def _prefix(prefix: dict[str, Any] | None) -> list[str]:
    if prefix is None:
        return []
    body = "".join(
        f"<tr><td>{_safe(size)}</td><td>{share:.2%}</td></tr>"
        for size, share in prefix["hit_ceiling"].items()
    )
    return [
        "<h2>Prefix sharing</h2>",
        f"<p>{prefix['shared_with_earlier_prompt']:.1%} of prompt tokens were seen before.</p>",
        f"<table><tr><th>block size</th><th>hit rate of an infinite cache</th></tr>{body}</table>",
    ]


def _tenants(tenants: list[dict[str, Any]]) -> list[str]:
    if not tenants:
        return []
    body = "".join(
        f"<tr><td>{_safe(item['name'])}</td><td>{item['requests']:,}</td><td>{item['prompt_tokens']:,}</td>"
        f"<td>{item['output_tokens']:,}</td></tr>"
        for item in tenants
    )
    return [
        "<h2>Tenants</h2>",
        '<div class="scroll"><table><tr><th>tenant</th><th>requests</th><th>prompt tokens</th><th>output tokens</th></tr>'
        f"{body}</table></div>",
    ]
