"""The cache of a rule that holds everything and chooses what each query attends (`baselines/quest.py`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvpop_lightning.cache.attention import grouped_attention
from kvpop_lightning.cache.growing import GrowingLayer
from kvpop_lightning.cache.layer import BoundedLayer
from kvpop_lightning.cache.span import Span
from kvpop_lightning.policy.pages import choose_pages

GROWTH = 128
"""Tokens, at least, by which the allocation grows."""


class FullLayer(GrowingLayer):
    """Token j of a text in slot j, and the extremes of the keys of every page.

    Attributes:
        keys, values: [B, Hkv, S, D]; S grows by whole pages.
        low, high: [B, Hkv, S / page size, D]; 0 for a page without tokens.
    """

    low: Tensor
    high: Tensor

    @property
    def size(self) -> int:
        """Tokens per page."""
        return int(self.scorer.pages(self.budget)[0])

    def _allocate(self, key: Tensor, value: Tensor, hidden: Tensor | None) -> dict[str, Tensor]:
        empty = key[:, :, :0]
        return {"keys": empty, "values": value[:, :, :0], "low_keys": empty, "high_keys": empty}

    def _use(self, views: dict[str, Tensor]) -> None:
        self.keys, self.values = views["keys"], views["values"]
        self.low, self.high = views["low_keys"], views["high_keys"]

    def keys_per_head(self, seen: Tensor) -> Tensor:
        """int64 [B, Hkv]: all `seen` [B] tokens."""
        return seen[:, None].expand(-1, self._store["keys"].shape[1])

    def grow(self, tokens: int) -> None:
        """Slots for `tokens` tokens of every row."""
        slots = self._store["keys"].shape[2]
        if tokens <= slots:
            return
        unit = -(-GROWTH // self.size) * self.size
        more = -(-tokens // unit) * unit - slots
        larger = {}
        for name, tensor in self._store.items():
            count = more if name in ("keys", "values") else more // self.size
            fresh = tensor.new_zeros(*tensor.shape[:2], count, tensor.shape[3])
            larger[name] = torch.cat([tensor, fresh], 2)
        self._resize(**larger)


def attend_full(
    layer: BoundedLayer,
    layer_index: int,
    policy: Any,
    span: Span,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    hidden: Tensor | None,
    scaling: float,
) -> Tensor:
    """A stretch of C tokens; arguments and result as for `attend_chunk`."""
    assert isinstance(layer, FullLayer)
    assert layer.keys is not None
    assert layer.values is not None
    # `columns` counts padding too, so it is at least what any row holds.
    layer.grow(layer.columns + span.length)
    assert layer.keys is not None
    position, valid = span.position, span.valid
    row, column = valid.nonzero(as_tuple=True)
    at = position[row, column]
    layer.keys[row, :, at] = key[row, :, column]
    layer.values[row, :, at] = value[row, :, column]
    held = span.seen + span.count
    first = int(span.seen.min()) // layer.size
    _bounds(layer, held, first)

    own = (position // layer.size)[:, None, :, None]
    number = torch.arange(layer.low.shape[2], device=key.device)
    chosen = choose_pages(query, layer.low, layer.high, number < own, layer.scorer.pages(layer.budget)[1] - 1)
    chosen |= number == own
    visible = chosen.repeat_interleave(layer.size, -1)
    visible &= torch.arange(visible.shape[-1], device=key.device) <= position[:, None, :, None]
    return grouped_attention(query, [layer.keys], [layer.values], visible, scaling)


def _bounds(layer: FullLayer, held: Tensor, first: int) -> None:
    """Renews low and high from page `first` on, rows holding `held` int64 [B] tokens."""
    assert layer.keys is not None
    size = layer.size
    keys = layer.keys[:, :, first * size :].unflatten(2, (-1, size))
    token = torch.arange(first * size, layer.keys.shape[2], device=keys.device).view(-1, size)
    there = (token < held[:, None, None])[:, None, :, :, None]
    some = there.any(3)
    for bound, fill, extreme in ((layer.low, torch.inf, torch.amin), (layer.high, -torch.inf, torch.amax)):
        bound[:, :, first:] = extreme(keys.masked_fill(~there, fill), 3).masked_fill(~some, 0.0)
