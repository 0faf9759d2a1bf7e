"""`vsim calibrate` from start to artifact: sessions, budget, resuming, fit."""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vsim.calibrate.design import Limits
from vsim.calibrate.measure import (
    KERNEL_REPEATS,
    SERVING_SHARE,
    TRAINING_SHARE,
    Progress,
    Session,
    busy_warning,
    kernel_rows,
    session_about,
    write_model,
)
from vsim.calibrate.samples import Journal, Samples, check_same_device, compact, read_samples
from vsim.calibrate.worker import Worker, find_vllm_python, worker_environment
from vsim.errors import UserError
from vsim.models.artifact import Calibration, write_calibration
from vsim.models.hardware import Gpu, find_gpu
from vsim.models.model_spec import ModelSpec, bundled_models, load_model, read_config

ENOUGH_SERVED = 200  # steps of a serving run after which it need not be measured again
# A slow start must not leave a session without a grid, nor start one that can't get to it.
LEAST_GRID_S = 15.0
SECOND_ENGINE_S = 60.0  # of the budget for each engine: less would mostly be spent on starting it


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure, and with what. `engine_flags`: vLLM's own names, only those that were given."""

    gpu: Gpu
    model: str
    out: Path
    block_sizes: tuple[int, ...]
    budget_s: float
    tensor_parallel_size: int = 1
    repeats: int = 3
    threads: int = 1
    kv_cache_gib: float = 1.0
    temperature: float = 0.0
    vllm_python: str | None = None
    engine_flags: dict[str, Any] = field(default_factory=dict)
    command: str = ""


@dataclass(slots=True)
class Outcome:
    """What came of it. `calibration` is None if there was too little to fit; `why_not` says so."""

    samples: Samples
    samples_path: Path
    calibration: Calibration | None
    why_not: str = ""
    warning: str | None = None
    interrupted: bool = False


def model_and_config(name_or_folder: str) -> tuple[ModelSpec, dict[str, Any]]:
    """A model's shape and the config.json that vLLM is given."""
    spec = load_model(name_or_folder)
    for row in bundled_models().values():
        if spec.name in (row["name"], *row["aliases"]):
            return spec, dict(row["config"])
    path = Path(name_or_folder)
    return spec, read_config(path / "config.json" if path.is_dir() else path)


