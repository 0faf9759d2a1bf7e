"""`vsim validate`: predict a real vLLM run and print the error."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from vsim.calibrate.validate import Validation


@click.command()
@click.argument("case_dir", type=click.Path(path_type=Path))
@click.option(
    "--profile",
    help="Calibration artifact or bundled name; default: the case's own tables (profile/).",
)
@click.option(
    "--fit",
    "fit_text",
    default="none",
    show_default=True,
    help="none, or first:N: learn a correction from the first N requests and score the others.",
)
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path), help="Write the result as JSON."
)
@click.option(
    "--intervals",
    "draws",
    type=click.IntRange(0, 1000),
    default=0,
    help="Predictions behind a 90 % interval of each cell, e.g. 10; 0: none.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the intervals' draws.")
@click.option(
    "--save-profile",
    type=click.Path(path_type=Path),
    help="With --fit: write the corrected profile, for `vsim replay --profile`.",
)
def validate(
    case_dir: Path,
    profile: str | None,
    fit_text: str,
    json_path: Path | None,
    draws: int,
    seed: int,
    save_profile: Path | None,
) -> None:
    """Predict the run in CASE_DIR and print the error beside the peer's.

    CASE_DIR holds trace.jsonl, engine.json and measured.jsonl, and the layerwise tables of the same GPU in
    profile/ unless --profile is given. All latencies run from the client's send. Error is
    (predicted - measured) / measured.
    """
    from vsim.calibrate.case import read_case
    from vsim.calibrate.validate import parse_fit
    from vsim.calibrate.validate import validate as run
    from vsim.errors import UserError
    from vsim.models.artifact import write_calibration

    visible = parse_fit(fit_text)
    if save_profile is not None and not visible:
        raise UserError(
            "--save-profile needs --fit first:N: without a fit there is nothing new to save"
        )
    for path in (json_path, save_profile):
        if path is not None and not path.parent.is_dir():
            raise UserError(f"the folder of {path} does not exist")
    case = read_case(case_dir)
    loaded = case.step_model(profile)
    outcome = run(case, loaded, visible, _progress, draws, seed)
    click.echo(table(outcome.validation))
    if save_profile is not None:
        write_calibration(outcome.calibration, save_profile)
    if json_path is not None:
        part = json_path.with_name(json_path.name + ".part")
        part.write_text(outcome.validation.text(), encoding="utf-8")
        part.replace(json_path)


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        click.echo(f"\r\033[K{text}", nl=text.startswith("done"), err=True)


def table(result: Validation) -> str:
    """The result for a person."""
    from vsim.calibrate.validate import CELLS

    label = result.step_model["label"]
    lines = [
        f"{result.case}: {result.scored} requests scored, step model: {label}",
        "error in %, (predicted - measured) / measured, from the client's send",
        "",
        f"{'':12}" + "".join(f"{cell:>9}" for cell in CELLS),
    ]
    for name, distance in result.metrics.items():
        row = "".join(f"{distance.error_pct[cell]:>+9.2f}" for cell in CELLS)
        lines.append(f"{name.upper():12}{row}")
        if name in result.peer:
            row = "".join(f"{result.peer[name][cell]:>+9.2f}" for cell in CELLS)
            lines.append(f"{'  peer':12}{row}")
        row = "".join(_duration(distance.measured_s[cell]) for cell in CELLS)
        lines.append(f"{'  measured':12}{row}")
        if name in result.intervals:
            bounds = result.intervals[name]
            for word, side in (("  90 % from", 0), ("  90 % to", 1)):
                lines.append(f"{word:12}" + "".join(_duration(bounds[c][side]) for c in CELLS))
    lines += [
        "",
        f"output throughput {result.throughput['predicted']:.1f} tokens/s, measured "
        f"{result.throughput['measured']:.1f}: {result.throughput['error_pct']:+.2f} %",
    ]
    for name, distance in result.metrics.items():
        by = distance.per_request_pct
        lines.append(
            f"{name.upper():4} by request: |error| mean {by['mean_abs']:.2f} %, median {by['median_abs']:.2f} %, "
            f"p90 {by['p90_abs']:.2f} %; KS distance {distance.ks:.3f}"
        )
    if result.coverage is not None:
        lines.append(f"{result.coverage:.0%} of the 90 % intervals hold the measured value")
    if result.peer:
        lines.append("peer: the same requests and clock, from the prediction that the case carries")
    if result.unscored:
        lines.append(
            f"{result.unscored} requests were predicted as refused or never finished: not scored"
        )
    if result.correction:
        c = result.correction
        lines.append(
            f"learned from the first {c['learned_from_requests']} requests "
            f"({c['intervals']} step intervals, {c['requests_used']} times of requests): "
            f"{c['per_step_s'] * 1e3:+.3f} ms a step, {c['per_mixed_step_s'] * 1e3:+.3f} ms a mixed step, "
            f"{c['per_prefill_token_s'] * 1e6:+.3f} us a prefill token, "
            f"{c['per_kv_token_s'] * 1e9:+.2f} ns a KV token, front end {c['frontend_s'] * 1e3:.2f} ms"
        )
    lines += [f"assumed: {sentence}" for sentence in result.assumptions]
    return "\n".join(lines)


def _duration(seconds: float) -> str:
    return f"{seconds:>8.2f}s" if seconds >= 1 else f"{seconds * 1e3:>7.1f}ms"
