"""OpenTelemetry GenAI spans (OTLP JSON, or one SDK span a line): start time and token usage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from vsim.traces import jsonl
from vsim.traces.clock import MAX_NS, TimeError, datetime_to_ns, is_whole
from vsim.traces.draft import Draft
from vsim.traces.files import TraceFile
from vsim.traces.options import Report, RowError
from vsim.traces.outcome import attach_aborted, attach_caps

# Semantic conventions for GenAI; the second names are older, and vLLM's (vllm/tracing/utils.py, 0.32.0).
INPUT = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens")
OUTPUT = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens")
CAP = ("gen_ai.request.max_tokens",)
SESSION = ("gen_ai.conversation.id", "session.id")
TENANT = ("tenant.id", "tenant", "user.id", "enduser.id")
# Operations that are not one generation by one model: their tokens are sums, or no generation at all.
NOT_ONE_REQUEST = frozenset(
    ("invoke_agent", "create_agent", "execute_tool", "embeddings", "invoke_workflow")
)


@dataclass(slots=True)
class _Span:
    line: int
    id: str
    parent: str
    start_ns: int
    prompt: int
    output: int
    cap: int
    session: str
    tenant: str
    failed: bool


def recognise(row: dict[str, Any]) -> bool:
    if "resourceSpans" in row or "resource_spans" in row:
        return True
    attributes = row.get("attributes")
    return isinstance(attributes, dict | list) and (
        "start_time" in row or "startTimeUnixNano" in row
    )


def read_otel(file: TraceFile, report: Report) -> Draft:
    """One request for each span with token usage; a span inside another such span is the same request."""
    spans: list[_Span] = []
    others = 0
    for line, row in _documents(file, report):
        try:
            for span in _spans(row):
                read = _span(span, line, report)
                if read is None:
                    others += 1
                else:
                    spans.append(read)
        except RowError as error:
            report.bad_row(line, str(error))
    if others:
        report.dropped["span_without_tokens"] += others
        report.assume(f"{others} spans without token usage of one generation are left out.")
    with_tokens = {span.id for span in spans if span.id}
    outer = [span for span in spans if not span.parent or span.parent not in with_tokens]
    if len(outer) < len(spans):
        count = len(spans) - len(outer)
        report.dropped["nested_span"] += count
        report.assume(
            f"{count} spans lie inside another one with tokens: the same request seen twice, counted once."
        )
    draft = Draft(
        time_ns=np.asarray([span.start_ns for span in outer], dtype=np.int64),
        prompt=np.asarray([span.prompt for span in outer], dtype=np.int64),
        output=np.asarray([span.output for span in outer], dtype=np.int64),
        lines=np.asarray([span.line for span in outer], dtype=np.int64),
    )
    attach_caps(draft, [span.cap for span in outer])
    attach_aborted(draft, [span.failed and span.output > 0 for span in outer], report)
    if any(span.session for span in outer):
        draft.sessions = [span.session for span in outer]
    if any(span.tenant for span in outer):
        draft.tenants = [span.tenant for span in outer]
    # Exporters write spans when they end, so the file is not in order of start; that is no oddity here.
    order = np.argsort(draft.time_ns, kind="stable")
    _reorder(draft, order)
    return draft


def _reorder(draft: Draft, order: Any) -> None:
    draft.time_ns, draft.prompt, draft.output = (
        draft.time_ns[order],
        draft.prompt[order],
        draft.output[order],
    )
    if draft.lines is not None:
        draft.lines = draft.lines[order]
    if draft.max_tokens is not None:
        draft.max_tokens = draft.max_tokens[order]
    if draft.aborted is not None:
        draft.aborted = draft.aborted[order]
    if draft.sessions is not None:
        draft.sessions = [draft.sessions[row] for row in order.tolist()]
    if draft.tenants is not None:
        draft.tenants = [draft.tenants[row] for row in order.tolist()]


def _documents(file: TraceFile, report: Report) -> Iterator[tuple[int, dict[str, Any]]]:
    """A pretty-printed document, or one object a line."""
    first = next((line for line in file.head.split(b"\n") if line.strip()), b"")
    try:
        jsonl.parse(first)
        one_a_line = True
    except RowError:
        one_a_line = len(file.head.split(b"\n")) == 1
    if one_a_line or file.head.lstrip()[:1] == b"[":
        yield from jsonl.read_rows(file, report)
        return
    try:
        row = jsonl.parse(file.document())
    except RowError as error:
        report.fail(str(error))
    if not isinstance(row, dict):
        report.fail("is not a JSON object")
    yield 1, row


def _spans(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The spans of an OTLP export, or the row itself."""
    resources = row.get("resourceSpans", row.get("resource_spans"))
    if resources is None:
        yield row
        return
    for resource in _list(resources, "resourceSpans"):
        for scope in _list(
            resource.get("scopeSpans", resource.get("scope_spans", [])), "scopeSpans"
        ):
            yield from _list(scope.get("spans", []), "spans")


