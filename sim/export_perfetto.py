"""A run as a Chrome trace (JSON): engine steps, counters and requests, for Perfetto and chrome://tracing."""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from vsim.errors import UserError
from vsim.sim.run import FINISHED, REJECTED, STATUS_NAMES, Run
from vsim.sim.text import plain

MAX_EVENTS = 2_000_000  # about 300 MB: what the viewers still open
STEPS_PID, REQUESTS_PID = 1, 2


def render_perfetto(run: Run, start_s: float = 0.0, end_s: float | None = None) -> Iterator[str]:
    """Pieces of a JSON object `{"traceEvents": [...]}`; times in µs from the run's first arrival.

    Only what touches [start_s, end_s] is written. Steps are slices of process 1 (a second lane where steps
    of a batch queue overlap), running, waiting and KV usage are counters there; every request is a nested
    asynchronous slice of process 2: queued, prefill, decode. A request takes the first lane that is free
    when it is sent: as many lanes as requests were in flight at once, not as many as there are requests.
    Raises UserError for more than two million events: name a shorter stretch.
    """
    if end_s is not None and end_s <= start_s:
        raise UserError(f"--to {end_s:g} must be after --from {start_s:g}")
    low = round(start_s * 1e9)
    high = np.iinfo(np.int64).max if end_s is None else round(end_s * 1e9)
    steps, columns = run.steps, run.requests
    shown_steps = np.flatnonzero((steps["end_ns"] >= low) & (steps["start_ns"] <= high))
    ended = np.where(columns["finish_ns"] < 0, run.end_ns, columns["finish_ns"])
    shown_requests = np.flatnonzero(
        (columns["sent_ns"] >= 0) & (ended >= low) & (columns["sent_ns"] <= high)
    )
    count = 4 * len(shown_steps) + 8 * len(shown_requests)
    if count > MAX_EVENTS:
        raise UserError(
            f"a trace of {count:,} events is more than a viewer opens ({MAX_EVENTS:,}); "
            "give a stretch of simulated time with --from and --to"
        )
    yield '{"displayTimeUnit":"ms","traceEvents":[\n'
    first = True
    for event in _events(run, shown_steps, shown_requests):
        yield ("" if first else ",\n") + json.dumps(event, separators=(",", ":"))
        first = False
    yield "\n]}\n"


def _events(run: Run, step_rows: Any, request_rows: Any) -> Iterator[dict[str, Any]]:
    yield from _names(STEPS_PID, "engine")
    yield from _names(REQUESTS_PID, "requests")
    yield from _step_events(run, step_rows)
    named: set[int] = set()
    spans: dict[int, list[tuple[int, int]]] = {}
    for row, out, back in () if run.preemption_spans is None else run.preemption_spans.tolist():
        spans.setdefault(row, []).append((out, back))
    for row, lane in _lanes(run, request_rows):
        scope = {"pid": REQUESTS_PID, "tid": 1, "cat": "request", "id2": {"local": f"{lane:#x}"}}
        if lane not in named:
            # Viewers call a lane by its first event, and sort lanes by that name.
            named.add(lane)
            sent = int(run.requests["sent_ns"][row]) / 1e3
            yield {"ph": "n", **scope, "ts": sent, "name": f"lane {lane:05d}"}
        yield from _request_events(run, row, scope, spans.get(row, ()))


def _lanes(run: Run, rows: Any) -> Iterator[tuple[int, int]]:
    """(row, lane from 1) in order of sending; a lane is free once its last request has ended."""
    sent = run.requests["sent_ns"]
    free: list[int] = []
    taken: list[tuple[int, int]] = []  # end in ns, lane
    count = 0
    for row in rows[np.argsort(sent[rows], kind="stable")].tolist():
        while taken and taken[0][0] < sent[row]:
            heapq.heappush(free, heapq.heappop(taken)[1])
        if not free:
            count += 1
            free.append(count)
        lane = heapq.heappop(free)
        heapq.heappush(taken, (_end_ns(run, row), lane))
        yield row, lane


def _end_ns(run: Run, row: int) -> int:
    end = int(run.requests["finish_ns"][row])
    return max(int(run.requests["sent_ns"][row]), run.end_ns) if end < 0 else end


def _names(pid: int, name: str) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}


