"""The cache under a rule that closes keys by a gate (`kvpop_lightning.policy.ragged`): heads differ in
length.

A layer holds the window as a ring, the same for all heads, and behind it the open keys of each head in pages
(`PagedLayer`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvpop_lightning.cache.attention import grouped_attention
from kvpop_lightning.cache.layer import BoundedLayer
from kvpop_lightning.cache.paged import PagedLayer
from kvpop_lightning.cache.span import Span, put, take


class RaggedLayer(PagedLayer):
    """A window of `budget.window` keys per KV head, and pages for the open keys that have left it.

    Attributes:
        keys, values: [B, Hkv, window, D], the ring: token i in slot i mod window.
        closed: bool [B, Hkv, window], the ring's keys whose gate has closed them.
    """

    closed: Tensor

    def _allocate(self, key: Tensor, value: Tensor, hidden: Tensor | None) -> dict[str, Tensor]:
        batch, heads, window = key.shape[0], key.shape[1], self.budget.window
        return {
            "keys": key.new_zeros(batch, heads, window, key.shape[3]),
            "values": value.new_zeros(batch, heads, window, value.shape[3]),
            "closed": key.new_zeros(batch, heads, window, dtype=torch.bool),
            **super()._allocate(key, value, hidden),
        }

    def _use(self, views: dict[str, Tensor]) -> None:
        super()._use(views)
        self.closed = views["closed"]

    def keys_per_head(self, seen: Tensor) -> Tensor:
        """int64 [B, Hkv]: keys that each head holds after `seen` [B] tokens."""
        return self.held + seen.clamp(max=self.budget.window)[:, None]


def attend_ragged(
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
    """A stretch of C tokens; arguments and result as for `attend_chunk`.

    In order of position there are the window's w keys and the C new ones. Token i's gate closes key i - 1,
    long before that leaves the window, so every query's keys are known when the stretch is in.
    """
    assert isinstance(layer, RaggedLayer)
    assert layer.keys is not None
    assert layer.values is not None
    assert hidden is not None
    window, length = layer.budget.window, span.length
    heads = key.shape[1]
    ring_key, ring_value = take(layer.keys, span.ring_slot), take(layer.values, span.ring_slot)
    ring_closed = layer.closed.gather(2, span.ring_slot[:, None].expand(-1, heads, -1))
    closes = layer.scorer.decide(hidden) & span.valid[:, None]  # [B, H, C], of the key before each token
    # Key j of window + stretch (j = 0 .. w + C - 1) is closed by token j + 1, which is stretch token j + 1 -
    # w.
    closed = torch.cat([ring_closed, torch.zeros_like(closes)], 2)
    closed[:, :, window - 1 : window - 1 + length] |= closes
    exists = (span.held_position >= 0)[:, None]

    number = torch.arange(window + length, device=key.device)
    at = number[window:, None]  # place of each query among them
    near = (number <= at) & (at - number < window)
    visible = exists[:, :, None] & (number <= at) & (near | ~closed[:, :, None])  # [B, H, C, w + C]
    open_key, open_value, open_exists = layer.opened()
    whole = torch.cat([open_exists[:, :, None].expand(-1, -1, length, -1), visible], -1)
    held_key, held_value = torch.cat([ring_key, key], 2), torch.cat([ring_value, value], 2)
    out = grouped_attention(query, [open_key, held_key], [open_value, held_value], whole, scaling)

    # Of the first C of them, the c-th leaves the window at the c-th query.
    moving = exists[..., :length] & span.valid[:, None]  # [B, 1, C]
    gone = moving & closed[:, :, :length]
    layer.append(held_key[:, :, :length], held_value[:, :, :length], moving & ~closed[:, :, :length])
    position = span.held_position[:, None, :length].expand(-1, heads, -1)
    layer.note(position, position + window, gone, length)
    ring_index = span.last_ring
    ring_slot = (span.seen[:, None] + ring_index) % window
    put(layer.keys, ring_slot, take(held_key, ring_index))
    put(layer.values, ring_slot, take(held_value, ring_index))
    newest = ((span.seen - 1) % window)[:, None, None].expand(
        -1, heads, -1
    )  # may stay in the ring, closed now
    layer.closed.scatter_(2, newest, closed[:, :, window - 1 : window])
    wide = ring_slot[:, None].expand(-1, heads, -1)
    layer.closed.scatter_(2, wide, closed.gather(2, ring_index[:, None].expand(-1, heads, -1)))
    return out
