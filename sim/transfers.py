"""How long copies between GPU and CPU take: two channels, one per direction, one copy at a time each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from vsim.sim.step import Transfers


@dataclass(slots=True)
class Outcome:
    """What a step's start did on the channels."""

    start: (
        float  # when the step can start: later than asked where it had to wait for flushed stores
    )
    ended: list[int] = field(default_factory=list)  # jobs that ended by then, ascending
    loads: dict[int, int] = field(default_factory=dict)  # request -> blocks submitted
    stores: dict[int, int] = field(default_factory=dict)  # request -> blocks queued
    loaded: list[int] = field(default_factory=list)  # requests whose load is among `ended`


class CopyChannels:
    """The worker's side of the offload tier on a clock (spec 9.1, 9.2).

    `load_end`, `store_end` say when a copy of so many blocks ends that starts then. With each step that starts, also one
    without requests: the stores queued by the step before are submitted, and this step's that must be
    flushed; then the loads; then whatever has ended is reported.
    """

    def __init__(
        self,
        load_end: Callable[[float, int], float],
        store_end: Callable[[float, int], float],
    ) -> None:
        self._load_end = load_end
        self._store_end = store_end
        self._load_free = 0.0
        self._store_free = 0.0
        self._running: dict[int, tuple[float, int | None]] = {}  # job -> (end, request if a load)
        self._queued: list[tuple[int, int]] = []  # (job, blocks) of stores

    @property
    def busy(self) -> bool:
        return bool(self._running or self._queued)

    def start_step(self, transfers: Transfers, now: float) -> Outcome:
        """A step wants to start at `now` (seconds)."""
        outcome = Outcome(now)
        flush = transfers.flush
        for number in flush:
            if number in transfers.stores:
                self._queue_store(number, transfers, outcome)
        for number, blocks in self._queued:
            self._store_free = self._store_end(max(now, self._store_free), blocks)
            self._running[number] = (self._store_free, None)
        self._queued = []
        for number in flush:
            if number in self._running:
                now = max(now, self._running[number][0])
        for number, (request, blocks) in transfers.loads.items():
            outcome.loads[request] = blocks
            self._load_free = self._load_end(max(now, self._load_free), blocks)
            self._running[number] = (self._load_free, request)
        for number in transfers.stores:
            if number not in flush:
                self._queue_store(number, transfers, outcome)
        outcome.start = now
        # Half a nanosecond is no time: float sums of the same copies may differ by that much.
        outcome.ended = sorted(n for n, (end, _) in self._running.items() if end <= now + 1e-12)
        for number in outcome.ended:
            _, loaded = self._running.pop(number)
            if loaded is not None:
                outcome.loaded.append(loaded)
        return outcome

    def _queue_store(self, number: int, transfers: Transfers, outcome: Outcome) -> None:
        request, blocks = transfers.stores[number]
        outcome.stores[request] = outcome.stores.get(request, 0) + blocks
        self._queued.append((number, blocks))
