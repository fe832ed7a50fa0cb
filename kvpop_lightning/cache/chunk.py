"""A stretch of tokens at once: each query sees what it would see token by token (METHOD.md section 6).

The candidates are the sinks, the window ring, the long-range slots and the stretch itself. Which of them
each query sees follows from one call of the eviction-time routine over the competitors in order of
position: the residents of the long-range slots, then the tokens that leave the window during the stretch,
the c-th of them at the c-th query.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvpop_lightning.cache.attention import grouped_attention
from kvpop_lightning.cache.layer import BoundedLayer
from kvpop_lightning.cache.scoring import priorities, score_tokens
from kvpop_lightning.cache.span import Span, put, take
from kvpop_lightning.policy.budget import NEVER, Budget
from kvpop_lightning.policy.eviction import eviction_time


class Contest(NamedTuple):
    """Outcome of the competition during a stretch of C tokens; times count queries of the stretch from 0."""

    resident_out: Tensor
    """int64 [B, H, k], by slot: first query that no longer sees the resident; NEVER = none; 0 = empty."""
    entrant_out: Tensor
    """int64 [B, H, C]: the same for the tokens that leave the window; sinks: NEVER; no such token: 0."""
    competes: Tensor
    """bool [B, 1, C]: a real token that is no sink leaves the window at query c."""
    is_sink: Tensor
    """bool [B, 1, C]: a sink leaves the window at query c."""


def attend_chunk(
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
    """Attention of a stretch and the layer's update; tensors compacted, [B, H, C, D] and [B, C, Hid].

    Returns:
        [B, Hq, C, D]; places past a row's real tokens hold meaningless finite numbers.
    """
    assert layer.keys is not None
    assert layer.values is not None
    budget = layer.budget
    ring_key, ring_value = take(layer.keys, span.ring_slot), take(layer.values, span.ring_slot)
    ring_hidden = None if layer.hidden is None else take(layer.hidden, span.ring_slot)
    ring_score = layer.waiting_score.gather(2, span.ring_slot[:, None].expand_as(layer.waiting_score))
    held_score = score_tokens(layer, span, key, value, hidden, ring_key, ring_value, ring_hidden, ring_score)

    contest = _compete(layer, layer_index, policy, span, held_score[:, :, : span.length])
    visible = _visibility(span, contest, budget)
    out = grouped_attention(query, [layer.keys, key], [layer.values, value], visible, scaling)

    place = _long_range_places(layer, span, contest)
    _record(layer, span, contest)
    _store(
        layer,
        span,
        contest,
        place,
        held_score,
        torch.cat([ring_key, key], 2),
        torch.cat([ring_value, value], 2),
    )
    if layer.hidden is not None:
        assert ring_hidden is not None
        assert hidden is not None
        moved = take(torch.cat([ring_hidden, hidden], 1), span.last_ring)
        put(layer.hidden, (span.seen[:, None] + span.last_ring) % budget.window, moved)
    return out


def _compete(
    layer: BoundedLayer, layer_index: int, policy: object, span: Span, entrant_score: Tensor
) -> Contest:
    """Who of the residents and the entrants (scores [B, H, C]) sees which query out."""
    budget = layer.budget
    batch, heads, topk = layer.score.shape
    length = span.length
    position = span.held_position[:, None, :length]  # [B, 1, C] of the tokens that leave the window
    leaves = (position >= 0) & span.valid[:, None]
    is_sink = leaves & (position < budget.sink)
    competes = leaves & ~is_sink
    filled = (span.left_window - budget.sink).clamp(0, topk)[:, None, None]
    slot_filled = torch.arange(topk, device=filled.device) < filled  # [B, 1, k]

    # Residents by position, empty slots first: among equals the routine lets the later one win.
    resident_position = layer.position.masked_fill(~slot_filled, -1)
    order = resident_position.argsort(dim=-1)
    resident_priority = priorities(policy, layer_index, layer.score, layer.position)
    resident_priority = resident_priority.masked_fill(~slot_filled, -torch.inf).gather(-1, order)
    entrant_priority = priorities(policy, layer_index, entrant_score, position.expand_as(entrant_score))
    entrant_priority = entrant_priority.masked_fill(~competes, -torch.inf)
    # One competitor too many at the end, so that a loss at the last query still has a time inside the row.
    last = entrant_priority.new_full((batch, heads, 1), -torch.inf)
    contest = torch.cat([resident_priority, entrant_priority, last], dim=-1)
    # Window 1: competitor number topk + c arrives at "query" topk + c + 1, which is query c of the stretch.
    out = eviction_time(contest, Budget(sink=0, window=1, topk=topk))
    out = torch.where(out == NEVER, NEVER, out - 1 - topk)
    resident_out = torch.empty_like(layer.position).scatter_(-1, order, out[..., :topk])
    resident_out = resident_out.masked_fill(~slot_filled, 0)
    entrant_out = out[..., topk : topk + length].masked_fill(~competes, NEVER).masked_fill(position < 0, 0)
    return Contest(resident_out, entrant_out, competes, is_sink)


def _visibility(span: Span, contest: Contest, budget: Budget) -> Tensor:
    """bool [B, H, C, total + C]: which slots (as before the stretch) and new tokens each query sees."""
    _, heads, length = contest.entrant_out.shape
    device = contest.entrant_out.device
    exists = (span.held_position >= 0)[:, None].expand(-1, heads, -1)
    held_out = torch.where(exists, NEVER, 0)  # [B, H, w + C]: window then stretch, by position
    held_out[..., :length] = contest.entrant_out
    ring_out = torch.empty_like(held_out[..., : budget.window])
    ring_out.scatter_(-1, span.ring_slot[:, None].expand_as(ring_out), held_out[..., : budget.window])
    sink_exists = torch.arange(budget.sink, device=device) < span.left_window[:, None]
    sink_out = torch.where(sink_exists, NEVER, 0)[:, None].expand(-1, heads, -1)
    leaves_at = torch.cat([ring_out, sink_out, contest.resident_out, held_out[..., budget.window :]], dim=-1)
    query = torch.arange(length, device=device)[:, None]
    visible = query < leaves_at[:, :, None]
    visible[..., budget.total :] &= query >= torch.arange(length, device=device)
    return visible


def _long_range_places(layer: BoundedLayer, span: Span, contest: Contest) -> Tensor:
    """int64 [B, H, C]: long-range slot of each entrant that stays, or -1; free slots go in order."""
    stays = contest.competes & (contest.entrant_out == NEVER)
    free = contest.resident_out != NEVER
    free_slots = torch.argsort((~free).to(torch.int8), dim=-1, stable=True)
    turn = (stays.long().cumsum(-1) - 1).clamp(0, layer.budget.topk - 1)
    return torch.where(stays, free_slots.gather(-1, turn), -1)


def _record(layer: BoundedLayer, span: Span, contest: Contest) -> None:
    """Notes every eviction of the stretch, by position in the text."""
    start = span.seen[:, None, None]
    # A resident_out of 0 is an empty slot or a resident that lost at the first query: the count tells.
    topk = layer.budget.topk
    filled = (span.left_window - layer.budget.sink).clamp(0, topk)[:, None, None]
    slot_filled = torch.arange(topk, device=filled.device) < filled
    lost = slot_filled & (contest.resident_out != NEVER)
    layer.note(layer.position, start + contest.resident_out, lost, span.length)
    dropped = contest.competes & (contest.entrant_out != NEVER)
    position = span.held_position[:, None, : span.length].expand_as(dropped)
    layer.note(position, start + contest.entrant_out, dropped, span.length)


def _store(
    layer: BoundedLayer,
    span: Span,
    contest: Contest,
    place: Tensor,
    held_score: Tensor,
    held_key: Tensor,
    held_value: Tensor,
) -> None:
    """Moves entrants that stay into slots, then fills the ring; `held_*`: window + stretch by position."""
    assert layer.keys is not None
    assert layer.values is not None
    budget, length, window = layer.budget, span.length, layer.budget.window
    position = span.held_position[:, None, :length]
    # What does not move is replaced by the newest token of the window, which writes its own slot once more.
    idle = ((span.seen - 1) % window)[:, None, None]
    slot = torch.where(place >= 0, window + budget.sink + place, idle)
    slot = torch.where(contest.is_sink, window + position, slot)
    moves = (place >= 0) | contest.is_sink
    ring_index = span.last_ring
    ring_slot = (span.seen[:, None] + ring_index) % window
    for slots, held in ((layer.keys, held_key), (layer.values, held_value)):
        moved = torch.where(moves[..., None], held[:, :, :length], held[:, :, window - 1 : window])
        put(slots, slot, moved)
        put(slots, ring_slot, take(held, ring_index))

    # Scores and positions of the entrants that stay; a column more takes what goes nowhere.
    target = torch.where(place >= 0, place, budget.topk)
    for kept, new in ((layer.score, held_score[:, :, :length]), (layer.position, position.expand_as(place))):
        wide = torch.cat([kept, kept[..., :1]], dim=-1).scatter_(-1, target, new.to(kept.dtype))
        kept.copy_(wide[..., : budget.topk])
    ring = (
        span.count[:, None] + torch.arange(window, device=place.device)[None]
    )  # the window after the stretch
    heads = held_score.shape[1]
    waiting = held_score.gather(2, ring[:, None].expand(-1, heads, -1))
    layer.waiting_score.scatter_(
        2, ((span.seen[:, None] + ring) % window)[:, None].expand(-1, heads, -1), waiting
    )
