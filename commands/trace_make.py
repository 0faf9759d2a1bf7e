"""`vsim trace generate|fit|scale|slice|merge|anonymize`: traces that did not exist before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from vsim.commands.trace_options import trace_options
from vsim.errors import UserError

OUT = click.option(
    "--out",
    "-o",
    type=click.Path(path_type=Path),
    required=True,
    help="File to write: Parquet if it ends in .parquet, else JSON lines (.gz, .zst compress).",
)


class Numbers(click.ParamType):
    """Numbers separated by commas."""

    name = "N,N,…"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[float, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return tuple(float(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers such as 2,20", param, ctx)


def _write(made: Any, out: Path) -> None:
    from vsim.traces.write import write_trace

    write_trace(made, out)
    click.echo(f"wrote {len(made):,} requests over {made.span_s:.3f} s to {out}")
    for sentence in made.assumptions:
        click.echo(f"note: {sentence}", err=True)


@click.command()
@OUT
@click.option(
    "--recipe",
    type=click.Path(path_type=Path),
    help="Make traffic like the one `vsim trace fit` saw.",
)
@click.option(
    "--arrivals",
    type=click.Choice(
        [
            "constant",
            "poisson",
            "gamma",
            "weibull",
            "mmpp",
            "onoff-pareto",
            "steps",
            "ramp",
            "diurnal",
        ]
    ),
    default="poisson",
    show_default=True,
    help="Arrival process.",
)
@click.option("--rate", type=float, help="Mean requests per second (the first one of a ramp).")
@click.option(
    "--requests",
    type=click.IntRange(min=1),
    help="How many requests (conversations, with --turns).",
)
@click.option("--duration", "duration_s", type=float, help="Seconds to cover.")
@click.option(
    "--burstiness",
    type=float,
    default=1.0,
    show_default=True,
    help="gamma, weibull: below 1 is burstier.",
)
@click.option(
    "--rates", type=Numbers(), default=(), help="mmpp, steps: rate of each state or step."
)
@click.option("--holds", type=Numbers(), default=(), help="mmpp: mean stay, s; steps: length, s.")
@click.option("--end-rate", type=float, help="ramp: rate at the end.")
@click.option(
    "--sources", type=int, default=50, show_default=True, help="onoff-pareto: how many sources."
)
@click.option(
    "--on",
    "on_s",
    type=float,
    default=10.0,
    show_default=True,
    help="onoff-pareto: mean on time, s.",
)
@click.option(
    "--off",
    "off_s",
    type=float,
    default=30.0,
    show_default=True,
    help="onoff-pareto: mean off time, s.",
)
@click.option(
    "--alpha", type=float, default=1.5, show_default=True, help="onoff-pareto: tail index."
)
@click.option(
    "--swing",
    type=float,
    default=0.8,
    show_default=True,
    help="diurnal: 0 flat, 1 down to nothing.",
)
@click.option(
    "--period", "period_s", type=float, default=86400.0, show_default=True, help="diurnal: s."
)
@click.option(
    "--prompt-tokens", default="lognormal:400:1.0", show_default=True, help="Prompt lengths."
)
@click.option(
    "--output-tokens", default="lognormal:150:0.8", show_default=True, help="Output lengths."
)
@click.option(
    "--lengths-from",
    type=click.Path(path_type=Path),
    help="Draw (prompt, output) pairs from this trace instead.",
)
@click.option(
    "--turns", help="Turns per conversation, written like lengths; each arrival opens one."
)
@click.option(
    "--think",
    "think_s",
    type=float,
    default=10.0,
    show_default=True,
    help="Mean pause of a user, s.",
)
@click.option(
    "--system-prompt",
    "system_prompt_tokens",
    type=int,
    default=0,
    help="Tokens all prompts begin with.",
)
@click.option(
    "--system-prompts", type=int, default=1, show_default=True, help="How many different ones."
)
@click.option("--tenants", help="NAME=SHARE,NAME=SHARE,…")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
def generate(
    out: Path, recipe: Path | None, lengths_from: Path | None, seed: int, **given: Any
) -> None:
    """Make a trace from an arrival process and length distributions, or from a fitted recipe.

    Lengths are written as N, uniform:LOW:HIGH, lognormal:MEDIAN:SIGMA[:MAX], mix:SHARE=SPEC,SHARE=SPEC, or
    the mixes `chat` and `long-context`. The same options and seed give the same file.
    """
    if recipe is not None:
        from vsim.traces.fit import generate_from, load

        made = generate_from(
            load(recipe),
            seed,
            requests=given["requests"],
            duration_s=given["duration_s"],
            rate=given["rate"],
        )
    else:
        made = _generated(lengths_from, seed, given)
    _write(made, out)


def _generated(lengths_from: Path | None, seed: int, given: dict[str, Any]) -> Any:
    from vsim.traces.lengths import parse
    from vsim.traces.processes import Arrivals
    from vsim.traces.synth import Conversation, Workload
    from vsim.traces.synth import generate as make

    arrivals = Arrivals(
        kind=given["arrivals"],
        rate=given["rate"],
        requests=given["requests"],
        duration_s=given["duration_s"],
        burstiness=given["burstiness"],
        rates=given["rates"],
        holds_s=given["holds"],
        sources=given["sources"],
        on_s=given["on_s"],
        off_s=given["off_s"],
        alpha=given["alpha"],
        end_rate=given["end_rate"],
        swing=given["swing"],
        period_s=given["period_s"],
    )
    joint = None
    if lengths_from is not None:
        from vsim.traces.readers import read_trace

        real = read_trace(lengths_from)
        joint = (real.prompt_tokens, real.output_tokens)
    conversation = None
    if given["turns"] is not None:
        conversation = Conversation(parse(given["turns"]), given["think_s"])
    return make(
        Workload(
            arrivals,
            parse(given["prompt_tokens"]),
            parse(given["output_tokens"]),
            joint=joint,
            conversation=conversation,
            system_prompt_tokens=given["system_prompt_tokens"],
            system_prompts=given["system_prompts"],
            tenants=_shares(given["tenants"]),
        ),
        seed,
    )


def _shares(text: str | None) -> dict[str, float]:
    shares: dict[str, float] = {}
    for item in (text or "").split(",") if text else ():
        name, equals, share = item.partition("=")
        try:
            shares[name] = float(share)
        except ValueError:
            equals = ""
        if not (name and equals):
            raise UserError(
                f"--tenants {text}: write NAME=SHARE,NAME=SHARE,…, for example acme=0.7,blue=0.3"
            )
    return shares


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@trace_options
@click.option(
    "--out", "-o", type=click.Path(path_type=Path), required=True, help="Recipe to write (JSON)."
)
def fit(path: Path, trace_flags: dict[str, Any], out: Path) -> None:
    """Learn a recipe from PATH that `vsim trace generate --recipe` makes similar traffic from.

    The recipe holds counts per window and quantiles, and no name, id or single request.
    """
    import json

    from vsim.traces.fit import fit as learn
    from vsim.traces.readers import read_trace
    from vsim.traces.write import whole_file

    learned = learn(read_trace(path, **trace_flags))
    with whole_file(out) as stream:
        stream.write(json.dumps(learned).encode() + b"\n")
    click.echo(
        f"wrote a recipe of {learned['requests']:,} requests over {learned['span_s']:.3f} s to {out}"
    )
    for missing in learned.get("not_in_recipe", []):
        click.echo(f"note: not in the recipe: {missing}", err=True)


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@trace_options
@OUT
@click.option(
    "--time", "time_factor", type=float, default=1.0, help="Multiply times: 0.5 is twice as fast."
)
@click.option(
    "--load", "load_factor", type=float, default=1.0, help="Multiply requests over the same time."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
def scale(
    path: Path,
    trace_flags: dict[str, Any],
    out: Path,
    time_factor: float,
    load_factor: float,
    seed: int,
) -> None:
    """Stretch or compress a trace in time, or give it more or less traffic over the same time."""
    from vsim.traces.arrivals import scale_time
    from vsim.traces.edit import scale_load
    from vsim.traces.readers import read_trace

    made = scale_time(read_trace(path, **trace_flags), time_factor)
    if load_factor != 1:
        made = scale_load(made, load_factor, seed)
    _write(made, out)


@click.command("slice")
@click.argument("path", type=click.Path(path_type=Path))
@trace_options
@OUT
@click.option("--from", "from_s", type=float, default=0.0, help="Seconds from the first arrival.")
@click.option("--to", "to_s", type=float, help="Seconds from the first arrival, excluded.")
@click.option("--tenant", help="Only this tenant.")
@click.option("--session", help="Only this session.")
@click.option("--min-prompt-tokens", type=int, default=0)
@click.option("--max-prompt-tokens", type=int)
def slice_(path: Path, trace_flags: dict[str, Any], out: Path, **conditions: Any) -> None:
    """A part of a trace, by time, tenant, session or prompt length."""
    from vsim.traces.edit import slice_trace
    from vsim.traces.readers import read_trace

    _write(slice_trace(read_trace(path, **trace_flags), **conditions), out)


@click.command()
@click.argument("paths", type=click.Path(path_type=Path), nargs=-1, required=True)
@trace_options
@OUT
def merge(paths: tuple[Path, ...], trace_flags: dict[str, Any], out: Path) -> None:
    """Play several traces together, each from its own first arrival; each becomes a tenant."""
    from vsim.traces.edit import merge as together
    from vsim.traces.readers import read_trace

    _write(together([read_trace(path, **trace_flags) for path in paths]), out)


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@trace_options
@OUT
@click.option(
    "--round-tokens",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Round lengths up.",
)
def anonymize(path: Path, trace_flags: dict[str, Any], out: Path, round_tokens: int) -> None:
    """Remove names, dates and ids for good; times, lengths and sharing remain."""
    from vsim.traces.edit import anonymize as without_names
    from vsim.traces.readers import read_trace

    _write(without_names(read_trace(path, **trace_flags), round_tokens), out)
