"""A model's shape: everything about it that memory and time can depend on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Config = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Mla:
    """DeepSeek's multi-head latent attention: K and V are one vector of kv_lora_rank + qk_rope_head_dim."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True, slots=True)
class Moe:
    """Routed experts of one MoE layer, and the shared ones beside them."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    shared_intermediate_size: int = 0  # all shared experts together
    shared_gate: bool = False
    expert_bias: bool = False


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one decoder layer attends with, and whether its feed-forward part is routed."""

    attention: Literal["full", "sliding", "mla"]
    window: int | None = None
    moe: bool = False


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only transformer. Sizes are those of the whole model, before any parallelism.

    `head_size` is per KV head (and query head); with MLA the cached vector is described by `mla`.
    `max_model_len` is what vLLM derives from the config (RoPE scaling included). `dtype` is the config's.
    `quantization` is the checkpoint's own method ("fp8", "gptq", ...), None for plain weights.
    """

    name: str
    model_type: str
    architecture: str
    hidden_size: int
    num_attention_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    vocab_size: int
    tie_word_embeddings: bool
    max_model_len: int
    dtype: str
    layers: tuple[LayerSpec, ...]
    mla: Mla | None = None
    moe: Moe | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norms_per_layer: int = 2
    rope_dim: int = 0
    rope_tables: int = (
        1  # distinct cos/sin caches (Gemma 3 has one for local, one for global layers)
    )
    num_draft_layers: int = 0  # MTP layers shipped with the checkpoint
    quantization: str | None = None
    quantization_config: Config = field(default_factory=dict)
    source: str = ""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model by formula (models/weights.py)."""
        from vsim.models.weights import parameters

        return sum(tensor.count for tensor in parameters(self))

    @property
    def num_active_parameters(self) -> int:
        """Parameters that one token meets: routed experts count experts_per_token / num_experts."""
        from vsim.models.weights import parameters

        share = 1.0 if self.moe is None else self.moe.experts_per_token / self.moe.num_experts
        return round(
            sum(t.count * (share if t.kind == "expert" else 1.0) for t in parameters(self))
        )
