"""The report's account of where the time went, of all requests and of the slowest."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from vsim.errors import UserError
from vsim.sim import advice_stored
from vsim.sim.explain import PARTS, Explanation, explain_tail
from vsim.sim.report_svg import esc
from vsim.sim.run import FINISHED, Run
from vsim.sim.text import number, percent

TAIL = 99.0
FEWEST = 20  # finished requests below which a tail means nothing


def causes(run: Run) -> str:
    """A table of the parts of end-to-end latency, or empty text where nothing is known of them."""
    if int((run.requests["status"] == FINISHED).sum()) < FEWEST:
        return ""
    try:
        found = explain_tail(run, TAIL)
    except UserError:  # a run without steps: measured by a client only
        return ""
    return _table(found) + _culprits(found)


def _table(found: Explanation) -> str:
    everyone, slowest = sum(found.usual_ns.values()), found.total_ns
    rows = "".join(
        f"<tr><th scope=row>{esc(words)}</th>{_cells(found.usual_ns[key], everyone)}"
        f"{_cells(found.parts_ns[key], slowest)}</tr>"
        for key, words in PARTS
        if found.usual_ns[key] or found.parts_ns[key]
    )
    sums = f"<td>{_ms(everyone)}</td><td class=origin></td><td>{_ms(slowest)}</td><td class=origin></td>"
    return (
        "<div class=scroll><table class=numbers><thead><tr><th>mean of a request, ms</th>"
        f"<th>all</th><th class=origin></th><th>slowest {number(len(found.rows))}</th>"
        "<th class=origin></th></tr></thead>"
        f"<tbody>{rows}<tr><th scope=row>end-to-end latency</th>{sums}</tr></tbody></table></div>"
    )


def _cells(part_ns: float, total_ns: float) -> str:
    return f"<td>{_ms(part_ns)}</td><td class=origin>{percent(part_ns / total_ns if total_ns else None)}</td>"


def _ms(ns: float) -> str:
    value = ns / 1e6
    return f"{value:,.0f}" if value >= 1000 else f"{value:,.1f}"


def _culprits(found: Explanation) -> str:
    if not found.culprits:
        return ""
    named = "; ".join(
        f"request {one.request}{f' of {one.tenant}' if one.tenant else ''} with "
        f"{number(one.computed_tokens)} tokens"
        for one in found.culprits
    )
    return (
        f"<p class=note>Long prompts prefilled while the slowest were in flight: {esc(named)}.</p>"
    )


def what_would_help(summary: Mapping[str, Any]) -> str:
    """A table of the changes that were simulated, or empty text where none was."""
    tried = advice_stored.trials(summary)
    if not tried:
        return ""
    # Of the requests that finished both ways: not always the same ones.
    (_, (e2el, _, ttft, _)), *_ = tried
    rows = f"<tr class=base><th scope=row>as it was</th>{_tail(e2el)}{_tail(ttft)}</tr>"
    rows += "".join(
        f"<tr><th scope=row>{flags(esc(words))}</th>{_tail(values[1], values[0])}"
        f"{_tail(values[3], values[2])}</tr>"
        for words, values in tried
    )
    return (
        "<div class=scroll><table class=numbers><thead><tr><th>one change, simulated</th>"
        f"<th>E2EL, ms</th><th>TTFT, ms</th></tr></thead><tbody>{rows}</tbody></table></div>"
        "<p class=note>Means of the slowest 5 % of the requests that finished both ways.</p>"
    )


def flags(text: str) -> str:
    """HTML in which a flag stays in one piece."""
    return re.sub(r"(--[a-z][a-z-]+)", r"<span class=flag>\1</span>", text)


def _tail(ms: float | None, before: float | None = None) -> str:
    if ms is None:
        return "<td>–</td>"
    change = f"<small>{round(ms / before * 100) - 100:+d} %</small>" if before else ""
    return f"<td>{_ms(ms * 1e6)}{change}</td>"
