"""From a file's rows to a `Trace`: units, zero outputs, order and rebasing, the same for every format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal

import numpy as np
import numpy.typing as npt

from vsim.traces.arrivals import relinked
from vsim.traces.clock import UNIT_NS, TimeError, number_to_ns
from vsim.traces.options import Report
from vsim.traces.trace import Int32Array, Int64Array, Sessions, Trace, TraceSource

# No context window comes near; a larger number is a timestamp or a byte count in the wrong column.
MAX_TOKENS = 1_000_000_000


@dataclass(slots=True)
class Draft:
    """Columns as a reader found them, in file order. Rows are usable on their own; nothing is sorted yet.

    `lines` holds each row's line number, or None where rows are lines in sequence from `first_line`.
    `hash_ids` holds one sequence of content ids per row, each covering `hash_block_tokens` tokens.
    `after` holds row indices of this draft, -1 for none.
    """

    time_ns: Int64Array
    prompt: Int64Array
    output: Int64Array
    lines: Int64Array | None = None
    first_line: int = 1
    max_tokens: Int64Array | None = None
    priority: Int32Array | None = None
    tenants: Sequence[str] | None = None
    sessions: Sequence[str] | None = None
    aborted: npt.NDArray[np.bool_] | None = None
    hash_ids: Sequence[Sequence[int]] | None = None
    hash_block_tokens: int = 0
    after: Int64Array | None = None
    think_ns: Int64Array | None = None
    keep_order: bool = False  # our own file: it is already in arrival order
    zero_means: str = "failed requests"
    prefix_arrays: tuple[Int64Array, Int64Array] | None = None  # (offsets, ids) instead of hash_ids
    extra: dict[str, object] = field(default_factory=dict)

    def line(self, row: int) -> int:
        return int(self.lines[row]) if self.lines is not None else self.first_line + row


def times_from_numbers(
    values: Sequence[int | Decimal], lines: Sequence[int], unit: str, report: Report
) -> Int64Array:
    """Numbers of one unit as ns. Raises UserError naming the line of a number out of range."""
    ns = []
    for row, value in enumerate(values):
        try:
            ns.append(number_to_ns(value, unit))
        except TimeError as error:
            report.fail(f"timestamp {error}; is --time-unit {unit} right?", lines[row])
    return np.asarray(ns, dtype=np.int64)


def choose_unit(
    report: Report,
    *,
    documented: str | None,
    whose: str,
    integral: bool,
    low: float,
    high: float,
    rows: int,
) -> str:
    """The unit of a file's numeric timestamps: as declared, as the format documents, or guessed aloud.

    `low`, `high` in the file's own unit. A guess is announced with the request rates it and its rival mean.
    """
    declared = report.options.time_unit
    if declared is not None:
        if declared not in UNIT_NS:
            report.fail(f"time unit {declared!r} is not one of {', '.join(UNIT_NS)}")
        return declared

    def rate(unit: str) -> float:
        span = (high - low) * UNIT_NS[unit] / 1e9
        return (rows - 1) / span if span > 0 else 0.0

    def say(unit: str) -> str:
        return f"{rate(unit):.3g} req/s if {unit}"

    # Seconds or ms that reach beyond the year 5000 are something finer, whatever the format says.
    if (documented == "s" and high >= 1e11) or (documented == "ms" and high >= 1e14):
        documented = None
    if documented is not None:
        rival = "s" if documented == "ms" else "ms"
        if high > low:
            report.assume(
                f"Timestamps are taken as {documented}, as {whose} defines them "
                f"({say(documented)}; {say(rival)}). --time-unit overrides."
            )
        return documented
    # Nobody says. Dates since 1970 give themselves away by size; offsets are judged by the rate they mean.
    if high >= 1e17:
        guess = "ns"
    elif high >= 1e14:
        guess = "us"
    elif high >= 1e11:
        guess = "ms"
    else:
        # Offsets of unknown unit: seconds, unless that means less than a request in ten seconds.
        guess = "ms" if 0 < rate("s") < 0.1 else "s"
    rivals = [unit for unit in ("s", "ms") if unit != guess]
    sentence = (
        f"The file does not say the unit of its timestamps; they are taken as {guess} "
        f"({say(guess)}; {'; '.join(say(unit) for unit in rivals)}). Pass --time-unit to be sure"
    )
    report.oddity(sentence + ".")
    return guess


def finish(draft: Draft, report: Report, source: TraceSource) -> Trace:
    """Check, cut, sort and rebase. Raises UserError where nothing is left or strict reading refuses."""
    n = len(draft.time_ns)
    keep = _handle_zero_output(draft, report)
    limit = report.options.limit
    if limit is not None:
        if limit < 1:
            report.fail(f"limit={limit} must be at least 1")
        kept = np.flatnonzero(keep)
        if len(kept) > limit:
            keep[kept[limit] :] = False
            report.assume(f"Only the first {limit} requests of the file are used (limit).")
    if not keep.any():
        if n:
            report.fail(
                f"no request is left: all rows ({n}) have 0 output tokens ({draft.zero_means}); "
                "--zero-output prefill-only keeps their prompts as load"
            )
        if report.dropped:
            report.fail(f"no request is left: {'; '.join(report.all_sentences())}")
        report.fail("has no requests, only a header or nothing; a trace needs at least one")
    whole_file = bool(keep.all())
    plain = draft.tenants is None and draft.sessions is None and draft.after is None
    plain = plain and draft.hash_ids is None and draft.prefix_arrays is None
    # Row numbers are needed only to pick rows; ten million of them would be 80 MB for nothing.
    rows = np.empty(0, np.int64) if whole_file and plain else np.flatnonzero(keep)
    times = draft.time_ns if whole_file else draft.time_ns[rows]
    if (times[1:] < times[:-1]).any():
        steps_back = np.maximum.accumulate(times) - times
        late = np.flatnonzero(steps_back)
        report.oddity(
            f"{len(late)} of {len(times)} timestamps out of order, max {float(steps_back.max()) / 1e9:.9g} s: "
            "sorted by time; equal times keep the file's order.",
            draft.line(int(np.flatnonzero(keep)[late[0]])),
        )
        order = np.argsort(times, kind="stable")
        times, rows = times[order], np.flatnonzero(keep)[order]
        whole_file = False
    _check_caps(draft, keep, report)
    origin = int(times[0])
    times -= origin  # in place: the draft is used up here

    def take(column: npt.NDArray[np.generic] | None) -> npt.NDArray[np.generic] | None:
        if column is None or whole_file:
            return column
        return column[rows]

    tenant, tenant_names = _codes(draft.tenants, rows)
    session, session_names = _codes(draft.sessions, rows)
    if session is not None and "" in session_names:  # rows that belong to no session
        none = session_names.index("")
        session = np.where(session == none, -1, session - (session > none)).astype(np.int32)
        session_names = tuple(name for name in session_names if name)
    offsets, ids = _prefix(draft, rows)
    return Trace(
        arrival_ns=times,
        prompt_tokens=draft.prompt if whole_file else draft.prompt[rows],
        output_tokens=draft.output if whole_file else draft.output[rows],
        source=source,
        max_tokens=take(draft.max_tokens),  # type: ignore[arg-type]
        priority=take(draft.priority),  # type: ignore[arg-type]
        tenant=tenant,
        tenant_names=tenant_names,
        sessions=_sessions(draft, rows),
        prefix_offsets=offsets,
        prefix_ids=ids,
        prefix_block_tokens=draft.hash_block_tokens if ids is not None else 0,
        session=session,
        session_names=session_names,
        aborted=take(draft.aborted),  # type: ignore[arg-type]
        origin_ns=origin,
        assumptions=report.all_sentences(),
        dropped=dict(report.dropped),
    )


def _handle_zero_output(draft: Draft, report: Report) -> npt.NDArray[np.bool_]:
    """Which rows stay. Zero output tokens mean a failed request: it has no TPOT and no latency."""
    keep = np.ones(len(draft.time_ns), dtype=bool)
    zero = draft.output == 0
    count = int(np.count_nonzero(zero))
    if not count:
        return keep
    rows = f"{count} row{'s' * (count != 1)} with 0 output tokens"
    rule = report.options.zero_output
    if rule == "error":
        first = int(np.flatnonzero(zero)[0])
        report.fail(
            f"0 output tokens ({count} such rows); --zero-output drop leaves them out, "
            "prefill-only keeps their prompts as load",
            draft.line(first),
        )
    if rule == "prefill-only":
        draft.output = np.where(zero, 1, draft.output)
        if draft.max_tokens is not None:
            draft.max_tokens = np.maximum(draft.max_tokens, 1)
        report.assume(
            f"{rows} ({draft.zero_means}) are kept as load: prompt plus one token, no TPOT."
        )
        return keep
    report.dropped["failed_in_trace"] += count
    report.assume(f"{rows} ({draft.zero_means}) are left out, counted as failed_in_trace.")
    return ~zero


def _check_caps(draft: Draft, keep: npt.NDArray[np.bool_], report: Report) -> None:
    """No engine generates more than the client's cap: a file that says so errs in one of the two."""
    if draft.max_tokens is None:
        return
    above = keep & (draft.output > draft.max_tokens)
    if above.any():
        report.notice(
            "more output tokens than max_tokens allows; replay stops at max_tokens",
            draft.line(int(np.flatnonzero(above)[0])),
            int(np.count_nonzero(above)),
        )


