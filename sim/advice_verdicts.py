"""Whether a suspect is in everyone's way: the trace replayed without it, and the tails of all others.

Alone first. Two culprits can hide each other, though: without one of two bursts the other still makes the
tail. So whoever was not guilty alone is tried once more with every other suspect taken out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from vsim.sim.advice_suspects import Suspect
from vsim.sim.run import FINISHED, Run
from vsim.traces.trace import Int64Array

TAIL = 0.05  # the slowest share of requests, whose mean is what a change must shorten
BLAMED = 0.20  # others' tail must shrink by so much without a suspect


@dataclass(frozen=True, slots=True)
class Tails:
    """Mean of the slowest 5 %, ns, and the share of prompt tokens found in the prefix cache."""

    ttft_ns: float
    e2el_ns: float
    hits: float

    @property
    def product(self) -> float:
        return max(self.ttft_ns, 1.0) * max(self.e2el_ns, 1.0)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A suspect removed: tails of all others with it and without it.

    `others`: how many other suspects were taken out both times.
    """

    suspect: Suspect
    before: Tails
    after: Tails
    others: int = 0

    @property
    def guilty(self) -> bool:
        longest = min(
            self.after.ttft_ns / max(self.before.ttft_ns, 1.0),
            self.after.e2el_ns / max(self.before.e2el_ns, 1.0),
        )
        return longest <= 1 - BLAMED


def verdicts(
    base: Run, suspects: Sequence[Suspect], replay: Callable[[Int64Array], Run]
) -> list[Verdict]:
    """One for each suspect tried. `base`: everybody; `replay(rows)`: only those rows of it."""
    all_rows = np.arange(base.num_requests)

    def alone(suspect: Suspect) -> Verdict:
        kept = np.setdiff1d(all_rows, suspect.rows)
        return Verdict(suspect, *pair(base, all_rows, replay(kept), kept))

    found = [alone(s) for s in suspects if not _is_set(s)]
    if not any(v.guilty for v in found if v.suspect.kind == "prompt"):
        # Many alike, of which no single one matters.
        sets = [alone(s) for s in suspects if _is_set(s)]
        if any(v.guilty for v in sets):
            found = [*sets, *(v for v in found if v.suspect.kind != "prompt")]
    if len(found) > 1 and not all(v.guilty for v in found):
        found = _beside(base, suspects, found, replay)
    return found


def _is_set(suspect: Suspect) -> bool:
    """Several giant prompts together, which were suspected one by one already."""
    return suspect.kind == "prompt" and suspect.count > 1


def _beside(
    base: Run,
    suspects: Sequence[Suspect],
    alone: list[Verdict],
    replay: Callable[[Int64Array], Run],
) -> list[Verdict]:
    """`alone`, where those not guilty are judged again among nobody but the unsuspected."""
    every = np.unique(np.concatenate([s.rows for s in suspects]))
    rest = np.setdiff1d(np.arange(base.num_requests), every)
    if not len(rest):
        return alone
    clean = replay(rest)
    if not Verdict(alone[0].suspect, *pair(base, np.arange(base.num_requests), clean, rest)).guilty:
        return alone
    found = []
    for one in alone:
        if not one.guilty:
            rows = np.union1d(rest, one.suspect.rows)
            with_it = replay(rows)
            tails = pair(with_it, rows, clean, rest)
            again = Verdict(one.suspect, *tails, others=len(alone) - 1)
            found.append(again if again.guilty else one)
        else:
            found.append(one)
    return found


def pair(one: Run, one_rows: Int64Array, two: Run, two_rows: Int64Array) -> tuple[Tails, Tails]:
    """Tails of the requests that finished in both runs; `…_rows` (ascending) say who a run's rows are."""
    _, here, there = np.intersect1d(one_rows, two_rows, assume_unique=True, return_indices=True)
    both = (one.requests["status"][here] == FINISHED) & (two.requests["status"][there] == FINISHED)
    return _tails(one, here[both]), _tails(two, there[both])


def _tails(run: Run, rows: Int64Array) -> Tails:
    columns = run.requests
    sent = columns["sent_ns"][rows]
    prompt = int(columns["prompt_tokens"][rows].sum())
    return Tails(
        ttft_ns=_slowest(columns["first_token_ns"][rows] - sent),
        e2el_ns=_slowest(columns["finish_ns"][rows] - sent),
        hits=float(columns["cached_tokens"][rows].sum() / prompt) if prompt else 0.0,
    )


def _slowest(values: Int64Array) -> float:
    if not len(values):
        return 0.0
    count = max(1, math.ceil(TAIL * len(values)))
    return float(np.sort(values)[-count:].mean())
