"""From a scorer's output to a priority that never changes (METHOD.md, section 2).

`score_eff(i, j) = r_j + (floor(i / delta) - floor(j / delta)) log(gamma)`: the query's part is the same for
every key, so ranking at any query is ranking by `p_j = r_j - floor(j / delta) log(gamma)`. Priorities are
float64 because the decayed part grows with the position (about 730 nats at 131k tokens) while decisions turn
on thousandths of a nat.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvpop_lightning.policy.documents import position_in_document

Decay = float | Sequence[float] | Tensor


def static_priority(
    score: Tensor, *, decay: Decay, decay_step: int, document_ids: Tensor | None = None
) -> Tensor:
    """Priority of every token, float64 [B, H, T], differentiable in `score`.

    Args:
        score: [B, H, T], log-mass units (nats).
        decay: gamma in (0, 1]; one number, or one per head (any shape with H elements, such as [layers,
            heads] when the heads of all layers are stacked). 1 = no recency bias.
        decay_step: delta, tokens per decay step (>= 1).
        document_ids: int64 [B, T], -1 = padding (its priority is its score and means nothing); None = one
            document.

    Raises:
        ValueError: decay outside (0, 1], as many decays as neither 1 nor H, or decay_step below 1.
    """
    batch, _, length = score.shape
    position = position_in_document(document_ids, batch=batch, length=length, device=score.device)
    return priority_at(score, position, decay=decay, decay_step=decay_step)


def priority_at(score: Tensor, position: Tensor, *, decay: Decay, decay_step: int) -> Tensor:
    """`static_priority` for tokens whose place in the document is known: the cache scores them one by one.

    Args:
        score: [B, H, T].
        position: int64 [B, T], or [B, H, T] where the heads hold different tokens.
        decay, decay_step: as for `static_priority`.

    Returns:
        float64 [B, H, T].
    """
    if decay_step < 1:
        raise ValueError(f"decay_step must be at least 1 token, got {decay_step}")
    log_decay = _log_decay(decay, heads=score.shape[1], device=score.device)
    steps = torch.div(position, decay_step, rounding_mode="floor")
    if steps.dim() == score.dim() - 1:
        steps = steps.unsqueeze(1)
    return score.to(torch.float64) - steps.to(torch.float64) * log_decay


def _log_decay(decay: Decay, *, heads: int, device: torch.device) -> Tensor:
    """log(gamma), float64 [1, H or 1, 1], checked where that does not make the device wait."""
    gamma = torch.as_tensor(decay, dtype=torch.float64).reshape(-1)
    if gamma.numel() not in (1, heads):
        raise ValueError(f"decay must be one number or one per head ({heads}), got {gamma.numel()} of them")
    if gamma.device.type == "cpu" and not bool(((gamma > 0) & (gamma <= 1)).all()):
        raise ValueError(f"decay must lie in (0, 1] (1 = no decay), got {gamma.tolist()}")
    return gamma.to(device).log().view(1, -1, 1)
