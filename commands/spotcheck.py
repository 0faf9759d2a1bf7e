"""`vsim spotcheck`: is the prediction right? Ask the real engine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from vsim.commands.trace_options import read_options
from vsim.errors import UserError

ENGINE_FLAGS = (
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_seqs",
    "num_gpu_blocks_override",
    "gpu_memory_utilization",
    "enforce_eager",
    "enable_prefix_caching",
    "scheduling_policy",
    "async_scheduling",
)


@click.command()
@click.argument("trace", required=False, type=click.Path(path_type=Path))
@click.option(
    "--profile",
    required=True,
    type=click.Path(path_type=Path),
    help="Artifact of `vsim calibrate` on this device.",
)
@click.option(
    "--model",
    help="Another model than the profile's: its step times are scaled, and the report says so.",
)
@click.option(
    "--requests",
    "--limit",
    "requests",
    type=click.IntRange(min=1),
    default=200,
    show_default=True,
    help="Of the trace, or random ones without a trace.",
)
@click.option(
    "--offset",
    type=click.IntRange(min=0),
    default=0,
    help="Leave out the trace's first so many requests.",
)
@click.option(
    "--time-scale",
    type=click.FloatRange(min=0.0),
    default=1.0,
    help="Times between the trace's arrivals times this.",
)
@click.option(
    "--request-rate",
    type=click.FloatRange(min=0.0, min_open=True),
    help="Requests/s instead of the trace's own times.",
)
@click.option(
    "--load",
    type=click.FloatRange(0.05, 3.0),
    default=0.8,
    show_default=True,
    help="Without trace and rate: share of the predicted capacity.",
)
@click.option(
    "--seed",
    type=int,
    default=1,
    show_default=True,
    help="Of the random requests and of --request-rate's arrivals.",
)
@click.option(
    "--repeats",
    type=click.IntRange(1, 50),
    default=3,
    show_default=True,
    help="How often the engine serves the trace; their spread is the noise.",
)
@click.option(
    "--block-size", type=click.IntRange(min=1), help="Tokens in one KV block. Default: vLLM's."
)
@click.option(
    "--max-model-len",
    type=click.IntRange(min=16),
    help="Most tokens of one request, prompt and output together.",
)
@click.option(
    "--max-num-batched-tokens",
    type=click.IntRange(min=16),
    help="Token budget of one engine step.",
)
@click.option(
    "--max-num-seqs", type=click.IntRange(min=1), help="Most requests in one engine step."
)
@click.option(
    "--num-gpu-blocks-override",
    type=click.IntRange(min=2),
    help="A small KV cache makes preemptions.",
)
@click.option(
    "--gpu-memory-utilization",
    type=click.FloatRange(min=0.01, max=1.0),
    help="Share of device memory that vLLM may use, 0 to 1.",
)
@click.option(
    "--enforce-eager/--no-enforce-eager",
    default=None,
    help="No CUDA graphs. Default: eager on the CPU, graphs on a GPU.",
)
@click.option(
    "--enable-prefix-caching/--no-enable-prefix-caching",
    default=None,
    help="Reuse KV blocks of a prompt's beginning seen before. Default: vLLM's.",
)
@click.option(
    "--scheduling-policy",
    type=click.Choice(["fcfs", "priority"]),
    help="Who goes first: arrival order, or the request's priority.",
)
@click.option(
    "--async-scheduling/--no-async-scheduling",
    default=None,
    help="Default: off, as in calibration.",
)
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="CPU only: OpenMP threads.",
)
@click.option(
    "--kv-cache-gib",
    type=click.FloatRange(min=0.01),
    default=1.0,
    show_default=True,
    help="CPU only.",
)
@click.option(
    "--clock",
    type=click.Choice(["wall", "cpu"]),
    default="wall",
    show_default=True,
    help="cpu: count the engine's CPU time only, for hosts that others use too.",
)
@click.option(
    "--url",
    help="A running vLLM server, e.g. http://localhost:8000: real HTTP and streaming, in real time. "
    "Give the flags it was started with.",
)
@click.option(
    "--frontend-ms",
    type=click.FloatRange(min=0.0),
    default=6.0,
    show_default=True,
    help="With --url: assumed time between client and engine.",
)
@click.option(
    "--draws",
    type=click.IntRange(1, 1000),
    default=15,
    show_default=True,
    help="Simulations with the step times' own errors, for the prediction and its interval each.",
)
@click.option(
    "--vllm-python",
    help="A Python that has vLLM; default: $VSIM_VLLM_PYTHON, .venvs/vllm-*, this one.",
)
@click.option(
    "--json",
    "json_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the comparison here; - is standard output.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write the runs here: predicted, measured-1, …",
)
@read_options
def spotcheck(
    trace: Path | None,
    profile: Path,
    model: str | None,
    requests: int,
    offset: int,
    time_scale: float,
    request_rate: float | None,
    load: float,
    seed: int,
    repeats: int,
    block_size: int | None,
    threads: int,
    kv_cache_gib: float,
    clock: str,
    draws: int,
    url: str | None,
    frontend_ms: float,
    vllm_python: str | None,
    json_file: Path | None,
    out: Path | None,
    reading: dict[str, Any],
    **flags: Any,
) -> None:
    """Serve a slice of TRACE on real vLLM here and compare it with its prediction.

    The engine runs in-process on a virtual clock that advances by the duration of each real step, so the
    replay takes only as long as the engine is busy. Every number is compared under the same definitions and
    the same clock, and judged against the spread of the repeats. Without TRACE, random requests are served.
    Exit code 1: something from mean to p95 is neither within 5 % nor inside the noise.
    """
    import json

    from vsim.calibrate.live import LivePlan, live_check

    if not profile.exists() and profile.suffix == ".json":
        raise UserError(f"--profile {profile} does not exist: make one with vsim calibrate")
    values = {name: flags[name] for name in ENGINE_FLAGS}
    loaded = None
    if trace is not None:
        loaded = _slice(trace, reading, requests, offset, time_scale, request_rate, seed)
    plan = LivePlan(
        profile=profile,
        trace=loaded,
        model=model,
        requests=requests,
        load=load,
        request_rate=request_rate,
        seed=seed,
        repeats=repeats,
        block_size=block_size,
        threads=threads,
        kv_cache_gib=kv_cache_gib,
        clock=clock,
        draws=draws,
        vllm_python=vllm_python,
        engine_flags=values,
    )
    if url is None:
        result = live_check(plan, _progress_line())
    else:
        from vsim.calibrate.live_http import live_http_check

        result = live_http_check(plan, url, frontend_ms / 1e3, _progress_line())
    if sys.stderr.isatty():
        click.echo("\r\033[K", nl=False, err=True)
    if out is not None:
        _write_runs(out, result)
    text = json.dumps(result.check.to_json(), indent=1) + "\n"
    if json_file is not None and str(json_file) == "-":
        click.echo(text, nl=False)
    else:
        if json_file is not None:
            part = json_file.with_name(json_file.name + ".part")
            part.write_text(text, encoding="utf-8")
            part.replace(json_file)
        click.echo(describe(result.check))
    if not result.check.passed:
        raise click.exceptions.Exit(1)


def _slice(
    path: Path,
    reading: dict[str, Any],
    requests: int,
    offset: int,
    time_scale: float,
    request_rate: float | None,
    seed: int,
) -> Any:
    import numpy as np

    from vsim.sim.replay import Load
    from vsim.traces.arrivals import select
    from vsim.traces.readers import read_trace

    whole = read_trace(path, limit=offset + requests, **reading)
    if offset >= len(whole):
        raise UserError(f"--offset {offset}: {path.name} has only {len(whole)} requests")
    part = select(whole, np.arange(offset, len(whole)), "before --offset") if offset else whole
    return Load(time_scale=time_scale, request_rate=request_rate, seed=seed).apply(part)


def _write_runs(out: Path, result: Any) -> None:
    from vsim.sim.run_io import write_run
    from vsim.sim.summary import summarize

    out.mkdir(parents=True, exist_ok=True)
    named = [("predicted", result.predicted)]
    named += [(f"measured-{i}", run) for i, run in enumerate(result.measured, 1)]
    for name, run in named:
        write_run(run, out / name, summarize(run), report=False)


def describe(check: Any) -> str:
    """The comparison as a table for a person."""
    from vsim.sim.text import plain

    # A server says what it likes of itself: nothing of it reaches the terminal raw.
    facts: dict[str, Any] = {
        k: plain(v) if isinstance(v, str) else v for k, v in check.facts.items()
    }
    lines = [
        f"{facts['requests']} requests, {facts['repeats']} repeats on {facts['device']}, vLLM "
        f"{facts['vllm_version']}, {facts['model']}, block size {facts['block_size']}, "
        f"{facts['num_gpu_blocks']} blocks",
        "",
        f"{'metric':<20}{'':<6}{'predicted':>11}{'90 % of it':>20}{'measured':>11}{'error':>9}{'repeats':>9}"
        "  verdict",
    ]
    for cell in check.cells:
        low, high = cell.interval or (cell.predicted, cell.predicted)
        band = f"{low:.4g} to {high:.4g}"
        lines.append(
            f"{cell.metric:<20}{cell.statistic:<6}{cell.predicted:>11.3f}{band:>20}{cell.median:>11.3f}"
            f"{cell.error_pct:>+8.2f}%{cell.spread_pct:>8.2f}%  {cell.verdict}"
        )
    held = [cell.inside_interval for cell in check.cells if cell.inside_interval is not None]
    preempted = facts["preemptions"]
    lines += [
        "",
        "latencies in ms, throughput per second; measured: median of the repeats; repeats: their spread",
        f"the prediction's 90 % interval holds the measured value in {sum(map(bool, held))} of {len(held)} rows",
        f"preemptions: predicted {preempted['predicted']}, measured "
        + (", ".join(map(str, preempted["measured"])) or "not seen from outside"),
    ]
    if check.step_error:
        step = check.step_error
        lines.append(
            f"single steps: median error {step['median_abs_pct']:.2f} %, p95 {step['p95_abs_pct']:.2f} %, "
            f"bias {step['bias_pct']:+.2f} %"
        )
    if facts.get("slowdown"):
        middle = ", ".join(f"{s['p50'] - 1:+.1%}" for s in facts["slowdown"])
        worst = ", ".join(f"{s['p95'] - 1:+.1%}" for s in facts["slowdown"])
        lines.append(
            f"this machine against its best, by a yardstick run around every step: {middle} at the median, "
            f"{worst} at p95;\n  all durations, measured and predicted, are those of the machine at its best"
        )
    if facts.get("left_out_slowdown"):
        slower = ", ".join(f"{factor - 1:+.0%}" for factor in facts["left_out_slowdown"])
        lines.append(
            f"left out and measured again, because the machine was slower than during the calibration: {slower}"
        )
    for number, same in enumerate(facts["same_decisions"], 1):
        if same["checked"]:
            lines.append(
                f"scheduler, given the real step times of repeat {number}: {same['equal_steps']} of "
                f"{same['steps']} steps equal"
            )
    lines += [f"note: {plain(sentence)}" for sentence in facts["assumptions"]]
    lines += [f"doubt: {plain(sentence)}" for sentence in check.complaints]
    lines.append("passed" if check.passed else "not passed")
    return "\n".join(lines)


def _progress_line() -> Any:
    live = sys.stderr.isatty()

    def say(line: str) -> None:
        if live:
            click.echo(f"\r\033[K{line}"[:110], nl=False, err=True)

    return say
