"""A trace meets a deployment: load applied, engine run, and the run told what produced it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vsim import __version__
from vsim.errors import UserError
from vsim.models.load import LoadedStepModel, load_step_model
from vsim.models.profile_check import Asked
from vsim.models.table_params import StepContext
from vsim.sim.bounds import Bounds
from vsim.sim.cluster import ReplicaSpec, simulate_cluster
from vsim.sim.config import SchedulerConfig
from vsim.sim.deployment import Deployment
from vsim.sim.engine import HostLink
from vsim.sim.front_end import FrontEnd, Overlong
from vsim.sim.preemption import VICTIM_RULES
from vsim.sim.router import named_route
from vsim.sim.run import Run
from vsim.sim.traps_v0 import warnings_for
from vsim.sim.versions import assumed_rules
from vsim.traces.arrivals import head, rerate, scale_time
from vsim.traces.trace import Trace

if TYPE_CHECKING:
    from vsim.sim.fleet.spec import FleetSpec


@dataclass(frozen=True, slots=True)
class Load:
    """How the client sends the trace; `vllm bench serve`'s own words where it has them.

    `request_rate` None keeps the trace's own times (times `time_scale`); inf sends all at once.
    """

    limit: int | None = None
    time_scale: float = 1.0
    request_rate: float | None = None
    burstiness: float = 1.0
    max_concurrency: int | None = None
    seed: int = 0
    overlong: Overlong = "reject"

    def apply(self, trace: Trace) -> Trace:
        """`trace` as it will be sent. Raises UserError for values that make no sense."""
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise UserError(f"max_concurrency={self.max_concurrency} must be at least 1")
        if self.request_rate is not None and self.time_scale != 1.0:
            raise UserError(
                "time_scale stretches the trace's own times and request_rate replaces them: give one"
            )
        if not self.burstiness > 0:
            raise UserError(
                f"burstiness={self.burstiness} must be positive (1 is Poisson, inf is constant)"
            )
        if self.burstiness != 1.0 and self.request_rate is None:
            raise UserError(
                f"burstiness={self.burstiness} shapes the gaps of request_rate: give that as well"
            )
        if self.limit is not None:
            trace = head(trace, self.limit)
        trace = scale_time(trace, self.time_scale)
        if self.request_rate is not None:
            trace = rerate(trace, self.request_rate, self.burstiness, self.seed)
        return trace


def check_lengths(trace: Trace, max_model_len: int, overlong: Overlong) -> list[str]:
    """Sentences about requests too long for `max_model_len`; with "error", UserError names the first."""
    prompt_too_long, sum_too_long = FrontEnd(max_model_len, overlong).too_long(trace)
    bad = prompt_too_long | sum_too_long
    if overlong == "error" and bad.any():
        row = int(bad.argmax())
        wanted = trace.output_tokens if trace.max_tokens is None else trace.max_tokens
        raise UserError(
            f"request {row} wants {int(trace.prompt_tokens[row])} prompt + {int(wanted[row])} output tokens, "
            f"more than max_model_len={max_model_len}; raise --max-model-len or use --overlong reject"
        )
    said = []
    if prompt_too_long.any():
        said.append(
            f"{int(prompt_too_long.sum())} requests have prompts of max_model_len={max_model_len} tokens "
            "or more: rejected, as vLLM answers HTTP 400"
        )
    if sum_too_long.any():
        said.append(
            f"{int(sum_too_long.sum())} requests ask for more tokens than max_model_len={max_model_len} "
            + (
                "leaves: rejected (HTTP 400); vLLM 0.32 cuts their output short instead (--overlong clip)"
                if overlong == "reject"
                else "leaves: their output is cut short, as vLLM 0.32 does"
            )
        )
    return said


def step_model_for(deployment: Deployment, profile: str | None = None) -> LoadedStepModel:
    """The deployment's step model: `profile` (path or bundled name), a bundled one that fits, or roofline."""
    narrow = deployment.quantization is not None
    capacity = deployment.capacity
    bytes_per_param = (
        capacity.weight_bytes
        * deployment.tensor_parallel_size
        * deployment.pipeline_parallel_size
        / deployment.model.num_parameters
    )
    kv_bytes = 1.0 if deployment.kv_cache_dtype.startswith("fp8") else 2.0
    return load_step_model(
        profile,
        gpu=deployment.gpu,
        model=deployment.model,
        tensor_parallel_size=deployment.tensor_parallel_size,
        weight_bytes_per_param=bytes_per_param if narrow else 2.0,
        kv_bytes_per_element=kv_bytes,
        context=StepContext(
            max_num_seqs=deployment.scheduler.max_num_seqs,
            max_num_batched_tokens=deployment.scheduler.max_num_batched_tokens,
            enforce_eager=deployment.enforce_eager,
            data_parallel_size=deployment.data_parallel_size,
            enable_expert_parallel=deployment.enable_expert_parallel,
            block_size=deployment.scheduler.block_size,
        ),
        asked=Asked(
            dtype=deployment.dtype,
            quantization=deployment.flags.get("quantization") or "",
            kv_cache_dtype=deployment.kv_cache_dtype,
            enforce_eager=deployment.enforce_eager,
            engine=deployment.scheduler.engine,
            engine_version=deployment.scheduler.engine_version,
            block_size=deployment.scheduler.block_size,
            on_cpu=deployment.gpu.platform == "cpu",
        ),
    )


