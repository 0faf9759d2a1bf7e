"""`vsim export`: a run in the formats of the tools people have."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import click

from vsim.errors import UserError

FORMATS = ("report", "openmetrics", "perfetto", "markdown", "bench", "svg")


@click.command(short_help="Write a run for Prometheus, Perfetto, a pull request, or bench tools.")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--format", "form", type=click.Choice(FORMATS), required=True)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Instead of standard output; for svg a folder, and required.",
)
@click.option(
    "--interval", type=float, metavar="S", help="openmetrics: simulated time between samples."
)
@click.option(
    "--start-time",
    type=float,
    default=0.0,
    show_default=True,
    help="openmetrics: Unix time of the first arrival.",
)
@click.option(
    "--from", "start", type=float, default=0.0, help="perfetto: from this simulated second."
)
@click.option("--to", "end", type=float, help="perfetto: up to this simulated second.")
def export(
    run: Path,
    form: str,
    out: Path | None,
    interval: float | None,
    start_time: float,
    start: float,
    end: float | None,
) -> None:
    """Write RUN (a folder of vsim's, or a detailed `vllm bench serve` result) in another format.

    report: the page report.html. openmetrics: vLLM's own metric names with timestamps; `promtool tsdb create-blocks-from openmetrics`
    takes it. perfetto: Chrome trace JSON for ui.perfetto.dev. markdown: a summary for a pull request.
    bench: the schema of `vllm bench serve --save-result`. svg: every plot of the report as a file.
    """
    from vsim.sim.compare import load_side
    from vsim.sim.run_io import stored_summary

    side = load_side(run)
    if side.run is None:
        raise UserError(f"{run}: this result carries no requests; save it with --save-detailed")
    summary = {**side.summary, **stored_summary(run)}
    if form == "svg":
        from vsim.sim.export_svg import render_svgs

        if out is None:
            raise UserError("--format svg writes several files: give a folder with --out")
        _write_folder(out, render_svgs(side.run, summary))
        return
    pieces: Iterable[str]
    if form == "openmetrics":
        from vsim.sim.export_openmetrics import render_openmetrics

        pieces = render_openmetrics(side.run, interval, start_time)
    elif form == "perfetto":
        from vsim.sim.export_perfetto import render_perfetto

        pieces = render_perfetto(side.run, start, end)
    elif form == "report":
        from vsim.sim.report import render_report

        pieces = [render_report(side.run, summary)]
    elif form == "markdown":
        from vsim.sim.export_markdown import render_markdown

        pieces = [render_markdown(side.run, summary)]
    else:
        from vsim.sim.bench_json import render_bench

        pieces = [render_bench(side.run, summary)]
    if out is None:
        sys.stdout.writelines(pieces)
        return
    from vsim.traces.write import whole_file

    with whole_file(out) as stream:
        stream.writelines(piece.encode() for piece in pieces)


def _write_folder(folder: Path, files: dict[str, str]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / f"{name}.svg").write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror or error}") from error
