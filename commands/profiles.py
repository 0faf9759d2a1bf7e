"""`vsim profiles`: what a calibration artifact says, for a person."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from vsim.errors import UserError


@click.group()
def profiles() -> None:
    """Look into calibration artifacts: where they come from and how wrong they are."""


@profiles.command("list")
def list_profiles() -> None:
    """List the bundled profiles by name."""
    from vsim.models.artifact import read_calibration
    from vsim.models.load import bundled_profiles
    from vsim.sim.text import plain

    for name, path in bundled_profiles():
        says = read_calibration(path).provenance
        click.echo(f"{name}: {plain(says.get('gpu', '?'))}, {plain(says.get('model', '?'))}")


@profiles.command()
@click.argument("profile")
@click.option("--json", "as_json", is_flag=True, help="Everything but the parameters, as JSON.")
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write predicted against measured steps here, as SVG; needs the samples beside the profile.",
)
def show(profile: str, as_json: bool, plot: Path | None) -> None:
    """Show a profile: a bundled name or a path."""
    import json

    from vsim.models.load import read_profile

    name, calibration = read_profile(profile)
    if plot is not None:
        _write_plot(plot, profile, calibration)
    if as_json:
        data = calibration.to_json()
        data.pop("params")
        click.echo(json.dumps(data, indent=1))
        return
    click.echo(describe(name, calibration))
    if plot is not None:
        click.echo(f"written: {plot.name}")


def describe(name: str, calibration: Any) -> str:
    """Origin, quality and domain in lines; nothing from the file reaches the terminal raw."""
    from vsim.models.domain import WORDS
    from vsim.sim.text import plain

    lines = [f"{plain(name)} ({plain(calibration.kind)}): {plain(calibration.label)}", "", "Origin"]
    for key, value in calibration.provenance.items():
        if key not in ("label", "assumptions", "model_config") and value not in (None, "", {}, []):
            lines.append(f"  {plain(key)}: {_value(value)}")
    lines += ["", "Quality"]
    for key, value in calibration.quality.items():
        if key == "coefficient_covariance":
            continue  # for the intervals, not for reading: --json has it
        if isinstance(value, dict):
            inner = ", ".join(f"{plain(k)} {_value(v)}" for k, v in value.items())
            lines.append(f"  {plain(key)}: {inner}")
        else:
            lines.append(f"  {plain(key)}: {_value(value)}")
    lines += ["", "Measured up to"]
    limits = {k: v for k, v in calibration.domain.to_json().items() if v is not None}
    lines += [f"  {WORDS[k]}: {v:,}" for k, v in limits.items()] or ["  no limit stated: a formula"]
    if calibration.assumptions:
        lines += ["", "Assumptions", *(f"  - {plain(a)}" for a in calibration.assumptions)]
    return "\n".join(lines)


def _value(value: Any) -> str:
    from vsim.sim.text import plain

    if value is None:
        return "not measured"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{plain(k)} {_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return ", ".join(_value(v) for v in value)
    return plain(value)


def _write_plot(plot: Path, profile: str, calibration: Any) -> None:
    from vsim.calibrate.fit_samples import predict
    from vsim.calibrate.samples import parquet_path, read_samples
    from vsim.calibrate.step_plot import step_plot

    path = Path(profile)
    if calibration.kind != "engine-steps":
        raise UserError(
            f"--plot needs a profile fitted on engine steps; {path.name} is of kind {calibration.kind}"
        )
    rows = [row for row in read_samples(path).rows if not row.warmup and row.total_s > 0]
    if not rows:
        raise UserError(
            f"--plot needs the samples beside the profile: {parquet_path(path).name} is missing or empty"
        )
    predicted = predict(dict(calibration.params), rows)
    points = [(row.phase, row.total_s, float(p)) for row, p in zip(rows, predicted, strict=True)]
    svg = step_plot(points, f"Engine steps: {path.stem}")
    part = plot.with_name(plot.name + ".part")
    part.write_text(svg, encoding="utf-8")
    part.replace(plot)
