"""A deployment: which model on which GPU under which flags, every flag resolved as vLLM would."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from vsim.errors import UserError
from vsim.models import releases
from vsim.models.capacity import Capacity, CapacityInput, size_kv_cache
from vsim.models.hardware import Gpu, find_gpu
from vsim.models.memory import GIB
from vsim.models.model_spec import ModelSpec, load_model
from vsim.models.quantization import (
    DTYPE_NAMES,
    KV_CACHE_DTYPES,
    Quantization,
    resolve_quantization,
)
from vsim.sim import defaults
from vsim.sim.config import KVGroup, KVOffload, SchedulerConfig

GIVEN = "given"
COMPUTED = "computed"
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
        return self.tensor_parallel_size * self.pipeline_parallel_size

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


class _Flags:
    """Resolved values and their origins, collected in the order in which they are decided."""

    def __init__(self, release: str) -> None:
        self.values: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self.assumptions: list[str] = []
        self.release = release

    def take(self, name: str, given: Any, default: Any, why: str = "") -> Any:
        """`given` unless it is None, else vLLM's default; recorded with its origin."""
        value = default if given is None else given
        text = f"{self.release} default" + (f" for {why}" if why else "")
        self.values[name] = value
        self.origins[name] = text if given is None else GIVEN
        return value

    def compute(self, name: str, value: Any, how: str) -> Any:
        self.values[name] = value
        self.origins[name] = f"{COMPUTED}: {how}" if how else COMPUTED
        return value


def _positive(name: str, value: int | None, least: int = 1) -> None:
    if value is not None and value < least:
        raise UserError(f"{name}={value} must be at least {least}")


def _dtype(model: ModelSpec, gpu: Gpu, asked: str | None, flags: _Flags) -> str:
    """vLLM's dtype rule (0.32 config/model.py, `_get_and_verify_dtype`; platforms/cuda.py for bfloat16)."""
    old = gpu.compute_capability is not None and gpu.compute_capability < (8, 0)
    if asked is not None and asked != "auto":
        name = DTYPE_NAMES.get(asked.lower())
        if name is None:
            raise UserError(
                f"Unknown dtype: {asked!r}. Must be one of auto, half, float16, bfloat16, float, float32."
            )
        if name == "bfloat16" and old and gpu.compute_capability is not None:
            raise UserError(
                "Bfloat16 is only supported on GPUs with compute capability of at least 8.0. Your "
                f"{gpu.device_name} GPU has compute capability {gpu.compute_capability[0]}."
                f"{gpu.compute_capability[1]}. You can use float16 instead by explicitly setting the `dtype` "
                "flag in CLI, for example: --dtype=half."
            )
        flags.values["dtype"], flags.origins["dtype"] = name, GIVEN
        return name
    own = DTYPE_NAMES.get(model.dtype.lower(), "bfloat16")
    name = "bfloat16" if own == "float32" else own
    how = (
        f"the model's own ({model.dtype})" if name == own else "float32 checkpoints run in 16 bits"
    )
    if name == "bfloat16" and old:
        name, how = "float16", f"{gpu.name} does not support bfloat16"
        flags.assumptions.append(
            f"{gpu.name} does not support bfloat16: vLLM falls back to float16 for {model.name}"
        )
    return str(flags.compute("dtype", name, how))


def _kv_cache_dtype(asked: str | None, dtype: str, model: ModelSpec, flags: _Flags) -> str:
    if asked is not None and asked != "auto" and asked not in KV_CACHE_DTYPES:
        raise UserError(
            f"kv_cache_dtype={asked!r} is not one vsim can size: must be auto, {', '.join(KV_CACHE_DTYPES)}"
        )
    if asked in ("fp8_ds_mla", "nvfp4_ds_mla") and model.mla is None:
        raise UserError(
            f"kv_cache_dtype={asked} is for multi-head latent attention; {model.name} has none"
        )
    flags.take("kv_cache_dtype", asked, "auto")
    return dtype if asked in (None, "auto") else str(asked)


def _max_model_len(model: ModelSpec, asked: int | None, flags: _Flags) -> tuple[int, bool]:
    """(max_model_len, fit it to the memory?). -1 asks vLLM to fit it."""
    derived = model.max_model_len
    if asked is None or asked == -1:
        flags.compute("max_model_len", derived, f"{model.name}'s config")
        return derived, asked == -1
    _positive("max_model_len", asked)
    if asked > derived:
        raise UserError(
            f"User-specified max_model_len ({asked}) is greater than the derived max_model_len "
            f"(max_position_embeddings={derived} in {model.name}'s config.json)."
        )
    flags.values["max_model_len"], flags.origins["max_model_len"] = asked, GIVEN
    return asked, False


