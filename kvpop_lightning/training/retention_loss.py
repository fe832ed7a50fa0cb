"""The scorers' loss on one batch: boundary decisions and the regression anchor (METHOD.md,
section 4).

Used layer by layer on a live model and for all layers at once on cached features; both give the same sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvpop_lightning.config.schema import DistillConfig
from kvpop_lightning.policy import (
    Budget,
    Decisions,
    boundary_accuracy,
    boundary_loss,
    document_layout,
    regression_loss,
    sample_queries,
    static_priority,
    student_score,
    teacher_decisions,
)


class RetentionCounts(NamedTuple):
    """What one KV head's means divide by, int64 scalars; the same for every head of every layer."""

    decisions: Tensor
    """Query positions with more than `topk` competitors that the loss uses."""
    tokens: Tensor
    """Tokens with a target that are not sinks."""


class RetentionSums(NamedTuple):
    """Sums over rows, heads and positions of one call; divide by heads * counts."""

    boundary: Tensor
    """Differentiable scalar, nats."""
    regression: Tensor
    """Differentiable scalar."""
    right: Tensor
    """Decisions that the student's scores repeat."""

    def __add__(self, other: RetentionSums) -> RetentionSums:  # type: ignore[override]
        return RetentionSums(*(a + b for a, b in zip(self, other, strict=True)))


@dataclass(frozen=True)
class RetentionLoss:
    """The loss under one configuration and budget.

    The head axis may hold one layer's KV heads or those of all layers; `decay` then has as many entries.
    """

    config: DistillConfig
    budget: Budget
    decay_step: int
    seed: int = 0

    def query_mask(self, document_ids: Tensor, rows: Tensor, step: int) -> Tensor:
        """Query positions that enter the loss, bool [B, T]: those with a decision, thinned to
        `query_fraction`.

        What is drawn depends on (seed, step, row number) only: not on the batch it shares, the process, or a
        resume.
        """
        decided = self.all_queries(document_ids)
        if self.config.query_fraction >= 1.0:
            return decided
        drawn = []
        for row, number in zip(decided.cpu(), rows.tolist(), strict=True):
            generator = torch.Generator().manual_seed(
                ((self.seed * 1_000_003 + step) * 1_000_003 + number) % 2**63
            )
            drawn.append(sample_queries(row[None], self.config.query_fraction, generator=generator)[0, 0])
        return torch.stack(drawn).to(decided.device)

    def all_queries(self, document_ids: Tensor) -> Tensor:
        """Query positions with a decision, bool [B, T]: more than `topk` tokens compete."""
        layout = document_layout(document_ids, batch=document_ids.shape[0], length=document_ids.shape[1])
        competitors = layout.position - self.budget.window - self.budget.sink + 1
        return (competitors > self.budget.topk) & layout.real

    def counts(self, document_ids: Tensor, query_mask: Tensor) -> RetentionCounts:
        """Counts of a batch, known before any forward."""
        layout = document_layout(document_ids, batch=document_ids.shape[0], length=document_ids.shape[1])
        has_target = layout.position + self.budget.window < layout.length
        return RetentionCounts(query_mask.sum(), (layout.competing(self.budget.sink) & has_target).sum())

    def decide(self, target: Tensor, valid: Tensor, decay: Tensor, document_ids: Tensor) -> Decisions:
        """The teacher's decisions from its target [B, H, T]; they share the student's decay."""
        priority = static_priority(target, decay=decay, decay_step=self.decay_step, document_ids=document_ids)
        return teacher_decisions(
            priority, self.budget, document_ids=document_ids, valid=valid, boundary=self.config.boundary
        )

    def sums(
        self,
        score: Tensor,
        target: Tensor,
        valid: Tensor,
        decisions: Decisions,
        decay: Tensor,
        document_ids: Tensor,
        query_mask: Tensor,
    ) -> RetentionSums:
        """Loss sums of scores [B, H, T] (gradients reach the scores only); arguments of the same heads and
        rows.
        """
        compared = student_score(
            score,
            margin=self.config.margin,
            decay=decay,
            decay_step=self.decay_step,
            document_ids=document_ids,
        )
        boundary = boundary_loss(
            compared,
            decisions,
            temperature=self.config.temperature,
            weighting=self.config.weighting,
            margin_scale=self.config.margin_scale,
            query_mask=query_mask,
        )
        regression = regression_loss(
            score,
            target,
            valid,
            sink=self.budget.sink,
            document_ids=document_ids,
            offset=self.config.regression_offset,
        )
        right = boundary_accuracy(compared.detach(), decisions, query_mask=query_mask)
        return RetentionSums(boundary.total.sum(), regression.total.sum(), right.total.sum())

    def loss(self, sums: RetentionSums, totals: RetentionCounts, heads: int) -> Tensor:
        """`lambda (boundary + mu regression)`: means over all heads and over `totals`, the counts of the
        whole step.
        """
        boundary = sums.boundary / (heads * totals.decisions.clamp(min=1))
        regression = sums.regression / (heads * totals.tokens.clamp(min=1))
        return self.config.retention_weight * (boundary + self.config.regression_weight * regression)


@torch.no_grad()
def rank_correlation(score: Tensor, target: Tensor, valid: Tensor) -> Tensor:
    """Spearman's correlation of score and target over the valid tokens of each row and head, [B, H].

    Ties share no rank (the earlier token ranks lower); rows and heads with fewer than two valid tokens give
    0.
    """

    def centred_ranks(values: Tensor) -> Tensor:
        order = values.double().masked_fill(~valid, float("inf")).argsort(dim=-1, stable=True)
        places = torch.arange(values.shape[-1], dtype=torch.float64, device=values.device).expand_as(order)
        ranks = torch.empty_like(places, memory_format=torch.contiguous_format).scatter_(-1, order, places)
        count = valid.sum(-1, keepdim=True)
        return (ranks - (count - 1) / 2) * valid

    a, b = centred_ranks(score), centred_ranks(target)
    return (a * b).sum(-1) / (a.square().sum(-1) * b.square().sum(-1)).sqrt().clamp(min=1e-12)
