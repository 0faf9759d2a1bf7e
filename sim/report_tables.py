"""The report's tables: numbers, configuration with origins, provenance, reasons, tenants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vsim.sim import metrics
from vsim.sim.metrics import percentile_word
from vsim.sim.report_anomalies import Anomaly, clock_time
from vsim.sim.report_svg import esc
from vsim.sim.run import Run
from vsim.sim.summary import interval
from vsim.sim.table import LATENCIES
from vsim.sim.text import number, percent, reason, short

MAX_TENANTS = 20
MAX_REPLICAS = 64


def tiles(summary: Mapping[str, Any]) -> str:
    """The headline's numbers."""
    s = summary
    tail = max((p for p in s["percentiles"] if p <= 99), default=50.0)
    word = percentile_word(tail)
    shown = [
        ("Requests served", number(s["completed"]), f"of {number(s['num_prompts'])}"),
        _latency_tile(s, "TTFT", "ttft", word),
        _latency_tile(s, "TPOT", "tpot", word),
        _latency_tile(s, "E2E latency", "e2el", word),
        (
            "Output throughput",
            _short_per_s(s["output_throughput"], "tok/s"),
            _short_per_s(s["request_throughput"], "req/s"),
        ),
        (
            "KV cache, peak",
            percent(s["kv_usage_peak"], 0),
            f"mean {percent(s['kv_usage_mean'], 0)}",
        ),
        (
            "Preemptions",
            number(s["preemptions"]),
            f"{short(s['recomputed_tokens'])} tokens recomputed",
        ),
    ]
    if s["goodput_slo_ms"]:
        shown.append(
            ("Goodput", f"{short(s['request_goodput'])} req/s", percent(s["goodput_fraction"]))
        )
    return "".join(
        f"<div class=tile><span class=label>{esc(label)}</span><b>{esc(value)}</b>"
        f"<span class=sub>{esc(below)}</span></div>"
        for label, value, below in shown
    )


def _latency_tile(s: Mapping[str, Any], label: str, name: str, tail: str) -> tuple[str, str, str]:
    median, high = s[f"median_{name}_ms"], s.get(f"p{tail}_{name}_ms")
    bounds = interval(s, f"p{tail}_{name}_ms")
    bar = f" ({_time(bounds[0])} – {_time(bounds[1])})" if bounds else ""
    return f"{label}, median", _time(median), f"p{tail} {_time(high)}{bar}"


def _time(ms: float | None) -> str:
    if ms is None:
        return "–"
    if ms >= 10_000:
        return f"{short(ms / 1000)} s"
    return f"{short(ms)} ms"


def latency_table(summary: Mapping[str, Any]) -> str:
    """Every statistic of every latency, in ms."""
    which = ["mean", "std", "median"]
    which += [f"p{percentile_word(p)}" for p in summary["percentiles"] if p != 50]
    names = [(name, shown, long) for name, shown, long in LATENCIES]
    names.append(("queue_time", "Queue", "Sent until first scheduled"))
    if "mean_client_queue_time_ms" in summary:
        names.append(
            ("client_queue_time", "Client queue", "Wait at --max-concurrency, before send")
        )
    # Statistics run down, latencies across: five narrow columns fit a phone.
    head = "".join(f'<th title="{esc(long)}">{esc(shown)}</th>' for _, shown, long in names)
    rows = "".join(
        f"<tr><th scope=row>{esc(one)}</th>"
        + "".join(_latency_cell(summary, f"{one}_{name}_ms") for name, _, _ in names)
        + "</tr>"
        for one in which
    )
    bars = summary.get("intervals")
    note = (
        f"<p class=note>Small: {bars['level']:.0%} intervals. {esc(bars['source'])}</p>"
        if bars
        else ""
    )
    return (
        f'<div class=scroll><table class="numbers latency"><thead><tr><th>ms</th>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>{note}"
    )


def _latency_cell(summary: Mapping[str, Any], key: str) -> str:
    bounds = interval(summary, key)
    bar = f"<small>{_ms(bounds[0])} – {_ms(bounds[1])}</small>" if bounds else ""
    return f"<td>{_ms(summary.get(key))}{bar}</td>"


def _ms(value: float | None) -> str:
    """Milliseconds for a narrow column; summary.json has every digit."""
    if value is None:
        return "–"
    return (
        f"{value:,.0f}"
        if value >= 10_000
        else f"{value:,.1f}"
        if value >= 1000
        else f"{value:,.2f}"
    )


