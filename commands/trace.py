"""`vsim trace`: look at traces, convert them, make them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from vsim.commands.trace_make import anonymize, fit, generate, merge, scale, slice_
from vsim.commands.trace_options import trace_options


@click.group()
def trace() -> None:
    """Inspect, convert and generate request traces."""


@trace.command()
@click.argument("path", type=click.Path(path_type=Path))
@trace_options
@click.option("--json", "as_json", is_flag=True, help="All facts as JSON on stdout.")
@click.option(
    "--plot", type=click.Path(path_type=Path), help="Also write a self-contained HTML page here."
)
def inspect(path: Path, trace_flags: dict[str, Any], as_json: bool, plot: Path | None) -> None:
    """What a trace holds: rate, burstiness, lengths, tenants, sessions, sharing, and what was assumed."""
    import json

    from vsim.traces.facts import facts
    from vsim.traces.facts_text import text
    from vsim.traces.readers import read_trace

    found = facts(read_trace(path, **trace_flags))
    if plot is not None:
        from vsim.traces.facts_html import page
        from vsim.traces.write import whole_file

        with whole_file(plot) as stream:
            stream.write(page(found).encode())
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        click.echo(text(found), nl=False)


@trace.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@trace_options
@click.option(
    "--to",
    "target",
    type=click.Choice(["vsim-jsonl", "vsim-parquet", "mooncake", "timed_trace", "azure"]),
    help="Form to write; default: Parquet if OUT ends in .parquet, else our JSON lines.",
)
def convert(path: Path, out: Path, trace_flags: dict[str, Any], target: str | None) -> None:
    """Read PATH and write it to OUT in another form (.gz and .zst compress)."""
    from vsim.traces.export import write_as
    from vsim.traces.readers import read_trace

    read = read_trace(path, **trace_flags)
    target = target or ("vsim-parquet" if out.suffix == ".parquet" else "vsim-jsonl")
    said = write_as(read, out, target)
    click.echo(f"wrote {len(read):,} requests to {out} as {target}")
    for sentence in (*read.assumptions, *said):
        click.echo(f"note: {sentence}", err=True)


for maker in (generate, fit, scale, slice_, merge, anonymize):
    trace.add_command(maker)
