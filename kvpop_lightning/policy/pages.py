"""Choosing pages of keys by what a query can attend in them at most (Quest)."""

from __future__ import annotations

import torch
from torch import Tensor


def choose_pages(query: Tensor, low: Tensor, high: Tensor, earlier: Tensor, count: int) -> Tensor:
    """bool [B, Hkv, N, P]: the `count` pages of largest bound among the `earlier` ones, or all of them.

    Args:
        query: [B, Hq, N, D]; low, high: [B, Hkv, P, D].
        earlier: bool, broadcastable to [B, Hkv, N, P].
    """
    batch, heads, pages, dim = low.shape
    length = query.shape[2]
    grouped = query.reshape(batch, heads, -1, dim)
    bound = grouped.clamp(min=0) @ high.mT + grouped.clamp(max=0) @ low.mT
    bound = bound.view(batch, heads, -1, length, pages).amax(2)
    bound = bound.to(torch.promote_types(bound.dtype, torch.float32)).masked_fill(~earlier, -torch.inf)
    # The newest among equals: of a reversed row, a stable sort puts them first.
    order = pages - 1 - bound.flip(-1).argsort(dim=-1, descending=True, stable=True)[..., :count]
    chosen = torch.zeros_like(bound, dtype=torch.bool).scatter_(-1, order, True)
    return chosen & earlier
