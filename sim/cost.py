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
BYTES_PER_GB = 1_000_000_000  # as storage and traffic are sold
# What a price file may say beside its GPUs. Amounts are 0 where it says nothing.
AMOUNTS = (
    "storage_per_month",
    "storage_gb",
    "storage_per_gb_month",
    "network_per_month",
    "network_per_gb",
    "bytes_per_input_token",
    "bytes_per_output_token",
    "other_per_month",
)
TEXTS = ("currency", "source", "date")
# Columns and keys that `Cost.as_dict` gives, in the order in which a table shows them.
COST_KEYS = (
    "cost_per_hour",
    "cost_per_month",
    "cost_gpus_per_month",
    "cost_storage_per_month",
    "cost_network_per_month",
    "cost_other_per_month",
    "cost_of_run",
    "cost_per_million_input_tokens",
    "cost_per_million_output_tokens",
    "cost_per_million_tokens",
)


@dataclass(frozen=True, slots=True)
class Prices:
    """Price per GPU-hour by the catalogue's GPU name, and what storage, network and the rest cost.

    Amounts are exact decimal fractions as written in the file, of the whole deployment; `currency` is a
    label and never converted. A month's storage is `storage_per_month + storage_gb x storage_per_gb_month`;
    its network is `network_per_month` plus `network_per_gb` for the bytes that tokens make on the wire.
    `source` and `date`: where the prices are from, in the user's words; "" where the file does not say.
    """

    currency: str
    per_gpu_hour: Mapping[str, Fraction]
    storage_per_month: Fraction = Fraction(0)
    network_per_month: Fraction = Fraction(0)
    name: str = "prices"  # the file's, for messages
    storage_gb: Fraction = Fraction(0)
    storage_per_gb_month: Fraction = Fraction(0)
    network_per_gb: Fraction = Fraction(0)
    bytes_per_input_token: Fraction = Fraction(0)
    bytes_per_output_token: Fraction = Fraction(0)
    other_per_month: Fraction = Fraction(0)
    source: str = ""
    date: str = ""

    def of(self, gpu: str) -> Fraction:
        """Price of one hour of `gpu` (any name of the catalogue). Raises UserError if the file has none."""
        name = find_gpu(gpu).name
        if name not in self.per_gpu_hour:
            known = ", ".join(self.per_gpu_hour) or "no GPU"
            raise UserError(f"{self.name} has no price for {name} (it has {known}): add a line")
        return self.per_gpu_hour[name]

    @property
    def told(self) -> str:
        """One sentence: whose prices these are, and of when."""
        said = [self.source, f"of {self.date}" if self.date else ""]
        origin = " ".join(part for part in said if part)
        return f"Prices: {self.name}, " + (origin or "which names neither source nor date")


@dataclass(frozen=True, slots=True)
class Cost:
    """What a deployment costs, exactly. Per-token costs are None where no token was served.

    The three per-token costs are one bill over three counts (input, output, both): they don't add up.
    """

    currency: str
    gpus_per_month: Fraction
    storage_per_month: Fraction
    network_per_month: Fraction
    other_per_month: Fraction
    of_run: Fraction
    per_million_input_tokens: Fraction | None
    per_million_output_tokens: Fraction | None
    per_million_tokens: Fraction | None

    @property
    def per_month(self) -> Fraction:
        """Total cost of a month of 730 hours that go like this run."""
        fixed = self.storage_per_month + self.network_per_month + self.other_per_month
        return self.gpus_per_month + fixed

    @property
    def per_hour(self) -> Fraction:
        return self.per_month / HOURS_PER_MONTH

    def as_dict(self) -> dict[str, float | str | None]:
        """JSON-ready: `currency`, and each of `COST_KEYS` as the nearest float."""
        found: dict[str, float | str | None] = {"currency": self.currency}
        for key in COST_KEYS:
            amount = getattr(self, key.removeprefix("cost_"))
            found[key] = None if amount is None else float(amount)
        return found


