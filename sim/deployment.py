"""A deployment: which model on which GPU under which flags, every flag resolved as vLLM would."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from vsim.errors import UserError
from vsim.models import releases
from vsim.models.capacity import Capacity, CapacityInput, size_kv_cache
from vsim.models.draft import Draft, draft_of
from vsim.models.hardware import Gpu, find_gpu
from vsim.models.hf_config import family_note
from vsim.models.memory import GIB
from vsim.models.model_spec import ModelSpec, load_model
from vsim.models.quantization import Quantization, resolve_quantization
from vsim.sim import defaults
from vsim.sim.config import KVGroup, KVOffload, SchedulerConfig
from vsim.sim.flags import (
    GIVEN,
    Flags,
    async_scheduling_of,
    batch_limits,
    cache_dtype,
    check_parallel,
    check_scheduler,
    check_v0_flags,
    model_dtype,
    model_length,
    positive,
)

Usage = Literal["server", "llm"]


@dataclass(frozen=True, slots=True)
class Deployment:
    """One engine (replica) of `tensor x pipeline` GPUs, `data_parallel_size` times.

    `flags` holds every resolved value by vLLM's flag name, `origins` where each comes from ("given",
    "vLLM 0.32 default for A100-80GB", "computed: …"). `assumptions` are sentences to show the user.
    """

    gpu: Gpu
    model: ModelSpec
    scheduler: SchedulerConfig
    capacity: Capacity
    quantization: Quantization | None
    draft: Draft | None
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    enable_expert_parallel: bool
    dtype: str  # "bfloat16", "float16" or "float32"
    kv_cache_dtype: str  # resolved: never "auto"
    gpu_memory_utilization: float
    enforce_eager: bool
    in_flight_tokens: int
    usage: Usage
    flags: dict[str, Any]
    origins: dict[str, str]
    assumptions: tuple[str, ...]

    @property
    def kv_cache_blocks(self) -> int:
        """Blocks in the pool, as vLLM reports them (V1 keeps one as the null block)."""
        return self.scheduler.num_gpu_blocks

    @property
    def gpus_per_replica(self) -> int:
        """Of one data-parallel rank."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def gpus(self) -> int:
        """Of all data-parallel ranks together."""
        return self.gpus_per_replica * self.data_parallel_size

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready: names, resolved flags, where each comes from, assumptions."""
        return {
            "gpu": self.gpu.name,
            "model": self.model.name,
            "num_gpu_blocks": self.scheduler.num_gpu_blocks,
            "num_cpu_blocks": self.scheduler.num_cpu_blocks,
            "kv_cache_size_tokens": self.capacity.kv_cache_size_tokens,
            "max_concurrency": self.capacity.max_concurrency,
            "available_kv_cache_bytes": self.capacity.available_bytes,
            "flags": dict(self.flags),
            "origins": dict(self.origins),
            "assumptions": list(self.assumptions),
        }


def resolve(
    model: str | ModelSpec,
    gpu: str | Gpu,
    *,
    tensor_parallel_size: int | None = None,
    pipeline_parallel_size: int | None = None,
    data_parallel_size: int | None = None,
    enable_expert_parallel: bool | None = None,
    dtype: str | None = None,
    quantization: str | None = None,
    kv_cache_dtype: str | None = None,
    max_model_len: int | None = None,
    gpu_memory_utilization: float | None = None,
    kv_cache_memory_bytes: int | None = None,
    num_gpu_blocks_override: int | None = None,
    block_size: int | None = None,
    enable_prefix_caching: bool | None = None,
    enable_chunked_prefill: bool | None = None,
    max_num_seqs: int | None = None,
    max_num_active_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    max_num_scheduled_tokens: int | None = None,
    long_prefill_token_threshold: int | None = None,
    long_prefill_token_threshold_adaptive: bool | None = None,
    scheduling_policy: str | None = None,
    scheduler_reserve_full_isl: bool | None = None,
    watermark: float | None = None,
    async_scheduling: bool | None = None,
    enforce_eager: bool | None = None,
    kv_offloading_size: float | None = None,
    swap_space: float | None = None,
    preemption_mode: str | None = None,
    engine: str | None = None,
    engine_version: str | None = None,
    usage: str | None = None,
    speculative_config: dict[str, Any] | None = None,
    available_kv_cache_bytes: int | None = None,
    what_if: bool = False,
) -> Deployment:
    """Resolve the user's flags (None: not given) as vLLM's `EngineArgs` would, and size the KV cache.

    `kv_offloading_size` and `swap_space` are GiB, `kv_cache_memory_bytes` and `available_kv_cache_bytes`
    bytes per rank; the latter is a real log's "Available KV cache memory". `engine` is "v1" (0.32.0 unless
    `engine_version` says otherwise) or "v0" (0.8.5). `usage` is "server" or "llm". `what_if` lets a block
    size through that no kernel of this device takes, and a max_model_len that the KV cache cannot hold, as
    assumptions: a question about memory, not a command to run. Raises `UserError`, in vLLM's words, for whatever vLLM would refuse.
    """
    engine = engine or "v1"
    if engine not in ("v1", "v0"):
        raise UserError(f"engine={engine!r} must be v1 or v0")
    release = engine_version or ("0.32.0" if engine == "v1" else "0.8.5")
    version = releases.parse_version(release)
    if not version:
        raise UserError(f"engine_version={release!r} is not a vLLM release such as 0.32.0")
    usage = usage or "server"
    if usage not in ("server", "llm"):
        raise UserError(f"usage={usage!r} must be server or llm")
    if engine == "v0":
        check_v0_flags(
            release,
            version,
            max_num_active_seqs=max_num_active_seqs,
            max_num_scheduled_tokens=max_num_scheduled_tokens,
            long_prefill_token_threshold_adaptive=long_prefill_token_threshold_adaptive,
            scheduler_reserve_full_isl=scheduler_reserve_full_isl,
            watermark=watermark,
            async_scheduling=async_scheduling,
            kv_offloading_size=kv_offloading_size,
        )
    gpu = find_gpu(gpu) if isinstance(gpu, str) else gpu
    model = load_model(model) if isinstance(model, str) else model
    flags = Flags("vLLM " + ".".join(str(n) for n in version[: 2 if engine == "v1" else 3]))

    if (note := family_note(model)) is not None:
        flags.assumptions.append(note)
    tp = flags.take("tensor_parallel_size", tensor_parallel_size, 1)
    pp = flags.take("pipeline_parallel_size", pipeline_parallel_size, 1)
    dp = flags.take("data_parallel_size", data_parallel_size, 1)
    expert_parallel = flags.take("enable_expert_parallel", enable_expert_parallel, False)
    check_parallel(model, tp, pp, dp, expert_parallel)
    dtype = model_dtype(model, gpu, dtype, flags)
    weights = resolve_quantization(model, quantization, gpu, flags.assumptions)
    flags.values["quantization"] = weights.method if weights else None
    flags.origins["quantization"] = GIVEN if quantization else "the model's config"
    kv_dtype = cache_dtype(kv_cache_dtype, dtype, model, flags)
    length, fit_length = model_length(model, max_model_len, flags)
    utilization = flags.take(
        "gpu_memory_utilization",
        gpu_memory_utilization,
        releases.gpu_memory_utilization(engine, version),
    )
    if not 0 < utilization <= 1:
        raise UserError(f"gpu_memory_utilization={utilization} must be in the range (0, 1]")
    for name, value in (
        ("kv_cache_memory_bytes", kv_cache_memory_bytes),
        ("num_gpu_blocks_override", num_gpu_blocks_override),
    ):
        positive(name, value)
        flags.take(name, value, None)
    eager = flags.take("enforce_eager", enforce_eager, False)

    default_block, why = defaults.block_size(gpu, engine, model.mla is not None, kv_dtype, version)
    block = flags.take("block_size", block_size, default_block, why)
    positive("block_size", block)
    if (refusal := defaults.block_size_refusal(gpu, engine, block)) is not None:
        if not what_if:
            raise UserError(f"block_size={block}: {refusal}.")
        flags.assumptions.append(
            f"block_size={block} is taken although vLLM would refuse it: {refusal}"
        )

    if engine == "v0" and gpu.platform == "cuda" and block > 32:
        flags.assumptions.append(
            f"block_size={block}: vLLM 0.8.5's help names 32 as the most on CUDA; its FlashAttention kernels take "
            "any multiple of 16"
        )
    if engine == "v1":
        chunked = flags.take("enable_chunked_prefill", enable_chunked_prefill, True)
        caching = flags.take("enable_prefix_caching", enable_prefix_caching, True)
    else:
        # 0.8.5 engine/arg_utils.py, `_set_default_args_v0`.
        windowed = any(layer.window for layer in model.layers)
        long = (
            gpu.platform == "cuda"
            and length > 32768
            and model.mla is None
            and not windowed
            and speculative_config is None
        )
        chunked = flags.take(
            "enable_chunked_prefill",
            enable_chunked_prefill,
            long,
            "max_model_len > 32768" if long else "",
        )
        caching = flags.take("enable_prefix_caching", enable_prefix_caching, False)
    seqs, tokens = batch_limits(
        flags,
        gpu,
        engine,
        version,
        usage,
        tp * pp,
        max_num_seqs,
        max_num_batched_tokens,
        chunked,
        length,
    )
    policy = flags.take("scheduling_policy", scheduling_policy, "fcfs")
    if policy not in ("fcfs", "priority"):
        raise UserError(f"scheduling_policy={policy!r} must be fcfs or priority")
    mode = flags.take("preemption_mode", preemption_mode, None)
    if mode not in (None, "recompute", "swap"):
        raise UserError(f"preemption_mode={mode!r} must be recompute or swap")
    swap = float(flags.take("swap_space", swap_space, 4.0 if engine == "v0" else 0.0))
    if engine == "v1" and (swap_space or preemption_mode):
        raise UserError(
            "--swap-space and --preemption-mode are gone since vLLM's V1 engine, which always recomputes: "
            "use --kv-offloading-size for a CPU tier, or --engine v0"
        )
    for name, gib in (("swap_space", swap), ("kv_offloading_size", kv_offloading_size or 0.0)):
        if not 0 <= gib < 1 << 30:
            raise UserError(f"{name}={gib} must be GiB of host memory: not negative, and finite")
    if max_num_scheduled_tokens is not None:
        positive("max_num_scheduled_tokens", max_num_scheduled_tokens)
    positive("max_num_active_seqs", max_num_active_seqs)
    positive("long_prefill_token_threshold", long_prefill_token_threshold, 0)
    async_on = async_scheduling_of(flags, gpu, engine, version, async_scheduling)
    config = SchedulerConfig(
        engine="v0" if engine == "v0" else "v1",
        engine_version=release,
        block_size=block,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        max_num_scheduled_tokens=flags.take(
            "max_num_scheduled_tokens", max_num_scheduled_tokens, None
        ),
        max_num_active_seqs=flags.take("max_num_active_seqs", max_num_active_seqs, None),
        max_model_len=length,
        enable_prefix_caching=caching,
        enable_chunked_prefill=chunked,
        policy="priority" if policy == "priority" else "fcfs",
        long_prefill_token_threshold=flags.take(
            "long_prefill_token_threshold", long_prefill_token_threshold, 0
        ),
        long_prefill_token_threshold_adaptive=flags.take(
            "long_prefill_token_threshold_adaptive", long_prefill_token_threshold_adaptive, False
        ),
        scheduler_reserve_full_isl=flags.take(
            "scheduler_reserve_full_isl",
            scheduler_reserve_full_isl,
            engine == "v1" and releases.reserves_full_prompt(version),
        ),
        watermark=flags.take("watermark", watermark, 0.0),
        async_scheduling=async_on,
        pipeline_parallel_size=pp,
        v2_model_runner=gpu.platform != "cpu",
        preemption_mode=mode,
    )
    check_scheduler(config)
    flags.take("speculative_config", speculative_config, None)
    draft = draft_of(model, speculative_config) if speculative_config is not None else None
    if draft is not None:
        flags.assumptions.append(
            f"speculative decoding ({draft.method}) is counted in memory only: draft weights and KV layers"
        )
    batches = config.max_concurrent_batches if releases.counts_batches_in_flight(version) else 1
    in_flight = batches * tokens
    capacity = size_kv_cache(
        CapacityInput(
            gpu=gpu,
            model=model,
            dtype=dtype,
            kv_cache_dtype=kv_dtype,
            quantization=weights,
            tensor_parallel_size=tp,
            pipeline_parallel_size=pp,
            data_parallel_size=dp,
            enable_expert_parallel=expert_parallel,
            block_size=block,
            max_model_len=length,
            max_num_seqs=seqs,
            max_num_batched_tokens=tokens,
            in_flight_tokens=in_flight,
            gpu_memory_utilization=utilization,
            enforce_eager=eager,
            engine=engine,
            engine_version=release,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            num_gpu_blocks_override=num_gpu_blocks_override,
            available_bytes=available_kv_cache_bytes,
            swap_space_bytes=round(swap * GIB),
            fit_max_model_len=fit_length,
            enable_chunked_prefill=chunked,
            draft=draft,
            check_fit=not what_if,
        )
    )
    if capacity.max_concurrency < 1:
        flags.assumptions.append(
            f"max_model_len={length} is kept although vLLM would refuse it: the KV cache holds "
            f"{capacity.kv_cache_size_tokens} tokens"
        )
    if capacity.max_model_len != length:
        flags.compute("max_model_len", capacity.max_model_len, "fitted to the KV cache (-1)")
    config = replace(
        config,
        num_gpu_blocks=capacity.num_gpu_blocks,
        num_cpu_blocks=capacity.num_cpu_blocks,
        max_model_len=capacity.max_model_len,
        kv_groups=_groups(capacity),
        kv_offload=_offload(flags, kv_offloading_size, capacity, tp * pp),
    )
    estimated = [t.name for t in capacity.terms if t.origin == "assumed" and t.bytes]
    if estimated and num_gpu_blocks_override is None:
        flags.assumptions.append(
            f"{capacity.num_gpu_blocks} KV blocks follow from estimated {', '.join(estimated)} "
            "(vLLM measures them on the device); --num-gpu-blocks-override or --kv-cache-memory-bytes set them"
        )
    return Deployment(
        gpu=gpu,
        model=model,
        scheduler=config,
        capacity=capacity,
        quantization=weights,
        draft=draft,
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        data_parallel_size=dp,
        enable_expert_parallel=expert_parallel,
        dtype=dtype,
        kv_cache_dtype=kv_dtype,
        gpu_memory_utilization=utilization,
        enforce_eager=eager,
        in_flight_tokens=in_flight,
        usage="llm" if usage == "llm" else "server",
        flags=flags.values,
        origins=flags.origins,
        assumptions=tuple(flags.assumptions),
    )


def _groups(capacity: Capacity) -> tuple[KVGroup, ...]:
    """The scheduler's view of the KV cache groups."""
    return tuple(
        KVGroup(
            type="swa" if group.kind == "sliding" else "full",
            window=group.window if group.kind == "sliding" else None,
            block_size=group.block_size if group.block_size != capacity.block_size else None,
        )
        for group in capacity.layout.groups
    )


def _offload(
    flags: Flags, size_gib: float | None, capacity: Capacity, ranks: int
) -> KVOffload | None:
    """V1's CPU tier (spec 9.6): the size is the total over all ranks."""
    flags.take("kv_offloading_size", size_gib, None)
    if not size_gib:
        return None
    # Chunks are whole pages of host memory over all ranks.
    chunk = -(-capacity.bytes_per_block * ranks // 4096) * 4096
    cpu_blocks = int(size_gib * GIB) // chunk
    if not cpu_blocks:
        flags.assumptions.append(
            f"kv_offloading_size={size_gib:g} GiB is less than one KV block ({chunk} bytes over all ranks): the CPU"
            " tier keeps nothing"
        )
    return KVOffload(cpu_blocks=cpu_blocks)
