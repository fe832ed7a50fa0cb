"""Forward kernel of sparse attention over lists of alive keys (docs/training_attention.md).

One program: `QUERIES` consecutive queries times the `G` query heads of one KV head, packed in the `M` rows
of a
tile; row m is query `m // G`, head `m % G`, so any group size fits and the keys are read once for the whole
group.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
HIDDEN = tl.constexpr(-1e30)
"""Logit of what a query does not see, and its maximum before it saw anything: finite, so that no difference
is NaN. What a row then adds up by mistake is multiplied by exactly 0 as soon as it sees a key."""


@triton.jit
def gather(base, j, stride, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows `j` of a matrix; without a mask where there is nothing to mask."""
    d = tl.arange(0, BLOCK_D)
    at = base + (j * stride)[:, None] + d[None, :]
    if D == BLOCK_D:
        return tl.load(at)
    else:
        return tl.load(at, mask=(d < D)[None, :], other=0.0)


@triton.jit
def query_rows(first, stop, h, G: tl.constexpr, M: tl.constexpr, QUERIES: tl.constexpr):
    """Of a tile's `M` rows: query index (from `first`), query head, and whether there is one below `stop`."""
    row = tl.arange(0, M)
    query = first + row // G
    return query, h * G + row % G, (row < QUERIES * G) & (query < stop)


@triton.jit
def at_rows(base, head, query, by_head, by_query, BLOCK_D: tl.constexpr):
    """Pointers [M, BLOCK_D] to the rows of a tile; `base` is that of the batch row."""
    d = tl.arange(0, BLOCK_D)
    at = head.to(tl.int64) * by_head + query.to(tl.int64) * by_query
    return base + at[:, None] + d[None, :]


@triton.jit(do_not_specialize=["T", "blocks", "H"])
def forward_kernel(
    Q,
    K,
    V,
    END,
    REAL,
    LIST,
    FULL,
    COUNT,
    OUT,
    LSE,
    q_b,
    q_h,
    q_t,
    k_b,
    k_h,
    k_t,
    v_b,
    v_h,
    v_t,
    o_b,
    o_h,
    o_t,
    T,
    blocks,
    room,
    scale,
    H,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    QUERIES: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    PADDED: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Out and LSE (natural log) of `QUERIES` queries; a list serves `PER_BLOCK` programs."""
    tile = tl.program_id(0)
    bh = tl.program_id(1)
    b = (bh // H).to(tl.int64)
    h = bh % H
    query, head, row_ok = query_rows(tile * QUERIES, T, h, G, M, QUERIES)
    mask = row_ok[:, None] & (tl.arange(0, BLOCK_D) < D)[None, :]
    q = tl.load(at_rows(Q + b * q_b, head, query, q_h, q_t, BLOCK_D), mask=mask, other=0.0)
    k_base = K + b * k_b + h.to(tl.int64) * k_h
    v_base = V + b * v_b + h.to(tl.int64) * v_h
    ends = END + bh.to(tl.int64) * T
    home = bh * blocks + tile // PER_BLOCK
    keys = LIST + home.to(tl.int64) * room
    count = tl.load(COUNT + home)
    clear = tl.load(FULL + home) // N

    scale2 = scale * LOG2E
    lane = tl.arange(0, N)
    top = tl.full([M], HIDDEN, tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, BLOCK_D], tl.float32)
    # Keys that every query here sees: no mask. Indices are read a step ahead, so that the keys themselves can
    # be copied ahead of the products.
    ahead = tl.load(keys + lane, mask=lane < count, other=0)
    for n in range(0, clear * N, N):
        j = ahead
        ahead = tl.load(keys + n + N + lane, mask=n + N + lane < count, other=0)
        if WIDE:
            j = j.to(tl.int64)
        k = gather(k_base, j, k_t, D, BLOCK_D)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        new_top = tl.maximum(top, tl.max(s, 1) * scale2)
        p = tl.exp2(s * scale2 - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        v = gather(v_base, j, v_t, D, BLOCK_D)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        top = new_top
    # The rest: born or gone inside the block. Not pipelined: the compiler would serialize the products of
    # both loops.
    for n in tl.range(clear * N, count, N, num_stages=1):
        listed = n + lane < count
        j = tl.load(keys + n + lane, mask=listed, other=0)
        end = tl.load(ends + j, mask=listed, other=0)
        sees = (j[None, :] <= query[:, None]) & (query[:, None] < end[None, :])
        if WIDE:
            j = j.to(tl.int64)
        k = gather(k_base, j, k_t, D, BLOCK_D)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        s = tl.where(sees, s * scale2, HIDDEN)
        new_top = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        v = gather(v_base, j, v_t, D, BLOCK_D)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        top = new_top

    some = top > 0.5 * HIDDEN
    if PADDED:
        some = some & (tl.load(REAL + b * T + query, mask=row_ok, other=0) != 0)
    safe = tl.where(some, total, 1.0)
    out = tl.where(some[:, None], acc / safe[:, None], 0.0)
    lse = tl.where(some, (top + tl.log2(safe)) * LN2, float("-inf"))
    o_at = at_rows(OUT + b * o_b, head, query, o_h, o_t, BLOCK_D)
    tl.store(o_at, out.to(OUT.dtype.element_ty), mask=mask)
    tl.store(LSE + ((bh - h).to(tl.int64) * G + head) * T + query, lse, mask=row_ok)
