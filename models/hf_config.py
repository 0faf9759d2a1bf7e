"""A model's shape read from a Hugging Face `config.json`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from vsim.errors import UserError
from vsim.models.model_shape import Config, LayerSpec, Mla, ModelSpec, Moe

MAX_CONFIG_BYTES = 16 << 20  # a config.json is a few kB; anything huge is not one

# What a config.json may leave out because its family's class in transformers fills it in (as of the release
# that vLLM 0.32 installs). Only keys that published configs really omit, beside what must be there.
_FAMILY_DEFAULTS: dict[str, Config] = {
    "gemma2": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
        "sliding_window": 4096,
    },
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "llama": {"max_position_embeddings": 2048},
    "mistral": {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "mixtral": {"num_key_value_heads": 8, "max_position_embeddings": 131072},
    "qwen2": {"max_position_embeddings": 32768},
    "qwen3": {"head_dim": 128, "max_position_embeddings": 32768},
    "qwen3_moe": {"head_dim": 128, "max_position_embeddings": 32768},
    "gpt_oss": {"head_dim": 64, "max_position_embeddings": 131072, "sliding_window": 128},
}

# Families whose parameter counts and KV caches were checked against published ones.
_CHECKED_FAMILIES = {*_FAMILY_DEFAULTS, "deepseek_v3", "kimi_k2"}

_NO_ROPE_FACTOR = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
_LENGTH_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)


def _integer(config: Config, keys: tuple[str, ...], where: str, minimum: int = 1) -> int:
    """The first of `keys` in the config as an integer, or a UserError naming it."""
    for key in keys:
        if config.get(key) is not None:
            value = config[key]
            if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
                raise UserError(
                    f"{where}: {key}={value!r} must be an integer of at least {minimum}"
                )
            if value > 1 << 40:
                raise UserError(f"{where}: {key}={value} is beyond any model")
            return value
    raise UserError(
        f"{where}: {keys[0]} is missing; vsim needs the config.json of a decoder-only model"
    )


def _optional(config: Config, key: str, where: str) -> int | None:
    return None if config.get(key) is None else _integer(config, (key,), where, minimum=0)


def _max_model_len(config: Config, where: str) -> int:
    """vLLM's derived max_model_len (0.32 config/model.py, `_get_and_verify_max_len`)."""
    for key in _LENGTH_KEYS:
        if config.get(key) is not None:
            length: float = _integer(config, (key,), where)
            break
    else:
        return 2048  # vLLM's own fallback when the config names no length
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if isinstance(rope, dict) and "gemma3" not in str(config.get("model_type")):
        kind = rope.get("rope_type", rope.get("type", "default"))
        factor = rope.get("factor")
        if kind not in _NO_ROPE_FACTOR and isinstance(factor, int | float) and factor > 0:
            length *= factor
        if kind == "longrope" and config.get("original_max_position_embeddings") is not None:
            length = _integer(config, ("original_max_position_embeddings",), where)
    if length > 1 << 40:
        raise UserError(f"{where}: a max_model_len of {length:.3g} tokens is beyond any model")
    return int(length)


