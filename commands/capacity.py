"""`vsim capacity`: how many KV blocks fit, term by term; against a real start-up log; against public reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vsim.commands.options import engine_options
from vsim.errors import UserError

if TYPE_CHECKING:
    from vsim.models.startup_log import StartupLog
    from vsim.sim.capacity_check import Check
    from vsim.sim.deployment import Deployment

MAX_LOG_BYTES = 64 << 20
GIB = 1 << 30


@click.command()
@engine_options
@click.option(
    "--available-gib",
    type=float,
    help='Use this "Available KV cache memory" (GiB per rank) from a real log instead of the estimate.',
)
@click.option(
    "--speculative-config",
    help="vLLM's JSON, e.g. '{\"method\": \"mtp\"}': the draft's weights and KV layers are counted.",
)
@click.option(
    "--from-log",
    type=click.Path(path_type=Path),
    help="A real start-up log, or /metrics text: say which term disagrees.",
)
@click.option(
    "--facts",
    type=click.Path(path_type=Path),
    help="JSONL of public capacity reports: check every claim, print the error of every prediction.",
)
@click.option("--json", "as_json", is_flag=True, help="JSON instead of tables.")
def capacity(
    engine_flags: dict[str, Any],
    available_gib: float | None,
    speculative_config: str | None,
    from_log: Path | None,
    facts: Path | None,
    as_json: bool,
) -> None:
    """How many KV-cache blocks fit, term by term, as vLLM sizes them.

    Every term says where it comes from: a formula, a flag, or an estimate of what vLLM measures on the device.
    A configuration that vLLM would refuse is refused in its words.
    """
    if facts is not None and from_log is not None:
        raise UserError("--from-log and --facts read different files: give one of them")
    if facts is not None:
        _facts(facts, as_json)
        return
    if from_log is not None:
        if speculative_config is not None:
            engine_flags["speculative_config"] = _speculative(speculative_config)
        _beside_log(from_log, engine_flags, as_json)
        return
    flags = {k: v for k, v in engine_flags.items() if v is not None}
    if speculative_config is not None:
        flags["speculative_config"] = _speculative(speculative_config)
    if "model" not in flags or "gpu" not in flags:
        raise UserError(
            "vsim capacity needs --model and --gpu (or --from-log FILE, or --facts FILE)"
        )
    from vsim.sim.deployment import resolve

    if available_gib is not None:
        if not 0 < available_gib < 1 << 20:
            raise UserError(f"--available-gib={available_gib} must be a positive number of GiB")
        flags["available_kv_cache_bytes"] = round(available_gib * GIB)
    run = resolve(flags.pop("model"), flags.pop("gpu"), **flags)
    if as_json:
        click.echo(json.dumps(_as_json(run), indent=1))
    else:
        _show(run)


def _speculative(text: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except (ValueError, RecursionError):
        raise UserError(f"--speculative-config={text}: not valid JSON") from None
    if not isinstance(config, dict):
        raise UserError(f"--speculative-config={text}: must be a JSON object, as vLLM takes it")
    return config


def _log_lines(run: Deployment) -> list[str]:
    from vsim.models.startup_log import startup_lines

    return startup_lines(
        run.capacity,
        run.scheduler.engine,
        run.scheduler.engine_version,
        run.gpu_memory_utilization,
        run.gpu.memory_bytes,
        run.gpu.platform,
    )


def _as_json(run: Deployment) -> dict[str, Any]:
    fit = run.capacity
    return {
        **run.as_dict(),
        "block_size": fit.block_size,
        "bytes_per_block": fit.bytes_per_block,
        "kv_bytes_per_token": fit.kv_bytes_per_token,
        "requested_bytes": fit.requested_bytes,
        "weight_bytes": fit.weight_bytes,
        "terms": [
            {"name": t.name, "bytes": t.bytes, "origin": t.origin, "source": t.source}
            for t in fit.terms
        ],
        "kv_cache_groups": [
            {
                "type": g.kind,
                "window": g.window,
                "block_size": g.block_size,
                "layers": len(g.layers),
            }
            for g in fit.layout.groups
        ],
        "log": _log_lines(run),
    }


def _show(run: Deployment) -> None:
    fit, model = run.capacity, run.model
    ranks = f"{run.gpus_per_replica} x {run.gpu.name}" if run.gpus_per_replica > 1 else run.gpu.name
    layout = f"tp={run.tensor_parallel_size} pp={run.pipeline_parallel_size}"
    click.echo(f"{model.name} on {ranks}  ({layout}, vLLM {run.scheduler.engine_version})\n")
    rows: list[tuple[str, str, str]] = []
    if fit.requested_bytes:
        total = run.gpu.memory_bytes
        rows.append(("total device memory", _gib(total), run.gpu.source("memory_bytes")))
        share = f"x {run.gpu_memory_utilization:g}  ({run.origins['gpu_memory_utilization']})"
        rows.append(("requested", _gib(fit.requested_bytes), share))
    for term in fit.terms:
        sign = "" if term.origin == "given" else "-"
        rows.append((term.name, f"{sign}{_gib(term.bytes)}", f"{term.origin}: {term.source}"))
    if len(fit.terms) > 1:
        rows.append(
            ("available for KV", _gib(fit.available_bytes), "per rank; the poorest rank decides")
        )
    if run.flags.get("num_gpu_blocks_override") is not None:
        rows.append(("KV memory in use", _gib(fit.available_bytes), "--num-gpu-blocks-override"))
    _table(rows)
    click.echo("")
    kinds: dict[str, list[int]] = {}
    for g in fit.layout.groups:
        kind = g.kind + (f" (window {g.window})" if g.window else "")
        kinds.setdefault(kind, []).append(len(g.layers))
    groups = ", ".join(
        f"{len(n)} x {max(n)} layers {kind}" if len(n) > 1 else f"{n[0]} layers {kind}"
        for kind, n in kinds.items()
    )
    _table(
        [
            ("KV bytes per token", f"{fit.kv_bytes_per_token:,}", f"of one rank, {run.kv_cache_dtype}, all its layers"),
            ("KV cache groups", str(len(fit.layout.groups)), groups),
            ("block size", str(fit.block_size), run.origins["block_size"]),
            ("bytes per block", f"{fit.bytes_per_block:,}", "per rank"),
            ("blocks", f"{fit.num_gpu_blocks:,}", "V1 keeps one of them as the null block"
             if run.scheduler.engine == "v1" else f"and {fit.num_cpu_blocks:,} CPU blocks for swapping"),
            ("tokens", f"{fit.kv_cache_size_tokens:,}", "as the log counts them"),
            ("maximum concurrency", f"{fit.max_concurrency:.2f}x",
             f"requests of {fit.max_model_len:,} tokens; shorter ones share the same blocks"),
        ]
    )  # fmt: skip
    click.echo("\nThis release would log:")
    for line in _log_lines(run):
        click.echo(f"  {line}")
    for sentence in run.assumptions:
        click.echo(f"\nassumed: {sentence}")


def _gib(count: float) -> str:
    return f"{count / GIB:.2f} GiB"


def _table(rows: list[tuple[str, str, str]]) -> None:
    first = max(len(r[0]) for r in rows)
    second = max(len(r[1]) for r in rows)
    for name, value, note in rows:
        click.echo(f"  {name:<{first}}  {value:>{second}}  {note}".rstrip())


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_LOG_BYTES:
            raise UserError(
                f"{path}: larger than {MAX_LOG_BYTES >> 20} MiB; cut it to the start-up"
            )
        raw = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None
    if raw.startswith(b"\x1f\x8b"):
        raw = _unpacked(raw, path)
    # What PowerShell's > writes is UTF-16.
    wide = raw.startswith((b"\xff\xfe", b"\xfe\xff"))
    return raw.decode("utf-16" if wide else "utf-8-sig", errors="replace")


def _unpacked(raw: bytes, path: Path) -> bytes:
    """The log behind a .gz. Raises UserError if it is damaged or too large."""
    import gzip
    import io
    import zlib

    try:
        with gzip.GzipFile(fileobj=io.BytesIO(raw)) as stream:
            text = stream.read(MAX_LOG_BYTES + 1)
    except (EOFError, OSError, zlib.error) as error:
        raise UserError(f"{path}: not a whole gzip file ({error})") from None
    if len(text) > MAX_LOG_BYTES:
        raise UserError(
            f"{path}: unpacks to more than {MAX_LOG_BYTES >> 20} MiB; cut it to the start-up"
        )
    return text


def _beside_log(path: Path, flags: dict[str, Any], as_json: bool) -> None:
    from vsim.models.startup_log import parse_startup_log
    from vsim.sim.capacity_check import check_against_log, conclusion, resolve_beside_log

    log = parse_startup_log(_read(path))
    if not log.figures:
        raise UserError(
            f"{path}: no line about memory or KV cache that a vLLM start-up or /metrics prints"
        )
    run = resolve_beside_log(log, flags)
    checks = check_against_log(run, log)
    verdict = conclusion(run, checks)
    if as_json:
        rows = [
            {"term": c.term, "ours": c.ours, "logged": c.logged, "unit": c.unit, "verdict": c.verdict,
             "blocks": c.blocks, "note": c.note}
            for c in checks
        ]  # fmt: skip
        out = {"log": log.figures, "texts": log.texts, "checks": rows, "conclusion": verdict}
        click.echo(json.dumps({**_as_json(run), **out}, indent=1))
        return
    _show_checks(run, log, checks, verdict)


def _show_checks(run: Deployment, log: StartupLog, checks: list[Check], verdict: str) -> None:
    click.echo(f"{run.model.name} on {run.gpu.name}, vLLM {run.scheduler.engine_version}\n")
    header = ("term", "ours", "log", "", "in blocks")
    rows = [header]
    for c in checks:
        shown = "" if c.logged is None else _figure(c.logged, c.unit)
        worth = f"{c.blocks:+.0f}" if c.blocks else ""
        rows.append((c.term, _figure(c.ours, c.unit), shown, c.verdict, worth))
    widths = [max(len(r[i]) for r in rows) for i in range(5)]
    for r in rows:
        cells = (
            r[0].ljust(widths[0]),
            *(r[i].rjust(widths[i]) for i in (1, 2)),
            r[3].ljust(widths[3]),
        )
        click.echo("  " + "  ".join((*cells, r[4].rjust(widths[4]))).rstrip())
    if "estimated_max_len" in log.figures:
        click.echo(
            f"\nThe log refuses the length and estimates {log.figures['estimated_max_len']:.0f}."
        )
    click.echo(f"\n{verdict}")
    for sentence in run.assumptions:
        if "estimate would refuse" in sentence:
            click.echo(f"\nassumed: {sentence}")


def _figure(value: float, unit: str) -> str:
    if unit == "GiB":
        return f"{value:.2f} GiB"
    if unit == "x":
        return f"{value:.2f}x"
    return f"{value:,.0f}" if unit else f"{value:g}"


def _facts(path: Path, as_json: bool) -> None:
    from vsim.sim.capacity_rows import check_row

    results = []
    for number, line in enumerate(_read(path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise UserError(f"{path}:{number}: not valid JSON") from None
        if not isinstance(row, dict):
            raise UserError(f"{path}:{number}: must be a JSON object")
        try:
            results += check_row(row)
        except UserError as error:
            raise UserError(f"{path}:{number}: {error}") from None
    wrong = [r for r in results if r.outcome == "WRONG"]
    errors = [r.error_pct for r in results if r.error_pct is not None]
    if as_json:
        rows = [
            {"row": r.row, "claim": r.claim, "outcome": r.outcome, "ours": r.ours, "reported": r.reported,
             "error_pct": r.error_pct, "note": r.note}
            for r in results
        ]  # fmt: skip
        click.echo(json.dumps(rows, indent=1))
        return
    table = [("row", "claim", "outcome", "ours", "reported", "error")]
    for r in results:
        off = "" if r.error_pct is None else f"{r.error_pct:+.1f} %"
        table.append((r.row, r.claim, r.outcome, _cut(r.ours), _cut(r.reported), off))
    widths = [max(len(row[i]) for row in table) for i in range(6)]
    for row in table:
        click.echo(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )
    exact = sum(r.outcome == "exact" for r in results)
    click.echo(f"\n{exact} claims exact, {len(wrong)} wrong", nl=False)
    if errors:
        middle = sorted(abs(e) for e in errors)[len(errors) // 2]
        click.echo(
            f"; {len(errors)} predictions from GPU and model alone: median error {middle:.1f} %"
        )
    else:
        click.echo("")


def _cut(text: str, width: int = 44) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
