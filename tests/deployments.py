"""Random deployments, traces and step models for runs that two engines must agree on to the last byte.

    python tests/deployments.py [--n 1000] [--seed 1] [--start 0] [--kind hard]

runs as many of them on the compiled and on the step-by-step path and compares everything.
`hard_deployment` is made to reach what `deployment` seldom does: long decodes that end, run out of blocks or
out of budget together, arrivals at the very end of a step, lengths of nothing, step models of random tables,
corrections of corrections.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
import time
from collections import Counter
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from workloads import Picker, RandomPicker

from vsim.errors import UserError
from vsim.models.correction import Coefficients, CorrectedStepModel
from vsim.models.curve import Curve
from vsim.models.engine_steps import Attention, EngineStepModel, Host
from vsim.models.load import LoadedStepModel, load_step_model, read_profile
from vsim.models.roofline import RooflineStepModel
from vsim.models.step import StepModel, StepShape
from vsim.models.table_params import StepContext, build_tables
from vsim.sim.cluster import ReplicaSpec, simulate_cluster
from vsim.sim.config import KVGroup, SchedulerConfig
from vsim.sim.front_end import FrontEnd
from vsim.sim.router import ROUTES, named_route
from vsim.sim.run import Run
from vsim.traces.trace import Sessions, Trace, TraceSource

PROFILES = ("rtx4090-llama-3.1-8b", "rtxpro6000-llama-3.1-8b")


class EndlessError(Exception):
    """Requests that take each other's blocks for ever."""


class _Watch:
    """Called after each step: long before memory is short, nobody having ended means that nobody will."""

    MOST = 30_000

    def __init__(self) -> None:
        self._last = self._since = 0

    def __call__(self, _now: int, ended: int) -> None:
        self._since = 0 if ended != self._last else self._since + 1
        self._last = ended
        if self._since > self.MOST:
            raise EndlessError


@dataclass(frozen=True)
class Deployment:
    """Arguments of `simulate_cluster`, made afresh for each engine: models and routes have a memory."""

    trace: Trace
    config: SchedulerConfig
    model: tuple[Any, ...]
    replicas: int
    route: str
    max_concurrency: int | None
    frontend_s: float
    front_end: FrontEnd | None

    def run(self, engine: Any, model: StepModel | None = None) -> tuple[Run, StepModel]:
        model = step_model(self.model) if model is None else model
        spec = ReplicaSpec(self.config, model, None, self.frontend_s)
        run = simulate_cluster(
            self.trace,
            [spec] * self.replicas,
            named_route(self.route, seed=3),
            max_concurrency=self.max_concurrency,
            front_end=self.front_end,
            engine=engine,
            on_step=_Watch() if engine == "reference" else None,
        )
        return run, model


