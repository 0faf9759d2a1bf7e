"""Advice as a run's summary keeps it: sentences and a table of what was tried."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from vsim.sim.text import plain

KEY = "advice"


def sentences(summary: Mapping[str, Any]) -> list[str]:
    """What was found, in words; empty where nothing was looked for."""
    found = summary.get(KEY)
    told = found.get("sentences") if isinstance(found, Mapping) else None
    return [plain(s) for s in told if isinstance(s, str)] if isinstance(told, list) else []


def key_sentences(summary: Mapping[str, Any]) -> list[str]:
    """Those that name a culprit, what is wrong, or the change that helps most."""
    found = summary.get(KEY)
    told = found.get("key") if isinstance(found, Mapping) else None
    places = told if isinstance(told, list) else []
    every = sentences(summary)
    return [every[i] for i in places if type(i) is int and 0 <= i < len(every)]


def trials(summary: Mapping[str, Any]) -> list[tuple[str, list[float | None]]]:
    """Each change tried: words, and ms before and after of both tails (E2EL, then TTFT)."""
    found = summary.get(KEY)
    rows = found.get("trials") if isinstance(found, Mapping) else None
    if not isinstance(rows, list):
        return []
    return [
        (plain(row.get("change", "")), [_ms(row, *path) for path in _COLUMNS])
        for row in rows
        if isinstance(row, Mapping)
    ]


_COLUMNS = (
    ("before", "e2el_ms"),
    ("after", "e2el_ms"),
    ("before", "ttft_ms"),
    ("after", "ttft_ms"),
)


def _ms(row: Mapping[str, Any], side: str, name: str) -> float | None:
    part = row.get(side)
    value = part.get(name) if isinstance(part, Mapping) else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def advice_text(summary: Mapping[str, Any]) -> str:
    """The sentences in 80 columns, or nothing."""
    told = sentences(summary)
    if not told:
        return ""
    return "\n".join(textwrap.wrap(" ".join(told), 80, break_on_hyphens=False)) + "\n"
