"""What one forward call of a retrofitted model knows, and what stays with the model between calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from kvpop_lightning.attention import Segment, log_normalizer
from kvpop_lightning.policy.budget import NEVER


@dataclass(frozen=True)
class LayerObservation:
    """One layer of a parallel forward, as given to the callback of `observe`.

    B rows of T tokens, Hq query heads, Hkv KV heads of size D. Detached unless `observe(...,
    gradients=True)`.
    """

    layer: int
    query: Tensor
    """[B, Hq, T, D], after RoPE."""
    key: Tensor
    """[B, Hkv, T, D], after RoPE, not repeated for the query heads."""
    value: Tensor
    """[B, Hkv, T, D]."""
    hidden: Tensor
    """[B, T, Hid], the normalised hidden state that q_proj reads."""
    document_ids: Tensor | None
    """int64 [B, T], -1 = padding; None = one document per row, no padding."""
    position: Tensor
    """int64 [B, T], place inside the document."""
    scale: float
    score: Tensor | None
    """float32 [B, Hkv, T]; None in a dense or replayed forward."""
    priority: Tensor | None
    """float64 [B, Hkv, T]; None in a dense or replayed forward."""
    eviction: Tensor | None
    """int64 [B, Hkv, T]; None in a dense forward."""
    own_attention: bool = False
    """The rule did not attend by eviction times alone (pages per query, sinks at moved places)."""
    known_lse: Tensor | None = None
    """The normaliser, where the attention gave it for nothing; `lse` is what to read."""
    target_backend: str = "auto"
    """How to compute a future-attention target from this (`future_attention_target`)."""

    @cached_property
    def lse(self) -> Tensor:
        """float32 (float64) [B, Hq, T], natural log: the normaliser of this forward's attention, dense or
        sparse.

        Taken from the attention itself where its backend gives it, else computed when first read (one more
        pass over the logits); without gradient, -inf on padding.

        Raises:
            ValueError: the rule attends in its own way, which query, key and eviction times do not give back.
        """
        if self.own_attention:
            raise ValueError(
                "no normaliser: this policy chooses, moves or merges keys, its attention is not given by "
                "eviction times (quest, streaming_llm_rotated, dmc); observe the dense forward instead"
            )
        if self.known_lse is not None:
            return self.known_lse
        eviction = self.eviction
        if eviction is None:
            eviction = torch.full(self.key.shape[:3], NEVER, dtype=torch.int64, device=self.key.device)
        return log_normalizer(
            self.query, self.key, eviction, document_ids=self.document_ids, scale=self.scale
        )


@dataclass(frozen=True)
class Observer:
    """A callback of `observe` and what it asked for."""

    callback: Callable[[LayerObservation], None]
    gradients: bool = False


@dataclass(frozen=True)
class LayerPrefix:
    """What one layer computed for the first P tokens of every row, taken from a `LayerObservation`."""

    query: Tensor
    """[B, Hq, P, D], after RoPE."""
    key: Tensor
    """[B, Hkv, P, D], after RoPE."""
    value: Tensor
    """[B, Hkv, P, D]."""
    hidden: Tensor
    """[B, P, Hid]."""

    @property
    def length(self) -> int:
        """P, in tokens."""
        return self.key.shape[2]

    def extended(self, query: Tensor, key: Tensor, value: Tensor, hidden: Tensor) -> list[Tensor]:
        """The whole row's tensors, given those of the tokens after the prefix."""
        return [
            torch.cat([self.query, query], 2),
            torch.cat([self.key, key], 2),
            torch.cat([self.value, value], 2),
            torch.cat([self.hidden, hidden], 1),
        ]


@dataclass(frozen=True)
class Mode:
    """How the model runs now; the context managers of `modes.py` set it for a while."""

    dense: bool = False
    replay: tuple[Tensor, ...] | None = None
    """Eviction times imposed on the parallel forward, int64 [B, Hkv, T] per layer."""
    observers: tuple[Observer, ...] = ()
    prefix: tuple[LayerPrefix, ...] | None = None
    """What the layers computed for the first tokens of the rows: the forward starts after them."""
    soft: Callable[..., Tensor] | None = None
    """Takes the place of the attention of a parallel forward (`modes.softly`)."""
    attention_backend: str = "auto"
    """Of the sparse attention of a parallel forward (`models/backends.py`)."""
    target_backend: str = "auto"
    """Of targets computed from what observers see."""


@dataclass(frozen=True)
class ForwardContext:
    """Made once per forward by the model's hook, handed to every layer's attention as the keyword `kvpop`.

    It travels as an argument, not as state, so that recomputation under gradient checkpointing sees the same.
    """

    policy: Any
    mode: Mode
    position: Tensor | None = None
    """int64 [B, T], place inside the document; None with a cache."""
    document_ids: Tensor | None = None
    """int64 [B, T] or None = one document per row, no padding."""
    segments: list[Segment] | None = None
    """The documents of a parallel forward; None with a cache."""
    cache: Any = None
    """The BoundedCache of this call."""
    rope: Tensor | None = None
    """int64 [B or 1, T or Q], what RoPE turned queries and keys by; None in a dense forward on a cache."""
    dense_mask: Tensor | None = None
    """Dense forward on an ordinary cache: bool [B, 1, Q, K]."""


@dataclass
class Runtime:
    """What retrofit leaves on the model; lives on the decoder, outside the module tree, and survives
    deepcopy.
    """

    owner: nn.Module
    """The model that carries `kvpop`."""
    original_attention: str | None
    original_class: type
    base: dict[str, Any]
    """Where the base came from and what its weights were (`persist.py`)."""
    handles: list[Any] = field(default_factory=list)
    mode: Mode = field(default_factory=Mode)

    @property
    def policy(self) -> Any:
        return self.owner.kvpop


RUNTIME = "_kvpop_runtime"
"""Attribute of the decoder that holds the Runtime."""


def decoder_of(model: nn.Module) -> nn.Module:
    """The module that runs the layers: `model.model` of a causal model, or the model itself."""
    decoder = getattr(model, "base_model", model)
    assert isinstance(decoder, nn.Module)
    return decoder


def runtime_of(model: nn.Module) -> Runtime:
    """The runtime of a retrofitted model.

    Raises:
        ValueError: the model is not retrofitted.
    """
    runtime = getattr(decoder_of(model), RUNTIME, None)
    if runtime is None:
        raise ValueError(
            f"this {type(model).__name__} has no eviction policy: call kvpop_lightning.retrofit(model, "
            "...) first"
        )
    return runtime
