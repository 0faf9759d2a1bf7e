"""A spot check against a running server: real HTTP, real streaming, real time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from vsim.calibrate.design import Limits
from vsim.calibrate.ensemble import bands
from vsim.calibrate.http_serve import serve_over_http, server_facts
from vsim.calibrate.live import LEAST_REPEATS, LivePlan, LiveResult, notes_of, trace_of
from vsim.calibrate.spot import SpotCheck, compare, numbers, scheduler_config, spread_doubt
from vsim.errors import UserError
from vsim.models.load import LoadedStepModel, read_profile
from vsim.models.profile_check import Asked, doubts, other_engine, same_name
from vsim.models.step import StepModel, StepShape
from vsim.models.table_params import StepContext
from vsim.models.uncertainty import uncertainty_of
from vsim.sim.engine import simulate
from vsim.sim.run import FINISHED, Run
from vsim.traces.trace import Trace

# What a server does not tell about itself, with vLLM's flag for it.
NEEDED = ("max_num_seqs", "max_num_batched_tokens")


class OneAfterTheOther:
    """A step model for vLLM's CPU build under async scheduling: the model runs on the scheduler's own
    thread, so the host's part hides behind nothing."""

    def __init__(self, model: StepModel) -> None:
        self._model = model

    def device_seconds(self, shape: StepShape) -> float:
        return self._model.device_seconds(shape) + self._model.host_seconds(shape)

    def host_seconds(self, shape: StepShape) -> float:
        return 0.0


def live_http_check(
    plan: LivePlan, url: str, frontend_s: float, say: Callable[[str], None]
) -> LiveResult:
    """Send the trace to the server at `url` `plan.repeats` times and compare with its prediction.

    `frontend_s`: what HTTP and the front end cost before the engine sees a request; it can't be told apart
    from outside and is assumed. Flags that the server does not tell must be in `plan.engine_flags`.
    """
    name, calibration = read_profile(plan.profile)
    says = calibration.provenance
    facts = server_facts(url)
    started = _started(facts, plan, says)
    scheduler = scheduler_config(started, str(facts["vllm_version"] or says.get("vllm_version")))
    asked = Asked(
        engine="v1",
        engine_version=str(facts["vllm_version"]) if facts["vllm_version"] else None,
        block_size=scheduler.block_size,
    )
    wrong = other_engine(calibration, asked)
    if wrong:
        raise UserError(f"profile {name} is not of the server at {url}: {wrong}")
    limits = Limits(
        scheduler.max_num_batched_tokens,
        scheduler.max_num_seqs,
        scheduler.max_model_len,
        (scheduler.num_gpu_blocks - 1) * scheduler.block_size,
        scheduler.block_size,
    )
    loaded = LoadedStepModel(
        calibration.step_model(
            StepContext(
                max_num_seqs=scheduler.max_num_seqs,
                max_num_batched_tokens=scheduler.max_num_batched_tokens,
                enforce_eager=bool(says.get("enforce_eager")),
                block_size=scheduler.block_size,
            )
        ),
        calibration,
        name,
        notes=(
            *notes_of(calibration, scheduler.block_size),
            *doubts(calibration, name, asked),
            *_other_name(facts, says),
        ),
    )
    model: StepModel = loaded.model
    if says.get("gpu") == "cpu" and scheduler.async_scheduling:
        model = OneAfterTheOther(model)
    trace, said = trace_of(plan, limits, scheduler, model)
    said = [
        *said,
        f"{frontend_s * 1e3:g} ms between the client and the engine are assumed (--frontend-ms)",
    ]
    say(f"predicting {len(trace)} requests over {trace.span_s:.0f} s")
    predicted = simulate(trace, scheduler, model, frontend_s=frontend_s)
    unsure = uncertainty_of(calibration)
    ahead = bands(trace, scheduler, model, unsure, numbers, plan.draws, frontend_s=frontend_s)
    config = says.get("model_config") or {}
    vocab_size = int(config.get("vocab_size") or 1000)
    runs = []
    for repeat in range(plan.repeats):
        say(f"repeat {repeat + 1} of {plan.repeats}")
        run = serve_over_http(url, facts["model"], trace, vocab_size, seed=repeat, say=say)
        runs.append(
            replace(
                run,
                config={"model": facts["model"], **started},
                provenance={"vllm_version": facts["vllm_version"], "clock": "the client's"},
                assumptions=tuple(said),
                block_size=scheduler.block_size,
                num_gpu_blocks=scheduler.num_gpu_blocks - 1,
            )
        )
    complaints = list(dict.fromkeys(s for run in runs for s in client_check(trace, run)))
    if plan.repeats < LEAST_REPEATS:
        complaints.append(
            f"{plan.repeats} repeats say little about the noise: at least {LEAST_REPEATS} are needed"
        )
    cells = compare(ahead, runs)
    complaints += spread_doubt(cells)
    return LiveResult(
        SpotCheck(
            cells=cells,
            complaints=complaints,
            facts={
                "requests": len(trace),
                "repeats": plan.repeats,
                "trace": trace.source.name,
                "span_s": round(trace.span_s, 3),
                "model": facts["model"],
                "device": "the server's",
                "vllm_version": facts["vllm_version"],
                "block_size": scheduler.block_size,
                "num_gpu_blocks": scheduler.num_gpu_blocks,
                "clock": "the client's, over HTTP",
                "preemptions": {
                    "predicted": int(predicted.requests["preemptions"].sum()),
                    "measured": [],
                },
                "same_decisions": [],
                "profile": loaded.provenance,
                "assumptions": [*trace.assumptions, *said, *loaded.assumptions],
            },
        ),
        replace(predicted, config={"model": facts["model"], **started}),
        runs,
    )


