"""Writes down a fleet's run: as `sim.recorder`, and what a failure undoes."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from vsim.sim.recorder import Recorder
from vsim.sim.run import ABORTED, OPTIONAL_REQUEST_COLUMNS, Column, RunEvent
from vsim.sim.step import StepOutput
from vsim.traces.trace import Trace


class FleetRecorder(Recorder):
    """Marks of the attempt that ended a request; what earlier attempts had done is taken back and counted.

    `one_way_ns`: per request, how long its messages travel between client and fleet (None: no network).
    `breaks`: replicas fail in this run; `retries`: and requests are tried again.
    """

    def __init__(
        self,
        trace: Trace,
        num_replicas: int,
        one_way_ns: list[int] | None = None,
        breaks: bool = False,
        retries: bool = False,
    ) -> None:
        super().__init__(trace, num_replicas)
        self.one_way_ns = one_way_ns
        self.attempts: list[int] | None = [0] * len(trace) if retries else None
        self.routed_ns: list[int] | None = None
        self.prefill_replica: list[int] | None = None
        self.handed_over_ns: list[int] = []
        self.events: list[RunEvent] = []
        self.lost_tokens = 0  # prompt and output tokens computed for attempts that failed
        self.lost_output_tokens = 0
        # Gaps of requests under way: those of a failed attempt are in no statistic.
        self._gaps: dict[int, list[int]] | None = defaultdict(list) if breaks else None

    def pools(self) -> None:
        """Prefill and decode are different replicas in this run."""
        self.prefill_replica = [-1] * len(self.trace)
        self.handed_over_ns = [-1] * len(self.trace)

    def event(self, now: int, kind: str, replica: int = -1, text: str = "") -> None:
        self.events.append(RunEvent(now, kind, replica, text))

    def completed(self, output: StepOutput, now: int) -> None:
        if self._gaps is not None:
            for index in output.emitted:
                before = self.last_token_ns[index]
                if before >= 0 and index not in self.aborted:
                    self._gaps[index].append(now - before)
        super().completed(output, now)
        if self._gaps is not None:
            for index in output.finished:
                self._gaps.pop(index, None)

    def broke_off(self, index: int) -> None:
        """The request's attempt ended without an answer: its KV and its tokens are gone."""
        for gap in () if self._gaps is None else self._gaps.pop(index, ()):
            self.itl[gap] -= 1
            if not self.itl[gap]:
                del self.itl[gap]
        self.lost_tokens += self._computed[index]
        self.lost_output_tokens += self.output_tokens[index]
        self._computed[index] = 0
        self._computed_before.pop(index, None)
        self._out_since.pop(index, None)

    def again(self, index: int) -> None:
        """It starts over elsewhere: the marks will be those of the next attempt."""
        self.first_scheduled_ns[index] = -1
        self.first_token_ns[index] = -1
        self.last_token_ns[index] = -1
        self.output_tokens[index] = 0
        self.cached_tokens[index] = 0
        if self.routed_ns is not None:
            self.routed_ns[index] = -1

    def gave_up(self, index: int, reason: str, now: int) -> None:
        """Nobody tries again. Tokens that had come stay counted, as a client would count them."""
        if reason not in self.reasons:
            self.reasons.append(reason)
        self.reason[index] = self.reasons.index(reason)
        self.status[index] = ABORTED
        self.finish_ns[index] = now

    def request_columns(self, client: dict[str, Column]) -> dict[str, Column]:
        columns = super().request_columns(client)
        kinds = OPTIONAL_REQUEST_COLUMNS
        if self.routed_ns is not None:
            columns["routed_ns"] = np.asarray(self.routed_ns, dtype=kinds["routed_ns"])
        if self.prefill_replica is not None:
            for name in ("prefill_replica", "handed_over_ns"):
                columns[name] = np.asarray(getattr(self, name), dtype=kinds[name])
        if self.attempts is not None:
            columns["attempts"] = np.asarray(self.attempts, dtype=kinds["attempts"])
        if self.one_way_ns is not None:
            way = np.asarray(self.one_way_ns, dtype=kinds["network_ns"])
            columns["network_ns"] = way
            # What the client sees, it sees so much later.
            for name in ("first_token_ns", "finish_ns"):
                columns[name] = np.where(columns[name] >= 0, columns[name] + way, columns[name])
        return columns
