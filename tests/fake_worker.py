"""A stand-in for the recording process: our own scheduler with an imagined machine's step times.

It speaks `calibrate.worker.Worker`'s language, so that budgets, resuming and comparing can be tested without
vLLM. Each call of `serve` and `scene` draws its own noise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from vsim.models.step import StepShape
from vsim.sim.config import SchedulerConfig
from vsim.sim.engine import make_scheduler
from vsim.traces.trace import TraceRequest

HELLO = {
    "vllm_version": "0.32.0",
    "torch_version": "2.13.0+cpu",
    "python_version": "3.11.7",
    "platform": "cpu",
    "device": "Imagined CPU",
    "device_count": 1,
    "driver": "",
    "threads": 1,
    "cores": 2,
}


def imagined_seconds(shape: StepShape) -> float:
    """Device time of the imagined machine."""
    return (
        0.002
        + 2e-5 * shape.num_tokens
        + 1e-5 * shape.num_seqs
        + 1e-9 * shape.prefill_work
        + 5e-8 * shape.decode_context_sum
    )


class FakeWorker:
    """One per engine start. Class attributes are the knobs of a test."""

    noise = 0.0
    wall_over_cpu = 1.0  # above 1: another process has the core meanwhile
    drift = 0.0  # each served run is slower than the one before it by this share
    slower = 1.0
    engines = 0
    slowdowns: ClassVar[
        list[float]
    ] = []  # of the machine, by its yardstick: one for each engine to come
    after_scene: Callable[[int], None] | None = None  # called with the number of scenes so far
    scenes = 0

    def __init__(self, python: Path, env: dict[str, str], folder: Path) -> None:
        self.hello = dict(HELLO)
        FakeWorker.engines += 1
        self.slowdown = FakeWorker.slowdowns.pop(0) if FakeWorker.slowdowns else 1.0
        self._rng = np.random.default_rng(FakeWorker.scenes)

    def __enter__(self) -> FakeWorker:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def start(
        self,
        engine_args: dict[str, Any],
        temperature: float = 0.0,
        yardstick: dict[str, int | None] | None = None,
    ) -> dict[str, Any]:
        self.started = {
            "start_s": 0.0,
            "block_size": engine_args.get("block_size", 128),
            "num_gpu_blocks": engine_args.get("num_gpu_blocks_override") or 2048,
            "max_num_batched_tokens": engine_args.get("max_num_batched_tokens") or 1024,
            "max_num_seqs": engine_args.get("max_num_seqs") or 32,
            "max_model_len": engine_args.get("max_model_len") or 2048,
            "dtype": engine_args["dtype"],
            "quantization": None,
            "kv_cache_dtype": "auto",
            "enable_prefix_caching": True,
            "enable_chunked_prefill": True,
            "async_scheduling": False,
            "scheduler_reserve_full_isl": True,
            "watermark": 0.0,
            "policy": "fcfs",
            "enforce_eager": True,
            "yardstick_ns": None if yardstick is None else yardstick["reference_ns"] or 800_000,
            "tensor_parallel_size": 1,
            "v2_model_runner": False,
            "vocab_size": 8192,
        }
        return self.started

    def scene(self, command: dict[str, Any]) -> list[dict[str, Any]]:
        """Only compositions and times; whoever tests the recorder runs the real engine."""
        time.sleep(0.004)  # a step takes its time: else budgets of a second would hold a million
        FakeWorker.scenes += 1
        if FakeWorker.after_scene is not None:
            FakeWorker.after_scene(FakeWorker.scenes)
        steps = []
        decodes, chunks = command["decodes"], command["prefills"]
        rounds: list[tuple[list[list[int]], bool]] = [
            ([], i == 0) for i in range(command["decode_steps"])
        ]
        for _ in range(command["injections"] if chunks else 0):
            rounds += [(chunks, False), ([], False)]
        for number, (new, warmup) in enumerate(rounds):
            pairs = [(1, context + number) for context in decodes] + [tuple(c) for c in new]
            if pairs:
                steps.append(self._told(pairs, len(steps), warmup))
        return steps

    def kernels(self, rows: list[int], repeats: int) -> dict[str, Any]:
        return {
            "rows": rows,
            "linear_s": [1e-3 + 2e-5 * n for n in rows],
            "head_s": [1e-4 + 1e-6 * n for n in rows],
        }

    def serve(self, command: dict[str, Any]) -> Iterator[dict[str, Any]]:
        requests = command["requests"]
        s = self.started
        scheduler = make_scheduler(
            SchedulerConfig(
                block_size=s["block_size"],
                num_gpu_blocks=s["num_gpu_blocks"],
                max_num_seqs=s["max_num_seqs"],
                max_num_batched_tokens=s["max_num_batched_tokens"],
                max_model_len=s["max_model_len"],
                v2_model_runner=False,
            )
        )
        FakeWorker.slower *= 1 + self.drift
        now = sent = index = 0
        began = time.monotonic()
        while sent < len(requests) or scheduler.has_unfinished_requests():
            if time.monotonic() - began > command.get("limit_s", 1e9):
                break
            while sent < len(requests) and requests[sent][0] <= now:
                arrival, prompt, output, priority = requests[sent]
                scheduler.add(TraceRequest(sent, arrival, prompt, output, priority=priority))
                sent += 1
            if not scheduler.has_unfinished_requests():
                now = max(now, requests[sent][0])
                continue
            step = scheduler.schedule()
            used = scheduler.num_usable_blocks - scheduler.num_free_blocks
            running, waiting = scheduler.num_running, scheduler.num_waiting
            done = scheduler.complete(step)
            told = self._told(
                list(zip(step.num_tokens, step.num_computed, strict=True)), index, False
            )
            began = now
            now += told["cpu_ns"] if command.get("clock") == "cpu" else told["total_ns"]
            told |= {
                "requests": step.requests,
                "preempted": step.preempted,
                "new": step.new,
                "resumed": step.resumed,
                "emitted": done.emitted,
                "finished": done.finished,
                "running": running,
                "waiting": waiting,
                "kv_blocks_used": used,
                "start_ns": began,
                "end_ns": now,
            }
            yield {"step": told}
            index += 1
        yield {"done": {"steps": index, "end_ns": now}}

    def _told(self, pairs: list[Any], index: int, warmup: bool) -> dict[str, Any]:
        contexts = [c for new, c in pairs if new == 1]
        shape = StepShape(
            tuple((n, c) for n, c in pairs if n > 1),
            len(contexts),
            sum(contexts),
            max(contexts, default=0),
        )
        device = round(
            imagined_seconds(shape)
            * self.slower
            * (1 + self.noise * self._rng.standard_normal())
            * 1e9
        )
        cpu = device + 300_000
        return {
            "requests": list(range(len(pairs))),
            "num_tokens": [n for n, _ in pairs],
            "num_computed": [c for _, c in pairs],
            "preempted": [],
            "new": [],
            "resumed": [],
            "emitted": [],
            "finished": [],
            "running": len(pairs),
            "waiting": 0,
            "slowdown": self.slowdown,
            "kv_blocks_used": 1,
            "schedule_ns": 200_000,
            "device_ns": device,
            "total_ns": round(cpu * self.wall_over_cpu),
            "cpu_ns": cpu,
            "index": index,
            "warmup": warmup,
        }
