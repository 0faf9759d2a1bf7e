"""Each flag by itself: the user's value or vLLM's default, where it comes from, and what vLLM refuses."""

from __future__ import annotations

from typing import Any

from vsim.errors import UserError
from vsim.models import releases
from vsim.models.hardware import Gpu
from vsim.models.model_spec import ModelSpec
from vsim.models.quantization import DTYPE_NAMES, KV_CACHE_DTYPES
from vsim.sim import defaults
from vsim.sim.config import SchedulerConfig

GIVEN = "given"
COMPUTED = "computed"


class Flags:
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


def positive(name: str, value: int | None, least: int = 1) -> None:
    if value is not None and value < least:
        raise UserError(f"{name}={value} must be at least {least}")


def model_dtype(model: ModelSpec, gpu: Gpu, asked: str | None, flags: Flags) -> str:
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


def cache_dtype(asked: str | None, dtype: str, model: ModelSpec, flags: Flags) -> str:
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


def model_length(model: ModelSpec, asked: int | None, flags: Flags) -> tuple[int, bool]:
    """(max_model_len, fit it to the memory?). -1 asks vLLM to fit it."""
    derived = model.max_model_len
    if asked is None or asked == -1:
        flags.compute("max_model_len", derived, f"{model.name}'s config")
        return derived, asked == -1
    positive("max_model_len", asked)
    if asked > derived:
        raise UserError(
            f"User-specified max_model_len ({asked}) is greater than the derived max_model_len "
            f"(max_position_embeddings={derived} in {model.name}'s config.json)."
        )
    flags.values["max_model_len"], flags.origins["max_model_len"] = asked, GIVEN
    return asked, False


def check_parallel(model: ModelSpec, tp: int, pp: int, dp: int, expert_parallel: bool) -> None:
    """vLLM's refusals of a parallel layout (0.32 config/model.py, `verify_with_parallel_config`)."""
    for name, value in (
        ("tensor_parallel_size", tp),
        ("pipeline_parallel_size", pp),
        ("data_parallel_size", dp),
    ):
        positive(name, value)
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


def check_scheduler(config: SchedulerConfig) -> None:
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


def check_v0_flags(release: str, version: tuple[int, ...], **given: Any) -> None:
    """What the V0 engine does not know: flags that came with V1, and releases without V0."""
    if version >= (0, 11):
        raise UserError(f"engine_version={release}: the V0 engine is gone since vLLM 0.11")
    for name, value in given.items():
        if value:
            raise UserError(
                f"--{name.replace('_', '-')} is a flag of V1; vLLM {release}'s V0 engine has none"
            )


def batch_limits(
    flags: Flags,
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
    positive("max_num_seqs", seqs)
    positive("max_num_batched_tokens", tokens)
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


def async_scheduling_of(
    flags: Flags, gpu: Gpu, engine: str, version: tuple[int, ...], asked: bool | None
) -> bool:
    """Async scheduling is on unless the platform switches it off (0.32 config/vllm.py, platforms/cpu.py)."""
    if engine == "v0":
        return bool(flags.compute("async_scheduling", False, "V0 has none"))
    if gpu.platform == "cpu":
        return bool(flags.compute("async_scheduling", False, "the CPU platform switches it off"))
    on = releases.async_by_default(version)
    return bool(flags.take("async_scheduling", asked, on, "" if on else "releases before 0.14"))
