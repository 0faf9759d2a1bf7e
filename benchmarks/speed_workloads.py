"""Named workloads of `replay_speed.py`, and what one of them costs: run by a child process, one workload each.

    python benchmarks/speed_workloads.py '{"workload": "azure", "requests": 19366, "path": "fast"}'

prints one JSON line. The trace is made before the clock starts; replay, metrics and the table are inside.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parent.parent
AZURE = ROOT / "traces" / "azure2023_conv.csv"
MODEL = "meta-llama/Llama-3.1-8B-Instruct"
# Calibrated step times: this GPU has a bundled profile (kernel tables of vLLM 0.19). The others are rooflines.
CALIBRATED = {"model": "meta-llama/Llama-3.1-8B", "gpu": "rtx-pro-6000"}
ROOFLINE = {"model": MODEL, "gpu": "a100"}
# Unique requests: what a simulator may not do is find the same prompt again. Our Azure rows have no content,
# so nothing is shared either way.
SHORT_CONTEXT = {"max_model_len": 16384}


@dataclasses.dataclass(frozen=True)
class Workload:
    says: str
    requests: int  # by default
    trace: Callable[[int], Any]
    deployment: dict[str, Any]
    load: dict[str, Any] = dataclasses.field(default_factory=dict)
    quick: int = 2000  # with --quick
    reference: int = 2000  # how many the step-by-step path is asked for


def azure(count: int) -> Any:
    """`count` requests with the lengths of the Azure conversation trace, in its order, again and again."""
    from vsim.traces.readers import read_trace

    trace = read_trace(AZURE)
    if count == len(trace):
        return trace
    row = np.arange(count) % len(trace)
    span = int(trace.arrival_ns[-1]) + round(trace.span_s * 1e9 / len(trace))
    return dataclasses.replace(
        trace,
        arrival_ns=trace.arrival_ns[row] + np.arange(count) // len(trace) * span,
        prompt_tokens=trace.prompt_tokens[row],
        output_tokens=trace.output_tokens[row],
    )


def identical(count: int) -> Any:
    from vsim.traces.trace import Trace, TraceSource

    return Trace(
        arrival_ns=np.zeros(count, dtype=np.int64),
        prompt_tokens=np.full(count, 1024),
        output_tokens=np.full(count, 128),
        source=TraceSource("1024/128", "generated"),
    )


def conversations(count: int) -> Any:
    """About `count` requests: four turns a session on average, over one of eight 1024-token system prompts."""
    from vsim.traces.lengths import parse
    from vsim.traces.processes import Arrivals
    from vsim.traces.synth import Conversation, Workload, generate

    return generate(
        Workload(
            Arrivals("poisson", rate=2.0, requests=max(count // 4, 1)),
            prompt=parse("lognormal:200:0.8"),
            output=parse("lognormal:150:0.8"),
            conversation=Conversation(parse("uniform:1:7"), think_s=10.0),
            system_prompt_tokens=1024,
            system_prompts=8,
        )
    )


def prompts_of_conversations(count: int) -> Any:
    """The same requests at the times at which turns would come if answers took no time."""
    return dataclasses.replace(conversations(count), sessions=None)


def mooncake(count: int) -> Any:
    """Mooncake's conversation trace, from the file at VSIM_MOONCAKE or the head of it that the tests have."""
    from vsim.traces.arrivals import head
    from vsim.traces.readers import read_trace

    head_only = ROOT / "tests" / "data" / "traces" / "mooncake_conversation_head.jsonl"
    path = os.environ.get("VSIM_MOONCAKE", head_only)
    trace = read_trace(path)
    return head(trace, min(count, len(trace)))


WORKLOADS: dict[str, Workload] = {
    "azure": Workload("Azure conversation, its own times; calibrated", 19366, azure, CALIBRATED),
    "azure-roofline": Workload("the same on an A100; roofline", 19366, azure, ROOFLINE),
    "azure-6.45": Workload(
        "Azure lengths at 6.45 requests/s (the peers' load)",
        100_000,
        azure,
        ROOFLINE,
        {"request_rate": 6.45},
    ),
    "saturated": Workload(
        "Azure lengths, all sent at once", 100_000, azure, ROOFLINE, {"request_rate": float("inf")}
    ),
    "closed-loop": Workload(
        "Azure lengths, 256 in flight",
        100_000,
        azure,
        ROOFLINE,
        {"request_rate": float("inf"), "max_concurrency": 256},
    ),
    "light": Workload(
        "Azure lengths at 0.2 requests/s",
        20_000,
        azure,
        ROOFLINE,
        {"request_rate": 0.2},
        reference=500,
    ),
    "sharing": Workload(
        "conversations' prompts, which share system prompts and their own past, at fixed times",
        20_000,
        prompts_of_conversations,
        ROOFLINE | {"enable_prefix_caching": True},
    ),
    "turn-by-turn": Workload(
        "the same, each turn sent after the one before has ended",
        20_000,
        conversations,
        ROOFLINE | {"enable_prefix_caching": True},
    ),
    "mooncake": Workload(
        "Mooncake conversation, long prompts with hash ids",
        12_031,
        mooncake,
        {"model": MODEL, "gpu": "h200", "enable_prefix_caching": True},
        quick=300,
        reference=300,
    ),
    "preempting": Workload(
        "Azure lengths at 20 requests/s into 2,000 blocks of 16",
        20_000,
        azure,
        ROOFLINE | SHORT_CONTEXT | {"num_gpu_blocks_override": 2000},
        {"request_rate": 20.0},
    ),
    "identical": Workload(
        "1024/128 tokens each, 64 in flight (AISimulate's published case)",
        131_072,
        identical,
        ROOFLINE,
        {"request_rate": float("inf"), "max_concurrency": 64},
    ),
}


