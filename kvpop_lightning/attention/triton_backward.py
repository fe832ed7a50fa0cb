"""Backward kernels of sparse attention over lists of alive keys (docs/training_attention.md).

With `P = exp(scale * q.k - LSE)`, `dV = P^T dO`, `dP = dO V^T`, `dS = P * (dP - delta)`, `dQ = scale * dS K`,
`dK = scale * dS^T Q`, where `delta_i = dO_i . O_i - dLSE_i`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvpop_lightning.attention.triton_forward import at_rows, gather, query_rows

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["T", "HEADS"])
def delta_kernel(
    OUT,
    GRAD,
    LSE,
    GRAD_LSE,
    DELTA,
    LSE2,
    o_b,
    o_h,
    o_t,
    g_b,
    g_h,
    g_t,
    T,
    HEADS,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    M: tl.constexpr,
    HAS_GRAD_LSE: tl.constexpr,
):
    """`delta` and the LSE in units of log 2; +inf where a query sees nothing, so that its P comes out as
    0."""
    t = tl.program_id(0) * M + tl.arange(0, M)
    bh = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    ok = t < T
    mask = ok[:, None] & (d < D)[None, :]
    b, h = bh // HEADS, bh % HEADS
    out = tl.load(
        OUT + b * o_b + h * o_h + (t.to(tl.int64) * o_t)[:, None] + d[None, :], mask=mask, other=0.0
    )
    grad = tl.load(
        GRAD + b * g_b + h * g_h + (t.to(tl.int64) * g_t)[:, None] + d[None, :], mask=mask, other=0.0
    )
    lse = tl.load(LSE + bh * T + t, mask=ok, other=float("-inf"))
    sees = lse != float("-inf")
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    if HAS_GRAD_LSE:
        delta -= tl.load(GRAD_LSE + bh * T + t, mask=ok, other=0.0)
    tl.store(DELTA + bh * T + t, tl.where(sees, delta, 0.0), mask=ok)
    tl.store(LSE2 + bh * T + t, tl.where(sees, lse * LOG2E, float("inf")), mask=ok)


@triton.jit
def _load_queries(
    Q, GRAD, LSE2, DELTA, query, head, row_ok, mask, stat_base, T, q_h, q_t, g_h, g_t, BLOCK_D: tl.constexpr
):  # fmt: skip
    """A tile of queries and of their gradients, and what goes with each row; Q, GRAD of the batch row,
    `stat_base` the place of its first head's first query in LSE2 and DELTA."""
    q = tl.load(at_rows(Q, head, query, q_h, q_t, BLOCK_D), mask=mask, other=0.0)
    grad = tl.load(at_rows(GRAD, head, query, g_h, g_t, BLOCK_D), mask=mask, other=0.0)
    stat = stat_base + head.to(tl.int64) * T + query
    lse2 = tl.load(LSE2 + stat, mask=row_ok, other=float("inf"))
    delta = tl.load(DELTA + stat, mask=row_ok, other=0.0)
    return q, grad, lse2, delta


