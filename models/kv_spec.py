"""How layers share KV blocks: pages, groups, and how many blocks fit.

The rules are vLLM 0.32's (v1/core/kv_cache_utils.py `get_kv_cache_configs`, v1/kv_cache_interface.py); its
results are the arbiter in tests/test_capacity.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, slots=True)
class LayerKV:
    """The KV cache of one layer on one rank: a page holds `block_size` tokens."""

    kind: Literal["full", "sliding", "mla"]
    block_size: int
    page_bytes: int
    window: int | None = None
    # (KV heads, bytes per head and token): layers that differ in it share no group unless all are of one kind.
    shape: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers that share one block table. `layers` are indices into the model's layers, over all stages."""

    kind: Literal["full", "sliding", "mla"]
    block_size: int
    window: int | None
    layers: tuple[int, ...]

    def blocks_per_request(self, max_model_len: int, in_flight_tokens: int) -> int:
        """Blocks that one request of `max_model_len` tokens can hold at once.

        A sliding-window group frees blocks behind its window, but only those of processed tokens: the window,
        the tokens in flight, and one block more because the window need not start on a block boundary.
        """
        if self.kind != "sliding" or self.window is None:
            return -(-max_model_len // self.block_size)
        tokens = min(self.window - 1 + in_flight_tokens, max_model_len)
        return -(-tokens // self.block_size) + 1


@dataclass(frozen=True, slots=True)
class KVCacheLayout:
    """Groups, and the bytes that one block id costs on each pipeline stage (all groups draw from one pool)."""

    groups: tuple[KVCacheGroup, ...]
    bytes_per_block: tuple[int, ...]  # by stage
    padding_layers: int = 0  # layers' worth of memory wasted to make groups equal

    def blocks_per_request(self, max_model_len: int, in_flight_tokens: int) -> int:
        return sum(g.blocks_per_request(max_model_len, in_flight_tokens) for g in self.groups)

    def num_blocks(self, available_bytes: list[int]) -> int:
        """Blocks that every stage can hold: the poorest stage decides."""
        return min(
            max(0, have) // need
            for have, need in zip(available_bytes, self.bytes_per_block, strict=True)
        )

    def max_concurrency(self, num_blocks: int, max_model_len: int, in_flight_tokens: int) -> float:
        """Requests of `max_model_len` tokens that the pool can hold (vLLM's "Maximum concurrency")."""
        return num_blocks / self.blocks_per_request(max_model_len, in_flight_tokens)

    def needed_bytes(self, stage: int, max_model_len: int, in_flight_tokens: int) -> int:
        """Memory that one request of `max_model_len` tokens needs on a stage."""
        return self.bytes_per_block[stage] * self.blocks_per_request(
            max_model_len, in_flight_tokens
        )

    def longest_fitting(
        self, stage: int, check_bytes: int, max_model_len: int, in_flight_tokens: int
    ) -> int:
        """The largest length up to `max_model_len` that fits, by bisection; 0 if not even one token does."""
        if self.needed_bytes(stage, 1, in_flight_tokens) > check_bytes:
            return 0
        low, high, best = 1, max_model_len, 1
        while low <= high:
            middle = (low + high) // 2
            if self.needed_bytes(stage, middle, in_flight_tokens) <= check_bytes:
                best, low = middle, middle + 1
            else:
                high = middle - 1
        return best


def _unify_pages(layers: list[LayerKV]) -> list[LayerKV]:
    """Give every layer the largest page, by more tokens per block where it divides, else by padding."""
    largest = max(layer.page_bytes for layer in layers)
    unified = []
    for layer in layers:
        ratio, rest = divmod(largest, layer.page_bytes)
        if rest == 0:
            unified.append(replace(layer, block_size=layer.block_size * ratio, page_bytes=largest))
        else:
            unified.append(replace(layer, page_bytes=largest))
    return unified


def kv_layout(
    layers: list[LayerKV], stages: list[range], hybrid: bool = True, size_ratio: float = 1.5
) -> KVCacheLayout:
    """Group the model's layers as vLLM does.

    `layers` in model order, `stages` the layer range of each pipeline stage. One group if all layers are
    alike (or `hybrid` is off: sliding-window layers then keep every token, as before vLLM 0.9). Otherwise
    each kind is cut into groups of g layers, g the count of the rarest kind (or of the commonest, if that
    is less than `size_ratio` times as many), taken in turns so that pipeline stages stay balanced.
    """
    if not hybrid and len({(x.kind, x.window) for x in layers}) > 1:
        layers = [
            replace(x, kind="full", window=None) if x.kind == "sliding" else x for x in layers
        ]
    same_slots = len({(x.kind, x.window, x.block_size) for x in layers}) == 1
    if same_slots:
        group = KVCacheGroup(
            layers[0].kind, layers[0].block_size, layers[0].window, tuple(range(len(layers)))
        )
        need = tuple(sum(layers[i].page_bytes for i in stage) for stage in stages)
        return KVCacheLayout((group,), need)
    layers = _unify_pages(layers)
    buckets: dict[tuple[str, int | None, int, tuple[int, int]], list[int]] = {}
    for index, layer in enumerate(layers):
        key = (layer.kind, layer.window, layer.block_size, layer.shape)
        buckets.setdefault(key, []).append(index)
    counts = [len(members) for members in buckets.values()]
    size = max(counts) if max(counts) < size_ratio * min(counts) else min(counts)
    groups: list[KVCacheGroup] = []
    padding = 0
    for members in buckets.values():
        number = -(-len(members) // size)
        padding += number * size - len(members)
        for i in range(number):
            part = members[i::number]
            first = layers[part[0]]
            groups.append(KVCacheGroup(first.kind, first.block_size, first.window, tuple(part)))
    page = layers[0].page_bytes
    need = tuple(
        page * max(sum(1 for i in group.layers if i in stage) for group in groups)
        for stage in stages
    )
    return KVCacheLayout(tuple(groups), need, padding)
