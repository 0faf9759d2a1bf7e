"""`vsim calibrate --from-tables`, `--from-bench`, `--from-steps`, `--from-aiconfigurator`: an artifact from what somebody else measured."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vsim.errors import UserError

if TYPE_CHECKING:
    from vsim.models.artifact import Calibration
    from vsim.models.hardware import Gpu
    from vsim.models.model_spec import ModelSpec
    from vsim.sim.deployment import Deployment


def from_tables(
    tables: Path, gpu: Gpu, model: ModelSpec, tensor_parallel_size: int, target: Path, as_json: bool
) -> None:
    """An artifact of kind "tables", refused if they were measured on something else."""
    from vsim.calibrate.from_tables import from_tables as read
    from vsim.models.artifact import write_calibration
    from vsim.models.links import link_figures
    from vsim.models.profile_check import mismatch

    if not tables.is_dir():
        raise UserError(f"--from-tables {tables}: no such folder")
    moe = model.moe
    calibration = read(
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
    tell(calibration, target, as_json, usage(target))


def from_bench(
    result: Path,
    trace: Path | None,
    deployment: Deployment,
    prior: str | None,
    reading: dict[str, Any],
    command: str,
    target: Path,
    as_json: bool,
    hint: str,
) -> None:
    """A prior corrected from a client's latencies, with its error on the requests held out."""
    from vsim.calibrate.from_bench import from_bench as fit
    from vsim.calibrate.from_bench import prior_model
    from vsim.commands.validate import table
    from vsim.models.artifact import write_calibration
    from vsim.sim.text import plain

    fitted = fit(result, trace, deployment, prior_model(deployment, prior), reading, command, _say)
    _clear()
    write_calibration(fitted.calibration, target)
    if as_json:
        tell(fitted.calibration, target, as_json, hint)
        return
    for line in table(fitted.held_out).splitlines():
        click.echo(plain(line))
    before = {name: d.error_pct["mean"] for name, d in fitted.prior.metrics.items()}
    click.echo(
        "the prior alone, mean on the same requests: "
        + ", ".join(f"{name.upper()} {error:+.1f} %" for name, error in before.items())
    )
    click.echo(f"written: {plain(target.name)} (use it with: {hint})")


def from_steps(
    log: Path,
    deployment: Deployment,
    model_config: dict[str, Any],
    prior: str | None,
    blocks: int | None,
    command: str,
    target: Path,
    as_json: bool,
    hint: str,
) -> None:
    """A step model from a log of steps, with its error on the steps held out."""
    from vsim.calibrate.from_steps import from_steps as fit
    from vsim.models.artifact import write_calibration

    held = None if blocks is None else blocks * deployment.scheduler.block_size
    calibration = fit(log, deployment, model_config, prior, held, command)
    write_calibration(calibration, target)
    tell(calibration, target, as_json, hint)


def from_aiconfigurator(
    deployment: Deployment,
    model_config: dict[str, Any],
    command: str,
    target: Path,
    as_json: bool,
    hint: str,
) -> None:
    """A prior from a general database, to be corrected by what is measured."""
    from vsim.calibrate.from_aiconfigurator import from_aiconfigurator as ask
    from vsim.models.artifact import write_calibration

    calibration = ask(deployment, model_config, command)
    write_calibration(calibration, target)
    tell(calibration, target, as_json, hint)


def tell(calibration: Calibration, target: Path, as_json: bool, hint: str) -> None:
    """What was made of it: for a person, or its quality as JSON."""
    import json

    from vsim.commands.profiles import describe

    if as_json:
        click.echo(json.dumps({**calibration.quality, "artifact": target.name, "warning": None}))
        return
    click.echo(describe(target.stem, calibration))
    click.echo(f"written: {target.name} (use it with: {hint})")


def usage(
    target: Path,
    model: str | None = None,
    gpu: Gpu | None = None,
    kv_cache_gib: float | None = None,
) -> str:
    """The command that uses the artifact. A CPU has no device memory to size the KV cache from: its size is named."""
    words = ["vsim", "replay", "TRACE", "--profile", target.name]
    if gpu is not None and gpu.platform == "cpu":
        words += ["--gpu", gpu.name, "--model", model or "MODEL"]
        words += ["--kv-cache-memory-bytes", str(int((kv_cache_gib or 1.0) * 2**30))]
    return shlex.join(words)


def _say(text: str) -> None:
    if sys.stderr.isatty():
        click.echo(f"\r\033[K{text}", nl=False, err=True)


def _clear() -> None:
    if sys.stderr.isatty():
        click.echo("\r\033[K", nl=False, err=True)
