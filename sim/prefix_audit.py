"""What prefix caching can find in a trace: at best, by cache size, by block size, by router and replicas.

One pass gives the hits of every cache size at once, by LRU stack distance (Mattson et al. 1970): a block is
found in a cache of C blocks exactly if fewer than C others were touched more recently. The cache is vLLM's:
whole blocks, the last prompt token always computed, and a freed request's blocks queued with its tail first
to be evicted (0.32.0 v1/core/kv_cache_manager.py and block_pool.py), so a block's prefix is always younger
than the block. Requests come one after another, each done before the next: blocks pinned by requests that
run at once, and sharing with one that is still being prefilled, are a replay's business. Off by one block
at most: after a prompt that was found whole, and where it ends with the block, which is then computed twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vsim.errors import UserError
from vsim.sim.router import home_of
from vsim.sim.text import wrapped
from vsim.traces.arrivals import select
from vsim.traces.sharing import sharing
from vsim.traces.trace import Int64Array, Trace

BLOCK_SIZES = (16, 32, 64, 128, 256, 512)
REPLICAS = (1, 2, 4, 8)
AUDIT_ROUTES = ("round-robin", "prefix-affinity")


@dataclass(frozen=True, slots=True)
class Reuse:
    """Where the blocks that prompts share lay in the LRU order when they were needed again.

    Group i: `blocks[i]` blocks (whole, of `block_size` tokens) that lie right below `depth[i]` others.
    """

    block_size: int
    depth: Int64Array
    blocks: Int64Array
    prompt_tokens: int
    touched_blocks: int  # different blocks over the whole trace: what "infinite" means

    def hit_tokens(self, cache_blocks: int | None = None) -> int:
        """Prompt tokens found in a cache of so many blocks; None: one that never evicts."""
        if cache_blocks is None:
            return int(self.blocks.sum()) * self.block_size
        found = np.clip(cache_blocks - self.depth, 0, self.blocks)
        return int(found.sum()) * self.block_size

    def hit_rate(self, cache_blocks: int | None = None) -> float:
        """Share of all prompt tokens."""
        hits = self.hit_tokens(cache_blocks)
        return hits / self.prompt_tokens if self.prompt_tokens else 0.0

    def blocks_for(self, share: float) -> int:
        """The smallest cache, in blocks, that finds so large a share of what an infinite one finds."""
        wanted = share * self.hit_tokens()
        low, high = 0, int((self.depth + self.blocks).max()) if len(self.depth) else 0
        while low < high:
            middle = (low + high) // 2
            if self.hit_tokens(middle) >= wanted:
                high = middle
            else:
                low = middle + 1
        return low


class _Tree:
    """Sums of a column that changes one cell at a time (Fenwick)."""

    def __init__(self, size: int) -> None:
        self._sums = [0] * (size + 1)

    def add(self, index: int, value: int) -> None:
        index += 1
        while index < len(self._sums):
            self._sums[index] += value
            index += index & -index

    def before(self, index: int) -> int:
        """Sum of cells 0 to index - 1."""
        total = 0
        while index > 0:
            total += self._sums[index]
            index -= index & -index
        return total


def reuse(trace: Trace, block_size: int) -> Reuse:
    """One pass over the trace's content ids. Raises UserError for a trace without any.

    Of an id that one prompt holds in part and another in whole, the shared part is taken.
    """
    size = trace.prefix_block_tokens
    if trace.prefix_ids is None or trace.prefix_offsets is None or not size:
        raise UserError(
            f"{trace.source.name}: the trace does not say which prompts begin alike (no hash ids): there is "
            "nothing to audit; Mooncake's format and vsim's own can say it"
        )
    # Ids become Python's a row at a time: a trace may have a hundred million.
    ids, offsets = trace.prefix_ids, trace.prefix_offsets.tolist()
    prompts, outputs = trace.prompt_tokens.tolist(), trace.output_tokens.tolist()
    nodes: dict[tuple[int, int], int] = {}  # (node of the piece before, id) -> node
    last: list[int] = [-1]  # node -> request that touched it last
    width: list[int] = [0]  # node -> blocks that end in it
    weight = _Tree(
        len(prompts)
    )  # request -> blocks it touched last, of all that nobody touched since
    total = touched = begun = 0  # begun: blocks that the request before left half filled
    depths: list[int] = []
    found: list[int] = []
    for row, prompt in enumerate(prompts):
        # Blocks in which the last prompt token lies are computed whatever is cached.
        usable = (prompt - 1) // block_size if prompt else 0
        node = done = hit = 0  # done: blocks walked; hit: whether all so far were there before
        matching = True
        group, above, mine = -1, 0, 0
        moved: dict[int, int] = {}
        for place, identity in enumerate(ids[offsets[row] : offsets[row + 1]].tolist()):
            end = min((place + 1) * size, prompt)
            if end <= place * size:
                break
            here = end // block_size - place * size // block_size
            key = (node, identity)
            known = nodes.get(key)
            if known is None:
                matching = False
                known = nodes[key] = len(last)
                last.append(-1)
                width.append(0)
            if matching:
                if last[known] != group:
                    group = last[known]
                    above = total - weight.before(group + 1) + begun
                both = min(here, width[known], usable - done)
                if both > 0:
                    if depths and hit and depths[-1] + found[-1] == above:
                        found[-1] += both
                    else:
                        depths.append(above)
                        found.append(both)
                    hit = 1
                above += width[known]
                matching = here in (both, 0)
            if last[known] >= 0:
                moved[last[known]] = moved.get(last[known], 0) + width[known]
            touched += max(0, here - width[known])
            width[known] = max(width[known], here)
            mine += width[known]
            last[known] = row
            done += here
            node = known
        # What only this request has: the rest of its prompt, and its answer, whose last token is never
        # computed. A block begun but not filled has no key: it is the next to be handed out again, and
        # until then the cache is smaller by it.
        whole, rest = divmod(prompt + max(0, outputs[row] - 1), block_size)
        private = max(0, whole - done)
        begun = 1 if rest else 0
        touched += private
        mine += private
        for slot, blocks in moved.items():
            weight.add(slot, -blocks)
            total -= blocks
        weight.add(row, mine)
        total += mine
    return Reuse(
        block_size=block_size,
        depth=np.array(depths, dtype=np.int64),
        blocks=np.array(found, dtype=np.int64),
        prompt_tokens=int(trace.prompt_tokens.sum()),
        touched_blocks=touched,
    )


@dataclass(frozen=True, slots=True)
class Audit:
    """Everything the auditor says; rates are shares of all prompt tokens."""

    requests: int
    prompt_tokens: int
    shared_tokens: int  # that an earlier prompt begins with too, whatever the block size
    block_size: int
    by_block_size: tuple[tuple[int, float, int], ...]  # size, ceiling, tokens shorter than a block
    by_cache: tuple[tuple[int, float, int], ...]  # blocks, hit rate, tokens evicted and then needed
    by_route: tuple[
        tuple[str, int, float, float, float], ...
    ]  # route, replicas, ceiling, with `cache_blocks`
    cache_blocks: int
    enough_blocks: int  # for 95 % of the ceiling
    touched_blocks: int

    @property
    def ceiling(self) -> float:
        return next(rate for size, rate, _ in self.by_block_size if size == self.block_size)


def audit(
    trace: Trace,
    block_size: int = 16,
    cache_blocks: int | None = None,
    replicas: Sequence[int] = REPLICAS,
) -> Audit:
    """Audit `trace` for blocks of `block_size` tokens; `cache_blocks` of one replica, None: what 95 % needs.

    Raises UserError for a trace without content ids, or sizes below 1.
    """
    for name, value in (("block_size", block_size), ("cache_blocks", cache_blocks)):
        if value is not None and value < 1:
            raise UserError(f"{name}={value} must be at least 1")
    for count in replicas:
        if not 1 <= count <= 4096:
            raise UserError(f"replicas={count} must be 1 to 4096")
    one = reuse(trace, block_size)
    shared = sharing(trace)
    assert shared is not None
    enough = max(1, one.blocks_for(0.95))
    cache = enough if cache_blocks is None else cache_blocks
    at_best = int(np.minimum(shared.common_tokens, np.maximum(trace.prompt_tokens - 1, 0)).sum())
    best = one.hit_tokens()
    sizes = sorted({*BLOCK_SIZES, block_size})
    rows = []
    for size in sizes:
        hits = int(shared.hit_tokens(size).sum())
        rows.append((size, hits / max(1, one.prompt_tokens), at_best - hits))
    routes = []
    for route in AUDIT_ROUTES:
        for count in sorted(set(replicas)):
            if count == 1 and route != AUDIT_ROUTES[0]:
                continue
            parts = (
                [one]
                if count == 1
                else [
                    reuse(select(trace, rows_of, ""), block_size)
                    for rows_of in _split(trace, route, count)
                    if len(rows_of)
                ]
            )
            routes.append(
                (
                    route if count > 1 else "–",
                    count,
                    sum(p.hit_tokens() for p in parts) / max(1, one.prompt_tokens),
                    sum(p.hit_tokens(cache) for p in parts) / max(1, one.prompt_tokens),
                    max(p.prompt_tokens for p in parts) / max(1, one.prompt_tokens),
                )
            )
    return Audit(
        requests=len(trace),
        prompt_tokens=one.prompt_tokens,
        shared_tokens=at_best,
        block_size=block_size,
        by_block_size=tuple(rows),
        by_cache=tuple(
            (blocks, one.hit_rate(blocks), best - one.hit_tokens(blocks))
            for blocks in _sizes(one, cache)
        ),
        by_route=tuple(routes),
        cache_blocks=cache,
        enough_blocks=enough,
        touched_blocks=one.touched_blocks,
    )


def _sizes(one: Reuse, cache: int) -> list[int]:
    """Powers of two up to the first that finds everything, and the cache asked about."""
    most = max(1, one.blocks_for(1.0))
    top = math.ceil(math.log2(most)) if most > 1 else 0
    return sorted({*(1 << power for power in range(max(0, top - 9), top + 1)), cache})


def _split(trace: Trace, route: str, count: int) -> list[Int64Array]:
    """Rows of each replica; a prompt without ids goes around in turn."""
    where: npt.NDArray[np.int64] = np.arange(len(trace)) % count
    if route == "prefix-affinity":
        assert trace.prefix_ids is not None and trace.prefix_offsets is not None
        starts = trace.prefix_offsets[:-1]
        some = np.flatnonzero(np.diff(trace.prefix_offsets) > 0)
        first, place = np.unique(trace.prefix_ids[starts[some]], return_inverse=True)
        homes = np.array([home_of(int(content), count) for content in first], dtype=np.int64)
        where[some] = homes[place]
    return [np.flatnonzero(where == replica) for replica in range(count)]


def audit_data(found: Audit) -> dict[str, object]:
    """As JSON-ready data."""
    return {
        "schema": "vsim/prefix-audit/1",
        "requests": found.requests,
        "prompt_tokens": found.prompt_tokens,
        "shared_tokens": found.shared_tokens,
        "block_size": found.block_size,
        "hit_rate_ceiling": found.ceiling,
        "touched_blocks": found.touched_blocks,
        "blocks_for_95_percent_of_ceiling": found.enough_blocks,
        "by_block_size": [
            {"block_size": size, "hit_rate_ceiling": rate, "shorter_than_a_block_tokens": lost}
            for size, rate, lost in found.by_block_size
        ],
        "by_cache_size": [
            {"blocks": blocks, "tokens": blocks * found.block_size}
            | {"hit_rate": rate, "evicted_then_needed_tokens": lost}
            for blocks, rate, lost in found.by_cache
        ],
        "by_route": [
            {"route": None if count == 1 else route, "replicas": count}
            | {"hit_rate_ceiling": ceiling, "hit_rate": rate, "blocks": found.cache_blocks}
            | {"busiest_share": busiest}
            for route, count, ceiling, rate, busiest in found.by_route
        ],
    }


def render_audit(found: Audit) -> str:
    """As plain text in 80 columns."""
    share = found.shared_tokens / max(1, found.prompt_tokens)
    lines = [
        *wrapped(
            f"{found.requests:,} requests, {found.prompt_tokens:,} prompt tokens; an earlier prompt begins "
            f"with {found.shared_tokens:,} of them too ({share:.1%}). Rates are shares of all prompt tokens."
        ),
        "",
        "A cache that never evicts, by block size",
        f"{'block size':>12}{'hit rate':>12}{'shared but shorter than a block':>36}",
    ]
    lines += [
        f"{size:>12,}{rate:>12.1%}{f'{lost:,} tokens':>36}"
        for size, rate, lost in found.by_block_size
    ]
    lines += [
        "",
        f"One replica, blocks of {found.block_size}, by cache size",
        f"{'blocks':>12}{'tokens':>14}{'hit rate':>12}{'evicted, then needed':>28}",
    ]
    lines += [
        f"{blocks:>12,}{blocks * found.block_size:>14,}{rate:>12.1%}{f'{lost:,} tokens':>28}"
        for blocks, rate, lost in found.by_cache
    ]
    lines += [
        "",
        f"{found.enough_blocks:,} blocks find 95 % of what a cache that never evicts would.",
        "",
        f"By router and replicas, {found.cache_blocks:,} blocks each",
        f"{'replicas':>12}  {'route':<18}{'never evicts':>14}{'hit rate':>12}{'busiest has':>14}",
    ]
    lines += [
        f"{count:>12,}  {route:<18}{ceiling:>14.1%}{rate:>12.1%}{busiest:>14.1%}"
        for route, count, ceiling, rate, busiest in found.by_route
    ]
    return "\n".join(lines) + "\n"
