"""`vsim replay`: a trace through a simulated vLLM, to a table, files and a report."""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vsim.commands.fleet_options import fleet_option, settled_fleet
from vsim.commands.options import engine_options
from vsim.commands.trace_options import read_options
from vsim.errors import UserError

if TYPE_CHECKING:
    from vsim.sim.run import Run
    from vsim.traces.trace import Trace


class Progress:
    """One line on stderr while a person watches; nothing in pipes and files."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._watched = sys.stderr.isatty()
        self._began = self._shown = time.monotonic()

    def __call__(self, now_ns: int, ended: int) -> None:
        if not self._watched:
            return
        wall = time.monotonic()
        if wall - self._shown < 0.25:
            return
        self._shown = wall
        left = (wall - self._began) * (self._total - ended) / ended if ended else None
        eta = "" if left is None else f", about {left:.0f} s left"
        click.echo(
            f"\r{ended:,} of {self._total:,} requests, {now_ns / 1e9:,.0f} s simulated{eta}\x1b[K",
            err=True,
            nl=False,
        )

    def advising(self, replay: int) -> None:
        """Before each replay of `sim.advice`."""
        if self._watched:
            self._shown = time.monotonic()
            text = f"\rtrying what would help: replay {replay}\x1b[K"
            click.echo(text, err=True, nl=False)

    def drawing(self, replay: int, of: int) -> None:
        """Before each replay of `sim.error_bars`."""
        if self._watched:
            self._shown = time.monotonic()
            click.echo(f"\rerror bars: replay {replay} of {of}\x1b[K", err=True, nl=False)

    def done(self) -> None:
        if self._watched and self._shown != self._began:
            click.echo("\r\x1b[K", err=True, nl=False)


def _percentiles(_: Any, __: Any, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a list of numbers such as 50,90,99") from None


@click.command(short_help="Replay a trace through a simulated vLLM and report the tails.")
@click.argument("trace", type=click.Path(path_type=Path))
@engine_options
@read_options
@click.option(
    "--profile", help="Calibration artifact, by path or bundled name (vsim profiles list)."
)
@click.option(
    "--swap-above-tokens", type=int, help="V0: swap victims above so many tokens, recompute others."
)
@click.option(
    "--victim-rule",
    help="V0: last_in_queue (vLLM's), most_blocks, fewest_computed, least_preempted.",
)
@click.option("--num-cpu-blocks", type=int, help="V0: CPU blocks instead of --swap-space's.")
@click.option("--pcie-gbps", type=float, help="GB/s of the host link instead of the catalogue's.")
@click.option(
    "--overlap-swaps/--no-overlap-swaps",
    default=False,
    help="V0: copies run beside the step instead of before it.",
)
@click.option("--limit", type=int, help="Only the first so many requests.")
@click.option(
    "--time-scale",
    type=float,
    default=1.0,
    help="Times between arrivals times this; 0.5 is twice as fast.",
)
@click.option(
    "--request-rate",
    type=float,
    help="Requests/s instead of the trace's own times; inf: all at once.",
)
@click.option(
    "--burstiness",
    type=float,
    default=1.0,
    help="Gamma shape of --request-rate's gaps; 1 is Poisson, inf constant.",
)
@click.option(
    "--max-concurrency", type=int, help="Closed loop: at most so many requests in flight."
)
@click.option(
    "--replicas",
    type=click.IntRange(1, 4096),
    default=1,
    show_default=True,
    help="Engines of this kind behind one router.",
)
@click.option(
    "--route",
    default="round-robin",
    show_default=True,
    metavar="NAME",
    help="Where requests go, with several replicas (docs/replay.md).",
)
@fleet_option
@click.option(
    "--overlong",
    type=click.Choice(["reject", "clip", "error"]),
    default="reject",
    show_default=True,
    help="Requests longer than max_model_len.",
)
@click.option(
    "--seed",
    type=int,
    default=0,
    show_default=True,
    help="Of all that is drawn: --request-rate's arrivals, random routing.",
)
@click.option(
    "--metric-percentiles",
    default="50,90,95,99",
    show_default=True,
    callback=_percentiles,
    help="Percentiles to report.",
)
@click.option(
    "--goodput",
    multiple=True,
    metavar="METRIC:MS",
    help="e.g. --goodput ttft:500 --goodput tpot:50",
)
@click.option(
    "--prices",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help='Your prices, adds cost: {"currency": "EUR", "a100": …} (docs/sweep.md).',
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Write summary.json, Parquet files and report.html.",
)
@click.option("--overwrite", is_flag=True, help="Replace the run that --out already holds.")
@click.option("--report/--no-report", default=True, help="Leave report.html out.")
@click.option(
    "--advise/--no-advise",
    default=None,
    help="Simulate single changes: what binds, what would help (default: with a report).",
)
@click.option(
    "--error-bars",
    type=click.IntRange(0, 10_000),
    metavar="N",
    help="90 % intervals from N more replays; 0: none (default: 20 for small traces).",
)
@click.option(
    "--max-sim-time-s",
    type=float,
    metavar="S",
    help="End there: nothing later than S simulated seconds happens.",
)
@click.option("--max-steps", type=int, help="End after so many engine steps, whatever is left.")
@click.option("--json", "as_json", is_flag=True, help="Print summary.json instead of the table.")
def replay(
    trace: Path,
    engine_flags: dict[str, Any],
    reading: dict[str, Any],
    profile: str | None,
    swap_above_tokens: int | None,
    victim_rule: str | None,
    num_cpu_blocks: int | None,
    pcie_gbps: float | None,
    overlap_swaps: bool,
    limit: int | None,
    time_scale: float,
    request_rate: float | None,
    burstiness: float,
    max_concurrency: int | None,
    replicas: int,
    route: str,
    fleet: Path | None,
    overlong: str,
    seed: int,
    metric_percentiles: tuple[float, ...],
    goodput: tuple[str, ...],
    prices: Path | None,
    out: Path | None,
    overwrite: bool,
    report: bool,
    advise: bool | None,
    error_bars: int | None,
    max_sim_time_s: float | None,
    max_steps: int | None,
    as_json: bool,
) -> None:
    """Replay TRACE through a simulated vLLM: tails, KV cache, throughput, GPU time and cost.

    TRACE is any known format, recognised by content (docs/traces.md). Flags are vLLM's; what is not given
    is resolved as vLLM 0.32 resolves it for this GPU and model, and the report says so.
    """
    from vsim.sim.bill import bill, mean_replicas
    from vsim.sim.bounds import Bounds
    from vsim.sim.cost import read_prices
    from vsim.sim.error_bars import find_error_bars, knee_lines, settled, without_lines
    from vsim.sim.metrics import parse_goodput
    from vsim.sim.profile_defaults import resolve_with_profile
    from vsim.sim.replay import Load, step_model_for, with_preemption
    from vsim.sim.replay import replay as simulate_trace
    from vsim.sim.router import named_route
    from vsim.sim.run_io import check_target, write_run
    from vsim.sim.stability import stability, stability_lines
    from vsim.sim.summary import summarize, summary_json
    from vsim.sim.table import render_table
    from vsim.sim.text import wrapped
    from vsim.traces.readers import read_trace

    if out is not None:
        check_target(out, overwrite)
    slo = parse_goodput(goodput)
    bounded = max_sim_time_s is not None or max_steps is not None
    bounds = Bounds(max_sim_time_s, max_steps) if bounded else None
    if bounded and (advise or error_bars):
        raise UserError(
            f"{'--advise' if advise else '--error-bars'} replays the whole trace: drop it, or "
            "--max-sim-time-s and --max-steps"
        )
    fleet_spec = None if fleet is None else settled_fleet(fleet, replicas, route)
    if fleet_spec is not None:
        replicas, route = fleet_spec.slots, fleet_spec.route or route
        if advise and not fleet_spec.is_plain:
            raise UserError(
                "--advise is not simulated for a fleet described by --fleet: leave one out"
            )
    named_route(route)
    price_list = read_prices(prices) if prices is not None else None
    model, gpu = _needed(engine_flags, profile)
    flags = {name: value for name, value in engine_flags.items() if name not in ("model", "gpu")}
    resolved, flags = resolve_with_profile(model, gpu, profile, flags)
    deployment = with_preemption(
        resolved,
        swap_above_tokens=swap_above_tokens,
        victim_rule=victim_rule,
        num_cpu_blocks=num_cpu_blocks,
        pcie_gbps=pcie_gbps,
    )
    if price_list is not None:
        price_list.of(deployment.gpu.name)
    step_model = step_model_for(deployment, profile)
    requests = read_trace(trace, limit=limit, **reading)
    load = Load(
        limit=limit,
        time_scale=time_scale,
        request_rate=request_rate,
        burstiness=burstiness,
        max_concurrency=max_concurrency,
        seed=seed,
        overlong=overlong,  # type: ignore[arg-type]
    )
    config = deployment.scheduler
    compiled = config.engine == "v1" and config.kv_offload is None
    compiled = compiled and (fleet_spec is None or fleet_spec.is_plain)
    draws = 0 if bounded else settled(error_bars, load.apply(requests), compiled)
    progress = Progress(len(requests))
    once_more = partial(
        simulate_trace,
        requests,
        deployment,
        load=load,
        overlap_swaps=overlap_swaps,
        replicas=replicas,
        route=route,
        fleet=fleet_spec,
        bounds=bounds,
    )
    try:
        run = once_more(step_model, on_step=progress)
    finally:
        progress.done()
    # Data-parallel ranks and autoscaling make more of them than the flags say.
    replicas, route = run.config.get("replicas", replicas), run.config.get("route", route)
    summary = summarize(run, metric_percentiles, slo)
    summary["stability"] = stability(run).data()
    gpus = deployment.gpus_per_replica * mean_replicas(run, replicas)
    if fleet_spec is not None:
        from vsim.sim.fleet.describe import fleet_summary

        summary |= fleet_summary(run)
    summary |= bill(run, summary, price_list, deployment.gpu.name, gpus, replicas)
    advised = out is not None and report and fleet_spec is None and not bounded
    if advise or (advise is None and advised):
        from vsim.sim.advice import Setup
        from vsim.sim.advice import advise as find_advice

        setup = Setup(
            model,
            gpu,
            flags,
            profile,
            {
                "swap_above_tokens": swap_above_tokens,
                "victim_rule": victim_rule,
                "num_cpu_blocks": num_cpu_blocks,
                "pcie_gbps": pcie_gbps,
            },
            overlap_swaps,
            replicas,
            route,
        )
        try:
            found = find_advice(requests, setup, load, run, progress.advising)
        finally:
            progress.done()
        summary |= {} if found is None else {"advice": found.data()}
    if draws:
        try:
            bars = find_error_bars(
                run, once_more, step_model, metric_percentiles, draws, seed, progress.drawing
            )
        finally:
            progress.done()
        summary = bars.add_to(summary)
    if out is not None:
        write_run(run, out, summary, report=report, overwrite=overwrite)
    if as_json:
        click.echo(summary_json(summary), nl=False)
        _end(run)
        return
    for line in _heading(deployment, step_model, requests, replicas, route):
        click.echo("\n".join(wrapped(line, "  ")))
    click.echo(render_table(summary))
    if "advice" in summary:
        from vsim.sim.advice_stored import advice_text

        click.echo(advice_text(summary))
    for line in stability_lines(summary["stability"]):
        click.echo("\n".join(wrapped(line)))
    unasked = [] if bounded else without_lines(error_bars, draws)
    for line in knee_lines(summary) + unasked:
        click.echo("\n".join(wrapped(line)))
    if run.ended_early:
        click.echo("\n".join(wrapped(f"The run ended early: {run.ended_early}")))
    if run.assumptions:
        click.echo("Assumptions:")
        for sentence in run.assumptions:
            click.echo("\n".join(wrapped(f"- {sentence}", "  ")))
    if out is not None:
        click.echo(f"Wrote {out}{'/report.html' if report else ''}")
    _end(run)


def _end(run: Run) -> None:
    """Exit code 1 if the engine died, as the real one does: its numbers are those of a crash."""
    if run.ended_early and run.ended_early.startswith("the engine died"):
        raise click.exceptions.Exit(1)


def _needed(engine_flags: dict[str, Any], profile: str | None) -> tuple[str, str]:
    """(model, gpu): given, or those the profile was measured with."""
    model, gpu = engine_flags["model"], engine_flags["gpu"]
    if profile is not None and (model is None or gpu is None):
        from vsim.models.load import read_profile

        says = read_profile(profile)[1].provenance
        model = model or says.get("model")
        gpu = gpu or says.get("gpu")
    if model is None:
        raise UserError(
            "--model is missing: a bundled name (vsim catalog) or a folder with a config.json"
        )
    if gpu is None:
        raise UserError("--gpu is missing: a name from vsim catalog, e.g. a100")
    return str(model), str(gpu)


def _heading(
    deployment: Any, step_model: Any, trace: Trace, replicas: int, route: str
) -> tuple[str, str]:
    config = deployment.scheduler
    ranks = route == "data-parallel"
    several = "" if replicas == 1 else f"{replicas} {'ranks' if ranks else 'replicas'} of "
    routed = "" if replicas == 1 else f", {route}" if ranks else f" behind {route}"
    return (
        f"{deployment.model.name} on {several}{deployment.gpus_per_replica} x {deployment.gpu.name}{routed}, "
        f"vLLM {config.engine_version} ({config.engine.upper()}): {len(trace):,} requests of {trace.source.name} "
        f"({trace.source.format}) over {trace.span_s:,.0f} s",
        f"Step time: {step_model.label}",
    )
