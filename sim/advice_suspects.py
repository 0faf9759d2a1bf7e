"""Who might be in everyone's way: prompts far larger than the rest, and a tenant's burst."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from vsim.sim.run import FINISHED, Run
from vsim.sim.text import number
from vsim.traces.trace import Int64Array

GIANT = 8.0  # times the median of computed prompt tokens
GIANT_TOKENS = 2048  # and at least so many: below, one step takes it
MOST_GIANTS = 0.01  # of all requests; more than that are the load itself
EACH = 3  # giants that are suspected each on its own, before all together
WINDOWS = 50  # of equal length over the trace's span, in which tenants are counted
BURST = 2.0  # times a tenant's own mean count
SIGMAS = 6.0  # and so many standard deviations of a Poisson count above it
FEWEST = 10  # requests of a burst
MAJORITY = 0.5  # of all requests in the burst, and in its busiest window


@dataclass(frozen=True, slots=True)
class Suspect:
    """Some requests (rows of the run) that others may have suffered from."""

    kind: str  # "prompt" or "tenant"
    name: str  # the tenant's, or the sizes of the prompts
    rows: Int64Array
    requests: tuple[int, ...]  # as the user knows them: rows of the trace
    from_s: float = 0.0  # of a burst, after the trace's first arrival
    to_s: float = 0.0

    @property
    def count(self) -> int:
        return len(self.rows)

    @property
    def words(self) -> str:
        """Subject and verb of a sentence."""
        if self.kind == "tenant":
            return (
                f"Tenant {self.name} sent {number(self.count)} requests in a burst "
                f"(from {self.from_s:.0f} s to {self.to_s:.0f} s after the first arrival) and is"
            )
        if self.count == 1:
            return f"Request {self.requests[0]} with its prompt of {self.name} tokens is"
        named = ", ".join(map(str, self.requests[:3]))
        more = f" and {self.count - 3} more" if self.count > 3 else ""
        return f"Requests {named}{more} with prompts of {self.name} tokens are"

    def shifted(self, rows: int, seconds: float) -> Suspect:
        """The same, where the run began at that row and second of the trace."""
        return dataclasses.replace(
            self,
            requests=tuple(r + rows for r in self.requests),
            from_s=self.from_s + seconds,
            to_s=self.to_s + seconds,
        )


def suspects(run: Run) -> list[Suspect]:
    """The largest prompts one by one, all giant ones together, the burst of each tenant that has one.

    By size and count only; whether anyone suffered is for a replay without them to say.
    """
    prompts = _prompts(run)
    giant = np.unique(np.concatenate([np.empty(0, dtype=np.int64), *(s.rows for s in prompts)]))
    return [*prompts, *_tenants(run, giant)]


def _prompts(run: Run) -> list[Suspect]:
    columns = run.requests
    done = columns["status"] == FINISHED
    if not done.any():
        return []
    tokens = np.where(done, columns["prompt_tokens"] - columns["cached_tokens"], 0)
    median = float(np.median(tokens[done]))
    giant = np.flatnonzero(tokens >= max(GIANT * median, GIANT_TOKENS))
    if not len(giant) or len(giant) > max(1, MOST_GIANTS * len(tokens)):
        # Many long prompts: only one that dwarfs even these can be told apart.
        giant = np.flatnonzero(tokens >= GIANT * np.percentile(tokens[done], 99))
        giant = giant[tokens[giant] >= GIANT_TOKENS]
        if not len(giant) or len(giant) > max(1, MOST_GIANTS * len(tokens)):
            return []
    giant = giant[np.lexsort((giant, -tokens[giant]))]
    sets = [*np.split(giant[:EACH], len(giant[:EACH])), *([giant] if len(giant) > 1 else [])]
    found = []
    for rows in sets:
        requests = tuple(columns["request"][rows].tolist())
        size = ", ".join(number(int(tokens[row])) for row in rows[:3].tolist())
        found.append(Suspect("prompt", size, np.sort(rows), requests))
    return found


def _tenants(run: Run, giant: Int64Array) -> list[Suspect]:
    """Bursts, without the giant prompts in them: those are suspects of their own."""
    tenant, arrival = run.requests["tenant"], run.requests["arrival_ns"]
    first, span = int(arrival.min()), int(arrival.max() - arrival.min())
    codes = np.unique(tenant)
    if len(codes) < 2 or span == 0:
        return []
    window = np.minimum((arrival - first) * WINDOWS // (span + 1), WINDOWS - 1)
    everyone = np.bincount(window, minlength=WINDOWS)
    found: list[tuple[int, Suspect]] = []
    for code in codes.tolist():
        mine = tenant == code
        counts = np.bincount(window[mine], minlength=WINDOWS)
        mean = counts.mean()
        high = (counts >= BURST * mean) & (counts >= mean + SIGMAS * math.sqrt(mean))
        high &= counts >= MAJORITY * np.maximum(everyone, 1)
        peak = int(np.where(high, counts, 0).argmax())
        if not high[peak]:
            continue
        # The burst is the run of busy windows around its peak: its flanks may be less clear-cut.
        busy = counts >= BURST * mean
        low, top = peak, peak
        while low and busy[low - 1]:
            low -= 1
        while top + 1 < WINDOWS and busy[top + 1]:
            top += 1
        rows = np.flatnonzero(mine & (window >= low) & (window <= top))
        # Where everybody sends more at once, one window may be mostly one tenant's by chance.
        share = len(rows) / everyone[low : top + 1].sum()
        rows = np.setdiff1d(rows, giant)
        if len(rows) < FEWEST or share < MAJORITY:
            continue
        name = run.tenant_names[code] if 0 <= code < len(run.tenant_names) else f"{code}"
        seconds = span / WINDOWS / 1e9
        requests = tuple(run.requests["request"][rows].tolist())
        found.append(
            (
                -len(rows),
                Suspect("tenant", name, rows, requests, low * seconds, (top + 1) * seconds),
            )
        )
    return [one for _, one in sorted(found, key=lambda item: (item[0], item[1].name))[:3]]
