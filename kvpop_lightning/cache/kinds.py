"""Which kind of layer a rule needs, and how a stretch of tokens goes through it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from kvpop_lightning.cache.chunk import attend_chunk
from kvpop_lightning.cache.full import FullLayer, attend_full
from kvpop_lightning.cache.layer import BoundedLayer
from kvpop_lightning.cache.merged import MergedLayer, attend_merged
from kvpop_lightning.cache.ragged import RaggedLayer, attend_ragged
from kvpop_lightning.cache.span import Span
from kvpop_lightning.cache.step import attend_step
from kvpop_lightning.cache.stepwise import SteppedLayer, attend_stepwise
from kvpop_lightning.policy.own_attention import OwnAttention

_STRETCH: dict[type[BoundedLayer], Callable[..., Tensor]] = {
    SteppedLayer: attend_stepwise,
    RaggedLayer: attend_ragged,
    MergedLayer: attend_merged,
    FullLayer: attend_full,
}


def layer_type(scorer: Any) -> type[BoundedLayer]:
    """The storage that a layer of this rule needs."""
    if isinstance(scorer, OwnAttention) and scorer.holds_all:
        return FullLayer
    if scorer.ragged:
        return MergedLayer if scorer.merges else RaggedLayer
    return SteppedLayer if scorer.stepwise else BoundedLayer


def attend_by(layer: BoundedLayer, span: Span) -> Callable[..., Tensor]:
    """The function that takes a stretch into the layer and attends, as `attend_chunk` does."""
    return _STRETCH.get(type(layer)) or (attend_step if span.length == 1 else attend_chunk)
