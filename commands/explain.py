"""`vsim explain`: where a request's time went, and the tail's."""

from __future__ import annotations

import json
from pathlib import Path

import click

from vsim.errors import UserError


@click.command(short_help="Say where the time went: of one request, or of the slowest ones.")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--request", type=int, metavar="ID", help="One request (its row in the trace).")
@click.option(
    "--tail", default="p99", show_default=True, help="The requests at or above a percentile."
)
@click.option("--by", type=click.Choice(["e2el", "ttft"]), default="e2el", show_default=True)
@click.option(
    "--trace",
    type=click.Path(path_type=Path),
    help="The trace that RUN replayed: simulate now what would help.",
)
@click.option("--profile", help="With --trace: the profile that RUN was replayed with, if any.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def explain(
    run: Path,
    request: int | None,
    tail: str,
    by: str,
    trace: Path | None,
    profile: str | None,
    as_json: bool,
) -> None:
    """Say where the time of RUN's slowest requests went, or of one request.

    The parts add up to the latency, exactly: waiting by cause, prefill, decode, decode in steps that carry
    other requests' prompt chunks, time preempted. docs/explain.md says how each is read off the run.
    """
    from vsim.sim.advice_stored import advice_text, sentences
    from vsim.sim.compare import load_side
    from vsim.sim.explain import (
        explain_request,
        explain_tail,
        explanation_data,
        parse_tail,
        render_explanation,
    )
    from vsim.sim.run_io import stored_summary

    side = load_side(run)
    if side.run is None:
        raise UserError(f"{run}: this result carries no requests; save it with --save-detailed")
    if request is not None:
        found = explain_request(side.run, request)
    else:
        found = explain_tail(side.run, parse_tail(tail), by)
    summary = stored_summary(run)
    if trace is not None:
        from vsim.sim.advice import advise
        from vsim.sim.advice_rebuild import rebuilt
        from vsim.traces.readers import read_trace

        requests = read_trace(trace)
        setup, load = rebuilt(side.run, requests, profile)
        advice = advise(requests, setup, load, side.run)
        summary["advice"] = {} if advice is None else advice.data()
    told = sentences(summary)
    if as_json:
        data = explanation_data(found) | ({"advice": summary["advice"]} if told else {})
        click.echo(json.dumps(data, indent=1, sort_keys=True, allow_nan=False))
    else:
        click.echo(render_explanation(found, advised=bool(told)), nl=False)
        if told:
            click.echo("\n" + advice_text(summary), nl=False)
        elif side.run.origin == "simulated":
            click.echo("With --trace FILE, the trace of this run, what would help is simulated.")