def _layer_types(config: Config, num_layers: int, where: str) -> list[LayerSpec]:
    """Full or sliding attention per layer: explicit `layer_types`, else the family's own rule."""
    family = str(config.get("model_type", ""))
    window = _optional(config, "sliding_window", where) or None
    if config.get("use_sliding_window") is False:
        window = None
    types = config.get("layer_types")
    if types is not None and not isinstance(types, list):
        raise UserError(f"{where}: layer_types={types!r} must be a list, one entry a layer")
    if isinstance(types, list):
        if len(types) != num_layers:
            raise UserError(
                f"{where}: layer_types has {len(types)} entries for {num_layers} layers"
            )
        known = {"full_attention", "sliding_attention"}
        if unknown := sorted({str(t) for t in types} - known):
            raise UserError(
                f"{where}: layer type {unknown[0]!r} is not supported (only full and sliding attention "
                "layers are; Mamba and linear-attention hybrids are not modelled yet)"
            )
        return [
            LayerSpec("sliding", window)
            if t == "sliding_attention" and window
            else LayerSpec("full")
            for t in types
        ]
    if window is None:
        return [LayerSpec("full")] * num_layers
    if family.startswith("gemma2"):
        return [
            LayerSpec("sliding", window) if i % 2 == 0 else LayerSpec("full")
            for i in range(num_layers)
        ]
    if family.startswith("gemma3"):
        every = _optional(config, "sliding_window_pattern", where) or 6
        return [
            LayerSpec("full") if (i + 1) % every == 0 else LayerSpec("sliding", window)
            for i in range(num_layers)
        ]
    if family.startswith("qwen2") or family.startswith("qwen3"):
        # Qwen's config leaves the first max_window_layers layers on full attention.
        first = _optional(config, "max_window_layers", where) or 0
        return [
            LayerSpec("full") if i < first else LayerSpec("sliding", window)
            for i in range(num_layers)
        ]
    return [LayerSpec("sliding", window)] * num_layers


def _moe(config: Config, where: str) -> tuple[Moe | None, Callable[[int], bool]]:
    """The routed part and which layers have it."""
    keys = ("num_experts", "n_routed_experts", "num_local_experts")
    if not any(config.get(k) for k in keys):
        return None, lambda index: False
    family = str(config.get("model_type", ""))
    experts = _integer(config, keys, where)
    size = _integer(config, ("moe_intermediate_size", "intermediate_size"), where)
    shared = _optional(config, "shared_expert_intermediate_size", where) or 0
    if count := _optional(config, "n_shared_experts", where):
        shared = count * size
    moe = Moe(
        num_experts=experts,
        experts_per_token=_integer(
            config, ("num_experts_per_tok", "experts_per_token", "num_experts_per_token"), where
        ),
        intermediate_size=size,
        shared_intermediate_size=shared,
        shared_gate=family.startswith("qwen") and shared > 0,
        expert_bias=family == "gpt_oss",
    )
    if moe.experts_per_token > experts:
        raise UserError(
            f"{where}: num_experts_per_tok={moe.experts_per_token} of only {experts} experts"
        )
    dense_first = _optional(config, "first_k_dense_replace", where) or 0
    every = _optional(config, "moe_layer_freq", where) or 1
    step = _optional(config, "decoder_sparse_step", where) or 1
    listed = config.get("mlp_only_layers")
    dense = {i for i in listed if isinstance(i, int)} if isinstance(listed, list) else set()

    def routed(index: int) -> bool:
        return (
            index >= dense_first
            and index % every == 0
            and (index + 1) % step == 0
            and index not in dense
        )

    return moe, routed


