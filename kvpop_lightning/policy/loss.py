"""What trains the scorers: the boundary loss and the regression anchor (METHOD.md, section 4).

Each loss is returned as sums and counts per row and head, so that the caller can take the mean over
everything that one optimiser step sees: all micro-batches, all processes. Every head of every layer has the
same number of decisions, so that mean is also the mean over layers of the layers' means.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from kvpop_lightning.policy.decisions import Decisions
from kvpop_lightning.policy.documents import document_layout
from kvpop_lightning.policy.priority import Decay, static_priority

_BALANCE_RANGE = (0.2, 5.0)


class LossParts(NamedTuple):
    """Sums and counts of a loss, per row and head."""

    total: Tensor
    """[B, H], differentiable, in the dtype of the scores."""
    count: Tensor  # type: ignore[assignment]  # hides tuple.count, which nobody needs here
    """int64 [B, H]."""

    def mean(self) -> Tensor:
        """Mean over all that was counted here; 0 if nothing was."""
        return self.total.sum() / self.count.sum().clamp(min=1)


def student_score(
    score: Tensor, *, margin: str, decay: Decay, decay_step: int, document_ids: Tensor | None = None
) -> Tensor:
    """What the boundary loss compares: `loss.margin` = `effective` (priorities, float64) or `raw` (scores as
    they are).

    score: [B, H, T]; the rest as for `static_priority`. Raises ValueError for another margin.
    """
    if margin == "raw":
        return score
    if margin == "effective":
        return static_priority(score, decay=decay, decay_step=decay_step, document_ids=document_ids)
    raise ValueError(f"distill.margin must be effective or raw, got {margin!r}")


def boundary_loss(
    score: Tensor,
    decisions: Decisions,
    *,
    temperature: float = 1.0,
    weighting: str = "none",
    margin_scale: float = 1.0,
    query_mask: Tensor | None = None,
) -> LossParts:
    """`omega_i softplus(-y_i (q_t - q_b) / tau)` summed over the valid decisions.

    Args:
        score: [B, H, T], the student's scores or priorities (`student_score`); sets the dtype of the loss.
        decisions: the teacher's, of the same heads.
        temperature: tau > 0, nats.
        weighting: `none`, or `margin_balance`: min(1, |teacher margin| / margin_scale) times the keep / drop
            balance n / (2 n_keep), n / (2 n_drop) clamped to [0.2, 5], normalised to mean 1. Balance and mean
            are those of one head in one row, so that the loss does not depend on which rows share a
            micro-batch.
        margin_scale: nats at which a decision counts fully (> 0).
        query_mask: bool, broadcastable to [B, 1, T] (or [B, T]): positions to use (`sample_queries`); None =
            all.

    Raises:
        ValueError: temperature or margin_scale not positive, unknown weighting.
    """
    if temperature <= 0:
        raise ValueError(f"distill.temperature must be positive, got {temperature}")
    valid = _masked(decisions.valid, query_mask)
    difference = torch.where(valid, _student_margin(score, decisions), 0.0)
    loss = -F.logsigmoid(torch.where(decisions.keep, difference, -difference) / temperature)
    if weighting == "margin_balance":
        loss = loss * _margin_balance(decisions, valid, margin_scale).to(loss.dtype)
    elif weighting != "none":
        raise ValueError(f"distill.weighting must be none or margin_balance, got {weighting!r}")
    return LossParts(torch.where(valid, loss, 0.0).sum(-1), valid.sum(-1))


def boundary_accuracy(score: Tensor, decisions: Decisions, *, query_mask: Tensor | None = None) -> LossParts:
    """How many of the teacher's decisions `score` [B, H, T] would repeat (the newcomer wins a tie)."""
    valid = _masked(decisions.valid, query_mask)
    with torch.no_grad():
        right = ((_student_margin(score, decisions) >= 0) == decisions.keep) & valid
    return LossParts(right.sum(-1).to(torch.float32), valid.sum(-1))


