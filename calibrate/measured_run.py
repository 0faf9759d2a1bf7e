"""What the recorder told -> `Run`: a real run is the same type as a simulated one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vsim.sim.recorder import Recorder
from vsim.sim.run import Run
from vsim.sim.step import Step, StepOutput
from vsim.traces.trace import Trace


@dataclass(slots=True)
class Measured:
    """A served trace: the run, and each step's message as it came (`record.py`), empty steps left out."""

    run: Run
    steps: list[dict[str, Any]] = field(default_factory=list)


def build_run(
    trace: Trace,
    messages: Iterable[dict[str, Any]],
    started: dict[str, Any],
    config: dict[str, Any],
    provenance: dict[str, Any],
    assumptions: tuple[str, ...] = (),
) -> Measured:
    """Read a worker's answers to `serve` until {"done": ...}. `started`: what vLLM made of its arguments."""
    recorder = Recorder(trace)
    block_size = int(started["block_size"])
    usable = int(started["num_gpu_blocks"]) - 1
    steps: list[dict[str, Any]] = []
    tokens_in_cache: dict[int, int] = {}
    hits = queries = end_ns = 0
    for message in messages:
        if "rejected" in message:
            refusal = message["rejected"]
            recorder.rejected(refusal["request"], refusal["reason"], refusal["at_ns"])
            continue
        if "done" in message:
            end_ns = int(message["done"]["end_ns"])
            continue
        told = message["step"]
        step = Step(
            requests=told["requests"],
            num_tokens=told["num_tokens"],
            num_computed=told["num_computed"],
            preempted=told["preempted"],
            new=told["new"],
            resumed=told["resumed"],
            emits=[index in set(told["emitted"]) for index in told["requests"]],
        )
        recorder.scheduled(step, told["start_ns"])
        fresh = set(told["new"])
        for index, new, computed in zip(
            step.requests, step.num_tokens, step.num_computed, strict=True
        ):
            if index in fresh:
                queries += int(trace.prompt_tokens[index])
                hits += computed
            tokens_in_cache[index] = computed + new
        for victim in step.preempted:
            tokens_in_cache.pop(victim, None)
        used_tokens = min(sum(tokens_in_cache.values()), told["kv_blocks_used"] * block_size)
        recorder.completed(StepOutput(told["emitted"], told["finished"]), told["end_ns"])
        for index in told["finished"]:
            tokens_in_cache.pop(index, None)
        if not step.requests and not step.preempted:
            continue
        shape = step.shape
        recorder.step(
            {
                "start_ns": told["start_ns"],
                "end_ns": told["end_ns"],
                "tokens": shape.num_tokens,
                "prefill_tokens": shape.prefill_tokens,
                "prefill_seqs": len(shape.prefills),
                "decodes": shape.num_decodes,
                "decode_context": shape.decode_context_sum,
                "running": told["running"],
                "waiting": told["waiting"],
                "kv_blocks_used": told["kv_blocks_used"],
                "kv_tokens_used": used_tokens,
                "preempted": len(step.preempted),
                "swapped_blocks": 0,
            }
        )
        steps.append(told)
    itl_ns, itl_count = recorder.gaps()
    arrivals = np.asarray(trace.arrival_ns)
    run = Run(
        origin="measured",
        requests=recorder.request_columns({"arrival_ns": arrivals, "sent_ns": arrivals}),
        steps=recorder.step_columns(),
        itl_ns=itl_ns,
        itl_count=itl_count,
        block_size=block_size,
        num_gpu_blocks=usable,
        reasons=tuple(recorder.reasons),
        tenant_names=trace.tenant_names,
        config=config,
        provenance=provenance,
        assumptions=assumptions,
        counters={"prefix_cache_queries_tokens": queries, "prefix_cache_hits_tokens": hits},
        preemption_spans=recorder.spans(),
        end_ns=end_ns,
    )
    return Measured(run, steps)