@contextlib.contextmanager
def noting_the_kernel() -> Iterator[list[bool]]:
    """Whether each simulation meanwhile was the compiled path's: what it does not cover goes step by step."""
    from vsim.sim.fast import simulate

    taken: list[bool] = []
    attempt = simulate.attempt

    def noted(*asked: Any) -> Any:
        run = attempt(*asked)
        taken.append(run is not None)
        return run

    simulate.attempt = noted
    try:
        yield taken
    finally:
        simulate.attempt = attempt


def measure(name: str, requests: int, path: str) -> dict[str, Any]:
    """Wall and CPU seconds of replay, metrics and table; steps; peak resident memory in MiB.

    `path`: "fast" or "reference". Loading the compiled code is measured by itself, as `start_cpu_s`.
    """
    from vsim.sim.deployment import resolve
    from vsim.sim.fast.warm import warm
    from vsim.sim.replay import Load, replay, step_model_for
    from vsim.sim.summary import summarize
    from vsim.sim.table import render_table

    workload = WORKLOADS[name]
    trace = workload.trace(requests)
    start = time.process_time()
    if path == "fast":
        warm()
    start = time.process_time() - start
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    before = os.environ.get("VSIM_ENGINE")
    os.environ["VSIM_ENGINE"] = path
    try:
        with noting_the_kernel() as taken:
            wall, cpu = time.perf_counter(), time.process_time()
            deployment = resolve(**workload.deployment)
            run = replay(trace, deployment, step_model_for(deployment), Load(**workload.load))
            simulated = time.perf_counter() - wall
            summary = summarize(run)
            render_table(summary)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    finally:
        del os.environ["VSIM_ENGINE"]
        if before is not None:
            os.environ["VSIM_ENGINE"] = before
    return {
        "workload": name,
        "path": path,
        "kernel": taken == [True],
        "requests": len(trace),
        "steps": summary["num_steps"],
        "preemptions": summary["preemptions"],
        "prefix_cache_hit_rate": summary["prefix_cache_hit_rate"],
        "ended_early": summary["ended_early"],
        "start_cpu_s": start,
        "wall_s": wall,
        "cpu_s": cpu,
        "metrics_wall_s": wall - simulated,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "peak_mib_before": held / 1024,
        "sha256": digest(run, summary),
    }


def digest(run: Any, summary: dict[str, Any]) -> str:
    """One hash of all that a run says: two paths agree if and only if their hashes do."""
    from vsim.sim.summary import summary_json

    found = hashlib.sha256(summary_json(summary).encode())
    for column in (*run.requests.values(), *run.steps.values(), run.itl_ns, run.itl_count):
        found.update(np.ascontiguousarray(column).data)
    return found.hexdigest()


def simpy_share(name: str, requests: int) -> dict[str, Any]:
    """How much of the reference path is SimPy's own: its events, and what so many bare events take."""
    import simpy

    counted = [0]
    plain_step = simpy.Environment.step

    def step(self: simpy.Environment) -> None:
        counted[0] += 1
        plain_step(self)

    simpy.Environment.step = step  # type: ignore[method-assign]
    try:
        whole = measure(name, requests, "reference")
    finally:
        simpy.Environment.step = plain_step  # type: ignore[method-assign]

    def process(env: simpy.Environment) -> Iterator[simpy.Event]:
        for _ in range(counted[0]):
            yield env.timeout(1)

    env = simpy.Environment()
    env.process(process(env))
    began = time.process_time()
    env.run()
    bare = time.process_time() - began
    return {
        "workload": name,
        "requests": requests,
        "events": counted[0],
        "bare_events_cpu_s": bare,
        "reference_cpu_s": whole["cpu_s"],
        "share": bare / whole["cpu_s"],
    }


def main() -> None:
    asked = json.loads(sys.argv[1])
    if asked["path"] == "simpy":
        found = simpy_share(asked["workload"], asked["requests"])
    else:
        runs = [
            measure(asked["workload"], asked["requests"], asked["path"])
            for _ in range(asked.get("repeats", 1))
        ]
        found = min(runs, key=lambda run: run["cpu_s"])
        found |= {name: runs[0][name] for name in ("peak_mib", "peak_mib_before")}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
