"""A spot check from start to verdict: real engine, repeats, prediction, comparison."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vsim.calibrate.campaign import check_device, engine_args, limits_of, model_and_config
from vsim.calibrate.ensemble import Band, bands
from vsim.calibrate.measure import KERNEL_REPEATS, kernel_rows, write_model
from vsim.calibrate.measured_run import Measured, build_run
from vsim.calibrate.self_check import (
    disturbed_doubt,
    median_slowdown,
    noisy,
    same_decisions,
    self_check,
    slowdowns,
    step_error,
    undisturbed,
    usual_slowdown,
)
from vsim.calibrate.spot import (
    SpotCheck,
    check_profile,
    compare,
    fitting,
    numbers,
    random_trace,
    rate_for_load,
    scheduler_config,
    serve_command,
    spread_doubt,
    transferred,
)
from vsim.calibrate.worker import Worker, find_vllm_python, worker_environment
from vsim.errors import UserError
from vsim.models.artifact import Calibration
from vsim.models.engine_steps import block_size_note
from vsim.models.hardware import find_gpu
from vsim.models.load import LoadedStepModel, read_profile
from vsim.models.table_params import StepContext
from vsim.models.uncertainty import uncertainty_of
from vsim.sim.engine import simulate
from vsim.sim.run import Run
from vsim.traces.trace import Trace

LEAST_REPEATS = 3


@dataclass(frozen=True, slots=True)
class LivePlan:
    """What to check. `trace` None: `requests` random ones at `load` of the predicted capacity."""

    profile: Path
    trace: Trace | None = None
    model: str | None = None  # None: the profile's own
    requests: int = 200
    load: float = 0.8
    request_rate: float | None = None
    seed: int = 1
    repeats: int = 3
    block_size: int | None = None
    threads: int = 1
    kv_cache_gib: float = 1.0
    clock: str = "wall"
    draws: int = 15  # simulations for the prediction, and as many more for its interval
    vllm_python: str | None = None
    engine_flags: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class LiveResult:
    check: SpotCheck
    predicted: Run
    measured: list[Run]


def live_check(plan: LivePlan, say: Callable[[str], None]) -> LiveResult:
    """Serve the trace on the real engine `plan.repeats` times and compare with its prediction.

    On a CPU each repeat has an engine of its own: where an engine's memory happens to lie makes all its steps
    some percent faster or slower, which is noise that the repeats must show. A GPU's engine is started once.
    The prefix cache is emptied before each repeat, and a tenth is served first that doesn't count. Raises
    UserError where profile, device and engine don't belong together.
    """
    name, calibration = read_profile(plan.profile)
    says = calibration.provenance
    gpu = find_gpu(str(says.get("gpu") or says.get("gpu_name") or ""))
    spec, config = _model(plan, says)
    on_cpu = gpu.platform == "cpu"
    python = find_vllm_python(plan.vllm_python)
    env = worker_environment(plan.threads, on_cpu)
    with tempfile.TemporaryDirectory(prefix="vsim-spot-") as scratch:
        folder = Path(scratch)
        model_folder = write_model(config, folder / "model")
        say("starting vLLM")
        args = engine_args(
            model_folder,
            plan.block_size,
            on_cpu=on_cpu,
            tensor_parallel_size=int(says.get("tensor_parallel_size") or 1),
            kv_cache_gib=plan.kv_cache_gib,
            flags={"dtype": says.get("dtype"), **plan.engine_flags},
        )
        temperature = float(says.get("temperature") or 0.0)
        same = same_yardstick(says, plan.threads)
        engines = 1 + (plan.repeats - 1 if on_cpu else 0)
        with Worker(python, env, folder) as worker:
            check_device(gpu, worker.hello, int(says.get("tensor_parallel_size") or 1))
            started = worker.start(args, temperature, same)
            check_profile(calibration, worker.hello, started)
            limits = limits_of(started)
            if plan.model is not None and config != says.get("model_config"):
                kernels = None
                if started["tensor_parallel_size"] == 1 and "kernels" in calibration.params:
                    say("timing the other model's matrix products")
                    rows = kernel_rows(limits.max_num_batched_tokens)
                    kernels = worker.kernels(rows, KERNEL_REPEATS)
                calibration = transferred(calibration, spec, kernels)
            scheduler = scheduler_config(started, worker.hello["vllm_version"])
            model = LoadedStepModel(
                calibration.step_model(
                    StepContext(
                        max_num_seqs=scheduler.max_num_seqs,
                        max_num_batched_tokens=scheduler.max_num_batched_tokens,
                        enforce_eager=bool(started["enforce_eager"]),
                        block_size=scheduler.block_size,
                    )
                ),
                calibration,
                name,
                notes=notes_of(calibration, scheduler.block_size),
            )
            trace, said = trace_of(plan, limits, scheduler, model.model)
            say(f"predicting {len(trace)} requests over {trace.span_s:.0f} s")
            predicted = simulate(trace, scheduler, model)
            ahead = bands(
                trace,
                scheduler,
                model.model,
                uncertainty_of(calibration),
                numbers,
                plan.draws,
            )
            about = {"model": spec.name, "gpu": gpu.name, **started}
            provenance = {
                "trace": {"name": trace.source.name, "format": trace.source.format},
                "vllm_version": worker.hello["vllm_version"],
                "device": worker.hello["device"],
                "clock": f"virtual, sum of step durations ({plan.clock} time)",
            }
            command = serve_command(trace, plan.clock)

            def repeats(worker: Worker, which: range) -> list[Measured]:
                short = {**command, "requests": command["requests"][: max(1, len(trace) // 10)]}
                for message in worker.serve(short):
                    _progress(message, "warming up", say)
                found = []
                for repeat in which:
                    what = f"repeat {repeat + 1} of {plan.repeats}"
                    messages = _watched(worker.serve(command), what, say)
                    found.append(
                        build_run(trace, messages, started, about, provenance, tuple(said))
                    )
                return found

            measured = repeats(worker, range(plan.repeats - engines + 1))
            hello = worker.hello
        usual = usual_slowdown(calibration.quality)
        measured, left_out = undisturbed(measured, usual)
        tries = len(measured) + len(left_out)
        while on_cpu and len(measured) < plan.repeats and tries < 2 * plan.repeats:
            say("starting vLLM")
            with Worker(python, env, folder) as worker:
                worker.start(args, temperature, same)
                one = repeats(worker, range(len(measured), len(measured) + 1))
            kept, worse = undisturbed(one, usual)
            measured, left_out, tries = measured + kept, left_out + worse, tries + 1
        # Rather a disturbed repeat, and a doubt about it, than too few.
        left_out.sort(key=median_slowdown)
        missing = max(0, plan.repeats - len(measured))
        measured, left_out = measured + left_out[:missing], left_out[missing:]
    predicted = replace(
        predicted,
        config=about,
        provenance={"trace": provenance["trace"], "step_model": model.provenance},
        assumptions=(*trace.assumptions, *said, *model.assumptions),
    )
    result = _judge(
        plan, trace, scheduler, model, predicted, ahead, measured, hello, started, on_cpu
    )
    result.check.complaints += disturbed_doubt(measured, usual)
    result.check.facts["left_out_slowdown"] = [
        round(median_slowdown(one) / usual, 4) for one in left_out
    ]
    return result


def _judge(
    plan: LivePlan,
    trace: Trace,
    scheduler: Any,
    model: LoadedStepModel,
    predicted: Run,
    ahead: dict[tuple[str, str], Band],
    measured: list[Measured],
    hello: dict[str, Any],
    started: dict[str, Any],
    on_cpu: bool,
) -> LiveResult:
    runs = [one.run for one in measured]
    complaints = list(
        dict.fromkeys(sentence for run in runs for sentence in self_check(trace, run))
    )
    busy = noisy(measured, single_thread=on_cpu and plan.threads == 1)
    if busy and plan.clock == "wall":
        complaints.append(busy)
    cells = compare(ahead, runs)
    complaints += spread_doubt(cells)
    if plan.repeats < LEAST_REPEATS:
        complaints.append(
            f"{plan.repeats} repeats say little about the noise: at least {LEAST_REPEATS} are needed"
        )
    check = SpotCheck(
        cells=cells,
        complaints=complaints,
        step_error=step_error(model.model, measured),
        facts={
            "requests": len(trace),
            "repeats": plan.repeats,
            "trace": trace.source.name,
            "span_s": round(trace.span_s, 3),
            "model": predicted.config["model"],
            "device": hello["device"],
            "vllm_version": hello["vllm_version"],
            "block_size": started["block_size"],
            "num_gpu_blocks": started["num_gpu_blocks"],
            "clock": plan.clock,
            "slowdown": slowdowns(measured),
            "preemptions": {
                "predicted": int(predicted.requests["preemptions"].sum()),
                "measured": [int(run.requests["preemptions"].sum()) for run in runs],
            },
            "recomputed_tokens": {
                "predicted": int(predicted.requests["recomputed_tokens"].sum()),
                "measured": [int(run.requests["recomputed_tokens"].sum()) for run in runs],
            },
            "same_decisions": [same_decisions(trace, scheduler, one) for one in measured],
            "profile": model.provenance,
            "assumptions": list(predicted.assumptions),
        },
    )
    return LiveResult(check, predicted, runs)


def same_yardstick(says: Mapping[str, Any], threads: int) -> dict[str, int | None] | None:
    """The profile's own yardstick: its step times and the ones measured now must mean the same machine."""
    reference = says.get("yardstick_ns")
    return None if reference is None or threads > 1 else {"reference_ns": int(reference)}


