"""The space of a sweep: which settings vary over which values, as a grid or as random points."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from vsim.errors import UserError
from vsim.models.hardware import find_gpu
from vsim.models.load import read_profile
from vsim.models.model_spec import load_model
from vsim.sim.deployment import resolve
from vsim.sim.router import named_route
from vsim.sim.user_file import read_mapping
from vsim.traces.options import printable

Value = bool | int | float | str | None
Point = dict[str, Value]

# Engine settings of `resolve` that are no flags of `vsim replay`.
_NO_FLAGS = {"speculative_config", "available_kv_cache_bytes", "what_if", "return"}
# What else can vary, with its type.
_LOAD: dict[str, type] = {
    "replicas": int,
    "route": str,
    "request_rate": float,
    "burstiness": float,
    "max_concurrency": int,
    "time_scale": float,
    "limit": int,
    "overlong": str,
    "seed": int,
    "profile": str,
    # What vLLM has no flag for (`replay.with_preemption`).
    "swap_above_tokens": int,
    "victim_rule": str,
    "num_cpu_blocks": int,
    "pcie_gbps": float,
    "overlap_swaps": bool,
}
_SHORT = {
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "dp": "data_parallel_size",
    "q": "quantization",
}
# "Not given": whatever vLLM resolves for this GPU and model.
DEFAULT = "default"
_MAY_BE_INFINITE = ("request_rate", "burstiness")
MAX_POINTS = 100_000
_FAR = 1 << 53  # integers beyond it are no longer exact everywhere


@dataclass(frozen=True, slots=True)
class Range:
    """`low..high` (both included), drawn evenly, or evenly in the logarithm; only for random sweeps."""

    low: float
    high: float
    log: bool
    whole: bool

    def draw(self, uniform: float) -> int | float:
        """The value at `uniform` in [0, 1)."""
        low, high = self.low, self.high
        if self.whole and not self.log:
            return int(low) + int(uniform * (int(high) - int(low) + 1))
        if self.log:
            value = math.exp(math.log(low) + uniform * (math.log(high) - math.log(low)))
        else:
            value = low + uniform * (high - low)
        value = min(max(value, low), high)
        return round(value) if self.whole else value


Choices = list[Value] | Range


@functools.cache
def dimensions() -> dict[str, type]:
    """Every setting that can vary, by vLLM's flag name, with its type: model, gpu, engine flags, load."""
    found: dict[str, type] = {}
    for name, hint in get_type_hints(resolve).items():
        if name in _NO_FLAGS:
            continue
        kinds = get_args(hint) or (hint,)
        found[name] = next(kind for kind in (bool, int, float, str) if kind in kinds)
    return found | _LOAD


def setting_name(text: str) -> str:
    """`--block-size`, `block-size`, `tp` -> vLLM's name with underscores. Raises UserError if unknown."""
    name = text.strip().lstrip("-").replace("-", "_")
    name = _SHORT.get(name, name)
    if name not in dimensions():
        raise UserError(
            f"{printable(text)!r} cannot vary; known are {', '.join(sorted(dimensions()))}"
        )
    return name


def parse_vary(text: str) -> tuple[str, Choices]:
    """`block_size=16,32` or `request_rate=1..20:log` -> (name, values). Raises UserError."""
    if "=" not in text:
        raise UserError(f"--vary {printable(text)}: write NAME=VALUE,VALUE, e.g. block_size=16,32")
    head, tail = text.split("=", 1)
    name = setting_name(head)
    found = _range(name, tail)
    return name, found if found is not None else _checked(name, tail.split(","))


def read_grid(path: str | Path) -> dict[str, Choices]:
    """A YAML (or .json) mapping of setting -> value, list of values or "low..high[:log]". Raises UserError."""
    space: dict[str, Choices] = {}
    for key, value in read_mapping(path, "grid").items():
        name = setting_name(key)
        if name in space:
            raise UserError(f"grid {printable(str(path))} names {name} twice")
        found = _range(name, value) if isinstance(value, str) else None
        space[name] = (
            found
            if found is not None
            else _checked(name, value if isinstance(value, list) else [value])
        )
    return space


def _range(name: str, text: str) -> Range | None:
    if ".." not in text or dimensions()[name] not in (int, float):
        return None
    body, _, scale = text.partition(":")
    low_text, _, high_text = body.partition("..")
    low, high = check_value(name, low_text), check_value(name, high_text)
    log = scale.strip() == "log"
    if scale.strip() not in ("", "log"):
        raise UserError(f"{name}={printable(text)}: after the colon only log is known")
    if not isinstance(low, int | float) or not isinstance(high, int | float):
        raise UserError(f"{name}={printable(text)}: a range needs two numbers, e.g. 1..20")
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise UserError(f"{name}={printable(text)}: a range runs from a smaller to a larger number")
    if log and low <= 0:
        raise UserError(f"{name}={printable(text)}: a log range starts above 0")
    return Range(low, high, log, dimensions()[name] is int)