def _list(value: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise RowError(f"{name} is not a list of objects")
    return value


def _span(span: dict[str, Any], line: int, report: Report) -> _Span | None:
    attributes = _attributes(span.get("attributes"))
    if str(attributes.get("gen_ai.operation.name", "")) in NOT_ONE_REQUEST:
        return None
    prompt_name = next((name for name in INPUT if name in attributes), None)
    if prompt_name is None:
        return None
    output_name = next((name for name in OUTPUT if name in attributes), None)
    if output_name is None:
        attributes = {**attributes, OUTPUT[0]: 0}
        output_name = OUTPUT[0]
    cap_name = next((name for name in CAP if attributes.get(name) is not None), None)
    status = span.get("status")
    code = (status.get("code") or status.get("status_code")) if isinstance(status, dict) else None
    context = span.get("context")
    own = context if isinstance(context, dict) else span
    return _Span(
        line=line,
        id=str(own.get("spanId", own.get("span_id", ""))),
        parent=str(
            span.get("parentSpanId", span.get("parent_id", span.get("parent_span_id", ""))) or ""
        ),
        start_ns=_start(span),
        prompt=jsonl.tokens(attributes, prompt_name, report, line),
        output=jsonl.tokens(attributes, output_name, report, line),
        cap=-1 if cap_name is None else jsonl.tokens(attributes, cap_name, report, line),
        session=_first_label(attributes, SESSION),
        tenant=_first_label(attributes, TENANT),
        failed=str(code).upper() in ("2", "ERROR", "STATUS_CODE_ERROR"),
    )


def _first_label(attributes: dict[str, Any], names: tuple[str, ...]) -> str:
    return next(
        (jsonl.label(attributes, name) for name in names if attributes.get(name) is not None), ""
    )


def _start(span: dict[str, Any]) -> int:
    value = span.get("startTimeUnixNano", span.get("start_time_unix_nano"))
    if value is not None:
        ns = jsonl.number({"startTimeUnixNano": value}, "startTimeUnixNano")
        if ns > MAX_NS or not is_whole(ns):
            raise RowError(f"startTimeUnixNano is {str(ns)[:40]}, not a time in ns")
        return int(ns)
    text = span.get("start_time")
    if not isinstance(text, str):
        raise RowError("startTimeUnixNano (or start_time) is missing")
    try:
        return datetime_to_ns(text)
    except TimeError as error:
        raise RowError(f"start_time: {error}") from None


def _attributes(raw: Any) -> dict[str, Any]:
    """OTLP's list of key/value pairs, or the SDK's plain object, as a dict."""
    if raw is None:
        return {}
    if isinstance(raw, dict):
        return raw
    if not isinstance(raw, list):
        raise RowError("attributes is neither a list nor an object")
    out: dict[str, Any] = {}
    for item in raw:
        value = item.get("value") if isinstance(item, dict) else None
        if (
            not isinstance(item, dict)
            or not isinstance(item.get("key"), str)
            or not isinstance(value, dict)
        ):
            raise RowError("attributes holds something that is no key and value")
        kinds = ("intValue", "doubleValue", "stringValue", "boolValue")
        kind = next((kind for kind in kinds if kind in value), None)
        if kind is None:
            continue
        content = value[kind]
        if (
            kind == "intValue"
            and isinstance(content, str)
            and content.isascii()
            and content.isdigit()
            and len(content) < 20
        ):
            content = int(content)  # OTLP JSON writes 64-bit integers as text
        out[item["key"]] = content
    return out
