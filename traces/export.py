"""A `Trace` in other tools' forms: Azure CSV, Mooncake, vLLM's timed_trace; what they can't carry is said."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from vsim.errors import UserError
from vsim.traces.trace import Trace
from vsim.traces.write import compressed, whole_file, write_trace

TIMED_TRACE_CHUNK = 16  # vLLM's default --timed-trace-chunk-hash-size
# Where a trace has no dates, Azure's form still needs some.
NO_DATE_NS = int(datetime(2000, 1, 1, tzinfo=UTC).timestamp()) * 1_000_000_000
FIRST_DATE_NS = 10**17  # March 1973: a clock that reads less than this is an offset, not a date


def write_as(trace: Trace, path: str | Path, format: str) -> tuple[str, ...]:
    """Write a trace in a format of WRITERS; returns sentences on what was lost and how to read it.

    The file appears complete or not at all. Raises UserError for an unknown format or an unwritable path.
    """
    path = Path(path)
    if format in ("vsim-jsonl", "vsim-parquet"):
        if (path.suffix == ".parquet") != (format == "vsim-parquet"):
            raise UserError(
                f"{path.name}: names ending in .parquet are Parquet, others are not; {format} asked for"
            )
        write_trace(trace, path)
        return ()
    if format not in WRITERS:
        raise UserError(
            f"can't write format {format!r}; can write vsim-jsonl, vsim-parquet, {', '.join(WRITERS)}"
        )
    lines, said = WRITERS[format](trace)
    with whole_file(path) as stream, compressed(stream, path) as out:
        for line in lines:
            out.write(line.encode())
    return said


def _azure(trace: Trace) -> tuple[Iterator[str], tuple[str, ...]]:
    """Naive UTC time with 7 fraction digits (9 where 100 ns are not enough), CRLF, no final newline: as Azure."""
    dated = trace.origin_ns >= FIRST_DATE_NS
    times = trace.arrival_ns + (trace.origin_ns if dated else NO_DATE_NS)
    digits = 7 if not (times % 100).any() else 9
    said = _lost(
        trace, ("prefix", "tenant", "session", "sessions", "priority", "max_tokens", "aborted")
    )
    if not dated:
        said = (
            *said,
            "The trace has no dates: the first request is written as arriving at 2000-01-01 00:00:00.",
        )

    def lines() -> Iterator[str]:
        yield "TIMESTAMP,ContextTokens,GeneratedTokens"
        whole, nanos = np.divmod(times, 1_000_000_000)
        texts = np.datetime_as_string(whole.astype("datetime64[s]")).tolist()
        rows = zip(
            texts,
            nanos.tolist(),
            trace.prompt_tokens.tolist(),
            trace.output_tokens.tolist(),
            strict=True,
        )
        for text, nano, prompt, output in rows:
            yield f"\r\n{text.replace('T', ' ')}.{nano:09d}"[: 22 + digits] + f",{prompt},{output}"

    return lines(), said


def _decimal(ns: int, unit_ns: int) -> str:
    """`ns` in a unit, exactly: whole if it is, else with just the digits it needs."""
    whole, rest = divmod(ns, unit_ns)
    if not rest:
        return str(whole)
    return f"{whole}.{rest:0{len(str(unit_ns)) - 1}d}".rstrip("0")


def _mooncake(trace: Trace) -> tuple[Iterator[str], tuple[str, ...]]:
    """Mooncake's fields, times in ms; sessions as aiperf's session_id and delay where they fit."""
    linked = _as_delays(trace)
    said = _lost(trace, ("tenant", "priority", *(() if linked else ("sessions",))))
    if (trace.arrival_ns % 1_000_000).any():
        said = (
            *said,
            "Some times are no whole milliseconds and are written with a fraction: read with --time-unit ms.",
        )
    if trace.prefix_block_tokens not in (0, 512):
        said = (
            *said,
            f"Its ids cover {trace.prefix_block_tokens} tokens: read with --hash-block-tokens {trace.prefix_block_tokens}.",
        )

    def lines() -> Iterator[str]:
        for request in trace:
            fields = []
            turn = (
                linked and trace.sessions is not None and trace.sessions.after[request.index] >= 0
            )
            if request.session >= 0:
                fields.append(f'"session_id": {json.dumps(trace.session_names[request.session])}')
            if turn and trace.sessions is not None:
                fields.append(
                    f'"delay": {_decimal(int(trace.sessions.think_ns[request.index]), 1_000_000)}'
                )
            else:
                fields.append(f'"timestamp": {_decimal(request.arrival_ns, 1_000_000)}')
            fields.append(f'"input_length": {request.prompt_tokens}')
            fields.append(f'"output_length": {request.output_tokens}')
            if request.max_tokens is not None:
                fields.append(f'"max_tokens": {request.max_tokens}')
            if request.aborted:
                fields.append('"status": "aborted"')
            if request.prefix_ids or trace.prefix_ids is not None:
                fields.append(f'"hash_ids": {list(request.prefix_ids)}')
            yield "{" + ", ".join(fields) + "}\n"

    return lines(), said


def _as_delays(trace: Trace) -> bool:
    """Does every dependent turn follow the row before it in its own named session?"""
    if trace.sessions is None:
        return True
    if trace.session is None:
        return False
    last: dict[int, int] = {}
    for row, (session, after) in enumerate(
        zip(trace.session.tolist(), trace.sessions.after.tolist(), strict=True)
    ):
        if after >= 0 and (session < 0 or last.get(session) != after):
            return False
        if session >= 0:
            last[session] = row
    return True


def _timed_trace(trace: Trace) -> tuple[Iterator[str], tuple[str, ...]]:
    """Seconds and one id per 16 tokens of the whole prompt: vLLM makes prompts of ids alone.

    vLLM 0.32.0 benchmarks/datasets `TimedTrace`: a prompt without ids becomes empty, one with too few is
    cut short, and a partial last chunk of another length has other content. So pieces are split to 16
    tokens, and what is private gets ids of its own.
    """
    chunk = TIMED_TRACE_CHUNK
    size = trace.prefix_block_tokens or chunk
    if size % chunk:
        raise UserError(
            f"timed_trace needs ids of a multiple of {chunk} tokens; this trace's cover {size}"
        )
    per_piece = size // chunk
    low = (
        int(trace.prefix_ids.min()) if trace.prefix_ids is not None and len(trace.prefix_ids) else 0
    )
    high = (
        int(trace.prefix_ids.max())
        if trace.prefix_ids is not None and len(trace.prefix_ids)
        else -1
    )
    said = _lost(trace, ("tenant", "session", "sessions", "priority", "max_tokens", "aborted"))
    said = (
        *said,
        "Run it as: PYTHONHASHSEED=0 vllm bench serve --dataset-name timed_trace --dataset-path FILE --self-timed "
        f"--timed-trace-chunk-hash-size {chunk} --timed-trace-sec-multiplier 1 (vLLM seeds prompts with Python's "
        "salted hash, so the seed makes them the same each time).",
        f"Read it back with --time-unit s --hash-block-tokens {chunk}.",
    )

    def lines() -> Iterator[str]:
        fresh = (high - low + 1) * per_piece
        for request in trace:
            ids: list[int] = []
            for piece in request.prefix_ids:
                first = (piece - low) * per_piece
                ids.extend(range(first, first + per_piece))
            needed = -(-request.prompt_tokens // chunk)
            del ids[needed:]
            missing = needed - len(ids)
            ids.extend(range(fresh, fresh + missing))
            fresh += missing
            yield (
                f'{{"timestamp": {_decimal(request.arrival_ns, 1_000_000_000)}, '
                f'"input_length": {request.prompt_tokens}, "output_length": {request.output_tokens}, '
                f'"hash_ids": {ids}}}\n'
            )

    return lines(), said


def _lost(trace: Trace, columns: tuple[str, ...]) -> tuple[str, ...]:
    """A sentence on the columns that the trace has and the form has not."""
    names = {
        "prefix": ("prefix sharing", trace.prefix_ids),
        "tenant": ("tenants", trace.tenant),
        "session": ("session names", trace.session),
        "sessions": ("which turn waits for which", trace.sessions),
        "priority": ("priorities", trace.priority),
        "max_tokens": ("max_tokens", trace.max_tokens),
        "aborted": ("which requests were aborted", trace.aborted),
    }
    gone = [names[column][0] for column in columns if names[column][1] is not None]
    return (f"This form has no room for: {', '.join(gone)}.",) if gone else ()


Lines = tuple[Iterator[str], tuple[str, ...]]
WRITERS: dict[str, Callable[[Trace], Lines]] = {
    "azure": _azure,
    "mooncake": _mooncake,
    "timed_trace": _timed_trace,
}
