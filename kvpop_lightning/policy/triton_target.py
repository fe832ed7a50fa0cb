"""The future-attention target and the dense log-normaliser as Triton kernels (METHOD.md, section 3).

Both are a log-sum-exp of logits without a value product: of every key over the later queries, and of every
query over the earlier keys. One program holds a block of rows (keys or queries) and streams the other side
past it; rows see a contiguous range `low <= y < high`, so only the ends of the stream are masked, and blocks
outside the document are never loaded. For the target the rows are a block of keys, kept while the queries of
all heads of their group go past; dividing by the number of queries and pooling over the group happen in
registers. Logits are float32 sums, exponentials base 2.

Where `eps` hides what is smaller than the smallest float, probabilities are added up as they are, without a
running maximum: they are at most 1 under a dense normaliser, and a sparse one overflows float32 only beyond
+88 nats.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpop_lightning.policy.documents import DocumentLayout
from kvpop_lightning.policy.triton_stream import (
    LOG2E,
    Tile,
    default_tile,
    inner_contiguous,
    padding_of,
    precision_of,
    stream_bounds,
    stream_rows,
    streamed,
    usable_tile,
)

_LN2 = tl.constexpr(0.6931471805599453)
_EMPTY = tl.constexpr(-1e30)
"""Running maximum before anything was seen: finite, so that a fully masked tile is 0 and not NaN."""


def dense_log_normalizer_triton(
    query: Tensor, key: Tensor, layout: DocumentLayout | None, *, scale: float, tile: Tile | None = None
) -> Tensor:
    """`dense_log_normalizer`: float32 [B, Hq, T], -inf at padding; `layout` None = one document per row."""
    query, key = inner_contiguous(query), inner_contiguous(key)
    batch, heads, length, head_dim = query.shape
    out = torch.empty(batch, heads, length, dtype=torch.float32, device=query.device)
    if out.numel() == 0:
        return out
    tile = usable_tile(tile or default_tile(query.dtype, head_dim, future=False), key)
    block_d = max(16, triton.next_power_of_2(head_dim))
    low = high = pads = real = out
    packed = layout is not None and layout.packed
    if packed:
        assert layout is not None
        index = torch.arange(length, device=query.device)
        low = layout.start.int()
        high = torch.where(layout.real, index + 1, 0).int()
        pads, real = padding_of(layout)
    _query_kernel[(triton.cdiv(length, tile.rows), batch * heads)](
        query, streamed(key, tile, block_d), out, low, high, pads, real,
        *query.stride()[:3], *key.stride()[:3], length, heads, heads // key.shape[1], scale * LOG2E,
        D=head_dim, BLOCK_D=block_d, ROWS=tile.rows, STREAM=tile.stream, BULK=tile.bulk, PACKED=packed,
        PRECISION=precision_of(query), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def future_attention_target_triton(
    query: Tensor,
    key: Tensor,
    layout: DocumentLayout | None,
    normalizer: Tensor,
    *,
    window: int,
    aggregation: str,
    eps: float,
    scale: float,
    logarithmic: bool,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """`future_attention_target` under a given normaliser: float32 and bool [B, Hkv, T].

    `logarithmic` keeps a running maximum, so that nothing underflows or overflows; slower.
    """
    query, key = inner_contiguous(query), inner_contiguous(key)
    normalizer = normalizer.detach().float().contiguous()
    batch, heads, length, head_dim = query.shape
    kv_heads = key.shape[1]
    target = torch.empty(batch, kv_heads, length, dtype=torch.float32, device=query.device)
    valid = torch.empty(batch, kv_heads, length, dtype=torch.bool, device=query.device)
    if target.numel() == 0:
        return target, valid
    tile = usable_tile(tile or default_tile(query.dtype, head_dim, future=True), query)
    block_d = max(16, triton.next_power_of_2(head_dim))
    low = high = count = pads = real = target
    packed = layout is not None and layout.packed
    if packed:
        assert layout is not None
        later = layout.later(window)
        low = torch.where(layout.real, later.clamp(max=length), length).int()
        high = layout.end.int()
        count = (layout.length - layout.position - window).int()
        pads, real = padding_of(layout)
    _future_kernel[(triton.cdiv(length, tile.rows), batch * kv_heads)](
        key, streamed(query, tile, block_d), normalizer, target, valid.view(torch.uint8),
        low, high, count, pads, real, *key.stride()[:3], *query.stride()[:3], length, kv_heads, window,
        scale * LOG2E, math.log(eps) if eps > 0 else 0.0,
        GROUP=heads // kv_heads, D=head_dim, BLOCK_D=block_d, ROWS=tile.rows, STREAM=tile.stream,
        BULK=tile.bulk, PACKED=packed, ONLINE=logarithmic, POOL=aggregation, HAS_EPS=eps > 0,
        PRECISION=precision_of(query), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return target, valid


@triton.jit
def _log_add(a, b):
    larger = tl.maximum(a, b)
    added = larger + tl.log(1.0 + tl.exp(tl.minimum(a, b) - larger))
    return tl.where(larger == float("-inf"), larger, added)


@triton.jit(do_not_specialize=["heads", "ratio"])
def _query_kernel(
    x_ptr, y, out_ptr, low_ptr, high_ptr, pads_ptr, real_ptr, xs0, xs1, xs2, ys0, ys1, ys2, T, heads, ratio,
    factor,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, STREAM: tl.constexpr, BULK: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Natural log-sum-exp of a block of queries over the keys up to each."""
    lane = tl.program_id(1).to(tl.int64)
    b = lane // heads
    head = lane % heads
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest streams first
    i = block * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    low = tl.zeros_like(i)
    high = tl.where(i < T, i + 1, 0)
    if PACKED:
        low = tl.load(low_ptr + b * T + i, mask=i < T, other=0)
        high = tl.load(high_ptr + b * T + i, mask=i < T, other=0)
        pads_ptr += b * (T + 1)
        real_ptr += b * T
    begin, clear, clear_end, end = stream_bounds(low, high, pads_ptr, T, STREAM, PACKED)
    rows_at = x_ptr + b * xs0 + head * xs1 + i[:, None].to(tl.int64) * xs2 + d[None, :]
    rows = tl.load(rows_at, mask=(i[:, None] < T) & (d[None, :] < D), other=0.0)
    at0 = b.to(tl.int32)
    at1 = (head // ratio).to(tl.int32)
    if not BULK:
        y += at0.to(tl.int64) * ys0 + at1.to(tl.int64) * ys1
    largest = tl.full([ROWS], _EMPTY, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    largest, total = stream_rows(
        largest, total, rows, low, high, y, at0, at1, ys2, out_ptr, real_ptr, begin, clear, T, factor,
        D, BLOCK_D, STREAM, BULK, PACKED, True, True, False, PRECISION,
    )  # fmt: skip
    largest, total = stream_rows(
        largest, total, rows, low, high, y, at0, at1, ys2, out_ptr, real_ptr, clear, clear_end, T, factor,
        D, BLOCK_D, STREAM, BULK, PACKED, False, True, False, PRECISION,
    )  # fmt: skip
    largest, total = stream_rows(
        largest, total, rows, low, high, y, at0, at1, ys2, out_ptr, real_ptr, clear_end, end, T, factor,
        D, BLOCK_D, STREAM, BULK, PACKED, True, True, False, PRECISION,
    )  # fmt: skip
    result = tl.where(low < high, (largest + tl.log2(total)) * _LN2, float("-inf"))
    tl.store(out_ptr + lane * T + i, result, mask=i < T)


@triton.jit(do_not_specialize=["heads", "window"])
def _future_kernel(
    x_ptr, y, normalizer_ptr, target_ptr, valid_ptr, low_ptr, high_ptr, count_ptr, pads_ptr, real_ptr,
    xs0, xs1, xs2, ys0, ys1, ys2, T, heads, window, factor, log_eps,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, STREAM: tl.constexpr,
    BULK: tl.constexpr, PACKED: tl.constexpr, ONLINE: tl.constexpr, POOL: tl.constexpr,
    HAS_EPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The target of a block of keys: log mean probability over later queries, pooled over the group."""
    lane = tl.program_id(1).to(tl.int64)
    b = lane // heads
    head = lane % heads
    j = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # the first keys have the longest streams
    d = tl.arange(0, BLOCK_D)
    low = j + window
    high = tl.where(j < T, T, 0)
    count = T - low
    if PACKED:
        low = tl.load(low_ptr + b * T + j, mask=j < T, other=T)
        high = tl.load(high_ptr + b * T + j, mask=j < T, other=0)
        count = tl.load(count_ptr + b * T + j, mask=j < T, other=0)
        pads_ptr += b * (T + 1)
        real_ptr += b * T
    begin, clear, clear_end, end = stream_bounds(low, high, pads_ptr, T, STREAM, PACKED)
    rows_at = x_ptr + b * xs0 + head * xs1 + j[:, None].to(tl.int64) * xs2 + d[None, :]
    rows = tl.load(rows_at, mask=(j[:, None] < T) & (d[None, :] < D), other=0.0)
    log_count = tl.log(tl.maximum(count, 1).to(tl.float32))
    at0 = b.to(tl.int32)
    pooled = tl.full([ROWS], 0.0 if POOL == "mean" else float("-inf"), tl.float32)
    for g in range(GROUP):
        at1 = (head * GROUP + g).to(tl.int32)
        offset_ptr = normalizer_ptr + (lane * GROUP + g) * T
        if BULK:
            y_head = y
        else:
            y_head = y + (b * ys0 + at1.to(tl.int64) * ys1)
        largest = tl.full([ROWS], _EMPTY if ONLINE else 0.0, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        largest, total = stream_rows(
            largest, total, rows, low, high, y_head, at0, at1, ys2, offset_ptr, real_ptr, begin, clear, T,
            factor, D, BLOCK_D, STREAM, BULK, PACKED, True, ONLINE, True, PRECISION,
        )  # fmt: skip
        largest, total = stream_rows(
            largest, total, rows, low, high, y_head, at0, at1, ys2, offset_ptr, real_ptr, clear, clear_end,
            T, factor, D, BLOCK_D, STREAM, BULK, PACKED, False, ONLINE, True, PRECISION,
        )  # fmt: skip
        largest, total = stream_rows(
            largest, total, rows, low, high, y_head, at0, at1, ys2, offset_ptr, real_ptr, clear_end, end, T,
            factor, D, BLOCK_D, STREAM, BULK, PACKED, True, ONLINE, True, PRECISION,
        )  # fmt: skip
        log_mean = (largest + tl.log2(total)) * _LN2 - log_count
        if POOL == "max":
            pooled = tl.maximum(pooled, log_mean)
        elif POOL == "logmeanexp":
            pooled = _log_add(pooled, log_mean)
        elif HAS_EPS:
            pooled += _log_add(log_mean, log_eps)
        else:
            pooled += log_mean
    if POOL == "mean":
        pooled = pooled / GROUP
    else:
        if POOL == "logmeanexp":
            pooled -= tl.log(GROUP * 1.0)
        if HAS_EPS:
            pooled = _log_add(pooled, log_eps)
    alive = low < high
    tl.store(target_ptr + lane * T + j, tl.where(alive, pooled, 0.0), mask=j < T)
    tl.store(valid_ptr + lane * T + j, alive.to(tl.uint8), mask=j < T)
