"""Compile the kernel now, so that no later run has to: `python -m vsim.sim.fast.warm` (`make` does it once)."""

from __future__ import annotations

import sys
import time

from vsim.models.roofline import RooflineStepModel
from vsim.sim.cluster import ReplicaSpec, simulate_cluster
from vsim.sim.config import SchedulerConfig
from vsim.traces.trace import Trace


def warm() -> float:
    """Seconds that two small runs took, one on each path. Raises AssertionError if they differ."""
    began = time.monotonic()
    model = RooflineStepModel(1, 1e9, 1e9, 1e9, 1e9, 1e5, 1e5, 1e14, 1e12)
    trace = Trace.of([0.0, 0.0, 0.01, 0.02], [10, 40, 100, 1], [3, 60, 50, 9])
    spec = ReplicaSpec(SchedulerConfig(num_gpu_blocks=12, max_model_len=170), model)
    fast, slow = (simulate_cluster(trace, [spec], engine=path) for path in ("fast", "reference"))
    assert fast.end_ns == slow.end_ns
    assert fast.counters == slow.counters
    return time.monotonic() - began


if __name__ == "__main__":
    print(f"compiled path ready after {warm():.1f} s")
    sys.exit(0)
