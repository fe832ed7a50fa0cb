"""Eviction times: a whole retention pattern as one integer per key (METHOD.md, section 2)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpop_lightning.policy.budget import NEVER, Budget
from kvpop_lightning.policy.documents import DocumentLayout, document_layout
from kvpop_lightning.policy.eviction_reference import eviction_time_reference
from kvpop_lightning.policy.order_statistics import competition_order, kth_smallest_in_range
from kvpop_lightning.policy.triton_choice import choose_backend


def eviction_time(
    priority: Tensor, budget: Budget, *, document_ids: Tensor | None = None, backend: str = "auto"
) -> Tensor:
    """First query that no longer sees each key (METHOD.md, section 2); query i sees key j iff `j <= i < e_j`.

    Args:
        priority: [B, H, T], static priorities (float64 from `static_priority`); higher is better, the newer
            token wins among equals. Any number of heads: those of all layers may be stacked.
        budget: sinks, window and long-range slots, per document.
        document_ids: int64 [B, T], non-decreasing, -1 = padding anywhere; None = one document.
        backend: all give the same. `triton` (CUDA), `parallel` (no loop over tokens, any device) or
            `reference` (a heap); `auto` is triton where it can run, parallel elsewhere.

    Returns:
        int64 [B, H, T], a row index `>= j + budget.window`, or NEVER: sinks, padding, and tokens that the
        last query of their document still sees.

    Raises:
        ValueError: wrong shapes, an unknown backend, triton where it cannot run.
    """
    if priority.dim() != 3:
        raise ValueError(f"priority must be [B, H, T], got shape {tuple(priority.shape)}")
    if backend == "reference":
        return eviction_time_reference(priority, budget, document_ids=document_ids)
    if backend not in ("auto", "triton", "parallel"):
        raise ValueError(f"backend must be auto, triton, parallel or reference, got {backend!r}")
    batch, _, length = priority.shape
    backend = choose_backend(backend, priority, work="eviction_time", otherwise="parallel")
    if backend == "triton" and document_ids is None:
        layout = None
    else:
        layout = document_layout(document_ids, batch=batch, length=length, device=priority.device)
    if backend == "triton":
        from kvpop_lightning.policy.triton_order import eviction_time_triton

        return eviction_time_triton(priority, budget, layout)
    assert layout is not None
    return _eviction_time_parallel(priority, budget, layout)


def _eviction_time_parallel(priority: Tensor, budget: Budget, layout: DocumentLayout) -> Tensor:
    """The token of rank r is evicted by the k-th oldest of the better ones, once both left the window."""
    length = priority.shape[-1]
    if budget.total >= length:  # no document can fill it
        return torch.full(priority.shape, NEVER, dtype=torch.int64, device=priority.device)
    order = competition_order(priority, layout, budget.sink)
    rank = torch.arange(length, device=priority.device).expand_as(order)
    # A document's ranks begin at the ordinal of its first token.
    begin = (layout.ordinal - layout.position).unsqueeze(1).expand_as(order).gather(-1, order)
    evictor = kth_smallest_in_range(order, begin, rank, budget.topk).clamp(max=length - 1)
    last_to_leave = torch.maximum(evictor, order)
    after_window = layout.later(budget.window).unsqueeze(1).expand_as(order)
    time = after_window.gather(-1, last_to_leave).masked_fill(rank - begin < budget.topk, NEVER)
    time = torch.empty_like(time).scatter_(-1, order, time)
    return time.masked_fill(~layout.competing(budget.sink).unsqueeze(1), NEVER)
