"""How a request ended: its output length where only a cap is known, and whether it ran to its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vsim.traces import jsonl
from vsim.traces.draft import Draft
from vsim.traces.options import Report, RowError

# A request that ended like this was served to its end.
COMPLETED = frozenset(
    (
        "",
        "ok",
        "success",
        "succeeded",
        "completed",
        "complete",
        "finished",
        "done",
        "stop",
        "length",
        "true",
    )
)
# ... and one that ended like this was not: load, but no completion.
NOT_COMPLETED = frozenset(
    (
        "aborted",
        "abort",
        "cancelled",
        "canceled",
        "timeout",
        "timed_out",
        "error",
        "failed",
        "failure",
        "false",
    )
)


def output_tokens(row: dict[str, Any], name: str, cap: str, report: Report, line: int) -> int:
    """A row's output length; where only the client's cap is there, what the options say to make of it."""
    if row.get(name) is not None:
        return jsonl.tokens(row, name, report, line)
    model = report.options.output_tokens_model
    if isinstance(model, int):
        report.assume(f"Rows without an output length get {model} output tokens, as asked.")
        return model
    if row.get(cap) is None:
        raise RowError(f"{name} is missing")
    if model == "upper-bound":
        report.assume(
            f"Output lengths are upper bounds: the file has only {cap}, the client's cap."
        )
        return jsonl.tokens(row, cap, report, line)
    raise RowError(
        f"{name} is missing and {cap} is a cap, not a length; pass --output-tokens N, or "
        "--output-tokens upper-bound to take the cap"
    )


def is_aborted(status: Any, report: Report, line: int) -> bool:
    """Does a status say that the request did not run to its end? HTTP codes count as well."""
    if status is None or status is True:
        return False
    if status is False:
        return True
    text = str(status).strip().lower()
    if text in COMPLETED:
        return False
    if text in NOT_COMPLETED:
        return True
    if text.isdigit() and len(text) == 3:
        return not text.startswith("2")
    report.notice("has a status of unknown meaning, taken as completed", line)
    return False


def attach_caps(draft: Draft, caps: Sequence[int]) -> None:
    """The clients' `max_tokens`, -1 where a row has none; no column at all if none has."""
    if any(cap >= 0 for cap in caps):
        column = np.asarray(caps, dtype=np.int64)
        draft.max_tokens = np.where(column < 0, draft.output, column)


def attach_aborted(
    draft: Draft, aborted: Sequence[bool], report: Report, told: bool = False
) -> None:
    """Mark the requests that did not run to their end; no column at all if all did.

    `told`: the file itself carries the sentences about it.
    """
    count = sum(aborted)
    if count:
        draft.aborted = np.asarray(aborted, dtype=bool)
    if count and not told:
        report.assume(
            f"{count} request{'s' * (count != 1)} did not run to the end: load, but no completion."
        )
