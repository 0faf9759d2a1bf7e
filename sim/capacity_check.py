"""A sizing against a real start-up log: which term disagrees, and by how many blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from vsim.errors import UserError
from vsim.models.capacity import CapacityInput, size_kv_cache
from vsim.models.hardware import Gpu, find_gpu
from vsim.models.memory import GIB
from vsim.models.releases import logs_consumed_memory, parse_version
from vsim.models.startup_log import StartupLog
from vsim.sim.deployment import Deployment, resolve

Verdict = Literal["agrees", "disagrees", "not in the log"]
HALF_PRINTED_GIB = 0.005  # logs print GiB with two decimals


@dataclass(frozen=True, slots=True)
class Check:
    """One term: ours, the log's, and what the difference is worth in KV blocks."""

    term: str
    ours: float
    logged: float | None
    unit: str
    verdict: Verdict
    blocks: float  # ours minus the log's, as blocks; positive: we predict more
    note: str


def flags_from_log(log: StartupLog, flags: dict[str, Any]) -> dict[str, Any]:
    """The user's flags, with gaps filled from the log's engine configuration. The user's win."""
    filled = dict(flags)

    def fill(name: str, value: Any) -> None:
        if filled.get(name) is None and value is not None:
            filled[name] = value

    fill("model", log.texts.get("model"))
    fill("engine_version", log.texts.get("version"))
    fill("engine", log.engine)
    fill("dtype", log.texts.get("dtype"))
    kv_dtype = log.texts.get("kv_cache_dtype")
    fill("kv_cache_dtype", kv_dtype)
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "max_model_len", "block_size"):
        fill(name, log.integer(name))
    fill("max_num_batched_tokens", log.integer("max_num_batched_tokens"))
    fill("gpu_memory_utilization", log.figures.get("gpu_memory_utilization"))
    if log.texts.get("enforce_eager") == "True":
        fill("enforce_eager", True)
    return filled


def gpu_of_log(name: str | None, log: StartupLog) -> Gpu:
    """The named GPU, with the total memory that the log prints in place of the catalogue's."""
    if name is None:
        raise UserError("--from-log needs --gpu as well: a start-up log does not name the device")
    gpu = find_gpu(name)
    total = log.figures.get("total_gib")
    return replace(gpu, memory_bytes=round(total * GIB)) if total else gpu


def resolve_beside_log(log: StartupLog, flags: dict[str, Any]) -> Deployment:
    """Resolve a deployment for the log's flags, without refusing what the real engine started."""
    filled = flags_from_log(log, flags)
    model, gpu_name = filled.pop("model", None), filled.pop("gpu", None)
    if model is None:
        raise UserError("--from-log needs --model: the log has no engine configuration line")
    gpu = gpu_of_log(gpu_name, log)
    try:
        return resolve(model, gpu, **filled)
    except UserError:
        # Our estimate refuses what really ran: size with the log's memory, and let the terms tell.
        available = log.figures.get("available_gib")
        if available is None or available <= 0:
            raise
        return resolve(model, gpu, available_kv_cache_bytes=round(available * GIB), **filled)


def check_against_log(run: Deployment, log: StartupLog) -> list[Check]:
    """Every term that both the sizing and the log have, in the order of the account."""
    fit = run.capacity
    version = parse_version(run.scheduler.engine_version)
    terms = {term.name: term.bytes / GIB for term in fit.terms}
    logged = dict(log.figures)
    if "consumed_gib" in logged and "weights_gib" in logged:
        logged.setdefault("non_torch_gib", logged["consumed_gib"] - logged["weights_gib"])
    if logs_consumed_memory(version) and "activation_gib" in logged:
        # From 0.27 on "peak activation" contains the CUDA graph estimate.
        logged["activation_gib"] -= logged.get("cuda_graph_estimate_gib", 0.0)
    checks: list[Check] = []
    per_block = fit.bytes_per_block / GIB

    def gib(term: str, ours: float | None, key: str, sign: int, note: str = "") -> None:
        if ours is None:
            return
        seen = logged.get(key)
        if seen is None:
            checks.append(Check(term, ours, None, "GiB", "not in the log", 0.0, note))
            return
        close = abs(ours - seen) <= 2 * HALF_PRINTED_GIB
        worth = 0.0 if close else sign * (ours - seen) / per_block
        checks.append(
            Check(term, ours, seen, "GiB", "agrees" if close else "disagrees", worth, note)
        )

    if fit.requested_bytes:
        gib("total memory", run.gpu.memory_gib, "total_gib", 1, "the driver's total")
        share = logged.get("gpu_memory_utilization")
        if share is not None:
            same = abs(share - run.gpu_memory_utilization) < 5e-3
            checks.append(
                Check(
                    "gpu_memory_utilization",
                    run.gpu_memory_utilization,
                    share,
                    "",
                    "agrees" if same else "disagrees",
                    0.0
                    if same
                    else (run.gpu_memory_utilization - share) * run.gpu.memory_gib / per_block,
                    run.origins["gpu_memory_utilization"],
                )
            )
        gib(
            "requested memory", fit.requested_bytes / GIB, "requested_gib", 1, "total x utilization"
        )
    if "weights" in terms:
        loaded = terms["weights"] + terms["RoPE tables"]
        gib("weights", loaded, "weights_gib", -1, "by formula, RoPE tables included")
        gib("activation peak", terms["activation peak"], "activation_gib", -1, "our estimate")
        gib("non-torch memory", terms["non-torch memory"], "non_torch_gib", -1, "our estimate")
        if terms["CUDA graph estimate"]:
            gib(
                "CUDA graph estimate",
                terms["CUDA graph estimate"],
                "cuda_graph_estimate_gib",
                -1,
                "our estimate",
            )
    gib(
        "available KV cache memory",
        fit.available_bytes / GIB,
        "available_gib",
        1,
        "the sum of the above",
    )
    checks += _exact_checks(run, log)
    return checks


