"""Quest: every query chooses pages of a full cache by bounds on their keys (Tang et al., 2024).

A reference for sparse retrieval and no eviction policy: it attends at most B keys, but holds them all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvpop_lightning.baselines.registry import PolicySpec, register
from kvpop_lightning.policy.budget import Budget
from kvpop_lightning.policy.documents import document_layout
from kvpop_lightning.policy.own_attention import OwnAttention, attend_in_blocks
from kvpop_lightning.policy.pages import choose_pages
from kvpop_lightning.policy.scorers import register_scorer


class Quest(OwnAttention):
    """`bound(q, page) = sum_d max(q_d low_d, q_d high_d)`, low and high the extremes of the page's keys.

    A query attends its own page and the `B // page_size - 1` earlier ones of its text with the largest bound,
    the maximum over the query heads that share a KV head; the newer of two equals. Sinks and window do not
    count; `budget` counts in total only.

    Args:
        page_size: tokens per page, half the budget at most.
    """

    kind = "quest"
    holds_all = True

    def __init__(self, num_heads: int, head_dim: int, hidden_size: int, *, page_size: int = 16) -> None:
        super().__init__(num_heads, head_dim, hidden_size)
        if isinstance(page_size, bool) or not isinstance(page_size, int) or page_size < 1:
            raise ValueError(f"quest: page_size must be a whole number, at least 1, got {page_size!r}")
        self.page_size = page_size

    def options(self) -> dict[str, Any]:
        return {"page_size": self.page_size}

    def pages(self, budget: Budget) -> tuple[int, int]:
        """(tokens per page, pages that a query attends, its own included)."""
        size = max(1, min(self.page_size, budget.total // 2))
        return size, max(1, budget.total // size)

    def whole_below(self, budget: Budget) -> int:
        size, count = self.pages(budget)
        return size * count

    def score_rows(
        self, key: Tensor, value: Tensor, hidden: Tensor | None, position: Tensor, document_ids: Tensor | None
    ) -> Tensor:
        raise ValueError("quest has no score for a token: every query chooses pages")

    def _of_rows(self, key: Tensor, budget: Budget, document_ids: Tensor | None) -> tuple[Tensor, ...]:
        """Page of each token [B, T] and of its document's start, then bounds low, high [B, Hkv, P, D].

        Pages are numbered along the row and start anew with every document; padding is in none (-1).
        """
        batch, heads, length, dim = key.shape
        size, _ = self.pages(budget)
        layout = document_layout(document_ids, batch=batch, length=length, device=key.device)
        starts = layout.real & (layout.position % size == 0)
        page = starts.long().cumsum(-1) - 1
        of_start = page.gather(-1, layout.start)
        page = page.masked_fill(~layout.real, -1)
        count = max(1, int(starts.sum(-1).max()) if length else 0)
        # Padding goes to a page more, which is cut off.
        index = torch.where(page < 0, count, page)[:, None, :, None].expand_as(key)
        low, high = (
            key.new_zeros(batch, heads, count + 1, dim).scatter_reduce(
                2, index, key, how, include_self=False
            )[:, :, :count]
            for how in ("amin", "amax")
        )
        return page, of_start, low, high

    def visible(
        self, query: Tensor, key: Tensor, budget: Budget, document_ids: Tensor | None, at: Tensor
    ) -> Tensor:
        return self._visible(query, at, self._of_rows(key, budget, document_ids), budget)

    def _visible(self, query: Tensor, at: Tensor, rows: tuple[Tensor, ...], budget: Budget) -> Tensor:
        page, of_start, low, high = rows
        own, start = page[:, None, at], of_start[:, None, at]
        number = torch.arange(low.shape[2], device=page.device)
        earlier = (number >= start[..., None]) & (number < own[..., None])
        chosen = choose_pages(query[:, :, at], low, high, earlier, self.pages(budget)[1] - 1)
        chosen |= number == own[..., None]
        sees = chosen.gather(-1, page.clamp(min=0)[:, None, None].expand(*chosen.shape[:3], -1))
        column = torch.arange(page.shape[-1], device=page.device)
        real = (page >= 0)[:, None, None] & (own >= 0)[..., None]
        return sees & (column <= at[:, None]) & real

    def attend_rows(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        eviction: Tensor,
        budget: Budget,
        *,
        document_ids: Tensor | None,
        scale: float,
    ) -> Tensor:
        rows = self._of_rows(key, budget, document_ids)
        column = torch.arange(key.shape[2], device=key.device)
        return attend_in_blocks(
            query,
            key,
            value,
            scale,
            lambda first, last: self._visible(query, column[first:last], rows, budget),
        )


register_scorer("quest", Quest, ("page_size",))
register(
    PolicySpec("quest", "quest", "pages of a full cache chosen per query (unbounded memory)", bounded=False)
)
