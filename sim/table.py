"""The terminal table: `vllm bench serve`'s words, plain text, 80 columns, no colour."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from vsim.sim.bill import bill_rows
from vsim.sim.metrics import percentile_word
from vsim.sim.replica_spread import spread_lines
from vsim.sim.summary import interval
from vsim.sim.text import number, percent, plain, reason, short

WIDTH = 66
_VALUE = 24  # columns for the value, right of the label

LATENCIES = (
    ("ttft", "TTFT", "Time to First Token"),
    ("tpot", "TPOT", "Time per Output Token (excl. 1st token)"),
    ("itl", "ITL", "Inter-token Latency"),
    ("e2el", "E2EL", "End-to-end Latency"),
)


def render_table(summary: Mapping[str, Any]) -> str:
    """`summary` (of `summarize`) as text, each line at most 80 columns, ending in a newline."""
    measured = summary["origin"] == "measured"
    lines = [_title("Measured Serving Run" if measured else "Simulated Serving Benchmark", "=")]
    if summary["ended_early"]:
        lines += _wrapped(f"Ended early: {plain(summary['ended_early'])}")
    lines += [_row(label, value) for label, value in headline(summary)]
    if summary["goodput_slo_ms"]:
        limits = ", ".join(f"{k} <= {v:g} ms" for k, v in summary["goodput_slo_ms"].items())
        lines += _wrapped(f"Goodput counts requests with {limits}.")
    lines += _latency_table(summary)
    lines += _interval_table(summary)
    lines += _section("KV Cache and Scheduling", engine_rows(summary))
    lines += bill_lines(summary)
    lines += fleet_lines(summary)
    if summary["rejected_reasons"]:
        lines.append(_title("Rejected Requests", "-"))
        for code, count in summary["rejected_reasons"].items():
            lines += _wrapped(f"{number(count)} x {reason(code)}")
    lines.append("=" * WIDTH)
    return "\n".join(lines) + "\n"


def headline(s: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(label, value) of counts and throughput, in `vllm bench serve`'s words."""
    rows = [
        ("Successful requests:", number(s["completed"])),
        ("Failed requests:", _failed(s)),
    ]
    if s["max_concurrency"] is not None:
        rows.append(("Maximum request concurrency:", number(s["max_concurrency"])))
    if isinstance(s["request_rate"], int | float):
        rows.append(("Request rate configured (RPS):", _fixed(s["request_rate"])))
    rows += [
        ("Benchmark duration (s):", _fixed(s["duration"])),
        ("Total input tokens:", number(s["total_input_tokens"])),
        ("Total generated tokens:", number(s["total_output_tokens"])),
        ("Request throughput (req/s):", _fixed(s["request_throughput"])),
    ]
    if s["goodput_slo_ms"]:
        rows += [
            ("Request goodput (req/s):", _fixed(s["request_goodput"])),
            ("Share of requests in the goodput:", percent(s["goodput_fraction"])),
        ]
    return [
        *rows,
        ("Output token throughput (tok/s):", _fixed(s["output_throughput"])),
        ("Peak output token throughput (tok/s):", _fixed(s["max_output_tokens_per_s"])),
        ("Peak concurrent requests:", number(s["max_concurrent_requests"])),
        ("Total token throughput (tok/s):", _fixed(s["total_token_throughput"])),
    ]


def _failed(s: Mapping[str, Any]) -> str:
    parts = [
        f"{number(count)} {name}"
        for name, count in s["status_counts"].items()
        if count and name != "finished"
    ]
    return number(s["failed"]) + (f" ({', '.join(parts)})" if parts else "")