def _exact_checks(run: Deployment, log: StartupLog) -> list[Check]:
    """What must hold exactly: blocks, tokens and concurrency from the log's own available memory."""
    available = log.figures.get("available_gib")
    if available is None or available <= 0:
        return []
    low, high = (
        _sized(run, round((available + d) * GIB)) for d in (-HALF_PRINTED_GIB, HALF_PRINTED_GIB)
    )
    if low is None or high is None:
        return []
    checks = []
    note = "from the log's own available memory, within its printed rounding"
    for term, key, unit in (
        ("blocks", "num_gpu_blocks", "blocks"),
        ("KV cache size", "kv_cache_size_tokens", "tokens"),
        ("maximum concurrency", "max_concurrency", "x"),
    ):
        seen = log.figures.get(key)
        if seen is None:
            continue
        bounds = [getattr(fit, key) for fit in (low, high)]
        slack = 0.005 if unit == "x" else 0.0
        inside = bounds[0] - slack <= seen <= bounds[1] + slack
        middle = (bounds[0] + bounds[1]) / 2
        off = 0.0 if inside else middle - seen
        checks.append(
            Check(
                term,
                middle,
                seen,
                unit,
                "agrees" if inside else "disagrees",
                off if unit == "blocks" else 0.0,
                note,
            )
        )
    return checks


def _sized(run: Deployment, available_bytes: int) -> Any:
    try:
        return size_kv_cache(capacity_input(run, available_bytes))
    except UserError:
        return None


def capacity_input(run: Deployment, available_bytes: int | None = None) -> CapacityInput:
    """What the sizing of a deployment read, to size it again with other memory."""
    config = run.scheduler
    return CapacityInput(
        gpu=run.gpu,
        model=run.model,
        dtype=run.dtype,
        kv_cache_dtype=run.kv_cache_dtype,
        quantization=run.quantization,
        tensor_parallel_size=run.tensor_parallel_size,
        pipeline_parallel_size=run.pipeline_parallel_size,
        data_parallel_size=run.data_parallel_size,
        enable_expert_parallel=run.enable_expert_parallel,
        block_size=config.block_size,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        in_flight_tokens=run.in_flight_tokens,
        gpu_memory_utilization=run.gpu_memory_utilization,
        enforce_eager=run.enforce_eager,
        engine=config.engine,
        engine_version=config.engine_version,
        available_bytes=available_bytes,
    )


def conclusion(run: Deployment, checks: list[Check]) -> str:
    """One sentence: which term explains the difference."""
    exact = [c for c in checks if c.unit in ("blocks", "tokens", "x") and c.verdict == "disagrees"]
    if exact:
        first = exact[0]
        return (
            f"{first.term} does not follow from the log's own memory: {first.logged:g} {first.unit} in the log, "
            f"{first.ours:g} by {run.capacity.kv_bytes_per_token} KV bytes per token and rank in blocks of "
            f"{run.scheduler.block_size}: check model, kv_cache_dtype, block size and tensor parallelism."
        )
    causes = {
        "weights",
        "activation peak",
        "non-torch memory",
        "CUDA graph estimate",
        "total memory",
    }
    wrong = [
        c
        for c in checks
        if c.verdict == "disagrees" and c.term in {*causes, "gpu_memory_utilization"}
    ]
    total = next((c for c in checks if c.term == "available KV cache memory"), None)
    if total is None or total.logged is None:
        return "The log does not say how much memory was left for the KV cache."
    if total.verdict == "agrees":
        return "Every term that decides agrees with the log."
    share = 100 * (total.ours / total.logged - 1)
    text = f"We predict {share:+.1f} % KV memory ({total.ours:.2f} against {total.logged:.2f} GiB)"
    if not wrong:
        return text + "; the log does not break it down (VLLM_LOGGING_LEVEL=DEBUG does)."
    worst = max(wrong, key=lambda c: abs(c.blocks))
    return (
        f"{text}; the largest part is {worst.term}: {worst.ours:.2f} against {worst.logged:.2f} GiB, "
        f"{worst.blocks:+.0f} blocks."
    )
