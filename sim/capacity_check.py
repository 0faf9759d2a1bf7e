"""A sizing against a real start-up log: which term disagrees, and by how many blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from vsim.errors import UserError
from vsim.models.capacity import CapacityInput, size_kv_cache
from vsim.models.hardware import Gpu, find_gpu
from vsim.models.memory import GIB
from vsim.models.releases import logs_consumed_memory, parse_version, reserves_null_block
from vsim.models.startup_log import StartupLog
from vsim.sim.deployment import Deployment, resolve

Verdict = Literal["agrees", "disagrees", "not in the log"]
HALF_PRINTED_GIB = 0.005  # logs print GiB with two decimals
ALLOCATION_GIB = 0.03  # what loading takes beside the tensors: the allocator's granularity


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
    """Resolve a deployment for the log's flags, without refusing a length that the memory does not hold."""
    filled = flags_from_log(log, flags)
    model, gpu_name = filled.pop("model", None), filled.pop("gpu", None)
    if model is None:
        raise UserError("--from-log needs --model: the log has no engine configuration line")
    gpu = gpu_of_log(gpu_name, log)
    # What really ran is not refused: the terms tell where our estimate is off.
    try:
        return resolve(model, gpu, what_if=True, **filled)
    except UserError as error:
        available, blocks = log.figures.get("available_gib"), log.integer("num_gpu_blocks")
        if "No available memory" not in str(error):
            raise
        # Our estimate leaves nothing for the KV cache; the log's own memory still lets the rest be checked.
        if available is not None and available > 0:
            given = {**filled, "available_kv_cache_bytes": round(available * GIB)}
        elif blocks:
            given = {**filled, "num_gpu_blocks_override": blocks}
        else:
            raise
        run = resolve(model, gpu, what_if=True, **given)
        return replace(
            run, assumptions=(*run.assumptions, f"our own estimate would refuse: {error}")
        )


def check_against_log(run: Deployment, log: StartupLog) -> list[Check]:
    """Every term that both the sizing and the log have, in the order of the account."""
    fit = run.capacity
    combined = logs_consumed_memory(parse_version(run.scheduler.engine_version))
    ours = {term.name: term.bytes / GIB for term in fit.terms}
    logged = dict(log.figures)
    if "consumed_gib" in logged and "weights_gib" in logged:
        logged.setdefault("non_torch_gib", logged["consumed_gib"] - logged["weights_gib"])
    if combined and "activation_gib" in logged:
        # From 0.27 on "peak activation" contains the CUDA graph estimate.
        logged["activation_gib"] -= logged.get("cuda_graph_estimate_gib", 0.0)
    blocks = _blocks_in_log(run, log)
    derived = "available_gib" not in logged and blocks is not None
    if derived and blocks is not None:
        logged["available_gib"] = blocks * fit.bytes_per_block / GIB
    per_block = fit.bytes_per_block / GIB
    checks: list[Check] = []

    def gib(term: str, value: float, key: str, sign: int, note: str, within: float = 0.0) -> None:
        seen = logged.get(key)
        if seen is None:
            checks.append(Check(term, value, None, "GiB", "not in the log", 0.0, note))
            return
        close = abs(value - seen) <= max(2 * HALF_PRINTED_GIB, within)
        worth = 0.0 if close else sign * (value - seen) / per_block
        verdict: Verdict = "agrees" if close else "disagrees"
        checks.append(Check(term, value, seen, "GiB", verdict, worth, note))

    if fit.requested_bytes:
        gib("total memory", run.gpu.memory_gib, "total_gib", 1, "the driver's total")
        checks += _utilization(run, logged)
        gib(
            "requested memory", fit.requested_bytes / GIB, "requested_gib", 1, "total x utilization"
        )
    if "weights" in ours:
        loaded = ours["weights"] + ours["RoPE tables"] + ours.get("draft weights", 0.0)
        gib(
            "weights", loaded, "weights_gib", -1, "by formula, RoPE tables included", ALLOCATION_GIB
        )
        peak, graphs = ours["activation peak"], ours["CUDA graph estimate"]
        if combined and graphs and "cuda_graph_estimate_gib" not in logged:
            gib(
                "activation peak + CUDA graphs", peak + graphs, "activation_gib", -1, "our estimate"
            )
        else:
            gib("activation peak", peak, "activation_gib", -1, "our estimate")
            if graphs:
                gib("CUDA graph estimate", graphs, "cuda_graph_estimate_gib", -1, "our estimate")
        rest = ours["non-torch memory"]
        gib("non-torch memory", rest, "non_torch_gib", -1, "our estimate", ALLOCATION_GIB)
    source = "the log's blocks x our bytes per block" if derived else "the sum of the above"
    gib(
        "available KV cache memory",
        fit.available_bytes / GIB,
        "available_gib",
        1,
        source,
        per_block,
    )
    return checks + _exact_checks(run, log)


def _utilization(run: Deployment, logged: dict[str, float]) -> list[Check]:
    share = logged.get("gpu_memory_utilization")
    if share is None:
        return []
    ours = run.gpu_memory_utilization
    same = abs(share - ours) < 5e-3
    worth = 0.0 if same else (ours - share) * run.gpu.memory_bytes / run.capacity.bytes_per_block
    verdict: Verdict = "agrees" if same else "disagrees"
    note = run.origins["gpu_memory_utilization"]
    return [Check("gpu_memory_utilization", ours, share, "", verdict, worth, note)]


