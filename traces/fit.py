"""Learn a recipe from a real trace, and make traces from it: the numbers travel, the requests stay home."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vsim.errors import UserError
from vsim.traces.arrivals import select
from vsim.traces.draft import MAX_TOKENS
from vsim.traces.fit_sessions import check_sessions, expand, fit_sessions, openings
from vsim.traces.fit_sharing import draw_sharing, fit_sharing
from vsim.traces.trace import Int64Array, Trace, TraceSource

SCHEMA = "vsim/trace-recipe/1"
WINDOWS = 4096  # of the rate profile, at most
REQUESTS_PER_WINDOW = 4  # at least, on average
STRATA = 20  # of prompt length, each with its own output lengths
POINTS = 501
MAX_CELLS = 1 << 24
MAX_REQUESTS = 100_000_000
MAX_IDS = 200_000_000

Floats = npt.NDArray[np.float64]


def fit(trace: Trace) -> dict[str, Any]:
    """A JSON-ready recipe: rate profile, splitting of bursts at finer scales, joint lengths, tenant shares.

    Arrivals: counts in up to 4,096 windows, and for each halving of a window how unevenly its requests fall
    on the halves (a beta-binomial cascade, fitted by moments), down to a sixteenth of the mean gap.
    Lengths: quantiles of the prompt, and of the output within 20 strata of the prompt.
    Names, ids and the file's name are not in it. Raises UserError for fewer than 10 requests or no span.
    """
    whole = trace
    if trace.sessions is not None:
        # Later turns come when they come; what is drawn is when conversations open, and how they begin.
        trace = select(trace, openings(trace), "")
    n, span = len(trace), trace.span_s
    if n < 10 or span <= 0:
        kind = "requests" if whole.sessions is None else "conversations"
        raise UserError(
            f"{trace.source.name}: fitting needs at least 10 {kind} at different times, not {n} over {span:g} s"
        )
    recipe: dict[str, Any] = {
        "schema": SCHEMA,
        "requests": n,
        "span_s": span,
        "arrivals": _fit_arrivals(trace.arrival_ns, span),
        "lengths": _fit_lengths(trace.prompt_tokens, trace.output_tokens),
    }
    if trace.tenant is not None and len(trace.tenant_names) > 1:
        shares = np.sort(np.bincount(trace.tenant, minlength=len(trace.tenant_names)) / n)[::-1]
        recipe["tenant_shares"] = shares.tolist()
    shared = fit_sharing(trace)
    if shared is not None:
        recipe["sharing"] = shared
    if whole.sessions is not None:
        recipe["sessions"] = fit_sessions(whole)
    elif trace.session is not None:
        recipe["not_in_recipe"] = [
            "session names (each request has its own time, none waits for another)"
        ]
    return recipe


def _fit_arrivals(arrival_ns: Int64Array, span_s: float) -> dict[str, Any]:
    n = len(arrival_ns)
    batch_ns = _batch_period_ns(arrival_ns)
    base_s = batch_ns / 1e9 if batch_ns else 1.0
    # Windows are 2^k seconds (or batches), so that the usual scales of burstiness lie on their grid.
    wanted = max(span_s / WINDOWS, REQUESTS_PER_WINDOW * span_s / n)
    window_s = base_s * 2.0 ** math.ceil(math.log2(wanted / base_s))
    windows = math.floor(span_s / window_s) + 1
    levels = max(0, math.ceil(math.log2(max(1.0, n / windows * 16))))
    if batch_ns:
        levels = max(0, round(math.log2(window_s / base_s)))
    levels = min(levels, int(math.log2(MAX_CELLS / windows)))
    cells = windows << levels
    # Batches wander about their beat; half a beat keeps each one in its own window.
    at = (arrival_ns - arrival_ns[0] + batch_ns // 2) / 1e9 / (windows * window_s)
    fine = np.bincount(np.minimum((at * cells).astype(np.int64), cells - 1), minlength=cells)
    splits = []
    counts = fine
    for _ in range(levels):
        left, right = counts[0::2], counts[1::2]
        parent = left + right
        splits.append(_unevenness(left, parent))
        counts = parent
    quantum = batch_ns or int(np.gcd.reduce(arrival_ns - arrival_ns[0]))
    return {
        "window_s": window_s,
        "window_requests": counts.tolist(),
        "split_unevenness": list(reversed(splits)),
        "quantum_ns": quantum if quantum >= 1_000_000 else 0,
    }


def _batch_period_ns(arrival_ns: Int64Array) -> int:
    """The beat of a trace written in batches (Mooncake's 3 s), 0 for others.

    Most gaps are 0, and four in five of the rest are within 1 % of their median.
    """
    gaps = np.diff(arrival_ns)
    steps = gaps[gaps > 0]
    if len(steps) * 2 > len(gaps) or not len(steps):
        return 0
    beat = int(np.median(steps))
    close = np.abs(steps - beat) <= beat / 100
    return beat if close.mean() >= 0.8 else 0


def _unevenness(left: Int64Array, parent: Int64Array) -> list[float]:
    """Correlation of two requests' choice of half: 0 is a fair coin each, 1 all together, below 0 even spread.

    One value for each power of two of the number N of requests to split (2-3, 4-7, …), because large
    clusters hold together differently. Moments of the beta-binomial: Var(left | N) = N/4 (1 + (N - 1) rho).
    """
    number = parent.astype(float)
    pairs = number * (number - 1) / 4
    excess = (left - number / 2) ** 2 - number / 4
    kind = _size_class(parent)
    all_pairs = np.bincount(kind, pairs)
    all_excess = np.bincount(kind, excess)
    rho = np.where(all_pairs > 0, all_excess / np.maximum(all_pairs, 1e-300), 0.0)
    return [round(value, 6) for value in np.clip(rho, -1, 1).tolist()]


def _size_class(parent: Int64Array) -> Int64Array:
    """0 for 0 to 3 requests, then one class for each power of two."""
    return np.maximum(np.floor(np.log2(np.maximum(parent, 1))).astype(np.int64) - 1, 0)


def _fit_lengths(prompt: Int64Array, output: Int64Array) -> dict[str, Any]:
    n = len(prompt)
    strata = max(1, min(STRATA, n // 50))
    order = np.argsort(prompt, kind="stable")
    parts = np.array_split(output[order], strata)
    return {
        "prompt_quantiles": _table(prompt),
        "output_quantiles_by_prompt": [_table(part) for part in parts],
    }


def _table(values: Int64Array) -> list[float]:
    """Values at the middles of equal parts of the distribution (Hazen's positions)."""
    points = min(POINTS, len(values))
    at = (np.arange(points) + 0.5) / points
    return [round(value, 1) for value in np.quantile(values, at, method="hazen").tolist()]


def load(path: str | Path) -> dict[str, Any]:
    """Read and check a recipe. Raises UserError naming what is wrong."""
    path = Path(path)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: can't be read: {error.strerror or error}") from None
    if len(raw) > 64 << 20:
        raise UserError(f"{path.name}: is too long for a recipe")
    try:
        recipe = json.loads(raw)
    except (ValueError, RecursionError):
        raise UserError(f"{path.name}: is not JSON") from None
    if not isinstance(recipe, dict) or recipe.get("schema") != SCHEMA:
        found = recipe.get("schema") if isinstance(recipe, dict) else None
        raise UserError(f"{path.name}: schema is {str(found)[:60]!r}; a recipe has {SCHEMA!r}")
    try:
        _check(recipe)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path.name}: the recipe is damaged ({str(error)[:100]!r})") from None
    return recipe


def _check(recipe: dict[str, Any]) -> None:
    def numbers(values: Any, low: float, high: float) -> None:
        if not isinstance(values, list) or not values:
            raise ValueError("a list is missing")
        for value in values:
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not low <= value <= high
            ):
                raise ValueError("a number is out of range")

    arrivals, lengths = recipe["arrivals"], recipe["lengths"]
    numbers([arrivals["window_s"]], 1e-9, 1e9)
    numbers(arrivals["window_requests"], 0, MAX_REQUESTS)
    if not isinstance(arrivals["split_unevenness"], list):
        raise ValueError("split_unevenness is no list")
    for level in arrivals["split_unevenness"]:
        numbers(level, -1, 1)
    numbers([arrivals["quantum_ns"]], 0, 10**18)
    numbers(lengths["prompt_quantiles"], 0, MAX_TOKENS)
    if not lengths["output_quantiles_by_prompt"]:
        raise ValueError("no output lengths")
    for table in lengths["output_quantiles_by_prompt"]:
        numbers(table, 0, MAX_TOKENS)
    if "tenant_shares" in recipe:
        numbers(recipe["tenant_shares"], 0, 1)
        if not sum(recipe["tenant_shares"]):
            raise ValueError("the tenants' shares are all 0")
    if "sharing" in recipe:
        shared = recipe["sharing"]
        numbers([shared["tokens_per_id"]], 1, MAX_TOKENS)
        if not isinstance(shared["tokens_per_id"], int):
            raise ValueError("tokens_per_id is no whole number")
        numbers(shared["depth_ids"], 0, MAX_TOKENS)
        for name, high in (("shared_fraction_by_prompt", 1), ("distance_by_depth", 10**12)):
            if not isinstance(shared[name], list) or not shared[name]:
                raise ValueError(f"{name} is missing")
            for table in shared[name]:
                numbers(table, 0, high)
        if len(shared["distance_by_depth"]) != len(shared["depth_ids"]):
            raise ValueError("as many depths as distances are needed")
    if "sessions" in recipe:
        check_sessions(recipe["sessions"], numbers)
    if not sum(arrivals["window_requests"]):
        raise ValueError("no requests")
    total = sum(arrivals["window_requests"])
    cells = len(arrivals["window_requests"]) << len(arrivals["split_unevenness"])
    if total > MAX_REQUESTS or cells > 2 * MAX_CELLS:
        raise ValueError("too many requests or cells")