def notes_of(calibration: Calibration, block_size: int) -> tuple[str, ...]:
    """Sentences about what the deployment asks of the profile that was not measured."""
    if calibration.kind != "engine-steps":
        return ()
    note = block_size_note(calibration.params, block_size)
    return () if note is None else (note,)


def _model(plan: LivePlan, says: Any) -> tuple[Any, dict[str, Any]]:
    if plan.model is not None:
        return model_and_config(plan.model)
    config = says.get("model_config")
    if isinstance(config, dict):
        from vsim.models.model_spec import spec_from_config

        return spec_from_config(config, str(says.get("model", "model"))), config
    if says.get("model"):
        return model_and_config(str(says["model"]))
    raise UserError("the profile does not say which model it was measured with: give --model")


def trace_of(plan: LivePlan, limits: Any, scheduler: Any, model: Any) -> tuple[Trace, list[str]]:
    """What is served: the given trace's requests that fit, or random ones; and sentences about them."""
    if plan.trace is not None:
        return fitting(plan.trace, limits)
    rate = plan.request_rate or rate_for_load(
        limits, plan.requests, plan.seed, plan.load, scheduler, model
    )
    return fitting(random_trace(limits, plan.requests, rate, plan.seed), limits)


def _watched(
    messages: Iterator[dict[str, Any]], what: str, say: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    for message in messages:
        _progress(message, what, say)
        yield message


def _progress(message: dict[str, Any], what: str, say: Callable[[str], None]) -> None:
    if "step" in message and message["step"]["index"] % 100 == 0:
        say(
            f"{what}: step {message['step']['index']}, {message['step']['end_ns'] / 1e9:.1f} s served"
        )
