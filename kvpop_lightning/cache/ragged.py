"""The cache under a rule that closes keys by a gate (`kvpop_lightning.policy.ragged`): heads differ in
length.

A layer holds the window as a ring, the same for all heads, and behind it the open keys of each head in pages
of `PAGE` keys that the heads of a row draw from one pool. Nothing ever leaves the pages, so a head's pages
fill in order; the pool grows as the heads need it, and what is allocated is what is reported.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvpop_lightning.cache.attention import grouped_attention
from kvpop_lightning.cache.growing import GrowingLayer
from kvpop_lightning.cache.layer import BoundedLayer
from kvpop_lightning.cache.span import Span, put, take

PAGE = 16
"""Keys per page."""


class RaggedLayer(GrowingLayer):
    """A window of `budget.window` keys per KV head, and pages for the open keys that have left it.

    Attributes:
        keys, values: [B, Hkv, window, D], the ring: token i in slot i mod window.
        closed: bool [B, Hkv, window], the ring's keys whose gate has closed them.
        page_keys, page_values: [B, P, PAGE, D], the pool of each row; P grows.
        table: int32 [B, Hkv, N], pages of each head in order; -1 = none yet.
        held: int64 [B, Hkv], open keys in the pages.
        used: int64 [B], pages of the row that are taken.
    """

    closed: Tensor
    page_keys: Tensor
    page_values: Tensor
    table: Tensor
    held: Tensor
    used: Tensor

    def _allocate(self, key: Tensor, value: Tensor, hidden: Tensor | None) -> dict[str, Tensor]:
        batch, heads, window = key.shape[0], key.shape[1], self.budget.window
        return {
            "keys": key.new_zeros(batch, heads, window, key.shape[3]),
            "values": value.new_zeros(batch, heads, window, value.shape[3]),
            "closed": key.new_zeros(batch, heads, window, dtype=torch.bool),
            "page_keys": key.new_zeros(batch, 0, PAGE, key.shape[3]),
            "page_values": value.new_zeros(batch, 0, PAGE, value.shape[3]),
            "table": key.new_zeros(batch, heads, 0, dtype=torch.int32),
            "held": key.new_zeros(batch, heads, dtype=torch.int64),
            "used": key.new_zeros(batch, dtype=torch.int64),
        }

    def _use(self, views: dict[str, Tensor]) -> None:
        self.keys, self.values, self.closed = views["keys"], views["values"], views["closed"]
        self.page_keys, self.page_values = views["page_keys"], views["page_values"]
        self.table, self.held, self.used = views["table"], views["held"], views["used"]

    def keys_per_head(self, seen: Tensor) -> Tensor:
        """int64 [B, Hkv]: keys that each head holds after `seen` [B] tokens."""
        return self.held + seen.clamp(max=self.budget.window)[:, None]

    def opened(self) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values in the pages, [B, Hkv, M, D] (a copy), and which of them exist, bool [B, Hkv,
        M].
        """
        longest = int(self.held.max()) if self.held.numel() else 0
        pages = -(-longest // PAGE)
        batch, heads = self.held.shape
        index = self.table[..., :pages].clamp(min=0).long().flatten(1)  # [B, H * pages]
        shape = (batch, heads, pages * PAGE, self.page_keys.shape[-1])
        keys, values = (
            pool.gather(1, index[..., None, None].expand(-1, -1, PAGE, pool.shape[-1])).view(*shape)
            for pool in (self.page_keys, self.page_values)
        )
        exists = torch.arange(pages * PAGE, device=index.device) < self.held[..., None]
        return keys, values, exists

    def append(self, keys: Tensor, values: Tensor, stays: Tensor) -> None:
        """Adds the keys [B, Hkv, N, D] that `stays` [B, Hkv, N] marks, in order, to each head's pages."""
        added = stays.sum(-1)
        place = self.held[..., None] + stays.long().cumsum(-1) - 1  # of those that stay
        self._grow(self.held, self.held + added)
        self.held += added
        row, head, token = stays.nonzero(as_tuple=True)
        if not row.numel():
            return
        where = place[row, head, token]
        page = self.table[row, head, where // PAGE].long()
        self.page_keys[row, page, where % PAGE] = keys[row, head, token]
        self.page_values[row, page, where % PAGE] = values[row, head, token]

    def _grow(self, before: Tensor, after: Tensor) -> None:
        """Gives each head [B, Hkv] the pages that `after` keys need."""
        old, new = -(-before // PAGE), -(-after // PAGE)
        extra = new - old
        needed = extra.sum(-1)
        most, larger = int(new.max()), dict[str, Tensor]()
        if most > self.table.shape[2]:
            wide = self.table.new_full((*self.table.shape[:2], most + most // 4 - self.table.shape[2]), -1)
            larger["table"] = torch.cat([self._store["table"], wide], 2)
        pool = int((self.used + needed).max())
        if pool > self.page_keys.shape[1]:
            for name in ("page_keys", "page_values"):
                old_pool = self._store[name]
                shape = (old_pool.shape[0], pool - old_pool.shape[1], *old_pool.shape[2:])
                larger[name] = torch.cat([old_pool, old_pool.new_zeros(shape)], 1)
        self._resize(**larger)
        # Head by head: each takes the row's next free pages.
        first = self.used[:, None] + extra.cumsum(-1) - extra
        number = torch.arange(self.table.shape[2], device=old.device) - old[..., None]
        fresh = (number >= 0) & (number < extra[..., None])
        self.table.copy_(torch.where(fresh, (first[..., None] + number).to(torch.int32), self.table))
        self.used += needed


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
