"""A measurement session: the designed grid on real vLLM, sample by sample into the journal."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from vsim.calibrate.design import (
    Limits,
    Scene,
    order,
    random_scene,
    scenes,
    serving_medians,
    serving_trace,
)
from vsim.calibrate.samples import Journal, Samples, StepSample
from vsim.calibrate.worker import Worker

# More wall time than CPU time by this share and this much: something else had the core.
DISTURBED_SHARE = 0.05
DISTURBED_S = 100e-6
KERNEL_REPEATS = 8
# Of a block size's time: a serving run to fit on, because steps in company are slower than steps on their own
# (caches are colder, requests come and go), and another one, held out, to know the error.
TRAINING_SHARE = 0.15
SERVING_SHARE = 0.25
SEEDS = {"train": 1_000_003, "serve": 0}
SERVING_LOAD = 0.7  # of the estimated capacity

Say = Callable[[str], None]


@dataclass(slots=True)
class Progress:
    """What has been measured so far, for the line on the terminal."""

    began: float = field(default_factory=time.monotonic)
    scenes: int = 0
    steps: int = 0
    disturbed: int = 0

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.began

    @property
    def disturbed_share(self) -> float:
        return self.disturbed / self.steps if self.steps else 0.0


def to_sample(
    step: dict[str, Any],
    *,
    session: str,
    seq: int,
    phase: str,
    point: str,
    repeat: int,
    block_size: int,
    single_thread: bool,
) -> StepSample:
    """A worker's step message as a sample. `single_thread`: CPU time can tell whether it was disturbed."""
    prefill_new, prefill_context = [], []
    decodes = context_sum = context_max = 0
    squares = 0.0
    for new, context in zip(step["num_tokens"], step["num_computed"], strict=True):
        if new > 1:
            prefill_new.append(new)
            prefill_context.append(context)
        else:
            decodes += 1
            context_sum += context
            context_max = max(context_max, context)
            squares += float(context) * context
    total, cpu = step["total_ns"] / 1e9, step["cpu_ns"] / 1e9
    schedule, device = step["schedule_ns"] / 1e9, step["device_ns"] / 1e9
    waited = total - cpu
    return StepSample(
        session=session,
        seq=seq,
        phase=phase,
        point=point,
        repeat=repeat,
        index=step["index"],
        prefill_new=tuple(prefill_new),
        prefill_context=tuple(prefill_context),
        num_decodes=decodes,
        decode_context_sum=context_sum,
        decode_context_max=context_max,
        decode_context_sumsq=squares,
        block_size=block_size,
        kv_blocks_used=step["kv_blocks_used"],
        running=step["running"],
        waiting=step["waiting"],
        admitted=len(step["new"]) + len(step["resumed"]),
        finished=len(step["finished"]),
        preempted=len(step["preempted"]),
        schedule_s=schedule,
        device_s=device,
        update_s=max(0.0, total - schedule - device),
        total_s=total,
        cpu_s=cpu,
        warmup=bool(step.get("warmup", False)),
        disturbed=single_thread and waited > max(DISTURBED_S, DISTURBED_SHARE * total),
        slowdown=float(step.get("slowdown", 1.0)),
    )