def _started(facts: dict[str, Any], plan: LivePlan, says: Any) -> dict[str, Any]:
    """The engine's configuration: what the server tells, else the flags; UserError for what neither does."""
    flags = {k: v for k, v in plan.engine_flags.items() if v is not None}
    if plan.block_size is not None:
        flags["block_size"] = plan.block_size
    if "num_gpu_blocks_override" in flags:
        flags["num_gpu_blocks"] = flags["num_gpu_blocks_override"]
    known = {**{k: v for k, v in facts.items() if v is not None}, **flags}
    for name in (*NEEDED, "block_size", "num_gpu_blocks", "max_model_len"):
        if name not in known:
            flag = name.replace("_", "-")
            raise UserError(
                f"the server does not tell {name}: give --{flag} as it was started with "
                "(its start-up log names it)"
            )
    return {
        "block_size": known["block_size"],
        "num_gpu_blocks": known["num_gpu_blocks"],
        "max_num_seqs": known["max_num_seqs"],
        "max_num_batched_tokens": known["max_num_batched_tokens"],
        "max_model_len": known["max_model_len"],
        "enable_prefix_caching": known.get("enable_prefix_caching", True),
        "enable_chunked_prefill": True,
        "policy": known.get("scheduling_policy", "fcfs"),
        "scheduler_reserve_full_isl": True,
        "watermark": 0.0,
        "async_scheduling": known.get("async_scheduling", True),
        # As the calibrated engine resolved it: CPU builds run vLLM's V1 model runner.
        "v2_model_runner": says.get("gpu") != "cpu",
    }


def _other_name(facts: dict[str, Any], says: Any) -> list[str]:
    """A server may call its model as it likes: another name than the profile's is no proof of another model."""
    measured = says.get("model")
    if not measured or not facts.get("model") or same_name(str(measured), str(facts["model"])):
        return []
    return [
        f"the server calls its model {facts['model']}, the profile was measured with {measured}: that they are "
        "the same is assumed"
    ]


def client_check(trace: Trace, run: Run) -> list[str]:
    """Sentences about what can't be right in a run seen from outside."""
    said = []
    columns = run.requests
    done = columns["status"] == FINISHED
    if not done.all():
        why = f" ({', '.join(run.reasons)})" if run.reasons else ""
        said.append(f"{int((~done).sum())} of {len(trace)} requests did not finish{why}")
    wrong = int((columns["output_tokens"][done] != trace.output_tokens[done]).sum())
    if wrong:
        said.append(f"{wrong} requests gave another number of tokens than the trace has")
    late = columns["sent_ns"] - columns["arrival_ns"]
    if len(late) and float(late.max()) > 50e6:
        said.append(
            f"the client sent a request {late.max() / 1e6:.0f} ms late: it is too busy to be a clock"
        )
    return said
