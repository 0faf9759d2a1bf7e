"""Token lengths: written as text such as `lognormal:400:1.1`, drawn from a seeded generator."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vsim.errors import UserError
from vsim.traces.draft import MAX_TOKENS
from vsim.traces.trace import Int64Array

Rng = np.random.Generator
Draw = Callable[[Rng, int], Int64Array]

HELP = "N, uniform:LOW:HIGH, lognormal:MEDIAN:SIGMA[:MAX], mix:SHARE=SPEC,SHARE=SPEC,… or the name of a mix"

# Mixes people quote. chat: many short questions; long-context: 37 % of prompts above 8k tokens.
NAMED = {
    "chat": "mix:0.4=uniform:8:63,0.4=uniform:64:512,0.2=uniform:513:2048",
    "long-context": "mix:0.63=uniform:64:8192,0.37=uniform:8193:32768",
}


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of token counts, at least 1 each, with the text it was written as."""

    text: str
    draw: Draw


def parse(text: str) -> Lengths:
    """A distribution from its text. Raises UserError saying what can be written."""
    return Lengths(text, _parse(text.strip(), text))


def _parse(spec: str, whole: str) -> Draw:
    spec = NAMED.get(spec, spec)
    kind, _, rest = spec.partition(":")
    if not rest:
        value = _whole(kind, whole)
        return lambda rng, size: np.full(size, value, dtype=np.int64)
    if kind == "uniform":
        low, high = (_whole(part, whole) for part in _parts(rest, (2,), whole))
        if low > high:
            raise UserError(f"lengths {whole!r}: {low} is above {high}")
        return lambda rng, size: rng.integers(low, high, size, endpoint=True)
    if kind == "lognormal":
        parts = _parts(rest, (2, 3), whole)
        median, sigma = _number(parts[0], whole), _number(parts[1], whole)
        top = _whole(parts[2], whole) if len(parts) == 3 else MAX_TOKENS
        if median <= 0 or sigma < 0 or sigma > 10:
            raise UserError(f"lengths {whole!r}: the median must be positive, sigma from 0 to 10")
        return lambda rng, size: _rounded(rng.lognormal(math.log(median), sigma, size), top)
    if kind == "mix":
        return _mix(rest, whole)
    raise UserError(f"lengths {whole!r} can't be read; write {HELP} ({', '.join(NAMED)})")


def _mix(rest: str, whole: str) -> Draw:
    shares, parts = [], []
    for item in rest.split(","):
        share, equals, spec = item.partition("=")
        if not equals:
            raise UserError(f"lengths {whole!r}: a mix is SHARE=SPEC,SHARE=SPEC,…")
        shares.append(_number(share, whole))
        parts.append(_parse(spec, whole))
    total = sum(shares)
    if not total > 0:
        raise UserError(f"lengths {whole!r}: the shares must add up to more than 0")
    weights = np.asarray(shares) / total

    def draw(rng: Rng, size: int) -> Int64Array:
        which = rng.choice(len(parts), size, p=weights)
        out = np.empty(size, dtype=np.int64)
        for at, part in enumerate(parts):
            mine = which == at
            out[mine] = part(rng, int(mine.sum()))
        return out

    return draw


def _parts(rest: str, allowed: tuple[int, ...], whole: str) -> list[str]:
    parts = rest.split(":")
    if len(parts) not in allowed:
        raise UserError(f"lengths {whole!r} can't be read; write {HELP}")
    return parts


def _number(text: str, whole: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise UserError(f"lengths {whole!r}: {text!r} is not a number; write {HELP}")
    return value


def _whole(text: str, whole: str) -> int:
    if (
        not (text.isascii() and text.isdigit() and len(text) < 11)
        or not 1 <= int(text) <= MAX_TOKENS
    ):
        raise UserError(f"lengths {whole!r}: {text!r} is not a number of tokens; write {HELP}")
    return int(text)


def _rounded(values: npt.NDArray[np.float64], top: int) -> Int64Array:
    return np.clip(np.round(values), 1, top).astype(np.int64)