def engine_args(
    model_folder: Path,
    block_size: int | None,
    *,
    on_cpu: bool,
    tensor_parallel_size: int = 1,
    kv_cache_gib: float | None = None,
    flags: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """vLLM's EngineArgs for a measuring engine: random weights, no tokenizer, steps one after the other."""
    args: dict[str, Any] = {
        "model": str(model_folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "async_scheduling": False,
        "disable_log_stats": True,
        "enforce_eager": on_cpu,
        "tensor_parallel_size": tensor_parallel_size,
        "distributed_executor_backend": "uni" if tensor_parallel_size == 1 else "mp",
    }
    if block_size is not None:
        args["block_size"] = block_size
    if on_cpu and kv_cache_gib is not None:
        # VLLM_CPU_KVCACHE_SPACE knows whole GiB only.
        args["kv_cache_memory_bytes"] = int(kv_cache_gib * 2**30)
    args |= {name: value for name, value in (flags or {}).items() if value is not None}
    if args.get("dtype") == "auto":
        args["dtype"] = "bfloat16"
    return args


def check_device(gpu: Gpu, hello: dict[str, Any], tensor_parallel_size: int = 1) -> None:
    """Refuse to measure on another device than the one named. Raises UserError."""
    if hello["platform"] != gpu.platform:
        have = "a CPU only" if hello["platform"] == "cpu" else hello["device"]
        raise UserError(
            f"--gpu {gpu.name} names {gpu.device_name}, but vLLM sees {have} here ({hello['device']}): "
            "calibrate on the machine that has it, or name the device at hand"
        )
    if gpu.platform == "cpu":
        return
    try:
        same = find_gpu(hello["device"]).name == gpu.name
    except UserError:
        same = False
    if not same:
        raise UserError(
            f"--gpu {gpu.name} names {gpu.device_name}, but this machine has {hello['device']}: "
            "its step times would be filed under the wrong name"
        )
    if hello["device_count"] < tensor_parallel_size:
        raise UserError(
            f"tensor_parallel_size={tensor_parallel_size} needs as many GPUs; {hello['device_count']} are visible"
        )


def calibrate(plan: Plan, say: Callable[[str, Progress], None]) -> Outcome:
    """Measure until the budget is spent, then fit. Ctrl-C ends the measuring, not the fitting.

    Raises UserError if there is no vLLM, the device is another one, or the samples file is another's.
    """
    spec, config = model_and_config(plan.model)
    python = find_vllm_python(plan.vllm_python)
    earlier = read_samples(plan.out)
    progress = Progress()
    deadline = time.monotonic() + plan.budget_s
    interrupted = False
    start_s = 0.0
    load = round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
    with tempfile.TemporaryDirectory(prefix="vsim-calibrate-") as scratch:
        folder = Path(scratch)
        model_folder = write_model(config, folder / "model")
        try:
            engines = plan.block_sizes * _rounds(plan)
            for number, block_size in enumerate(engines):
                now = time.monotonic()
                until = now + (deadline - now) / (len(engines) - number)
                if number and deadline - now < start_s + LEAST_GRID_S:
                    break  # the block sizes before it are what there is time for
                if number:
                    earlier = read_samples(plan.out)
                start_s = _session(
                    plan,
                    python,
                    folder,
                    model_folder,
                    config,
                    block_size,
                    until,
                    earlier,
                    progress,
                    say,
                    load if number == 0 else None,
                )
        except KeyboardInterrupt:
            interrupted = True
    return _fit(plan, spec, config, interrupted)


def _rounds(plan: Plan) -> int:
    """How many engines are started for each block size.

    On a CPU, where an engine's memory happens to lie makes all its steps some percent faster or slower. A
    second engine halves that, and shows in the noise floor how much it is. A GPU has no such luck, and its
    models take minutes to load.
    """
    share_s = plan.budget_s / (2 * max(1, len(plan.block_sizes)))
    return 2 if plan.gpu.platform == "cpu" and share_s >= SECOND_ENGINE_S else 1


def refit(plan: Plan) -> Outcome:
    """Fit the samples beside `plan.out` again, measuring nothing."""
    spec, config = model_and_config(plan.model)
    samples = read_samples(plan.out)
    for session in samples.sessions.values():
        if session["model"] != config:
            raise UserError(
                f"the samples of {plan.out.name} were measured with another model than {spec.name}"
            )
        check_device(plan.gpu, session, plan.tensor_parallel_size)
    return _fit(plan, spec, config, False)


def _fit(plan: Plan, spec: ModelSpec, config: dict[str, Any], interrupted: bool) -> Outcome:
    samples = read_samples(plan.out)
    if not samples.rows:
        return Outcome(samples, plan.out, None, "nothing was measured", None, interrupted)
    path = compact(plan.out)
    cores = int(next(iter(samples.sessions.values())).get("cores") or 1)
    warning = busy_warning(samples, cores)
    try:
        from vsim.calibrate.fit_samples import fit_samples
    except ImportError as missing:
        why = f"{missing.name} is not installed here: take the samples to a machine with it and --refit"
        return Outcome(samples, path, None, why, warning, interrupted)
    try:
        calibration = fit_samples(samples, provenance(plan, spec, config, samples, warning))
    except UserError as error:
        return Outcome(samples, path, None, str(error), warning, interrupted)
    write_calibration(calibration, plan.out)
    return Outcome(samples, path, calibration, "", warning, interrupted)


def _session(
    plan: Plan,
    python: Path,
    folder: Path,
    model_folder: Path,
    config: dict[str, Any],
    block_size: int,
    until: float,
    earlier: Samples,
    progress: Progress,
    say: Callable[[str, Progress], None],
    load: float | None,
) -> float:
    """One engine at one block size, until the clock says so. Returns the seconds its start took."""
    began = time.monotonic()
    on_cpu = plan.gpu.platform == "cpu"
    env = worker_environment(plan.threads, on_cpu)
    say(f"block size {block_size}: starting vLLM", progress)
    with Worker(python, env, folder) as worker:
        check_device(plan.gpu, worker.hello, plan.tensor_parallel_size)
        args = engine_args(
            model_folder,
            block_size,
            on_cpu=on_cpu,
            tensor_parallel_size=plan.tensor_parallel_size,
            kv_cache_gib=plan.kv_cache_gib,
            flags=plan.engine_flags,
        )
        started = worker.start(args, plan.temperature, yardstick(plan, earlier))
        about = session_about(
            worker.hello, started, config, args, plan.threads, plan.temperature, load
        )
        check_same_device(earlier, about, plan.out)
        limits = limits_of(started)
        name = f"{about['date']}-b{block_size}"
        start_s = time.monotonic() - began
        until = max(until, time.monotonic() + LEAST_GRID_S)
        with Journal(plan.out) as journal:
            journal.session(name, about)
            session = Session(
                worker,
                journal,
                name,
                limits,
                single_thread=on_cpu and plan.threads == 1 and plan.tensor_parallel_size == 1,
                progress=progress,
            )
            if model_in_process(plan) and not any(
                "kernels" in s for s in earlier.sessions.values()
            ):
                say("timing the model's matrix products", progress)
                rows = kernel_rows(limits.max_num_batched_tokens)
                about["kernels"] = worker.kernels(rows, KERNEL_REPEATS)
                journal.session(name, about)
                earlier.sessions[name] = about
            session.rows += [r for r in earlier.rows if r.block_size == limits.block_size]
            left = until - time.monotonic()
            served = Counter(r.phase for r in earlier.rows if r.block_size == limits.block_size)
            shares = [
                (phase, share * left)
                for phase, share in (("train", TRAINING_SHARE), ("serve", SERVING_SHARE))
                if served[phase] < ENOUGH_SERVED
            ]
            stop = until - sum(seconds for _, seconds in shares)
            session.grid(
                earlier.repeats_done(), stop, plan.repeats, lambda line: say(line, progress)
            )
            for phase, seconds in shares:
                stop += seconds
                session.serving(phase, stop, lambda line: say(line, progress))
    return start_s


def yardstick(plan: Plan, earlier: Samples) -> dict[str, int | None] | None:
    """Whether durations are brought to the undisturbed machine's speed, and by which reference.

    One thread on the CPU only: a GPU is nobody else's, and several threads wait for the slowest core.
    Sessions of one file share the reference; a file without one goes on without.
    """
    if plan.gpu.platform != "cpu" or plan.threads > 1:
        return None
    if earlier.sessions:
        reference = next(iter(earlier.sessions.values())).get("yardstick_ns")
        return None if reference is None else {"reference_ns": reference}
    return {"reference_ns": None}


def model_in_process(plan: Plan) -> bool:
    """Is the model in the worker's own process, where its modules can be called?"""
    return plan.tensor_parallel_size == 1


def limits_of(started: dict[str, Any]) -> Limits:
    """What the started engine can hold in a step."""
    return Limits(
        max_num_batched_tokens=started["max_num_batched_tokens"],
        max_num_seqs=started["max_num_seqs"],
        max_model_len=started["max_model_len"],
        kv_tokens=(started["num_gpu_blocks"] - 1) * started["block_size"],
        block_size=started["block_size"],
    )


def provenance(
    plan: Plan, spec: ModelSpec, config: dict[str, Any], samples: Samples, warning: str | None
) -> dict[str, Any]:
    """The artifact's birth certificate: versions, device, engine arguments; no paths."""
    last = list(samples.sessions.values())[-1]
    return {
        "label": f"measured on {last['device']} with vLLM {last['vllm_version']}",
        "gpu": plan.gpu.name,
        "gpu_name": last["device"],
        "driver": last.get("driver", ""),
        "model": spec.name,
        "model_config": config,
        "tensor_parallel_size": last["tensor_parallel_size"],
        "dtype": last["dtype"],
        "quantization": last["quantization"],
        "kv_cache_dtype": last["kv_cache_dtype"],
        "vllm_version": last["vllm_version"],
        "torch_version": last["torch_version"],
        "python_version": last["python_version"],
        "block_sizes": sorted({s["block_size"] for s in samples.sessions.values()}),
        "threads": last["threads"],
        "enforce_eager": last["enforce_eager"],
        "async_scheduling": last["async_scheduling"],
        "temperature": last["temperature"],
        "yardstick_ns": last.get("yardstick_ns"),
        "engine_args": last["engine_args"],
        "measured_at": last["date"],
        "repeats": plan.repeats,
        "source": "vsim calibrate: steps of the real engine, random weights",
        "command": plan.command,
        "assumptions": [warning] if warning else [],
    }