def _blocks_in_log(run: Deployment, log: StartupLog) -> int | None:
    """The log's blocks, or its tokens in blocks where the model has one KV cache group."""
    blocks = log.integer("num_gpu_blocks")
    tokens = log.integer("kv_cache_size_tokens")
    if blocks is None and tokens is not None and len(run.capacity.layout.groups) == 1:
        return tokens // run.scheduler.block_size
    return blocks


def _exact_checks(run: Deployment, log: StartupLog) -> list[Check]:
    """What must hold exactly: blocks, tokens, concurrency and estimated length from the log's own memory."""
    checks = []
    swap, cpu = log.integer("swap_space_bytes"), log.integer("num_cpu_blocks")
    if swap is not None and cpu is not None:
        held = swap // run.capacity.bytes_per_block
        same: Verdict = "agrees" if held == cpu else "disagrees"
        note = "from the log's swap space"
        checks.append(Check("CPU blocks", held, cpu, "blocks", same, held - cpu, note))
    available = log.figures.get("available_gib")
    if available is None or available <= 0:
        return checks
    low, high = (
        _sized(run, round((available + d) * GIB)) for d in (-HALF_PRINTED_GIB, HALF_PRINTED_GIB)
    )
    note = "from the log's own available memory, within its printed rounding"
    for term, key, unit in (
        ("blocks", "num_gpu_blocks", "blocks"),
        ("KV cache size", "kv_cache_size_tokens", "tokens"),
        ("maximum concurrency", "max_concurrency", "x"),
        ("estimated maximum length", "estimated_max_len", "tokens"),
        ("needed for one request", "needed_gib", "GiB"),
    ):
        seen = log.figures.get(key)
        if seen is None:
            continue
        slack = HALF_PRINTED_GIB if unit in ("x", "GiB") else 0.0
        inside = low[key] - slack <= seen <= high[key] + slack
        middle = (low[key] + high[key]) / 2
        worth = 0.0 if inside or unit != "blocks" else middle - seen
        verdict: Verdict = "agrees" if inside else "disagrees"
        checks.append(Check(term, middle, seen, unit, verdict, worth, note))
    return checks


def _sized(run: Deployment, available_bytes: int) -> dict[str, float]:
    """The figures that follow from this memory, by the log's names."""
    want = replace(capacity_input(run, available_bytes), check_fit=False)
    fit = size_kv_cache(want)
    spare = fit.bytes_per_block if reserves_null_block(parse_version(want.engine_version)) else 0
    length, flight = want.max_model_len, want.in_flight_tokens
    return {
        "num_gpu_blocks": fit.num_gpu_blocks,
        "kv_cache_size_tokens": fit.kv_cache_size_tokens,
        "max_concurrency": fit.max_concurrency,
        "estimated_max_len": fit.layout.longest_fitting(0, available_bytes - spare, length, flight),
        "needed_gib": fit.layout.needed_bytes(0, length, flight) / GIB,
    }


def capacity_input(run: Deployment, available_bytes: int | None = None) -> CapacityInput:
    """What the sizing of a deployment read, to size it again with other memory."""
    config = run.scheduler
    return CapacityInput(
        gpu=run.gpu,
        model=run.model,
        dtype=run.dtype,
        kv_cache_dtype=run.kv_cache_dtype,
        quantization=run.quantization,
        draft=run.draft,
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
        enable_chunked_prefill=config.enable_chunked_prefill,
        available_bytes=available_bytes,
    )


def conclusion(run: Deployment, checks: list[Check]) -> str:
    """One sentence: which term explains the difference."""
    wrong = [c for c in checks if c.verdict == "disagrees"]
    exact = [c for c in wrong if c.unit in ("blocks", "tokens", "x") or c.term.startswith("needed")]
    if exact:
        first = exact[0]
        return (
            f"{first.term} does not follow from the log's own memory: {first.logged:g} {first.unit} in the log, "
            f"{first.ours:g} by {run.capacity.kv_bytes_per_token} KV bytes per token and rank in blocks of "
            f"{run.scheduler.block_size}: check model, kv_cache_dtype, block size and tensor parallelism."
        )
    sums = ("requested memory", "available KV cache memory")
    total = next((c for c in checks if c.term == sums[1]), None)
    if total is None or total.logged is None:
        return "The log does not say how much memory was left for the KV cache."
    causes = [c for c in wrong if c.term not in sums]
    if total.verdict == "agrees":
        return "The KV memory agrees with the log." + (
            f" Terms that cancel out: {', '.join(c.term for c in causes)}." if causes else ""
        )
    text = f"We predict {total.ours:.2f} GiB of KV memory, the log says {total.logged:.2f}"
    if total.logged > 0:
        text += f" ({100 * (total.ours / total.logged - 1):+.1f} %)"
    if not causes:
        return text + "; the log does not break it down (VLLM_LOGGING_LEVEL=DEBUG does)."
    worst = max(causes, key=lambda c: abs(c.blocks))
    return (
        f"{text}; the largest part is {worst.term}: {worst.ours:.2f} against {worst.logged:.2f}, "
        f"{worst.blocks:+.0f} blocks."
    )