def _step_events(run: Run, rows: Any) -> Iterator[dict[str, Any]]:
    steps = {name: column[rows].tolist() for name, column in run.steps.items()}
    replicas = steps.get("replica", [0] * len(rows))
    lanes: dict[int, list[int]] = {}  # replica -> when each of its lanes is free, in ns
    usable = max(1, run.num_gpu_blocks)
    for i, replica in enumerate(replicas):
        start, end = steps["start_ns"][i], steps["end_ns"][i]
        suffix = "" if "replica" not in steps else f" {replica}"
        free = lanes.setdefault(replica, [])
        lane = next((n for n, until in enumerate(free) if until <= start), len(free))
        if lane == len(free):
            free.append(0)
            yield {
                "ph": "M",
                "pid": STEPS_PID,
                "tid": 1 + 16 * replica + lane,
                "name": "thread_name",
                "args": {"name": f"steps{suffix}{f', lane {lane + 1}' if lane else ''}"},
            }
        free[lane] = max(end, start)
        prefill, decodes = steps["prefill_tokens"][i], steps["decodes"][i]
        kind = "mixed" if prefill and decodes else "prefill" if prefill else "decode"
        yield {
            "ph": "X",
            "pid": STEPS_PID,
            "tid": 1 + 16 * replica + lane,
            "ts": start / 1e3,
            "dur": (end - start) / 1e3,
            "name": kind,
            "cat": "step",
            "args": {
                "tokens": steps["tokens"][i],
                "prefill_tokens": prefill,
                "prefill_seqs": steps["prefill_seqs"][i],
                "decodes": decodes,
                "preempted": steps["preempted"][i],
            },
        }
        for name, values in (
            (f"requests{suffix}", {"running": steps["running"][i], "waiting": steps["waiting"][i]}),
            (f"KV cache %{suffix}", {"used": round(steps["kv_blocks_used"][i] / usable * 100, 3)}),
        ):
            yield {"ph": "C", "pid": STEPS_PID, "ts": start / 1e3, "name": name, "args": values}
        if steps["preempted"][i]:
            yield {
                "ph": "i",
                "s": "p",
                "pid": STEPS_PID,
                "tid": 1 + 16 * replica + lane,
                "ts": start / 1e3,
                "name": "preemption",
                "args": {"requests": steps["preempted"][i]},
            }


def _request_events(
    run: Run, row: int, scope: dict[str, Any], spans: Sequence[tuple[int, int]]
) -> Iterator[dict[str, Any]]:
    columns = run.requests
    status = int(columns["status"][row])
    sent = int(columns["sent_ns"][row])
    end = _end_ns(run, row)
    name = f"request {int(columns['request'][row])}"
    args: dict[str, Any] = {
        "prompt_tokens": int(columns["prompt_tokens"][row]),
        "output_tokens": int(columns["output_tokens"][row]),
        "cached_tokens": int(columns["cached_tokens"][row]),
        "preemptions": int(columns["preemptions"][row]),
        "status": STATUS_NAMES[status],
    }
    tenant = int(columns["tenant"][row])
    if 0 <= tenant < len(run.tenant_names):
        args["tenant"] = plain(run.tenant_names[tenant])
    reason = int(columns["reason"][row])
    if status == REJECTED and 0 <= reason < len(run.reasons):
        args["reason"] = plain(run.reasons[reason])
    yield {"ph": "b", **scope, "ts": sent / 1e3, "name": name, "args": args}
    scheduled, first = (int(columns[f"{c}_ns"][row]) for c in ("first_scheduled", "first_token"))
    if status == FINISHED or scheduled >= 0:
        marks = [("queued", sent, scheduled), ("prefill", scheduled, first), ("decode", first, end)]
        for phase, began, stopped in marks:
            if began < 0:
                break
            until = end if stopped < 0 else stopped
            yield {"ph": "b", **scope, "ts": began / 1e3, "name": phase}
            for out, back in spans:
                inside = max(out, began), min(back, until)
                if inside[0] < inside[1]:
                    yield {"ph": "b", **scope, "ts": inside[0] / 1e3, "name": "preempted"}
                    yield {"ph": "e", **scope, "ts": inside[1] / 1e3, "name": "preempted"}
            yield {"ph": "e", **scope, "ts": until / 1e3, "name": phase}
            if stopped < 0:
                break
    yield {"ph": "e", **scope, "ts": end / 1e3, "name": name}
