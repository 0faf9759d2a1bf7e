"""How many KV blocks fit, term by term, as vLLM sizes them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from vsim.errors import UserError
from vsim.models.draft import Draft
from vsim.models.hardware import Gpu
from vsim.models.kv_spec import KVCacheLayout, LayerKV, kv_layout
from vsim.models.memory import (
    GIB,
    Term,
    activation_peak,
    cuda_graphs,
    non_torch,
)
from vsim.models.model_spec import LayerSpec, ModelSpec
from vsim.models.quantization import DTYPE_BYTES, Quantization, kv_state_bytes, weight_bytes
from vsim.models.releases import (
    group_size_ratio,
    hybrid_allocator,
    parse_version,
    reserves_null_block,
    tokens_from_concurrency,
)
from vsim.models.weights import parameters, rope_cache_bytes, stage_layers


@dataclass(frozen=True, slots=True)
class CapacityInput:
    """Everything the sizing reads; all values resolved. Lengths in tokens, memory in bytes per rank.

    `available_bytes` replaces the whole account (a log's "Available KV cache memory");
    `kv_cache_memory_bytes` is the flag of that name; `num_gpu_blocks_override` replaces the division.
    """

    gpu: Gpu
    model: ModelSpec
    dtype: str
    kv_cache_dtype: str
    quantization: Quantization | None
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    enable_expert_parallel: bool
    block_size: int
    max_model_len: int  # the user's, or the model's; fit_max_model_len allows less
    max_num_seqs: int
    max_num_batched_tokens: int
    in_flight_tokens: int
    gpu_memory_utilization: float
    enforce_eager: bool
    engine: str  # "v1" or "v0"
    engine_version: str
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    available_bytes: int | None = None
    swap_space_bytes: int = 0
    fit_max_model_len: bool = False  # --max-model-len -1
    enable_chunked_prefill: bool = True
    draft: Draft | None = None  # speculative decoding
    check_fit: bool = True  # refuse a max_model_len that the KV cache cannot hold


@dataclass(frozen=True, slots=True)
class Capacity:
    """The sizing's outcome, and every term of it for the rank that decides.

    `num_gpu_blocks` as vLLM reports it (V1 keeps one of them as the null block); `kv_cache_size_tokens` and
    `max_concurrency` as its start-up log prints them for this version.
    """

    terms: tuple[Term, ...]
    requested_bytes: int  # ceil(total x utilization); 0 where it plays no part
    available_bytes: int
    layout: KVCacheLayout
    bytes_per_block: int
    block_size: int
    num_gpu_blocks: int
    num_cpu_blocks: int
    max_model_len: int
    kv_cache_size_tokens: int
    max_concurrency: float
    kv_bytes_per_token: int  # of one rank, over its layers, if every layer kept every token
    weight_bytes: int


def layer_kv(want: CapacityInput) -> list[LayerKV]:
    """The KV cache of each layer on one rank: the model's layers, then the draft's."""
    layers = [_page(want, want.model, layer) for layer in want.model.layers]
    if want.draft is not None:
        layers += [_page(want, want.draft.model, layer) for layer in want.draft.layers]
    if want.engine == "v0":
        # V0 keeps every token of every layer.
        layers = [LayerKV("full", x.block_size, x.page_bytes) if x.window else x for x in layers]
    return layers


def _page(want: CapacityInput, model: ModelSpec, layer: LayerSpec) -> LayerKV:
    state = kv_state_bytes(model, want.kv_cache_dtype, want.dtype)
    heads = 1 if model.mla is not None else max(1, model.num_kv_heads // want.tensor_parallel_size)
    page = want.block_size * heads * state
    return LayerKV(layer.attention, want.block_size, page, layer.window, (heads, state))


def kv_stages(want: CapacityInput) -> list[range]:
    """Layers of each pipeline stage as `layer_kv` counts them: the draft sits on the last stage."""
    stages = stage_layers(want.model.num_layers, want.pipeline_parallel_size)
    if want.draft is not None:
        last = stages[-1]
        stages[-1] = range(last.start, last.stop + len(want.draft.layers))
    return stages


def rank_weight_bytes(want: CapacityInput, stage: int) -> tuple[int, int]:
    """(weights, RoPE tables) that one rank of a pipeline stage holds."""
    model, pp = want.model, want.pipeline_parallel_size
    stages = stage_layers(model.num_layers, pp)
    ep = want.tensor_parallel_size * want.data_parallel_size if want.enable_expert_parallel else 1
    if model.moe is None:
        ep = 1
    tensors = list(
        parameters(
            model,
            tp=want.tensor_parallel_size,
            ep=ep,
            layers=stages[stage],
            first=stage == 0,
            last=stage == pp - 1,
        )
    )
    size = DTYPE_BYTES[want.dtype]
    return weight_bytes(tensors, model, want.quantization, size), rope_cache_bytes(model, size)


def _account(want: CapacityInput, stage: int) -> tuple[Term, ...]:
    """The terms that are subtracted from the requested memory, for one pipeline stage."""
    weights, rope = rank_weight_bytes(want, stage)
    version = parse_version(want.engine_version)
    ep = 2 if want.enable_expert_parallel and want.model.moe is not None else 1
    method = want.quantization.method if want.quantization else want.dtype
    tp, pp = want.tensor_parallel_size, want.pipeline_parallel_size
    activation = activation_peak(
        want.model,
        want.gpu,
        tp,
        ep,
        want.max_num_batched_tokens,
        want.max_num_seqs,
        DTYPE_BYTES[want.dtype],
        want.engine,
        version,
        want.enable_chunked_prefill,
    )
    if want.engine == "v1":
        graphs = cuda_graphs(
            want.gpu, want.enforce_eager, want.max_num_seqs, want.max_num_batched_tokens, version
        )
    else:
        graphs = Term(
            "CUDA graph estimate", 0, "formula", "V0 does not take graphs from the KV budget"
        )
    draft = 0
    if want.draft is not None and stage == pp - 1:
        share = tp * want.data_parallel_size if want.enable_expert_parallel else 1
        tensors = want.draft.tensors(tp, share if want.draft.model.moe else 1)
        size = DTYPE_BYTES[want.dtype]
        draft = weight_bytes(tensors, want.draft.model, want.quantization, size)
    return (
        Term("weights", weights, "formula", f"every tensor of the rank by its shape, {method}"),
        Term("RoPE tables", rope, "formula", "max positions x rotary dim, loaded with the weights"),
        *(
            [Term("draft weights", draft, "formula", f"speculative decoding: {want.draft.method}")]
            if want.draft is not None
            else []
        ),
        activation,
        non_torch(want.gpu, tp, pp, want.engine, version),
        graphs,
    )


def _available(want: CapacityInput) -> tuple[list[int], tuple[Term, ...], int]:
    """(available bytes by stage, terms of the poorest stage, requested bytes)."""
    stages = want.pipeline_parallel_size
    if want.available_bytes is not None:
        term = Term("available KV cache memory", want.available_bytes, "given", "as given")
        return [want.available_bytes] * stages, (term,), 0
    if want.kv_cache_memory_bytes is not None:
        term = Term(
            "KV cache memory",
            want.kv_cache_memory_bytes,
            "given",
            "--kv-cache-memory-bytes (replaces profiling and --gpu-memory-utilization)",
        )
        return [want.kv_cache_memory_bytes] * stages, (term,), 0
    if want.gpu.memory_bytes == 0:
        if want.num_gpu_blocks_override is not None:
            return [0] * stages, (), 0
        raise UserError(
            f"{want.gpu.name}: the device has no fixed memory to size the KV cache from; "
            "give --kv-cache-memory-bytes (vLLM's VLLM_CPU_KVCACHE_SPACE) or --num-gpu-blocks-override"
        )
    requested = math.ceil(want.gpu.memory_bytes * want.gpu_memory_utilization)
    accounts = [_account(want, stage) for stage in range(stages)]
    available = [requested - sum(t.bytes for t in account) for account in accounts]
    poorest = min(range(stages), key=lambda i: available[i])
    return available, accounts[poorest], requested


def _gib(count: float) -> str:
    """GiB as vLLM prints them: at most two decimals (`format_gib`)."""
    return f"{round(count / GIB, 2)}"


def size_kv_cache(want: CapacityInput) -> Capacity:
    """Size the KV cache, or refuse in vLLM's own words with a `UserError`.

    Source: vLLM 0.32 v1/worker/gpu_worker.py `determine_available_memory`, v1/core/kv_cache_utils.py
    `get_kv_cache_configs`; 0.8.5 worker/worker.py `determine_num_available_blocks` for V0.
    """
    version = parse_version(want.engine_version)
    stages = kv_stages(want)
    layout = kv_layout(
        layer_kv(want), stages, hybrid_allocator(want.engine, version), group_size_ratio(version)
    )
    available, terms, requested = _available(want)
    if want.num_gpu_blocks_override is not None:
        # vLLM plans every check against what the override makes it allocate.
        available = [want.num_gpu_blocks_override * need for need in layout.bytes_per_block]
    max_model_len = want.max_model_len
    if want.engine == "v1":
        max_model_len = _check_fit(want, layout, available, terms)
    num_blocks = layout.num_blocks(available)
    if want.engine == "v0":
        # V0 runs one virtual engine per stage and deals the blocks out among them.
        num_blocks //= want.pipeline_parallel_size
        _check_v0(want, num_blocks)
    concurrency = layout.max_concurrency(num_blocks, max_model_len, want.in_flight_tokens)
    if want.engine == "v1" and tokens_from_concurrency(version):
        tokens = int(concurrency * max_model_len)
    else:
        tokens = num_blocks // len(layout.groups) * want.block_size
    pages = [layer.page_bytes for layer in layer_kv(want)]
    poorest = min(range(len(stages)), key=lambda i: available[i] // layout.bytes_per_block[i])
    return Capacity(
        terms=terms,
        requested_bytes=requested,
        available_bytes=available[poorest],
        layout=layout,
        bytes_per_block=layout.bytes_per_block[poorest],
        block_size=want.block_size,
        num_gpu_blocks=num_blocks,
        num_cpu_blocks=want.swap_space_bytes
        // layout.bytes_per_block[poorest]
        // want.pipeline_parallel_size,
        max_model_len=max_model_len,
        kv_cache_size_tokens=tokens,
        max_concurrency=concurrency,
        kv_bytes_per_token=sum(pages[i] for i in stages[poorest]) // want.block_size,
        weight_bytes=sum(rank_weight_bytes(want, 0)),
    )


def _check_fit(
    want: CapacityInput, layout: KVCacheLayout, available: list[int], terms: tuple[Term, ...]
) -> int:
    """V1's start-up check; returns max_model_len, shortened if it was to be fitted (-1)."""
    version = parse_version(want.engine_version)
    spare = 1 if reserves_null_block(version) else 0
    check = [
        have - spare * need for have, need in zip(available, layout.bytes_per_block, strict=True)
    ]
    length = want.max_model_len
    if want.fit_max_model_len:
        length = min(
            layout.longest_fitting(i, check[i], length, want.in_flight_tokens)
            for i in range(len(check))
        )
        if length <= 0:
            raise UserError(
                "Cannot auto-fit max_model_len: not enough GPU memory available to serve even a single token. "
                "Try increasing --gpu-memory-utilization, more ranks or a smaller dtype."
            )
    for stage, have in enumerate(check):
        if have <= 0:
            parts = ", ".join(f"{t.name} {_gib(t.bytes)}" for t in terms if t.bytes)
            raise UserError(
                "No available memory for the cache blocks. Try increasing `gpu_memory_utilization`: "
                f"{want.model.name} on {want.gpu.name} (tp={want.tensor_parallel_size}, "
                f"pp={want.pipeline_parallel_size}) leaves {_gib(available[stage])} GiB for the KV cache "
                f"(GiB per rank: {parts}). More ranks, a smaller dtype or quantized weights also help."
            )
        needed = layout.needed_bytes(stage, length, want.in_flight_tokens)
        if needed > have and want.check_fit:
            fits = layout.longest_fitting(stage, have, length, want.in_flight_tokens)
            hint = (
                f"Based on the available memory, the estimated maximum model length is {fits}. "
                if fits
                else ""
            )
            raise UserError(
                f"To serve at least one request with the model's max seq len ({length}), ({_gib(needed)} GiB KV "
                f"cache is needed, which is larger than the available KV cache memory ({_gib(have)} GiB). {hint}"
                "Try increasing `gpu_memory_utilization` or decreasing `max_model_len`."
            )
    return length


def _check_v0(want: CapacityInput, num_blocks: int) -> None:
    """V0's start-up check (0.8.5 worker/worker.py, `raise_if_cache_size_invalid`)."""
    if num_blocks <= 0:
        raise UserError(
            "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when "
            f"initializing the engine ({want.model.name} on {want.gpu.name})."
        )
    tokens = num_blocks * want.block_size
    if want.max_model_len > tokens and want.check_fit:
        raise UserError(
            f"The model's max seq len ({want.max_model_len}) is larger than the maximum number of tokens that "
            f"can be stored in KV cache ({tokens}). Try increasing `gpu_memory_utilization` or decreasing "
            "`max_model_len` when initializing the engine."
        )