def replay(
    trace: Trace,
    deployment: Deployment,
    step_model: LoadedStepModel,
    load: Load | None = None,
    on_step: Callable[[int, int], None] | None = None,
    *,
    overlap_swaps: bool = False,
    replicas: int = 1,
    route: str = "round-robin",
    fleet: FleetSpec | None = None,
    bounds: Bounds | None = None,
) -> Run:
    """Replay `trace` on `replicas` of `deployment`; everything that was assumed is in the run.

    Several replicas stand behind `route` (router.ROUTES), each GPU with a host link of its own.
    `fleet`: limits, events and network of a fleet file; its `replicas` and `route` stand for those above
    where it states them.
    `overlap_swaps`: V0's copies run beside the step that needs them, as vLLM 0.8.5 does not do.
    `bounds`: where the run ends, whatever is left (`Run.ended_early` says so then).
    `on_step(now_ns, requests_ended)` is called after each step. Raises UserError for a load that makes no
    sense or, with `overlong="error"`, for the first request that is too long.
    """
    load = load or Load()
    if len(trace) == 0:
        raise UserError(f"{trace.source.name}: no requests to replay")
    ranks = deployment.data_parallel_size
    if ranks > 1 and (replicas > 1 or fleet is not None):
        raise UserError(
            f"data_parallel_size={ranks} is several engines behind vLLM's own balancer: it is not simulated "
            "beside --replicas or --fleet; drop one of them"
        )
    if overlap_swaps and deployment.scheduler.engine != "v0":
        raise UserError("--overlap-swaps is for --engine v0: V1 never swaps")
    sent = load.apply(trace)
    config = deployment.scheduler
    said = check_lengths(sent, config.max_model_len, load.overlong)
    refuse = FrontEnd(config.max_model_len, load.overlong)
    frontend_s = frontend_seconds(step_model)
    spec = ReplicaSpec(config, step_model, _host_link(deployment, overlap_swaps), frontend_s)
    if frontend_s:
        said.append(
            f"{frontend_s * 1e3:.1f} ms between the client and the engine, as the profile's correction has it"
        )
    if fleet is not None:
        fleet = fleet.settled(replicas, route)
        replicas, route = fleet.slots, fleet.route or route
    if ranks > 1:
        from vsim.sim.fleet.data_parallel import sentences, simulate_data_parallel

        run = simulate_data_parallel(
            sent,
            spec,
            ranks,
            in_lockstep=deployment.model.moe is not None,
            max_concurrency=load.max_concurrency,
            front_end=refuse,
            on_step=on_step,
            bounds=bounds,
        )
        said += sentences(deployment.model.moe is not None, config, step_model)
        replicas, route = ranks, "data-parallel"
    elif fleet is not None and not fleet.is_plain:
        from vsim.sim.fleet.simulate import simulate_fleet

        run = simulate_fleet(
            sent,
            spec,
            fleet,
            named_route(route, load.seed),
            seed=load.seed,
            max_concurrency=load.max_concurrency,
            front_end=refuse,
            on_step=on_step,
            gpus_per_replica=deployment.gpus_per_replica,
            block_bytes=deployment.capacity.bytes_per_block,
            bounds=bounds,
        )
        said += fleet.sentences(sent.tenant_names)
        replicas = run.counters.get("replica_slots", replicas)
    else:
        run = simulate_cluster(
            sent,
            [
                dataclasses.replace(spec, host_link=_host_link(deployment, overlap_swaps))
                for _ in range(replicas)
            ],
            named_route(route, load.seed),
            max_concurrency=load.max_concurrency,
            front_end=refuse,
            on_step=on_step,
            bounds=bounds,
        )
    if replicas > 1 and ranks == 1:
        most = "up to " if "replica_slots" in run.counters else ""
        said.append(
            f"{most}{replicas} replicas behind {route} routing; the router itself takes no time"
        )
    return dataclasses.replace(
        run,
        config=_config(deployment, load, sent, overlap_swaps)
        | ({"replicas": replicas, "route": route} if replicas > 1 else {})
        | ({} if fleet is None or fleet.is_plain else {"fleet": fleet.as_dict()})
        | ({} if bounds is None else {"bounds": dataclasses.asdict(bounds)}),
        provenance={
            "vsim_version": __version__,
            "trace": dataclasses.asdict(sent.source),
            "step_model": step_model.provenance,
        },
        assumptions=(*assumptions_of(sent, deployment, step_model), *said),
    )


