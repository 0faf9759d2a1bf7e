"""`read_trace`: any file people have, recognised by what is in it, to a `Trace`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from vsim.errors import UserError
from vsim.traces import (
    bench_serve,
    csv_formats,
    llmservingsim,
    mooncake,
    openai_batch,
    otel,
    own_jsonl,
    plain,
    servegen,
    sharegpt,
)
from vsim.traces.csv_blocks import header_of
from vsim.traces.draft import Draft, finish
from vsim.traces.files import TraceFile, open_trace_file
from vsim.traces.jsonl import parse, read_array
from vsim.traces.options import OnError, ReadOptions, Report, RowError, ZeroOutput, printable
from vsim.traces.trace import Trace, TraceSource

Reader = Callable[[TraceFile, Report], Draft]


@dataclass(frozen=True, slots=True)
class Format:
    """A format that can be asked for by name, with what a person should know about it."""

    read: Reader
    says: str


FORMATS: dict[str, Format] = {
    "azure": Format(csv_formats.read_azure, "Azure LLM inference 2023/2024 CSV"),
    "burstgpt": Format(csv_formats.read_burstgpt, "BurstGPT CSV, 6 or 8 columns"),
    "mooncake": Format(mooncake.read_mooncake, "Mooncake, aiperf or vLLM timed_trace JSON lines"),
    "bailian": Format(
        mooncake.read_bailian, "Alibaba Bailian JSON lines (seconds, 16-token blocks)"
    ),
    "sharegpt": Format(sharegpt.read_sharegpt, "ShareGPT JSON, whole conversations turn by turn"),
    "sharegpt-first": Format(
        sharegpt.read_sharegpt_first, "ShareGPT JSON, first exchange only, as vllm bench serve"
    ),
    "vllm-bench": Format(bench_serve.read_bench_serve, "vllm bench serve --save-detailed JSON"),
    "llmservingsim": Format(
        llmservingsim.read_llmservingsim, "LLMServingSim JSON lines, flat or sub-requests"
    ),
    "servegen": Format(servegen.read_servegen, "ServeGen NAME-trace.csv with NAME-dataset.json"),
    "servegen-lengths": Format(servegen.refuse_lengths, "ServeGen length tables (not a trace)"),
    "openai-batch": Format(openai_batch.read_openai_batch, "OpenAI batch JSON lines"),
    "otel": Format(otel.read_otel, "OpenTelemetry GenAI spans as JSON"),
    "vidur": Format(csv_formats.read_vidur, "Vidur CSV"),
    "splitwise-sim": Format(csv_formats.read_splitwise_sim, "splitwise-sim CSV"),
    "vsim-jsonl": Format(own_jsonl.read_own_jsonl, "our own JSON lines, vsim/trace/1"),
    "vsim-parquet": Format(plain.read_mapped_parquet, "our own Parquet, vsim/trace/1"),
    "csv": Format(plain.read_mapped_csv, "any CSV; columns by name or --map"),
    "jsonl": Format(plain.read_mapped_jsonl, "any JSON lines; fields by name or --map"),
    "parquet": Format(plain.read_mapped_parquet, "any Parquet; columns by name or --map"),
}


def read_trace(
    path: str | Path,
    *,
    format: str | None = None,
    time_unit: str | None = None,
    limit: int | None = None,
    strict: bool = False,
    on_error: OnError = "fail",
    zero_output: ZeroOutput = "drop",
    column_map: Mapping[str, str] | None = None,
    hash_block_tokens: int | None = None,
    output_tokens_model: int | Literal["upper-bound"] | None = None,
    tokenizer: str | None = None,
    seed: int = 0,
    max_bytes: int | None = None,
) -> Trace:
    """Read a trace of any known format (see FORMATS); the format is recognised by content.

    `time_unit` (s, ms, us, ns) overrides what the format documents. `limit`: the first so many requests of
    the file. `strict` refuses whatever lenient reading would announce: disorder, numbers written as text, a
    cut-off tail, ids that don't fit. `on_error="skip"` counts unusable rows instead of failing on the first.
    `zero_output`: what rows with 0 output tokens (failed requests) become. `column_map`: our field -> the
    file's column, for plain CSV, JSON lines and Parquet. `hash_block_tokens`: prompt tokens per hash id.
    `output_tokens_model`: output length of rows that have none: a constant, or "upper-bound" for the cap.

    All that was assumed stands in `Trace.assumptions`, what was left out in `Trace.dropped`.
    Raises UserError, with file, line and remedy, for anything that can't be read.
    """
    file = open_trace_file(path, max_bytes)
    if format is not None and format not in FORMATS:
        raise UserError(f"trace format {format!r} is not known; known are {', '.join(FORMATS)}")
    options = ReadOptions(
        time_unit=time_unit,
        limit=limit,
        strict=strict,
        on_error=on_error,
        zero_output=zero_output,
        column_map=dict(column_map or {}),
        hash_block_tokens=hash_block_tokens,
        output_tokens_model=output_tokens_model,
        tokenizer=tokenizer,
        seed=seed,
        max_bytes=max_bytes,
    )
    report = Report(file.name, options)
    chosen = format or sniff(file, has_map=bool(column_map))
    if (chosen in ("vsim-parquet", "parquet")) != (file.kind == "parquet"):
        raise UserError(
            f"{file.name}: is {'' if file.kind == 'parquet' else 'not '}Parquet, unlike format {chosen!r}"
        )
    draft = FORMATS[chosen].read(file, report)
    source = TraceSource(file.name, chosen, file.sha256())
    described = draft.extra.get("source")
    trace = finish(draft, report, source)
    return _restored(trace, draft, described)


def _restored(trace: Trace, draft: Draft, described: object) -> Trace:
    """Where our own file tells what trace it was made from, that stays the trace's source and origin."""
    import dataclasses

    if not isinstance(described, dict):
        return trace
    source = TraceSource(
        str(described.get("name", trace.source.name)),
        str(described.get("format", trace.source.format)),
        str(described.get("sha256", "")),
    )
    origin = draft.extra.get("origin_ns", 0)
    moved = trace.origin_ns if isinstance(trace.origin_ns, int) else 0
    return dataclasses.replace(trace, source=source, origin_ns=int(np.int64(origin)) + moved)  # type: ignore[arg-type, call-overload]


