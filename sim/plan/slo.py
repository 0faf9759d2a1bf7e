"""Service-level objectives in words: `ttft_p95<=2s`, `output_throughput>=1000`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vsim.errors import UserError
from vsim.sim.text import number
from vsim.traces.options import printable

LATENCIES = {"ttft": "ttft", "tpot": "tpot", "itl": "itl", "e2e": "e2el", "e2el": "e2el"}
RATES = ("request_throughput", "output_throughput", "total_token_throughput")
UNITS_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3, "min": 6e4}
EXAMPLE = "write e.g. ttft_p95<=2s, tpot_p95<=100ms or output_throughput>=1000"
_SLO = re.compile(r"\s*([a-z0-9_.]+)\s*(<=|>=)\s*([0-9.eE+-]+)\s*([a-z%]*)\s*")


@dataclass(frozen=True, slots=True)
class Slo:
    """One number of a summary and its limit: `key` as in summary.json, in its unit there."""

    text: str  # as the user wrote it, without spaces
    key: str
    most: bool  # the number may be at most `limit`; else at least
    limit: float
    latency: str | None = None  # "ttft", "tpot", "itl" or "e2el", for limits in ms
    percentile: float | None = None

    def value(self, summary: Mapping[str, Any]) -> float | None:
        """The number in `summary`; None where nothing was measured."""
        found = summary.get(self.key)
        return None if found is None else float(found)

    def ratio(self, summary: Mapping[str, Any]) -> float:
        """1 at the limit, more beyond it; infinite where nothing was measured."""
        value = self.value(summary)
        if value is None:
            return math.inf
        if self.most:
            return value / self.limit if self.limit > 0 else (0.0 if value <= 0 else math.inf)
        return self.limit / value if value > 0 else math.inf

    def told(self, value: float | None) -> str:
        """`value` in words, with its unit."""
        if value is None:
            return "–"
        if self.latency is not None:
            return f"{number(value / 1e3)} s" if value >= 10_000 else f"{number(value)} ms"
        if self.key in {"goodput_fraction", "error_rate"}:
            return f"{value * 100:.2f} %"
        return f"{number(value)} /s"


def parse_slo(text: str) -> Slo:
    """`ttft_p95<=2s` and its kind. Latencies need a unit. Raises UserError."""
    shown = printable(text)[:60]
    found = _SLO.fullmatch(text)
    if found is None:
        raise UserError(f"--slo {shown!r} is not understood: {EXAMPLE}")
    name, sign, digits, unit = found.groups()
    try:
        limit = float(digits)
    except ValueError:
        raise UserError(f"--slo {shown!r}: {digits} is not a number: {EXAMPLE}") from None
    if not (math.isfinite(limit) and limit >= 0):
        raise UserError(f"--slo {shown!r}: the limit must be finite and not negative")
    said = f"{name}{sign}{digits}{unit}"
    head, _, statistic = name.rpartition("_")
    if head in LATENCIES:
        return _latency(said, LATENCIES[head], statistic, sign, limit, unit)
    if name == "error_rate":
        if sign != "<=":
            raise UserError(f"--slo {shown!r}: an error rate is bounded from above: {name}<=1%")
        return Slo(said, name, True, _share(shown, limit, unit))
    name = "output_throughput" if name == "throughput" else name
    if name in RATES:
        if sign != ">=" or unit:
            raise UserError(f"--slo {shown!r}: write {name}>=NUMBER, per second and without a unit")
        return Slo(said, name, False, limit)
    known = ", ".join(
        [*(f"{latency}_STATISTIC" for latency in LATENCIES), "error_rate", "throughput", *RATES]
    )
    raise UserError(f"--slo {shown!r}: {name} is not known; known are {known}: {EXAMPLE}")


def _latency(said: str, latency: str, statistic: str, sign: str, limit: float, unit: str) -> Slo:
    if sign != "<=":
        raise UserError(f"--slo {said}: a latency is bounded from above: use <=")
    if unit not in UNITS_MS:
        raise UserError(
            f"--slo {said}: a latency needs a unit ({', '.join(UNITS_MS)}), e.g. {said.rstrip('%')}ms"
        )
    ms = limit * UNITS_MS[unit]
    if statistic in ("mean", "median"):
        return Slo(said, f"{statistic}_{latency}_ms", True, ms, latency)
    try:
        percentile = float(statistic.removeprefix("p"))
    except ValueError:
        percentile = 0.0
    if not (statistic.startswith("p") and 0 < percentile <= 100):
        raise UserError(f"--slo {said}: {statistic} must be mean, median or a percentile like p95")
    from vsim.sim.metrics import percentile_word

    key = f"p{percentile_word(percentile)}_{latency}_ms"
    return Slo(said, key, True, ms, latency, percentile)


def _share(shown: str, limit: float, unit: str) -> float:
    share = limit / 100 if unit == "%" else limit
    if unit not in ("", "%") or not 0 <= share <= 1:
        raise UserError(f"--slo {shown!r}: write a share from 0 to 1 or a percentage, e.g. 1%")
    return share


def goodput_slo(share: float, slos: Sequence[Slo]) -> tuple[Slo, dict[str, float]]:
    """`--goodput 0.99`: the share of requests that keep every latency limit; and those limits in ms.

    Raises UserError for a share that is none, or without a limit on TTFT, TPOT or E2EL.
    """
    if not 0 < share <= 1:
        raise UserError(f"--goodput {share}: the share of good requests lies above 0 and up to 1")
    limits: dict[str, float] = {}
    for slo in slos:
        if slo.latency in ("ttft", "tpot", "e2el"):
            limits[slo.latency] = min(slo.limit, limits.get(slo.latency, math.inf))
    if not limits:
        raise UserError("--goodput needs a --slo on ttft, tpot or e2el: which requests are good?")
    return Slo(f"goodput>={share:g}", "goodput_fraction", False, share), limits


def check_slos(slos: Sequence[Slo]) -> None:
    """Raises UserError where nothing is asked, or one number twice."""
    if not slos:
        raise UserError(f"no --slo given: {EXAMPLE}")
    for number_, slo in enumerate(slos):
        for other in slos[:number_]:
            if slo.key == other.key:
                raise UserError(
                    f"--slo {other.text} and {slo.text} bound the same number: keep one"
                )
