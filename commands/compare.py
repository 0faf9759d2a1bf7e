"""`vsim compare`: runs side by side, with an exit code for CI."""

from __future__ import annotations

import json
from pathlib import Path

import click

from vsim.errors import UserError


@click.command(short_help="Compare runs, simulated or real, and fail a build on a regression.")
@click.argument("runs", nargs=-1, required=True, metavar="RUN RUN [RUN ...]")
@click.option(
    "--fail-if",
    "conditions",
    multiple=True,
    metavar="CONDITION",
    help="e.g. 'ttft_p95>+5%'; may be repeated. Exit code 1 if any run meets one.",
)
@click.option(
    "--goodput",
    multiple=True,
    metavar="METRIC:MS",
    help="e.g. --goodput ttft:500 --goodput tpot:50",
)
@click.option(
    "--report", type=click.Path(path_type=Path), help="Write a page with the plots overlaid."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the bootstrap.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.pass_context
def compare(
    context: click.Context,
    runs: tuple[str, ...],
    conditions: tuple[str, ...],
    goodput: tuple[str, ...],
    report: Path | None,
    seed: int,
    as_json: bool,
) -> None:
    """Compare each RUN with the first one.

    A RUN is a folder that vsim wrote, or a result file of `vllm bench serve` (with --save-detailed it is
    compared request by request, without only by its totals).

    CONDITION is NAME > or < NUMBER: with % a relative change against the first run ('ttft_p95>+5%',
    'output_throughput<-3%'), with a sign an absolute change ('preemptions>+10'), else a limit on the value
    ('e2e_p99>2000', ms). NAME is ttft, tpot, itl, e2e or queue_time with _mean, _median, _std or _pNN, or
    any key of summary.json. Exit code 0: no condition met; 1: one was; 2: bad input.
    """
    from vsim.sim.compare import compare as differences_of
    from vsim.sim.compare import gate_percentiles, load_sides, parse_gate
    from vsim.sim.compare_page import (
        EXPLANATION,
        comparison_data,
        comparison_page,
        render_comparison,
    )
    from vsim.sim.metrics import parse_goodput
    from vsim.sim.text import plain
    from vsim.traces.write import whole_file

    if len(runs) < 2:
        raise UserError("vsim compare needs at least two runs; the first is the base")
    gates = [parse_gate(text) for text in conditions]
    percentiles = sorted({50.0, 90.0, 95.0, 99.0, *gate_percentiles(gates)})
    slo = parse_goodput(goodput)
    sides = load_sides(runs, percentiles, slo)
    base, others = sides[0], sides[1:]
    found = [(other, differences_of(base, other, seed)) for other in others]
    verdicts = [
        {
            "condition": gate.text,
            "run": plain(other.name),
            "value": value if abs(value) != float("inf") else str(value),
            "failed": gate.fails(value),
        }
        for other in others
        for gate in gates
        for value in (gate.value(base.summary, other.summary),)
    ]
    if report is not None:
        page = comparison_page(sides, found)
        with whole_file(report) as stream:
            stream.write(page.encode())
    failed = any(verdict["failed"] for verdict in verdicts)
    if as_json:
        data = {
            "schema": "vsim/comparison/1",
            "comparisons": [comparison_data(base, other, rows) for other, rows in found],
            "gates": verdicts,
            "failed": failed,
        }
        click.echo(json.dumps(data, indent=1, sort_keys=True, allow_nan=False, ensure_ascii=False))
    else:
        for other, rows in found:
            click.echo(render_comparison(base, other, rows))
        if any(row.interval for _, rows in found for row in rows):
            click.echo(EXPLANATION)
        for verdict in verdicts:
            value = verdict["value"]
            shown = f"{value:.4g}" if isinstance(value, float) else value
            word = "FAILED" if verdict["failed"] else "passed"
            click.echo(f"{word}: {verdict['condition']} ({verdict['run']}: {shown})")
    context.exit(1 if failed else 0)
