"""`vsim sweep`: many what-ifs of one trace, to one table; goes on where it was interrupted."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import click

from vsim.commands.options import engine_options
from vsim.commands.replay import _percentiles
from vsim.commands.trace_options import read_options
from vsim.errors import UserError


class Progress:
    """Points done and time left, on stderr while a person watches; nothing in pipes and files."""

    def __init__(self) -> None:
        self._watched = sys.stderr.isatty()
        self._began = time.monotonic()

    def __call__(self, done: int, total: int, kept: int) -> None:
        if not self._watched:
            return
        new, spent = done - kept, time.monotonic() - self._began
        eta = f", about {spent / new * (total - done):,.0f} s left" if new and done < total else ""
        known = f" ({kept:,} from the journal)" if kept else ""
        click.echo(f"\r{done:,} of {total:,} points{known}{eta}\x1b[K", err=True, nl=False)

    def done(self) -> None:
        if self._watched:
            click.echo("\r\x1b[K", err=True, nl=False)


@click.command(short_help="Many what-ifs of one trace, to one Parquet table; resumable.")
@click.argument("trace", type=click.Path(path_type=Path))
@engine_options
@read_options
@click.option(
    "--vary",
    multiple=True,
    metavar="NAME=V,V…",
    help="A flag and the values to try: block_size=16,32, request_rate=1..20:log (with --random).",
)
@click.option(
    "--grid",
    type=click.Path(path_type=Path),
    metavar="FILE.yaml",
    help="The same as a YAML mapping of name to value or list.",
)
@click.option("--random", "count", type=int, metavar="N", help="N random points instead of all.")
@click.option("--replicas", type=int, help="Engines behind a router.  [default: 1]")
@click.option("--route", help="Where requests go, with several replicas.  [default: round-robin]")
@click.option("--profile", help="Calibration artifact, by path or bundled name.")
@click.option("--limit", type=int, help="Only the first so many requests.")
@click.option("--time-scale", type=float, help="Times between arrivals times this.")
@click.option("--request-rate", type=float, help="Requests/s; inf: all at once.")
@click.option("--burstiness", type=float, help="Gamma shape of --request-rate's gaps.")
@click.option("--max-concurrency", type=int, help="Closed loop: at most so many in flight.")
@click.option("--overlong", type=click.Choice(["reject", "clip", "error"]))
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Of --random and of the arrivals."
)
@click.option(
    "--metric-percentiles",
    default="50,90,95,99",
    show_default=True,
    callback=_percentiles,
    help="Percentiles to report.",
)
@click.option("--goodput", multiple=True, metavar="METRIC:MS", help="e.g. --goodput ttft:500")
@click.option(
    "--prices",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help='Price per GPU-hour, yours: {"currency": "EUR", "a100": …}; adds cost columns.',
)
@click.option(
    "--sort-by",
    metavar="COLUMN",
    help="Number that ranks the rows shown at the end.  [default: cost, goodput or TTFT]",
)
@click.option(
    "--show", multiple=True, metavar="COLUMN", help="One more number in the rows shown at the end."
)
@click.option(
    "--top", type=click.IntRange(min=0), default=5, show_default=True, help="Rows shown at the end."
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FILE.parquet",
    required=True,
    help="The table; its journal lies beside it.",
)
@click.option("--jobs", type=click.IntRange(min=1), help="Simulations at once.  [default: 1]")
@click.option(
    "--backend",
    type=click.Choice(["loky", "threading", "dask", "ray"]),
    default="loky",
    show_default=True,
    help="joblib's: processes or threads here, or a cluster.",
)
@click.option("--address", help="The cluster's, with --backend dask or ray.")
def sweep(
    trace: Path,
    engine_flags: dict[str, Any],
    reading: dict[str, Any],
    vary: tuple[str, ...],
    grid: Path | None,
    count: int | None,
    seed: int,
    limit: int | None,
    metric_percentiles: tuple[float, ...],
    goodput: tuple[str, ...],
    prices: Path | None,
    sort_by: str | None,
    show: tuple[str, ...],
    top: int,
    out: Path,
    jobs: int | None,
    backend: str,
    address: str | None,
    **load: Any,
) -> None:
    """Simulate TRACE at every point of a grid, or at random points of it; one row a point.

    Any flag of `vsim replay` can vary, and gpu, model, replicas and route. A point that vLLM would refuse
    is a row that says why. Interrupted or killed, the same command goes on where it stopped (docs/sweep.md).
    """
    from vsim.sim.cost import read_prices
    from vsim.sim.metrics import parse_goodput
    from vsim.sim.sweep import Workers
    from vsim.sim.sweep import sweep as run_sweep
    from vsim.sim.sweep_best import check_numbers, render_best, sort_key
    from vsim.sim.sweep_point import Asked
    from vsim.sim.sweep_space import Choices, parse_vary, points_of, read_grid
    from vsim.traces.readers import read_trace

    space: dict[str, Choices] = read_grid(grid) if grid is not None else {}
    for text in vary:
        name, choices = parse_vary(text)
        if name in space:
            raise UserError(f"{name} is varied twice: give it once")
        space[name] = choices
    given = {**engine_flags, **load}
    fixed = {name: value for name, value in given.items() if value is not None}
    if limit is not None:
        fixed["limit"] = limit
    if "seed" not in space:
        fixed["seed"] = seed
    for name in ("model", "gpu"):
        if name not in fixed and name not in space:
            raise UserError(f"--{name} is missing: give it, or vary it (vsim catalog lists them)")
    points = points_of(_checked_fixed(fixed), space, count, seed)
    asked = Asked(metric_percentiles, parse_goodput(goodput))
    price_list = read_prices(prices) if prices is not None else None
    key = sort_key(sort_by, list(space), asked, price_list is not None)
    check_numbers("--show", show, asked, price_list is not None)
    if jobs is None and backend in ("loky", "threading"):
        jobs = 1
    requests = read_trace(trace, limit=limit, **reading)
    progress = Progress()
    try:
        counted = run_sweep(
            requests,
            points,
            out,
            asked=asked,
            workers=Workers(jobs, backend, address),
            prices=price_list,
            on_point=progress,
        )
    finally:
        progress.done()
    kept = f", {counted['from_journal']:,} of them from the journal" * bool(counted["from_journal"])
    refused = f", {counted['refused']:,} refused (column reason says why)" * bool(
        counted["refused"]
    )
    click.echo(render_best(out, list(space), asked, key, show, top), nl=False)
    if price_list is not None and top > 0:
        click.echo(price_list.told)
    click.echo(f"Wrote {out}: {len(points):,} points{kept}{refused}")


def _checked_fixed(fixed: dict[str, Any]) -> dict[str, Any]:
    """Fixed values go through the same door as varied ones: a misspelt GPU stops here."""
    from vsim.sim.sweep_space import check_value

    return {name: check_value(name, value) for name, value in fixed.items()}
