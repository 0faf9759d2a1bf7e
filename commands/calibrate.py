"""`vsim calibrate`: a step model from real vLLM on the device at hand."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vsim.errors import UserError

if TYPE_CHECKING:
    from vsim.models.hardware import Gpu
    from vsim.models.model_spec import ModelSpec

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
)
@click.option(
    "--block-sizes",
    default=None,
    help="Block sizes to measure, e.g. 16,32. Default: 32,128 on the CPU, 16,32 on a GPU.",
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
@click.option("--temperature", type=click.FloatRange(min=0.0), default=0.0, show_default=True)
@click.option(
    "--vllm-python",
    help="A Python that has vLLM; default: $VSIM_VLLM_PYTHON, .venvs/vllm-*, this one.",
)
@click.option("--dtype")
@click.option("--quantization", "-q")
@click.option("--kv-cache-dtype")
@click.option("--max-model-len", type=click.IntRange(min=16))
@click.option("--max-num-batched-tokens", type=click.IntRange(min=16))
@click.option("--max-num-seqs", type=click.IntRange(min=1))
@click.option("--gpu-memory-utilization", type=click.FloatRange(min=0.01, max=1.0))
@click.option("--num-gpu-blocks-override", type=click.IntRange(min=2))
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
@click.option("--json", "as_json", is_flag=True, help="Print the artifact's quality as JSON.")
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
    as_json: bool,
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
    from vsim.models.hardware import find_gpu

    device = find_gpu(gpu)
    spec, _ = model_and_config(model)
    target = out or Path(f"{device.name}-{spec.name.rsplit('/', 1)[-1]}.json".lower())
    if target.suffix != ".json":
        raise UserError(f"--out {target} must end in .json: the artifact is a JSON file")
    if not target.parent.is_dir():
        raise UserError(f"--out {target}: the folder {target.parent} does not exist")
    if tables is not None:
        _from_tables(tables, device, spec, tensor_parallel_size, target, as_json)
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
        click.echo(describe(outcome.calibration, target))
    if outcome.warning:
        click.echo(f"warning: {outcome.warning}", err=True)
    if outcome.interrupted:
        click.echo(
            "interrupted: what was measured is kept and fitted; the same command goes on", err=True
        )
        raise click.exceptions.Exit(130)


def _from_tables(
    tables: Path, gpu: Gpu, model: ModelSpec, tensor_parallel_size: int, target: Path, as_json: bool
) -> None:
    """`--from-tables`: an artifact of kind "tables", refused if they were measured on something else."""
    import json

    from vsim.calibrate.from_tables import from_tables
    from vsim.commands.profiles import describe as describe_profile
    from vsim.models.artifact import write_calibration
    from vsim.models.links import link_figures
    from vsim.models.load import mismatch

    if not tables.is_dir():
        raise UserError(f"--from-tables {tables}: no such folder")
    moe = model.moe
    calibration = from_tables(
        tables,
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        vocab_size=model.vocab_size,
        tensor_parallel_size=tensor_parallel_size,
        num_experts=moe.num_experts if moe else 0,
        experts_per_token=moe.experts_per_token if moe else 0,
        link=link_figures(gpu),
        source=tables.name,
    )
    wrong = mismatch(calibration, gpu, model, tensor_parallel_size)
    if wrong:
        raise UserError(f"--from-tables {tables}: {wrong}")
    write_calibration(calibration, target)
    if as_json:
        click.echo(json.dumps({**calibration.quality, "artifact": target.name, "warning": None}))
    else:
        click.echo(describe_profile(target.stem, calibration))
        click.echo(
            f"written: {target.name} (use it with: vsim replay TRACE --profile {target.name})"
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


def describe(calibration: Any, path: Path) -> str:
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
    lines.append(f"written: {path.name} (use it with: vsim replay TRACE --profile {path.name})")
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
    words = ["vsim", *sys.argv[1:]]
    return shlex.join(
        Path(word).name if "/" in word and Path(word).exists() else word for word in words
    )
