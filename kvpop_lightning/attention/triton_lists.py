"""Lists of alive keys on the GPU: a tree of ever smaller blocks, each level filtering its parent's lists.

One program per block reads the list of the block's parent (eight times as long) and keeps what is alive in
its own
queries. A parent of `L` queries holds at most `budget.total + L` keys, so all levels together read and write
a small
multiple of what the lists hold in the end; only the first level looks at whole rows, from at most eight
blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpop_lightning.attention.lists import AliveLists, rounded_room

_RATIO = 8
_CHUNK = 1024
_ROOT_CHUNK = 4096


@triton.jit(do_not_specialize=["T", "length", "parent_blocks", "parent_room", "blocks", "room"])
def _select(
    END,
    PARENT,
    PARENT_COUNT,
    LIST,
    FULL,
    COUNT,
    MOST,
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
    """List of one block of `length` queries of one (row, KV head); MOST is the longest list of this level."""
    at = tl.program_id(0)
    bh = tl.program_id(1)
    start = at * length
    stop = tl.minimum(start + length, T)
    parent = bh * parent_blocks + at // RATIO
    if ROOT:
        n = stop
    else:
        n = tl.minimum(tl.load(PARENT_COUNT + parent), parent_room)
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
            tl.store(target + slot, j, mask=full & (slot < room))
            next_full += tl.sum(full.to(tl.int32), axis=0)
        slot = next_other + tl.cumsum(other.to(tl.int32), axis=0) - 1
        tl.store(target + slot, j, mask=other & (slot < room))
        next_other += tl.sum(other.to(tl.int32), axis=0)
    if SPLIT:
        tl.store(FULL + bh * blocks + at, n_full)
    tl.store(COUNT + bh * blocks + at, next_other)
    tl.atomic_max(MOST, next_other, sem="relaxed")


def alive_lists_triton(end: Tensor, block: int, expected: int) -> tuple[AliveLists, Tensor, list[int]]:
    """Lists with room for `expected` keys beside the block's own; nothing here waits for the GPU.

    Args:
        end: int32 [B, Hkv, T], contiguous, from `last_sight`.
        block: queries per block.
        expected: keys that one query sees at most (a budget's total).

    Returns:
        The lists; the longest list of each level, int32, on the GPU; the room of each level. Where a level
        is longer
        than its room its list, and those below it, are cut: build them again with more room.
    """
    B, H, T = end.shape
    merges = [1]
    while -(-T // (block * merges[-1])) > _RATIO:
        merges.append(merges[-1] * _RATIO)
    merges.reverse()
    most = torch.zeros(len(merges), dtype=torch.int32, device=end.device)
    rooms = [rounded_room(min(T, expected + block * merge)) for merge in merges]
    parent, parent_count = end, end
    for level, (merge, room) in enumerate(zip(merges, rooms, strict=True)):
        blocks = -(-T // (block * merge))
        index = torch.empty(B, H, blocks, room, dtype=torch.int32, device=end.device)
        count = torch.empty(B, H, blocks, dtype=torch.int32, device=end.device)
        full = torch.empty_like(count)
        root = level == 0
        _select[(blocks, B * H)](
            end,
            parent,
            parent_count,
            index,
            full,
            count,
            most[level:],
            T,
            block * merge,
            1 if root else parent.shape[2],
            1 if root else parent.shape[3],
            blocks,
            room,
            RATIO=_RATIO,
            ROOT=root,
            SPLIT=merge == 1,
            CHUNK=_ROOT_CHUNK if root else _CHUNK,
            num_warps=8 if root else 4,
        )
        parent, parent_count = index, count
    return AliveLists(index, full, count, block), most, rooms


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def begin_reading(x: Tensor) -> Callable[[], list[int]]:
    """Begin to copy `x`; the result waits for the work before this call, not for what is launched later."""
    if not x.is_cuda:
        return x.tolist
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    side = _side_stream(x.device)
    side.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(side):
        host.copy_(x, non_blocking=True)
        copied = side.record_event()
    x.record_stream(side)

    def wait() -> list[int]:
        copied.synchronize()
        return host.tolist()

    return wait
