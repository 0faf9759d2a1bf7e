"""A plan in words and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from vsim import __version__
from vsim.sim.bill import PARTS
from vsim.sim.cost import HOURS_PER_MONTH, Cost, Prices
from vsim.sim.plan.candidates import Candidate, Plan, Space
from vsim.sim.plan.evaluate import Evaluation, Question, as_simulated, serve_line
from vsim.sim.plan.money import beside_gpus, bill_of
from vsim.sim.text import number, plain, short
from vsim.traces.trace import Trace

SCHEMA = "vsim/plan/1"
RUNNERS_UP = 5
V0_RELEASE = "0.8.5"  # what --engine v0 stands for


def render(
    plan: Plan,
    trace: Trace,
    space: Space,
    question: Question,
    prices: Prices | None,
    varied: Sequence[str],
) -> str:
    """The answer first, then what surrounds it, what was skipped, and what all of it assumes."""
    lines: list[str] = []
    if plan.best is None:
        lines += _nothing(plan, space, question, varied)
    else:
        lines += _answer(plan, space, question, prices, varied)
        lines += ["", *_frontier(plan, space, question, prices, varied)]
    lines += ["", *_others(plan, space, question, varied)]
    whole = plan.simulated + plan.afterwards
    lines += [
        "",
        f"Simulated {plan.simulated:,} requests in the search and {plan.afterwards:,} after it, "
        f"{whole / len(trace):.1f} times the trace of {len(trace):,}.",
    ]
    lines += [
        "",
        "Assumptions:",
        *(f"- {plain(said)}" for said in assumptions(plan, question, prices, space)),
    ]
    return "\n".join(lines) + "\n"


def _answer(
    plan: Plan, space: Space, question: Question, prices: Prices | None, varied: Sequence[str]
) -> list[str]:
    best = plan.best
    assert best is not None
    serving = plan.replicas - space.survive
    seen = best.seen[serving]
    spare = f" ({space.survive} may fail)" if space.survive else ""
    lines = [
        f"Plan: {_replicas(plan.replicas)}{spare} of {_settings(best, varied)}",
        *_cost(best.looked.gpus * plan.replicas, bill_of(plan, space, prices)),
        "",
        *_slo_lines(question, seen, plan.expected),
        f"  Binding: {seen.binds}.",
    ]
    fewer = best.seen.get(serving - 1)
    if fewer is not None and not fewer.met:
        slo = question.slos[fewer.ratios.index(fewer.worst)]
        value = fewer.values[fewer.ratios.index(fewer.worst)]
        lines.append(
            f"  One replica fewer: {slo.text} missed ({slo.told(value)}), {fewer.binds} binds."
        )
    if plan.headroom is not None:
        lines.append(
            f"  Headroom: met at {plan.headroom:.2f} times this traffic, missed at {plan.knee:.2f} times."
            if plan.knee is not None
            else f"  Headroom: met at {plan.headroom:.2f} times this traffic, the most that was tried."
        )
    version = best.point.get("engine_version")
    if version is None and best.point.get("engine") == "v0":
        version = V0_RELEASE
    version = f" (vLLM {plain(version)})" if version is not None else ""
    lines += ["", f"Each replica{version}:", f"  {serve_line(as_simulated(best.point))}"]
    route = best.point.get("route") or "round-robin"
    if plan.replicas > 1:
        lines.append(f"behind a router that sends by {route}.")
    return lines


def _nothing(plan: Plan, space: Space, question: Question, varied: Sequence[str]) -> list[str]:
    lines = ["Nothing in this space meets the objectives."]
    if plan.nearest is None:
        return lines
    candidate, seen = plan.nearest
    slo = question.slos[seen.ratios.index(seen.worst)]
    value = seen.values[seen.ratios.index(seen.worst)]
    return [
        *lines,
        f"Nearest miss of those simulated: {_replicas(seen.replicas + space.survive)} of "
        f"{_settings(candidate, varied)}",
        f"  {slo.text} is {slo.told(value)}"
        + (f", {seen.worst:.3g} times its limit" if math.isfinite(seen.worst) else "")
        + f"; {seen.binds} binds.",
        *([f"  {candidate.skipped}."] if candidate.skipped else []),
        "",
        *_slo_lines(question, seen),
    ]


def _slo_lines(
    question: Question, seen: Evaluation, expected: Evaluation | None = None
) -> list[str]:
    likely = expected.values if expected is not None else (None,) * len(seen.values)
    heads = f"{'at the slow end':>18}" + (f"{'expected':>14}" if expected is not None else "")
    lines = [f"  {'':<32}{heads}"]
    for slo, value, ratio, mean in zip(
        question.slos, seen.values, seen.ratios, likely, strict=True
    ):
        word = "met" if ratio <= 1 else "missed"
        last = f"{slo.told(mean):>14}" if expected is not None else ""
        lines.append(f"  {word:<8}{slo.text:<24}{slo.told(value):>18}{last}")
    return lines


def _frontier(
    plan: Plan, space: Space, question: Question, prices: Prices | None, varied: Sequence[str]
) -> list[str]:
    """What was simulated and is not beaten in both cost and tail, cheapest first."""
    lines = ["Cost against tail (nothing simulated is both cheaper and better):"]
    heads = [slo.text.split("<=")[0].split(">=")[0] for slo in question.slos]
    lines.append(
        f"  {_unit(prices):>12}  " + "".join(f"{head:>16}" for head in heads) + "  deployment"
    )
    beside = beside_gpus(bill_of(plan, space, prices))
    for cost, candidate, seen in frontier(plan, space):
        values = "".join(
            f"{slo.told(value):>16}" for slo, value in zip(question.slos, seen.values, strict=True)
        )
        mark = "" if seen.met else "  (misses)"
        size = _replicas(seen.replicas + space.survive)
        lines.append(
            f"  {number(float(cost + beside)):>12}  {values}  {size} of {_settings(candidate, varied)}{mark}"
        )
    return lines


def frontier(plan: Plan, space: Space) -> list[tuple[Any, Candidate, Evaluation]]:
    """(cost per hour, candidate, evaluation), cheapest first, each better than all before it."""
    everything = sorted(
        (
            (c.cost(n + space.survive), seen.worst, c.number, c, seen)
            for c in plan.candidates
            for n, seen in c.seen.items()
        ),
        key=lambda found: found[:3],
    )
    kept: list[tuple[Any, Candidate, Evaluation]] = []
    best = math.inf
    for cost, worst, _, candidate, seen in everything:
        if worst < best:
            best = worst
            kept.append((cost, candidate, seen))
    return kept


def _others(plan: Plan, space: Space, question: Question, varied: Sequence[str]) -> list[str]:
    lines = []
    met = (
        sorted(
            (c.cost(n + space.survive), c.seen[n].worst, c.number, c, n)
            for c in plan.candidates
            if c is not plan.best and (n := c.smallest_met()) is not None
        )
        if plan.best is not None
        else []
    )
    if met:
        lines.append("Runners-up:")
        for _, worst, _, candidate, n in met[:RUNNERS_UP]:
            lines.append(
                f"  {_replicas(n + space.survive)} of {_settings(candidate, varied)}: met at "
                f"{worst:.0%} of the limit, {candidate.seen[n].binds} binds"
            )
    missed = [
        (min(c.seen.values(), key=lambda seen: seen.worst), c)
        for c in plan.candidates
        if c.seen and c.smallest_met() is None
    ]
    if missed:
        lines.append(
            "Simulated and missed"
            + (
                ", with as many replicas as cost no more than the plan"
                if plan.best is not None
                else ""
            )
            + ":"
        )
        for seen, candidate in sorted(missed, key=lambda found: (found[0].worst, found[1].number))[
            :RUNNERS_UP
        ]:
            slo = question.slos[seen.ratios.index(seen.worst)]
            value = seen.values[seen.ratios.index(seen.worst)]
            lines.append(
                f"  {_replicas(seen.replicas + space.survive)} of {_settings(candidate, varied)}: {slo.text} is "
                f"{slo.told(value)}, {seen.binds} binds"
            )
        if len(missed) > RUNNERS_UP:
            lines.append(f"  and {len(missed) - RUNNERS_UP} more (--json has them)")
    unseen = [c for c in plan.candidates if not c.seen]
    if unseen:
        lines.append("Not simulated:")
        reasons: dict[str, list[Candidate]] = {}
        for candidate in unseen:
            reasons.setdefault(plain(candidate.skipped or "no reason"), []).append(candidate)
        for reason, those in list(reasons.items())[:10]:
            which = _settings(those[0], varied) + (
                f" and {len(those) - 1} more" if len(those) > 1 else ""
            )
            lines.append(f"  {which}: {reason}")
        if len(reasons) > 10:
            lines.append(f"  and {len(reasons) - 10} more reasons (--json has them)")
    return lines


def assumptions(plan: Plan, question: Question, prices: Prices | None, space: Space) -> list[str]:
    """What the plan rests on, in sentences."""
    who = plan.best or (plan.nearest[0] if plan.nearest else plan.candidates[0])
    sds = sorted({c.looked.sd for c in plan.candidates if not c.looked.refused})
    shares = " to ".join(dict.fromkeys(f"{sd:.1%}" for sd in (sds[0], sds[-1])))
    said = [
        (
            "limits are held against latencies at the slow end: step times "
            f"{question.pessimism:g} standard deviations slower than predicted (one is {shares} here; "
            "1.645: the end of a 90 % interval)"
        ),
        _monotone(plan)
        + "; no replica fails"
        + (f" beyond {space.survive}" if space.survive else ""),
        *_worsened(plan),
        *space.assumed,
        f"step times of the plan: {who.looked.label}",
    ]
    if prices is None:
        said.append("no --prices: cost counts GPUs, whatever their kind")
    else:
        said.append(prices.told)
        if beside_gpus(bill_of(plan, space, prices)):
            said.append(
                "storage, network and other cost the same whichever deployment is chosen, for traffic like "
                "the plan's expected run: they are in every amount and decide nothing"
            )
    if plan.best is not None:
        seen = plan.best.seen[plan.replicas - space.survive].assumptions
    else:
        seen = plan.nearest[1].assumptions if plan.nearest else ()
    return [*said, *seen]


def _monotone(plan: Plan) -> str:
    """What sizes that were not simulated are taken for."""
    if not plan.scanned:
        return "sizes that were not simulated: more replicas never make an objective worse"
    many = "1 candidate" if plan.scanned == 1 else f"{plan.scanned} candidates"
    return (
        f"more replicas made an objective worse in {many}, simulated at every size that could be cheaper; elsewhere "
        "they are taken never to"
    )


def _worsened(plan: Plan) -> list[str]:
    """Where simulations contradict what the search rests on."""
    found = ((c, c.worsened()) for c in plan.candidates)
    return [
        f"candidate {c.number + 1} ({plain(c.point['gpu'])}): {_replicas(two[0])} met every objective and "
        f"{two[1]} did not; treat it as on the edge"
        for c, two in found
        if two is not None
    ]


def plan_data(
    plan: Plan,
    trace: Trace,
    space: Space,
    question: Question,
    prices: Prices | None,
    command: Mapping[str, Any],
) -> dict[str, Any]:
    """The whole search as JSON-ready data, schema `vsim/plan/1`."""
    best = plan.best
    bill = bill_of(plan, space, prices)
    beside = beside_gpus(bill)
    return {
        "schema": SCHEMA,
        "vsim_version": __version__,
        "asked": dict(command),
        "trace": {
            "name": trace.source.name,
            "format": trace.source.format,
            "file_sha256": trace.source.sha256,
            "requests": len(trace),
        },
        "load": {
            "time_scale": question.load.time_scale,
            "request_rate": _finite(question.load.request_rate),
            "burstiness": _finite(question.load.burstiness),
            "seed": question.load.seed,
        },
        "step_time": None if best is None else best.looked.label,
        "offered_requests_per_s": plan.offered_rps if math.isfinite(plan.offered_rps) else None,
        "slos": [slo.text for slo in question.slos],
        "pessimism": question.pessimism,
        "currency": None if prices is None else prices.currency,
        "met": best is not None,
        "plan": None
        if best is None
        else {
            "candidate": best.number,
            "replicas": plan.replicas,
            "gpus": best.looked.gpus * plan.replicas,
            "cost_per_hour": float(best.cost(plan.replicas) + beside),
            "cost_per_month": float((best.cost(plan.replicas) + beside) * HOURS_PER_MONTH),
            "bill": None if bill is None else bill.as_dict(),
            "serve": serve_line(as_simulated(best.point)),
            "headroom": plan.headroom,
            "headroom_missed_at": plan.knee,
        },
        "nearest_miss": None
        if plan.nearest is None
        else {"candidate": plan.nearest[0].number, "replicas": plan.nearest[1].replicas},
        "simulated_requests": {"search": plan.simulated, "afterwards": plan.afterwards},
        "frontier": [
            {
                "candidate": c.number,
                "replicas": seen.replicas + space.survive,
                "cost_per_hour": float(cost + beside),
            }
            for cost, c, seen in frontier(plan, space)
        ],
        "candidates": [_candidate_data(c, space, beside) for c in plan.candidates],
        "assumptions": assumptions(plan, question, prices, space),
    }


def _candidate_data(candidate: Candidate, space: Space, beside: Fraction) -> dict[str, Any]:
    look = candidate.looked
    return {
        "candidate": candidate.number,
        "settings": {k: v for k, v in candidate.point.items() if v is not None},
        "gpus_per_replica": look.gpus or None,
        "first_look_requests_per_s": look.capacity_rps or None,
        "skipped": candidate.skipped,
        "simulated": [
            {
                "replicas": n,
                "cost_per_hour": float(candidate.cost(n + space.survive) + beside),
                "met": seen.met,
                "values": list(seen.values),
                "ratios": [ratio if math.isfinite(ratio) else None for ratio in seen.ratios],
                "binds": seen.binds,
                "numbers": dict(seen.numbers),
            }
            for n, seen in sorted(candidate.seen.items())
        ],
    }


def _finite(value: float | None) -> float | str | None:
    return "inf" if value == math.inf else value


def plan_json(data: Mapping[str, Any]) -> str:
    return json.dumps(data, indent=1, sort_keys=True, allow_nan=False) + "\n"


def _settings(candidate: Candidate, varied: Sequence[str]) -> str:
    point = candidate.point
    words = [plain(point["gpu"])]
    for name in varied:
        if name not in ("gpu", "model"):
            value = point.get(name)
            words.append(f"{name} {'default' if value is None else plain(value)}")
    if "model" in varied:
        words.insert(0, plain(point["model"]))
    return ", ".join(words)


def _replicas(count: int) -> str:
    return "1 replica" if count == 1 else f"{count} replicas"


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"


def _unit(prices: Prices | None) -> str:
    return "GPUs" if prices is None else f"{prices.currency}/hour"


def _cost(gpus: int, bill: Cost | None) -> list[str]:
    """The bill in words: an hour, a month and what that is made of, a million tokens."""
    if bill is None:
        return [f"  {_gpus(gpus)}, cost not known (no --prices)"]
    amounts = [bill.gpus_per_month, bill.storage_per_month, bill.network_per_month]
    parts = [
        f"{name} {number(float(amount))}"
        for name, amount in zip(PARTS, [*amounts, bill.other_per_month], strict=True)
        if amount
    ]
    per_token = " / ".join(
        short(None if amount is None else float(amount))
        for amount in (
            bill.per_million_input_tokens,
            bill.per_million_output_tokens,
            bill.per_million_tokens,
        )
    )
    return [
        f"  {_gpus(gpus)}: {number(float(bill.per_hour))} {bill.currency} an hour, "
        f"{number(float(bill.per_month))} a month of 730 hours ({', '.join(parts) or 'all free'})",
        f"  {bill.currency} per million tokens, in / out / all: {per_token}",
    ]