@triton.jit(do_not_specialize=["T", "blocks", "H"])
def query_gradient_kernel(
    Q,
    K,
    V,
    GRAD,
    END,
    LIST,
    FULL,
    COUNT,
    LSE2,
    DELTA,
    DQ,
    q_b,
    q_h,
    q_t,
    k_b,
    k_h,
    k_t,
    v_b,
    v_h,
    v_t,
    g_b,
    g_h,
    g_t,
    d_b,
    d_h,
    d_t,
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
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dQ by lists like those of the forward pass; each program has its own queries. DQ like Q."""
    tile = tl.program_id(0)
    bh = tl.program_id(1)
    b = (bh // H).to(tl.int64)
    h = bh % H
    query, head, row_ok = query_rows(tile * QUERIES, T, h, G, M, QUERIES)
    mask = row_ok[:, None] & (tl.arange(0, BLOCK_D) < D)[None, :]
    q, grad, lse2, delta = _load_queries(
        Q + b * q_b, GRAD + b * g_b, LSE2, DELTA, query, head, row_ok, mask, (bh - h).to(tl.int64) * G * T,
        T, q_h, q_t, g_h, g_t, BLOCK_D,
    )  # fmt: skip
    k_base = K + b * k_b + h.to(tl.int64) * k_h
    v_base = V + b * v_b + h.to(tl.int64) * v_h
    ends = END + bh.to(tl.int64) * T
    home = bh * blocks + tile // PER_BLOCK
    keys = LIST + home.to(tl.int64) * room
    count = tl.load(COUNT + home)
    clear = tl.load(FULL + home) // N

    scale2 = scale * LOG2E
    lane = tl.arange(0, N)
    acc = tl.zeros([M, BLOCK_D], tl.float32)
    ahead = tl.load(keys + lane, mask=lane < count, other=0)
    for n in range(0, clear * N, N):
        j = ahead
        ahead = tl.load(keys + n + N + lane, mask=n + N + lane < count, other=0)
        if WIDE:
            j = j.to(tl.int64)
        k = gather(k_base, j, k_t, D, BLOCK_D)
        v = gather(v_base, j, v_t, D, BLOCK_D)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        dp = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
        ds = tl.exp2(s * scale2 - lse2[:, None]) * (dp - delta[:, None])
        acc = tl.dot(ds.to(k.dtype), k, acc, input_precision=PRECISION)
    for n in tl.range(clear * N, count, N, num_stages=1):  # as in the forward pass
        listed = n + lane < count
        j = tl.load(keys + n + lane, mask=listed, other=0)
        end = tl.load(ends + j, mask=listed, other=0)
        sees = (j[None, :] <= query[:, None]) & (query[:, None] < end[None, :])
        if WIDE:
            j = j.to(tl.int64)
        k = gather(k_base, j, k_t, D, BLOCK_D)
        v = gather(v_base, j, v_t, D, BLOCK_D)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        dp = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
        p = tl.where(sees, tl.exp2(s * scale2 - lse2[:, None]), 0.0)
        ds = p * (dp - delta[:, None])
        acc = tl.dot(ds.to(k.dtype), k, acc, input_precision=PRECISION)
    dq_at = at_rows(DQ + b * d_b, head, query, d_h, d_t, BLOCK_D)
    tl.store(dq_at, (acc * scale).to(DQ.dtype.element_ty), mask=mask)


@triton.jit
def _tile(
    dk,
    dv,
    k,
    v,
    j,
    end,
    Q,
    GRAD,
    LSE2,
    DELTA,
    first,
    stop,
    h,
    stat_base,
    T,
    q_h,
    q_t,
    g_h,
    g_t,
    scale,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    M: tl.constexpr,
    QUERIES: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """What the queries `first : min(first + QUERIES, stop)` add to the gradients of one tile of keys."""
    query, head, row_ok = query_rows(first, stop, h, G, M, QUERIES)
    mask = row_ok[:, None] & (tl.arange(0, BLOCK_D) < D)[None, :]
    q, grad, lse2, delta = _load_queries(
        Q, GRAD, LSE2, DELTA, query, head, row_ok, mask, stat_base, T, q_h, q_t, g_h, g_t, BLOCK_D
    )
    s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    p = tl.exp2(s * (scale * LOG2E) - lse2[None, :])
    if MASKED:
        sees = (j[:, None] <= query[None, :]) & (query[None, :] < end[:, None])
        p = tl.where(sees, p, 0.0)
    dv = tl.dot(p.to(grad.dtype), grad, dv, input_precision=PRECISION)
    dp = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
    ds = (p * (dp - delta[None, :])).to(q.dtype)
    dk = tl.dot(ds, q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["T", "blocks", "room", "block", "tiles", "H"])
def key_gradient_kernel(
    Q,
    K,
    V,
    GRAD,
    END,
    LIST,
    COUNT,
    LSE2,
    DELTA,
    DK,
    DV,
    q_b,
    q_h,
    q_t,
    k_b,
    k_h,
    k_t,
    v_b,
    v_h,
    v_t,
    g_b,
    g_h,
    g_t,
    T,
    blocks,
    room,
    block,
    tiles,
    scale,
    H,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    QUERIES: tl.constexpr,
    ATOMIC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dK and dV of `N` listed keys from the queries of one block.

    With ATOMIC a key is in the lists of several blocks, whose programs add; without it every key is in one
    list only
    and is stored. DK, DV float32 [B, Hkv, T, D], contiguous; zeroed with ATOMIC.
    """
    at = tl.program_id(0) // tiles
    n = (tl.program_id(0) % tiles) * N
    bh = tl.program_id(1)
    home = bh * blocks + at
    count = tl.load(COUNT + home)
    if n < count:
        b = (bh // H).to(tl.int64)
        h = bh % H
        lane = tl.arange(0, N)
        listed = n + lane < count
        j = tl.load(LIST + home.to(tl.int64) * room + n + lane, mask=listed, other=0)
        end = tl.load(END + bh.to(tl.int64) * T + j, mask=listed, other=0)
        d = tl.arange(0, BLOCK_D)
        mask = listed[:, None] & (d < D)[None, :]
        wide = j.to(tl.int64)
        k = tl.load(
            K + b * k_b + h.to(tl.int64) * k_h + (wide * k_t)[:, None] + d[None, :], mask=mask, other=0.0
        )
        v = tl.load(
            V + b * v_b + h.to(tl.int64) * v_h + (wide * v_t)[:, None] + d[None, :], mask=mask, other=0.0
        )
        # Queries that see some of these keys, and those in between that see all of them.
        first = tl.maximum(at * block, tl.min(tl.where(end > 0, j, T), axis=0))
        stop = tl.minimum(tl.minimum((at + 1) * block, T), tl.max(end, axis=0))
        clear = tl.maximum(tl.max(j, axis=0), first)
        clear_tiles = tl.maximum(tl.minimum(tl.min(end, axis=0), stop) - clear, 0) // QUERIES
        clear = tl.where(clear_tiles > 0, clear, tl.maximum(stop, first))
        head_tiles = (clear - first + QUERIES - 1) // QUERIES
        tail = clear + clear_tiles * QUERIES
        tail_tiles = (tl.maximum(stop - tail, 0) + QUERIES - 1) // QUERIES

        q_base = Q + b * q_b
        g_base = GRAD + b * g_b
        stat_base = (bh - h).to(tl.int64) * G * T
        dk = tl.zeros([N, BLOCK_D], tl.float32)
        dv = tl.zeros([N, BLOCK_D], tl.float32)
        for i in range(0, clear_tiles):
            dk, dv = _tile(
                dk, dv, k, v, j, end, q_base, g_base, LSE2, DELTA, clear + i * QUERIES, stop, h, stat_base, T,
                q_h, q_t, g_h, g_t, scale, G, D, BLOCK_D, M, QUERIES, False, PRECISION,
            )  # fmt: skip
        for i in range(0, head_tiles + tail_tiles):
            before = i < head_tiles
            begin = tl.where(before, first + i * QUERIES, tail + (i - head_tiles) * QUERIES)
            dk, dv = _tile(
                dk, dv, k, v, j, end, q_base, g_base, LSE2, DELTA, begin, tl.where(before, clear, stop), h,
                stat_base, T, q_h, q_t, g_h, g_t, scale, G, D, BLOCK_D, M, QUERIES, True, PRECISION,
            )  # fmt: skip
        to = ((bh.to(tl.int64) * T + wide) * D)[:, None] + d[None, :]
        if ATOMIC:
            tl.atomic_add(DK + to, dk * scale, mask=mask, sem="relaxed")
            tl.atomic_add(DV + to, dv, mask=mask, sem="relaxed")
        else:
            tl.store(DK + to, dk * scale, mask=mask)
            tl.store(DV + to, dv, mask=mask)
