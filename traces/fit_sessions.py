"""Conversations as numbers: how many turns, how long the pauses, how the context grows."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from vsim.errors import UserError
from vsim.traces.draft import MAX_TOKENS
from vsim.traces.sharing import parents
from vsim.traces.trace import Int64Array, Sessions, Trace

POINTS = 201
MAX_ROWS = 100_000_000

Floats = npt.NDArray[np.float64]
Rng = np.random.Generator


def openings(trace: Trace) -> Int64Array:
    """Rows that wait for no other."""
    assert trace.sessions is not None
    return np.flatnonzero(trace.sessions.after < 0)


def fit_sessions(trace: Trace) -> dict[str, Any]:
    """Quantiles over conversations (turns) and over later turns (pause, growth of the prompt, output).

    Growth is what a turn's prompt has beyond the previous prompt and answer; below 0 where context is cut.
    """
    sessions = trace.sessions
    assert sessions is not None
    later = np.flatnonzero(sessions.after >= 0)
    before = sessions.after[later]
    growth = trace.prompt_tokens[later] - trace.prompt_tokens[before] - trace.output_tokens[before]
    recipe: dict[str, Any] = {
        "turns": _table(np.bincount(_roots(sessions.after))[openings(trace)]),
        "think_s": _table(sessions.think_ns[later] / 1e9),
        "growth_tokens": _table(growth),
        "output_tokens": _table(trace.output_tokens[later]),
    }
    found = parents(trace)
    if found is not None:
        kept = np.minimum(found[0][later], trace.prompt_tokens[before])
        recipe["context_kept"] = round(
            float(kept.sum()) / max(1, int(trace.prompt_tokens[before].sum())), 4
        )
    return recipe


def _roots(after: Int64Array) -> Int64Array:
    """The first turn of each row's conversation, by following `after` in doubling steps."""
    root = np.where(after >= 0, after, np.arange(len(after)))
    while True:
        further = root[root]
        if (further == root).all():
            return root
        root = further


def _table(values: npt.NDArray[Any]) -> list[float]:
    points = min(POINTS, len(values))
    at = (np.arange(points) + 0.5) / points
    return [round(value, 4) for value in np.quantile(values, at, method="hazen").tolist()]


def _draw(table: list[float], count: int, rng: Rng) -> Floats:
    """Evenly over the distribution, shuffled."""
    at = (rng.permutation(count) + rng.random(count)) / max(1, count)
    return np.interp(at, (np.arange(len(table)) + 0.5) / len(table), table)


def check_sessions(recipe: Any, numbers: Any) -> None:
    """Raises ValueError or KeyError for a damaged recipe; `numbers` checks a list's range."""
    numbers(recipe["turns"], 1, 100_000)
    numbers(recipe["think_s"], 0, 1e8)
    numbers(recipe["growth_tokens"], -MAX_TOKENS, MAX_TOKENS)
    numbers(recipe["output_tokens"], 0, MAX_TOKENS)
    if "context_kept" in recipe:
        numbers([recipe["context_kept"]], 0, 1)


def expand(opening: Trace, recipe: dict[str, Any], rng: Rng) -> Trace:
    """Give each request of `opening` its later turns; rows are put in order of time.

    Later turns are placed as if answers took no time. With content ids, a turn keeps the previous prompt's
    full pieces if the fitted trace mostly did.
    """
    n = len(opening)
    turns = np.maximum(np.round(_draw(recipe["turns"], n, rng)), 1).astype(np.int64)
    if int(turns.sum()) > MAX_ROWS:
        raise UserError(f"more than {MAX_ROWS:,} turns")
    chain, prompt, output = np.arange(n), opening.prompt_tokens, opening.output_tokens
    time = opening.arrival_ns
    rows = [(chain, np.zeros(n, np.int64), time, np.zeros(n, np.int64), prompt, output)]
    turn = 1
    while (turns > turn).any():
        alive = np.flatnonzero(turns[chain] > turn)
        count = len(alive)
        think = np.round(_draw(recipe["think_s"], count, rng) * 1e9).astype(np.int64)
        growth = np.round(_draw(recipe["growth_tokens"], count, rng)).astype(np.int64)
        prompt = np.clip(prompt[alive] + output[alive] + growth, 1, MAX_TOKENS)
        output = np.maximum(np.round(_draw(recipe["output_tokens"], count, rng)), 1).astype(
            np.int64
        )
        time, chain = time[alive] + think, chain[alive]
        rows.append((chain, np.full(count, turn), time, think, prompt, output))
        turn += 1
    columns = [np.concatenate(parts) for parts in zip(*rows, strict=True)]
    return _assemble(opening, columns, recipe)


def _assemble(opening: Trace, columns: list[Int64Array], recipe: dict[str, Any]) -> Trace:
    order = np.lexsort((columns[1], columns[0], columns[2]))
    chain, turn, time, think, prompt, output = (column[order] for column in columns)
    by_chain = np.lexsort((turn, chain))
    after = np.full(len(chain), -1, dtype=np.int64)
    after[by_chain[1:]] = np.where(turn[by_chain[1:]] > 0, by_chain[:-1], -1)
    offsets, ids = None, None
    if opening.prefix_ids is not None and opening.prefix_offsets is not None:
        offsets, ids = _content(opening, chain, after, prompt, recipe)
    return dataclasses.replace(
        opening,
        arrival_ns=time - time[0],
        prompt_tokens=prompt,
        output_tokens=output,
        tenant=None if opening.tenant is None else opening.tenant[chain],
        sessions=Sessions(after, think) if (after >= 0).any() else None,
        session=chain.astype(np.int32),
        session_names=tuple(f"s{at}" for at in range(len(opening))),
        prefix_offsets=offsets,
        prefix_ids=ids,
    )


def _content(
    opening: Trace, chain: Int64Array, after: Int64Array, prompt: Int64Array, recipe: dict[str, Any]
) -> tuple[Int64Array, Int64Array]:
    """Ids of every turn: the opening's, or the previous turn's full pieces and new ones."""
    assert opening.prefix_offsets is not None and opening.prefix_ids is not None
    size, keeps = opening.prefix_block_tokens, recipe.get("context_kept", 0) > 0.5
    starts, first = opening.prefix_offsets.tolist(), opening.prefix_ids.tolist()
    fresh = max(first, default=-1) + 1
    rows: list[list[int]] = []
    for own, before, length in zip(chain.tolist(), after.tolist(), prompt.tolist(), strict=True):
        if before < 0:
            rows.append(first[starts[own] : starts[own + 1]])
            continue
        number = -(-length // size)
        ids = rows[before][: min(int(prompt[before]) // size, number)] if keeps else []
        missing = number - len(ids)
        rows.append(ids + list(range(fresh, fresh + missing)))
        fresh += missing
    offsets = np.concatenate(([0], np.cumsum([len(ids) for ids in rows]))).astype(np.int64)
    return offsets, np.fromiter(
        (value for ids in rows for value in ids), np.int64, int(offsets[-1])
    )