def engine_table(summary: Mapping[str, Any]) -> str:
    """Throughput, KV cache and scheduling totals."""
    s = summary
    rows: list[tuple[str, str]] = [
        ("Benchmark duration", f"{number(s['duration'])} s"),
        ("Total input tokens", number(s["total_input_tokens"])),
        ("Total generated tokens", number(s["total_output_tokens"])),
        ("Request throughput", _per_s(s["request_throughput"], "req/s")),
        ("Output token throughput", _per_s(s["output_throughput"], "tok/s")),
        ("Peak output token throughput", _per_s(s["max_output_tokens_per_s"], "tok/s")),
        ("Total token throughput", _per_s(s["total_token_throughput"], "tok/s")),
        ("Peak concurrent requests", number(s["max_concurrent_requests"])),
        (
            "KV cache",
            f"{number(s['num_gpu_blocks'])} usable blocks of {number(s['block_size'])} tokens",
        ),
        (
            "KV usage, mean / peak",
            f"{percent(s['kv_usage_mean'])} / {percent(s['kv_usage_peak'])}",
        ),
        (
            "Internal fragmentation, mean / peak",
            f"{percent(s['kv_fragmentation_mean'], 2)} / {percent(s['kv_fragmentation_peak'], 2)}",
        ),
        (
            "Slots wasted, mean / peak",
            f"{_whole(s['kv_wasted_slots_mean'])} / {_whole(s['kv_wasted_slots_peak'])} tokens",
        ),
        ("Prefix cache hit rate", percent(s["prefix_cache_hit_rate"])),
        (
            "Running, mean / peak",
            f"{number(s['running_mean'], 1)} / {number(s['running_peak'])}",
        ),
        (
            "Waiting, mean / peak",
            f"{number(s['waiting_mean'], 1)} / {number(s['waiting_peak'])}",
        ),
        (
            "Preemptions",
            f"{number(s['preemptions'])} ({number(s['preempted_requests'])} requests)",
        ),
        ("Tokens recomputed", number(s["recomputed_tokens"])),
        ("Engine steps", number(s["num_steps"])),
    ]
    return two_columns(rows)


def _per_s(value: float | None, unit: str) -> str:
    return "–" if value is None else f"{number(value)} {unit}"


def _short_per_s(value: float | None, unit: str) -> str:
    return "–" if value is None else f"{short(value)} {unit}"


def _whole(value: float | None) -> str:
    return number(None if value is None else round(value))


def two_columns(rows: Sequence[tuple[str, str]]) -> str:
    body = "".join(
        f"<tr><th scope=row>{esc(name)}</th><td>{esc(value)}</td></tr>" for name, value in rows
    )
    return f"<div class=scroll><table class=pairs><tbody>{body}</tbody></table></div>"


def anomalies_table(found: Sequence[Anomaly]) -> str:
    """When, what, and what came together with it."""
    rows = "".join(
        f"<tr><td class=when>{esc(clock_time(one.start_s))} – {esc(clock_time(one.end_s))}</td>"
        f"<th scope=row>{esc(one.what)}</th><td>{esc(one.together)}</td></tr>"
        for one in found
    )
    return (
        "<div class=scroll><table class=notable><thead><tr><th>when</th><th>what</th>"
        f"<th>together with</th></tr></thead><tbody>{rows}</tbody></table></div>"
    )


def reasons_table(summary: Mapping[str, Any]) -> str:
    """Rejected requests by reason; empty text if there are none."""
    rows = [(reason(code), number(count)) for code, count in summary["rejected_reasons"].items()]
    return two_columns(rows) if rows else ""


def settings_table(settings: Mapping[str, Any]) -> str:
    """Nested settings as rows: name, value, where it came from.

    A leaf is a bare value or {"value": v, "origin": o, …}; other mappings nest.
    """
    rows = "".join(
        f"<tr><th scope=row>{esc(name)}</th><td>{esc(value)}</td><td class=origin>{esc(origin)}</td></tr>"
        for name, value, origin in flatten(settings)
    )
    if not rows:
        return "<p class=empty>Nothing recorded.</p>"
    return f"<div class=scroll><table class=settings><tbody>{rows}</tbody></table></div>"


def flatten(settings: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str, str]]:
    """(name, value, origin) of every leaf, in sorted order."""
    rows: list[tuple[str, str, str]] = []
    for key in sorted(settings, key=str):
        value = settings[key]
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and "value" in value:
            rest = [str(value[k]) for k in ("origin", "source", "note") if value.get(k)]
            rows.append((name, _text(value["value"]), "; ".join(rest)))
        elif isinstance(value, Mapping):
            rows += flatten(value, f"{name}.")
        else:
            rows.append((name, _text(value), ""))
    return rows


def _text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and abs(value) >= 10_000:
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return ", ".join(_text(item) for item in value)
    return str(value)