def _checked(name: str, values: Sequence[Any]) -> list[Value]:
    if not values:
        raise UserError(f"{name} has no values to try")
    found = [check_value(name, value) for value in values]
    for number, value in enumerate(found):
        if value in found[:number]:
            raise UserError(f"{name}={value} is listed twice")
    return found


def check_value(name: str, value: Any) -> Value:
    """One value of setting `name`, from YAML or as text from the command line. Raises UserError."""
    kind = dimensions()[name]
    text = value.strip() if isinstance(value, str) else None
    if value is None or text == DEFAULT:
        if name in ("model", "gpu", "replicas", "time_scale", "seed", "overlong", "route"):
            raise UserError(f"{name} has no default to fall back on: give a value")
        return None
    result: Value = None
    try:
        if kind is bool:
            words = {"true": True, "false": False, "on": True, "off": False, "1": True, "0": False}
            result = value if isinstance(value, bool) else words.get((text or "").lower())
        elif kind is int and not isinstance(value, bool):
            result = int(text, 10) if text is not None else value if type(value) is int else None
        elif kind is float and not isinstance(value, bool):
            result = (
                float(text if text is not None else value)
                if isinstance(value, str | int | float)
                else None
            )
        elif kind is str:
            result = text or None
    except (ValueError, OverflowError):
        result = None
    wrong = result is None or (
        isinstance(result, float)
        and (math.isnan(result) or (math.isinf(result) and name not in _MAY_BE_INFINITE))
    )
    if wrong or (kind is int and isinstance(result, int) and abs(result) > _FAR):
        word = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[kind]
        shown = printable(str(value))[:60]
        quote = ' (in YAML, put it in quotes: "0.19")' if kind is str and text is None else ""
        raise UserError(f"{name}={shown!r} must be {word}{quote}")
    _known(name, result)
    return result


def _known(name: str, value: Value) -> None:
    """A misspelt name is the user's slip, not a point that vLLM refuses. Raises UserError."""
    if name == "gpu":
        find_gpu(str(value))
    elif name == "model":
        load_model(str(value))
    elif name == "route":
        named_route(str(value))
    elif name == "profile":
        read_profile(str(value))
    elif name == "overlong" and value not in ("reject", "clip", "error"):
        raise UserError(f"overlong={printable(str(value))!r} must be reject, clip or error")
    elif name == "replicas" and isinstance(value, int) and not 1 <= value <= 4096:
        raise UserError(f"replicas={value} must be between 1 and 4096")


def points_of(
    fixed: Mapping[str, Value],
    space: Mapping[str, Choices],
    count: int | None = None,
    seed: int = 0,
) -> list[Point]:
    """The points to simulate: the whole grid, or `count` random ones that differ from each other.

    Names of `space` vary slowest first, in the order given; every point also holds `fixed`. A random sweep
    of more points begins with those of a smaller one with the same seed. Raises UserError for a setting
    both fixed and varied, a range without `count`, no points or too many.
    """
    for name in space:
        if fixed.get(name) is not None:
            raise UserError(f"{name} is both fixed (={fixed[name]}) and varied: give it once")
    if count is not None and not 1 <= count <= MAX_POINTS:
        raise UserError(f"random={count} must be between 1 and {MAX_POINTS}")
    finite = {name: choices for name, choices in space.items() if not isinstance(choices, Range)}
    total = math.prod(len(choices) for choices in finite.values())
    whole = len(finite) == len(space)
    if count is None and not whole:
        name = next(name for name in space if name not in finite)
        raise UserError(f"{name} is a range: it needs --random N (how many points to draw)")
    if count is None or (whole and count >= total):
        if total > MAX_POINTS:
            raise UserError(f"the grid has {total} points, more than {MAX_POINTS}: use --random N")
        return [
            {**fixed, **dict(zip(finite, values, strict=True))}
            for values in itertools.product(*finite.values())
        ]
    # Only random() itself promises the same numbers in every Python release.
    draw = random.Random(seed)
    drawn: dict[tuple[Value, ...], None] = {}
    for _ in range(count * 100):
        drawn[tuple(_pick(choices, draw.random()) for choices in space.values())] = None
        if len(drawn) == count:
            break
    else:
        raise UserError(
            f"random={count}: only {len(drawn)} different points were found in this space; ask for fewer"
        )
    return [{**fixed, **dict(zip(space, values, strict=True))} for values in drawn]


def _pick(choices: Choices, uniform: float) -> Value:
    if isinstance(choices, Range):
        return choices.draw(uniform)
    return choices[int(uniform * len(choices))]