def assumptions_of(
    trace: Trace, deployment: Deployment, step_model: LoadedStepModel
) -> tuple[str, ...]:
    """Sentences for the user, once the run is over: the trace's, the deployment's, the step model's."""
    config = deployment.scheduler
    return (
        *trace.assumptions,
        *deployment.assumptions,
        *step_model.assumptions,
        *_other_release(step_model, config),
        *_free_stage_links(step_model, config),
        *_unheard_priorities(trace, config),
        *warnings_for(config),
        *_borrowed_rules(config),
    )


def frontend_seconds(step_model: LoadedStepModel) -> float:
    """What a request takes from the client to the engine, where the profile was fitted on a client's latencies."""
    said = step_model.calibration.provenance.get("frontend_s", 0.0)
    if isinstance(said, bool) or not isinstance(said, int | float) or not 0 <= said <= 60:
        raise UserError(
            f"profile {step_model.name}: provenance.frontend_s={said!r} must be seconds from 0 to 60"
        )
    return float(said)


def _other_release(step_model: LoadedStepModel, config: SchedulerConfig) -> list[str]:
    """A profile of another vLLM release still describes the kernels, but not surely these kernels."""
    measured = str(step_model.provenance.get("vllm_version") or "")
    if not measured or measured.split(".")[:2] == config.engine_version.split(".")[:2]:
        return []
    return [
        f"The profile was measured with vLLM {measured}; its step times are taken for "
        f"{config.engine_version} as well."
    ]


def _free_stage_links(step_model: LoadedStepModel, config: SchedulerConfig) -> list[str]:
    if config.pipeline_parallel_size == 1:
        return []
    return ["Passing activations between pipeline stages is taken to cost no time."]


def _unheard_priorities(trace: Trace, config: SchedulerConfig) -> list[str]:
    """First come, first served is vLLM's default: priorities in a trace change nothing then."""
    if config.policy == "priority" or trace.priority is None or not trace.priority.any():
        return []
    return ["The trace has priorities, which --scheduling-policy fcfs does not look at."]


def _borrowed_rules(config: SchedulerConfig) -> list[str]:
    """V1 releases whose scheduler nobody read borrow another's rules: say so."""
    sentence = assumed_rules(config.engine_version) if config.engine == "v1" else None
    return [] if sentence is None else [sentence]