def sniff(file: TraceFile, has_map: bool = False) -> str:
    """The name of a file's format, from its content. Raises UserError listing what is known."""
    if file.kind == "parquet":
        return "parquet" if has_map else "vsim-parquet"
    first = file.head.lstrip()[:1]
    if first in (b"{", b"["):
        return _sniff_json(file, has_map)
    if not has_map and servegen.recognise_rates(
        file.head.split(b"\n", 1)[0].decode("utf-8", "replace")
    ):
        return "servegen"
    header = header_of(file.head)
    if has_map:
        return "csv"
    known = csv_formats.recognise(header) or ("csv" if plain.can_guess(header) else None)
    if known is None:
        if header and header[0][:1].isdigit():
            raise UserError(
                printable(
                    f"{file.name}: its first line holds values ({', '.join(header)[:100]}), not column names; "
                )
                + "put a header line such as timestamp,input_tokens,output_tokens before it"
            )
        raise _unknown(
            file, f"a CSV with columns {', '.join(header)[:200]}" if len(header) > 1 else "text"
        )
    return known


def _sniff_json(file: TraceFile, has_map: bool) -> str:
    row = _first_object(file)
    if has_map and row is not None:
        return "jsonl"
    if servegen.recognise_lengths(file.head):
        return "servegen-lengths"
    if row is None:
        raise _unknown(file, "JSON of another shape")
    keys = set(row)
    by_keys = (
        ("vsim-jsonl", "schema" in keys),
        ("sharegpt", sharegpt.recognise(row)),
        ("otel", otel.recognise(row)),
        ("vllm-bench", bench_serve.recognise(row)),
        ("openai-batch", openai_batch.recognise(keys)),
        ("llmservingsim", llmservingsim.recognise(keys)),
        ("bailian", mooncake.is_bailian(keys)),
        (
            "mooncake",
            "input_length" in keys and bool(keys & {"output_length", "timestamp", "hash_ids"}),
        ),
        (
            "vsim-jsonl",
            {"input_tokens", "output_tokens"} <= keys
            and bool(keys & {"timestamp", "timestamp_ns"}),
        ),
        ("jsonl", plain.can_guess(list(keys))),
    )
    for name, fits in by_keys:
        if fits:
            return name
    if keys & {"ttft", "ttft_s", "ttfts", "first_token"}:
        raise UserError(
            f"{file.name}: is a log of measured latencies without prompt and output lengths: it can be compared with, "
            "but not replayed; add input_tokens, output_tokens and timestamp to each line"
        )
    raise _unknown(file, f"JSON with fields {', '.join(map(str, list(row)[:12]))[:200]}")


def _first_object(file: TraceFile) -> dict[str, object] | None:
    """The first JSON object of a file: of its first lines, of its array, or the whole file.

    Raises UserError where the first line looks like an object but is none.
    """
    lines = [line for line in file.head.split(b"\n") if line.strip()]
    if file.head.lstrip()[:1] == b"[":
        if file.head.strip() == b"[]":
            raise UserError(
                f"{file.name}: has no requests, only an empty list; a trace needs at least one"
            )
        quiet = Report(file.name, ReadOptions(on_error="skip"))
        return next((row for _, row in read_array(file, quiet)), None)
    for line in lines[:20]:
        try:
            row = parse(line)
        except RowError:
            continue
        if isinstance(row, dict):
            return row
    try:
        row = parse(file.document())
    except RowError as error:
        where = f"{file.name}:1" if len(lines) == 1 else file.name
        raise UserError(printable(f"{where}: {error}")) from None
    return row if isinstance(row, dict) else None


def _unknown(file: TraceFile, what: str) -> UserError:
    return UserError(
        printable(f"{file.name}: is {what}, which is no trace format known here; ")
        + "name its columns with --map input_tokens=COLUMN --map output_tokens=COLUMN --map timestamp=COLUMN, "
        f"or its format with --format (one of {', '.join(FORMATS)})"
    )
