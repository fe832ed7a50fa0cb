"""Pages of keys that the heads of a row draw from one pool: memory of heads that differ in length."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpop_lightning.cache.growing import GrowingLayer

PAGE = 16
"""Keys per page."""


class PagedLayer(GrowingLayer):
    """The open keys of each head in pages of `PAGE` keys.

    Nothing ever leaves the pages, so a head's pages fill in order; the pool grows as the heads need it, and
    what is allocated is what is reported.

    Attributes:
        page_keys, page_values: [B, P, PAGE, D], the pool of each row; P grows.
        table: int32 [B, Hkv, N], pages of each head in order; -1 = none yet.
        held: int64 [B, Hkv], open keys in the pages.
        used: int64 [B], pages of the row that are taken.
    """

    page_keys: Tensor
    page_values: Tensor
    table: Tensor
    held: Tensor
    used: Tensor

    def _allocate(self, key: Tensor, value: Tensor, hidden: Tensor | None) -> dict[str, Tensor]:
        batch, heads = key.shape[:2]
        return {
            "page_keys": key.new_zeros(batch, 0, PAGE, key.shape[3]),
            "page_values": value.new_zeros(batch, 0, PAGE, value.shape[3]),
            "table": key.new_zeros(batch, heads, 0, dtype=torch.int32),
            "held": key.new_zeros(batch, heads, dtype=torch.int64),
            "used": key.new_zeros(batch, dtype=torch.int64),
        }

    def _use(self, views: dict[str, Tensor]) -> None:
        self.keys, self.values = views["keys"], views["values"]
        self.page_keys, self.page_values = views["page_keys"], views["page_values"]
        self.table, self.held, self.used = views["table"], views["held"], views["used"]

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
