"""A `Trace` to a file of our own: JSON lines or Parquet, lossless, and whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from vsim.errors import UserError
from vsim.traces.arrow import to_arrow
from vsim.traces.own_jsonl import SCHEMA
from vsim.traces.own_parquet import META_KEY
from vsim.traces.trace import Trace


def write_trace(trace: Trace, path: str | Path) -> None:
    """Write `vsim/trace/1` as Parquet if the name ends in .parquet, else as JSON lines (.gz and .zst too).

    `read_trace` gives back the same trace. The file appears complete under its name or not at all.
    Raises UserError if it can't be written.
    """
    path = Path(path)
    with whole_file(path) as stream:
        if path.suffix == ".parquet":
            _write_parquet(trace, stream)
        else:
            with compressed(stream, path) as out:
                for line in jsonl_lines(trace):
                    out.write(line.encode())


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """A temporary file beside `path` that takes its name when the block ends well, and vanishes otherwise."""
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise UserError(f"{path}: can't be written: {error.strerror or error}") from None
    try:
        with os.fdopen(handle, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)  # mkstemp's 0600 would surprise whoever shares the file
        os.replace(temporary, path)
    except OSError as error:
        _discard(temporary)
        raise UserError(f"{path}: can't be written: {error.strerror or error}") from None
    except BaseException:
        _discard(temporary)
        raise


def _discard(temporary: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(temporary)


@contextlib.contextmanager
def compressed(stream: IO[bytes], path: Path) -> Iterator[Any]:
    """`stream`, compressed if the name ends in .gz or .zst; the same trace gives the same bytes."""
    if path.suffix == ".gz":
        import gzip

        with gzip.GzipFile(filename="", fileobj=stream, mode="wb", mtime=0) as out:
            yield out
    elif path.suffix == ".zst":
        import zstandard

        with zstandard.ZstdCompressor().stream_writer(stream, closefd=False) as zst:
            yield zst
    else:
        yield stream


def _describe(trace: Trace) -> dict[str, Any]:
    header: dict[str, Any] = {
        "schema": SCHEMA,
        "source": {
            "name": trace.source.name,
            "format": trace.source.format,
            "sha256": trace.source.sha256,
        },
        "origin_ns": trace.origin_ns,
    }
    if trace.prefix_block_tokens:
        header["hash_block_tokens"] = trace.prefix_block_tokens
    if trace.assumptions:
        header["assumptions"] = list(trace.assumptions)
    if trace.dropped:
        header["dropped"] = dict(trace.dropped)
    return header


def jsonl_lines(trace: Trace) -> Iterator[str]:
    """The describing line, then one line a request."""
    yield json.dumps(_describe(trace)) + "\n"
    arrival, prompt, output = (
        trace.arrival_ns.tolist(),
        trace.prompt_tokens.tolist(),
        trace.output_tokens.tolist(),
    )
    offsets = None if trace.prefix_offsets is None else trace.prefix_offsets.tolist()
    plain = all(
        column is None
        for column in (trace.max_tokens, trace.priority, trace.tenant, trace.session, trace.aborted)
    )
    plain = plain and trace.sessions is None and offsets is None
    for row in range(len(trace)):
        numbers = f'"timestamp_ns":{arrival[row]},"input_tokens":{prompt[row]},"output_tokens":{output[row]}'
        if plain:
            yield f"{{{numbers}}}\n"
            continue
        fields = _fields(trace, row)
        if offsets is not None and trace.prefix_ids is not None:
            fields["hash_ids"] = trace.prefix_ids[offsets[row] : offsets[row + 1]].tolist()
        more = json.dumps(fields, separators=(",", ":"))[1:-1]
        yield f"{{{numbers}{',' if more else ''}{more}}}\n"


def _fields(trace: Trace, row: int) -> dict[str, Any]:
    """A row's optional fields, content ids aside."""
    fields: dict[str, Any] = {}
    if trace.max_tokens is not None:
        fields["max_tokens"] = int(trace.max_tokens[row])
    if trace.priority is not None:
        fields["priority"] = int(trace.priority[row])
    if trace.tenant is not None and trace.tenant_names:
        fields["tenant"] = trace.tenant_names[trace.tenant[row]]
    if trace.session is not None and trace.session[row] >= 0:
        fields["session"] = trace.session_names[trace.session[row]]
    if trace.aborted is not None and trace.aborted[row]:
        fields["aborted"] = True
    if trace.sessions is not None and trace.sessions.after[row] >= 0:
        fields["after"] = int(trace.sessions.after[row])
        fields["think_ns"] = int(trace.sessions.think_ns[row])
    return fields


def _write_parquet(trace: Trace, stream: IO[bytes]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns: dict[str, Any] = {
        "timestamp_ns": to_arrow(trace.arrival_ns),
        "input_tokens": to_arrow(trace.prompt_tokens),
        "output_tokens": to_arrow(trace.output_tokens),
    }
    if trace.max_tokens is not None:
        columns["max_tokens"] = to_arrow(trace.max_tokens)
    if trace.priority is not None:
        columns["priority"] = to_arrow(trace.priority)
    if trace.tenant is not None and trace.tenant_names:
        columns["tenant"] = pa.array([trace.tenant_names[code] for code in trace.tenant.tolist()])
    if trace.session is not None:
        names = (*trace.session_names, None)  # code -1: none
        columns["session"] = pa.array([names[code] for code in trace.session.tolist()], pa.string())
    if trace.aborted is not None:
        columns["aborted"] = to_arrow(trace.aborted)
    if trace.sessions is not None:
        columns["after"] = to_arrow(trace.sessions.after)
        columns["think_ns"] = to_arrow(trace.sessions.think_ns)
    if trace.prefix_offsets is not None and trace.prefix_ids is not None:
        columns["hash_ids"] = pa.LargeListArray.from_arrays(
            to_arrow(trace.prefix_offsets.astype(np.int64)), to_arrow(trace.prefix_ids)
        )
    table = pa.table(columns).replace_schema_metadata(
        {META_KEY: json.dumps(_describe(trace)).encode()}
    )
    pq.write_table(table, stream)
