"""What to measure, in which order: design points of few steps each, the most telling first."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

LEVELS = 3  # after these, random scenes for as long as there is time


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine at hand can hold in a step. `kv_tokens`: usable blocks x block size."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    kv_tokens: int
    block_size: int


@dataclass(frozen=True, slots=True)
class Scene:
    """A few engine steps of known composition.

    `decodes`: contexts of the sequences that decode; `decode_steps` of these alone come first. Then the
    `prefills`, each (new tokens, context), are thrown in together, `injections` times. Contexts are whole
    blocks.
    """

    name: str
    level: int
    decodes: tuple[int, ...] = ()
    decode_steps: int = 0
    prefills: tuple[tuple[int, int], ...] = ()
    injections: int = 1

    @property
    def command(self) -> dict[str, Any]:
        """As `record.py` takes it."""
        return {
            "decodes": list(self.decodes),
            "decode_steps": self.decode_steps,
            "prefills": [list(chunk) for chunk in self.prefills],
            "injections": self.injections,
        }

    def kv_tokens(self, block_size: int) -> int:
        """KV slots it needs at its largest, in whole blocks."""
        ends = [context + self.decode_steps + 3 * self.injections + 2 for context in self.decodes]
        ends += [new + context for new, context in self.prefills]
        return sum((end // block_size + 1) * block_size for end in ends)

    def fits(self, limits: Limits) -> bool:
        """Can the engine run it as one step each, without a preemption?"""
        longest = max(
            [context + self.decode_steps + 3 * self.injections + 2 for context in self.decodes]
            + [new + context + 1 for new, context in self.prefills]
        )
        # Chunks share a step with the decodes and with each other.
        together = len(self.decodes) + sum(new for new, _ in self.prefills)
        return (
            len(self.decodes) + len(self.prefills) <= limits.max_num_seqs
            and together <= limits.max_num_batched_tokens
            and longest <= limits.max_model_len
            and self.kv_tokens(limits.block_size) <= 0.9 * limits.kv_tokens
        )


def scenes(limits: Limits) -> list[Scene]:
    """The designed grid for an engine, by level: 0 alone makes a model, 1 and 2 refine it."""
    t, s = limits.max_num_batched_tokens, limits.max_num_seqs
    longest = limits.max_model_len - 64
    block = limits.block_size

    def whole(tokens: float) -> int:
        return max(0, int(tokens)) // block * block

    found: list[Scene] = []

    def split(new: float, at: float) -> tuple[int, int]:
        """(sequences, tokens of each) for `new` tokens: more than a sequence holds come from several."""
        sequences = max(1, math.ceil(new / max(2, longest - at)))
        return sequences, max(2, int(new / sequences))

    def prefill(level: int, new: float, context: float = 0, chunks: int = 1) -> None:
        at = whole(context)
        parts, size = split(new, at)
        chunks *= parts
        name = f"prefill {chunks}x{size} at {at}" if chunks > 1 else f"prefill {size} at {at}"
        found.append(Scene(name, level, prefills=((size, at),) * chunks, injections=2))

    def decode(level: int, batch: float, context: float) -> None:
        n, at = max(1, int(batch)), whole(context)
        found.append(Scene(f"decode {n} at {at}", level, decodes=(at,) * n, decode_steps=5))

    def spread(level: int, batch: float, low: float, high: float, share: float = 0.25) -> None:
        n, a, b = max(2, int(batch)), whole(low), whole(high)
        many = max(1, round(n * share))
        found.append(
            Scene(
                f"decode {n - many} at {a} and {many} at {b}",
                level,
                decodes=(a,) * (n - many) + (b,) * many,
                decode_steps=5,
            )
        )

    def mixed(level: int, batch: float, context: float, new: float, at: float = 0) -> None:
        n, c, p = max(1, int(batch)), whole(context), whole(at)
        parts, size = split(max(2, min(new, t - n)), p)
        found.append(
            Scene(
                f"mixed {n} at {c} with {parts}x{size} at {p}",
                level,
                decodes=(c,) * n,
                decode_steps=2,
                prefills=((size, p),) * parts,
                injections=3,
            )
        )

    long = min(longest, limits.kv_tokens // 2)
    # The longest context at which a full batch still fits the KV cache.
    full = min(longest, int(0.8 * limits.kv_tokens / s) - 32)

    prefill(0, t)
    prefill(0, t / 8)
    prefill(0, 16)
    prefill(0, t / 2, long - t / 2)
    decode(0, 1, 128)
    decode(0, s / 4, 256)
    decode(0, s, 64)
    decode(0, s, full)
    mixed(0, s / 4, 256, t / 4)

    for new in (t / 2, t / 4, t / 16, t / 32, 4, 8):
        prefill(1, new)
    prefill(1, t / 8, long / 2)
    prefill(1, 32, long - 64)
    prefill(1, t / 8, 0, chunks=4)
    for batch in (2, 4, 8, s / 8, s / 2):
        decode(1, batch, 256)
    decode(1, 1, long - 32)
    decode(1, s / 4, long / 2)
    spread(1, s / 2, 64, long / 2)
    mixed(1, s / 2, full / 2, t / 2)
    mixed(1, s / 8, long / 4, t / 8, long / 2)
    mixed(1, s / 4, 128, 16)

    for new in (t * 3 / 4, t * 3 / 8, t * 3 / 16, t * 3 / 32, t * 3 / 64, t / 64, 2, 6, 12, 24):
        prefill(2, new)
    for at in (long / 4, long * 3 / 4):
        prefill(2, t / 4, at)
    prefill(2, 16, 256, chunks=8)
    for batch in (3, 6, 12, 16, 24, s * 3 / 8, s * 3 / 4):
        decode(2, batch, 128)
        decode(2, batch, 512)
    spread(2, s / 4, 64, long - 32, share=0.1)
    spread(2, s / 2, full / 2, full, share=0.5)
    mixed(2, s * 3 / 4, full / 2, t / 16)
    mixed(2, 4, long / 2, t)
    mixed(2, s, 64, t)

    # Two names for one scene are one scene, at its earliest level.
    unique: dict[tuple[object, ...], Scene] = {}
    for one in found:
        unique.setdefault((one.decodes, one.prefills), one)
    return [one for one in unique.values() if one.fits(limits)]


def random_scene(limits: Limits, number: int) -> Scene:
    """The `number`-th scene of an endless supply that looks like serving: mixed lengths, uneven contexts."""
    rng = np.random.default_rng([7919, number])
    block = limits.block_size
    for _ in range(100):
        batch = int(np.exp(rng.uniform(0, np.log(limits.max_num_seqs + 0.999))))
        median = np.exp(rng.uniform(np.log(32), np.log(limits.max_model_len / 2)))
        contexts = np.minimum(median * np.exp(rng.normal(0, 0.7, batch)), limits.max_model_len - 64)
        room = limits.max_num_batched_tokens - batch
        chunks: list[tuple[int, int]] = []
        for _ in range(int(rng.choice([0, 1, 1, 2]))):
            new = int(np.exp(rng.uniform(np.log(2), np.log(max(3, room)))))
            context = int(rng.choice([0, 0, 1]) * rng.uniform(0, limits.max_model_len / 2))
            chunks.append((max(2, new), context // block * block))
        scene = Scene(
            f"random {number}",
            LEVELS,
            decodes=tuple(int(c) // block * block for c in contexts),
            decode_steps=3,
            prefills=tuple(chunks),
        )
        if scene.fits(limits):
            return scene
    return Scene(f"random {number}", LEVELS, decodes=(0,), decode_steps=3)


def order(grid: list[Scene], repeats: int) -> Iterator[tuple[Scene, int]]:
    """(scene, repeat) in waves: wave w measures level l for the (w - l)-th time.

    So each wave repeats all earlier levels and adds one: stopping early leaves the best grid for that time,
    and the repeats of a scene lie minutes apart, as a machine's moods do.
    """
    levels = max((scene.level for scene in grid), default=0) + 1
    for wave in range(levels + repeats - 1):
        for scene in grid:
            repeat = wave - scene.level
            if 0 <= repeat < repeats:
                yield scene, repeat


def serving_trace(
    limits: Limits, requests: int, rate_per_s: float, seed: int
) -> list[tuple[int, int, int, int]]:
    """A short random serving run: Poisson arrivals, lognormal lengths. Rows as `record.py` serves them:
    (arrival_ns, prompt tokens, output tokens, priority)."""
    rng = np.random.default_rng([104729, seed])
    arrivals = np.cumsum(rng.exponential(1 / rate_per_s, requests))
    arrivals -= arrivals[0]
    prompt_median, output_median = serving_medians(limits)
    prompts = np.clip(
        prompt_median * np.exp(rng.normal(0, 0.9, requests)), 4, limits.max_model_len * 0.7
    )
    outputs = np.clip(
        output_median * np.exp(rng.normal(0, 0.7, requests)), 2, limits.max_model_len * 0.25
    )
    return [
        (int(a * 1e9), int(p), int(o), 0)
        for a, p, o in zip(arrivals, prompts, outputs, strict=True)
    ]


def serving_medians(limits: Limits) -> tuple[float, float]:
    """(prompt, output) tokens in the middle of `serving_trace`'s requests."""
    return min(512.0, limits.max_model_len / 10), min(96.0, limits.max_model_len / 24)