def with_preemption(
    deployment: Deployment,
    *,
    swap_above_tokens: int | None = None,
    victim_rule: str | None = None,
    num_cpu_blocks: int | None = None,
    pcie_gbps: float | None = None,
) -> Deployment:
    """`deployment` with what vLLM has no flag for: preemption rules of V0, and the host link's GB/s.

    Raises UserError for rules on V1 (which always recomputes), negative numbers, a link without bandwidth.
    """
    config, gpu = deployment.scheduler, deployment.gpu
    flags, origins = dict(deployment.flags), dict(deployment.origins)
    rules: dict[str, Any] = {
        "swap_above_tokens": swap_above_tokens,
        "victim_rule": victim_rule,
        "num_cpu_blocks": num_cpu_blocks,
    }
    given = {name: value for name, value in rules.items() if value is not None}
    if given and config.engine != "v0":
        raise UserError(
            f"--{next(iter(given)).replace('_', '-')} is for --engine v0: V1 always recomputes"
        )
    if swap_above_tokens is not None and config.preemption_mode == "recompute":
        raise UserError(
            "--swap-above-tokens swaps long victims, and --preemption-mode recompute never swaps: drop one of them"
        )
    for name, value in given.items():
        if isinstance(value, int) and value < 0:
            raise UserError(f"{name}={value} must not be negative")
    if victim_rule is not None and victim_rule not in VICTIM_RULES:
        raise UserError(f"victim_rule={victim_rule!r} is not one of {', '.join(VICTIM_RULES)}")
    if pcie_gbps is not None:
        if not 0 < pcie_gbps < math.inf:
            raise UserError(
                f"pcie_gbps={pcie_gbps:g} must be positive: over such a link no swap would ever end"
            )
        gpu = dataclasses.replace(gpu, pcie_gb_s=pcie_gbps)
        given["pcie_gbps"] = pcie_gbps
    for name, value in given.items():
        flags[name], origins[name] = value, "given"
    given.pop("pcie_gbps", None)
    assumptions = deployment.assumptions
    if pcie_gbps is not None and config.engine == "v1" and config.kv_offload is None:
        assumptions = (
            *assumptions,
            f"--pcie-gbps {pcie_gbps:g} changes nothing here: V1 copies nothing over the host link without "
            "--kv-offloading-size",
        )
    return dataclasses.replace(
        deployment,
        gpu=gpu,
        assumptions=assumptions,
        scheduler=dataclasses.replace(config, **given),
        flags=flags,
        origins=origins,
    )


def _host_link(deployment: Deployment, overlap: bool) -> HostLink | None:
    if deployment.gpu.pcie_gb_s is None:
        return None
    speed = deployment.gpu.pcie_gb_s * 1e9
    return HostLink(deployment.capacity.bytes_per_block, speed, overlap)


def _config(
    deployment: Deployment, load: Load, trace: Trace, overlap_swaps: bool
) -> dict[str, Any]:
    scheduler, capacity = deployment.scheduler, deployment.capacity
    flags, origins = deployment.flags, deployment.origins
    return {
        "gpu": deployment.gpu.name,
        "gpus": deployment.gpus_per_replica,
        "model": deployment.model.name,
        "kv_cache": {
            "num_gpu_blocks": scheduler.num_gpu_blocks,
            "num_cpu_blocks": scheduler.num_cpu_blocks,
            "block_size": scheduler.block_size,
            "bytes_per_block": capacity.bytes_per_block,
            "available_bytes": capacity.available_bytes,
            # vLLM's start-up log: "Maximum concurrency for N tokens per request"
            "kv_cache_size_tokens": capacity.kv_cache_size_tokens,
            "kv_cache_max_concurrency": capacity.max_concurrency,
        },
        "flags": {
            name: {"value": value, "origin": origins.get(name, "")} for name, value in flags.items()
        },
        "load": {
            "limit": load.limit,
            "time_scale": load.time_scale,
            "request_rate": "inf" if load.request_rate == float("inf") else load.request_rate,
            "burstiness": None if load.request_rate is None else load.burstiness,
            "max_concurrency": load.max_concurrency,
            "seed": load.seed,
            "overlong": load.overlong,
            "overlap_swaps": overlap_swaps,
        },
        "trace": {
            "name": trace.source.name,
            "format": trace.source.format,
            "requests": len(trace),
            "span_s": trace.span_s,
            "dropped": dict(trace.dropped),
        },
    }
