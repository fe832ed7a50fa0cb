"""Triton: what a decode step does before its first layer, for all layers at once (METHOD.md section 6).

At step i the token t = i - w leaves the window ring of every layer and KV head. For a stateless scorer its
score depends on nothing that the step itself computes, so one launch scores it, finds the lowest resident and
moves it,
`layers x rows x heads` programs side by side. A delayed mLSTM needs token i absorbed first: here its
query, its share of the head and the lowest resident are made ready, `triton_mlstm` does the rest per layer.
"""

# mypy: disable-error-code="no-untyped-def, misc"

from __future__ import annotations

import triton
import triton.language as tl

CONSTANT, LINEAR, MLP, KEY_NORM, RANDOM, WAITING, DELAYED, INSERTED = (tl.constexpr(n) for n in range(8))
"""How the leaving token comes by its score: see `evict_kernel`."""
LATEST = tl.constexpr(2147483647)


@triton.jit
def project(x, mean, std, weight, lh, ACC, D: tl.constexpr, COLS: tl.constexpr, COLS_P: tl.constexpr):
    """ACC [COLS_P] plus the standardised vector at `x` [D] times weight[lh] [D, COLS]."""
    CHUNK: tl.constexpr = D if D < 64 else 64
    c = tl.arange(0, COLS_P)
    for start in tl.static_range(0, D, CHUNK):
        d = start + tl.arange(0, CHUNK)
        w = tl.load(
            weight + lh * (D * COLS) + d[:, None] * COLS + c[None, :], mask=(c < COLS)[None, :], other=0.0
        )
        scale = 1.0 / tl.load(std + lh * D + d)
        shift = -tl.load(mean + lh * D + d) * scale
        z = tl.load(x + d).to(w.dtype) * scale + shift
        ACC += tl.sum(z[:, None] * w, axis=0)
    return ACC


@triton.jit
def lowest_resident(priority, position, TOPK: tl.constexpr, BLOCK: tl.constexpr):
    """(priority, slot) of the resident that goes first: the oldest among those of the lowest priority."""
    s = tl.arange(0, BLOCK)
    best_p = tl.load(priority + s, mask=s < TOPK, other=float("inf"))
    best_t = tl.load(position + s, mask=s < TOPK, other=LATEST)
    best_s = s
    for start in range(BLOCK, TOPK, BLOCK):
        n = start + s
        p = tl.load(priority + n, mask=n < TOPK, other=float("inf"))
        t = tl.load(position + n, mask=n < TOPK, other=LATEST)
        better = (p < best_p) | ((p == best_p) & (t < best_t))
        best_p = tl.where(better, p, best_p)
        best_t = tl.where(better, t, best_t)
        best_s = tl.where(better, n, best_s)
    lowest = tl.min(best_p, axis=0)
    oldest = tl.min(tl.where(best_p == lowest, best_t, LATEST), axis=0)
    slot = tl.min(tl.where((best_p == lowest) & (best_t == oldest), best_s, LATEST), axis=0)
    return lowest, slot


