"""A run as Markdown, for a pull request or an issue."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from vsim.sim.bill import bill_rows
from vsim.sim.metrics import percentile_word
from vsim.sim.report_anomalies import anomalies, story
from vsim.sim.report_tables import flatten
from vsim.sim.run import Run
from vsim.sim.summary import interval, setting
from vsim.sim.table import LATENCIES, engine_rows, headline
from vsim.sim.text import plain
from vsim.sim.timeline import StepClock

# What starts markup, HTML, a mention or an issue's number in GitHub's Markdown, wherever it stands.
_SPECIAL = "\\`*_[]<>#|@~&"


def md(value: Any) -> str:
    """Any text from outside as plain words of Markdown: special characters become entities."""
    text = "".join(f"&#{ord(c)};" if c in _SPECIAL else c for c in plain(value))
    # GitHub turns bare addresses into links.
    return re.sub(r"(?i)(?<=www)\.|:(?=//)", lambda found: f"&#{ord(found[0])};", text)


def render_markdown(run: Run, summary: Mapping[str, Any]) -> str:
    """Title, what happened, latency and engine tables, assumptions, and the configuration folded away."""
    title = " on ".join(
        md(part)
        for part in (setting(run.config, "model"), setting(run.config, "gpu"))
        if part is not None
    )
    kind = "Measured run" if run.origin == "measured" else "Simulated run"
    clock = StepClock(run)
    told = story(run, summary, clock, anomalies(run, summary, clock))
    words = " ".join(md(sentence) for sentence in told)
    lines = [f"### {kind}{': ' + title if title else ''}", "", words, ""]
    if label := _step_model(run):
        lines += [f"Step time: {md(label)}", ""]
    lines += _latency_table(summary)
    bill = bill_rows(summary) if "gpu_hours" in summary else []
    lines += ["", "| | |", "|---|---:|"]
    lines += [
        f"| {md(label.rstrip(':'))} | {md(value)} |"
        for label, value in (*headline(summary), *engine_rows(summary), *bill)
    ]
    if run.assumptions:
        lines += ["", "Assumptions", ""] + [f"- {md(sentence)}" for sentence in run.assumptions]
    settings = flatten(run.config)
    if settings:
        lines += ["", "<details><summary>Configuration</summary>", "", "| | | |", "|---|---|---|"]
        lines += [f"| {md(n)} | {md(v)} | {md(o)} |" for n, v, o in settings]
        lines += ["", "</details>"]
    return "\n".join(lines) + "\n"


def _step_model(run: Run) -> str:
    """Which model the step times came from, as `vsim replay` says it; a measured run has none."""
    says = run.provenance.get("step_model")
    label = says.get("label") if isinstance(says, Mapping) else None
    return label if isinstance(label, str) else ""


def _latency_table(s: Mapping[str, Any]) -> list[str]:
    statistics = ["mean", *(f"p{percentile_word(p)}" for p in s["percentiles"])]
    lines = [f"| ms | {' | '.join(statistics)} |", "|---|" + "---:|" * len(statistics)]
    for name, short, _ in LATENCIES:
        cells = (s.get(f"{which}_{name}_ms") for which in statistics)
        shown = " | ".join("–" if cell is None else f"{cell:,.2f}" for cell in cells)
        lines.append(f"| {short} | {shown} |")
        bars = [interval(s, f"{which}_{name}_ms") for which in statistics]
        if any(bars):
            shown = " | ".join(
                "–" if bar is None else f"{bar[0]:,.4g} to {bar[1]:,.4g}" for bar in bars
            )
            lines.append(f"| {short}, {s['intervals']['level']:.0%} | {shown} |")
    if s.get("intervals"):
        lines += ["", md(s["intervals"]["source"])]
    return lines
