"""Speculative decoding as memory: the draft's layers keep KV too, and its weights sit beside the model's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vsim.errors import UserError
from vsim.models.model_spec import LayerSpec, ModelSpec, load_model
from vsim.models.weights import Tensor, parameters

# vLLM's method names -> how many hidden vectors the draft's input projection joins (0: none).
_OWN_LAYERS = {"mtp", "deepseek_mtp"}
_HEADS = {"eagle": 2, "eagle3": 3}
_NO_MEMORY = {"ngram", "suffix", "ngram_gpu"}
_MODEL = {"draft_model"}
METHODS = (*sorted(_OWN_LAYERS), *sorted(_HEADS), *sorted(_NO_MEMORY), *sorted(_MODEL))


@dataclass(frozen=True, slots=True)
class Draft:
    """What drafts: `layers` of the shape of `model`, on the last pipeline stage."""

    method: str
    model: ModelSpec
    layers: tuple[LayerSpec, ...]

    def tensors(self, tp: int, ep: int) -> list[Tensor]:
        """The draft's tensors on one rank; embedding and LM head are the target's, except for a whole model."""
        model = self.model
        if self.method in _MODEL:
            return list(parameters(model, tp=tp, ep=ep))
        hidden = model.hidden_size
        own = range(model.num_layers - len(self.layers), model.num_layers)
        found = list(parameters(model, tp=tp, ep=ep, layers=own, first=False, last=False))
        joined = 2 if self.method in _OWN_LAYERS else _HEADS[self.method]
        found.append(Tensor("input projection", joined * hidden * hidden, "linear"))
        found.append(Tensor("norms", 3 * hidden, "norm"))
        return found


def draft_of(target: ModelSpec, config: dict[str, Any]) -> Draft | None:
    """The draft that a `--speculative-config` names; None if it needs no device memory (n-grams).

    Raises `UserError` for an unknown method, or one whose draft cannot be found.
    """
    model_name = config.get("model")
    method = config.get("method")
    if method is None:
        method = "draft_model" if model_name else "mtp"
    if method not in METHODS:
        raise UserError(
            f"speculative_config: unknown method {method!r}; must be one of {', '.join(METHODS)}"
        )
    count = config.get("num_speculative_tokens")
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
        raise UserError(
            f"speculative_config: num_speculative_tokens={count!r} must be a whole number of at least 1"
        )
    if method in _NO_MEMORY:
        return None
    if method in _OWN_LAYERS:
        layers = target.num_draft_layers
        if not layers:
            raise UserError(
                f"speculative_config: {target.name} has no MTP layers (num_nextn_predict_layers in its config)"
            )
        return Draft(str(method), target, target.layers[-1:] * layers)
    if not isinstance(model_name, str):
        raise UserError(
            f"speculative_config: method {method!r} needs a model (a bundled name or a folder)"
        )
    model = load_model(model_name)
    return Draft(str(method), model, model.layers)
