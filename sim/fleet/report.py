"""The report's part on what happened to the fleet: how many replicas there were, and when and why that changed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vsim.sim.fleet.describe import event_words
from vsim.sim.report_svg import Chart, Series, esc
from vsim.sim.run import Run

MAX_ROWS = 40


def replicas_chart(run: Run, edges: npt.NDArray[np.int64]) -> Chart | None:
    """Replicas that get requests, and that are paid for, over time; None for a run without events."""
    if not run.events:
        return None
    at, serving, paid = replicas_over_time(run)
    middles = (edges[:-1] + edges[1:]) // 2
    place = np.searchsorted(at, middles, side="right") - 1
    series = [
        Series("get requests", serving[place].astype(float), 1),
        Series("paid for", paid[place].astype(float), 5),
    ]
    x = (middles - edges[0]) / 1e9
    return Chart("fleet", "Replicas", "replicas", x, series)


def replicas_over_time(
    run: Run,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(when it changes, replicas that get requests from then on, replicas paid for); from time 0."""
    first = run.config.get("fleet", {}).get("replicas", 1)
    open_, paid = set(range(first)), set(range(first))
    draining: set[int] = set()
    down: set[int] = set()
    rows = [(np.iinfo(np.int64).min, len(open_), len(paid))]
    for event in run.events:
        number = event.replica
        if event.kind == "replica_asked_for":
            paid.add(number)
        elif event.kind == "replica_gone":
            for those in (paid, open_, draining, down):
                those.discard(number)
        elif event.kind in ("replica_down", "replica_leaves"):
            open_.discard(number)
            if event.kind == "replica_down":
                down.add(number)
        elif event.kind == "drain_begins":
            draining.add(number)
            open_.discard(number)
        elif event.kind == "drain_ends":
            draining.discard(number)
            if number not in down:
                open_.add(number)
        elif event.kind in ("replica_up", "replica_ready"):
            down.discard(number)
            if number not in draining:
                open_.add(number)
        rows.append((event.at_ns, len(open_), len(paid)))
    at, serving, counted = np.array(rows, dtype=np.int64).T
    return at, serving, counted


def events_table(run: Run) -> str:
    """Events in words, the first of them; empty text if there were none."""
    if not run.events:
        return ""
    rows = "".join(
        f"<tr><td>{event.at_ns / 1e9:,.1f} s</td><td>{esc(event_words(event.kind, event.replica, event.text))}"
        "</td></tr>"
        for event in run.events[:MAX_ROWS]
    )
    left = len(run.events) - MAX_ROWS
    more = f"<p class=note>{left} more events are in run.json.</p>" if left > 0 else ""
    return f"<div class=scroll><table><tbody>{rows}</tbody></table></div>{more}"
