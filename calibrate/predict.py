"""Predict a validation case: its trace on its engine, on the clock of a step model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from vsim.calibrate.case import Case, Measured
from vsim.calibrate.follow import due_ns
from vsim.models.step import StepModel, StepShape, lockstep_seconds
from vsim.sim.cluster import ReplicaSpec, simulate_cluster
from vsim.sim.lockstep import Int64Array, LockstepRun, QueueBalancer, run_lockstep
from vsim.sim.router import ReplicaView
from vsim.traces.trace import Trace, TraceRequest

NS = 1_000_000_000


def predict(
    case: Case, model: StepModel, frontend_s: float, stop_after_first: int | None = None
) -> LockstepRun:
    """Simulate `case`. Data-parallel ranks that share experts step together; ranks of a dense model run free.

    Requests are routed as vLLM routes them. `waves` is empty where ranks run free: see `parts`.
    """
    pieces = parts(case, model, frontend_s)
    if len(pieces) == 1:
        return predict_part(case, model, frontend_s, stop_after_first)
    n = len(case.trace)
    names = ("first_scheduled_ns", "first_token_ns", "finish_ns", "preemptions", "rank")
    columns = {name: np.full(n, -1, dtype=np.int64) for name in names}
    refused: dict[int, str] = {}
    early = None
    for rank, (part, rows) in enumerate(pieces):
        seen = None if stop_after_first is None else int((rows < stop_after_first).sum())
        run = predict_part(part, model, frontend_s, seen)
        for name, column in columns.items():
            column[rows] = rank if name == "rank" else getattr(run, name)
        refused |= {int(rows[index]): why for index, why in run.refused.items()}
        early = early or run.ended_early
    return LockstepRun(
        columns["first_scheduled_ns"],
        columns["first_token_ns"],
        columns["finish_ns"],
        columns["preemptions"],
        columns["rank"],
        refused=refused,
        ended_early=early,
    )


def predict_part(
    case: Case, model: StepModel, frontend_s: float, stop_after_first: int | None = None
) -> LockstepRun:
    """Simulate one of `parts(case)`: ranks that step together, or a single one."""

    def wave_ns(shapes: Sequence[StepShape]) -> tuple[int, int]:
        host = max(model.host_seconds(shape) for shape in shapes)
        return round(host * NS), max(1, round(lockstep_seconds(model, shapes) * NS))

    return run_lockstep(
        case.trace,
        case.scheduler,
        wave_ns,
        ranks=case.ranks,
        due_ns=due_ns(case, frontend_s),
        stop_after_first=stop_after_first,
    )


def parts(case: Case, model: StepModel, frontend_s: float) -> list[tuple[Case, Int64Array]]:
    """`case` cut into what steps together: (case of one replica, its rows), or all of it where ranks wait
    for each other. Which replica gets a request follows from a simulation on `model`."""
    if case.ranks == 1 or case.model.moe is not None:
        return [(case, np.arange(len(case.trace)))]
    spec = ReplicaSpec(case.scheduler, model, frontend_s=frontend_s)
    balancer: list[QueueBalancer] = []

    def route(request: TraceRequest, replicas: Sequence[ReplicaView]) -> int:
        if not balancer:
            balancer.append(QueueBalancer([_Queue(replica) for replica in replicas]))
        balancer[0].report(request.arrival_ns)
        return balancer[0].route()

    run = simulate_cluster(case.trace, [spec] * case.ranks, route)
    place = run.requests["replica"]
    rows = [np.flatnonzero(place == rank) for rank in range(case.ranks)]
    return [(_subset(case, of_rank), of_rank) for of_rank in rows if len(of_rank)]


@dataclass(frozen=True, slots=True)
class _Queue:
    """A replica's two counts, as the balancer wants them."""

    replica: ReplicaView

    @property
    def num_waiting(self) -> int:
        return self.replica.num_waiting

    @property
    def num_running(self) -> int:
        return max(0, self.replica.in_flight - self.replica.num_waiting)


def _subset(case: Case, rows: Int64Array) -> Case:
    """Rows of a case as the case of a single replica, on the same clock."""
    trace, measured = case.trace, case.measured
    return replace(
        case,
        trace=_trace_rows(trace, rows),
        measured=Measured(**{f.name: getattr(measured, f.name)[rows] for f in fields(Measured)}),
        ranks=1,
        peer_sim=None,
    )


def _trace_rows(trace: Trace, rows: Int64Array) -> Trace:
    ids = offsets = None
    if trace.prefix_ids is not None and trace.prefix_offsets is not None:
        pieces = [
            trace.prefix_ids[trace.prefix_offsets[row] : trace.prefix_offsets[row + 1]]
            for row in rows
        ]
        offsets = np.cumsum([0, *(len(piece) for piece in pieces)]).astype(np.int64)
        ids = np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64)
    return replace(
        trace,
        arrival_ns=trace.arrival_ns[rows],
        prompt_tokens=trace.prompt_tokens[rows],
        output_tokens=trace.output_tokens[rows],
        prefix_offsets=offsets,
        prefix_ids=ids,
    )
