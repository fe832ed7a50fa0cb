"""Triton: one layer's delayed mLSTM step, between the projections and the attention (METHOD.md section 5).

Absorbs the new token into the memory, reads it with the query of the token `delay` before (made ready by
`triton_evict`), and, when that is the token that leaves the window, places it.
"""

# mypy: disable-error-code="no-untyped-def, misc"

from __future__ import annotations

import triton
import triton.language as tl

from kvpop_lightning.cache.triton_attention import rotated_half_pair
from kvpop_lightning.cache.triton_evict import settle, static_priority


@triton.jit
def _standardized(x, mean, std, at):
    scale = 1.0 / tl.load(std + at)
    return x.to(scale.dtype) * scale - tl.load(mean + at) * scale


@triton.jit
def _columns(k1, k2, v1, v2, key_weight, value_weight, bias, lh, first, D: tl.constexpr, DH: tl.constexpr,
             ALL: tl.constexpr, COUNT: tl.constexpr, COUNT_P: tl.constexpr):  # fmt: skip
    """Columns first .. first + COUNT - 1 of the input projection, [COUNT_P], zero past COUNT."""
    c = tl.arange(0, COUNT_P)
    inside = (c < COUNT)[None, :]
    d = tl.arange(0, DH)
    at = lh * (D * ALL) + d[:, None] * ALL + first + c[None, :]
    acc = tl.load(bias + lh * ALL + first + c, mask=c < COUNT, other=0.0)
    acc += tl.sum(k1[:, None] * tl.load(key_weight + at, mask=inside, other=0.0), axis=0)
    acc += tl.sum(k2[:, None] * tl.load(key_weight + at + DH * ALL, mask=inside, other=0.0), axis=0)
    acc += tl.sum(v1[:, None] * tl.load(value_weight + at, mask=inside, other=0.0), axis=0)
    acc += tl.sum(v2[:, None] * tl.load(value_weight + at + DH * ALL, mask=inside, other=0.0), axis=0)
    return acc


@triton.jit
def _log_sigmoid(x):
    """min(x, 0) - log1p(exp(-|x|)), with log1p(e) = log(u) e / (u - 1), u = 1 + e: exact for small e."""
    e = tl.exp(-tl.abs(x))
    u = 1.0 + e
    ratio = tl.where(u == 1.0, 1.0, e / tl.where(u == 1.0, 1.0, u - 1.0))
    return tl.minimum(x, 0.0) - tl.where(u == 1.0, e, tl.log(u) * ratio)


@triton.jit(do_not_specialize=["layer"])
def mlstm_kernel(
    qkv, k_norm, cos, sin, keys, values, priority, position, seen_ptr, waiting, log_decay,
    key_mean, key_std, value_mean, value_std, key_weight, value_weight, bias,
    memory, normalizer, log_scale, read_query, read_share, norm_gain, read_weight, out_weight, out_bias,
    low_priority, low_slot, layer, ROWS, eps,
    DELAY: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, WINDOW: tl.constexpr, SINK: tl.constexpr,
    TOPK: tl.constexpr, N: tl.constexpr, D: tl.constexpr, DH: tl.constexpr, DECAY_STEP: tl.constexpr,
    ALL: tl.constexpr, FIRST: tl.constexpr, DM: tl.constexpr, DM_P: tl.constexpr, DV: tl.constexpr,
    DV_P: tl.constexpr, WIDTH: tl.constexpr, WIDTH_P: tl.constexpr, HAS_NORM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (heads, rows). The projection's columns: FIRST.. key d_m, value d_v, input gate, forget gate."""
    head = tl.program_id(0)
    row = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    lh = layer * HEADS + head
    cell = (layer * ROWS + row) * HEADS + head
    seen = tl.load(seen_ptr + row)
    d = tl.arange(0, DH)
    width: tl.constexpr = (GROUP + 2) * HEADS * D
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
    v = qkv + row * width + ((GROUP + 1) * HEADS + head) * D
    k1 = _standardized(k1, key_mean, key_std, lh * D + d)
    k2 = _standardized(k2, key_mean, key_std, lh * D + DH + d)
    v1 = _standardized(tl.load(v + d), value_mean, value_std, lh * D + d)
    v2 = _standardized(tl.load(v + DH + d), value_mean, value_std, lh * D + DH + d)

    key = _columns(k1, k2, v1, v2, key_weight, value_weight, bias, lh, FIRST, D, DH, ALL, DM, DM_P)
    value = _columns(k1, k2, v1, v2, key_weight, value_weight, bias, lh, FIRST + DM, D, DH, ALL, DV, DV_P)
    gate = _columns(k1, k2, v1, v2, key_weight, value_weight, bias, lh, FIRST + DM + DV, D, DH, ALL, 2, 2)
    which = tl.arange(0, 2)
    log_input = tl.sum(tl.where(which == 0, gate, 0.0), axis=0)
    log_forget = _log_sigmoid(tl.sum(tl.where(which == 1, gate, 0.0), axis=0))

    before = tl.load(log_scale + cell)
    grown = tl.maximum(log_forget + before, log_input)
    keep = tl.exp(log_forget + before - grown)
    take = tl.exp(log_input - grown)
    tl.store(log_scale + cell, grown)
    m, e = tl.arange(0, DM_P), tl.arange(0, DV_P)
    inside = (m < DM)[:, None] & (e < DV)[None, :]
    at = cell * (DM * DV) + m[:, None] * DV + e[None, :]
    added = take * (key * (DM**-0.5))
    state = keep * tl.load(memory + at, mask=inside, other=0.0) + added[:, None] * value[None, :]
    tl.store(memory + at, state, mask=inside)
    total = keep * tl.load(normalizer + cell * DM + m, mask=m < DM, other=0.0) + added
    tl.store(normalizer + cell * DM + m, total, mask=m < DM)

    if seen >= DELAY:
        query = tl.load(read_query + cell * DM + m, mask=m < DM, other=0.0)
        numerator = tl.sum(query[:, None] * state, axis=0)
        floor = tl.exp(tl.minimum(-grown, 80.0))
        h = numerator / tl.maximum(tl.abs(tl.sum(query * total, axis=0)), floor)
        h = h * (1.0 / tl.sqrt(tl.sum(h * h, axis=0) / DV + 1e-5))
        h = h * tl.load(norm_gain + lh * DV + e, mask=e < DV, other=0.0)
        c = tl.arange(0, WIDTH_P)
        weight = tl.load(
            read_weight + lh * (DV * WIDTH) + e[:, None] * WIDTH + c[None, :],
            mask=(e < DV)[:, None] & (c < WIDTH)[None, :], other=0.0,
        )  # fmt: skip
        z = tl.sum(h[:, None] * weight, axis=0)
        z += tl.load(read_share + cell * WIDTH + c, mask=c < WIDTH, other=0.0)
        z = z / (1.0 + tl.exp(-z)) * tl.load(out_weight + lh * WIDTH + c, mask=c < WIDTH, other=0.0)
        score = tl.sum(z, axis=0) + tl.load(out_bias + lh)
        if DELAY == WINDOW:
            newcomer = static_priority(score, seen - WINDOW, tl.load(log_decay + lh), DECAY_STEP)
            settle(
                keys + cell.to(tl.int64) * (N * D), values + cell.to(tl.int64) * (N * D),
                priority + cell * TOPK, position + cell * TOPK, seen, newcomer,
                tl.load(low_priority + cell), tl.load(low_slot + cell), WINDOW, SINK, TOPK, D,
            )  # fmt: skip
        else:
            tl.store(waiting + cell * WINDOW + (seen - DELAY) % WINDOW, score)
