"""Lists of alive keys on the GPU: a tree of ever smaller blocks, each level filtering its parent's lists.

One program per block reads the list of the block's parent (eight times as long) and keeps what is alive in its own
queries. A parent of `L` queries holds at most `budget.total + L` keys, so all levels together read and write a small
multiple of what the lists hold in the end; only the first level looks at whole rows, from at most eight blocks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpop_lightning.attention.lists import AliveLists, alive_counts, room_needed, rounded_room

_RATIO = 8
_CHUNK = 1024


@triton.jit(do_not_specialize=["T", "length", "parent_blocks", "parent_room", "blocks", "room"])
def _select(
    END,
    PARENT,
    PARENT_COUNT,
    LIST,
    FULL,
    COUNT,
    T,
    length,
    parent_blocks,
    parent_room,
    blocks,
    room,
    RATIO: tl.constexpr,
    ROOT: tl.constexpr,
    SPLIT: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """List of one block of `length` queries of one (row, KV head)."""
    at = tl.program_id(0)
    bh = tl.program_id(1)
    start = at * length
    stop = tl.minimum(start + length, T)
    parent = bh * parent_blocks + at // RATIO
    if ROOT:
        n = stop
    else:
        n = tl.load(PARENT_COUNT + parent)
    source = PARENT + parent.to(tl.int64) * parent_room
    ends = END + bh.to(tl.int64) * T
    target = LIST + (bh * blocks + at).to(tl.int64) * room
    lane = tl.arange(0, CHUNK)
    n_full = 0
    if SPLIT:
        for c in range(0, n, CHUNK):
            ok = c + lane < n
            if ROOT:
                j = c + lane
            else:
                j = tl.load(source + c + lane, mask=ok, other=0)
            end = tl.load(ends + j, mask=ok, other=0)
            n_full += tl.sum(((j <= start) & (end >= stop) & ok).to(tl.int32), axis=0)
    next_full = 0
    next_other = n_full
    for c in range(0, n, CHUNK):
        ok = c + lane < n
        if ROOT:
            j = c + lane
        else:
            j = tl.load(source + c + lane, mask=ok, other=0)
        end = tl.load(ends + j, mask=ok, other=0)
        alive = (j < stop) & (end > start) & ok
        other = alive
        if SPLIT:
            full = alive & (j <= start) & (end >= stop)
            other = alive & (full == 0)
            slot = next_full + tl.cumsum(full.to(tl.int32), axis=0) - 1
            tl.store(target + slot, j, mask=full)
            next_full += tl.sum(full.to(tl.int32), axis=0)
        slot = next_other + tl.cumsum(other.to(tl.int32), axis=0) - 1
        tl.store(target + slot, j, mask=other)
        next_other += tl.sum(other.to(tl.int32), axis=0)
    if SPLIT:
        tl.store(FULL + bh * blocks + at, n_full)
    tl.store(COUNT + bh * blocks + at, next_other)


def alive_lists_triton(end: Tensor, block: int) -> AliveLists:
    """`alive_lists` by kernels; looks at the host once, for how much room the lists need.

    Args:
        end: int32 [B, Hkv, T], contiguous, from `last_sight`.
        block: queries per block.
    """
    B, H, T = end.shape
    merges = [1]
    while -(-T // (block * merges[-1])) > _RATIO:
        merges.append(merges[-1] * _RATIO)
    born, dead = alive_counts(end, block)
    rooms = torch.stack([room_needed(born, dead, merge) for merge in merges]).tolist()
    parent, parent_count = end, end
    for merge, needed in zip(reversed(merges), reversed(rooms), strict=True):
        blocks, room = -(-T // (block * merge)), rounded_room(int(needed))
        index = torch.empty(B, H, blocks, room, dtype=torch.int32, device=end.device)
        count = torch.empty(B, H, blocks, dtype=torch.int32, device=end.device)
        full = torch.empty_like(count)
        root = merge == merges[-1]
        _select[(blocks, B * H)](
            end,
            parent,
            parent_count,
            index,
            full,
            count,
            T,
            block * merge,
            1 if root else parent.shape[2],
            1 if root else parent.shape[3],
            blocks,
            room,
            RATIO=_RATIO,
            ROOT=root,
            SPLIT=merge == 1,
            CHUNK=_CHUNK,
            num_warps=4,
        )
        parent, parent_count = index, count
    return AliveLists(index, full, count, block)
