"""The loop that both log-sum-exp kernels share: a block of rows held, the other side streamed past it.

Rows see a contiguous range `low <= y < high` (document and age); padding inside it is masked. Only the ends
of the stream need masks, and what no row of the block sees is never loaded.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kvpop_lightning.policy.documents import DocumentLayout

LOG2E = 1.4426950408889634
_LOG2E = tl.constexpr(LOG2E)


class Tile(NamedTuple):
    """Rows held, rows streamed at a time, warps, pipeline stages, streamed by the bulk copy engine or not."""

    rows: int
    stream: int
    warps: int
    stages: int
    bulk: bool


def default_tile(dtype: torch.dtype, head_dim: int, *, future: bool) -> Tile:
    """The fastest that was timed on an H200 (docs/policy_kernels.json): of the target pass (`future`, keys
    held and queries streamed), or of the normaliser (queries held)."""
    if dtype == torch.float32:
        return Tile(64, 32, 4, 2, False)
    if head_dim > 128:
        return Tile(64, 64, 4, 2, False)
    return Tile(64, 128, 4, 3, True) if future else Tile(128, 64, 8, 4, True)


def usable_tile(tile: Tile, x: Tensor) -> Tile:
    """Without bulk copies where the memory of the streamed side `x` does not fit them (steps of 16 bytes)."""
    bytes_apart = [step * x.element_size() for step in x.stride()[:3]]
    fits = all(step % 16 == 0 for step in (x.data_ptr(), *bytes_apart))
    return tile if fits else tile._replace(bulk=False)


def inner_contiguous(x: Tensor) -> Tensor:
    x = x.detach()
    return x if x.stride(-1) == 1 else x.contiguous()


def streamed(x: Tensor, tile: Tile, block_d: int) -> Tensor | TensorDescriptor:
    if not tile.bulk:
        return x
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, tile.stream, block_d])


def precision_of(x: Tensor) -> str:
    return "tf32x3" if x.dtype == torch.float32 else "tf32"  # the latter says nothing of half precision


def padding_of(layout: DocumentLayout) -> tuple[Tensor, Tensor]:
    """Padded tokens before each row and before the end, int32 [B, T + 1]; `real` as uint8 [B, T]."""
    before = torch.nn.functional.pad((~layout.real).int().cumsum(-1, dtype=torch.int32), (1, 0))
    return before.contiguous(), layout.real.contiguous().view(torch.uint8)


@triton.jit
def stream_rows(
    largest, total, rows, low, high, y, at0, at1, stride, offset_ptr, real_ptr, begin, end, T, factor,
    D: tl.constexpr, BLOCK_D: tl.constexpr, STREAM: tl.constexpr, BULK: tl.constexpr, PACKED: tl.constexpr,
    MASKED: tl.constexpr, ONLINE: tl.constexpr, OFFSET: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add exp(logit - offset) of the y in [begin, end) to each row's sum (`total * 2 ** largest`)."""
    n = tl.arange(0, STREAM)
    d = tl.arange(0, BLOCK_D)
    for first in range(begin, end, STREAM):
        column = first + n
        if BULK:
            y_tile = tl.trans(tl.reshape(y.load([at0, at1, first, 0]), [STREAM, BLOCK_D]))
        else:
            pointers = y + (d[:, None] + column[None, :].to(tl.int64) * stride)
            if MASKED:
                y_tile = tl.load(pointers, mask=(column[None, :] < T) & (d[:, None] < D), other=0.0)
            elif D < BLOCK_D:
                y_tile = tl.load(pointers, mask=d[:, None] < D, other=0.0)
            else:
                y_tile = tl.load(pointers)
        logits = tl.dot(rows, y_tile, input_precision=PRECISION)
        if OFFSET:
            if MASKED:
                offset = tl.load(offset_ptr + column, mask=column < T, other=float("inf"))
            else:
                offset = tl.load(offset_ptr + column)
            # A query that saw nothing has -inf: as +inf it adds nothing, instead of infinite mass.
            offset = tl.where(offset == float("-inf"), float("inf"), offset * _LOG2E)
            logits = logits * factor - offset[None, :]
        else:
            logits = logits * factor
        if MASKED:
            seen = (column[None, :] >= low[:, None]) & (column[None, :] < high[:, None])
            if PACKED:
                real = tl.load(real_ptr + column, mask=column < T, other=0)
                seen = seen & (real[None, :] != 0)
            logits = tl.where(seen, logits, float("-inf"))
        if ONLINE:
            new = tl.maximum(largest, tl.max(logits, 1))
            total = total * tl.exp2(largest - new) + tl.sum(tl.exp2(logits - new[:, None]), 1)
            largest = new
        else:
            total += tl.sum(tl.exp2(logits), 1)
    return largest, total


@triton.jit
def stream_bounds(low, high, pads_ptr, T, STREAM: tl.constexpr, PACKED: tl.constexpr):
    """The stream's begin and end, and between them the tiles that every row with a range sees in full."""
    alive = low < high
    begin = tl.min(tl.where(alive, low, T))
    end = tl.max(tl.where(alive, high, 0))
    clear = tl.max(tl.where(alive, low, 0))
    clear_end = tl.min(tl.where(alive, high, T))
    clear = begin + (clear - begin + STREAM - 1) // STREAM * STREAM
    if (end <= begin) | (clear_end - clear < STREAM):
        clear = end
        clear_end = end
    else:
        clear_end = clear + (clear_end - clear) // STREAM * STREAM
        if PACKED:  # noqa: SIM102 (a constant: the load must not be compiled without it)
            if tl.load(pads_ptr + clear) != tl.load(pads_ptr + clear_end):
                clear = end
                clear_end = end
    return begin, clear, clear_end, end
