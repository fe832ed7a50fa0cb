"""Which keys a block of consecutive queries can see at all, as lists (docs/training_attention.md).

A key is visible to one contiguous interval of queries, so it is alive for one contiguous interval of query
blocks.
The lists hold, per block, first the keys that every query of the block sees (no mask needed), then those
that some
of them see. Nothing here grows faster than the lists themselves: about `T / block * (budget.total + block)`
entries
per KV head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpop_lightning.attention.segments import PADDING

_ROUND = 64
"""Room per block is a multiple of this, so that kernels read whole vectors."""


@dataclass(frozen=True)
class AliveLists:
    """Keys alive per block of `block` queries; in each class in rising order.

    Args:
        index: int32 [B, Hkv, C, room], key indices; the first `full` are seen by every query of the block,
        those
            up to `count` by some; the rest is undefined.
        full, count: int32 [B, Hkv, C].
        block: queries per block (any positive number; the last block may be short).
    """

    index: Tensor
    full: Tensor
    count: Tensor
    block: int


def last_sight(eviction_time: Tensor, document_ids: Tensor | None) -> Tensor:
    """Eviction times that also know where documents end: real query `i` sees key `j` iff `j <= i < end_j`.

    Args:
        eviction_time: int64 [B, Hkv, T], row indices, NEVER = int64 max.
        document_ids: int64 [B, T], non-decreasing over real tokens, -1 = padding; None = one document.

    Returns:
        int32 [B, Hkv, T] in [0, T]; 0 for keys that nobody sees (padding, or times not above their own
        index).
        Padding queries are to be masked separately.
    """
    T = eviction_time.shape[-1]
    end = eviction_time.clamp(min=0, max=T)
    if document_ids is not None:
        # Padding inside a document belongs to it here, so that its tokens are one range of the row.
        filled_BT = document_ids.cummax(dim=1).values
        document_end_BT = torch.searchsorted(filled_BT, filled_BT, right=True)
        end = torch.minimum(end, document_end_BT[:, None])
        end = end.masked_fill((document_ids == PADDING)[:, None], 0)
    index_T = torch.arange(T, device=end.device)
    return end.masked_fill(end <= index_T, 0).to(torch.int32).contiguous()


def rounded_room(count: int) -> int:
    return max(_ROUND, -(-count // _ROUND) * _ROUND)


def alive_lists_torch(end: Tensor, block: int) -> AliveLists:
    """Each key's interval of blocks written out, then one stable sort by block and class."""
    B, H, T = end.shape
    device = end.device
    blocks = max(1, -(-T // block))
    e = end.long().flatten()
    j = torch.arange(T, device=device).repeat(B * H)
    row = torch.arange(B * H, device=device).repeat_interleave(T)
    first = j // block
    length = torch.where(e > 0, (e - 1) // block - first + 1, 0)
    begin = length.cumsum(0) - length
    key = torch.repeat_interleave(torch.arange(len(e), device=device), length)
    at = first[key] + torch.arange(len(key), device=device) - begin[key]
    full = (j[key] <= at * block) & (e[key] >= ((at + 1) * block).clamp(max=T))
    home = row[key] * blocks + at
    order = (2 * home + ~full).argsort(stable=True)
    count = torch.bincount(home, minlength=B * H * blocks)
    n_full = torch.bincount(home[full], minlength=B * H * blocks)
    room = rounded_room(int(count.max()) if len(count) else 0)
    index = torch.zeros(B * H * blocks, room, dtype=torch.int32, device=device)
    home = home[order]
    slot = torch.arange(len(home), device=device) - (count.cumsum(0) - count)[home]
    index[home, slot] = j[key[order]].to(torch.int32)
    shape = (B, H, blocks)
    return AliveLists(
        index.view(*shape, room), n_full.to(torch.int32).view(shape), count.to(torch.int32).view(shape), block
    )
