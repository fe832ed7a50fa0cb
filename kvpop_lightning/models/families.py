"""Which models can be retrofitted, and the shapes that a policy needs to know of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from kvpop_lightning.errors import UserError
from kvpop_lightning.models.context import decoder_of

TESTED = "Llama, Qwen3, Mistral"


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder as a policy sees it."""

    num_layers: int
    num_heads: int
    """KV heads."""
    head_dim: int
    hidden_size: int

    def __str__(self) -> str:
        return (
            f"{self.num_layers} layers of {self.num_heads} KV heads of size {self.head_dim} "
            f"(hidden size {self.hidden_size})"
        )


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """The attention module of every layer, in order.

    Raises:
        UserError: not a transformers model, a family without the attention interface or without one q, k and
            v projection per layer, or layers with a sliding window of their own.
    """
    if not isinstance(model, PreTrainedModel):
        raise UserError(
            f"retrofit needs a transformers PreTrainedModel, got {type(model).__name__}: load it with "
            "AutoModelForCausalLM.from_pretrained"
        )
    family = type(model).__name__
    if not model._supports_attention_backend or not model._can_set_attn_implementation():
        raise UserError(
            f"model family {family} does not run through transformers' attention interface: use a family "
            "that does, "
            f"such as {TESTED}"
        )
    decoder = decoder_of(model)
    found: dict[int, nn.Module] = {}
    for module in decoder.modules():
        layer = getattr(module, "layer_idx", None)
        if isinstance(layer, int) and all(hasattr(module, f"{x}_proj") for x in "qkv"):
            found[layer] = module
    layers = getattr(model.config, "num_hidden_layers", None)
    if layers is None or sorted(found) != list(range(layers)):
        raise UserError(
            f"model family {family} is not supported: found q, k and v projections in {len(found)} of "
            f"{layers} layers "
            f"(tested: {TESTED})"
        )
    check_no_sliding_window(model.config, family)
    return [found[layer] for layer in range(layers)]


def check_no_sliding_window(config: Any, family: str) -> None:
    """Layers that forget by themselves would fight the policy.

    Raises:
        UserError: some layer of the model is not full attention.
    """
    types = getattr(config, "layer_types", None)
    other = sorted({t for t in types if t != "full_attention"}) if types else []
    window = getattr(config, "sliding_window", None)
    if not types and window is not None:
        other = ["sliding_attention"]
    if other:
        raise UserError(
            f"{family} has layers with {', '.join(other)} (window {window}), which a retention policy "
            "cannot serve: "
            "load it with sliding_window=None if the checkpoint allows that, or use a model with full "
            "attention"
        )


def shape_of(model: Any, modules: list[nn.Module]) -> Shape:
    """Layer, KV head, head and hidden sizes, from the configuration and the first attention module."""
    config, first = model.config, modules[0]
    query_heads = config.num_attention_heads
    heads = getattr(config, "num_key_value_heads", None) or query_heads
    head_dim = getattr(first, "head_dim", None) or config.hidden_size // query_heads
    return Shape(len(modules), heads, head_dim, config.hidden_size)


def rule_facts(model: Any, shape: Shape) -> dict[str, Any]:
    """What rules that look behind RoPE need to know: `inv_freq`, radians per token of each rotation, and
    `groups`, query heads per KV head. Empty when the model keeps no such frequencies.
    """
    frequencies = getattr(getattr(decoder_of(model), "rotary_emb", None), "inv_freq", None)
    if frequencies is None or frequencies.is_meta:
        return {}
    return {
        "inv_freq": frequencies.double().tolist(),
        "groups": model.config.num_attention_heads // shape.num_heads,
    }
