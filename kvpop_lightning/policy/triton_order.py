"""The k-th best of every prefix, and with it the eviction times, in Triton (METHOD.md, section 2).

One sort gives every token a grade, its place from worst to best; from there on only integers are compared.
While `C` tokens join, the k-th best can move up by at most `C` places. So a row is cut into chunks of `C`
tokens, and each chunk needs only the `C + 1` lowest of the k best tokens before it, its candidates:

* `_candidates_kernel` finds them for all chunks at once, by walking down the grades from the best of them;
* `_chunk_kernel` plays a chunk through without a loop: `better[l, c]`, how many of the chunk's first `l + 1`
  tokens beat candidate `c`, is one product with a triangular matrix, and the k-th best after token `l` is the
  candidate that exactly k - 1 tokens beat.

An eviction is then a comparison: the newcomer falls if the k-th best before it is better, otherwise it pushes
that one out. Work: the sort, `T C` comparisons, and `T / C` walks of a few k grades (at most T) each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpop_lightning.policy.budget import NEVER, Budget
from kvpop_lightning.policy.documents import DocumentLayout

CHUNK = 64
"""C; speed only."""
_WALK = 1024
"""Grades read at a time on the way down."""


def eviction_time_triton(
    priority: Tensor, budget: Budget, layout: DocumentLayout | None, *, chunk: int = CHUNK
) -> Tensor:
    """`eviction_time` [B, H, T]; `layout` None = one document per row, without padding."""
    time = torch.full(priority.shape, NEVER, dtype=torch.int64, device=priority.device)
    if budget.total < priority.shape[-1]:  # otherwise no document can fill it
        _run(priority, budget.topk, budget.sink, layout, time, window=budget.window, chunk=chunk)
    return time


def kth_best_triton(
    priority: Tensor, k: int, sink: int, layout: DocumentLayout | None, *, chunk: int = CHUNK
) -> Tensor:
    """`running_kth_best` [B, H, T]; `layout` as above."""
    best = torch.full(priority.shape, -1, dtype=torch.int64, device=priority.device)
    if k <= priority.shape[-1]:
        _run(priority, k, sink, layout, best, window=0, chunk=chunk)
    return best


def _run(
    priority: Tensor,
    k: int,
    sink: int,
    layout: DocumentLayout | None,
    out: Tensor,
    *,
    window: int,
    chunk: int,
) -> None:
    """Fill `out` with the times (window > 0) or the k-th best (window 0)."""
    batch, heads, length = priority.shape
    lanes, chunks = batch * heads, triton.cdiv(length, chunk)
    if lanes == 0 or length == 0:
        return
    packed = layout is not None and layout.packed
    ascending = _ascending(priority, sink, layout if packed else None)
    order = torch.empty(lanes, length, dtype=torch.int32, device=priority.device)
    grade = torch.empty_like(order)
    highest = torch.full((lanes, chunks), -1, dtype=torch.int32, device=priority.device)
    candidates = torch.empty(lanes, chunks, chunk + 1, dtype=torch.int32, device=priority.device)
    if packed:
        assert layout is not None
        position, start, ordinal = layout.position, layout.start, layout.ordinal
        row_at, of_document = layout.row_at, layout.length
        real = layout.real.contiguous().view(torch.uint8)
    else:  # never read
        position = start = ordinal = row_at = of_document = real = order
    documents = [x.contiguous() for x in (position, start, ordinal, row_at)]
    real, of_document = real.contiguous(), of_document.contiguous()
    block = 1024
    _grade_kernel[(triton.cdiv(length, block), lanes)](
        ascending, order, grade, highest, real, documents[2], length, heads, chunks,
        CHUNK=chunk, BLOCK=block, PACKED=packed,
    )  # fmt: skip
    _candidates_kernel[(chunks, lanes)](
        order, highest, *documents, candidates, length, heads, chunks, k,
        CHUNK=chunk, BLOCK=_WALK, CHUNKS=triton.next_power_of_2(chunks), PACKED=packed,
    )  # fmt: skip
    _chunk_kernel[(chunks, lanes)](
        order, grade, candidates, real, *documents, of_document, out, length, heads, chunks, k, sink, window,
        CHUNK=chunk, PACKED=packed, EVICT=window > 0, num_warps=8 if chunk > 64 else 4,
    )  # fmt: skip


def _ascending(priority: Tensor, sink: int, layout: DocumentLayout | None) -> Tensor:
    """Row indices from worst to best, the older first among equals, sinks before all others; int64."""
    ranked = priority.detach()
    if sink:  # a document's oldest tokens, so -inf puts them below even a competitor of priority -inf
        if layout is None:
            ranked = ranked.clone()
            ranked[..., :sink] = float("-inf")
        else:
            ranked = ranked.masked_fill((layout.position < sink).unsqueeze(1), float("-inf"))
    return ranked.reshape(-1, ranked.shape[-1]).sort(dim=-1, stable=True).indices


@triton.jit(do_not_specialize=["heads", "chunks"])
def _grade_kernel(
    ascending_ptr, order_ptr, grade_ptr, highest_ptr, real_ptr, ordinal_ptr, T, heads, chunks,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """order[g] = row (padding: past the end), grade[row] = g, highest[c] = best grade in chunk c."""
    lane = tl.program_id(1).to(tl.int64)
    g = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = g < T
    row = tl.load(ascending_ptr + lane * T + g, mask=inside, other=0).to(tl.int32)
    ordinal = row
    listed = row
    if PACKED:
        at = lane // heads * T + row
        real = tl.load(real_ptr + at, mask=inside, other=0) != 0
        ordinal = tl.load(ordinal_ptr + at, mask=inside, other=0).to(tl.int32)
        listed = tl.where(real, row, 2147483647)
        tl.atomic_max(highest_ptr + lane * chunks + ordinal // CHUNK, g, mask=inside & real)
    else:
        tl.atomic_max(highest_ptr + lane * chunks + ordinal // CHUNK, g, mask=inside)
    tl.store(order_ptr + lane * T + g, listed, mask=inside)
    tl.store(grade_ptr + lane * T + row, g, mask=inside)


@triton.jit
def _chunk_start(first, row_at_ptr, position_ptr, start_ptr, ordinal_ptr, base, T, PACKED: tl.constexpr):
    """Row of the chunk's first token, first row of its document, tokens of it before (0 past the end)."""
    row = first
    start = 0
    before = first
    if PACKED:
        row = tl.load(row_at_ptr + base + first).to(tl.int32)
        start = tl.load(start_ptr + base + row).to(tl.int32)
        before = tl.load(position_ptr + base + row).to(tl.int32)
        if tl.load(ordinal_ptr + base + row).to(tl.int32) != first:
            before = 0
    return row, start, before


