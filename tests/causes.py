"""Whole traces, replayed on many deployments: do the parts of every request's latency sum to it?

    python tests/causes.py [TRACE …]       # without one: Azure's whole conversation trace

Each run is held to the nanosecond: end-to-end latency and time to first token, every finished request, no
part negative. `tests/test_explain.py` does the same on a part.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vsim.sim.advice import Setup
from vsim.sim.explain import KEYS, breakdown
from vsim.sim.fleet.spec import (
    Admission,
    Disaggregation,
    FleetSpec,
    Network,
    Outage,
    Retry,
)
from vsim.sim.replay import Load, replay, step_model_for
from vsim.sim.run import FINISHED, Run
from vsim.traces.arrivals import select
from vsim.traces.readers import read_trace
from vsim.traces.trace import Trace

ROOT = Path(__file__).resolve().parent.parent
MODEL = "meta-llama/Llama-3.1-8B-Instruct"
STEPWISE = 1500  # requests where no compiled code serves


@dataclass(frozen=True)
class Kind:
    """One deployment. `stepwise`: no compiled code serves it, so a part of the trace must do."""

    name: str
    flags: dict[str, Any] = field(default_factory=dict)
    load: dict[str, Any] = field(default_factory=dict)
    replicas: int = 1
    route: str = "round-robin"
    fleet: FleetSpec | None = None
    stepwise: bool = False
    model: str = MODEL


SMALL = {"num_gpu_blocks_override": 8200, "max_model_len": 131072}
KINDS = (
    Kind("defaults"),
    Kind("small KV cache", SMALL),
    Kind("few seats", {"max_num_seqs": 16}),
    Kind("small budget", {"max_num_batched_tokens": 256, "max_num_seqs": 128}),
    Kind("no chunked prefill", {"enable_chunked_prefill": False, "max_num_batched_tokens": 131072}),
    Kind("long prompts capped", {"long_prefill_token_threshold": 512}),
    Kind("no async scheduling", {"async_scheduling": False}),
    Kind("two pipeline stages", {"pipeline_parallel_size": 2}),
    Kind("closed loop of 64", load={"max_concurrency": 64}),
    Kind("ten times as fast", load={"time_scale": 0.1}),
    Kind("four replicas", SMALL, replicas=4, route="least-requests"),
    Kind("V0, swapping", {"engine": "v0", "preemption_mode": "swap", "num_gpu_blocks_override": 8200}, stepwise=True),
    Kind("data-parallel ranks", {"data_parallel_size": 2}, model="Qwen/Qwen3-30B-A3B", stepwise=True),
    Kind("network", fleet=FleetSpec(replicas=2, network=Network(0.02, 0.005)), replicas=2, stepwise=True),
    Kind("refusing queues, failures and retries", fleet=FleetSpec(replicas=3, network=Network(0.01, 0.0), admission=Admission(max_waiting_per_replica=20), failures=(Outage(0, 20.0, 15.0),), retry=Retry(attempts=3)), replicas=3, route="least-requests", stepwise=True),
    Kind("prefill and decode pools", fleet=FleetSpec(replicas=3, route="least-tokens", disaggregation=Disaggregation(1, 2, 25.0, 0.001)), replicas=3, stepwise=True),
)  # fmt: skip


def wrong(run: Run) -> int:
    """How many requests have parts that do not sum to their latency, or a negative one."""
    done = run.requests["status"] == FINISHED
    bad = np.zeros(run.num_requests, dtype=bool)
    for by, end in (("e2el", "finish_ns"), ("ttft", "first_token_ns")):
        parts = breakdown(run, by)
        latency = np.where(done, run.requests[end] - run.requests["sent_ns"], 0)
        bad |= (parts.sum(axis=1) != latency) | (parts < 0).any(axis=1)
    return int(bad.sum())


def runs(trace: Trace, most: int | None = None) -> Iterator[tuple[Kind, Run]]:
    """`trace` on each of KINDS; of `most` requests at most."""
    for kind in KINDS:
        limit = min(len(trace), most or len(trace), STEPWISE if kind.stepwise else len(trace))
        part = trace if limit == len(trace) else select(trace, np.arange(limit), "")
        deployment = Setup(kind.model, "h100", kind.flags).deployment()
        yield (
            kind,
            replay(
                part,
                deployment,
                step_model_for(deployment),
                Load(**kind.load),
                replicas=kind.replicas,
                route=kind.route,
                fleet=kind.fleet,
            ),
        )


def main() -> int:
    files = sys.argv[1:] or [str(ROOT / "traces/azure2023_conv.csv")]
    failed = 0
    for name in files:
        trace, began, requests = read_trace(Path(name)), time.monotonic(), 0
        print(f"{Path(name).name}: {len(trace):,} requests")
        for kind, run in runs(trace):
            bad, done = wrong(run), run.requests["status"] == FINISHED
            failed, requests = failed + bad, requests + int(done.sum())
            share = breakdown(run).sum(axis=0)
            top = np.argsort(-share)[:3]
            most = ", ".join(
                f"{KEYS[i]} {share[i] / max(1, share.sum()):.0%}" for i in top.tolist()
            )
            print(f"  {kind.name:<38}{int(done.sum()):>8,} finished{bad:>6} wrong   {most}")
        print(f"  {requests:,} finished requests, {failed} wrong, {time.monotonic() - began:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
