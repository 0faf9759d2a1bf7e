"""How prompts share prefixes, as numbers: how much of a prompt, with how recent a predecessor."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from vsim.traces.sharing import parents
from vsim.traces.trace import Int64Array, Trace

STRATA = 20  # of prompt length, each with its own shares
DEPTHS = 10  # of the shared part's length, each with its own distances
POINTS = 101
SEARCH = 256  # earlier prompts tried for one that is long enough

Floats = npt.NDArray[np.float64]
Rng = np.random.Generator


def fit_sharing(trace: Trace) -> dict[str, Any] | None:
    """Quantiles of the shared fraction by prompt length, and of the distance to the prompt shared with.

    None if the trace has no content ids. Distances count requests, from the most recent one that shares
    all there is to share.
    """
    found = parents(trace)
    if found is None:
        return None
    common, parent = found
    pieces = common // trace.prefix_block_tokens
    possible = np.maximum(-(-trace.prompt_tokens // trace.prefix_block_tokens), 1)
    fraction = np.minimum(pieces / possible, 1.0)
    order = np.argsort(trace.prompt_tokens, kind="stable")
    strata = np.array_split(order, max(1, min(STRATA, len(trace) // 10)))
    sharing_rows = np.flatnonzero(pieces > 0)
    by_depth = np.array_split(
        sharing_rows[np.argsort(pieces[sharing_rows], kind="stable")],
        max(1, min(DEPTHS, len(sharing_rows) // 50)),
    )
    distance = np.arange(len(trace)) - parent
    return {
        "tokens_per_id": trace.prefix_block_tokens,
        "shared_fraction_by_prompt": [_table(fraction[rows]) for rows in strata],
        "depth_ids": [int(pieces[rows].max()) if len(rows) else 0 for rows in by_depth],
        "distance_by_depth": [
            _table(distance[rows].astype(float)) if len(rows) else [1.0] for rows in by_depth
        ],
    }


def _table(values: Floats) -> list[float]:
    points = min(POINTS, len(values))
    at = (np.arange(points) + 0.5) / points
    return [round(value, 4) for value in np.quantile(values, at, method="hazen").tolist()]


def draw_sharing(
    recipe: dict[str, Any], prompt: Int64Array, prompt_rank: Floats, rng: Rng
) -> tuple[Int64Array, Int64Array]:
    """(offsets, ids) for prompts in order of arrival; `prompt_rank` says where in the length table each lies.

    A prompt takes over the first ids of an earlier one at a drawn distance that is long enough (or of the
    longest of the nearest), and has ids of its own from there on.
    """
    size = int(recipe["tokens_per_id"])
    tables = recipe["shared_fraction_by_prompt"]
    n = len(prompt)
    stratum = np.minimum((prompt_rank * len(tables)).astype(np.int64), len(tables) - 1)
    fraction = np.empty(n)
    for index, table in enumerate(tables):
        mine = np.flatnonzero(stratum == index)
        even = (rng.permutation(len(mine)) + rng.random(len(mine))) / max(1, len(mine))
        fraction[mine] = _from_table(table, even)
    total = -(-prompt // size)
    wanted = np.minimum(np.round(fraction * total), total).astype(np.int64)
    depth = np.minimum(np.searchsorted(recipe["depth_ids"], wanted), len(recipe["depth_ids"]) - 1)
    draws = rng.random(n)
    rows: list[list[int]] = []
    fresh = 0
    for at, (number, share) in enumerate(zip(total.tolist(), wanted.tolist(), strict=True)):
        ids: list[int] = []
        if share and at:
            distance = float(
                _from_table(recipe["distance_by_depth"][int(depth[at])], draws[at : at + 1])[0]
            )
            ids = _predecessor(rows, at - max(1, round(distance)), share)[:share]
        missing = number - len(ids)
        ids = ids + list(range(fresh, fresh + missing))
        fresh += missing
        rows.append(ids)
    offsets = np.concatenate(([0], np.cumsum(total))).astype(np.int64)
    flat = np.fromiter((value for ids in rows for value in ids), np.int64, int(offsets[-1]))
    return offsets, flat


def _predecessor(rows: list[list[int]], near: int, share: int) -> list[int]:
    """The ids of the prompt nearest to `near` that has at least `share`; else the longest one tried."""
    best: list[int] = []
    for step in range(SEARCH):
        for at in (near - step, near + step):
            if 0 <= at < len(rows):
                if len(rows[at]) >= share:
                    return rows[at]
                if len(rows[at]) > len(best):
                    best = rows[at]
    return best


def _from_table(table: list[float], at: Floats) -> Floats:
    middles = (np.arange(len(table)) + 0.5) / len(table)
    return np.interp(at, middles, table)
