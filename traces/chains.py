"""Token ids to content ids: equal ids for equal prompts up to there, one per full block."""

from __future__ import annotations

from collections.abc import Sequence


class Chains:
    """Numbers the full `block_tokens`-token blocks of prompts by their content and everything before it.

    Two prompts get the same id for a block exactly if they agree up to its end, as vLLM's chained block
    hashes do; the partial block at a prompt's end has none.
    """

    def __init__(self, block_tokens: int = 16) -> None:
        self.block_tokens = block_tokens
        self._known: dict[tuple[int, tuple[int, ...]], int] = {}

    def ids(self, tokens: Sequence[int]) -> list[int]:
        size = self.block_tokens
        parent, out = -1, []
        for start in range(0, len(tokens) - size + 1, size):
            key = (parent, tuple(tokens[start : start + size]))
            parent = self._known.setdefault(key, len(self._known))
            out.append(parent)
        return out


def growing_context(
    sessions: Sequence[object], prompt: Sequence[int], block_tokens: int
) -> list[list[int]]:
    """Ids for turns whose prompts begin with the whole prompt of the turn before, one per full block.

    Rows of one session stand together, in order. An answer's tokens come into the next prompt, but the turn
    before had no id for them: they count as new there.
    """
    rows: list[list[int]] = []
    fresh = 0
    for at, length in enumerate(prompt):
        kept: list[int] = []
        if at and sessions[at] == sessions[at - 1]:
            kept = rows[-1][: length // block_tokens]
        missing = length // block_tokens - len(kept)
        rows.append(kept + list(range(fresh, fresh + missing)))
        fresh += missing
    return rows
