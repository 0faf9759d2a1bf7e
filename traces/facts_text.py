"""Trace facts as one page for a terminal. No colours: it is read in pipes and pull requests as well."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vsim.traces.options import printable

BARS = " ▁▂▃▄▅▆▇█"
SHOWN = ("min", "p5", "p25", "p50", "p75", "p95", "p99", "max", "mean")


def text(facts: dict[str, Any]) -> str:
    """All facts in about 50 lines."""
    return "\n".join(_lines(facts)) + "\n"


def number(value: float | None, digits: int = 4) -> str:
    """A number for people: thousands separated, few digits, a dash where it is undefined."""
    if value is None:
        return "-"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3f} s"
    if seconds < 7200:
        return f"{seconds / 60:.1f} min"
    if seconds < 172_800:
        return f"{seconds / 3600:.2f} h"
    return f"{seconds / 86400:.2f} days"


def sparkline(values: list[int], width: int = 72) -> str:
    """Values as a row of bars, merged to at most `width`."""
    if not values:
        return ""
    size = -(-len(values) // width)
    merged = [
        sum(values[at : at + size]) / len(values[at : at + size])
        for at in range(0, len(values), size)
    ]
    top = max(merged) or 1
    return "".join(BARS[min(8, round(8 * value / top))] for value in merged)


def _lines(facts: dict[str, Any]) -> Iterator[str]:
    source, rate, bursts = facts["source"], facts["rate"], facts["burstiness"]
    yield f"{printable(source['name'])}  ({source['format']}, sha256 {source['sha256'][:12] or '-'})"
    began = f", from {facts['first_arrival']}" if facts["first_arrival"] else ""
    yield f"{facts['requests']:,} requests over {duration(facts['span_s'])}{began}"
    tokens = facts["tokens"]
    yield (
        f"{tokens['prompt']:,} prompt and {tokens['output']:,} output tokens "
        f"({number(tokens['prompt_per_s'])} and {number(tokens['output_per_s'])} per s; "
        f"{number(tokens['prompt_per_output'], 3)} prompt tokens per output token)"
    )
    yield ""
    yield (
        f"Rate       mean {number(rate['mean_per_s'])} req/s; peak {number(rate['peak_1s_per_s'])} in 1 s, "
        f"{number(rate['peak_10s_per_s'])} in 10 s, {number(rate['peak_60s_per_s'])} in 60 s"
    )
    over = rate["over_time"]
    yield f"           |{sparkline(over['requests'])}| per {number(over['window_s'])} s"
    yield from _bursts(bursts)
    yield ""
    yield "Lengths    " + "".join(f"{name:>9}" for name in SHOWN)
    for name in ("prompt", "output", "total"):
        values = facts["lengths"][name]
        yield f"  {name:<9}" + "".join(f"{number(round(values[key], 1)):>9}" for key in SHOWN)
    yield from _shapes(facts["lengths"])
    yield ""
    yield "Longest    " + "; ".join(
        f"#{item['request']} at {item['arrival_s']:.1f} s: {item['prompt']:,}+{item['output']:,}"
        for item in facts["longest"][:3]
    )
    yield from _people(facts)
    yield from _prefix(facts["prefix"])
    yield ""
    yield from _problems(facts)


def _bursts(bursts: dict[str, Any]) -> Iterator[str]:
    dispersion = bursts["index_of_dispersion"]
    yield (
        "Burstiness index of dispersion "
        + ", ".join(f"{number(value, 3)} at {window}" for window, value in dispersion.items())
        + " (1 is Poisson)"
    )
    lags = ", ".join(
        f"{number(value, 2)} at {lag} s"
        for lag, value in bursts["autocorrelation_1s_counts"].items()
    )
    yield f"           autocorrelation of counts per second: {lags or '-'}"
    yield (
        f"           Hurst estimate {number(bursts['hurst_1s_counts'], 2)}; gaps: mean {number(bursts['gap_mean_s'])} s, "
        f"CV {number(bursts['gap_cv'], 3)}, longest {number(bursts['gap_max_s'])} s, "
        f"{bursts['same_time_as_previous']:,} zero"
    )


def _shapes(lengths: dict[str, Any]) -> Iterator[str]:
    for name in ("prompt", "output"):
        shares = lengths[f"{name}_shares"]
        yield (
            f"  {name} shares: {shares['below_64']:.1%} below 64, {shares['64_to_512']:.1%} of 64-512, "
            f"{shares['above_512']:.1%} above 512, {shares['above_8192']:.1%} above 8192"
        )
    yield f"  rank correlation of prompt and output: {number(lengths['rank_correlation'], 2)}"
    table = lengths["joint"]["counts"]
    first_row = next(at for at, row in enumerate(table) if any(row))
    columns = [at for at in range(len(table[0])) if any(row[at] for row in table)]
    low, high = columns[0], columns[-1] + 1
    total = sum(map(sum, table))
    yield "  requests in % by prompt (down) and output (across) length from"
    yield "  " + " " * 9 + "".join(f"{2**at:>7}" for at in range(low, high))
    for at in range(first_row, len(table)):
        cells = (
            f"{100 * value / total:>7.1f}" if value else f"{'·':>7}"
            for value in table[at][low:high]
        )
        yield f"  {2**at:>9}" + "".join(cells)


def _people(facts: dict[str, Any]) -> Iterator[str]:
    tenants = facts["tenants"]
    if tenants:
        yield "Tenants    " + "; ".join(
            f"{printable(item['name'])}: {item['requests']:,} requests, {item['prompt_tokens'] + item['output_tokens']:,} tokens"
            for item in tenants[:5]
        )
    sessions = facts["sessions"]
    if sessions:
        parts = []
        if sessions.get("sessions"):
            parts.append(
                f"{sessions['sessions']:,} with {number(sessions['turns']['mean'], 3)} turns each on average"
            )
        if sessions.get("turns_that_wait_for_another"):
            parts.append(
                f"{sessions['turns_that_wait_for_another']:,} turns wait for another's end plus "
                f"{number(sessions['think_s']['p50'])} s (median)"
            )
        yield "Sessions   " + "; ".join(parts)
    if facts["aborted"]:
        yield f"Aborted    {facts['aborted']:,} requests: load, but no completions"


def _prefix(prefix: dict[str, Any] | None) -> Iterator[str]:
    if prefix is None:
        yield "Prefixes   the trace has no content ids: nothing is shared"
        return
    yield (
        f"Prefixes   {prefix['shared_with_earlier_prompt']:.1%} of prompt tokens were seen before "
        f"({prefix['requests_sharing']:,} requests share); hit rate of an infinite cache by block size:"
    )
    yield "           " + ", ".join(
        f"{size}: {share:.1%}" for size, share in prefix["hit_ceiling"].items()
    )


def _problems(facts: dict[str, Any]) -> Iterator[str]:
    if not facts["assumptions"] and not facts["dropped"]:
        yield "Assumed    nothing; every row of the file is used"
        return
    if facts["dropped"]:
        yield "Left out   " + ", ".join(
            f"{count:,} {reason}" for reason, count in facts["dropped"].items()
        )
    label = "Assumed    "
    for sentence in facts["assumptions"]:
        yield f"{label}{sentence}"
        label = " " * len(label)