def regression_loss(
    score: Tensor,
    target: Tensor,
    valid: Tensor,
    *,
    sink: int,
    document_ids: Tensor | None = None,
    offset: float = 8.0,
) -> LossParts:
    """`smooth_l1(r_j - c, u_j)` summed over the valid tokens that are not sinks: keeps raw scores in nats.

    Args:
        score: [B, H, T], raw scores r.
        target, valid: [B, H, T], from `future_attention_target`.
        sink: first tokens of every document, which are never scored against anything (0 if `valid` leaves
            them out).
        document_ids: int64 [B, T], -1 = padding; None = one document.
        offset: c, nats.
    """
    batch, _, length = score.shape
    layout = document_layout(document_ids, batch=batch, length=length, device=score.device)
    use = valid & layout.competing(sink).unsqueeze(1)
    target = target.detach().to(score.dtype)
    error = torch.where(use, score - offset - target, 0.0)
    loss = F.smooth_l1_loss(error, torch.zeros_like(error), reduction="none")
    return LossParts(loss.sum(-1), use.sum(-1))


def sample_queries(valid: Tensor, fraction: float, *, generator: Generator | None = None) -> Tensor:
    """A random subset of the query positions that carry a decision, the same for all heads of a row.

    Args:
        valid: bool [B, H, T] (`decisions.valid`), or [B, T].
        fraction: share to draw, in (0, 1]; per row the count is rounded up.
        generator: source of randomness; a CPU generator draws the same positions whatever the device.

    Returns:
        bool [B, 1, T].
    """
    if not 0.0 < fraction <= 1.0:
        raise ValueError(f"distill.query_fraction must lie in (0, 1], got {fraction}")
    candidates = valid.any(1, keepdim=True) if valid.dim() == 3 else valid.unsqueeze(1)
    if fraction == 1.0:
        return candidates
    device = generator.device if generator is not None else candidates.device
    draw = torch.rand(candidates.shape, generator=generator, device=device).to(candidates.device)
    place = draw.masked_fill(~candidates, 2.0).argsort(-1).argsort(-1)
    wanted = (candidates.sum(-1, keepdim=True) * fraction).ceil()
    return candidates & (place < wanted)


def _student_margin(score: Tensor, decisions: Decisions) -> Tensor:
    newcomer = decisions.newcomer.expand_as(decisions.boundary)
    return score.gather(-1, newcomer) - score.gather(-1, decisions.boundary)


def _masked(valid: Tensor, query_mask: Tensor | None) -> Tensor:
    if query_mask is None:
        return valid
    return valid & (query_mask.unsqueeze(1) if query_mask.dim() == 2 else query_mask)


def _margin_balance(decisions: Decisions, valid: Tensor, margin_scale: float) -> Tensor:
    """Weights omega, [B, H, T], mean 1 over the valid decisions of each row and head (all 0 if all margins
    are 0)."""
    if margin_scale <= 0:
        raise ValueError(f"distill.margin_scale must be positive, got {margin_scale}")
    certainty = (decisions.margin.abs() / margin_scale).clamp(max=1.0)
    count = valid.sum(-1, keepdim=True).to(certainty.dtype)
    kept = (valid & decisions.keep).sum(-1, keepdim=True).to(certainty.dtype)
    low, high = _BALANCE_RANGE
    # A class without members divides by zero; its weight is clamped and never used.
    keep_weight = (count / (2 * kept)).nan_to_num(nan=1.0).clamp(low, high)
    drop_weight = (count / (2 * (count - kept))).nan_to_num(nan=1.0).clamp(low, high)
    weight = certainty * torch.where(decisions.keep, keep_weight, drop_weight) * valid
    mean = weight.sum(-1, keepdim=True) / count.clamp(min=1)
    return weight / mean.clamp(min=torch.finfo(weight.dtype).tiny)
