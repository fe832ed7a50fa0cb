"""Whole rows under a stepwise rule: T steps one after the other, batched over rows, documents and heads.

The same rules decide as in the bounded cache (`stepwise.py`), but on columns in order of position instead of
slots: a block of R queries works on the keys held before it and its own R, whose logits are one product. Then
a step is a softmax, what the rule notes, and an argmin, whose first minimum is the oldest among equals.
Cost O(T * (B + R)) per head; the logits of one block are held at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpop_lightning.policy.budget import NEVER, Budget
from kvpop_lightning.policy.documents import document_layout
from kvpop_lightning.policy.scorers.base import full_precision
from kvpop_lightning.policy.stepwise import (
    EMPTY,
    Held,
    Moment,
    StepwiseRule,
    cut_prompt,
    new_held,
    shrunk,
)

_BLOCK = 64
"""Most queries of a block."""


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
    block: int = _BLOCK,
) -> Tensor:
    """Eviction times of whole rows under the rule, int64 [B, Hkv, T], row indices; NEVER = not evicted.

    Each packed document runs as a text of its own. Sequential over the tokens of the longest document.

    Args:
        query: [B, Hq, T, D] after RoPE; key, value: [B, Hkv, T, D].
        document_ids: int64 [B, T], -1 = padding; None = one document.
        scale: factor on the dot products.
        block: most queries whose logits exist at once; the result does not depend on it.
    """
    rule.check(budget)
    groups = rule.by_row(query.shape[0])
    if len(groups) > 1 or groups[0][0] is not rule:
        result = torch.empty(key.shape[:3], dtype=torch.int64, device=key.device)
        for one, rows in groups:
            ids = None if document_ids is None else document_ids[rows]
            result[rows] = eviction_times(
                one, budget, query[rows], key[rows], value[rows], document_ids=ids, scale=scale, block=block
            )
        return result
    heads = key.shape[1]
    row, index, count = _texts(document_ids, query.shape[0], query.shape[2], key.device)
    texts, length = index.shape
    prompt = rule.prompt_tokens(budget)
    whole = document_ids is None
    held = new_held(rule, 0, key[row, :, :1], value[row, :, :1])
    # A column more takes what did not happen.
    out = torch.full((texts, heads, length + 1), NEVER, dtype=torch.int64, device=key.device)

    def note(lost: Tensor, time: Tensor, happened: Tensor) -> None:
        where = torch.where(happened, lost, length).expand(-1, heads, -1)
        out.scatter_(2, where, time[:, None].expand_as(where))

    first = 0
    with full_precision(key.device):
        while first < length:
            if prompt and first == prompt:
                lost = cut_prompt(rule, held, budget, None)
                # Texts that end before it lose nothing.
                late = (first < count)[:, None, None] & (lost != EMPTY)
                note(lost, index[:, first : first + 1].expand(-1, lost.shape[2]), late)
                held = shrunk(held, budget.total - 1)
            room = (prompt if first < prompt else budget.total) - held.position.shape[-1]
            last = min(first + min(block, room or block), length)
            at = index[:, first:last]
            if whole:
                q, k, v = (x[:, :, first:last] for x in (query, key, value))
            else:
                q, k, v = (x[row[:, None], :, at].transpose(1, 2) for x in (query, key, value))
            if room:
                held = _grow(rule, held, q, k, v, first, scale)
            else:
                held, lost = _replace(rule, held, budget, q, k, v, first, scale)
                inside = torch.arange(first, last, device=key.device) < count[:, None]
                note(lost, at, inside[:, None])
            first = last
    if whole:
        return out[..., :length]
    result = torch.full((key.shape[0], key.shape[2], heads), NEVER, dtype=torch.int64, device=key.device)
    inside = torch.arange(length, device=key.device) < count[:, None]
    result[row[:, None].expand_as(index)[inside], index[inside]] = out[..., :length].transpose(1, 2)[inside]
    return result.transpose(1, 2).contiguous()


def _widened(held: Held, key: Tensor, value: Tensor) -> Held:
    """`held` with columns for the coming tokens key, value [N, Hkv, R, D], which no query sees yet."""
    coming = key.shape[2]

    def wider(x: Tensor, fill: float) -> Tensor:
        return torch.cat([x, x.new_full((*x.shape[:2], coming), fill)], -1)

    return Held(
        torch.cat([held.keys, key], 2),
        torch.cat([held.values, value], 2),
        wider(held.position, EMPTY),
        {name: wider(tensor, 0.0) for name, tensor in held.notes.items()},
        held.state,
        derived={},
    )


def _logits(held: Held, query: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """query [N, Hq, R, D] by KV head, [N, Hkv, G, R, D]; its logits over all columns, [N, Hkv, G, R, C]."""
    heads, (texts, _, length, dim) = held.keys.shape[1], query.shape
    grouped = query.reshape(texts, heads, -1, length, dim)
    product = (grouped * scale).flatten(2, 3) @ held.keys.transpose(-1, -2)
    logits = product.to(torch.promote_types(query.dtype, torch.float32))
    return grouped, logits.unflatten(2, (-1, length))


def _grow(
    rule: StepwiseRule, held: Held, query: Tensor, key: Tensor, value: Tensor, first: int, scale: float
) -> Held:
    """R tokens come and none goes: their attention is a causal softmax, of which the rule takes note."""
    before = held.position.shape[-1]
    held = _widened(held, key, value)
    grouped, logits = _logits(held, query, scale)
    length = query.shape[2]
    column = torch.arange(before + length, device=key.device)
    probability = torch.softmax(logits.masked_fill(column > column[before:, None], -torch.inf), -1)
    seen = _seen(first, query)
    for r in range(length):
        held.position[..., before + r] = first + r
        moment = Moment(grouped[:, :, :, r], probability[:, :, :, r], seen[r + 1], scale)
        held.notes, held.state = _updated(held, rule.observe(held, moment))
    return held


def _replace(
    rule: StepwiseRule,
    held: Held,
    budget: Budget,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first: int,
    scale: float,
) -> tuple[Held, Tensor]:
    """R tokens come to full slots, and for each one goes; returns who went, positions [N, P, R]."""
    before = held.position.shape[-1]
    held = _widened(held, key, value)
    grouped, logits = _logits(held, query, scale)
    gone = held.position == EMPTY
    # In order of position the protected tokens stand at both ends.
    oldest, newest = rule.protected(budget)
    lost, seen = [], _seen(first, query)
    for r in range(query.shape[2]):
        now = before + r
        free = slice(oldest, now - newest)
        worth = rule.value_of(held, seen[r])[..., free].masked_fill(gone[..., free], torch.inf)
        victim = worth.argmin(-1, keepdim=True) + oldest
        lost.append(held.position.gather(-1, victim))
        held.position.scatter_(-1, victim, EMPTY)
        gone.scatter_(-1, victim, True)
        held.position[..., now] = first + r
        gone[..., now] = False
        masked = logits[:, :, :, r].masked_fill(gone[:, :, None], -torch.inf)
        moment = Moment(grouped[:, :, :, r], torch.softmax(masked, dim=-1), seen[r + 1], scale)
        held.notes, held.state = _updated(held, rule.observe(held, moment))
    return shrunk(held, budget.total), torch.cat(lost, -1)


def _seen(first: int, query: Tensor) -> list[Tensor]:
    """int64 [N] each: positions `first - 1` to that of the last of the queries [N, Hq, R, D]."""
    position = torch.arange(first - 1, first + query.shape[2], device=query.device)
    return list(position[:, None].expand(-1, query.shape[0]).unbind())


def _updated(
    held: Held, seen: tuple[dict[str, Tensor], dict[str, Tensor]]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Notes and state after a query; what a rule does not mention stays."""
    return held.notes | seen[0], held.state | seen[1]


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
