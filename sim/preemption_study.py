"""Preemption rules, block sizes and victim rules on one trace, side by side (V0 engine, vLLM 0.8.5)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vsim.errors import UserError
from vsim.models.step import StepModel, StepShape
from vsim.sim.config import SchedulerConfig
from vsim.sim.deployment import Deployment
from vsim.sim.replay import Load, replay
from vsim.sim.run import Run
from vsim.sim.summary import summarize
from vsim.sim.traps_v0 import warnings_for
from vsim.traces.trace import Trace

LINK_SENTENCE = (
    "swap time is bytes over the host link's bandwidth, nothing overlapping; 0.8.5 copies each block of each"
    " layer by itself, which reaches less with small blocks: give the bandwidth you measure as --pcie-gbps"
)

# Sizes for which the break-even of SWAP and RECOMPUTE is stated, in tokens.
LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True, slots=True)
class Variant:
    """One row of the table. `policy`: "recompute", "swap" or "swap>N" (swap above N tokens)."""

    block_size: int
    policy: str
    victim_rule: str = "last_in_queue"

    def apply(self, config: SchedulerConfig) -> SchedulerConfig:
        """`config` under this variant's rules. Raises UserError for a policy that does not exist."""
        changes: dict[str, Any] = {"victim_rule": self.victim_rule, "swap_above_tokens": None}
        if self.policy in ("recompute", "swap"):
            changes["preemption_mode"] = self.policy
        else:
            word, _, tokens = self.policy.partition(">")
            if word != "swap" or not tokens.isdecimal():
                raise UserError(
                    f"policy {self.policy!r} must be recompute, swap or swap>TOKENS (for example swap>1024)"
                )
            changes.update(preemption_mode=None, swap_above_tokens=int(tokens))
        return dataclasses.replace(config, **changes)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a variant came to. `recompute_s`, `swap_s`: device time spent on being preempted.

    `recompute_s` prices each request's recomputed tokens as prefills of their mean length, alone on the
    device; beside other work in the same step they cost less. `swap_s` is blocks over link bandwidth.
    """

    variant: Variant
    run: Run
    summary: dict[str, Any]
    recompute_s: float
    swapped_blocks: int
    swapped_bytes: int
    swap_s: float
    warnings: tuple[str, ...]


def study(
    trace: Trace,
    deploy: Callable[[int], Deployment],
    step_model: Callable[[Deployment], Any],
    variants: Sequence[Variant],
    load: Load,
    *,
    num_cpu_blocks: int | None = None,
    pcie_gbps: float | None = None,
    on_step: Callable[[int, int], None] | None = None,
) -> Iterator[Outcome]:
    """Replay `trace` once per variant. `deploy(block_size)` gives the V0 deployment to vary.

    `num_cpu_blocks`, `pcie_gbps` replace what swap space and GPU catalogue say. Raises UserError where a
    variant swaps and the link has no bandwidth.
    """
    for variant in variants:
        deployment = deploy(variant.block_size)
        config = variant.apply(deployment.scheduler)
        if num_cpu_blocks is not None:
            config = dataclasses.replace(config, num_cpu_blocks=num_cpu_blocks)
        gpu = deployment.gpu
        if pcie_gbps is not None:
            gpu = dataclasses.replace(gpu, pcie_gb_s=pcie_gbps)
        if variant.policy != "recompute" and not gpu.pcie_gb_s:
            raise UserError(
                f"pcie_gbps=0: over a link of no bandwidth no swap ever ends, and policy {variant.policy} swaps; "
                "give a positive --pcie-gbps, or compare recompute alone"
                if gpu.pcie_gb_s == 0
                else f"policy {variant.policy} needs a host link, and {gpu.name} has none on record: "
                "give --pcie-gbps, or compare recompute alone"
            )
        if not gpu.pcie_gb_s:
            gpu = dataclasses.replace(gpu, pcie_gb_s=None)
        deployment = dataclasses.replace(deployment, scheduler=config, gpu=gpu)
        model = step_model(deployment)
        run = replay(trace, deployment, model, load, on_step)
        blocks = run.counters.get("swapped_out_blocks", 0) + run.counters.get(
            "swapped_in_blocks", 0
        )
        moved = blocks * deployment.capacity.bytes_per_block
        yield Outcome(
            variant,
            run,
            summarize(run, (50, 95, 99)),
            recompute_seconds(run, model),
            blocks,
            moved,
            moved / (gpu.pcie_gb_s * 1e9) if moved and gpu.pcie_gb_s else 0.0,
            (*warnings_for(config), *([LINK_SENTENCE] if blocks else [])),
        )


def recompute_seconds(run: Run, step_model: StepModel) -> float:
    """Device seconds of the run's recomputed tokens (see `Outcome`)."""
    tokens = run.requests["recomputed_tokens"]
    times = run.requests["preemptions"]
    seconds = 0.0
    for row in np.flatnonzero(tokens > 0):
        count = max(1, int(times[row]))
        mean = max(1, round(int(tokens[row]) / count))
        seconds += count * prefill_seconds(step_model, mean)
    return seconds


def prefill_seconds(step_model: StepModel, tokens: int) -> float:
    """Device seconds of one prefill of `tokens` tokens on its own."""
    shape = StepShape(((tokens, 0),), 0, 0, 0) if tokens > 1 else StepShape((), 1, 0, 0)
    return step_model.device_seconds(shape)


@dataclass(frozen=True, slots=True)
class BreakEven:
    """What preempting a request of `tokens` tokens costs either way, and the bandwidth where they meet."""

    tokens: int
    recompute_s: float
    swap_s: float | None  # out and in; None without a link
    link_gb_s: float  # above it, swapping is cheaper


def break_even(
    step_model: StepModel,
    block_size: int,
    bytes_per_block: int,
    link_gb_s: float | None,
    longest: int,
) -> list[BreakEven]:
    """The two prices by length, up to `longest` tokens. Device time alone: what waits meanwhile is in the runs."""
    rows = []
    for tokens in (length for length in LENGTHS if length <= longest):
        moved = 2 * math.ceil(tokens / block_size) * bytes_per_block
        seconds = prefill_seconds(step_model, tokens)
        rows.append(
            BreakEven(
                tokens,
                seconds,
                moved / (link_gb_s * 1e9) if link_gb_s else None,
                moved / seconds / 1e9,
            )
        )
    return rows