def tenants_table(run: Run) -> str:
    """Latency by tenant, the busiest first; empty text if there is only one."""
    tenant = run.requests["tenant"]
    codes, counts = np.unique(tenant, return_counts=True)
    if len(codes) < 2:
        return ""
    order = np.lexsort((codes, -counts))[:MAX_TENANTS]
    rows = []
    for code in codes[order].tolist():
        mine = tenant == code
        latency = metrics.latencies(run, mine)
        ttft, e2el = (metrics.stats(v, (95.0,)) for v in (latency.ttft_ns, latency.e2el_ns))
        known = 0 <= code < len(run.tenant_names)
        cells = [
            number(int(mine.sum())),
            number(ttft.count),
            _ms(ttft.median_ms),
            _ms(ttft.percentiles[0][1]),
            _ms(e2el.median_ms),
            _ms(e2el.percentiles[0][1]),
            number(int(run.requests["preemptions"][mine].sum())),
        ]
        name = run.tenant_names[code] if known else f"tenant {code}"
        rows.append(
            f"<tr><th scope=row>{esc(name)}</th>"
            + "".join(f"<td>{c}</td>" for c in cells)
            + "</tr>"
        )
    head = "".join(
        f"<th>{h}</th>"
        for h in (
            "requests",
            "finished",
            "TTFT p50 ms",
            "TTFT p95 ms",
            "E2EL p50 ms",
            "E2EL p95 ms",
            "preemptions",
        )
    )
    left = len(codes) - len(order)
    more = f"<p class=note>{number(left)} more tenants are not shown.</p>" if left else ""
    return (
        f"<div class=scroll><table class=numbers><thead><tr><th>tenant</th>{head}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>{more}"
    )


def replicas_table(run: Run) -> str:
    """Load by replica; empty text if there is only one."""
    which = run.steps.get("replica")
    if which is None or len(np.unique(which)) < 2:
        return ""
    served = run.requests.get("replica")
    usable = max(1, run.num_gpu_blocks)
    rows = []
    for code in np.unique(which).tolist()[:MAX_REPLICAS]:
        steps = {name: column[which == code] for name, column in run.steps.items()}
        mine = served == code if served is not None else None
        latency = metrics.latencies(run, mine) if mine is not None else None
        ttft = metrics.stats(latency.ttft_ns, (95.0,)) if latency is not None else None
        cells = [
            "–" if mine is None else number(int(mine.sum())),
            "–" if ttft is None else _ms(ttft.median_ms),
            "–" if ttft is None else _ms(ttft.percentiles[0][1]),
            number(int(steps["running"].max())),
            number(int(steps["waiting"].max())),
            percent(float(steps["kv_blocks_used"].max()) / usable, 0),
            number(int(steps["preempted"].sum())),
            number(len(steps["start_ns"])),
        ]
        rows.append(
            f"<tr><th scope=row>{code}</th>" + "".join(f"<td>{c}</td>" for c in cells) + "</tr>"
        )
    titles = (
        "requests",
        "TTFT p50 ms",
        "TTFT p95 ms",
        "running, peak",
        "waiting, peak",
        "KV, peak",
        "preemptions",
        "steps",
    )
    head = "".join(f"<th>{title}</th>" for title in titles)
    return (
        f"<div class=scroll><table class=numbers><thead><tr><th>replica</th>{head}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def trace_facts(run: Run) -> list[tuple[str, str]]:
    """What was asked for: counts, lengths, rate."""
    n = run.num_requests
    if not n:
        return [("Requests", "0")]
    prompt, output = run.requests["prompt_tokens"], run.requests["output_tokens"]
    arrival = run.requests["arrival_ns"]
    span_s = float(arrival.max() - arrival.min()) / 1e9
    done = run.requests["status"] == 0
    facts = [
        ("Requests", number(n)),
        ("Arrivals span", f"{number(span_s)} s"),
        (
            "Mean arrival rate",
            f"{short((n - 1) / span_s)} requests/s" if span_s > 0 else "all at once",
        ),
        ("Prompt tokens, median / p95 / max", _lengths(prompt)),
    ]
    if done.any():
        facts.append(("Output tokens, median / p95 / max", _lengths(output[done])))
    gaps = np.diff(np.sort(arrival))
    if len(gaps) > 1 and gaps.mean() > 0:
        cv = f"{float(gaps.std() / gaps.mean()):.2f} (Poisson: 1)"
        facts.append(("Burstiness, CV of inter-arrival times", cv))
    return facts


def _lengths(values: Any) -> str:
    middle, high = np.percentile(values, [50, 95])
    return f"{number(round(middle))} / {number(round(high))} / {number(int(values.max()))}"
