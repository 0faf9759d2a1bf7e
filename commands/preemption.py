"""`vsim preemption`: SWAP or RECOMPUTE, which block size, which victim; on the user's own trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vsim.commands.options import engine_options
from vsim.commands.replay import Progress, _needed
from vsim.commands.trace_options import read_options
from vsim.errors import UserError

if TYPE_CHECKING:
    from vsim.sim.preemption_study import BreakEven, Outcome


def _sizes(_: Any, __: Any, text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise click.BadParameter(f"{text!r} is not a list of block sizes such as 8,16,32")
    return tuple(int(part) for part in parts)


def _words(_: Any, __: Any, text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


@click.command(short_help="SWAP or RECOMPUTE, block sizes and victims on your trace (V0).")
@click.argument("trace", type=click.Path(path_type=Path))
@engine_options
@read_options
@click.option("--profile", help="Calibration artifact, by path or bundled name.")
@click.option(
    "--block-sizes", default="16", show_default=True, callback=_sizes, help="e.g. 8,16,32,64,128"
)
@click.option(
    "--policies",
    default="recompute,swap,swap>1024",
    show_default=True,
    callback=_words,
    help="recompute, swap, swap>N (swap victims above N tokens, recompute the others).",
)
@click.option(
    "--victims",
    default="last_in_queue",
    show_default=True,
    callback=_words,
    help="last_in_queue (vLLM's), most_blocks, fewest_computed, least_preempted.",
)
@click.option("--pcie-gbps", type=float, help="GB/s of the host link instead of the catalogue's.")
@click.option("--num-cpu-blocks", type=int, help="CPU blocks instead of --swap-space's.")
@click.option("--limit", type=int, help="Only the first so many requests.")
@click.option("--time-scale", type=float, default=1.0, help="Times between arrivals times this.")
@click.option("--request-rate", type=float, help="Requests/s instead of the trace's own times.")
@click.option("--max-concurrency", type=int, help="Closed loop: at most so many in flight.")
@click.option(
    "--overlong",
    type=click.Choice(["reject", "clip", "error"]),
    default="reject",
    show_default=True,
    help="Requests longer than max_model_len.",
)
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Of --request-rate's arrivals."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the tables.")
def preemption(
    trace: Path,
    engine_flags: dict[str, Any],
    reading: dict[str, Any],
    profile: str | None,
    block_sizes: tuple[int, ...],
    policies: tuple[str, ...],
    victims: tuple[str, ...],
    pcie_gbps: float | None,
    num_cpu_blocks: int | None,
    limit: int | None,
    time_scale: float,
    request_rate: float | None,
    max_concurrency: int | None,
    overlong: str,
    seed: int,
    as_json: bool,
) -> None:
    """Compare preemption policies, block sizes and victim rules on TRACE, on vLLM 0.8.5's V0 engine.

    One row per combination: tails, what recomputing or swapping cost, fragmentation, what was refused; then
    the length and the link bandwidth at which swapping becomes cheaper than recomputing.
    """
    from vsim.sim.deployment import Deployment, resolve
    from vsim.sim.preemption import VICTIM_RULES
    from vsim.sim.preemption_study import Variant, break_even, study
    from vsim.sim.replay import Load, step_model_for
    from vsim.traces.readers import read_trace

    if engine_flags["engine"] == "v1":
        raise UserError("--engine v1 always recomputes: this comparison is about the V0 engine")
    for name in ("block_size", "preemption_mode"):
        if engine_flags[name] is not None:
            flag = {"block_size": "--block-sizes", "preemption_mode": "--policies"}[name]
            raise UserError(f"--{name.replace('_', '-')}: say it as {flag} here")
    if engine_flags["num_gpu_blocks_override"] is not None and len(block_sizes) > 1:
        raise UserError(
            "--num-gpu-blocks-override counts blocks of one size: with several --block-sizes set the cache"
            " with --kv-cache-memory-bytes or --gpu-memory-utilization"
        )
    for victim in victims:
        if victim not in VICTIM_RULES:
            raise UserError(f"victim rule {victim!r} must be one of {', '.join(VICTIM_RULES)}")
    for flag, value in (("--pcie-gbps", pcie_gbps), ("--num-cpu-blocks", num_cpu_blocks)):
        if value is not None and not 0 <= value < 1e9:
            raise UserError(f"{flag}={value} must not be negative")
    model, gpu = _needed(engine_flags, profile)
    flags = {name: value for name, value in engine_flags.items() if name not in ("model", "gpu")}
    flags["engine"] = "v0"

    def deploy(block_size: int) -> Deployment:
        # Block sizes that 0.8.5's kernels lack are compared all the same.
        return resolve(model, gpu, **{**flags, "block_size": block_size}, what_if=True)

    variants = [Variant(b, p, v) for b in block_sizes for p in policies for v in victims]
    requests = read_trace(trace, limit=limit, **reading)
    load = Load(
        limit=limit,
        time_scale=time_scale,
        request_rate=request_rate,
        max_concurrency=max_concurrency,
        seed=seed,
        overlong=overlong,  # type: ignore[arg-type]
    )
    progress = Progress(len(requests) * len(variants))
    outcomes: list[Outcome] = []
    try:
        for outcome in study(
            requests,
            deploy,
            lambda deployment: step_model_for(deployment, profile),
            variants,
            load,
            num_cpu_blocks=num_cpu_blocks,
            pcie_gbps=pcie_gbps,
            on_step=lambda now, ended: progress(now, len(outcomes) * len(requests) + ended),
        ):
            outcomes.append(outcome)
    finally:
        progress.done()
    base = deploy(block_sizes[0])
    link = base.gpu.pcie_gb_s if pcie_gbps is None else pcie_gbps
    prices = break_even(
        step_model_for(base, profile),
        block_sizes[0],
        base.capacity.bytes_per_block,
        link,
        base.scheduler.max_model_len,
    )
    if as_json:
        click.echo(json.dumps(_as_json(outcomes, prices, link), indent=1, allow_nan=False))
        return
    click.echo(
        f"{base.model.name} on {base.gpus_per_replica} x {base.gpu.name}, vLLM 0.8.5 (V0):"
        f" {len(requests):,} requests of {requests.source.name}"
    )
    click.echo(_table(outcomes))
    click.echo(_prices(prices, link))
    for sentence in dict.fromkeys(
        word for outcome in outcomes for word in (*outcome.warnings, *outcome.run.assumptions)
    ):
        click.echo(f"- {sentence}")


Cell = str | int | float | None

_TAILS = ("TTFT p50 s", "p95", "p99", "TPOT p95 ms", "E2E p95 s", "p99", "tok/s")
_COSTS = (
    "preempted",
    "recomputed tokens",
    "s",
    "moved GB",
    "s",
    "waste %",
    "peak %",
    "KV peak %",
    "refused",
)


def _tails(outcome: Outcome) -> list[Cell]:
    s = outcome.summary
    keys = (
        "p50_ttft_ms",
        "p95_ttft_ms",
        "p99_ttft_ms",
        "p95_tpot_ms",
        "p95_e2el_ms",
        "p99_e2el_ms",
    )
    units = (1e3, 1e3, 1e3, 1.0, 1e3, 1e3)
    cells: list[Cell] = [
        None if s[key] is None else s[key] / unit for key, unit in zip(keys, units, strict=True)
    ]
    return [*cells, s["output_throughput"]]


def _costs(outcome: Outcome) -> list[Cell]:
    s = outcome.summary

    def share(key: str) -> float | None:
        return None if s[key] is None else 100 * s[key]

    return [
        s["preemptions"],
        s["recomputed_tokens"],
        outcome.recompute_s,
        outcome.swapped_bytes / 1e9,
        outcome.swap_s,
        share("kv_fragmentation_mean"),
        share("kv_fragmentation_peak"),
        share("kv_usage_peak"),
        s["status_counts"]["rejected"],
    ]


def _as_json(
    outcomes: list[Outcome], prices: list[BreakEven], link: float | None
) -> dict[str, Any]:
    import dataclasses

    return {
        "schema": "vsim/preemption/1",
        "link_gb_s": link,
        "rows": [
            {
                **dataclasses.asdict(outcome.variant),
                "recompute_s": outcome.recompute_s,
                "swapped_blocks": outcome.swapped_blocks,
                "swapped_bytes": outcome.swapped_bytes,
                "swap_s": outcome.swap_s,
                "warnings": list(outcome.warnings),
                "summary": outcome.summary,
            }
            for outcome in outcomes
        ],
        "break_even": [dataclasses.asdict(price) for price in prices],
    }


def _table(outcomes: list[Outcome]) -> str:
    """Tails, then costs, one line per variant each; last, why a run ended early."""
    several_victims = len({outcome.variant.victim_rule for outcome in outcomes}) > 1

    def name(outcome: Outcome) -> list[Cell]:
        variant = outcome.variant
        rule = [variant.victim_rule] if several_victims else []
        return [variant.block_size, variant.policy, *rule]

    named = ["block", "policy", *(["victim"] if several_victims else [])]
    parts = [
        _lines([*named, *_TAILS], [[*name(o), *_tails(o)] for o in outcomes], len(named)),
        "",
        _lines([*named, *_COSTS], [[*name(o), *_costs(o)] for o in outcomes], len(named)),
    ]
    for outcome in outcomes:
        if outcome.run.ended_early:
            words = " ".join(str(word) for word in name(outcome))
            parts.append(
                f"{words}: {outcome.summary['completed']:,} requests done, then it ended:"
                f" {outcome.run.ended_early}"
            )
    return "\n".join(parts) + "\n"


def _lines(head: list[str], rows: list[list[Cell]], names: int) -> str:
    def text(cell: Cell) -> str:
        if cell is None:
            return "-"
        if isinstance(cell, float):
            return f"{cell:,.1f}" if abs(cell) >= 100 else f"{cell:,.2f}"
        return f"{cell:,}" if isinstance(cell, int) else cell

    table = [head, *([text(cell) for cell in row] for row in rows)]
    widths = [max(len(row[k]) for row in table) for k in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if 0 < k < names else cell.rjust(width)
            for k, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    )


def _prices(prices: list[BreakEven], link: float | None) -> str:
    cheaper = [p.tokens for p in prices if p.swap_s is not None and p.swap_s < p.recompute_s]
    lines = ["tokens  recompute ms  swap out+in ms  even at GB/s"]
    for p in prices:
        swap = "-" if p.swap_s is None else f"{1e3 * p.swap_s:,.2f}"
        lines.append(
            f"{p.tokens:>6}  {1e3 * p.recompute_s:>12,.2f}  {swap:>14}  {p.link_gb_s:>12,.1f}"
        )
    if link:
        lines.append(
            f"At {link:g} GB/s swapping costs less device time than recomputing"
            + (f" from {cheaper[0]} tokens on." if cheaper else " at none of these lengths.")
        )
    return "\n".join(lines) + "\n"