def generate_from(
    recipe: dict[str, Any],
    seed: int = 0,
    *,
    requests: int | None = None,
    duration_s: float | None = None,
    rate: float | None = None,
) -> Trace:
    """A trace like the one the recipe was learned from; the same seed gives the same trace.

    Without `requests` or `duration_s` it is as long as the original; longer ones repeat the rate profile.
    `rate` scales the profile to that mean. Raises UserError for values that can't be.
    """
    rng = np.random.default_rng(seed)
    arrivals = recipe["arrivals"]
    profile = np.asarray(arrivals["window_requests"], dtype=float)
    window_s = float(arrivals["window_s"])
    mean = float(profile.sum()) / (len(profile) * window_s)
    for name, value in (("requests", requests), ("duration_s", duration_s), ("rate", rate)):
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise UserError(f"{name}={value} must be positive and finite")
    factor = 1.0 if rate is None else rate / mean
    needed = len(profile)
    if duration_s is not None:
        needed = math.ceil(duration_s / window_s)
    elif requests is not None:
        needed = max(1, math.ceil(requests / (mean * factor) / window_s * 1.05) + 1)
        needed = max(needed, math.ceil(requests / (profile.sum() * factor)) * len(profile))
    if needed * mean * window_s * factor > MAX_REQUESTS or needed > MAX_CELLS:
        raise UserError(f"more than {MAX_REQUESTS:,} requests")
    counts = _scaled(np.resize(profile, needed), factor, rng)
    times = _cascade(counts, arrivals["split_unevenness"], window_s, rng)
    if duration_s is not None:
        times = times[times < duration_s]
    if requests is not None:
        times = times[:requests]
    if not len(times):
        raise UserError("no request came out: the rate is too low for the duration")
    time_ns = np.round(times * 1e9).astype(np.int64)
    quantum = int(arrivals["quantum_ns"])
    if quantum:
        time_ns = time_ns // quantum * quantum
    prompt, output, rank = _draw_lengths(recipe["lengths"], len(times), rng)
    tenant = None
    names: tuple[str, ...] = ()
    if "tenant_shares" in recipe:
        shares = np.asarray(recipe["tenant_shares"], dtype=float)
        tenant = rng.choice(len(shares), len(times), p=shares / shares.sum()).astype(np.int32)
        names = tuple(f"t{at}" for at in range(len(shares)))
    offsets = ids = None
    if "sharing" in recipe:
        if int(prompt.sum()) // recipe["sharing"]["tokens_per_id"] > MAX_IDS:
            raise UserError(f"more than {MAX_IDS:,} content ids; ask for fewer requests")
        offsets, ids = draw_sharing(recipe["sharing"], prompt, rank, rng)
    made = Trace(
        arrival_ns=time_ns - time_ns[0],
        prompt_tokens=prompt,
        output_tokens=output,
        source=TraceSource("recipe", "generated"),
        tenant=tenant,
        tenant_names=names,
        prefix_offsets=offsets,
        prefix_ids=ids,
        prefix_block_tokens=int(recipe["sharing"]["tokens_per_id"]) if ids is not None else 0,
    )
    if "sessions" in recipe:
        made = expand(made, recipe["sessions"], rng)
    said = [f"Requests are drawn from a fitted recipe with seed {seed}."]
    if recipe.get("not_in_recipe"):
        said.append("The recipe leaves out: " + ", ".join(map(str, recipe["not_in_recipe"])) + ".")
    return dataclasses.replace(made, assumptions=tuple(said))


