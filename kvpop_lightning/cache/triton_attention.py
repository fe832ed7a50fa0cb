"""Triton: decode attention over the slots, with the new token's norm, RoPE and store (METHOD.md section 6).

The keys of a head are split over programs; the last one to finish merges the parts, so that a layer's
attention is one launch. The new token is read from the projections, not from the cache, and the program that
owns its ring slot writes it there: no other program reads that slot in the same launch.
"""

# mypy: disable-error-code="no-untyped-def, misc"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rotated_half_pair(x, norm, cos, sin, eps, D: tl.constexpr, DH: tl.constexpr, HAS_NORM: tl.constexpr):
    """Both halves [DH] of the head vector at `x` after RMS norm (if any) and RoPE, in the model's dtype."""
    d = tl.arange(0, DH)
    a, b = tl.load(x + d), tl.load(x + DH + d)
    kind = a.dtype
    work: tl.constexpr = tl.float64 if kind == tl.float64 else tl.float32
    a, b = a.to(work), b.to(work)
    if HAS_NORM:
        r = 1.0 / tl.sqrt((tl.sum(a * a, axis=0) + tl.sum(b * b, axis=0)) / D + eps)
        a = ((a * r).to(kind).to(work) * tl.load(norm + d).to(work)).to(kind).to(work)
        b = ((b * r).to(kind).to(work) * tl.load(norm + DH + d).to(work)).to(kind).to(work)
    ca, cb = tl.load(cos + d).to(work), tl.load(cos + DH + d).to(work)
    sa, sb = tl.load(sin + d).to(work), tl.load(sin + DH + d).to(work)
    return (a * ca - b * sa).to(kind), (b * cb + a * sb).to(kind)


@triton.jit
def _rotated_rows(x, norm, cos, sin, eps, GROUP: tl.constexpr, GROUP_P: tl.constexpr, D: tl.constexpr,
                  DH: tl.constexpr, HAS_NORM: tl.constexpr):  # fmt: skip
    """The same for the GROUP query heads that share a KV head, [GROUP_P, DH] each; zero past GROUP."""
    g, d = tl.arange(0, GROUP_P), tl.arange(0, DH)
    inside = (g < GROUP)[:, None]
    a = tl.load(x + g[:, None] * D + d[None, :], mask=inside, other=0.0)
    b = tl.load(x + g[:, None] * D + DH + d[None, :], mask=inside, other=0.0)
    kind = a.dtype
    work: tl.constexpr = tl.float64 if kind == tl.float64 else tl.float32
    a, b = a.to(work), b.to(work)
    if HAS_NORM:
        r = (1.0 / tl.sqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / D + eps))[:, None]
        a = ((a * r).to(kind).to(work) * tl.load(norm + d).to(work)[None, :]).to(kind).to(work)
        b = ((b * r).to(kind).to(work) * tl.load(norm + DH + d).to(work)[None, :]).to(kind).to(work)
    ca, cb = tl.load(cos + d).to(work)[None, :], tl.load(cos + DH + d).to(work)[None, :]
    sa, sb = tl.load(sin + d).to(work)[None, :], tl.load(sin + DH + d).to(work)[None, :]
    return (a * ca - b * sa).to(kind), (b * cb + a * sb).to(kind)


@triton.jit
def _merge(out, part_out, part_max, part_sum, first, GROUP: tl.constexpr, GROUP_P: tl.constexpr,
           D: tl.constexpr, SPLITS: tl.constexpr, SPLITS_P: tl.constexpr):  # fmt: skip
    """Softmax over all splits from the parts at `first` (index of the head's first part)."""
    s, d = tl.arange(0, SPLITS_P), tl.arange(0, D)
    for g in tl.static_range(GROUP):
        at = (first + s) * GROUP_P + g
        m = tl.load(part_max + at, mask=s < SPLITS, other=float("-inf"), cache_modifier=".cg")
        total = tl.load(part_sum + at, mask=s < SPLITS, other=0.0, cache_modifier=".cg")
        w = tl.exp(m - tl.max(m, axis=0))
        acc = tl.load(
            part_out + at[:, None] * D + d[None, :],
            mask=(s < SPLITS)[:, None],
            other=0.0,
            cache_modifier=".cg",
        )
        merged = tl.sum(acc * w[:, None], axis=0) / tl.sum(total * w, axis=0)
        tl.store(out + g * D + d, merged.to(out.dtype.element_ty))


