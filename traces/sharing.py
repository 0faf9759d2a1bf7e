"""What prefix caching could save at best: hits with a cache that never evicts, by block size."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vsim.traces.trace import Int64Array, Trace

BLOCK_SIZES = (16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class Sharing:
    """Tokens of each prompt that an earlier prompt has in common with it, shape (n,)."""

    common_tokens: Int64Array
    prompt_tokens: Int64Array

    def hit_tokens(self, block_size: int) -> Int64Array:
        """Tokens found in an infinite cache: whole blocks, and at least the last token is computed anew.

        vLLM 0.32.0 v1/core/kv_cache_manager.py: a hit covers at most prompt - 1 tokens, in whole blocks.
        """
        most = np.minimum(self.common_tokens, np.maximum(self.prompt_tokens - 1, 0))
        return most // block_size * block_size

    def ceiling(self, block_size: int) -> float:
        """Share of all prompt tokens that an infinite cache would serve."""
        total = int(self.prompt_tokens.sum())
        return int(self.hit_tokens(block_size).sum()) / total if total else 0.0


def sharing(trace: Trace) -> Sharing | None:
    """How long a prefix each prompt shares with any earlier one; None if the trace has no content ids."""
    found = parents(trace)
    return None if found is None else Sharing(found[0], trace.prompt_tokens)


def parents(trace: Trace) -> tuple[Int64Array, Int64Array] | None:
    """Tokens each prompt shares with an earlier one, and the row of the latest that shares them (-1: none).

    Walks a tree of pieces. A piece that an earlier prompt held only in part is shared only so far.
    """
    if trace.prefix_ids is None or trace.prefix_offsets is None or not trace.prefix_block_tokens:
        return None
    size = trace.prefix_block_tokens
    # Ids become Python's a row at a time: a trace may have a hundred million.
    ids, offsets = trace.prefix_ids, trace.prefix_offsets.tolist()
    # (node of the piece before, id) -> [node, most tokens of this piece that any prompt held, latest row]
    tree: dict[tuple[int, int], list[int]] = {}
    common = np.zeros(len(trace), dtype=np.int64)
    latest = np.full(len(trace), -1, dtype=np.int64)
    for row, prompt in enumerate(trace.prompt_tokens.tolist()):
        node, shared, matching, with_row = 0, 0, True, -1
        left = prompt
        for identity in ids[offsets[row] : offsets[row + 1]].tolist():
            held = size if left >= size else left
            if held <= 0:
                break
            left -= held
            entry = tree.get((node, identity))
            if entry is None:
                matching = False
                entry = tree[(node, identity)] = [len(tree) + 1, held, row]
            else:
                if matching:
                    overlap = min(held, entry[1])
                    shared += overlap
                    with_row = entry[2]
                    matching = overlap == size
                entry[1] = max(entry[1], held)
                entry[2] = row
            node = entry[0]
        common[row] = shared
        latest[row] = with_row
    return common, latest
