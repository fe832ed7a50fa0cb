"""What the teacher does with each token that leaves the window: keep or drop (METHOD.md, section 4)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvpop_lightning.policy.budget import Budget
from kvpop_lightning.policy.documents import document_layout
from kvpop_lightning.policy.order_statistics import kth_best_of_prefixes, running_kth_best


class Decisions(NamedTuple):
    """One decision per query position i at which more than `topk` tokens compete; elsewhere `valid` is False.

    Invalid entries hold index 0, keep False and margin 0, so they may be gathered with safely.
    """

    newcomer: Tensor
    """int64 [B, 1, T]: row index of the token that leaves the window at query i (`i - w` without padding)."""
    boundary: Tensor
    """int64 [B, H, T]: row index of the token it is compared with; always an older one."""
    keep: Tensor
    """bool [B, H, T]: the newcomer is among the `topk` best."""
    valid: Tensor
    """bool [B, H, T]."""
    margin: Tensor
    """[B, H, T], dtype of the priorities, nats: newcomer less boundary token; >= 0 if and only if keep."""


def teacher_decisions(
    priority: Tensor,
    budget: Budget,
    *,
    document_ids: Tensor | None = None,
    valid: Tensor | None = None,
    boundary: str = "cutoff",
    backend: str = "auto",
) -> Decisions:
    """Keep or drop, and against whom, at every query (METHOD.md, section 4; no gradient).

    Args:
        priority: [B, H, T], the teacher's static priorities (the target with the student's decay), any number
            of heads.
        budget: sinks, window and long-range slots, per document.
        document_ids: int64 [B, T], -1 = padding; None = one document.
        valid: bool, broadcastable to [B, H, T], tokens that have a target; None = all. (Every token that ever
            competes has one, so this changes nothing for `future_attention_target`'s own mask.)
        boundary: `cutoff`: the topk-th best of E_i, or the next one if that is the newcomer itself;
            `displaced`: the topk-th best of E_{i-1}, the token that the newcomer has to beat in the cache.
        backend: of `running_kth_best`: `auto`, `triton`, `parallel` or `reference`.

    Raises:
        ValueError: wrong shapes, an unknown boundary or backend.
    """
    if priority.dim() != 3:
        raise ValueError(f"priority must be [B, H, T], got shape {tuple(priority.shape)}")
    if boundary not in ("cutoff", "displaced"):
        raise ValueError(f"loss.boundary must be cutoff or displaced, got {boundary!r}")
    batch, _, length = priority.shape
    layout = document_layout(document_ids, batch=batch, length=length, device=priority.device)
    priority = priority.detach()
    if backend == "auto":
        best = kth_best_of_prefixes(priority, budget.topk, budget.sink, layout)
    else:
        best = running_kth_best(
            priority, budget.topk, sink=budget.sink, document_ids=document_ids, backend=backend
        )
    # E_i ends with the newcomer, E_{i-1} with the token before it.
    enough = layout.position - budget.window - budget.sink + 1 > budget.topk
    enough = (enough & layout.real).unsqueeze(1)
    newcomer = torch.where(enough, layout.earlier(budget.window).unsqueeze(1), 0)
    before = torch.where(enough, layout.earlier(budget.window + 1).unsqueeze(1), 0)
    displaced = best.gather(-1, before.expand_as(best)).clamp(min=0)
    p_newcomer = priority.gather(-1, newcomer.expand_as(best))
    keep = (p_newcomer >= priority.gather(-1, displaced)) & enough  # the newcomer wins a tie
    rival = displaced
    if boundary == "cutoff":
        cutoff = best.gather(-1, newcomer.expand_as(best)).clamp(min=0)
        # The newcomer pushed the old topk-th best down one place: where it is the topk-th itself, that one is
        # the next.
        rival = torch.where(cutoff == newcomer, displaced, cutoff)
    rival = torch.where(enough, rival, 0)
    p_rival = priority.gather(-1, rival)
    decided = enough.expand_as(best)
    if valid is not None:
        known = valid.expand_as(best)
        decided = decided & known.gather(-1, newcomer.expand_as(best)) & known.gather(-1, rival)
        rival, keep = torch.where(decided, rival, 0), keep & decided
    # Equal infinities differ by nothing, not by NaN.
    margin = torch.where(decided & (p_newcomer != p_rival), p_newcomer - p_rival, 0.0)
    return Decisions(newcomer, rival, keep, decided, margin)
