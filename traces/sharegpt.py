"""ShareGPT conversations: turn lengths from text, each turn after the previous one."""

from __future__ import annotations

from typing import Any

import numpy as np

from vsim.traces import jsonl
from vsim.traces.chains import growing_context
from vsim.traces.draft import Draft
from vsim.traces.files import TraceFile
from vsim.traces.options import Report, RowError
from vsim.traces.text_length import TEMPLATE_TOKENS, text_counter

BLOCK_TOKENS = 16
ASKERS = frozenset(("human", "user"))
ANSWERERS = frozenset(("gpt", "assistant", "bing", "bard", "chatgpt", "model"))


def recognise(row: dict[str, Any]) -> bool:
    return isinstance(row.get("conversations"), list)


def read_sharegpt(file: TraceFile, report: Report) -> Draft:
    """Every answer becomes a request whose prompt is the conversation before it; turns follow each other."""
    return _read(file, report, first_only=False)


def read_sharegpt_first(file: TraceFile, report: Report) -> Draft:
    """One request a conversation, from its first two messages, as `vllm bench serve` takes them.

    vLLM 0.32.0 benchmarks/datasets `ShareGPTDataset` looks at position, not at who speaks.
    """
    return _read(file, report, first_only=True)


def _read(file: TraceFile, report: Report, first_only: bool) -> Draft:
    count = text_counter(report)
    report.oddity(
        "The file has no arrival times: all conversations start at 0 (give them a rate to space them)."
    )
    prompt: list[int] = []
    output: list[int] = []
    lines: list[int] = []
    names: list[str] = []
    after: list[int] = []
    talk: list[
        int
    ] = []  # number of the conversation: ids may repeat, and all may stand in one line
    unanswered = talks = 0
    for line, row in jsonl.read_rows(file, report):
        try:
            messages = _messages(row)
        except RowError as error:
            report.bad_row(line, str(error))
            continue
        name = str(row.get("id", f"line {line}"))
        begin = len(prompt)
        if first_only:
            if len(messages) >= 2:
                prompt.append(count(messages[0][1]))
                output.append(count(messages[1][1]))
        else:
            _turns(messages, count, prompt, output)
        turns = len(prompt) - begin
        if not turns:
            unanswered += 1
        lines.extend([line] * turns)
        names.extend([name] * turns)
        talk.extend([talks] * turns)
        talks += 1
        after.extend([-1, *range(begin, begin + turns - 1)][:turns])
        if report.enough(len(output) - output.count(0)):
            break
    if unanswered:
        report.dropped["conversation_without_answer"] += unanswered
        report.assume(f"{unanswered} conversations without a question and an answer are left out.")
    n = len(prompt)
    draft = Draft(
        time_ns=np.zeros(n, dtype=np.int64),
        prompt=np.asarray(prompt, dtype=np.int64),
        output=np.asarray(output, dtype=np.int64),
        lines=np.asarray(lines, dtype=np.int64),
        zero_means="empty answers",
    )
    if first_only:
        report.assume(
            "Only the first two messages of each conversation are used, as vllm bench serve does."
        )
        return draft
    draft.sessions = names
    draft.after = np.asarray(after, dtype=np.int64)
    draft.think_ns = np.zeros(n, dtype=np.int64)
    draft.hash_ids = growing_context(talk, prompt, BLOCK_TOKENS)
    draft.hash_block_tokens = BLOCK_TOKENS
    if n:
        report.assume(
            "Each turn is sent as soon as the previous one of its conversation has ended: the file has no reading "
            f"times; each message adds {TEMPLATE_TOKENS} tokens for the chat template; a turn's prompt shares the previous "
            "prompt's full blocks, but not the answer's (an engine that caches answers hits a little more)."
        )
    return draft


def _turns(
    messages: list[tuple[str, str]], count: Any, prompt: list[int], output: list[int]
) -> None:
    """One request for each answer that follows a question; the context before it grows."""
    context = 0
    asked = False
    for speaker, text in messages:
        length = count(text)
        if speaker in ANSWERERS:
            if asked:
                prompt.append(context + TEMPLATE_TOKENS)
                output.append(length)
            asked = False
        elif speaker in ASKERS:
            asked = True
        context += length + TEMPLATE_TOKENS


def _messages(row: dict[str, Any]) -> list[tuple[str, str]]:
    messages = row.get("conversations")
    if not isinstance(messages, list):
        raise RowError("conversations is missing or not a list")
    out = []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("value"), str):
            raise RowError("conversations holds a message without a text in value")
        out.append((str(message.get("from", "")).lower(), message["value"]))
    return out