def _codes(
    names: Sequence[str] | None, rows: Int64Array
) -> tuple[Int32Array | None, tuple[str, ...]]:
    """Names as small integers, numbered in order of first appearance."""
    if names is None:
        return None, ()
    code: dict[str, int] = {}
    values = [code.setdefault(names[row], len(code)) for row in rows.tolist()]
    return np.asarray(values, dtype=np.int32), tuple(code)


def _prefix(draft: Draft, rows: Int64Array) -> tuple[Int64Array | None, Int64Array | None]:
    if draft.prefix_arrays is not None:
        offsets, ids = draft.prefix_arrays
        if len(rows) == len(offsets) - 1 and np.array_equal(rows, np.arange(len(rows))):
            return offsets, ids
        chosen = [ids[offsets[row] : offsets[row + 1]] for row in rows.tolist()]
    elif draft.hash_ids is not None:
        total = sum(map(len, draft.hash_ids))
        if not total:
            return None, None
        lengths = np.fromiter(
            (len(draft.hash_ids[row]) for row in rows.tolist()), np.int64, len(rows)
        )
        flat = np.fromiter(
            (value for row in rows.tolist() for value in draft.hash_ids[row]),
            np.int64,
            int(lengths.sum()),
        )
        return np.concatenate(([0], np.cumsum(lengths))).astype(np.int64), flat
    else:
        return None, None
    lengths = np.asarray([len(part) for part in chosen], dtype=np.int64)
    flat = np.concatenate(chosen) if chosen else np.empty(0, np.int64)
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int64), flat.astype(np.int64)


def _sessions(draft: Draft, rows: Int64Array) -> Sessions | None:
    """Dependencies renumbered to the trace's rows; where a predecessor fell out, its own one takes over."""
    if draft.after is None or draft.think_ns is None or not (draft.after >= 0).any():
        return None
    return relinked(Sessions(draft.after, draft.think_ns), rows)