def spec_from_config(config: Config, name: str, source: str = "", where: str = "") -> ModelSpec:
    """A `ModelSpec` from a parsed `config.json`. `where` names the file in complaints.

    Raises `UserError` for a missing or senseless figure, or a family that is not decoder-only attention.
    """
    where = where or name
    text = config.get("text_config")
    if isinstance(text, dict):
        # Multimodal wrappers keep the language model's shape here; the wrapper's own keys fill the gaps.
        config = {**{k: v for k, v in config.items() if k != "text_config"}, **text}
    family = str(config.get("model_type", ""))
    config = {**_FAMILY_DEFAULTS.get(family, {}), **config}
    for key in (
        "ssm_cfg",
        "mamba_d_state",
        "mamba_num_heads",
        "linear_num_key_heads",
        "linear_attn_config",
    ):
        if config.get(key):
            raise UserError(
                f"{where}: model type {family!r} mixes attention with a state-space or linear-attention part "
                f"({key}), which vsim does not model yet"
            )
    if config.get("is_encoder_decoder"):
        raise UserError(f"{where}: encoder-decoder models are not supported")
    if "bert" in family and not config.get("is_decoder"):
        raise UserError(
            f"{where}: {family!r} is an encoder: it generates no text and has no KV cache"
        )
    hidden = _integer(config, ("hidden_size", "n_embd", "d_model"), where)
    num_layers = _integer(config, ("num_hidden_layers", "n_layer", "num_layers"), where)
    if num_layers > 10_000:
        raise UserError(f"{where}: num_hidden_layers={num_layers} is beyond any model")
    heads = _integer(config, ("num_attention_heads", "n_head"), where)
    kv_heads = _optional(config, "num_key_value_heads", where) or heads
    head_size = _optional(config, "head_dim", where) or hidden // heads
    if head_size == 0:
        raise UserError(
            f"{where}: hidden_size={hidden} over num_attention_heads={heads} leaves heads of size 0"
        )
    layers = _layer_types(config, num_layers, where)
    mla = None
    if config.get("kv_lora_rank"):
        mla = Mla(
            q_lora_rank=_optional(config, "q_lora_rank", where) or None,
            kv_lora_rank=_integer(config, ("kv_lora_rank",), where),
            qk_nope_head_dim=_integer(config, ("qk_nope_head_dim",), where),
            qk_rope_head_dim=_integer(config, ("qk_rope_head_dim",), where),
            v_head_dim=_integer(config, ("v_head_dim",), where),
        )
        layers = [LayerSpec("mla")] * num_layers
    elif heads % kv_heads:
        raise UserError(
            f"{where}: num_attention_heads={heads} must be a multiple of num_key_value_heads={kv_heads}"
        )
    moe, routed = _moe(config, where)
    layers = [LayerSpec(layer.attention, layer.window, routed(i)) for i, layer in enumerate(layers)]
    quantization = config.get("quantization_config") or config.get("compression_config") or {}
    if not isinstance(quantization, dict):
        raise UserError(f"{where}: quantization_config must be an object")
    gemma = family.startswith(("gemma2", "gemma3"))
    attention_bias = bool(config.get("attention_bias", False))
    named = config.get("architectures")
    architecture = str(named[0]) if isinstance(named, list) and named else family or "unknown"
    return ModelSpec(
        name=name,
        model_type=family,
        architecture=architecture,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        intermediate_size=_integer(config, ("intermediate_size", "n_inner", "ffn_dim"), where),
        vocab_size=_integer(config, ("vocab_size",), where),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", gemma)),
        max_model_len=_max_model_len(config, where),
        dtype=str(config.get("torch_dtype") or config.get("dtype") or "float32").removeprefix(
            "torch."
        ),
        layers=tuple(layers),
        mla=mla,
        moe=moe,
        # Qwen 1.5, 2 and 2.5 have biases on q, k and v whatever their config says; their o_proj has none.
        qkv_bias=family.startswith("qwen2") or attention_bias,
        o_bias=attention_bias and not family.startswith("qwen2"),
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=family.startswith(("qwen3", "gemma3")),
        norms_per_layer=4 if gemma else 2,
        num_draft_layers=min(_optional(config, "num_nextn_predict_layers", where) or 0, num_layers),
        rope_dim=mla.qk_rope_head_dim if mla else head_size,
        rope_tables=2 if family.startswith("gemma3") else 1,
        quantization=str(quantization["quant_method"])
        if quantization.get("quant_method")
        else None,
        quantization_config=quantization,
        source=source,
    )


def family_note(model: ModelSpec) -> str | None:
    """A sentence where `model` is of a family nobody checked vsim's reading of; None otherwise."""
    if model.model_type in _CHECKED_FAMILIES:
        return None
    return (
        f"{model.name}: model type {model.model_type or 'unnamed'!r} is none that was checked; its weights and KV "
        "cache are sized as those of a decoder of Llama's parts with the config's figures"
    )


def read_config(path: Path) -> Config:
    """Parse a `config.json`. Raises `UserError` naming the file if it is missing, huge or not a JSON object."""
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise UserError(
                f"{path}: larger than {MAX_CONFIG_BYTES >> 20} MiB, not a model's config.json"
            )
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(config, dict):
        raise UserError(f"{path}: must hold a JSON object, as Hugging Face's config.json does")
    return config
