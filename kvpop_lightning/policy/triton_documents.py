"""`document_layout` as one Triton kernel: some forty small operations otherwise, at every use of packed rows.

One program per row walks over it twice: forwards for where documents start and how many real tokens came
before, backwards for where they end. What came before a block is carried into it, inside a block running
maxima and sums do the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


def layout_triton(document_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Fields of a `DocumentLayout` of int64 ids [B, T].

    Returns:
        real, bool [B, T]; position, length, start, end, ordinal as int64 [5, B, T]; row_at, int64 [B, T].
    """
    ids = document_ids.contiguous()
    batch, length = ids.shape
    real = torch.empty(batch, length, dtype=torch.bool, device=ids.device)
    fields = torch.empty(5, batch, length, dtype=torch.int64, device=ids.device)
    row_at = torch.empty(batch, length, dtype=torch.int64, device=ids.device)
    if ids.numel():
        block = min(_BLOCK, max(16, triton.next_power_of_2(length)))
        _layout_kernel[(batch,)](
            ids, real.view(torch.uint8), fields, row_at, length, batch * length, BLOCK=block,
            num_warps=16 if block == _BLOCK else 4,
        )  # fmt: skip
    return real, fields, row_at


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _smaller(a, b):
    return tl.minimum(a, b)


@triton.jit(do_not_specialize=["T", "stride"])
def _layout_kernel(ids_ptr, real_ptr, fields_ptr, row_at_ptr, T, stride, BLOCK: tl.constexpr):
    """Rows of 32-bit length; `stride` elements between two of the five fields."""
    row = tl.program_id(0).to(tl.int64) * T
    ids_ptr += row
    position_ptr = fields_ptr + row
    length_ptr = position_ptr + stride
    start_ptr = length_ptr + stride
    end_ptr = start_ptr + stride
    ordinal_ptr = end_ptr + stride
    row_at_ptr += row
    lane = tl.arange(0, BLOCK)

    count = 0  # real tokens so far
    nearest = -1  # the last of them
    start = 0
    start_ordinal = 0
    for first in range(0, T, BLOCK):
        t = first + lane
        inside = t < T
        ids = tl.load(ids_ptr + t, mask=inside, other=-1)
        real = ids >= 0
        older = tl.load(ids_ptr + t - 1, mask=inside & (t > 0), other=-1)
        before = tl.associative_scan(tl.where(older >= 0, t - 1, -1), 0, _larger)
        before = tl.maximum(before, nearest)
        other = tl.load(ids_ptr + before, mask=inside & (before >= 0), other=-1)
        is_start = real & (ids != other)
        ordinal = count + tl.cumsum(real.to(tl.int32), 0) - 1
        starts = tl.maximum(tl.associative_scan(tl.where(is_start, t, 0), 0, _larger), start)
        ordinals = tl.associative_scan(tl.where(is_start, ordinal, 0), 0, _larger)
        ordinals = tl.maximum(ordinals, start_ordinal)
        tl.store(real_ptr + row + t, real.to(tl.uint8), mask=inside)
        tl.store(position_ptr + t, tl.where(real, ordinal - ordinals, 0).to(tl.int64), mask=inside)
        tl.store(start_ptr + t, tl.where(real, starts, t).to(tl.int64), mask=inside)
        tl.store(ordinal_ptr + t, tl.maximum(ordinal, 0).to(tl.int64), mask=inside)
        tl.store(row_at_ptr + ordinal, t.to(tl.int64), mask=real)
        count += tl.sum(real.to(tl.int32), 0)
        nearest = tl.maximum(nearest, tl.max(tl.where(real, t, -1), 0))
        start = tl.maximum(start, tl.max(tl.where(is_start, t, 0), 0))
        start_ordinal = tl.maximum(start_ordinal, tl.max(tl.where(is_start, ordinal, 0), 0))

    tl.debug_barrier()  # position and ordinal are read again
    nearest = T  # the first real token after this block
    last = T
    last_ordinal = T
    for back in range(0, T, BLOCK):
        first = (T - 1) // BLOCK * BLOCK - back
        t = first + lane
        inside = t < T
        ids = tl.load(ids_ptr + t, mask=inside, other=-1)
        real = ids >= 0
        newer = tl.load(ids_ptr + t + 1, mask=t + 1 < T, other=-1)
        after = tl.associative_scan(tl.where(newer >= 0, t + 1, T), 0, _smaller, reverse=True)
        after = tl.minimum(after, nearest)
        other = tl.load(ids_ptr + after, mask=after < T, other=-1)
        is_last = real & (ids != other)
        ordinal = tl.load(ordinal_ptr + t, mask=inside, other=0).to(tl.int32)
        position = tl.load(position_ptr + t, mask=inside, other=0).to(tl.int32)
        lasts = tl.associative_scan(tl.where(is_last, t, T), 0, _smaller, reverse=True)
        lasts = tl.minimum(lasts, last)
        ordinals = tl.associative_scan(tl.where(is_last, ordinal, T), 0, _smaller, reverse=True)
        ordinals = tl.minimum(ordinals, last_ordinal)
        length = ordinals - ordinal + position + 1
        tl.store(length_ptr + t, tl.where(real, length, 0).to(tl.int64), mask=inside)
        tl.store(end_ptr + t, tl.where(real, lasts + 1, t).to(tl.int64), mask=inside)
        tl.store(row_at_ptr + t, (T - 1 + tl.zeros_like(t)).to(tl.int64), mask=inside & (t >= count))
        nearest = tl.minimum(nearest, tl.min(tl.where(real, t, T), 0))
        last = tl.minimum(last, tl.min(tl.where(is_last, t, T), 0))
        last_ordinal = tl.minimum(last_ordinal, tl.min(tl.where(is_last, ordinal, T), 0))
