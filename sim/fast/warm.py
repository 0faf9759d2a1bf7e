"""Compile the kernel now, so that no later run has to: `python -m vsim.sim.fast.warm` (`make` does it once)."""

from __future__ import annotations

import time

from vsim.models.roofline import RooflineStepModel
from vsim.sim.cluster import ReplicaSpec, simulate_cluster
from vsim.sim.config import SchedulerConfig
from vsim.traces.trace import Trace


def warm() -> float:
    """Seconds that a run of one request took."""
    began = time.monotonic()
    model = RooflineStepModel(1, 1e9, 1e9, 1e9, 1e9, 1e5, 1e5, 1e14, 1e12)
    simulate_cluster(
        Trace.of([0.0], [10], [3]), [ReplicaSpec(SchedulerConfig(), model)], engine="fast"
    )
    return time.monotonic() - began


if __name__ == "__main__":
    print(f"compiled path ready after {warm():.0f} s")
