"""OpenAI batch files: prompts as text and a cap on the answer; no times and no answer lengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from vsim.traces import jsonl
from vsim.traces.draft import Draft
from vsim.traces.files import TraceFile
from vsim.traces.options import Report, RowError
from vsim.traces.outcome import attach_caps
from vsim.traces.text_length import TEMPLATE_TOKENS, text_counter

CAPS = ("max_completion_tokens", "max_tokens", "max_output_tokens")


def recognise(keys: set[str]) -> bool:
    return {"custom_id", "body"} <= keys


def read_openai_batch(file: TraceFile, report: Report) -> Draft:
    """Read batch requests, all sent at 0. Output lengths need `output_tokens_model`: a cap is no length."""
    model = report.options.output_tokens_model
    if model is None:
        report.fail(
            "an OpenAI batch file has no output lengths: max_completion_tokens is a cap, not a length; pass "
            "--output-tokens N, or --output-tokens upper-bound to take the cap"
        )
    count = text_counter(report)
    report.oddity("A batch has no arrival times: all requests are sent at 0.")
    prompt: list[int] = []
    output: list[int] = []
    caps: list[int] = []
    lines: list[int] = []
    for line, row in jsonl.read_rows(file, report):
        try:
            body = row.get("body")
            if not isinstance(body, dict):
                raise RowError("body is missing or not an object")
            name = next((name for name in CAPS if body.get(name) is not None), None)
            cap = -1 if name is None else jsonl.tokens(body, name, report, line)
            if model == "upper-bound" and cap < 0:
                raise RowError("body has no max_completion_tokens to take as an upper bound")
            length = _prompt_tokens(body, count)
        except RowError as error:
            report.bad_row(line, str(error))
            continue
        prompt.append(length)
        output.append(cap if model == "upper-bound" else int(model))
        caps.append(cap)
        lines.append(line)
        if report.enough(len(output)):
            break
    if model == "upper-bound":
        report.assume("Output lengths are upper bounds: the file has only the clients' caps.")
    else:
        report.assume(f"All requests get {model} output tokens, as asked.")
    draft = Draft(
        time_ns=np.zeros(len(prompt), dtype=np.int64),
        prompt=np.asarray(prompt, dtype=np.int64),
        output=np.asarray(output, dtype=np.int64),
        lines=np.asarray(lines, dtype=np.int64),
    )
    attach_caps(draft, caps)
    return draft


def _prompt_tokens(body: dict[str, Any], count: Callable[[str], int]) -> int:
    """Tokens of messages, prompt or input; parts that aren't text (images) count nothing."""
    messages = body.get("messages")
    if isinstance(messages, list):
        total = 0
        for message in messages:
            if not isinstance(message, dict):
                raise RowError("messages holds something that is no message")
            total += TEMPLATE_TOKENS + sum(count(text) for text in _texts(message.get("content")))
        return total
    for name in ("prompt", "input"):
        if name in body:
            return sum(count(text) for text in _texts(body[name]))
    raise RowError("body has neither messages nor prompt nor input")


def _texts(content: Any) -> list[str]:
    if isinstance(content, str):
        return [content]
    if isinstance(content, list):
        out = []
        for part in content:
            if isinstance(part, str):
                out.append(part)
            elif isinstance(part, dict) and isinstance(part.get("text"), str):
                out.append(part["text"])
            elif isinstance(part, dict) and isinstance(part.get("content"), str | list):
                out.extend(_texts(part["content"]) if isinstance(part["content"], str) else [])
        return out
    return []
