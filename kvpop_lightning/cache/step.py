"""One token per row: the fast path of decoding, batched over rows and heads (METHOD.md section 6)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpop_lightning.cache.attention import grouped_attention
from kvpop_lightning.cache.layer import BoundedLayer
from kvpop_lightning.cache.scoring import extend_state, priorities
from kvpop_lightning.cache.span import Span
from kvpop_lightning.policy.scorers import Tokens

_FAR = torch.iinfo(torch.int64).max


def attend_step(
    layer: BoundedLayer,
    layer_index: int,
    policy: object,
    span: Span,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    hidden: Tensor | None,
    scaling: float,
) -> Tensor:
    """Takes the token `w` back out of the ring, writes the new one there, scores and places the old, attends.

    Args:
        query [B, Hq, 1, D], key and value [B, Hkv, 1, D], hidden [B, 1, Hid] or None; rows without a real
        token (`span.real` False) leave the layer as it was.

    Returns:
        [B, Hq, 1, D].
    """
    assert layer.keys is not None
    assert layer.values is not None
    rows, slot = span.rows, span.slot
    out_key, out_value = layer.keys[rows, :, slot], layer.values[rows, :, slot]  # [B, H, D], copies
    leaves = layer.columns >= layer.budget.window  # no row can have let a token out of its window before that
    out_score = _score(layer, span, key, value, hidden)
    if leaves:
        place = _place(layer, layer_index, policy, span, out_score)
        # A dropped token goes back to its own ring slot, where the new one overwrites it.
        index = place[..., None, None].expand(-1, -1, 1, out_key.shape[-1])
        layer.keys.scatter_(2, index, out_key[:, :, None])
        layer.values.scatter_(2, index, out_value[:, :, None])
    new_key, new_value = key[:, :, 0], value[:, :, 0]
    if span.real is not None:
        real = span.real[:, :, None]
        new_key, new_value = torch.where(real, new_key, out_key), torch.where(real, new_value, out_value)
    layer.keys[rows, :, slot] = new_key
    layer.values[rows, :, slot] = new_value
    if layer.hidden is not None:
        assert hidden is not None
        new_hidden = hidden[:, 0]
        if span.real is not None:
            new_hidden = torch.where(span.real, new_hidden, layer.hidden[rows, slot])
        layer.hidden[rows, slot] = new_hidden
    return grouped_attention(query, [layer.keys], [layer.values], span.step_visible, scaling)


def _score(layer: BoundedLayer, span: Span, key: Tensor, value: Tensor, hidden: Tensor | None) -> Tensor:
    """Absorbs the new token, keeps the score that became known; returns that of the leaving token, [B, H]."""
    assert layer.keys is not None
    assert layer.values is not None
    scorer, rows, delay = layer.scorer, span.rows, layer.scorer.delay
    read_slot = (span.seen - delay) % layer.budget.window
    new = Tokens(key, value, hidden if scorer.needs_hidden else None, span.position, span.valid)
    position = (span.seen - delay)[:, None]
    # A single new token reads only the oldest of the `delay` waiting ones, so that one stands for them all.
    old_hidden = None if hidden is None or not scorer.needs_hidden else hidden
    if layer.hidden is not None:
        old_hidden = layer.hidden[rows, read_slot][:, None]
    waiting = Tokens(
        layer.keys[rows, :, read_slot][:, :, None].expand(-1, -1, delay, -1),
        layer.values[rows, :, read_slot][:, :, None].expand(-1, -1, delay, -1),
        None if old_hidden is None else old_hidden.expand(-1, delay, -1),
        position.clamp(min=0).expand(-1, delay),
        (position >= 0).expand(-1, delay),
    )
    score = extend_state(layer, new, waiting)[:, :, 0]
    known = span.valid & (position >= 0)
    leaving = layer.waiting_score[rows, :, span.slot]
    before = leaving if delay in (0, layer.budget.window) else layer.waiting_score[rows, :, read_slot]
    after = torch.where(known, score, before)
    layer.waiting_score[rows, :, read_slot] = after
    return after if delay == layer.budget.window else leaving


def _place(layer: BoundedLayer, layer_index: int, policy: object, span: Span, score: Tensor) -> Tensor:
    """Slot int64 [B, H] that the leaving token moves to: its own ring slot if dropped or none leaves."""
    budget = layer.budget
    heads = layer.score.shape[1]
    token = (span.seen - budget.window)[:, None]  # [B, 1]: position of the leaving token
    leaves = token >= 0
    if span.real is not None:
        leaves = leaves & span.real
    is_sink = leaves & (token < budget.sink)
    competes = leaves & ~is_sink
    arrival = token - budget.sink
    empty = arrival < budget.topk  # slots fill in order, so the next empty one is known
    token = token.expand(-1, heads)

    resident = priorities(policy, layer_index, layer.score, layer.position)
    newcomer = priorities(policy, layer_index, score[..., None], token[..., None])[..., 0]
    lowest = resident.amin(dim=-1)
    # Among equals the oldest goes; the newcomer, newest of all, wins a tie.
    victim = torch.where(resident == lowest[..., None], layer.position, _FAR).argmin(dim=-1)
    slot = torch.where(empty, arrival.clamp(0, budget.topk - 1), victim)
    enters = competes & (empty | (newcomer >= lowest))

    slot = slot[..., None]
    old_position, old_score = layer.position.gather(2, slot), layer.score.gather(2, slot)
    lost = torch.where(enters, old_position[..., 0], token)
    layer.note(lost[..., None], span.seen[:, None, None], (competes & ~empty).expand(-1, heads)[..., None], 1)
    layer.position.scatter_(2, slot, torch.where(enters[..., None], token[..., None], old_position))
    layer.score.scatter_(2, slot, torch.where(enters[..., None], score[..., None], old_score))

    place = torch.where(enters, budget.window + budget.sink + slot[..., 0], span.slot[:, None])
    return torch.where(is_sink, budget.window + token, place)