def deployment(pick: Picker) -> Deployment:
    block_size = pick.one_of([16, 1, 4, 8, 16, 32, 64])
    max_model_len = block_size * pick.integer(4, 40) + pick.one_of([0, 0, 1, block_size - 1])
    version = pick.one_of(["0.32.0"] * 6 + ["0.19.0", "0.8.5"])
    old = version != "0.32.0"
    oldest = version == "0.8.5"
    stages = pick.one_of([1, 1, 1, 1, 2, 3])
    is_async = not oldest and (stages == 1 or not old) and pick.one_of([False, True])
    fits = -(-max_model_len // block_size)
    # From less than the longest request to plenty.
    blocks = pick.one_of([fits, fits + 1, fits + 1, 2 * fits, 4 * fits, 20 * fits]) + pick.integer(
        0, 5
    )
    groups = (KVGroup(),)
    if not old and pick.one_of([False, False, False, True]):
        window = pick.one_of([1, 5, block_size, 3 * block_size + 1])
        groups = pick.one_of(
            [
                (KVGroup("swa", window),),
                (KVGroup(), KVGroup("swa", window)),
                (KVGroup(), KVGroup("swa", window), KVGroup("swa", window)),
                (KVGroup(), KVGroup("swa", window, block_size=2 * block_size)),
                (KVGroup(), KVGroup()),
            ]
        )
        blocks *= len(groups)
    config = SchedulerConfig(
        kv_groups=groups,
        engine_version=version,
        block_size=block_size,
        num_gpu_blocks=blocks + 1,
        max_num_seqs=pick.one_of([64, 1, 2, 5, 16, 256]),
        max_num_batched_tokens=pick.one_of([2048, 16, 33, 64, 256, 512]),
        max_num_scheduled_tokens=pick.one_of([None, None, None, None if oldest else 24]),
        max_num_active_seqs=None if old else pick.one_of([None, None, None, 3]),
        max_model_len=max_model_len,
        enable_prefix_caching=pick.one_of([False, True]),
        enable_chunked_prefill=pick.one_of([True, True, True, False]),
        policy="fcfs" if oldest else pick.one_of(["fcfs", "fcfs", "priority"]),
        long_prefill_token_threshold=pick.one_of([0, 0, 0, 7, block_size, 100]),
        long_prefill_token_threshold_adaptive=not old and pick.one_of([False, True]),
        scheduler_reserve_full_isl=pick.one_of([True, True, False]),
        watermark=0.0 if old else pick.one_of([0.0, 0.0, 0.02, 0.2]),
        async_scheduling=is_async,
        pipeline_parallel_size=stages,
        v2_model_runner=stages > 1 or pick.one_of([True, True, False]),
    )
    replicas = pick.one_of([1, 1, 1, 1, 2, 3, 5])
    overlong = pick.one_of([None, None, "reject", "clip"])
    return Deployment(
        random_trace(pick, config),
        config,
        random_model(pick),
        replicas,
        pick.one_of(list(ROUTES)),
        pick.one_of([None, None, 1, 3, 20]),
        pick.one_of([0.0, 0.0, 0.006, 0.05]),
        None if overlong is None else FrontEnd(max_model_len, overlong),
    )


def random_trace(pick: Picker, config: SchedulerConfig) -> Trace:
    """Lengths around block boundaries; bursts with ties; prompts that share their beginnings."""
    n = pick.one_of([1, 8, 30, 30, 60, 120])
    rng = np.random.default_rng(pick.integer(0, 1 << 30))
    longest = config.max_model_len + (3 if pick.one_of([False, False, True]) else -2)
    most = max(1, min(longest, pick.one_of([40, 200, 2000])))
    prompt = rng.integers(1, most + 1, n)
    on_edge = rng.random(n) < 0.3
    prompt[on_edge] = np.maximum(1, prompt[on_edge] // config.block_size * config.block_size)
    output = rng.integers(1, 1 + pick.one_of([1, 5, 60, 200]), n)
    kind = pick.one_of(["spread", "burst", "zero", "grid"])
    gaps = {
        "spread": rng.exponential(pick.one_of([1e6, 3e7, 5e8]), n),
        "burst": np.where(rng.random(n) < 0.2, 2e8, 0),
        "zero": np.zeros(n),
        "grid": rng.integers(0, 4, n) * 1e7,
    }[kind]
    arrival = np.cumsum(gaps).astype(np.int64)
    offsets = ids = None
    tokens = 0
    if pick.one_of([False, True]):
        tokens = pick.one_of([config.block_size, 16, 24, 50, 512])
        count = np.minimum(rng.integers(0, 12, n), -(-prompt // tokens) + 1)
        offsets = np.concatenate([[0], np.cumsum(count)]).astype(np.int64)
        # Trees: the first ids are common, the later ones rare; some negative.
        ids = np.concatenate(
            [rng.integers(-1, 2 + depth // 2, 1) for c in count for depth in range(c)]
            or [np.empty(0)]
        ).astype(np.int64)
    capped = pick.one_of([False, False, True])
    return Trace(
        arrival_ns=arrival - arrival[0],
        prompt_tokens=prompt.astype(np.int64),
        output_tokens=output.astype(np.int64),
        source=TraceSource("random", "inline"),
        max_tokens=np.maximum(1, output + rng.integers(-2, 9, n)).astype(np.int64)
        if capped
        else None,
        priority=rng.integers(0, 4, n).astype(np.int32) if pick.one_of([False, True]) else None,
        prefix_offsets=offsets,
        prefix_ids=ids,
        prefix_block_tokens=tokens,
        session=rng.integers(-1, 6, n).astype(np.int32) if pick.one_of([False, True]) else None,
        sessions=random_turns(pick, rng, n),
        aborted=rng.random(n) < 0.1 if pick.one_of([False, False, True]) else None,
    )


def hard_deployment(pick: Picker) -> Deployment:
    """Where requests that decode side by side are disturbed in every way there is."""
    base = deployment(pick)
    block_size = pick.one_of([16, 1, 2, 3, 8, 32, 128, 256])
    max_model_len = pick.one_of([64, 100, 257, 600, 1024])
    fits = -(-max_model_len // block_size)
    most_seqs = pick.one_of([4, 1, 2, 7, 32, 100])
    version = pick.one_of(["0.32.0"] * 5 + ["0.19.0", "0.8.5", "0.11.2"])
    old, oldest = version != "0.32.0", version in ("0.8.5", "0.11.2")
    config = dataclasses.replace(
        base.config,
        kv_groups=(KVGroup(),),
        engine_version=version,
        block_size=block_size,
        # vLLM starts only where one request of the longest length fits.
        num_gpu_blocks=1 + pick.one_of([fits, fits + 1, 2 * fits, most_seqs * fits]),
        max_num_seqs=most_seqs,
        max_num_active_seqs=None,
        max_num_batched_tokens=pick.one_of([most_seqs, most_seqs + 1, 2 * most_seqs, 64, 300, 4096])
        + pick.one_of([0, 0, 1]),
        max_num_scheduled_tokens=pick.one_of([None, None, None if oldest else most_seqs + 2]),
        max_model_len=max_model_len,
        enable_prefix_caching=pick.one_of([True, False]),
        long_prefill_token_threshold=pick.one_of([0, 0, 1, 5, 40]),
        long_prefill_token_threshold_adaptive=not old and pick.one_of([False, True]),
        watermark=0.0 if old else pick.one_of([0.0, 0.0, 0.05, 0.5]),
        policy="fcfs" if oldest else pick.one_of(["fcfs", "priority"]),
        async_scheduling=not oldest and pick.one_of([True, True, False]),
        pipeline_parallel_size=1 if pick.one_of([True, True, True, False]) or old else 2,
    )
    return dataclasses.replace(
        base,
        trace=hard_trace(pick, config),
        config=config,
        model=hard_model(pick),
        replicas=pick.one_of([1, 1, 1, 2, 9]),
        max_concurrency=pick.one_of([None, None, 1, most_seqs, most_seqs + 1]),
        frontend_s=pick.one_of([0.0, 0.01, 0.003]),
        front_end=pick.one_of([None, FrontEnd(max_model_len, "clip")]),
    )


def hard_trace(pick: Picker, config: SchedulerConfig) -> Trace:
    """Few kinds of lengths, so that many requests end in one step; arrivals on a grid of step times."""
    n = pick.one_of([2, 12, 40])
    rng = np.random.default_rng(pick.integer(0, 1 << 30))
    kinds = pick.one_of([1, 2, 5, n])
    longest = config.max_model_len
    prompts = rng.integers(0 if pick.one_of([False, False, True]) else 1, longest + 1, kinds)
    if pick.one_of([True, False]):
        prompts = np.minimum(prompts, pick.one_of([1, 2, config.block_size, 40]))
    outputs = rng.integers(0, pick.one_of([2, 30, 300, longest]) + 1, kinds)
    row = rng.integers(0, kinds, n)
    prompt, output = prompts[row], outputs[row]
    gap = pick.one_of([0, 5_000_000, 10_000_000, 40_000_000])
    arrival = np.sort(rng.integers(0, 1 + n // pick.one_of([1, 2, 8]), n)) * gap
    offsets = ids = None
    tokens = 0
    if pick.one_of([False, True]):
        tokens = pick.one_of([config.block_size, 4 * config.block_size, 7, 64])
        count = -(-prompt // tokens) + rng.integers(-1, 2, n)
        count = np.maximum(count, 0)
        offsets = np.concatenate([[0], np.cumsum(count)]).astype(np.int64)
        # The same kind has the same content, but for a few that differ somewhere.
        ids = np.concatenate([row[i] * 1000 + np.arange(c) for i, c in enumerate(count)])
        odd = rng.random(len(ids)) < pick.one_of([0.0, 0.02, 0.3])
        ids = np.where(odd, rng.integers(-5, 5, len(ids)), ids).astype(np.int64)
    return Trace(
        arrival_ns=(arrival - arrival[0]).astype(np.int64),
        prompt_tokens=prompt.astype(np.int64),
        output_tokens=output.astype(np.int64),
        source=TraceSource("hard", "inline"),
        max_tokens=(output + rng.integers(1, 4, n)).astype(np.int64)
        if pick.one_of([False, True])
        else None,
        priority=rng.integers(0, 2, n).astype(np.int32) if pick.one_of([False, True]) else None,
        prefix_offsets=offsets,
        prefix_ids=ids,
        prefix_block_tokens=tokens,
        session=rng.integers(-1, 3, n).astype(np.int32),
        sessions=random_turns(pick, rng, n),
        aborted=rng.random(n) < 0.5 if pick.one_of([False, False, False, True]) else None,
    )


def hard_model(pick: Picker) -> tuple[Any, ...]:
    """Steps of one length, tables of random points, and up to three corrections on one another."""
    kind = pick.one_of(["even", "random tables", "random tables", "roofline", "engine-steps"])
    corrections = tuple(
        (
            pick.one_of([0.0, 1e-3, -1e-4]),
            pick.one_of([0.0, 2e-3, -3e-3]),
            pick.one_of([0.0, 1e-6, -1e-6]),
            pick.one_of([0.0, 3e-9, -5e-8]),
            pick.one_of([0.0, -2e-5, 1e-4]),
            pick.one_of([1.0, 0.97, 1.3, 0.01]),
        )
        for _ in range(pick.one_of([0, 0, 1, 2, 3]))
    )
    return (kind, pick.integer(0, 1 << 20), corrections, pick.one_of([0.0, 0.0, 1e-3, 0.02]))


def random_tables(seed: int, host_s: float) -> StepModel:
    """A tables model of a few random points: with and without mixed points, skew, experts, a link."""
    rng = np.random.default_rng(seed)

    def axis(most: int, count: int) -> list[int]:
        return sorted({1, *rng.integers(1, most, count).tolist()})

    def curve(name: str, most: int) -> dict[str, Any]:
        xs = axis(most, int(rng.integers(0, 6)))
        return {name: xs, "us": np.sort(rng.uniform(1, 900, len(xs))).tolist()}

    chunks = axis(3000, int(rng.integers(0, 4)))
    axes = [axis(2500, int(rng.integers(0, 5))) for _ in range(3)]
    rows = []

    def add(chunk: int, context: int, n: int) -> None:
        which = int(rng.integers(0, 3))
        rows.append([chunk, context, n, which, rng.uniform(1, 800, len(axes[which])).tolist()])

    for n in axis(120, int(rng.integers(0, 5))):
        add(0, 0, n)
    for chunk in chunks:
        for context in [0, *axis(2000, int(rng.integers(0, 3)))]:
            rows.append([chunk, context, 0, len(axes), [float(rng.uniform(1, 900))]])
    axes.append([0])
    if rng.random() < 0.6:
        for chunk in chunks[: int(rng.integers(1, 3))]:
            for context in [0, *axis(2000, int(rng.integers(0, 2)))]:
                for n in axis(90, int(rng.integers(0, 3))):
                    add(chunk, context, n)
    params: dict[str, Any] = {
        "num_layers": int(rng.integers(1, 40)),
        "hidden_size": 4096,
        "vocab_size": 32000,
        "tensor_parallel_size": int(rng.integers(1, 3)),
        "link": {"latency_s": 1e-5, "bytes_per_s": 5e10},
        "per_step": curve("tokens", 4000),
        "per_layer": curve("tokens", 4000),
        "head": curve("sequences", 200),
        "attention": {"kv_axes": axes, "rows": rows},
        "host": {"base_s": host_s, "per_seq_s": host_s / 50},
    }
    if rng.random() < 0.5:
        edges = [sorted(rng.uniform(0, most, 2).tolist()) for most in (60, 1, 2000, 2000)]
        keys = {tuple(int(x) for x in rng.integers(0, 3, 5)) for _ in range(60)}
        params["skew"] = {
            "default": float(rng.choice([0.0, 0.4])),
            "chunks": [0, *chunks],
            "n_bins": edges[0],
            "share_bins": edges[1],
            "longest_bins": edges[2],
            "prefill_bins": edges[3],
            "alpha": [[*key, float(rng.uniform(-0.2, 1))] for key in sorted(keys)],
        }
    if rng.random() < 0.3:
        params["experts"] = {
            "num_experts": 8,
            "top_k": 2,
            "rows": [[n, [1, 4, 8], [3.0, 7.0, 20.0]] for n in axis(2000, 3)],
        }
    return build_tables(params, StepContext(enforce_eager=bool(rng.random() < 0.5)))


def random_turns(pick: Picker, rng: np.random.Generator, n: int) -> Sessions | None:
    """Conversations that interleave, with thinking times that meet, and turns that two others follow."""
    if not pick.one_of([False, False, True]):
        return None
    after = np.array([rng.integers(-1, i) if i and rng.random() < 0.6 else -1 for i in range(n)])
    think = rng.integers(0, 3, n) * pick.one_of([0, 10_000_000, 33_333_333])
    return Sessions(after.astype(np.int64), np.where(after >= 0, think, 0).astype(np.int64))


def random_model(pick: Picker) -> tuple[Any, ...]:
    """What `step_model` makes one of."""
    kind = pick.one_of(["roofline", "tables", "loaded tables", "engine-steps"])
    return (kind, pick.integer(0, 1), pick.integer(0, 2), pick.one_of([0.0, 1e-4, 5e-3]))


@functools.lru_cache(maxsize=64)
def _plain(kind: str, variant: int, host_s: float) -> StepModel:
    if kind == "roofline":
        more = {
            "window": 64,
            "window_flops_per_pair": 3e5,
            "window_kv_bytes_per_token": 9e3,
            "num_experts": 8,
            "top_k": 2,
            "expert_bytes": 1.7e8,
            "expert_flops_per_token": 3e9,
            "all_reduce_latency_s": 1e-4,
            "all_reduce_s_per_token": 1e-8,
        }
        return RooflineStepModel(
            32, 1.4e10, 1.4e10, 1e9, 1e9, 5e5, 131072, 312e12, 2e12,
            host_base_s=host_s, host_per_seq_s=host_s / 300, **(more if variant else {}),
        )  # fmt: skip
    return EngineStepModel(
        Curve([1, 8, 64, 2048], [0.004, 0.0043, 0.009, 0.21]),
        3e-6,
        1e-4 * variant,
        2e-4,
        Attention(1e-9, 3e-8, 4e-8, 1e-8 * variant),
        Host(host_s, host_s / 300, host_s / 70),
    )


def step_model(recipe: tuple[Any, ...]) -> StepModel:
    kind, variant, correction, host_s = recipe
    if isinstance(correction, tuple):
        if kind == "even":
            even = 0.01 if variant % 2 else 0.005
            model: StepModel = EngineStepModel(
                Curve([1, 4096], [even, even]),
                0.0, 0.0, 0.0, Attention(0.0, 0.0, 0.0, 0.0), Host(host_s, 0.0, 0.0),
            )  # fmt: skip
        elif kind == "random tables":
            model = random_tables(variant, host_s)
        else:
            model = _plain(kind, variant % 2, host_s)
        for terms in correction:
            model = CorrectedStepModel(model, Coefficients(*terms))
        return model
    if kind == "loaded tables":
        return load_step_model(
            PROFILES[variant], context=StepContext(block_size=16, enforce_eager=correction == 2)
        )
    if kind == "tables":
        calibration = read_profile(PROFILES[variant])[1]
        model = calibration.step_model(StepContext())
        model.host_base_s, model.host_per_seq_s = host_s, host_s / 300  # type: ignore[attr-defined]
    else:
        model = _plain(kind, variant, host_s)
    if correction:
        model = CorrectedStepModel(
            model, Coefficients(1e-3, 2e-3, 1e-6, 3e-9, -2e-5, 0.97 if correction == 1 else 0.01)
        )
    return model


class Heard:
    """A step model that notes whether an answer was no time: the kernel leaves such a run alone."""

    def __init__(self, model: StepModel) -> None:
        self._model = model
        self.nonsense = False

    def device_seconds(self, shape: StepShape) -> float:
        seconds = self._model.device_seconds(shape)
        self.nonsense |= not 0 <= seconds < 1e6
        return seconds

    def host_seconds(self, shape: StepShape) -> float:
        return self._model.host_seconds(shape)


def left_alone(case: Deployment) -> bool:
    """May the kernel refuse it?"""
    if case.config.kv_groups != (KVGroup(),) and case.config.enable_prefix_caching:
        return True  # it knows no block by name there: hits are the reference path's
    heard = Heard(step_model(case.model))
    case.run("reference", heard)
    return heard.nonsense


def difference(case: Deployment) -> str | None:
    """What differs between the two paths; None: nothing."""
    return compared(case)[0]


def compared(case: Deployment) -> tuple[str | None, Run | None]:
    """What differs (None: nothing), and the run (None: not compared, for the kernel may leave it alone)."""
    try:
        slow, slow_model = case.run("reference")
    except (UserError, EndlessError):
        return None, None
    try:
        fast, fast_model = case.run("fast")
    except UserError as error:
        assert left_alone(case), error
        return None, None
    return _differs(fast, slow, fast_model, slow_model), fast


def _differs(fast: Run, slow: Run, fast_model: StepModel, slow_model: StepModel) -> str | None:
    for field in fields(Run):
        here, there = getattr(fast, field.name), getattr(slow, field.name)
        pairs = {field.name: (here, there)}
        if isinstance(there, dict) and field.name in ("requests", "steps"):
            if list(here) != list(there):
                return f"{field.name}: columns {list(here)} and {list(there)}"
            pairs = {f"{field.name}.{name}": (here[name], there[name]) for name in there}
        for name, (a, b) in pairs.items():
            if isinstance(b, np.ndarray):
                if a.dtype != b.dtype or a.shape != b.shape or a.tobytes() != b.tobytes():
                    where = (
                        np.flatnonzero((a != b).reshape(len(a), -1).any(axis=1))[:3]
                        if a.shape == b.shape
                        else (a.shape, b.shape)
                    )
                    return f"{name}: {a.dtype}, {b.dtype}, first at {where}"
            elif a != b:
                return f"{name}: {a!r} and {b!r}"
    if isinstance(slow_model, LoadedStepModel):
        assert isinstance(fast_model, LoadedStepModel)
        if fast_model.provenance != slow_model.provenance or fast_model.steps != slow_model.steps:
            return "the step model's own counts"
    return None


KINDS = {"plain": deployment, "hard": hard_deployment}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--n", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--kind", choices=list(KINDS), default="plain")
    asked = parser.parse_args()
    seen: Counter[str] = Counter()
    began = time.monotonic()
    for index in range(asked.start, asked.start + asked.n):
        case = KINDS[asked.kind](RandomPicker(f"fast/{asked.seed}/{index}"))
        wrong, run = compared(case)
        if wrong is not None:
            print(
                f"{asked.kind} deployment {index} of seed {asked.seed} differs in {wrong}\n{case.config}"
            )
            return 1
        if run is None:
            seen["not compared (left to the reference path, or endless)"] += 1
            continue
        seen["deployments"] += 1
        seen["with several groups or windows"] += case.config.kv_groups != (KVGroup(),)
        seen["steps"] += len(run.steps["start_ns"])
        seen["requests"] += run.num_requests
        for name, count in run.counters.items():
            seen[f"with {name}"] += count > 0
        seen["with rejections"] += bool(run.reasons)
        seen["stalled"] += run.ended_early is not None
        seen["several replicas"] += case.replicas > 1
        seen["with conversations"] += case.trace.sessions is not None
    print(
        f"{seen['deployments']} deployments equal in every byte, {time.monotonic() - began:.0f} s"
    )
    for name, count in seen.items():
        print(f"{count:12,} {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
