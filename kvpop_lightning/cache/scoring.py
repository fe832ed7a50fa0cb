"""Scores inside the cache; a delayed scorer reads a token `delay` tokens after absorbing it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvpop_lightning.cache.layer import BoundedLayer
from kvpop_lightning.cache.span import Span
from kvpop_lightning.policy.scorers import Tokens


def priorities(policy: Any, layer_index: int, score: Tensor, position: Tensor) -> Tensor:
    """float64 priorities of score [B, H, N] at position [B, H, N]."""
    return policy.priority(layer_index, score, position)


def extend_state(layer: BoundedLayer, new: Tokens, waiting: Tokens) -> Tensor:
    """Absorbs `new` into the scorer state, in place; scores [B, H, C] of the tokens `delay` before."""
    score, state = layer.scorer.extend(layer.state, new, waiting)
    for name, tensor in layer.state.items():
        tensor.copy_(state[name])
    return score.to(layer.score.dtype)


def score_tokens(
    layer: BoundedLayer,
    span: Span,
    key: Tensor,
    value: Tensor,
    hidden: Tensor | None,
    ring_key: Tensor,
    ring_value: Tensor,
    ring_hidden: Tensor | None,
    ring_score: Tensor,
) -> Tensor:
    """Scores of window + stretch in order of position, [B, H, w + C], as far as they can be known.

    All arguments are in order of position; `ring_score` [B, H, w] holds what was scored before. The tokens
    that leave the window during the stretch always have their score, since the delay is at most the window.
    """
    window, length, delay = layer.budget.window, span.length, layer.scorer.delay
    reads_hidden = layer.scorer.needs_hidden
    new = Tokens(key, value, hidden if reads_hidden else None, span.position, span.valid)
    old = slice(window - delay, window)
    old_position = span.held_position[:, old]
    waiting = Tokens(
        ring_key[:, :, old],
        ring_value[:, :, old],
        ring_hidden[:, old]
        if ring_hidden is not None
        else (hidden[:, :0] if reads_hidden and hidden is not None else None),
        old_position.clamp(min=0),
        old_position >= 0,
    )
    score = extend_state(layer, new, waiting)
    held = torch.cat([ring_score, ring_score.new_zeros(*ring_score.shape[:2], length)], dim=2)
    read = slice(window - delay, window - delay + length)
    known = (span.valid & (span.held_position[:, read] >= 0))[:, None]
    held[:, :, read] = torch.where(known, score, held[:, :, read])
    return held
