"""Order statistics of every prefix at once, without a loop over tokens (METHOD.md, sections 2 and 4).

The engine is a wavelet matrix: a permutation is split bit by bit, highest bit first, keeping the order inside
each half. "k-th smallest in a range" then walks down the bits, and at each one asks how many of the range
went left: log2(T) rounds of prefix sums and gathers, for all queries of all heads together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpop_lightning.policy.documents import DocumentLayout, document_layout
from kvpop_lightning.policy.eviction_reference import running_kth_best_reference
from kvpop_lightning.policy.triton_choice import choose_backend


def kth_smallest_in_range(values: Tensor, begin: Tensor, end: Tensor, k: int) -> Tensor:
    """k-th smallest (k from 1) of `values[..., begin:end]` for every query.

    Args:
        values: int64 [..., T], each in [0, T).
        begin, end: int64 [..., Q], 0 <= begin <= end <= T, one range per query.
        k: which one; where a range holds fewer than k elements the result means nothing (but is in [0, 2 T)).

    Returns:
        int64 [..., Q].
    """
    lead, length = values.shape[:-1], values.shape[-1]
    queries = begin.shape[-1]
    values = values.reshape(-1, length)
    bound = torch.cat([begin.expand(*lead, queries), end.expand(*lead, queries)], dim=-1).reshape(
        -1, 2 * queries
    )
    left_in_range = torch.full_like(bound[:, :queries], k - 1)  # how many smaller ones are still to be passed
    found = torch.zeros_like(left_in_range)
    place = torch.arange(length, device=values.device)
    for bit in reversed(range(max(length - 1, 1).bit_length())):
        is_one = (values >> bit) & 1
        zeros_before = torch.nn.functional.pad(
            (1 - is_one).cumsum(-1), (1, 0)
        )  # [N, T + 1], exclusive prefix sum
        zeros_total = zeros_before[:, -1:]
        zero_bound = zeros_before.gather(-1, bound)
        in_zeros = zero_bound[:, queries:] - zero_bound[:, :queries]
        go_right = left_in_range >= in_zeros
        left_in_range = torch.where(go_right, left_in_range - in_zeros, left_in_range)
        found += go_right.long() << bit
        right_bound = zeros_total + bound - zero_bound
        bound = torch.where(go_right.repeat(1, 2), right_bound, zero_bound)
        if bit:
            before = zeros_before[:, :-1]
            target = torch.where(is_one.bool(), zeros_total + place - before, before)
            values = torch.empty_like(values).scatter_(-1, target, values)
    return found.view(*lead, queries)


def competition_order(priority: Tensor, layout: DocumentLayout, sink: int) -> Tensor:
    """Row indices from best to worst, document after document; int64 [B, H, T].

    Inside a document: by priority descending, the newer first among equals, its sinks last (they do not
    compete). Padding comes after all documents. A document's ranks therefore start at the ordinal of its
    first token.
    """
    length = priority.shape[-1]
    # Sinks are a document's oldest tokens, so -inf puts them behind even a competitor of priority -inf.
    ranked = priority.detach().masked_fill((layout.position < sink).unsqueeze(1), float("-inf"))
    order = length - 1 - ranked.flip(-1).argsort(dim=-1, descending=True, stable=True)
    if layout.packed:
        document = torch.where(layout.real, layout.start, length).unsqueeze(1).expand_as(order)
        order = order.gather(-1, document.gather(-1, order).argsort(dim=-1, stable=True))
    return order


def inverse_permutation(order: Tensor) -> Tensor:
    """`rank` with `rank[order[r]] = r` along the last axis."""
    place = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, place)


def running_kth_best(
    priority: Tensor, k: int, *, sink: int = 0, document_ids: Tensor | None = None, backend: str = "auto"
) -> Tensor:
    """The k-th best token of every prefix: METHOD.md, section 4 ("the mirror image of section 2").

    Args:
        priority: [B, H, T]; higher is better, the newer wins among equals.
        k: long-range slots (>= 1).
        sink: first tokens of a document, which do not compete.
        document_ids: int64 [B, T], -1 = padding; None = one document.
        backend: all give the same. `triton` (CUDA), `parallel` (any device) or `reference` (a sorted list per
            head and document); `auto` is triton where it can run, parallel elsewhere.

    Returns:
        int64 [B, H, T]: at token j the row index of the k-th best of its document's competing tokens up to
        and including j; -1 while there are fewer than k, and at padding.
    """
    if k < 1:
        raise ValueError(f"topk must be at least 1, got {k}")
    if backend == "reference":
        return running_kth_best_reference(priority, k, sink=sink, document_ids=document_ids)
    if backend not in ("auto", "triton", "parallel"):
        raise ValueError(f"backend must be auto, triton, parallel or reference, got {backend!r}")
    batch, _, length = priority.shape
    layout = document_layout(document_ids, batch=batch, length=length, device=priority.device)
    return kth_best_of_prefixes(priority, k, sink, layout, backend=backend)


def kth_best_of_prefixes(
    priority: Tensor, k: int, sink: int, layout: DocumentLayout, *, backend: str = "auto"
) -> Tensor:
    """`running_kth_best` on a ready layout; backend `auto`, `triton` or `parallel`."""
    if choose_backend(backend, priority, work="running_kth_best", otherwise="parallel") == "triton":
        from kvpop_lightning.policy.triton_order import kth_best_triton

        return kth_best_triton(priority, k, sink, layout)
    if k > priority.shape[-1]:
        return torch.full(priority.shape, -1, dtype=torch.int64, device=priority.device)
    order = competition_order(priority, layout, sink)
    rank = inverse_permutation(order)
    if layout.packed:  # the prefix must hold real tokens only: close the gaps that padding leaves
        rank = rank.gather(-1, layout.row_at.unsqueeze(1).expand_as(rank))
    begin, end = layout.ordinal - layout.position, layout.ordinal + 1  # sinks rank last: they need no cut
    best = kth_smallest_in_range(rank, begin.unsqueeze(1), end.unsqueeze(1), k)
    enough = layout.real & (layout.position - sink + 1 >= k)
    row = order.gather(-1, best.clamp(max=order.shape[-1] - 1))
    return row.masked_fill(~enough.unsqueeze(1), -1)
