"""Fast training of the scorers on cached features: all layers as one scorer, no model in sight (METHOD.md,
section 4).

Same inputs, targets, decisions and loss as `student.StudentModule` with a frozen base; only the dense forward
is not repeated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from kvpop_lightning.config.schema import DistillConfig, TrainerConfig
from kvpop_lightning.policy import Decisions
from kvpop_lightning.policy.scorers import call_stacked
from kvpop_lightning.training.feature_store import Features
from kvpop_lightning.training.features import FeatureCache
from kvpop_lightning.training.forward import Batch, collate, to_device
from kvpop_lightning.training.module import Metrics, TrainingModule
from kvpop_lightning.training.retention_loss import RetentionCounts, RetentionLoss, rank_correlation


class FeatureRows(Dataset[Features]):
    """Cached features of some rows as a data set; item `i` is `rows[i]` with its number under `row`."""

    def __init__(self, cache: FeatureCache, rows: Sequence[int]) -> None:
        self.cache, self.rows = cache, list(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Features:
        row = self.rows[index]
        return {**self.cache.get(row), "row": torch.tensor(row)}


class ScorerModule(TrainingModule):
    """Trains the scorers of a policy on batches of cached features.

    A batch holds `key`, `value` [B, L, Hkv, T, D] (any float dtype), `target` float32 and `valid` bool [B, L,
    Hkv, T], `hidden` [B, L, T, Hid] if the scorers read it, `position`, `document_ids` [B, T], and `row` [B].
    The layers' parameters are concatenated along the head axis in every step, so that a step is a few large
    operations; gradients flow back to the layers' own.

    Args:
        policy: `model.kvpop`; trained in place. The module holds nothing else, so neither do its checkpoints.
        distill, config: losses and optimisation.
        seed: of the drawn query positions.
        decision_cache_mb: memory for the teacher's decisions, which depend on the row only; beyond it they
            are computed anew.
    """

    def __init__(
        self,
        policy: Any,
        distill: DistillConfig,
        config: TrainerConfig,
        *,
        seed: int = 0,
        decision_cache_mb: float = 512.0,
    ) -> None:
        super().__init__(config)
        self.policy = policy
        self.policy.requires_grad_(True)
        self.retention = RetentionLoss(distill, policy.budget, policy.decay_step, seed)
        self._decisions: dict[int, Decisions] = {}
        self._decision_bytes_left = decision_cache_mb * 1e6

    def scorer_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        return self.policy.named_parameters()

    def counts(self, batch: Batch) -> Tensor:
        return torch.stack(self.retention.counts(batch["document_ids"], self._query_mask(batch)))

    def scores(self, batch: Batch) -> Tensor:
        """Scores of all layers, float32 [B, L * Hkv, T]."""
        scorers = list(self.policy.scorers)
        parameters = [dict(scorer.named_parameters()) for scorer in scorers]
        buffers = [dict(scorer.named_buffers()) for scorer in scorers]
        stacked = {n: torch.cat([layer[n] for layer in parameters]) for n in parameters[0]}
        stacked |= {n: torch.cat([layer[n] for layer in buffers]) for n in buffers[0]}
        return call_stacked(
            scorers[0],
            stacked,
            batch["key"].float().flatten(1, 2),
            batch["value"].float().flatten(1, 2),
            batch["hidden"].float() if self.policy.needs_hidden else None,
            position=batch["position"],
            document_ids=batch["document_ids"],
        )

    def share(self, batch: Batch, totals: Tensor) -> tuple[Tensor, Metrics]:
        counts = RetentionCounts(*totals.unbind())
        target, valid = batch["target"].flatten(1, 2), batch["valid"].flatten(1, 2)
        decay = self.policy.decay.flatten()
        score = self.scores(batch)
        sums = self.retention.sums(
            score,
            target,
            valid,
            self.decisions(batch),
            decay,
            batch["document_ids"],
            self._query_mask(batch),
        )
        heads = decay.numel()
        decisions_total = heads * counts.decisions.clamp(min=1)
        metrics = {
            "boundary": sums.boundary / decisions_total,
            "regression": sums.regression / (heads * counts.tokens.clamp(min=1)),
            "boundary_accuracy": sums.right / decisions_total,
        }
        if self.logs_this_step:
            pieces = self.config.accumulate * self.trainer.world_size
            metrics["rank_correlation"] = rank_correlation(score, target, valid).mean() / pieces
        return self.retention.loss(sums, counts, heads), metrics

    @torch.no_grad()
    def summary(self, rows: FeatureRows) -> dict[str, float]:
        """Loss, boundary accuracy and rank correlation over all decisions of `rows`, with the weights as they
        are.
        """
        names = ("boundary", "regression", "boundary_accuracy", "rank_correlation")
        total = dict.fromkeys(names, 0.0)
        counted = dict.fromkeys(names, 0)
        device, decay = self.policy.decay.device, self.policy.decay.flatten()
        for index in range(len(rows)):
            batch = to_device(collate([rows[index]]), device)
            document_ids, target, valid = (
                batch["document_ids"],
                batch["target"].flatten(1, 2),
                batch["valid"].flatten(1, 2),
            )
            whole = self.retention.all_queries(document_ids)
            score = self.scores(batch)
            sums = self.retention.sums(
                score, target, valid, self.decisions(batch), decay, document_ids, whole
            )
            counts = self.retention.counts(document_ids, whole)
            decisions, tokens = int(counts.decisions) * decay.numel(), int(counts.tokens) * decay.numel()
            found = (*sums, rank_correlation(score, target, valid).sum())
            for name, value, count in zip(
                names, found, (decisions, tokens, decisions, decay.numel()), strict=True
            ):
                total[name] += float(value)
                counted[name] += count
        return {f"final_{name}": total[name] / max(counted[name], 1) for name in names}

    def decisions(self, batch: Batch) -> Decisions:
        """The teacher's decisions of a batch's rows, computed at a row's first visit."""
        found = []
        for index, row in enumerate(batch["row"].tolist()):
            one = self._decisions.get(row)
            if one is None:
                piece = slice(index, index + 1)
                one = _compact(
                    self.retention.decide(
                        batch["target"][piece].flatten(1, 2),
                        batch["valid"][piece].flatten(1, 2),
                        self.policy.decay.flatten(),
                        batch["document_ids"][piece],
                    )
                )
                size = sum(tensor.numel() * tensor.element_size() for tensor in one)
                if size <= self._decision_bytes_left:
                    self._decision_bytes_left -= size
                    self._decisions[row] = one
            found.append(one)
        joined = found[0] if len(found) == 1 else Decisions(*map(torch.cat, zip(*found, strict=True)))
        return joined._replace(boundary=joined.boundary.long())

    def _query_mask(self, batch: Batch) -> Tensor:
        return self.retention.query_mask(batch["document_ids"], batch["row"], self.trainer.global_step)


def _compact(decisions: Decisions) -> Decisions:
    """Row indices in 32 bits, margins in float32 (they only weigh the loss): half the memory. Applied at the
    first visit too, so that a resumed run, which remembers nothing, repeats the numbers."""
    return decisions._replace(boundary=decisions.boundary.int(), margin=decisions.margin.float())