@triton.jit
def attend_kernel(
    qkv, q_norm, k_norm, cos, sin, keys, values, seen_ptr, out, part_out, part_max, part_sum, arrived,
    scale, eps,
    HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_P: tl.constexpr, WINDOW: tl.constexpr, N: tl.constexpr,
    D: tl.constexpr, DH: tl.constexpr, SPLITS: tl.constexpr, SPLITS_P: tl.constexpr, PER_SPLIT: tl.constexpr,
    BLOCK: tl.constexpr, HAS_NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (splits, heads, rows); out [rows, heads * GROUP * D]; part_* [rows, heads, splits, GROUP_P (, D)].

    qkv [rows, (GROUP + 2) * HEADS * D] as projected; keys, values of this layer [rows, heads, N, D].
    """
    split = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    seen = tl.load(seen_ptr + row)
    cell = row * HEADS + head
    slot = seen % WINDOW
    left = tl.maximum(seen + 1 - WINDOW, 0)
    width: tl.constexpr = (GROUP + 2) * HEADS * D
    q1, q2 = _rotated_rows(
        qkv + row * width + head * (GROUP * D), q_norm, cos + row * D, sin + row * D, eps, GROUP, GROUP_P, D,
        DH,
        HAS_NORM,
    )  # fmt: skip
    kind = q1.dtype
    work: tl.constexpr = tl.float64 if kind == tl.float64 else tl.float32
    keys += cell.to(tl.int64) * (N * D)
    values += cell.to(tl.int64) * (N * D)
    d, dh, g = tl.arange(0, D), tl.arange(0, DH), tl.arange(0, GROUP_P)
    low = split * PER_SPLIT
    high = tl.minimum(low + PER_SPLIT, N)

    # The new token itself, in the split that owns its slot.
    owner = (slot >= low) & (slot < high)
    k1, k2 = rotated_half_pair(
        qkv + row * width + (GROUP * HEADS + head) * D,
        k_norm,
        cos + row * D,
        sin + row * D,
        eps,
        D,
        DH,
        HAS_NORM,
    )
    new_value = tl.load(qkv + row * width + ((GROUP + 1) * HEADS + head) * D + d)
    tl.store(keys + slot * D + dh, k1, mask=owner & (dh < DH))
    tl.store(keys + slot * D + DH + dh, k2, mask=owner & (dh < DH))
    tl.store(values + slot * D + d, new_value, mask=owner & (d < D))
    own = tl.sum(q1.to(work) * k1.to(work)[None, :], axis=1) + tl.sum(
        q2.to(work) * k2.to(work)[None, :], axis=1
    )
    top = tl.where(owner, own * scale, float("-inf"))
    total = tl.where(owner, 1.0, 0.0) + tl.zeros([GROUP_P], work)
    acc = tl.zeros([GROUP_P, D], work) + tl.where(owner, new_value.to(work), 0.0)[None, :]

    for start in range(low, high, BLOCK):
        n = start + tl.arange(0, BLOCK)
        visible = (n < high) & (n != slot) & tl.where(n < WINDOW, n < seen, n - WINDOW < left)
        at = n[:, None] * D + dh[None, :]
        key1 = tl.load(keys + at, mask=visible[:, None], other=0.0)
        key2 = tl.load(keys + at + DH, mask=visible[:, None], other=0.0)
        logit = tl.dot(q1, tl.trans(key1), input_precision="ieee")
        logit += tl.dot(q2, tl.trans(key2), input_precision="ieee")
        logit = tl.where(visible[None, :], logit * scale, float("-inf"))
        higher = tl.maximum(top, tl.max(logit, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp(logit - base[:, None])
        shrink = tl.exp(top - base)
        total = total * shrink + tl.sum(p, axis=1)
        value = tl.load(values + n[:, None] * D + d[None, :], mask=visible[:, None], other=0.0)
        acc = acc * shrink[:, None] + tl.dot(p.to(kind), value, input_precision="ieee")
        top = higher

    out += row * (HEADS * GROUP * D) + head * (GROUP * D)
    if SPLITS == 1:
        merged = acc / total[:, None]
        tl.store(out + g[:, None] * D + d[None, :], merged.to(kind), mask=(g < GROUP)[:, None])
    else:
        part = (cell * SPLITS + split) * GROUP_P + g
        tl.store(part_max + part, top)
        tl.store(part_sum + part, total)
        tl.store(part_out + part[:, None] * D + d[None, :], acc, mask=(g < GROUP)[:, None])
        # All threads' stores, then one release; the last to arrive acquires them and merges.
        tl.debug_barrier()
        before = tl.atomic_add(arrived + cell, 1, sem="acq_rel")
        if before == SPLITS - 1:
            _merge(out, part_out, part_max, part_sum, cell * SPLITS, GROUP, GROUP_P, D, SPLITS, SPLITS_P)
            tl.store(arrived + cell, 0)
