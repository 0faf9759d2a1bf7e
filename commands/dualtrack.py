"""`vsim dualtrack`: the offline benchmark and the replay of a trace, side by side."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from vsim.commands.options import engine_options
from vsim.commands.trace_options import read_options
from vsim.errors import UserError


@click.command(short_help="The offline benchmark beside the replay: the derating it needs.")
@click.argument("trace", type=click.Path(path_type=Path))
@engine_options
@read_options
@click.option("--profile", help="Calibration artifact, by path or bundled name.")
@click.option("--limit", type=int, help="Only the first so many requests.")
@click.option(
    "--concurrency",
    default="32,64,128",
    show_default=True,
    help="Fixed concurrencies of the offline track.",
)
@click.option(
    "--offline-lengths",
    metavar="IN/OUT",
    help="The offline track sends these lengths instead of the trace's, e.g. 512/512.",
)
@click.option(
    "--offline-trace",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The offline track sends this file's requests, e.g. ShareGPT.",
)
@click.option(
    "--ttft-p95",
    "ttft_ms",
    type=float,
    default=2000.0,
    show_default=True,
    help="Target for the derating factor, ms.",
)
@click.option("--tpot-p95", "tpot_ms", type=float, default=100.0, show_default=True, help="ms.")
@click.option(
    "--derating/--no-derating",
    default=True,
    help="Leave out the search for the largest load (about ten more simulations).",
)
@click.option(
    "--time-scale",
    type=float,
    default=0.5,
    show_default=True,
    help="The second replay: times between arrivals times this.",
)
@click.option("--overlong", type=click.Choice(["reject", "clip", "error"]), default="reject")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--prices", type=click.Path(path_type=Path), metavar="FILE", help="Adds a cost column."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the table.")
def dualtrack(
    trace: Path,
    engine_flags: dict[str, Any],
    reading: dict[str, Any],
    profile: str | None,
    limit: int | None,
    concurrency: str,
    offline_lengths: str | None,
    offline_trace: Path | None,
    ttft_ms: float,
    tpot_ms: float,
    derating: bool,
    time_scale: float,
    overlong: Any,
    seed: int,
    prices: Path | None,
    as_json: bool,
) -> None:
    """Run TRACE as an offline benchmark (all at once, fixed concurrency) and as recorded.

    The derating factor is what the offline throughput has to be multiplied by for this trace: the largest
    load of its arrival pattern that meets the targets, over the offline figure (docs/sweep.md).
    """
    from vsim.commands.replay import _needed
    from vsim.sim.cost import read_prices
    from vsim.sim.dualtrack import Targets, dual_track, fixed_lengths, render
    from vsim.sim.profile_defaults import resolve_with_profile
    from vsim.traces.readers import read_trace

    levels = _numbers("--concurrency", concurrency, ",", "32,64,128")
    for name, value in (("--ttft-p95", ttft_ms), ("--tpot-p95", tpot_ms)):
        if not value > 0:
            raise UserError(f"{name} {value:g} must be positive")
    if offline_lengths is not None and offline_trace is not None:
        raise UserError("--offline-lengths and --offline-trace both say what is sent: give one")
    model, gpu = _needed(engine_flags, profile)
    flags = {name: value for name, value in engine_flags.items() if name not in ("model", "gpu")}
    deployment, _ = resolve_with_profile(model, gpu, profile, flags)
    price_list = read_prices(prices) if prices is not None else None
    if price_list is not None:
        price_list.of(deployment.gpu.name)
    requests = read_trace(trace, limit=limit, **reading)
    benchmark = None
    if offline_lengths is not None:
        lengths = _numbers("--offline-lengths", offline_lengths, "/", "512/512")
        if len(lengths) != 2:
            raise UserError(f"--offline-lengths {offline_lengths}: write IN/OUT, e.g. 512/512")
        benchmark = fixed_lengths(requests, lengths[0], lengths[1])
    elif offline_trace is not None:
        benchmark = read_trace(offline_trace, limit=limit)
    watched = sys.stderr.isatty()

    def on_run(name: str) -> None:
        if watched:
            click.echo(f"\rSimulating: {name} …\x1b[K", err=True, nl=False)

    try:
        result = dual_track(
            requests,
            deployment,
            offline_trace=benchmark,
            profile=profile,
            concurrency=levels,
            overlong=overlong,
            seed=seed,
            time_scale=time_scale,
            targets=Targets(ttft_ms, tpot_ms) if derating else None,
            prices=price_list,
            on_run=on_run,
        )
    finally:
        if watched:
            click.echo("\r\x1b[K", err=True, nl=False)
    if as_json:
        click.echo(json.dumps(result, indent=1, sort_keys=True, allow_nan=False))
        return
    click.echo(
        f"{result['model']} on {result['gpus']} x {result['gpu']}: {result['requests']:,} requests of "
        f"{result['trace']}\nStep time: {result['step_time']}\n"
    )
    click.echo(render(result))
    if result["assumptions"]:
        click.echo("Assumptions:")
        for sentence in result["assumptions"]:
            click.echo(f"- {sentence}")


def _numbers(name: str, text: str, separator: str, example: str) -> list[int]:
    try:
        return [int(part) for part in text.split(separator)]
    except ValueError:
        raise UserError(f"{name} {text}: write whole numbers such as {example}") from None
