"""How many replicas there should be: Kubernetes' horizontal pod autoscaler, or a plain threshold.

Facts about the autoscaler are those of its documentation and of kube-controller-manager's
pkg/controller/podautoscaler (replica_calculator.go, horizontal.go; v1.33). No clock and no SimPy here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

METRICS = ("waiting_per_gpu", "kv_usage", "in_flight_per_replica")
Metric = Literal["waiting_per_gpu", "kv_usage", "in_flight_per_replica"]
# The autoscaler's default policies look back so far.
POLICY_PERIOD_S = 15.0


@dataclass(frozen=True, slots=True)
class Autoscale:
    """`rule` "hpa": replicas x metric / `target`. "threshold": `step` more above `target`, `step` fewer
    below `scale_in_below` (None: half of it).

    The metric is what was scraped last, every `scrape_s`, and known `scrape_delay_s` later. Decisions are
    taken every `sync_s`. A new replica serves after `cold_start_s`; one too many finishes what it has.
    Going down takes the largest recommendation of the last `scale_down_window_s`, going up the smallest
    of the last `scale_up_window_s`. `tolerance` and the `max_up_…` limits, within 15 s, are the
    autoscaler's own and its defaults.
    """

    min_replicas: int
    max_replicas: int
    target: float
    rule: Literal["hpa", "threshold"] = "hpa"
    metric: Metric = "waiting_per_gpu"
    scale_in_below: float | None = None
    step: int = 1
    cold_start_s: float = 0.0
    sync_s: float = 15.0
    scrape_s: float = 15.0
    scrape_delay_s: float = 0.0
    scale_down_window_s: float = 300.0
    scale_up_window_s: float = 0.0
    tolerance: float = 0.1
    max_up_pods: int = 4
    max_up_percent: float = 100.0


@dataclass(slots=True)
class Autoscaler:
    """Decides for one fleet; keeps its recommendations, as the windows need them."""

    spec: Autoscale
    _recommended: list[tuple[float, int]] = field(default_factory=list)  # (when, replicas)
    _changed: list[tuple[float, int]] = field(default_factory=list)  # (when, more or fewer)

    def decide(
        self, now_s: float, current: int, ready: Sequence[float | None], unready: int
    ) -> int:
        """Replicas wanted, given `current` of them: `ready` ones with their metric (None: not scraped yet)
        and `unready` ones, which are starting or down."""
        spec = self.spec
        if not self._recommended:
            # When it first looks, the number it finds counts as recommended.
            self._recommended.append((now_s, current))
        if spec.rule == "hpa":
            wanted = self._by_ratio(current, ready, unready)
        else:
            wanted = self._by_threshold(current, ready, unready)
        wanted = self._stabilized(now_s, current, wanted)
        if spec.rule == "hpa":
            wanted = min(wanted, self._most(now_s, current))
        wanted = max(spec.min_replicas, min(spec.max_replicas, wanted))
        if wanted != current:
            self._changed.append((now_s, wanted - current))
        return wanted

    def _by_ratio(self, current: int, ready: Sequence[float | None], unready: int) -> int:
        target, tolerance = self.spec.target, self.spec.tolerance
        known = [value for value in ready if value is not None]
        missing = len(ready) - len(known)
        if not known:
            return current  # no metric, no opinion
        ratio = sum(known) / len(known) / target
        up = ratio > 1
        if not (unready and up) and not missing:
            return current if abs(1 - ratio) <= tolerance else _ceil(ratio * len(known))
        # Not to go too far: who is not there yet counts as idle on the way up, who was not asked as on
        # target on the way down.
        values = list(known)
        if missing:
            values += [0.0 if up else target] * missing
        if unready and up:
            values += [0.0] * unready
        again = sum(values) / len(values) / target
        if abs(1 - again) <= tolerance or (again > 1) != up:
            return current
        wanted = _ceil(again * len(values))
        return current if (wanted > current) != up else wanted

    def _by_threshold(self, current: int, ready: Sequence[float | None], unready: int) -> int:
        spec = self.spec
        known = [value for value in ready if value is not None]
        if not known:
            return current
        # Replicas that are coming will share the queue; their KV cache says nothing yet.
        over = len(known) if spec.metric == "kv_usage" else max(1, len(ready) + unready)
        value = sum(known) / over
        low = spec.target / 2 if spec.scale_in_below is None else spec.scale_in_below
        if value > spec.target:
            return current + spec.step
        return current - spec.step if value < low else current

    def _stabilized(self, now_s: float, current: int, wanted: int) -> int:
        spec = self.spec
        up = down = wanted
        for when, replicas in self._recommended:
            if when > now_s - spec.scale_up_window_s:
                up = min(up, replicas)
            if when > now_s - spec.scale_down_window_s:
                down = max(down, replicas)
        longest = max(spec.scale_up_window_s, spec.scale_down_window_s)
        self._recommended = [r for r in self._recommended if r[0] > now_s - longest]
        self._recommended.append((now_s, wanted))
        return min(max(current, up), down)

    def _most(self, now_s: float, current: int) -> int:
        """Most replicas that the policies for going up allow now: the more generous of the two."""
        self._changed = [c for c in self._changed if c[0] > now_s - POLICY_PERIOD_S]
        before = current - sum(count for _, count in self._changed)
        by_percent = _ceil(before * (1 + self.spec.max_up_percent / 100))
        return max(current, before + self.spec.max_up_pods, by_percent)


def _ceil(value: float) -> int:
    # As the autoscaler's, in floating point: 3 x 1.1 / 1.1 may be a hair above 3.
    return math.ceil(value)
