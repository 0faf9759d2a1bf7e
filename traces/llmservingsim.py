"""LLMServingSim's JSON lines: flat requests, and agentic sessions of sub-requests with tool time between."""

from __future__ import annotations

from typing import Any

import numpy as np

from vsim.traces import jsonl
from vsim.traces.chains import Chains
from vsim.traces.clock import MAX_NS, is_whole
from vsim.traces.draft import Draft
from vsim.traces.files import TraceFile
from vsim.traces.options import Report, RowError

BLOCK_TOKENS = 16


def recognise(keys: set[str]) -> bool:
    return "input_toks" in keys or "sub_requests" in keys


class _Rows:
    """Columns while a file is read; sub-requests become rows of their own."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.time: list[int] = []
        self.prompt: list[int] = []
        self.output: list[int] = []
        self.lines: list[int] = []
        self.ids: list[list[int]] = []
        self.sessions: list[str] = []
        self.after: list[int] = []
        self.think: list[int] = []
        self.chains = Chains(BLOCK_TOKENS)

    def add(
        self, row: dict[str, Any], line: int, time: int, session: str, after: int, think: int
    ) -> None:
        check = jsonl.Checks()
        prompt = check(jsonl.tokens, row, "input_toks", self.report, line)
        output = check(jsonl.tokens, row, "output_toks", self.report, line)
        tokens = check(jsonl.ids, row, "input_tok_ids")
        check.done()
        if tokens and len(tokens) != prompt:
            self.report.notice(
                "input_tok_ids has another length than input_toks; the ids are ignored", line
            )
            tokens = []
        self.time.append(time)
        self.prompt.append(prompt)
        self.output.append(output)
        self.lines.append(line)
        self.ids.append(self.chains.ids(tokens))
        self.sessions.append(session)
        self.after.append(after)
        self.think.append(think)

    def add_session(self, row: dict[str, Any], line: int, time: int) -> None:
        """A chain of sub-requests: each is sent once the one before has ended and its tool has run."""
        session = jsonl.label(row, "session_id") or f"line {line}"
        parts = row["sub_requests"]
        if (
            not isinstance(parts, list)
            or not parts
            or not all(isinstance(part, dict) for part in parts)
        ):
            raise RowError("sub_requests is not a list of objects")
        first = len(self.time)
        try:
            after, tool = -1, 0
            for part in parts:
                time += tool
                self.add(part, line, time, session, after, tool)
                after = len(self.time) - 1
                tool = (
                    _ns(part, "tool_duration_ns") if part.get("tool_duration_ns") is not None else 0
                )
                if time + tool > MAX_NS:
                    raise RowError("its tool times add up to more than 146 years")
        except RowError:
            for column in (self.time, self.prompt, self.output, self.lines, self.ids, self.sessions, self.after, self.think):  # fmt: skip
                del column[first:]  # type: ignore[attr-defined]
            raise


def _ns(row: dict[str, Any], name: str) -> int:
    value = jsonl.number(row, name)
    if value > MAX_NS or not is_whole(value):
        raise RowError(f"{name} is {value}, not a whole number of ns within 146 years")
    return int(value)


def read_llmservingsim(file: TraceFile, report: Report) -> Draft:
    """Read flat and agentic rows, mixed as they come. Times are ns from the start."""
    if report.options.time_unit not in (None, "ns"):
        report.fail("arrival_time_ns is in ns by its name; --time-unit can't change it")
    rows = _Rows(report)
    turns = 0
    for line, row in jsonl.read_rows(file, report):
        try:
            time = _ns(row, "arrival_time_ns")
            if "sub_requests" in row:
                rows.add_session(row, line, time)
                turns += 1
            else:
                rows.add(row, line, time, "", -1, 0)
        except RowError as error:
            report.bad_row(line, str(error))
        if report.enough(len(rows.output) - rows.output.count(0)):
            break
    draft = Draft(
        time_ns=np.asarray(rows.time, dtype=np.int64),
        prompt=np.asarray(rows.prompt, dtype=np.int64),
        output=np.asarray(rows.output, dtype=np.int64),
        lines=np.asarray(rows.lines, dtype=np.int64),
        hash_ids=rows.ids,
        hash_block_tokens=BLOCK_TOKENS,
    )
    if any(rows.ids):
        report.assume(
            "Prompts that begin with the same token ids share them, in blocks of 16 tokens."
        )
    if turns:
        draft.sessions = rows.sessions
        draft.after = np.asarray(rows.after, dtype=np.int64)
        draft.think_ns = np.asarray(rows.think, dtype=np.int64)
        report.assume(
            f"{turns} session{'s' * (turns != 1)} of sub-requests: each is sent after the previous one's end "
            "plus its tool time; what their prompts share is not in the file, so nothing is."
        )
    return draft
