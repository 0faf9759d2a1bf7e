"""What happened to the fleet itself, for summary.json and the table."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

import numpy as np

from vsim.sim import metrics
from vsim.sim.run import ABORTED, FINISHED, REJECTED, Run
from vsim.sim.text import number, plain, reason, short

MAX_TENANTS = 8
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
    if len(np.unique(run.requests["tenant"])) > 1:
        found["per_tenant"] = _per_tenant(run)
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


def _per_tenant(run: Run) -> list[dict[str, Any]]:
    """Each tenant's requests, how they ended and how long they took; busiest first."""
    tenant, status = run.requests["tenant"], run.requests["status"]
    codes, counts = np.unique(tenant, return_counts=True)
    span_s = metrics.duration_ns(run) / 1e9
    rows = []
    for code, count in sorted(
        zip(codes.tolist(), counts.tolist(), strict=True), key=lambda c: -c[1]
    ):
        mine = tenant == code
        done = mine & (status == FINISHED)
        latency = metrics.latencies(run, mine)
        tokens = int(run.requests["output_tokens"][done].sum())
        rows.append(
            {
                "tenant": run.tenant_names[code]
                if 0 <= code < len(run.tenant_names)
                else str(code),
                "requests": count,
                "completed": int(done.sum()),
                "rejected": int((mine & (status == REJECTED)).sum()),
                "aborted": int((mine & (status == ABORTED)).sum()),
                "p95_ttft_ms": metrics.stats(latency.ttft_ns, (95.0,)).percentiles[0][1],
                "p95_tpot_ms": metrics.stats(latency.tpot_ns, (95.0,)).percentiles[0][1],
                "p95_e2el_ms": metrics.stats(latency.e2el_ns, (95.0,)).percentiles[0][1],
                "output_throughput": tokens / span_s if span_s > 0 else None,
            }
        )
    return rows


def tenant_lines(s: Mapping[str, Any]) -> list[str]:
    """Tenants side by side, the busiest of them."""
    rows = s.get("per_tenant") or []
    if not rows:
        return []
    lines = [
        f"{'tenant':<16}{'requests':>9}{'served':>8}{'refused':>9}{'TTFT p95':>11}{'E2EL p95':>11}"
    ]
    for row in rows[:MAX_TENANTS]:
        name = plain(row["tenant"])
        name = name if len(name) < 16 else name[:14] + "…"
        numbers = [number(row[key]) for key in ("requests", "completed", "rejected")]
        times = [number(row[key], 1) for key in ("p95_ttft_ms", "p95_e2el_ms")]
        cells = zip((*numbers, *times), (9, 8, 9, 11, 11), strict=True)
        lines.append(f"{name:<16}" + "".join(f"{cell:>{width}}" for cell, width in cells))
    if len(rows) > MAX_TENANTS:
        lines.append(f"{len(rows) - MAX_TENANTS} more tenants in summary.json")
    return lines


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
    rows += [(f"{reason(why)}:", number(count)) for why, count in s["aborted_reasons"].items()]
    return rows


def event_words(kind: str, replica: int, text: str) -> str:
    """One event in words."""
    words = WORDS[kind].format(replica) if kind in WORDS else f"{kind} {replica}"
    return f"{words}: {text}" if text else words


def event_lines(s: Mapping[str, Any], width: int) -> list[str]:
    """Events in words, one a line."""
    events = s["events"]
    lines = []
    for event in events[:MAX_EVENTS]:
        words = event_words(event["kind"], event["replica"], event["text"])
        line = f"{event['at_s']:>10,.1f} s  {plain(words)}"
        lines += textwrap.wrap(line, width, subsequent_indent=" " * 14, drop_whitespace=False)
    if len(events) > MAX_EVENTS:
        lines.append(f"{'':14}{len(events) - MAX_EVENTS} more events in summary.json")
    return lines