def _parallel(model: ModelSpec, tp: int, pp: int, dp: int, expert_parallel: bool) -> None:
    """vLLM's refusals of a parallel layout (0.32 config/model.py, `verify_with_parallel_config`)."""
    for name, value in (
        ("tensor_parallel_size", tp),
        ("pipeline_parallel_size", pp),
        ("data_parallel_size", dp),
    ):
        _positive(name, value)
    if model.num_attention_heads % tp:
        raise UserError(
            f"Total number of attention heads ({model.num_attention_heads}) must be divisible by tensor "
            f"parallel size ({tp})."
        )
    if model.mla is None and model.num_kv_heads % tp and tp % model.num_kv_heads:
        raise UserError(
            f"Total number of KV heads ({model.num_kv_heads}) and tensor parallel size ({tp}) must divide "
            f"one another ({model.name})."
        )
    if pp > model.num_layers:
        raise UserError(
            f"pipeline_parallel_size={pp} exceeds the {model.num_layers} layers of {model.name}"
        )
    if expert_parallel and model.moe is None:
        raise UserError(
            f"Number of experts in the model must be greater than 0 when expert parallelism is enabled "
            f"({model.name} is dense)."
        )


def _scheduler_checks(config: SchedulerConfig) -> None:
    """vLLM's refusals of scheduler flags (0.32 config/scheduler.py, `verify_max_model_len`)."""
    tokens, seqs, length = config.max_num_batched_tokens, config.max_num_seqs, config.max_model_len
    if tokens < length and not config.enable_chunked_prefill:
        raise UserError(
            f"max_num_batched_tokens ({tokens}) is smaller than max_model_len ({length}). This effectively "
            "limits the maximum sequence length to max_num_batched_tokens and makes vLLM reject longer "
            "sequences. Please increase max_num_batched_tokens or decrease max_model_len."
        )
    if tokens < seqs:
        raise UserError(
            f"max_num_batched_tokens ({tokens}) must be greater than or equal to max_num_seqs ({seqs})."
        )
    if config.max_num_active_seqs is not None and config.max_num_active_seqs > seqs:
        raise UserError(
            f"max_num_active_seqs ({config.max_num_active_seqs}) cannot be greater than max_num_seqs ({seqs})."
        )
    if config.long_prefill_token_threshold > length:
        raise UserError(
            f"long_prefill_token_threshold ({config.long_prefill_token_threshold}) cannot be greater than the "
            f"max_model_len ({length})."
        )
    if not 0.0 <= config.watermark < 1.0:
        raise UserError(f"watermark={config.watermark} must be in the range [0.0, 1.0)")


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
    gpu = find_gpu(gpu) if isinstance(gpu, str) else gpu
    model = load_model(model) if isinstance(model, str) else model
    flags = _Flags("vLLM " + ".".join(str(n) for n in version[: 2 if engine == "v1" else 3]))

    tp = flags.take("tensor_parallel_size", tensor_parallel_size, 1)
    pp = flags.take("pipeline_parallel_size", pipeline_parallel_size, 1)
    dp = flags.take("data_parallel_size", data_parallel_size, 1)
    expert_parallel = flags.take("enable_expert_parallel", enable_expert_parallel, False)
    _parallel(model, tp, pp, dp, expert_parallel)
    dtype = _dtype(model, gpu, dtype, flags)
    weights = resolve_quantization(model, quantization, gpu, flags.assumptions)
    flags.values["quantization"] = weights.method if weights else None
    flags.origins["quantization"] = GIVEN if quantization else "the model's config"
    kv_dtype = _kv_cache_dtype(kv_cache_dtype, dtype, model, flags)
    length, fit_length = _max_model_len(model, max_model_len, flags)
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
        _positive(name, value)
        flags.take(name, value, None)
    eager = flags.take("enforce_eager", enforce_eager, False)

    default_block, why = defaults.block_size(gpu, engine, model.mla is not None)
    block = flags.take("block_size", block_size, default_block, why)
    _positive("block_size", block)
    if (refusal := defaults.block_size_refusal(gpu, engine, block)) is not None:
        if not what_if:
            raise UserError(f"block_size={block}: {refusal}.")
        flags.assumptions.append(
            f"block_size={block} is taken although vLLM would refuse it: {refusal}"
        )

    if engine == "v1":
        chunked = flags.take("enable_chunked_prefill", enable_chunked_prefill, True)
        caching = flags.take("enable_prefix_caching", enable_prefix_caching, True)
    else:
        long = gpu.platform == "cuda" and length > 32768 and model.mla is None
        chunked = flags.take(
            "enable_chunked_prefill",
            enable_chunked_prefill,
            long,
            "max_model_len > 32768" if long else "",
        )
        caching = flags.take("enable_prefix_caching", enable_prefix_caching, False)
    seqs, tokens = _batch(
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
    if swap < 0 or (kv_offloading_size is not None and kv_offloading_size < 0):
        raise UserError(
            "swap_space and kv_offloading_size are GiB of host memory and cannot be negative"
        )
    if max_num_scheduled_tokens is not None:
        _positive("max_num_scheduled_tokens", max_num_scheduled_tokens)
    _positive("max_num_active_seqs", max_num_active_seqs)
    _positive("long_prefill_token_threshold", long_prefill_token_threshold, 0)
    async_on = _async_default(flags, gpu, engine, version, async_scheduling)
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
    _scheduler_checks(config)
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


def _batch(
    flags: _Flags,
    gpu: Gpu,
    engine: str,
    version: tuple[int, ...],
    usage: str,
    world_size: int,
    seqs: int | None,
    tokens: int | None,
    chunked: bool,
    length: int,
) -> tuple[int, int]:
    """(max_num_seqs, max_num_batched_tokens) (0.32 `_set_default_max_num_seqs_and_batched_tokens_args`)."""
    _positive("max_num_seqs", seqs)
    _positive("max_num_batched_tokens", tokens)
    if engine == "v0":
        budget = releases.v0_chunk_tokens(version)
        default_tokens = budget if chunked else max(length, 2048)
        why = "chunked prefill" if chunked else "max_model_len without chunked prefill"
        return (
            flags.take("max_num_seqs", seqs, 256),
            flags.take("max_num_batched_tokens", tokens, default_tokens, why),
        )
    default_tokens, default_seqs, why = defaults.batch_defaults(gpu, usage, world_size, version)
    if tokens is None:
        admitted = seqs if seqs is not None else default_seqs
        if not chunked and length > default_tokens:
            default_tokens, why = length, "max_model_len without chunked prefill"
        if admitted * length < default_tokens:
            default_tokens, why = admitted * length, "max_num_seqs x max_model_len"
    resolved_tokens = flags.take("max_num_batched_tokens", tokens, default_tokens, why)
    _, _, seq_why = defaults.batch_defaults(gpu, usage, world_size, version)
    if seqs is None and default_seqs > resolved_tokens:
        default_seqs, seq_why = resolved_tokens, "max_num_batched_tokens"
    return flags.take("max_num_seqs", seqs, default_seqs, seq_why), resolved_tokens


def _async_default(
    flags: _Flags, gpu: Gpu, engine: str, version: tuple[int, ...], asked: bool | None
) -> bool:
    """Async scheduling is on unless the platform switches it off (0.32 config/vllm.py, platforms/cpu.py)."""
    if engine == "v0":
        if asked:
            raise UserError("--async-scheduling is a flag of V1; vLLM 0.8.5's V0 engine has none")
        return bool(flags.compute("async_scheduling", False, "V0 has none"))
    if gpu.platform == "cpu":
        return bool(flags.compute("async_scheduling", False, "the CPU platform switches it off"))
    on = releases.async_by_default(version)
    return bool(flags.take("async_scheduling", asked, on, "" if on else "releases before 0.14"))


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
    flags: _Flags, size_gib: float | None, capacity: Capacity, ranks: int
) -> KVOffload | None:
    """V1's CPU tier (spec 9.6): the size is the total over all ranks."""
    flags.take("kv_offloading_size", size_gib, None)
    if not size_gib:
        return None
    # Chunks are whole pages of host memory over all ranks.
    chunk = -(-capacity.bytes_per_block * ranks // 4096) * 4096
    return KVOffload(cpu_blocks=int(size_gib * GIB) // chunk)
