"""A `vllm bench serve --save-detailed` result as the trace that was sent."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import numpy as np

from vsim.traces import jsonl
from vsim.traces.draft import Draft, times_from_numbers
from vsim.traces.files import TraceFile
from vsim.traces.options import Report, RowError


def recognise(row: dict[str, Any]) -> bool:
    return "completed" in row and ("total_input_tokens" in row or "input_lens" in row)


def load(file: TraceFile, report: Report) -> dict[str, Any]:
    """The result as one JSON object. Raises UserError if it is none, or several (--append-result)."""
    try:
        row = jsonl.parse(file.document())
    except RowError as error:
        lines = [raw for _, raw, _ in file.lines()]
        several = len(lines) > 1 and all(
            raw.lstrip()[:1] == b"{" and raw.rstrip()[-1:] == b"}" for raw in lines
        )
        if several:
            report.fail(f"holds {len(lines)} results (--append-result); keep one of them in a file")
        report.fail(str(error))
    if not isinstance(row, dict) or not recognise(row):
        report.fail("is not a vllm bench serve result")
    return row


def read_bench_serve(file: TraceFile, report: Report) -> Draft:
    """Read lengths and send times. Failures (`errors`) are left out or, with tokens, count as load.

    Raises UserError for a result that has only aggregates: a calibration target, not a trace.
    """
    row = load(file, report)
    if not isinstance(row.get("input_lens"), list) or not isinstance(row.get("output_lens"), list):
        report.fail(
            "has only aggregates, no request lengths: it can serve as a calibration target, not as a trace; "
            "run vllm bench serve with --save-detailed"
        )
    prompt = _tokens(row, "input_lens", report)
    output = _tokens(row, "output_lens", report)
    n = len(prompt)
    if len(output) != n:
        report.fail(f"input_lens has {n} entries and output_lens {len(output)}; they must agree")
    errors = row.get("errors")
    failed = [False] * n
    if isinstance(errors, list) and len(errors) == n:
        failed = [bool(error) for error in errors]
    elif errors is not None:
        report.fail("errors must be a list as long as input_lens")
    draft = Draft(
        time_ns=_times(row, n, report),
        prompt=np.asarray(prompt, dtype=np.int64),
        output=np.asarray(output, dtype=np.int64),
        lines=np.ones(n, dtype=np.int64),
        zero_means="failed requests",
    )
    aborted = np.asarray(failed, dtype=bool) & (draft.output > 0)
    if aborted.any():
        draft.aborted = aborted
        report.assume(
            f"{int(aborted.sum())} failed requests had produced tokens: load, but no completion."
        )
    completed = (
        n
        - sum(failed)
        - int(np.count_nonzero((draft.output == 0) & ~np.asarray(failed, dtype=bool)))
    )
    if row.get("completed") != completed:
        report.oddity(
            f"The result says completed = {row.get('completed')!s:.20}, its own lists say {completed}."
        )
    return draft


def _tokens(row: dict[str, Any], name: str, report: Report) -> list[int]:
    values = []
    for at, value in enumerate(row[name]):
        try:
            values.append(jsonl.tokens({name: value}, name, report, 1))
        except RowError as error:
            report.fail(f"entry {at} of {error}")
    return values


def _times(row: dict[str, Any], n: int, report: Report) -> Any:
    """Send times, seconds on the client's monotonic clock; without any, all at 0."""
    for name in ("start_times", "request_timestamps"):
        values = row.get(name)
        if values is None:
            continue
        if not isinstance(values, list) or len(values) != n:
            report.fail(f"{name} must be a list as long as input_lens")
        numbers: list[int | Decimal] = []
        for at, value in enumerate(values):
            try:
                numbers.append(jsonl.number({name: value}, name))
            except RowError as error:
                report.fail(f"entry {at} of {error}")
        # vLLM writes them in the order of the prompts, sent one after the other.
        return times_from_numbers(numbers, [1] * n, report.options.time_unit or "s", report)
    report.oddity(
        f"The result has no send times (request_rate {row.get('request_rate')!s:.20}): all requests are sent at 0."
    )
    return np.zeros(n, dtype=np.int64)
