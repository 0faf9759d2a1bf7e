"""`vsim export`: a run in the formats of the tools people have."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import click

from vsim.errors import UserError

FORMATS = ("report", "openmetrics", "perfetto", "markdown", "bench", "svg", "png")


@click.command(short_help="Write a run for Prometheus, Perfetto, a pull request, or bench tools.")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--format", "form", type=click.Choice(FORMATS), help="What to write.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Instead of standard output; for svg and png a folder, and required.",
)
@click.option(
    "--against",
    type=click.Path(path_type=Path),
    metavar="RUN",
    help="report: a measured run beside the prediction.",
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
    form: str | None,
    out: Path | None,
    against: Path | None,
    interval: float | None,
    start_time: float,
    start: float,
    end: float | None,
) -> None:
    """Write RUN (a folder of vsim's, or a detailed `vllm bench serve` result) in another format.

    report: the page report.html. openmetrics: vLLM's own metric names with timestamps; `promtool tsdb create-blocks-from openmetrics`
    takes it. perfetto: Chrome trace JSON for ui.perfetto.dev. markdown: a summary for a pull request.
    bench: the schema of `vllm bench serve --save-result`. svg, png: every plot of the report as a file (png needs Pillow).
    """
    if form is None:
        raise UserError(f"--format is missing: one of {', '.join(FORMATS)}")
    if against is not None and form != "report":
        raise UserError(f"--against is for --format report, not {form}")
    from vsim.sim.compare import load_side
    from vsim.sim.run_io import stored_summary

    side = load_side(run)
    if side.run is None:
        raise UserError(f"{run}: this result carries no requests; save it with --save-detailed")
    summary = {**side.summary, **stored_summary(run)}
    if form in ("svg", "png"):
        if out is None:
            raise UserError(f"--format {form} writes several files: give a folder with --out")
        if form == "png":
            from vsim.sim.export_png import render_pngs

            _write_folder(out, form, render_pngs(side.run, summary))
        else:
            from vsim.sim.export_svg import render_svgs

            svgs = render_svgs(side.run, summary)
            _write_folder(out, form, {name: text.encode() for name, text in svgs.items()})
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

        measured = None if against is None else load_side(against)
        pieces = [render_report(side.run, summary, measured)]
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


def _write_folder(folder: Path, ending: str, files: dict[str, bytes]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / f"{name}.{ending}").write_bytes(content)
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror or error}") from error
