"""Whole rows under a stepwise rule: T steps one after the other, batched over rows, documents and heads.

Cost O(T * B) per head; the same functions decide as in the bounded cache (`stepwise.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpop_lightning.policy.budget import NEVER, Budget
from kvpop_lightning.policy.documents import document_layout
from kvpop_lightning.policy.scorers.base import full_precision
from kvpop_lightning.policy.stepwise import (
    EMPTY,
    StepwiseRule,
    cut_prompt,
    look,
    make_room,
    new_held,
    place,
    shrunk,
)


@torch.no_grad()
def eviction_times(
    rule: StepwiseRule,
    budget: Budget,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    document_ids: Tensor | None,
    scale: float,
) -> Tensor:
    """Eviction times of whole rows under the rule, int64 [B, Hkv, T], row indices; NEVER = not evicted.

    Each packed document runs as a text of its own. Sequential over the tokens of the longest document.

    Args:
        query: [B, Hq, T, D] after RoPE; key, value: [B, Hkv, T, D].
        document_ids: int64 [B, T], -1 = padding; None = one document.
        scale: factor on the dot products.
    """
    rule.check(budget)
    heads = key.shape[1]
    row, index, count = _texts(document_ids, query.shape[0], query.shape[2], key.device)
    texts, length = index.shape
    prompt = rule.prompt_tokens(budget)
    slots = min(max(budget.total, prompt), max(length, 1))
    whole = document_ids is None
    held = new_held(rule, slots, key[row, :, :1], value[row, :, :1])
    out = torch.full((texts, heads, length + 1), NEVER, dtype=torch.int64, device=key.device)
    with full_precision(key.device):
        for i in range(length):
            at = index[:, i]
            q, k, v = (x[:, :, i] if whole else x[row, :, at] for x in (query, key, value))
            seen = torch.full_like(count, i)
            if prompt and i == prompt:
                lost = cut_prompt(rule, held, budget, None).expand(-1, heads, -1)
                # Texts that end before it lose nothing.
                late = (i < count)[:, None, None] & (lost != EMPTY)
                out.scatter_(2, torch.where(late, lost, length), at[:, None, None].expand_as(lost))
                held, slots = shrunk(held, budget.total), 0
            if i < slots:
                slot = torch.full_like(held.position[..., 0], i)
            else:
                slot, lost = make_room(rule, held, budget, seen)
                time = at[:, None, None].expand(-1, heads, 1)
                # What did not happen goes to column `length`, which nobody reads.
                happened = (i < count)[:, None] & (lost != EMPTY)
                place_of = torch.where(happened, lost, length).expand(-1, heads)[..., None]
                out.scatter_(2, place_of, time)
            place(held, slot, k, v, seen, None)
            look(rule, held, q, seen, scale, None)
    if whole:
        return out[..., :length]
    result = torch.full((key.shape[0], key.shape[2], heads), NEVER, dtype=torch.int64, device=key.device)
    inside = torch.arange(length, device=key.device) < count[:, None]
    result[row[:, None].expand_as(index)[inside], index[inside]] = out[..., :length].transpose(1, 2)[inside]
    return result.transpose(1, 2).contiguous()


def _texts(
    document_ids: Tensor | None, batch: int, length: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """The documents of all rows as texts: row [N], row index of each token [N, L], length [N]."""
    if document_ids is None:
        index = torch.arange(length, device=device).expand(batch, -1)
        return torch.arange(batch, device=device), index, torch.full((batch,), length, device=device)
    layout = document_layout(document_ids, batch=batch, length=length, device=device)
    first = layout.real & (layout.position == 0)
    row, start = first.nonzero(as_tuple=True)
    count = layout.length[row, start]
    longest = int(count.max()) if count.numel() else 0
    ordinal = layout.ordinal[row, start][:, None] + torch.arange(longest, device=device)
    index = layout.row_at[row].gather(1, ordinal.clamp(max=max(length - 1, 0)))
    return row, index, count
