"""Weight memory: every tensor of the model by formula, and what one rank holds of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from vsim.models.model_spec import ModelSpec

Kind = Literal["embedding", "lm_head", "linear", "expert", "router", "norm", "bias"]

# vLLM pads the vocabulary to a multiple of 64 before it splits it over ranks (vocab_parallel_embedding.py).
VOCAB_PADDING = 64


@dataclass(frozen=True, slots=True)
class Tensor:
    """`count` parameters of one kind. `layer` is -1 outside the decoder layers."""

    name: str
    count: int
    kind: Kind
    layer: int = -1


def _padded_vocab(model: ModelSpec, tp: int) -> int:
    rows = -(-model.vocab_size // VOCAB_PADDING) * VOCAB_PADDING
    return -(-rows // tp)


def _attention(model: ModelSpec, index: int, tp: int) -> Iterator[Tensor]:
    hidden = model.hidden_size
    heads = model.num_attention_heads // tp
    if model.mla is not None:
        mla = model.mla
        qk = mla.qk_nope_head_dim + mla.qk_rope_head_dim
        if mla.q_lora_rank is None:
            yield Tensor("q_proj", hidden * heads * qk, "linear", index)
        else:
            # The down-projections are small and replicated on every rank.
            yield Tensor("q_a_proj", hidden * mla.q_lora_rank, "linear", index)
            yield Tensor("q_b_proj", mla.q_lora_rank * heads * qk, "linear", index)
            yield Tensor("q_a_layernorm", mla.q_lora_rank, "norm", index)
        yield Tensor(
            "kv_a_proj", hidden * (mla.kv_lora_rank + mla.qk_rope_head_dim), "linear", index
        )
        yield Tensor("kv_a_layernorm", mla.kv_lora_rank, "norm", index)
        per_head = mla.qk_nope_head_dim + mla.v_head_dim
        yield Tensor("kv_b_proj", mla.kv_lora_rank * heads * per_head, "linear", index)
        yield Tensor("o_proj", heads * mla.v_head_dim * hidden, "linear", index)
        return
    size = model.head_size
    kv_heads = max(
        1, model.num_kv_heads // tp
    )  # replicated once there are more ranks than KV heads
    yield Tensor("qkv_proj", hidden * (heads + 2 * kv_heads) * size, "linear", index)
    yield Tensor("o_proj", heads * size * hidden, "linear", index)
    if model.qkv_bias:
        yield Tensor("qkv_proj.bias", (heads + 2 * kv_heads) * size, "bias", index)
    if model.o_bias:
        yield Tensor("o_proj.bias", hidden, "bias", index)
    if model.qk_norm:
        yield Tensor("q_norm, k_norm", 2 * size, "norm", index)
    if model.model_type == "gpt_oss":
        yield Tensor("sinks", heads, "bias", index)


def _feed_forward(model: ModelSpec, index: int, tp: int, ep: int) -> Iterator[Tensor]:
    hidden = model.hidden_size
    moe = model.moe
    if moe is None or not model.layers[index].moe:
        size = -(-model.intermediate_size // tp)
        yield Tensor("gate_up_proj", 2 * hidden * size, "linear", index)
        yield Tensor("down_proj", size * hidden, "linear", index)
        if model.mlp_bias:
            yield Tensor("mlp.bias", 2 * size + hidden, "bias", index)
        return
    yield Tensor("router", hidden * moe.num_experts, "router", index)
    # Expert parallelism keeps whole experts on a rank; otherwise every expert is cut over the TP ranks.
    experts = -(-moe.num_experts // ep)
    size = moe.intermediate_size if ep > 1 else -(-moe.intermediate_size // tp)
    yield Tensor("experts", experts * 3 * hidden * size, "expert", index)
    if moe.expert_bias:
        yield Tensor("experts.bias", experts * (2 * size + hidden), "bias", index)
        yield Tensor("router.bias", moe.num_experts, "bias", index)
    if model.mla is not None:
        yield Tensor("e_score_correction_bias", moe.num_experts, "bias", index)
    if moe.shared_intermediate_size:
        shared = -(-moe.shared_intermediate_size // tp)
        yield Tensor("shared_experts", 3 * hidden * shared, "linear", index)
    if moe.shared_gate:
        yield Tensor("shared_expert_gate", hidden, "router", index)


def parameters(
    model: ModelSpec,
    tp: int = 1,
    ep: int = 1,
    layers: range | None = None,
    first: bool = True,
    last: bool = True,
) -> Iterator[Tensor]:
    """The tensors that one rank holds.

    `tp` tensor-parallel ranks; `ep` ranks that share the experts (1: experts are cut by TP). `layers` is
    this pipeline stage's range, `first` and `last` whether it holds the embedding and the LM head.
    With the defaults: the whole model, with the vocabulary unpadded, so the sum is the parameter count.
    """
    vocab = model.vocab_size if tp == 1 else _padded_vocab(model, tp)
    if first or (last and model.tie_word_embeddings):
        yield Tensor("embed_tokens", vocab * model.hidden_size, "embedding")
    for index in layers if layers is not None else range(model.num_layers):
        yield from _attention(model, index, tp)
        yield from _feed_forward(model, index, tp, ep)
        yield Tensor("layernorms", model.norms_per_layer * model.hidden_size, "norm", index)
    if last:
        yield Tensor("norm", model.hidden_size, "norm")
        if not model.tie_word_embeddings:
            yield Tensor("lm_head", vocab * model.hidden_size, "lm_head")


def stage_layers(num_layers: int, pipeline_parallel_size: int) -> list[range]:
    """Layers of each pipeline stage (vLLM 0.32 distributed/utils.py, `get_pp_indices`).

    A remainder goes to the stages from the second-last backwards: the last stage also holds the LM head.
    """
    sizes = [num_layers // pipeline_parallel_size] * pipeline_parallel_size
    for i in range(2, num_layers % pipeline_parallel_size + 2):
        sizes[-i] += 1
    starts = [sum(sizes[:i]) for i in range(pipeline_parallel_size)]
    return [range(s, s + n) for s, n in zip(starts, sizes, strict=True)]


def rope_cache_bytes(model: ModelSpec, dtype_bytes: int) -> int:
    """The cos/sin tables, which vLLM counts with the weights: max positions x rotary dim, in the model's dtype.

    It is why Llama 3.1 8B (131,072 positions) loads as 14.99 GiB where Llama 3 8B loads as 14.96 GiB.
    """
    return model.rope_tables * model.max_model_len * model.rope_dim * dtype_bytes
