"""What a client measured, per request: TTFT, TPOT and E2E by one definition, with failures and skew masked."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vsim.errors import UserError
from vsim.traces import bench_serve, jsonl
from vsim.traces.files import TraceFile, open_trace_file
from vsim.traces.options import ReadOptions, Report, RowError
from vsim.traces.outcome import is_aborted

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

# A log with more rows than this share whose first token precedes their arrival has no usable clock.
MAX_SKEWED = 0.01


@dataclass(frozen=True, slots=True)
class Timings:
    """Columns of shape (n,), seconds; NaN where a request has no such figure.

    `tpot_s` counts tokens, not chunks: (E2E - TTFT) / (output tokens - 1), undefined for one token.
    `chunk_gaps_s` are pooled gaps between chunks, which are inter-token latencies only where
    `chunks_are_tokens`. `usable`: completed, and with clocks that agree.
    """

    output_tokens: npt.NDArray[np.int64]
    ttft_s: Floats
    e2e_s: Floats
    failed: Bools
    skewed: Bools
    chunk_gaps_s: Floats
    chunks_are_tokens: bool
    notes: tuple[str, ...] = ()

    @property
    def usable(self) -> Bools:
        return np.asarray(~self.failed & ~self.skewed)

    @property
    def tpot_s(self) -> Floats:
        many = self.output_tokens > 1
        return np.where(
            many, (self.e2e_s - self.ttft_s) / np.where(many, self.output_tokens - 1, 1), np.nan
        )


def read_timings(path: str | Path, max_skewed: float = MAX_SKEWED) -> Timings:
    """Read a `vllm bench serve --save-detailed` result, or JSON lines of one request each.

    Lines hold `arrival`, `first_token` and `end` (one clock, seconds), or `ttft`, `itls` and `latency`
    (seconds), with `output_tokens` and optionally `status`. Raises UserError for anything else, for a
    result with only aggregates, and if more than `max_skewed` of the rows have a first token before arrival.
    """
    file = open_trace_file(path)
    report = Report(file.name, ReadOptions())
    if file.kind != "text":
        report.fail("is Parquet; timings are read from JSON")
    row = _whole_object(file)
    timings = _from_bench(row, report) if row is not None else _from_lines(file, report)
    share = float(timings.skewed.mean()) if len(timings.skewed) else 0.0
    if share > max_skewed:
        raise UserError(
            f"{file.name}: in {share:.1%} of {len(timings.skewed)} requests the first token precedes the arrival: "
            "their clocks differ, so their latencies can't be trusted"
        )
    return timings


def _whole_object(file: TraceFile) -> dict[str, Any] | None:
    """The file as one bench result, or None if it is something else."""
    if b'"completed"' not in file.head:
        return None
    try:
        row = jsonl.parse(file.document())
    except RowError:
        return None
    return row if isinstance(row, dict) and bench_serve.recognise(row) else None


def _from_bench(row: dict[str, Any], report: Report) -> Timings:
    missing = [
        name for name in ("output_lens", "ttfts", "itls") if not isinstance(row.get(name), list)
    ]
    if missing:
        report.fail(
            f"has only aggregates (no {', '.join(missing)}): run vllm bench serve with --save-detailed for timings"
        )
    n = len(row["output_lens"])
    if len(row["ttfts"]) != n or len(row["itls"]) != n:
        report.fail("output_lens, ttfts and itls must have the same length")
    errors = row.get("errors") or [""] * n
    if not isinstance(errors, list) or len(errors) != n:
        report.fail("errors must be a list as long as output_lens")
    rows = [
        {"output_tokens": tokens, "ttft": ttft, "itls": gaps, "failed": bool(error) or tokens == 0}
        for tokens, ttft, gaps, error in zip(
            row["output_lens"], row["ttfts"], row["itls"], errors, strict=True
        )
    ]
    try:
        timings = _columns([(1, item) for item in rows], report)
    except RowError as error:
        report.fail(str(error))
    completed = int((~timings.failed).sum())
    if row.get("completed") != completed:
        report.assume(
            f"The result says completed = {row.get('completed')!s:.20}, its own lists say {completed}."
        )
    return _noted(timings, report)


def _from_lines(file: TraceFile, report: Report) -> Timings:
    rows = []
    for line, row in jsonl.read_rows(file, report):
        failed = is_aborted(row.get("status"), report, line) or bool(row.get("error"))
        rows.append((line, {**row, "failed": failed}))
    if not rows:
        report.fail("has no requests")
    return _noted(_columns(rows, report), report)


def _noted(timings: Timings, report: Report) -> Timings:
    import dataclasses

    return dataclasses.replace(timings, notes=report.all_sentences())


def _columns(rows: list[tuple[int, dict[str, Any]]], report: Report) -> Timings:
    n = len(rows)
    ttft, e2e = np.full(n, np.nan), np.full(n, np.nan)
    tokens = np.zeros(n, dtype=np.int64)
    skewed = np.zeros(n, dtype=bool)
    failed = np.asarray([row["failed"] for _, row in rows], dtype=bool)
    gaps: list[float] = []
    mixed = 0
    for at, (line, row) in enumerate(rows):
        try:
            tokens[at] = jsonl.tokens(row, "output_tokens", report, line)
            if "first_token" in row:
                arrival, first, end = (
                    _seconds(row, name) for name in ("arrival", "first_token", "end")
                )
                ttft[at], e2e[at] = float(first - arrival), float(end - arrival)
                skewed[at] = first < arrival or end < first
                continue
            own = row.get("itls")
            if own is not None and not isinstance(own, list):
                raise RowError("itls is not a list of seconds")
            values = [float(_seconds({"itls": value}, "itls")) for value in own or []]
            ttft[at] = float(_seconds(row, "ttft"))
            e2e[at] = (
                float(_seconds(row, "latency")) if "latency" in row else ttft[at] + sum(values)
            )
        except RowError as error:
            report.fail(str(error), line)
        if failed[at]:
            continue
        gaps.extend(values)
        mixed += len(values) not in (0, tokens[at] - 1)
    if skewed.any():
        report.assume(
            f"{int(skewed.sum())} of {n} requests have a first token before their arrival (clock skew): "
            "left out of latencies."
        )
    if failed.any():
        report.assume(f"{int(failed.sum())} of {n} requests failed: left out of latencies.")
    if mixed:
        report.assume(
            f"In {mixed} requests chunks are not tokens: TPOT counts tokens; gaps are between chunks."
        )
    return Timings(tokens, ttft, e2e, failed, skewed, np.asarray(gaps), chunks_are_tokens=not mixed)


def _seconds(row: dict[str, Any], name: str) -> Decimal:
    value = Decimal(jsonl.number(row, name))
    if value.adjusted() > 12:
        raise RowError(f"{name} is {str(value)[:40]}, not a plausible number of seconds")
    return value