@triton.jit
def static_priority(score, token, log_decay, DECAY_STEP: tl.constexpr):
    """float64 `r - floor(t / delta) log gamma`; compile with enable_fp_fusion=False, as plain code rounds."""
    return score.to(tl.float64) - (token // DECAY_STEP).to(tl.float64) * log_decay


@triton.jit
def settle(
    keys, values, priority, position, seen, newcomer, lowest, victim,
    WINDOW: tl.constexpr, SINK: tl.constexpr, TOPK: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Moves the leaving token from its ring slot to a sink's, an empty or the lowest resident's, or nowhere.

    keys, values, priority, position point at the head's own slots.
    """
    token = seen - WINDOW
    arrival = token - SINK
    is_sink = arrival < 0
    enters = (arrival < TOPK) | (newcomer >= lowest)
    slot = tl.where(arrival < TOPK, arrival, victim)
    target = tl.where(is_sink, WINDOW + token, WINDOW + SINK + slot)
    source = seen % WINDOW
    d = tl.arange(0, D)
    moves = enters & (d < D)
    tl.store(keys + target * D + d, tl.load(keys + source * D + d, mask=moves), mask=moves)
    tl.store(values + target * D + d, tl.load(values + source * D + d, mask=moves), mask=moves)
    held = enters & (arrival >= 0)
    tl.store(priority + slot, newcomer, mask=held)
    tl.store(position + slot, token, mask=held)


@triton.jit
def mixed(state, key):
    """One round of `baselines.random.hash_uniform`, int64."""
    state = ((state ^ key) + 0x3C6EF35F) & 0xFFFFFFFF
    state = ((state ^ (state >> 16)) * 0x45D9F3B5) & 0xFFFFFFFF
    state = ((state ^ (state >> 15)) * 0x2C1B3C6D) & 0xFFFFFFFF
    state = ((state ^ (state >> 16)) * 0x297A2D39) & 0xFFFFFFFF
    return state ^ (state >> 15)


@triton.jit(do_not_specialize=["random_seed"])
def evict_kernel(
    keys, values, priority, position, seen_ptr, waiting, log_decay,
    key_mean, key_std, value_mean, value_std, key_weight, value_weight, bias, out_weight, out_bias,
    key_weight_2, value_weight_2, bias_2, read_query, read_share, low_priority, low_slot,
    ROWS, random_seed, random_scale,
    KIND: tl.constexpr, DELAY: tl.constexpr, HEADS: tl.constexpr, WINDOW: tl.constexpr, SINK: tl.constexpr,
    TOPK: tl.constexpr, N: tl.constexpr, D: tl.constexpr, DECAY_STEP: tl.constexpr, COLS: tl.constexpr,
    COLS_P: tl.constexpr, COLS_2: tl.constexpr, COLS_2P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (layers * heads * rows); rows innermost, so that programs side by side share weights.

    KIND: CONSTANT (0), LINEAR, MLP (COLS = width), KEY_NORM, RANDOM: score from the token at once.
    WAITING: stateful with a delay below the window, the score lies in `waiting` since its read.
    INSERTED: reads hidden states, the score lies in `waiting` since the token came (`insert_kernel`).
    DELAYED: stateful with delay = window: only prepares. The last two also project the token that is read at
    this step, `DELAY` before the new one: COLS = d_m into read_query, COLS_2 = width into read_share.
    """
    lh = tl.program_id(0) // ROWS
    row = tl.program_id(0) % ROWS
    cell = ((lh // HEADS) * ROWS + row) * HEADS + lh % HEADS
    seen = tl.load(seen_ptr + row)
    keys += cell.to(tl.int64) * (N * D)
    values += cell.to(tl.int64) * (N * D)
    priority += cell * TOPK
    position += cell * TOPK
    token = seen - WINDOW
    if token >= 0:
        x = keys + (seen % WINDOW) * D
        y = values + (seen % WINDOW) * D
        if KIND == LINEAR or KIND == MLP:  # noqa: SIM109
            c = tl.arange(0, COLS_P)
            inside = c < COLS
            acc = tl.load(bias + lh * COLS + c, mask=inside, other=0.0)
            acc = project(x, key_mean, key_std, key_weight, lh, acc, D, COLS, COLS_P)
            acc = project(y, value_mean, value_std, value_weight, lh, acc, D, COLS, COLS_P)
            if KIND == MLP:
                acc = acc / (1.0 + tl.exp(-acc)) * tl.load(out_weight + lh * COLS + c, mask=inside, other=0.0)
                score = tl.sum(acc, axis=0) + tl.load(out_bias + lh)
            else:
                score = tl.sum(acc, axis=0)
        elif KIND == KEY_NORM:
            k = tl.load(x + tl.arange(0, D))
            k = k.to(tl.float64) if k.dtype == tl.float64 else k.to(tl.float32)
            score = -tl.sqrt(tl.sum(k * k, axis=0))
        elif KIND == RANDOM:
            state = mixed(mixed(tl.zeros([], tl.int64), random_seed.to(tl.int64)), (lh // HEADS).to(tl.int64))
            state = mixed(mixed(state, (lh % HEADS).to(tl.int64)), token.to(tl.int64))
            score = random_scale * (((state >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07)
        elif KIND == WAITING or KIND == INSERTED:  # noqa: SIM109
            score = tl.load(waiting + cell * WINDOW + seen % WINDOW)
        else:
            score = tl.zeros([], tl.float32)
        lowest = tl.full([], float("inf"), tl.float64)
        victim = tl.zeros([], tl.int32)
        if token - SINK >= TOPK:
            lowest, victim = lowest_resident(priority, position, TOPK, BLOCK)
        if KIND == DELAYED:
            tl.store(low_priority + cell, lowest)
            tl.store(low_slot + cell, victim)
        else:
            newcomer = static_priority(score, token, tl.load(log_decay + lh), DECAY_STEP)
            settle(keys, values, priority, position, seen, newcomer, lowest, victim, WINDOW, SINK, TOPK, D)
    if KIND == WAITING or KIND == DELAYED:  # noqa: SIM102, SIM109
        if seen >= DELAY:
            slot = (seen - DELAY) % WINDOW
            c = tl.arange(0, COLS_P)
            acc = tl.load(bias + lh * COLS + c, mask=c < COLS, other=0.0)
            acc = project(keys + slot * D, key_mean, key_std, key_weight, lh, acc, D, COLS, COLS_P)
            acc = project(values + slot * D, value_mean, value_std, value_weight, lh, acc, D, COLS, COLS_P)
            tl.store(read_query + cell * COLS + c, acc, mask=c < COLS)
            c2 = tl.arange(0, COLS_2P)
            acc2 = tl.load(bias_2 + lh * COLS_2 + c2, mask=c2 < COLS_2, other=0.0)
            acc2 = project(keys + slot * D, key_mean, key_std, key_weight_2, lh, acc2, D, COLS_2, COLS_2P)
            acc2 = project(
                values + slot * D, value_mean, value_std, value_weight_2, lh, acc2, D, COLS_2, COLS_2P
            )
            tl.store(read_share + cell * COLS_2 + c2, acc2, mask=c2 < COLS_2)


@triton.jit
def insert_kernel(
    keys, values, waiting, seen_ptr, share, key_mean, key_std, value_mean, value_std, key_weight,
    value_weight, bias, out_weight, out_bias, ROWS,
    HEADS: tl.constexpr, WINDOW: tl.constexpr, N: tl.constexpr, D: tl.constexpr, COLS: tl.constexpr,
    COLS_P: tl.constexpr, HAS_KV: tl.constexpr, IS_MLP: tl.constexpr,
):  # fmt: skip
    """Scores the new token of every layer, row and head, grid (layers * heads * rows) as for `evict_kernel`.

    Its key and value are in the ring by now; `share` [L, B, H, COLS] is what its hidden state adds.
    """
    lh = tl.program_id(0) // ROWS
    row = tl.program_id(0) % ROWS
    cell = ((lh // HEADS) * ROWS + row) * HEADS + lh % HEADS
    slot = tl.load(seen_ptr + row) % WINDOW
    c = tl.arange(0, COLS_P)
    inside = c < COLS
    acc = tl.load(bias + lh * COLS + c, mask=inside, other=0.0)
    acc += tl.load(share + cell * COLS + c, mask=inside, other=0.0)
    if HAS_KV:
        at = cell.to(tl.int64) * (N * D) + slot * D
        acc = project(keys + at, key_mean, key_std, key_weight, lh, acc, D, COLS, COLS_P)
        acc = project(values + at, value_mean, value_std, value_weight, lh, acc, D, COLS, COLS_P)
    if IS_MLP:
        acc = acc / (1.0 + tl.exp(-acc)) * tl.load(out_weight + lh * COLS + c, mask=inside, other=0.0)
        score = tl.sum(acc, axis=0) + tl.load(out_bias + lh)
    else:
        score = tl.sum(acc, axis=0)
    tl.store(waiting + cell * WINDOW + slot, score)