def _scaled(profile: Floats, factor: float, rng: np.random.Generator) -> Int64Array:
    """Counts times a factor; fractions become a request with that probability."""
    wanted = profile * factor
    whole = np.floor(wanted)
    return (whole + (rng.random(len(wanted)) < wanted - whole)).astype(np.int64)


def _cascade(
    counts: Int64Array, unevenness: list[list[float]], window_s: float, rng: np.random.Generator
) -> Floats:
    """Split each window's requests in halves again and again, then spread them evenly in the last cells."""
    for rho in unevenness:
        if len(counts) * 2 > 2 * MAX_CELLS:
            break  # finer than this the requests are spread evenly
        counts = _split(counts, rho, rng)
        window_s /= 2
    cell = np.repeat(np.arange(len(counts)), counts)
    return np.sort((cell + rng.random(len(cell))) * window_s)


def _split(parent: Int64Array, by_size: list[float], rng: np.random.Generator) -> Int64Array:
    """One halving: how many of each parent's requests fall on its left, then on its right half."""
    table = np.asarray(by_size, dtype=float)
    rho = table[np.minimum(_size_class(parent), len(table) - 1)]
    shape = np.maximum((1 / np.maximum(rho, 1e-9) - 1) / 2, 1e-6)
    share = rng.beta(shape, shape)
    share = np.where(np.isnan(share), rng.integers(0, 2, len(parent)), share)
    clustered = rng.binomial(parent, share)
    # More even than a coin: the coin's deviation, shrunk.
    fair = rng.binomial(parent, 0.5) - parent / 2
    calm = np.sqrt(np.maximum(0.0, 1 + (parent - 1) * np.minimum(rho, 0)))
    even = np.clip(np.floor(parent / 2 + fair * calm + rng.random(len(parent))), 0, parent)
    left = np.where(rho > 0, clustered, even).astype(np.int64)
    out = np.empty(2 * len(parent), dtype=np.int64)
    out[0::2] = left
    out[1::2] = parent - left
    return out


def _draw_lengths(
    lengths: dict[str, Any], count: int, rng: np.random.Generator
) -> tuple[Int64Array, Int64Array, Floats]:
    """Prompt by its quantiles; output by the quantiles of the prompt's stratum.

    Both are drawn evenly over their distributions (one draw in each of as many equal parts, shuffled), so
    that even a short trace has the fitted quantiles. The third column says where in the prompt's table each lies.
    """
    at = _even(count, rng)
    prompt = _from_table(lengths["prompt_quantiles"], at)
    tables = lengths["output_quantiles_by_prompt"]
    stratum = np.minimum((at * len(tables)).astype(np.int64), len(tables) - 1)
    output = np.empty(count, dtype=np.int64)
    for index, table in enumerate(tables):
        mine = np.flatnonzero(stratum == index)
        output[mine] = _from_table(table, _even(len(mine), rng))
    return prompt, np.maximum(output, 1), at


def _even(count: int, rng: np.random.Generator) -> Floats:
    return (rng.permutation(count) + rng.random(count)) / max(1, count)


def _from_table(table: list[float], at: Floats) -> Int64Array:
    middles = (np.arange(len(table)) + 0.5) / len(table)
    return np.round(np.interp(at, middles, table)).astype(np.int64)
