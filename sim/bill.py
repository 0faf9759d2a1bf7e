"""What a run used and what that costs: GPU-hours always, money where the user gave prices."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from vsim.sim.cost import Prices, cost_of
from vsim.sim.replica_spread import per_replica
from vsim.sim.run import Run
from vsim.sim.text import number, plain, short

# What a month's cost is made of.
PARTS = ("GPUs", "storage", "network", "other")


def mean_replicas(run: Run, replicas: int) -> int | Fraction:
    """Replicas paid for, over the run's time: `replicas`, unless autoscaling changed their number."""
    paid_ns = run.counters.get("replica_ns")
    return replicas if paid_ns is None or not run.end_ns else Fraction(paid_ns, run.end_ns)


def bill(
    run: Run,
    summary: Mapping[str, Any],
    prices: Prices | None,
    gpu: str,
    gpus: int | Fraction,
    replicas: int,
) -> dict[str, Any]:
    """Keys to put beside `summary`'s: GPUs, GPU-hours, and with `prices` the cost; JSON-ready.

    `gpus`: of all `replicas` together, kept for the whole run or on the mean over it. `per_replica` is there where there are
    several. Raises UserError if the prices lack this GPU.
    """
    hours = float(gpus) * summary["duration"] / 3600
    generated = summary["total_output_tokens"]
    found: dict[str, Any] = {
        "gpu_name": gpu,
        "gpus": int(gpus) if gpus == int(gpus) else float(gpus),
        "replicas": replicas,
        "gpu_hours": hours,
        "gpu_hours_per_million_output_tokens": hours * 1e6 / generated if generated else None,
    }
    if replicas > 1:
        found["per_replica"] = per_replica(run, replicas)
    if prices is not None:
        found |= cost_of(prices, gpu, gpus, summary).as_dict()
        found["prices"] = prices.told
    return found


def bill_rows(s: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(label, value) of GPU time and, where there is one, cost."""
    rows = [
        (
            "GPUs:" if isinstance(s["gpus"], int) else "GPUs, mean:",
            f"{number(s['gpus'])} x {s['gpu_name']}",
        ),
        ("GPU-hours of the run:", short(s["gpu_hours"])),
        ("GPU-hours per million output tokens:", short(s["gpu_hours_per_million_output_tokens"])),
    ]
    if "cost_of_run" not in s:
        return rows
    currency = plain(s["currency"])
    per_token = [short(s[f"cost_per_million{kind}_tokens"]) for kind in ("_input", "_output", "")]
    rows += [
        (f"Cost of the run ({currency}):", short(s["cost_of_run"])),
        ("  per million tokens, in / out / all:", " / ".join(per_token)),
        (f"Cost of a month like it ({currency}):", number(s["cost_per_month"])),
    ]
    parts = [(name, s[f"cost_{name.lower()}_per_month"]) for name in PARTS]
    if any(amount for name, amount in parts if name != "GPUs"):
        rows += [(f"  {name}:", number(amount)) for name, amount in parts if amount]
    return rows
