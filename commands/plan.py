"""`vsim plan`: the cheapest deployment that meets the objectives."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from vsim.commands.options import engine_options
from vsim.commands.trace_options import read_options
from vsim.errors import UserError

# Settings of a sweep that are the load, not the deployment, or that no `vllm serve` line could say.
NO_CHOICE = frozenset(
    ("replicas", "request_rate", "burstiness", "time_scale", "limit", "seed", "max_concurrency", "overlong",
     "swap_above_tokens", "victim_rule", "num_cpu_blocks", "pcie_gbps", "overlap_swaps", "usage")
)  # fmt: skip
# Where nothing else is varied: what a planner would try first.
DEFAULT_SPACE = {"tensor_parallel_size": "1,2,4,8", "max_num_batched_tokens": "2048,8192"}
# With --wide, and where the trace has priorities also who goes first.
WIDE_SPACE = {
    "block_size": "16,32",
    "max_num_seqs": "default,64",
    "route": "round-robin,least-requests",
}
POLICIES = "fcfs,priority"


@click.command(short_help="The cheapest deployment that meets your SLOs, with few simulations.")
@click.argument("trace", type=click.Path(path_type=Path))
@click.option(
    "--slo",
    "slos",
    multiple=True,
    metavar="NUMBER<=LIMIT",
    help="e.g. 'ttft_p95<=2s' 'tpot_p95<=100ms' 'output_throughput>=1000' 'error_rate<=1%'.",
)
@click.option(
    "--goodput",
    type=float,
    metavar="SHARE",
    help="Share of requests that must each keep every latency limit, e.g. 0.99.",
)
@engine_options
@read_options
@click.option(
    "--vary",
    multiple=True,
    metavar="NAME=V,V…",
    help="A flag and the values to choose from, as in vsim sweep: block_size=16,32.",
)
@click.option(
    "--grid",
    type=click.Path(path_type=Path),
    metavar="FILE.yaml",
    help="The same as a YAML mapping of name to list.",
)
@click.option(
    "--wide",
    is_flag=True,
    help="Choose block_size, max_num_seqs, route and (with priorities) scheduling_policy as well.",
)
@click.option("--profile", help="Calibration artifact, by path or bundled name.")
@click.option("--route", help="Where requests go, with several replicas.  [default: round-robin]")
@click.option(
    "--prices",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Your prices (docs/sweep.md); without --gpu, the GPUs to choose from.",
)
@click.option(
    "--max-replicas",
    type=click.IntRange(1, 4096),
    default=64,
    show_default=True,
    help="Of one kind of engine.",
)
@click.option(
    "--survive-replicas",
    type=click.IntRange(0, 100),
    default=0,
    show_default=True,
    help="So many may fail, and every SLO still holds.",
)
@click.option(
    "--traffic", default="1x", show_default=True, metavar="2x", help="Plan for a multiple of it."
)
@click.option(
    "--pessimism",
    type=click.FloatRange(0, 10),
    default=1.645,
    show_default=True,
    help="Standard deviations by which steps are slower than predicted; 1.645: end of a 90 % interval.",
)
@click.option("--limit", type=click.IntRange(min=1), help="Only the first so many requests.")
@click.option(
    "--request-rate", type=float, help="Requests/s instead of the trace's own times; inf: at once."
)
@click.option("--burstiness", type=float, default=1.0, help="Gamma shape of --request-rate's gaps.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the arrivals.")
@click.option("--jobs", type=click.IntRange(min=1), help="Simulations at once.  [default: 1]")
@click.option(
    "--backend",
    type=click.Choice(["loky", "threading", "dask", "ray"]),
    default="loky",
    show_default=True,
    help="joblib's: processes or threads here, or a cluster.",
)
@click.option("--address", help="The cluster's, with --backend dask or ray.")
@click.option(
    "--json",
    "json_file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the whole search here; - is standard output.",
)
def plan(
    trace: Path,
    slos: tuple[str, ...],
    goodput: float | None,
    engine_flags: dict[str, Any],
    reading: dict[str, Any],
    vary: tuple[str, ...],
    grid: Path | None,
    wide: bool,
    profile: str | None,
    route: str | None,
    prices: Path | None,
    max_replicas: int,
    survive_replicas: int,
    traffic: str,
    pessimism: float,
    limit: int | None,
    request_rate: float | None,
    burstiness: float,
    seed: int,
    jobs: int | None,
    backend: str,
    address: str | None,
    json_file: Path | None,
) -> None:
    """Search for the cheapest engines, and how many of them, that serve TRACE within every --slo.

    Any flag of `vsim sweep` can vary; replicas are always searched. Every SLO must hold with step times at
    the slow end of their error (docs/plan.md). Exit code 1: nothing in the space does.
    """
    from vsim.sim.cost import read_prices
    from vsim.sim.plan.around import look_around
    from vsim.sim.plan.candidates import Space
    from vsim.sim.plan.evaluate import Question
    from vsim.sim.plan.render import plan_data, plan_json, render
    from vsim.sim.plan.search import search
    from vsim.sim.plan.slo import check_slos, goodput_slo, parse_slo
    from vsim.sim.replay import Load
    from vsim.sim.sweep import Workers
    from vsim.sim.sweep_space import Choices, check_value, parse_vary, points_of, read_grid
    from vsim.traces.readers import read_trace

    asked = [parse_slo(text) for text in slos]
    check_slos(asked)
    limits: dict[str, float] = {}
    if goodput is not None:
        good, limits = goodput_slo(goodput, asked)
        asked.append(good)
    if not any(slo.key == "error_rate" for slo in asked):
        asked.append(parse_slo("error_rate<=0"))
    price_list = read_prices(prices) if prices is not None else None
    space: dict[str, Choices] = read_grid(grid) if grid is not None else {}
    gpus = engine_flags.pop("gpu", None)
    if gpus is None and "gpu" not in space and not any(v.startswith("gpu=") for v in vary):
        if price_list is None:
            raise UserError("--gpu is missing: name those to choose from, e.g. --gpu a100,h100")
        gpus = ",".join(price_list.per_gpu_hour)
    texts = [*([f"gpu={gpus}"] if gpus else []), *vary]
    for text in texts:
        name, choices = parse_vary(text)
        if name in space:
            raise UserError(f"{name} is varied twice: give it once")
        space[name] = choices
    gpu_choices = space.get("gpu")
    if price_list is not None and isinstance(gpu_choices, list):
        for gpu in gpu_choices:
            price_list.of(str(gpu))
    for name in space:
        if name in NO_CHOICE:
            raise UserError(
                f"{name} is no choice of a plan: it would ask another question of each deployment, or vLLM "
                "has no flag for it"
            )
    if engine_flags.get("usage") == "llm":
        raise UserError("--usage llm: a plan is for `vllm serve`, not for the offline LLM class")
    given = {**engine_flags, "profile": profile, "route": route}
    fixed = {name: value for name, value in given.items() if value is not None}
    if "model" not in fixed and "model" not in space:
        raise UserError("--model is missing: give it (vsim catalog lists them)")
    requests = read_trace(trace, limit=limit, **reading)
    added: dict[str, str] = {}
    if set(space) <= {"gpu", "model"} or wide:
        added |= DEFAULT_SPACE
    if wide:
        added |= WIDE_SPACE
        if requests.priority is not None and bool(
            (requests.priority != requests.priority[0]).any()
        ):
            added["scheduling_policy"] = POLICIES
    by_default: list[str] = []
    for name, values in added.items():
        if name not in fixed and name not in space:
            space[name] = parse_vary(f"{name}={values}")[1]
            by_default.append(f"{name} {values}")
    of_whose_own = "by --wide" if wide else "by default, nothing being varied"
    points = points_of({name: check_value(name, v) for name, v in fixed.items()}, space, None, seed)
    load = Load(
        limit=limit,
        time_scale=1 / _factor(traffic) if request_rate is None else 1.0,
        request_rate=None if request_rate is None else request_rate * _factor(traffic),
        burstiness=burstiness,
        seed=seed,
    )
    where = Space(
        points,
        None if price_list is None else price_list.of,
        max_replicas,
        survive_replicas,
        tuple(f"tried {of_whose_own}: {said}" for said in by_default),
    )
    if survive_replicas >= max_replicas:
        raise UserError(
            f"--survive-replicas {survive_replicas} leaves nothing of --max-replicas {max_replicas}"
        )
    question = Question(tuple(asked), limits, load, pessimism)
    if jobs is None and backend in ("loky", "threading"):
        jobs = 1
    workers = Workers(jobs, backend, address)
    say = _progress_line()
    try:
        found = search(requests, where, question, workers, say)
        if found.best is not None:
            say("how much more traffic it bears")
            look_around(requests, found, where, question, workers)
    finally:
        say("")
    data = plan_data(
        found,
        requests,
        where,
        question,
        price_list,
        {
            "traffic": traffic,
            "survive_replicas": survive_replicas,
            "max_replicas": max_replicas,
            "varied": {name: values for name, values in space.items() if isinstance(values, list)},
        },
    )
    if json_file is not None and str(json_file) == "-":
        click.echo(plan_json(data), nl=False)
    else:
        if json_file is not None:
            from vsim.traces.write import whole_file

            with whole_file(json_file) as stream:
                stream.write(plan_json(data).encode())
        click.echo(render(found, requests, where, question, price_list, list(space)), nl=False)
    if found.best is None:
        raise click.exceptions.Exit(1)


def _factor(text: str) -> float:
    try:
        factor = float(text.strip().lower().strip("x"))
    except ValueError:
        factor = 0.0
    if not 0 < factor < 1e6:
        raise UserError(f"--traffic {text!r} must be a positive multiple, e.g. 2x")
    return factor


def _progress_line() -> Any:
    live = sys.stderr.isatty()

    def say(line: str) -> None:
        if live:
            click.echo(f"\r\x1b[K{line}"[:110], nl=False, err=True)

    return say
