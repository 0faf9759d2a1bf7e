"""Mooncake's JSON lines and their kin (aiperf, vLLM timed_trace, Bailian): lengths and prefix block ids."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np

from vsim.traces import jsonl
from vsim.traces.clock import as_float
from vsim.traces.draft import Draft, choose_unit, times_from_numbers
from vsim.traces.files import TraceFile
from vsim.traces.options import Report, RowError
from vsim.traces.outcome import attach_aborted, attach_caps, is_aborted, output_tokens
from vsim.traces.prefix import fit_block_tokens


@dataclass(frozen=True, slots=True)
class Dialect:
    """What differs between the members of the family."""

    whose: str
    unit: str
    hash_block_tokens: int
    session: str = "session_id"


# kvcache-ai/Mooncake: ms, 512-token blocks, the partial last block has an id as well.
MOONCAKE = Dialect("Mooncake", "ms", 512)
# Alibaba's Bailian traces look alike but count in seconds and 16-token blocks.
BAILIAN = Dialect("Bailian", "s", 16, session="chat_id")


NO_PARENT = ("", "-1")  # what a Bailian conversation's first turn has as parent_chat_id


def is_bailian(keys: set[str]) -> bool:
    return {"chat_id", "input_length"} <= keys or {"parent_chat_id", "input_length"} <= keys


def read_mooncake(file: TraceFile, report: Report) -> Draft:
    return _read(file, report, MOONCAKE)


def read_bailian(file: TraceFile, report: Report) -> Draft:
    return _read(file, report, BAILIAN)


def _read(file: TraceFile, report: Report, dialect: Dialect) -> Draft:
    times: list[int | Decimal] = []
    prompt: list[int] = []
    output: list[int] = []
    lines: list[int] = []
    ids: list[list[int]] = []
    turns: list[_Turn] = []
    aborted: list[bool] = []
    caps: list[int] = []
    served = 0
    clock = jsonl.Clock("timestamp", report)
    for line, row in jsonl.read_rows(file, report):
        try:
            turn = _turn(row, dialect)
            check = jsonl.Checks()
            time = 0 if turn.has_delay else check(clock, row)
            length = check(jsonl.tokens, row, "input_length", report, line)
            generated = check(output_tokens, row, "output_length", "max_tokens", report, line)
            cap = (
                check(jsonl.tokens, row, "max_tokens", report, line) if "max_tokens" in row else -1
            )
            ended_early = "status" in row and is_aborted(row["status"], report, line)
            content = check(jsonl.ids, row, "hash_ids")
            check.done()
        except RowError as error:
            report.bad_row(line, str(error))
            continue
        if row.get("delay") is not None and not turn.has_delay:
            report.notice("both a timestamp and a delay; the timestamp is used", line)
        times.append(time)
        prompt.append(length)
        output.append(generated)
        lines.append(line)
        ids.append(content)
        turns.append(turn)
        caps.append(cap)
        aborted.append(ended_early)
        served += generated > 0
        if report.enough(served):
            break
    timed = [value for value, turn in zip(times, turns, strict=True) if not turn.has_delay] or [0]
    integral = all(type(value) is int for value in timed)
    unit = choose_unit(
        report,
        documented=dialect.unit
        if integral or dialect.unit == "s"
        else None,  # Mooncake's ms are whole
        whose=dialect.whose,
        integral=integral,
        low=as_float(min(timed)),
        high=as_float(max(timed)),
        rows=len(timed),
    )
    block = fit_block_tokens(prompt, ids, lines, dialect.hash_block_tokens, report)
    draft = Draft(
        time_ns=times_from_numbers(times, lines, unit, report),
        prompt=np.asarray(prompt, dtype=np.int64),
        output=np.asarray(output, dtype=np.int64),
        lines=np.asarray(lines, dtype=np.int64),
        hash_ids=ids,
        hash_block_tokens=block,
    )
    attach_caps(draft, caps)
    attach_aborted(draft, aborted, report)
    _link_turns(draft, turns, unit, report)
    return draft


@dataclass(frozen=True, slots=True)
class _Turn:
    """How a row hangs together with others of its session."""

    session: str = ""
    chat: str = ""
    parent: str = ""
    has_delay: bool = False
    delay: int | Decimal = 0


_ALONE = _Turn()


def _turn(row: dict[str, Any], dialect: Dialect) -> _Turn:
    if dialect is BAILIAN:
        return _Turn(chat=jsonl.label(row, "chat_id"), parent=jsonl.label(row, "parent_chat_id"))
    if "session_id" not in row:
        if row.get("timestamp") is None and row.get("delay") is not None:
            raise RowError("has a delay but no session_id whose previous turn it could follow")
        return _ALONE
    # aiperf: the first turn of a session has a timestamp, later ones the delay after the previous answer.
    has_delay = row.get("delay") is not None and row.get("timestamp") is None
    return _Turn(
        session=jsonl.label(row, "session_id"),
        has_delay=has_delay,
        delay=jsonl.number(row, "delay") if has_delay else 0,
    )


def _link_turns(draft: Draft, turns: list[_Turn], unit: str, report: Report) -> None:
    """Fill sessions and dependencies. A turn with a delay follows the one before it in its session."""
    if not any(turn.session or turn.chat for turn in turns):
        return
    n = len(turns)
    after = np.full(n, -1, dtype=np.int64)
    think = np.zeros(n, dtype=np.int64)
    names = [turn.session for turn in turns]
    last: dict[str, int] = {}
    for row, turn in enumerate(turns):
        if turn.chat:
            parent = last.get(turn.parent)
            if parent is None and turn.parent not in NO_PARENT:
                report.notice(
                    "parent_chat_id names no earlier row; the turn begins a conversation of its own",
                    draft.line(row),
                )
            if turn.chat in last:
                report.notice(
                    "chat_id has occurred before; turns that name it follow the latest",
                    draft.line(row),
                )
            # Bailian: a chat's turns name their parent; the conversation is called after its root.
            names[row] = names[parent] if parent is not None else turn.chat
            last[turn.chat] = row
            continue
        if turn.has_delay:
            if turn.session not in last:
                report.fail(
                    "has a delay, but is the first turn of its session: it needs a timestamp",
                    draft.line(row),
                )
            after[row] = last[turn.session]
            think[row] = times_from_numbers([turn.delay], [draft.line(row)], unit, report)[0]
            # Where it would stand if answers took no time; replay sends it once the previous turn has ended.
            draft.time_ns[row] = draft.time_ns[after[row]] + think[row]
        if turn.session:
            last[turn.session] = row
    draft.sessions = names
    if (after >= 0).any():
        draft.after, draft.think_ns = after, think
        report.assume(
            f"{int((after >= 0).sum())} turns follow the previous turn of their session after its end plus their delay; "
            "input_length is taken as a turn's whole prompt."
        )
