"""Writes down a replica's steps and what each request lived through, column by column."""

from __future__ import annotations

from array import array
from collections import Counter

import numpy as np

from vsim.sim.run import (
    ABORTED,
    FINISHED,
    OPTIONAL_REQUEST_COLUMNS,
    OPTIONAL_STEP_COLUMNS,
    REJECTED,
    REQUEST_COLUMNS,
    STEP_COLUMNS,
    UNFINISHED,
    Column,
)
from vsim.sim.step import Step, StepOutput
from vsim.traces.trace import Trace

# array typecodes of the step columns' dtypes
_TYPECODE = {"int64": "q", "int32": "i"}


class Recorder:
    """Per-request marks (lists of length n) and per-step columns of one simulation. Times in ns."""

    def __init__(self, trace: Trace, num_replicas: int = 1) -> None:
        n = len(trace)
        self.trace = trace
        self.replica = [-1] * n if num_replicas > 1 else None
        self.step_replica = array("i") if num_replicas > 1 else None
        self.first_scheduled_ns = [-1] * n
        self.first_token_ns = [-1] * n
        self.last_token_ns = [-1] * n
        self.finish_ns = [-1] * n
        self.output_tokens = [0] * n
        self.cached_tokens = [0] * n
        self.preemptions = [0] * n
        self.recomputed_tokens = [0] * n
        self.status = [UNFINISHED] * n
        # Their clients leave early: load like any other, but no completion and in no percentile.
        aborted = trace.aborted
        self.aborted = frozenset(() if aborted is None else np.flatnonzero(aborted).tolist())
        self.reason = [-1] * n
        self.reasons: list[str] = []
        self.loaded_blocks = self.stored_blocks = 0
        self.itl: Counter[int] = Counter()
        # Tokens of a preempted request that had been computed once: computing them again is the tax.
        self._computed_before: dict[int, int] = {}
        self._computed = [0] * n  # tokens with KV, what is in flight included
        self.steps = {name: array(_TYPECODE[kind]) for name, kind in STEP_COLUMNS.items()}
        # Request, when it was preempted, when it ran again (ns), three numbers a preemption.
        self.preemption_spans = array("q")
        self._out_since: dict[int, int] = {}
        self.emitted = array("i")  # tokens per recorded step: the optional column of that name
        self._last_emitted = 0

    def scheduled(self, step: Step, now: int) -> None:
        """`schedule()` returned `step` at `now`."""
        for victim in step.preempted:
            self.preemptions[victim] += 1
            before = self._computed_before.get(victim, 0)
            self._computed_before[victim] = max(before, self._computed[victim])
            self._out_since.setdefault(victim, now)
        if self._out_since:
            for index in step.requests:
                out = self._out_since.pop(index, None)
                if out is not None:
                    self.preemption_spans.extend((index, out, now))
        for index in step.new:
            self.first_scheduled_ns[index] = now
        if step.new:
            admitted = set(step.new)
            for index, computed in zip(step.requests, step.num_computed, strict=True):
                if index in admitted:
                    self.cached_tokens[index] = computed
        for index, tokens, computed in zip(
            step.requests, step.num_tokens, step.num_computed, strict=True
        ):
            done = self._computed[index] = computed + tokens
            if self._computed_before:
                before = self._computed_before.get(index, 0)
                if before > computed:
                    self.recomputed_tokens[index] += min(before, done) - computed
                if done >= before:
                    self._computed_before.pop(index, None)

    def completed(self, output: StepOutput, now: int) -> None:
        """A step's outputs were processed at `now`."""
        last = self.last_token_ns
        gaps = self.itl
        self._last_emitted = len(output.emitted)
        for index in output.emitted:
            self.output_tokens[index] += 1
            before = last[index]
            if before < 0:
                self.first_token_ns[index] = now
            elif index not in self.aborted:
                gaps[now - before] += 1
            last[index] = now
        for index in output.finished:
            self.finish_ns[index] = now
            self.status[index] = ABORTED if index in self.aborted else FINISHED

    def offloaded(self, loaded_blocks: int, stored_blocks: int) -> None:
        """Blocks that a step's start put on the way between GPU and CPU (V1's offload tier)."""
        self.loaded_blocks += loaded_blocks
        self.stored_blocks += stored_blocks

    def rejected(self, index: int, reason: str, now: int) -> None:
        """The front end (or V0's scheduler) refused the request."""
        if reason not in self.reasons:
            self.reasons.append(reason)
        self.reason[index] = self.reasons.index(reason)
        self.status[index] = REJECTED
        self.finish_ns[index] = now

    def step(self, row: dict[str, int], replica: int = 0) -> None:
        """One row of `STEP_COLUMNS`."""
        if self.step_replica is not None:
            self.step_replica.append(replica)
        for name, column in self.steps.items():
            column.append(row[name])
        self.emitted.append(self._last_emitted)

    def request_columns(self, client: dict[str, Column]) -> dict[str, Column]:
        trace, n = self.trace, len(self.trace)
        zeros = np.zeros(n, dtype=np.int32)
        given: dict[str, object] = {
            "request": np.arange(n),
            **client,
            "first_scheduled_ns": self.first_scheduled_ns,
            "first_token_ns": self.first_token_ns,
            "finish_ns": self.finish_ns,
            "prompt_tokens": trace.prompt_tokens,
            "output_tokens": self.output_tokens,
            "cached_tokens": self.cached_tokens,
            "preemptions": self.preemptions,
            "recomputed_tokens": self.recomputed_tokens,
            "status": self.status,
            "reason": self.reason,
            "tenant": zeros if trace.tenant is None else trace.tenant,
            "priority": zeros if trace.priority is None else trace.priority,
        }
        dtypes = dict(REQUEST_COLUMNS)
        if self.replica is not None:
            given["replica"] = self.replica
            dtypes["replica"] = OPTIONAL_REQUEST_COLUMNS["replica"]
        return {name: np.asarray(given[name], dtype=kind) for name, kind in dtypes.items()}

    def step_columns(self) -> dict[str, Column]:
        dtypes = {**STEP_COLUMNS, **OPTIONAL_STEP_COLUMNS}
        columns = {**self.steps, "emitted": self.emitted}
        if self.step_replica is not None:
            columns["replica"] = self.step_replica
        return {
            name: np.frombuffer(column, dtype=dtypes[name]).copy()
            if len(column)
            else np.empty(0, dtype=dtypes[name])
            for name, column in columns.items()
        }

    def spans(self) -> np.ndarray:
        """`Run.preemption_spans`: shape (preemptions that ended, 3)."""
        return np.array(self.preemption_spans, dtype=np.int64).reshape(-1, 3)

    def gaps(self) -> tuple[np.ndarray, np.ndarray]:
        """All inter-token gaps as (distinct values ascending, counts)."""
        values = np.array(sorted(self.itl), dtype=np.int64)
        return values, np.array([self.itl[int(v)] for v in values], dtype=np.int64)
