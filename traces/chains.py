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