def _latency_table(s: Mapping[str, Any]) -> list[str]:
    """One row a metric, one column a statistic; split into several tables if 80 columns are too few."""
    statistics = ["mean", "std", "median"]
    statistics += [f"p{percentile_word(p)}" for p in s["percentiles"] if p != 50]
    lines = [_title("Latency (ms)", "-")]
    metrics = [(name, label) for name, label, _ in LATENCIES]
    metrics.append(("queue_time", "Queue"))
    if "mean_client_queue_time_ms" in s:
        metrics.append(("client_queue_time", "Client Q"))
    for decimals in (2, 1, 0):
        cells = {
            (name, which): _fixed(s.get(f"{which}_{name}_ms"), decimals)
            for name, _ in metrics
            for which in statistics
        }
        width = max(10 if decimals else 8, *(len(cell) + 1 for cell in cells.values()))
        if width * len(statistics) <= 80 - 9:
            break
    per_table = max(1, (80 - 9) // width)
    for first in range(0, len(statistics), per_table):
        shown = statistics[first : first + per_table]
        lines.append(" " * 9 + "".join(f"{which:>{width}}" for which in shown))
        for name, label in metrics:
            row = "".join(f"{cells[name, which]:>{width}}" for which in shown)
            lines.append(f"{label:<9}{row}")
    return lines


def _interval_table(s: Mapping[str, Any]) -> list[str]:
    """Error bars of the latencies, if the summary has any."""
    if not s.get("intervals"):
        return []
    lines = [_title(f"{s['intervals']['level']:.0%} Intervals of Latency (ms)", "-")]
    statistics = ["mean", *(f"p{percentile_word(p)}" for p in s["percentiles"])]
    columns = [
        which
        for which in statistics
        if any(interval(s, f"{which}_{name}_ms") for name, _, _ in LATENCIES)
    ]
    for first in range(0, len(columns), 4):
        shown = columns[first : first + 4]
        lines.append(" " * 9 + "".join(f"{which:>17}" for which in shown))
        for name, label, _ in LATENCIES:
            cells = [_range(interval(s, f"{which}_{name}_ms")) for which in shown]
            lines.append(f"{label:<9}" + "".join(f"{cell:>17}" for cell in cells))
    lines += [
        _row(label, _range(interval(s, key)))
        for key, label in (
            ("request_throughput", "Request throughput (req/s):"),
            ("output_throughput", "Output token throughput (tok/s):"),
        )
        if interval(s, key)
    ]
    return [*lines, *_wrapped(plain(s["intervals"]["source"]))]


def _range(bounds: tuple[float, float] | None) -> str:
    return "–" if bounds is None else f"{short(bounds[0])}..{short(bounds[1])}"


def engine_rows(s: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(label, value) of KV cache and scheduling totals."""
    return [
        (
            "KV cache blocks (usable):",
            f"{number(s['num_gpu_blocks'])} x {number(s['block_size'])} tokens",
        ),
        ("KV cache usage, mean / peak:", _pair(s, "kv_usage", percent)),
        ("Internal fragmentation, mean / peak:", _pair(s, "kv_fragmentation", percent)),
        ("Slots wasted, mean / peak (tokens):", _pair(s, "kv_wasted_slots", _whole)),
        ("Prefix cache hit rate:", percent(s["prefix_cache_hit_rate"])),
        ("Running requests, mean / peak:", _pair(s, "running", _tenth)),
        ("Waiting requests, mean / peak:", _pair(s, "waiting", _tenth)),
        ("Preemptions:", number(s["preemptions"])),
        ("Tokens recomputed:", number(s["recomputed_tokens"])),
        *_swapped(s),
        ("Engine steps:", number(s["num_steps"])),
    ]


def bill_lines(s: Mapping[str, Any]) -> list[str]:
    """Replicas side by side, GPU time and cost, where the summary has them (`sim/bill.py`)."""
    lines: list[str] = []
    if s.get("per_replica"):
        lines += [_title("Replicas (latencies in ms)", "-"), *spread_lines(s["per_replica"])]
    if "gpu_hours" in s:
        lines += _section("GPU Time and Cost" if "prices" in s else "GPU Time", bill_rows(s))
    if "prices" in s:
        lines += _wrapped(plain(s["prices"]))
    return lines


def fleet_lines(s: Mapping[str, Any]) -> list[str]:
    """What a fleet file's limits, failures and retries did (`sim/fleet/describe.py`)."""
    if "events" not in s:
        return []
    from vsim.sim.fleet.describe import event_lines, fleet_rows, tenant_lines

    lines, rows, tenants = event_lines(s, 80), fleet_rows(s), tenant_lines(s)
    if lines or rows:
        lines = [_title("Fleet", "-"), *(_row(label, value) for label, value in rows), *lines]
    if tenants:
        lines += [_title("Tenants (latencies in ms)", "-"), *tenants]
    return lines


def _swapped(s: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Only where something was swapped: V1 and a V0 that recomputes have nothing to say."""
    if not s.get("swapped_out_blocks"):
        return []
    blocks = f"{number(s['swapped_out_blocks'])} / {number(s['swapped_in_blocks'])}"
    rows = [("Blocks swapped, out / in:", blocks)]
    if s["swapped_bytes"] is not None:
        rows.append(("Bytes swapped (GB per GPU):", number(s["swapped_bytes"] / 1e9, 3)))
    return rows


def _pair(s: Mapping[str, Any], name: str, form: Any) -> str:
    return f"{form(s[f'{name}_mean'])} / {form(s[f'{name}_peak'])}"


def _section(title: str, rows: list[tuple[str, str]]) -> list[str]:
    return [_title(title, "-"), *(_row(label, value) for label, value in rows)]


def _title(text: str, rule: str) -> str:
    return f" {text} ".center(WIDTH, rule)


def _row(label: str, value: str) -> str:
    return f"{label:<{WIDTH - _VALUE}}{value:>{_VALUE}}"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="    ", break_on_hyphens=False)


def _fixed(value: float | None, decimals: int = 2) -> str:
    return "–" if value is None else f"{value:,.{decimals}f}"


def _tenth(value: float | None) -> str:
    return number(value, 1)


def _whole(value: float | None) -> str:
    return number(None if value is None else round(value))
