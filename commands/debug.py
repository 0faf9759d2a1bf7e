"""`vsim debug`: what the scheduler decided, step by step."""

from __future__ import annotations

import contextlib
import gzip
import importlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import click

from vsim.errors import UserError


@click.group()
def debug() -> None:
    """See what the scheduler decided, step by step."""


@debug.command()
@click.argument("case", type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Write here instead of to the terminal; gzip when the name ends in .gz.",
)
@click.option("--max-steps", type=click.IntRange(min=0), help="Stop after so many logged steps.")
def steps(case: Path, out: Path | None, max_steps: int | None) -> None:
    """Run CASE (JSON) on a virtual clock and log every engine step as a JSON line.

    A case is a scheduler configuration and a list of requests; the log says for each step who was
    scheduled, admitted, preempted and finished, and the state of the KV cache, in the schema of
    docs/exactness.md. The last line is a summary.
    """
    from vsim.sim.case import load_case

    loaded = load_case(case)
    engine = "steplog_v0" if loaded.config.engine == "v0" else "steplog"
    records = importlib.import_module(f"vsim.sim.{engine}").run_case(loaded, max_steps)
    if out is None:
        write_records(records, sys.stdout)
        return
    with whole_file(out) as file:
        write_records(records, file)


def write_records(records: Iterator[dict[str, Any]], file: TextIO) -> None:
    """One compact JSON object a line."""
    for record in records:
        file.write(json.dumps(record, separators=(",", ":")) + "\n")


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[TextIO]:
    """A text file that appears under its name only once it is complete; gzip when the name ends in .gz.

    The same text gives the same bytes: no time and no name goes into the gzip header.
    """
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise UserError(f"--out {path}: cannot be written: {error.strerror or error}") from None
    try:
        with open(handle, "wb") as raw:
            if path.name.endswith(".gz"):
                with (
                    gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0) as packed,
                    io.TextIOWrapper(packed, encoding="utf-8", newline="\n") as text,
                ):
                    yield text
            else:
                with io.TextIOWrapper(raw, encoding="utf-8", newline="\n") as text:
                    yield text
        # mkstemp makes files for the owner alone; this one is as public as any other output.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, path)
    except OSError as error:
        Path(name).unlink(missing_ok=True)
        raise UserError(f"--out {path}: cannot be written: {error.strerror or error}") from None
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
