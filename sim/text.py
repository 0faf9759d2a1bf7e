"""Numbers and foreign strings as a person reads them; no escape sequence gets through."""

from __future__ import annotations

import textwrap
import unicodedata
from typing import Any


def plain(value: Any) -> str:
    """`value` as one line of harmless text: control and bidirectional-override characters become `�`.

    What a trace or a configuration carries may end up in a terminal, in HTML or in Markdown.
    """
    return "".join(
        "�" if unicodedata.category(letter) in {"Cc", "Cf", "Cs"} else letter
        for letter in str(value)
    )


# What a run's own codes mean (`sim/front_end.py`, `sim/fleet/spec.py`).
REASONS = {
    "rejected_too_long": "longer than max_model_len allows",
    "rejected_queue_full": "the replica's queue was full",
    "rejected_max_num_queued_reqs": "max_num_queued_reqs was reached",
    "rejected_max_num_queued_tokens": "max_num_queued_tokens was reached",
    "rejected_fleet_queue_full": "the fleet's queue was full",
    "rejected_no_replica": "there was no replica to send it to",
    "rejected_tenant_in_flight": "the tenant had as many in flight as it may",
    "rejected_tenant_tokens": "the tenant's tokens were used up",
    "aborted_replica_failed": "the replica failed",
}


def reason(code: str) -> str:
    """Why a request was rejected or aborted, in words; what is no code of vsim's stays as it is."""
    return REASONS.get(code, plain(code))


def wrapped(text: str, indent: str = "") -> list[str]:
    """`text` in lines of at most 80 columns, words in one piece; `indent` begins all but the first."""
    return textwrap.wrap(
        plain(text), 80, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )


def number(value: float | None, digits: int = 2) -> str:
    """1234567.891 -> "1,234,567.89"; whole numbers without a point; None -> "–"."""
    if value is None:
        return "–"
    if isinstance(value, int) or float(value).is_integer():
        return f"{int(value):,}"
    return f"{value:,.{digits}f}"


def short(value: float | None) -> str:
    """Three significant digits, for headlines: 0.01234 -> "0.0123", 1234567 -> "1.23M"."""
    if value is None:
        return "–"
    size = abs(value)
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e5, "k")):
        if size >= limit:
            scale = 1e3 if unit == "k" else limit
            return f"{value / scale:.3g}{unit}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def percent(share: float | None, digits: int = 1) -> str:
    """0.1234 -> "12.3 %"; what would round to nothing -> "<0.1 %"; None -> "–"."""
    if share is None:
        return "–"
    least = 10.0**-digits
    if 0 < share * 100 < least / 2:
        return f"<{least:g} %"
    return f"{share * 100:.{digits}f} %"


def duration(seconds: float | None) -> str:
    """As said aloud: "12.3 ms", "1.24 s", "3 min 20 s", "2 h 05 min"."""
    if seconds is None:
        return "–"
    if seconds < 0.9995:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 59.95:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400 * 2:
        minutes = round(seconds / 60)
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{seconds / 86400:.1f} days"
