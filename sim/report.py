"""report.html: one self-contained page of a run, from the same numbers as summary.json."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

from vsim.sim import advice_stored, report_anomalies, report_causes, report_series, report_tables
from vsim.sim.bill import bill_rows
from vsim.sim.fleet.report import events_table
from vsim.sim.report_svg import Chart, chart_data, esc, render_chart
from vsim.sim.run import Run
from vsim.sim.summary import setting
from vsim.sim.timeline import StepClock

if TYPE_CHECKING:
    from vsim.sim.compare import Side

# Nothing may be loaded from anywhere, whatever a trace's strings contain.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def render_report(run: Run, summary: Mapping[str, Any], measured: Side | None = None) -> str:
    """The page as text, with a table of prediction against `measured` where there is one. The same run gives the same bytes; nothing in it is loaded from elsewhere.

    Its size does not grow with the run: every series is cut down to a few hundred points. Strings from
    traces and configurations are escaped.
    """
    clock = StepClock(run)
    found = report_series.charts(run, summary, clock)
    notable = report_anomalies.anomalies(run, summary, clock)
    words = report_anomalies.story(run, summary, clock, notable)
    sections = []
    if notable:
        sections.append(_section("Worth a look", report_tables.anomalies_table(notable)))
    if tried := report_causes.what_would_help(summary):
        sections.append(_section("What would help", tried))
    if measured is not None:
        sections.append(
            _section("Prediction against measurement", _against(run, summary, measured))
        )
    if accounted := report_causes.causes(run):
        sections.append(_section("Where the time went", accounted))
    sections += [
        _section("Latency", report_tables.latency_table(summary) + _grid(found, _LATENCY)),
    ]
    if over_time := _grid(found, _TIMELINES):
        sections.append(_section("Load and KV cache over time", over_time))
    sections.append(_section("Totals", report_tables.engine_table(summary)))
    if "gpu_hours" in summary:
        rows = [(label.rstrip(":"), value) for label, value in bill_rows(summary)]
        if "prices" in summary:
            rows.append(("Prices", summary["prices"].removeprefix("Prices: ")))
        sections.append(_section("GPU time and cost", report_tables.two_columns(rows)))
    if reasons := report_tables.reasons_table(summary):
        sections.append(_section("Rejected requests", reasons))
    if events := events_table(run):
        sections.append(_section("Fleet events", events))
    if replicas := report_tables.replicas_table(run):
        sections.append(_section("Replicas", replicas))
    if tenants := report_tables.tenants_table(run):
        sections.append(_section("Tenants", tenants))
    sections += [
        _section("Trace", report_tables.two_columns(report_tables.trace_facts(run))),
        _section("Configuration", report_tables.settings_table(run.config)),
        _section("Provenance", report_tables.settings_table(run.provenance)),
    ]
    if run.counters:
        sections.append(_section("Counters", report_tables.settings_table(run.counters)))
    kind = "Measured run" if run.origin == "measured" else "Simulated run"
    title = " on ".join(
        str(part)
        for part in (setting(run.config, "model"), setting(run.config, "gpu"))
        if part is not None
    )
    return page(title or kind, kind, _head(run, summary, words), sections, found)


def _against(run: Run, summary: Mapping[str, Any], measured: Side) -> str:
    """What was predicted beside what was measured, with the signed error."""
    # Imported here: the comparison's page is drawn with this module's `page`.
    from vsim.sim.compare import Side, compare
    from vsim.sim.compare_page import differences_table

    predicted = Side("predicted", dict(summary), run)
    table = differences_table(compare(measured, predicted), "measured", "predicted", judged=False)
    note = (
        f"Measured: {measured.name}. The interval is of the change, by block bootstrap over the requests in "
        "order of arrival; * where it excludes 0. A prediction and a run of other requests differ for that alone."
    )
    return f"{table}<p class=note>{esc(note)}</p>"


_LATENCY = ("cdf-request", "cdf-token", "ttft-time", "tpot-time", "e2el-time", "ttft-heat")
_TIMELINES = (
    "queue",
    "kv",
    "fragmentation",
    "fragmentation-share",
    "throughput",
    "batch",
    "rate",
    "trouble",
    "fleet",
)


def _head(run: Run, summary: Mapping[str, Any], sentences: Sequence[str]) -> str:
    """What happened, in words and in the main numbers."""
    told = advice_stored.sentences(summary)
    happened = [s for s in sentences if s not in told]
    # What binds and what would help stand in the first paragraph, the rest of what happened below it.
    lead = [*happened[:2], *told] if told else happened
    more = _prose(happened[2:], ()) if told else ""
    early = (
        f'<p class=warning role="alert">Ended early: {esc(run.ended_early)}</p>'
        if run.ended_early
        else ""
    )
    return (
        f"{early}<p class=lead>{_prose(lead, advice_stored.key_sentences(summary))}</p>"
        f"{f'<p class=more>{more}</p>' if more else ''}{_assumptions(run.assumptions)}"
        f"<div class=tiles>{report_tables.tiles(summary)}</div>"
    )


def _prose(sentences: Sequence[str], key: Sequence[str]) -> str:
    """Sentences as HTML, those in `key` in bold."""
    words = " ".join(f"<b>{esc(s)}</b>" if s in key else esc(s) for s in sentences)
    # A number stays on one line with its unit.
    words = re.sub(r"(\d) (%|ms|s|min|h)(?![\w/])", "\\1\N{NO-BREAK SPACE}\\2", words)
    return report_causes.flags(words)


def page(title: str, kind: str, head: str, sections: Sequence[str], charts: Sequence[Chart]) -> str:
    """A self-contained page. `head` and `sections` are HTML; `title` and `kind` are text."""
    data = {chart.id: chart_data(chart) for chart in charts if len(chart.x)}
    # "<" never occurs in the data block: no string in it can close the script.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return (
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{esc(title)} – vsim</title><style>{_asset('report.css')}</style></head>\n"
        f"<body><header><p class=kind>{esc(kind)} · vsim</p><h1>{esc(title)}</h1>{head}</header>\n"
        "<main>"
        + "\n".join(sections)
        + "</main>\n<footer>Latencies are on the client's clock and defined as in "
        "<code>vllm bench serve</code>: TTFT and E2EL start when the client sends.</footer>"
        f'<script type="application/json" id=data>{text}</script>'
        f"<script>{_asset('report.js')}</script></body></html>\n"
    )


def _section(title: str, body: str) -> str:
    return f"<section><h2>{esc(title)}</h2>{body}</section>"


def _grid(found: Sequence[Chart], ids: Sequence[str]) -> str:
    shown = [render_chart(chart) for chart in found if chart.id in ids]
    return f"<div class=grid2>{''.join(shown)}</div>" if shown else ""


def _assumptions(sentences: Sequence[str]) -> str:
    """What the numbers rest on, right below them: open, unless it would fill the screen."""
    if not sentences:
        return ""
    items = "".join(f"<li>{esc(sentence)}</li>" for sentence in sentences)
    count = "1 assumption" if len(sentences) == 1 else f"{len(sentences)} assumptions"
    state = " open" if len(sentences) <= 5 else ""
    return (
        f"<details{state}><summary>{count} behind these numbers</summary><ul>{items}</ul></details>"
    )


def _asset(name: str) -> str:
    return resources.files("vsim.sim").joinpath(name).read_text(encoding="utf-8").strip()