@dataclass(slots=True)
class Session:
    """One engine start: measures until its time is up, and writes each scene's steps before the next."""

    worker: Worker
    journal: Journal
    name: str
    limits: Limits
    single_thread: bool
    progress: Progress
    seq: int = 0
    rows: list[StepSample] = field(default_factory=list)

    def measure(self, scene: Scene, repeat: int) -> None:
        """Run one scene and keep its steps."""
        self._keep(self.worker.scene(scene.command), "grid", scene.name, repeat)
        self.progress.scenes += 1

    def _keep(self, steps: list[dict[str, Any]], phase: str, point: str, repeat: int) -> None:
        rows = []
        for step in steps:
            rows.append(
                to_sample(
                    step,
                    session=self.name,
                    seq=self.seq,
                    phase=phase,
                    point=point,
                    repeat=repeat,
                    block_size=self.limits.block_size,
                    single_thread=self.single_thread,
                )
            )
            self.seq += 1
        self.journal.append(rows)
        self.rows += rows
        self.progress.steps += len(rows)
        self.progress.disturbed += sum(row.disturbed for row in rows)

    def grid(self, done: dict[tuple[str, int], int], until: float, repeats: int, say: Say) -> None:
        """The designed grid in waves, then random scenes, until the clock `time.monotonic` says `until`.

        `done`: repeats that an earlier session has measured; they are not measured again.
        """
        block = self.limits.block_size
        warm = Scene(
            "warm-up", 0, decodes=(0,) * 4, decode_steps=8, prefills=((64, 0),), injections=2
        )
        if warm.fits(self.limits):
            for step in (rows := self.worker.scene(warm.command)):
                step["warmup"] = True
            self._keep(rows, "grid", warm.name, 0)
        for scene, repeat in order(scenes(self.limits), repeats):
            if time.monotonic() >= until:
                return
            if repeat < done.get((scene.name, block), 0):
                continue
            self.measure(scene, repeat)
            say(f"block size {block}: {scene.name}, repeat {repeat + 1}")
        number = 0
        while time.monotonic() < until:
            scene = random_scene(self.limits, number)
            for repeat in range(2):
                if repeat >= done.get((scene.name, block), 0):
                    self.measure(scene, repeat)
            say(f"block size {block}: {scene.name}")
            number += 1

    def serving(self, phase: str, until: float, say: Say) -> None:
        """A short random serving run: to "train" on, or, as "serve", held out of the fit."""
        seed = SEEDS[phase]
        left = until - time.monotonic()
        if left <= 0:
            return
        rate = SERVING_LOAD / self._seconds_per_request()
        count = int(max(20, min(2000, left * rate)))
        trace = serving_trace(self.limits, count, rate, seed)
        batch: list[dict[str, Any]] = []
        command = {"requests": [list(row) for row in trace], "limit_s": left}
        for message in self.worker.serve(command):
            if "step" in message and message["step"]["requests"]:
                batch.append(message["step"])
            if len(batch) >= 50 or "done" in message:
                self._keep(batch, phase, f"serving {seed}", 0)
                what = "held out" if phase == "serve" else "to fit on"
                say(f"block size {self.limits.block_size}: serving run, {what}")
                batch = []

    def _seconds_per_request(self) -> float:
        """Engine seconds that `serving_trace`'s middle request takes, by what was measured so far."""
        prompt, output = serving_medians(self.limits)
        # Lognormal means lie above the medians.
        prompt, output = prompt * 1.5, output * 1.28
        prefills = [r for r in self.rows if r.prefill_tokens > 64 and not r.num_decodes]
        decodes = [r for r in self.rows if r.num_decodes >= 2 and not r.prefill_new]
        if not prefills or not decodes:
            return 0.5
        per_token = float(np.median([r.total_s / r.prefill_tokens for r in prefills]))
        wanted = max(2, self.limits.max_num_seqs // 4)
        nearest = min(decodes, key=lambda r: abs(r.num_decodes - wanted))
        return prompt * per_token + output * nearest.total_s / nearest.num_decodes


def session_about(
    hello: dict[str, Any],
    started: dict[str, Any],
    model: dict[str, Any],
    engine_args: dict[str, Any],
    threads: int,
    temperature: float,
    load_average: float | None = None,
) -> dict[str, Any]:
    """What is known about a session, JSON-ready and free of paths.

    `load_average`: of the machine before the measurement began; None once it is the measurement's own.
    """
    return {
        **hello,
        **started,
        "model": model,
        "threads": threads,
        "temperature": temperature,
        "engine_args": {k: v for k, v in engine_args.items() if k != "model"},
        "load_average": load_average,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def kernel_rows(max_num_batched_tokens: int) -> list[int]:
    """Numbers of rows at which matrix products are timed: powers of two and their midpoints."""
    rows, size = [1], 2
    while size <= max_num_batched_tokens:
        rows += [n for n in (size, size * 3 // 2) if n > rows[-1] and n <= max_num_batched_tokens]
        size *= 2
    return rows


def write_model(config: dict[str, Any], folder: Path) -> Path:
    """A folder with nothing but config.json: all that vLLM needs to load random weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
    return folder


def busy_warning(samples: Samples, cores: int) -> str | None:
    """One sentence if something else ran beside the measurement, else None."""
    rows = [row for row in samples.rows if not row.warmup]
    share = sum(row.disturbed for row in rows) / len(rows) if rows else 0.0
    found = [s.get("load_average") for s in samples.sessions.values()]
    loads = [load for load in found if isinstance(load, int | float)]
    if share > 0.1:
        return (
            f"this machine was busy: in {share:.0%} of {len(rows)} steps another process had the engine's "
            "core; they are left out, but the rest suffered too. Measure again when nothing else runs"
        )
    if loads and max(loads) > 0.5 * cores:
        return (
            f"the load average was {max(loads):.1f} on {cores} cores when the measurement began: "
            "something else was running. Measure again when nothing else runs"
        )
    return None
