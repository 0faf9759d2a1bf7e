"""What a run costs, from prices that the user wrote down. No price is built in."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

from vsim.errors import UserError
from vsim.models.hardware import find_gpu
from vsim.sim.user_file import read_mapping
from vsim.traces.options import printable

# 365 days of 24 hours, a twelfth of it: what cloud price lists call a month.
HOURS_PER_MONTH = 730
NS_PER_HOUR = 3_600_000_000_000
RESERVED = ("currency", "storage_per_month", "network_per_month")


@dataclass(frozen=True, slots=True)
class Prices:
    """Price per GPU-hour by the catalogue's GPU name, and fixed amounts per month of the whole deployment.

    Amounts are exact decimal fractions as written in the file; `currency` is a label and never converted.
    """

    currency: str
    per_gpu_hour: Mapping[str, Fraction]
    storage_per_month: Fraction = Fraction(0)
    network_per_month: Fraction = Fraction(0)
    name: str = "prices"  # the file's, for messages

    def of(self, gpu: str) -> Fraction:
        """Price of one hour of `gpu` (any name of the catalogue). Raises UserError if the file has none."""
        name = find_gpu(gpu).name
        if name not in self.per_gpu_hour:
            known = ", ".join(self.per_gpu_hour) or "no GPU"
            raise UserError(f"{self.name} has no price for {name} (it has {known}): add a line")
        return self.per_gpu_hour[name]


@dataclass(frozen=True, slots=True)
class Cost:
    """What a deployment costs, exactly. Per-token costs are None where no token was served."""

    currency: str
    per_hour: Fraction
    per_month: Fraction
    of_run: Fraction  # per_hour x duration
    per_million_output_tokens: Fraction | None
    per_million_tokens: Fraction | None  # input and output

    def as_dict(self) -> dict[str, float | str | None]:
        """JSON-ready: each amount as the nearest float, keys starting with `cost_`."""

        def plain(amount: Fraction | None) -> float | None:
            return None if amount is None else float(amount)

        return {
            "currency": self.currency,
            "cost_per_hour": plain(self.per_hour),
            "cost_per_month": plain(self.per_month),
            "cost_of_run": plain(self.of_run),
            "cost_per_million_output_tokens": plain(self.per_million_output_tokens),
            "cost_per_million_tokens": plain(self.per_million_tokens),
        }


def read_prices(path: str | Path) -> Prices:
    """Prices from a JSON or YAML file: `{"currency": "EUR", "a100": 1.8, "storage_per_month": 40}`.

    GPU names are those of the catalogue, in any of its spellings; a name that vsim does not know is kept
    out of the way, since a price list may cover more than vsim does. Raises UserError for a file that
    cannot be read, a missing currency, an amount that is negative or not a number, one GPU priced twice.
    """
    shown = printable(Path(path).name)
    found = read_mapping(path, "price file")
    currency = found.get("currency")
    if not isinstance(currency, str) or not currency.strip():
        raise UserError(f"{shown}: currency is missing: add a label, e.g. currency: EUR")
    prices: dict[str, Fraction] = {}
    for key, value in found.items():
        if key in RESERVED:
            continue
        amount = _amount(shown, key, value)
        try:
            gpu = find_gpu(key).name
        except UserError:
            continue
        if gpu in prices:
            raise UserError(f"{shown} prices {gpu} twice; keep one of its names")
        prices[gpu] = amount
    if not prices:
        raise UserError(f"{shown} prices no GPU that vsim knows (`vsim catalog` lists them)")
    return Prices(
        currency=printable(currency.strip()),
        per_gpu_hour=prices,
        storage_per_month=_amount(shown, RESERVED[1], found.get(RESERVED[1], 0)),
        network_per_month=_amount(shown, RESERVED[2], found.get(RESERVED[2], 0)),
        name=shown,
    )


def cost_of(prices: Prices, gpu: str, gpus: int, summary: Mapping[str, Any]) -> Cost:
    """Cost of the run that `summary` tells of, on `gpus` GPUs of this kind; the rented hour is paid idle or busy.

    per hour = price x GPUs + (storage + network) / 730; per month = 730 hours; per token = what the run's
    duration costs over the tokens of its finished requests. Exact until turned into floats. Raises
    UserError if the file has no price for `gpu`.
    """
    fixed = prices.storage_per_month + prices.network_per_month
    per_hour = prices.of(gpu) * gpus + fixed / HOURS_PER_MONTH
    # A summary's duration is whole nanoseconds told in seconds.
    duration_ns = round((summary["duration"] or 0) * 1e9)
    of_run = per_hour * duration_ns / NS_PER_HOUR
    output = int(summary["total_output_tokens"] or 0)
    both = output + int(summary["total_input_tokens"] or 0)

    def per_million(tokens: int) -> Fraction | None:
        return of_run * 1_000_000 / tokens if tokens else None

    return Cost(
        currency=prices.currency,
        per_hour=per_hour,
        per_month=per_hour * HOURS_PER_MONTH,
        of_run=of_run,
        per_million_output_tokens=per_million(output),
        per_million_tokens=per_million(both),
    )


def _amount(file: str, name: str, value: Any) -> Fraction:
    name = printable(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserError(f"{file}: {name} must be a number, not {printable(repr(value))[:60]}")
    if not (math.isfinite(value) if isinstance(value, float) else abs(value) < 10**15):
        raise UserError(f"{file}: {name} must be finite")
    if value < 0:
        raise UserError(f"{file}: {name}={value} must not be negative")
    # repr of a float is the shortest decimal that reads back: 1.8 is eighteen tenths, as written.
    return Fraction(Decimal(repr(value)))