@triton.jit(do_not_specialize=["heads", "chunks", "k"])
def _candidates_kernel(
    order_ptr, highest_ptr, position_ptr, start_ptr, ordinal_ptr, row_at_ptr, out_ptr, T, heads, chunks, k,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Slot s: grade of the token before the chunk that `max(0, k - 1 - C) + s` others beat; -1 = none.

    Chunks in whose first document the k slots are not filled, or have nothing before them, write nothing.
    """
    chunk = tl.program_id(0)
    lane = tl.program_id(1).to(tl.int64)
    first = chunk * CHUNK
    row, start, before = _chunk_start(
        first, row_at_ptr, position_ptr, start_ptr, ordinal_ptr, lane // heads * T, T, PACKED
    )
    if (before == 0) | (before + CHUNK < k):
        return
    fewest = tl.maximum(k - 1 - CHUNK, 0)  # others that beat the candidate of slot 0
    c = tl.arange(0, CHUNKS)
    older = (c < chunk) & (c >= (first - before) // CHUNK)
    top = tl.max(tl.load(highest_ptr + lane * chunks + c, mask=older, other=-1))
    out = out_ptr + (lane * chunks + chunk) * (CHUNK + 1)
    down = tl.arange(0, BLOCK)
    passed = 0
    while (passed < k) & (top >= 0):
        g = top - down
        listed = tl.load(order_ptr + lane * T + g, mask=g >= 0, other=2147483647)
        here = ((listed >= start) & (listed < row)).to(tl.int32)
        found = tl.sum(here)
        if passed + found > fewest:
            slot = passed + tl.cumsum(here, 0) - 1 - fewest
            tl.store(out + slot, g, mask=(here != 0) & (slot >= 0) & (slot < k - fewest))
        passed += found
        top -= BLOCK
    slot = tl.arange(0, CHUNK)
    filled = tl.minimum(before, k) - fewest
    tl.store(out + slot, -1, mask=slot >= filled)
    if filled <= CHUNK:
        tl.store(out + CHUNK, -1)


@triton.jit
def _kth(better_old, old, base, better_new, new, reached, k):
    """Grade of the candidate that exactly k - 1 tokens beat after each token, -1 = none; [C]."""
    is_old = (better_old == k - 1) & (old[None, :] >= 0)
    is_new = reached & (base[None, :] + better_new == k - 1)
    from_old = tl.max(tl.where(is_old, old[None, :], -1), 1)
    from_new = tl.max(tl.where(is_new, new[None, :], -1), 1)
    return tl.maximum(from_old, from_new)


@triton.jit(do_not_specialize=["heads", "chunks", "k", "sink", "window"])
def _chunk_kernel(
    order_ptr, grade_ptr, candidates_ptr, real_ptr, position_ptr, start_ptr, ordinal_ptr, row_at_ptr,
    length_ptr, out_ptr, T, heads, chunks, k, sink, window,
    CHUNK: tl.constexpr, PACKED: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """The k-th best after each token of a chunk; or, from the one before it, whom it drives out and when."""
    chunk = tl.program_id(0)
    lane = tl.program_id(1).to(tl.int64)
    first = chunk * CHUNK
    base = lane // heads * T
    _, first_start, before = _chunk_start(
        first, row_at_ptr, position_ptr, start_ptr, ordinal_ptr, base, T, PACKED
    )
    has_old = (before > 0) & (before + CHUNK >= k)
    step = tl.arange(0, CHUNK)
    ordinal = first + step
    ok = ordinal < T
    row = ordinal
    position = ordinal
    start = tl.zeros_like(row)
    length = tl.full([CHUNK], 0, tl.int32) + T
    if PACKED:
        row = tl.load(row_at_ptr + base + ordinal, mask=ok, other=0).to(tl.int32)
        ok = ok & (tl.load(ordinal_ptr + base + row, mask=ok, other=-1).to(tl.int32) == ordinal)
        ok = ok & (tl.load(real_ptr + base + row, mask=ok, other=0) != 0)
        position = tl.load(position_ptr + base + row, mask=ok, other=0).to(tl.int32)
        start = tl.load(start_ptr + base + row, mask=ok, other=-1).to(tl.int32)
        length = tl.load(length_ptr + base + row, mask=ok, other=0).to(tl.int32)
    grade = tl.load(grade_ptr + lane * T + row, mask=ok, other=-1)

    # Candidates from before the chunk; they belong to the document that goes on in it.
    fewest = tl.maximum(k - 1 - CHUNK, 0)
    shift = tl.where(k > CHUNK, 1, 0)  # one slot more than a block holds: reached by the last token only
    slots = candidates_ptr + (lane * chunks + chunk) * (CHUNK + 1)
    old = tl.load(slots + shift + step, mask=has_old & (step < k - fewest - shift), other=-1)
    extra = tl.load(slots, mask=has_old & (shift == 1), other=-1)
    goes_on = ok & (before > 0) & (start == first_start)

    # [token, candidate]: the token beats the candidate; then, how many of the tokens up to it do.
    same = (start[:, None] == start[None, :]) & ok[:, None] & ok[None, :]
    beats_old = (goes_on[:, None] & (grade[:, None] > old[None, :])).to(tl.float16)
    beats_new = (same & (grade[:, None] > grade[None, :])).to(tl.float16)
    until = (step[:, None] >= step[None, :]).to(tl.float16)
    better_old = tl.dot(until, beats_old).to(tl.int32)  # counts up to C: exact
    better_new = tl.dot(until, beats_new).to(tl.int32)
    b_old = fewest + shift + step  # older tokens that beat each candidate
    b_new = tl.sum((goes_on[:, None] & (old[None, :] > grade[:, None])).to(tl.int32), 1)
    b_new = tl.where(goes_on, b_new + fewest + ((shift == 1) & (extra > grade)).to(tl.int32), 0)

    if EVICT:  # the state before each token: without its own column and without what it beats itself
        better_old = better_old - beats_old.to(tl.int32)
        better_new = better_new - beats_new.to(tl.int32)
        reached = same & (step[None, :] < step[:, None])
        better_old = tl.where(goes_on[:, None], better_old + b_old[None, :], -1)
        kth = _kth(better_old, old, b_new, better_new, grade, reached, k)
        full = ok & (position - sink >= k) & (kth >= 0)
        rival = tl.load(order_ptr + lane * T + kth, mask=full, other=0)
        falls = tl.where(grade < kth, row, rival)
        leaves = ordinal + window  # the newcomer is in the window until then
        full = full & (position + window < length)
        if PACKED:
            leaves = tl.load(row_at_ptr + base + leaves, mask=full, other=0).to(tl.int32)
        tl.store(out_ptr + lane * T + falls, leaves.to(tl.int64), mask=full)
    else:
        reached = same & (step[None, :] <= step[:, None])
        better_old = tl.where(goes_on[:, None], better_old + b_old[None, :], -1)
        kth = _kth(better_old, old, b_new, better_new, grade, reached, k)
        kth = tl.where((kth < 0) & (shift == 1), extra, kth)
        full = ok & (position - sink + 1 >= k) & (kth >= 0)
        best = tl.load(order_ptr + lane * T + kth, mask=full, other=0)
        tl.store(out_ptr + lane * T + row, best.to(tl.int64), mask=full)
