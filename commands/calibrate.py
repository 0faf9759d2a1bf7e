"""`vsim calibrate`: a step model from real vLLM on the device at hand."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vsim.commands.trace_options import read_options
from vsim.errors import UserError

if TYPE_CHECKING:
    from vsim.models.hardware import Gpu
    from vsim.sim.deployment import Deployment

# Flags that change what a step costs, passed on to vLLM as they are.
ENGINE_FLAGS = (
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_seqs",
    "gpu_memory_utilization",
    "num_gpu_blocks_override",
    "enforce_eager",
)
# Flags of the server behind a log or a bench result; a measuring run sets these itself.
SERVER_FLAGS = (
    "data_parallel_size",
    "enable_prefix_caching",
    "async_scheduling",
    "scheduling_policy",
    "kv_cache_memory_bytes",
    "engine_version",
)


@click.command()
@click.option(
    "--gpu", required=True, help="The device that is present: cpu, h200, rtx4090 … (vsim catalog)."
)
@click.option(
    "--model",
    required=True,
    help="Bundled name (tiny, meta-llama/Llama-3.1-8B …) or a folder with config.json.",
)
@click.option(
    "--tensor-parallel-size",
    "--tp",
    "-tp",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="GPUs that share each layer's work.",
)
@click.option(
    "--block-sizes",
    default=None,
    help="Block sizes to measure, e.g. 16,32. Default: 32,128 on the CPU, 16,32 on a GPU. With --from-bench "
    "or --from-steps the one that the server had.",
)
@click.option(
    "--budget-minutes",
    type=click.FloatRange(min=0.01, max=24 * 60),
    default=5.0,
    show_default=True,
    help="Wall time for everything, engine starts included.",
)
@click.option(
    "--repeats",
    type=click.IntRange(1, 20),
    default=3,
    show_default=True,
    help="Of each design point.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The artifact; raw samples go beside it as NAME.samples.parquet. Default: DEVICE-MODEL.json here.",
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
    help="CPU only: memory for the KV cache.",
)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0.0),
    default=0.0,
    show_default=True,
    help="Of the sampler: 0 takes the likeliest token, more makes the sampler work.",
)
@click.option(
    "--vllm-python",
    help="A Python that has vLLM; default: $VSIM_VLLM_PYTHON, .venvs/vllm-*, this one.",
)
@click.option("--dtype", help="Weights and activations: bfloat16 (default), float16, float32.")
@click.option("--quantization", "-q", help="Of the weights: fp8, awq, gptq, … as vLLM names them.")
@click.option("--kv-cache-dtype", help="Of the KV cache: auto, fp8, fp8_e4m3, fp8_e5m2, bfloat16.")
@click.option(
    "--max-model-len",
    type=click.IntRange(min=16),
    help="Most tokens of one request, prompt and output together.",
)
@click.option(
    "--max-num-batched-tokens",
    type=click.IntRange(min=16),
    help="Token budget of one engine step: the longest prefill that is measured.",
)
@click.option(
    "--max-num-seqs",
    type=click.IntRange(min=1),
    help="Most requests in one engine step: the largest decode batch that is measured.",
)
@click.option(
    "--gpu-memory-utilization",
    type=click.FloatRange(min=0.01, max=1.0),
    help="Share of device memory that vLLM may use, 0 to 1.",
)
@click.option(
    "--num-gpu-blocks-override",
    type=click.IntRange(min=2),
    help="Number of KV blocks, instead of what fits.",
)
@click.option(
    "--enforce-eager/--no-enforce-eager",
    default=None,
    help="Default: eager on the CPU, CUDA graphs on a GPU.",
)
@click.option(
    "--refit", is_flag=True, help="Measure nothing: fit the samples that are there again."
)
@click.option(
    "--from-tables",
    "tables",
    type=click.Path(path_type=Path),
    help="Measure nothing: make the artifact from a folder of layerwise tables (meta.yaml, tp<N>/*.csv).",
)
@click.option(
    "--from-bench",
    "bench",
    type=click.Path(path_type=Path),
    metavar="RESULT",
    help="Measure nothing: correct --prior from a result of `vllm bench serve --save-detailed`.",
)
@click.option(
    "--from-steps",
    "steps",
    type=click.Path(path_type=Path),
    metavar="LOG",
    help="Measure nothing: fit a log of engine steps, vLLM's (--enable-logging-iteration-details) or a "
    "recorder's.",
)
@click.option(
    "--from-aiconfigurator",
    "database",
    is_flag=True,
    help="Measure nothing: a prior from aiconfigurator's database (pip install 'vsim[aic]'), to be corrected.",
)
@click.option(
    "--trace",
    type=click.Path(path_type=Path),
    help="With --from-bench: the trace that caused it; without, no prompts share a beginning.",
)
@click.option(
    "--prior",
    help="With --from-bench or --from-steps: profile to correct, by path or bundled name. Default: a bundled "
    "one that fits, else the roofline.",
)
@click.option(
    "--data-parallel-size",
    "-dp",
    type=click.IntRange(min=1),
    help="Of the server that was measured, with --from-bench or --from-steps; so are the next five.",
)
@click.option(
    "--enable-prefix-caching/--no-enable-prefix-caching",
    default=None,
    help="Default: vLLM's.",
)
@click.option("--async-scheduling/--no-async-scheduling", default=None, help="Default: vLLM's.")
@click.option("--scheduling-policy", type=click.Choice(["fcfs", "priority"]), help="Default: fcfs.")
@click.option(
    "--kv-cache-memory-bytes",
    type=click.IntRange(min=1),
    help="Size of the KV cache per GPU. Default: what the memory account leaves.",
)
@click.option("--engine-version", help="vLLM release of the server, e.g. 0.32.0 (default).")
@click.option("--json", "as_json", is_flag=True, help="Print the artifact's quality as JSON.")
@read_options
def calibrate(
    gpu: str,
    model: str,
    tensor_parallel_size: int,
    block_sizes: str | None,
    budget_minutes: float,
    repeats: int,
    out: Path | None,
    threads: int,
    kv_cache_gib: float,
    temperature: float,
    vllm_python: str | None,
    refit: bool,
    tables: Path | None,
    bench: Path | None,
    steps: Path | None,
    database: bool,
    trace: Path | None,
    prior: str | None,
    as_json: bool,
    reading: dict[str, Any],
    **flags: Any,
) -> None:
    """Time real vLLM on this machine, step by step, and fit a step model for `vsim replay --profile`.

    Weights are random, so nothing is downloaded. Steps of a designed grid come first, the most telling
    first; a short random serving run at the end is held out to state the error. What was measured is kept
    whenever you stop (Ctrl-C), and the same command goes on from there.
    """
    import json

    from vsim.calibrate.campaign import Outcome, Plan, model_and_config
    from vsim.calibrate.campaign import calibrate as run
    from vsim.calibrate.campaign import refit as fit_again
    from vsim.commands import calibrate_from
    from vsim.models.hardware import find_gpu

    device = find_gpu(gpu)
    spec, config = model_and_config(model)
    target = out or Path(f"{device.name}-{spec.name.rsplit('/', 1)[-1]}.json".lower())
    if target.suffix != ".json":
        raise UserError(f"--out {target} must end in .json: the artifact is a JSON file")
    if not target.parent.is_dir():
        raise UserError(f"--out {target}: the folder {target.parent} does not exist")
    sources = {"--from-bench": bench, "--from-steps": steps, "--from-tables": tables}
    flagged = {"--refit": refit or None, "--from-aiconfigurator": database or None}
    _one_source(sources | flagged, trace, prior, flags)
    if tables is not None:
        calibrate_from.from_tables(tables, device, spec, tensor_parallel_size, target, as_json)
        return
    hint = calibrate_from.usage(target, model, device, kv_cache_gib)
    if bench is not None or steps is not None or database:
        served = _served(device, model, tensor_parallel_size, block_sizes, kv_cache_gib, flags)
    if database:
        calibrate_from.from_aiconfigurator(served, config, _command_line(), target, as_json, hint)
        return
    if steps is not None:
        blocks = flags["num_gpu_blocks_override"]
        calibrate_from.from_steps(
            steps, served, config, prior, blocks, _command_line(), target, as_json, hint
        )
        return
    if bench is not None:
        calibrate_from.from_bench(
            bench, trace, served, prior, reading, _command_line(), target, as_json, hint
        )
        return
    plan = Plan(
        gpu=device,
        model=model,
        out=target,
        block_sizes=parse_block_sizes(
            block_sizes or ("32,128" if device.platform == "cpu" else "16,32")
        ),
        budget_s=budget_minutes * 60,
        tensor_parallel_size=tensor_parallel_size,
        repeats=repeats,
        threads=threads,
        kv_cache_gib=kv_cache_gib,
        temperature=temperature,
        vllm_python=vllm_python,
        engine_flags={name: flags[name] for name in ENGINE_FLAGS},
        command=_command_line(),
    )
    outcome: Outcome = fit_again(plan) if refit else run(plan, _progress_line())
    if sys.stderr.isatty():
        click.echo("\r\033[K", nl=False, err=True)
    if outcome.calibration is None:
        kept = len(outcome.samples.rows)
        if outcome.interrupted:
            click.echo(
                f"interrupted: {kept} steps are kept, too few for a model; the same command goes on",
                err=True,
            )
            raise click.exceptions.Exit(130)
        raise UserError(
            f"no artifact: {outcome.why_not} ({kept} steps are kept, the same command goes on)"
        )
    if as_json:
        click.echo(
            json.dumps(
                {**outcome.calibration.quality, "artifact": target.name, "warning": outcome.warning}
            )
        )
    else:
        click.echo(describe(outcome.calibration, target, hint))
    if outcome.warning:
        click.echo(f"warning: {outcome.warning}", err=True)
    if outcome.interrupted:
        click.echo(
            "interrupted: what was measured is kept and fitted; the same command goes on", err=True
        )
        raise click.exceptions.Exit(130)


def _one_source(
    sources: dict[str, Any], trace: Path | None, prior: str | None, flags: dict[str, Any]
) -> None:
    """Refuse sources that exclude each other, and flags without the source that they belong to."""
    given = [name for name, value in sources.items() if value is not None]
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)} are different sources: give one")
    if trace is not None and given != ["--from-bench"]:
        raise UserError("--trace belongs to --from-bench: without it, it has no use here")
    if given in (["--from-bench"], ["--from-steps"]):
        return
    stray = [] if prior is None else ["--prior"]
    stray += ["--" + name.replace("_", "-") for name in SERVER_FLAGS if flags[name] is not None]
    if stray:
        raise UserError(
            f"{stray[0]} belongs to --from-bench and --from-steps: without them, it has no use here"
        )


def _served(
    gpu: Gpu,
    model: str,
    tensor_parallel_size: int,
    block_sizes: str | None,
    kv_cache_gib: float,
    flags: dict[str, Any],
) -> Deployment:
    """The server that a log or a bench result came from, by its flags."""
    from vsim.sim.deployment import resolve

    sizes = parse_block_sizes(block_sizes) if block_sizes else ()
    if len(sizes) > 1:
        raise UserError(
            f"--block-sizes {block_sizes}: the server that was measured had one of them"
        )
    values = {name: flags[name] for name in (*ENGINE_FLAGS, *SERVER_FLAGS)}
    if gpu.platform == "cpu" and values["kv_cache_memory_bytes"] is None:
        values["kv_cache_memory_bytes"] = int(kv_cache_gib * 2**30)
    return resolve(
        model,
        gpu,
        tensor_parallel_size=tensor_parallel_size,
        block_size=sizes[0] if sizes else None,
        **values,
    )


def parse_block_sizes(text: str) -> tuple[int, ...]:
    """ "16,32" -> (16, 32). Raises UserError for anything that is no list of positive numbers."""
    try:
        sizes = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        sizes = ()
    if not sizes or any(not 1 <= size <= 1 << 16 for size in sizes):
        raise UserError(
            f"--block-sizes {text!r} must be positive whole numbers with commas between, e.g. 16,32"
        )
    return sizes


def describe(calibration: Any, path: Path, hint: str) -> str:
    """The artifact's quality in a few lines for a person."""
    quality, says = calibration.quality, calibration.provenance
    floor, held, fit = quality["noise_floor"], quality["held_out_error"], quality["fit"]

    def percent(value: float | None) -> str:
        return "not measured" if value is None else f"{value:.2f} %"

    lines = [
        f"{says['label']}, model {says['model']}, tp {says['tensor_parallel_size']}, "
        f"block sizes {', '.join(map(str, says['block_sizes']))}",
        f"  fitted on {quality['samples']} steps: median error {percent(fit['median_abs_pct'])}, "
        f"p95 {percent(fit['p95_abs_pct'])}",
    ]
    if held:
        lines.append(
            f"  on {quality['held_out']} held-out steps of a serving run: median error "
            f"{percent(held['median_abs_pct'])}, p95 {percent(held['p95_abs_pct'])}, bias {held['bias_pct']:+.2f} %"
        )
    else:
        lines.append("  no held-out steps: run the same command again for its error")
    lines.append(
        f"  noise floor from {floor['pairs']} repeated steps: median {percent(floor['median_abs_pct'])}, "
        f"p95 {percent(floor['p95_abs_pct'])}"
    )
    limits = ", ".join(f"{k} {v}" for k, v in calibration.domain.to_json().items() if v is not None)
    lines.append(f"  measured up to: {limits}")
    lines += [f"  note: {sentence}" for sentence in calibration.assumptions]
    lines.append(f"written: {path.name} (use it with: {hint})")
    return "\n".join(lines)


def _progress_line() -> Any:
    """A line that rewrites itself on a terminal; elsewhere one line per engine start."""
    live = sys.stderr.isatty()

    def say(line: str, progress: Any) -> None:
        if live:
            busy = f", {progress.disturbed_share:.0%} disturbed" if progress.disturbed else ""
            click.echo(
                f"\r\033[K{progress.elapsed_s:5.0f} s  {progress.steps} steps{busy}  {line}"[:110],
                nl=False,
                err=True,
            )
        elif "starting" in line:
            click.echo(f"{progress.elapsed_s:.0f} s, {progress.steps} steps: {line}", err=True)

    return say


def _command_line() -> str:
    """The command as typed, folders cut off: an artifact travels, its writer's paths don't."""

    def plain(word: str) -> str:
        path = Path(word)
        is_file = "/" in word and (path.exists() or path.parent.is_dir())
        return path.name if is_file else word

    return shlex.join(["vsim", *map(plain, sys.argv[1:])])