def read_prices(path: str | Path) -> Prices:
    """Prices from a JSON or YAML file: `{"currency": "EUR", "a100": 1.8, "storage_per_month": 40}`.

    GPU names are those of the catalogue, in any of its spellings; a name that vsim does not know is kept
    out of the way, since a price list may cover more than vsim does. Raises UserError for a file that
    cannot be read, a missing currency, an amount that is negative or not a number, one GPU priced twice,
    or a price for traffic (or storage) whose amount nobody states.
    """
    shown = printable(Path(path).name)
    found = read_mapping(path, "price file")
    currency = found.get("currency")
    if not isinstance(currency, str) or not currency.strip():
        raise UserError(f"{shown}: currency is missing: add a label, e.g. currency: EUR")
    prices: dict[str, Fraction] = {}
    for key, value in found.items():
        if key in AMOUNTS or key in TEXTS:
            continue
        if key.split("_")[0] in {name.split("_")[0] for name in AMOUNTS}:
            raise UserError(
                f"{shown}: {printable(key)} is not known; beside GPUs a price file may hold "
                f"{', '.join((*TEXTS, *AMOUNTS))}"
            )
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
    amounts = {name: _amount(shown, name, found.get(name, 0)) for name in AMOUNTS}
    if amounts["network_per_gb"] and not (
        amounts["bytes_per_input_token"] or amounts["bytes_per_output_token"]
    ):
        raise UserError(
            f"{shown}: network_per_gb needs bytes_per_output_token (and bytes_per_input_token, if that is "
            "paid): what a token weighs on your wire, vsim cannot know"
        )
    if bool(amounts["storage_per_gb_month"]) != bool(amounts["storage_gb"]):
        raise UserError(
            f"{shown}: storage_gb and storage_per_gb_month make a price together: give both"
        )
    return Prices(
        currency=printable(currency.strip()),
        per_gpu_hour=prices,
        name=shown,
        source=_text(shown, "source", found.get("source")),
        date=_text(shown, "date", found.get("date")),
        **amounts,
    )


def cost_of(prices: Prices, gpu: str, gpus: int | Fraction, summary: Mapping[str, Any]) -> Cost:
    """Cost of the run that `summary` tells of, on `gpus` GPUs of this kind; the rented hour is paid idle or busy.

    The month is 730 hours that go like the run: GPUs, storage, network (the run's traffic per hour, times
    730, where traffic is paid by the GB) and the rest. The run costs its share of that month by its duration;
    per token = that over the tokens of its finished requests. Exact until turned into floats. Raises
    UserError if the file has no price for `gpu`.
    """
    # A summary's duration is whole nanoseconds told in seconds.
    duration_ns = round((summary["duration"] or 0) * 1e9)
    generated = int(summary["total_output_tokens"] or 0)
    read = int(summary["total_input_tokens"] or 0)
    sent_bytes = generated * prices.bytes_per_output_token + read * prices.bytes_per_input_token
    traffic = sent_bytes * prices.network_per_gb / BYTES_PER_GB  # of the run
    months = Fraction(duration_ns, NS_PER_HOUR * HOURS_PER_MONTH)
    gpus_per_month = prices.of(gpu) * gpus * HOURS_PER_MONTH
    storage = prices.storage_per_month + prices.storage_gb * prices.storage_per_gb_month
    fixed = gpus_per_month + storage + prices.network_per_month + prices.other_per_month
    of_run = fixed * months + traffic

    def per_million(tokens: int) -> Fraction | None:
        return of_run * 1_000_000 / tokens if tokens else None

    return Cost(
        currency=prices.currency,
        gpus_per_month=gpus_per_month,
        storage_per_month=storage,
        network_per_month=prices.network_per_month + (traffic / months if months else 0),
        other_per_month=prices.other_per_month,
        of_run=of_run,
        per_million_input_tokens=per_million(read),
        per_million_output_tokens=per_million(generated),
        per_million_tokens=per_million(read + generated),
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


def _text(file: str, name: str, value: Any) -> str:
    if isinstance(value, list):
        raise UserError(f"{file}: {name} must be text")
    return "" if value is None else printable(str(value).strip())[:200]
