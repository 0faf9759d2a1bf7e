"""What happened to the fleet itself, for summary.json and the table."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

import numpy as np

from vsim.sim.run import ABORTED, Run
from vsim.sim.text import number, plain, short

MAX_EVENTS = 12  # shown in the table; summary.json has all
WORDS = {
    "replica_down": "replica {} fails",
    "replica_up": "replica {} is back",
    "replica_asked_for": "replica {} is asked for",
    "replica_ready": "replica {} is ready",
    "replica_leaves": "replica {} gets nothing new and leaves",
    "replica_gone": "replica {} is gone",
    "drain_begins": "replica {} gets nothing new",
    "drained": "replica {} is drained",
    "drain_ends": "replica {} gets requests again",
}


def fleet_summary(run: Run) -> dict[str, Any]:
    """Keys to put beside `summarize`'s; none for a run without a fleet file."""
    if "fleet" not in run.config:
        return {}
    found: dict[str, Any] = {
        "aborted_reasons": _aborted_reasons(run),
        "events": [
            {"at_s": e.at_ns / 1e9, "kind": e.kind, "replica": e.replica, "text": e.text}
            for e in run.events
        ],
    }
    attempts = run.requests.get("attempts")
    if attempts is not None:
        found["retried_requests"] = int((attempts > 1).sum())
        found["attempts"] = int(attempts.sum())
    if "kv_transfers" in run.counters:
        count, blocks = run.counters["kv_transfers"], run.counters["kv_transferred_blocks"]
        block_bytes = run.config.get("kv_cache", {}).get("bytes_per_block")
        found["kv_transfers"] = count
        found["kv_transferred_blocks"] = blocks
        found["kv_transferred_bytes"] = None if block_bytes is None else blocks * block_bytes
        found["mean_kv_transfer_ms"] = (
            run.counters["kv_transfer_ns"] / 1e6 / count if count else None
        )
    for name in ("lost_tokens", "lost_output_tokens"):
        if name in run.counters:
            found[name] = run.counters[name]
    return found


def _aborted_reasons(run: Run) -> dict[str, int]:
    """Requests that broke off in the fleet, by reason; clients that left by themselves have none."""
    reason = run.requests["reason"][run.requests["status"] == ABORTED]
    codes, counts = np.unique(reason[reason >= 0], return_counts=True)
    return {run.reasons[c]: int(k) for c, k in zip(codes.tolist(), counts.tolist(), strict=True)}


def fleet_rows(s: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(label, value) of what retries and failures did."""
    rows = []
    if "attempts" in s:
        rows.append(("Requests tried again:", number(s["retried_requests"])))
    if "kv_transfers" in s:
        rows.append(("Prompts handed from prefill to decode:", number(s["kv_transfers"])))
        if s["kv_transferred_bytes"] is not None:
            sent = s["kv_transferred_bytes"] / 1e9
            rows.append(("KV handed over (GB per GPU):", number(sent, 3)))
        rows.append(
            ("  mean transfer, its turn not counted (ms):", short(s["mean_kv_transfer_ms"]))
        )
    if "lost_tokens" in s:
        rows.append(("Tokens computed for nothing (failures):", number(s["lost_tokens"])))
        rows.append(("  of them said and lost:", number(s["lost_output_tokens"])))
    rows += [(f"{plain(why)}:", number(count)) for why, count in s["aborted_reasons"].items()]
    return rows


def event_lines(s: Mapping[str, Any], width: int) -> list[str]:
    """Events in words, one a line."""
    events = s["events"]
    lines = []
    for event in events[:MAX_EVENTS]:
        words = WORDS.get(event["kind"], event["kind"]).format(event["replica"])
        text = f": {event['text']}" if event["text"] else ""
        line = f"{event['at_s']:>10,.1f} s  {plain(words)}{plain(text)}"
        lines += textwrap.wrap(line, width, subsequent_indent=" " * 14, drop_whitespace=False)
    if len(events) > MAX_EVENTS:
        lines.append(f"{'':14}{len(events) - MAX_EVENTS} more events in summary.json")
    return lines
