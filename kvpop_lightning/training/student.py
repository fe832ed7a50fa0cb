"""The retrofitted model under training: sparse parallel forward, distillation and retention loss (METHOD.md,
section 4).

The plain form of the training: it runs the model at every step and serves every setting. With a frozen base
`scorers.ScorerModule` trains the same scorers from cached features, with the same loss, in a fraction of the
time.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from kvpop_lightning.config.schema import DistillConfig, TrainerConfig
from kvpop_lightning.errors import UserError
from kvpop_lightning.models import dense, observe
from kvpop_lightning.policy import future_attention_target
from kvpop_lightning.training.forward import Batch, last_hidden, output_head
from kvpop_lightning.training.kl import kl_sum, supervised_positions
from kvpop_lightning.training.module import Metrics, TrainingModule
from kvpop_lightning.training.retention_loss import (
    RetentionCounts,
    RetentionLoss,
    RetentionSums,
    rank_correlation,
)

Targets = dict[int, tuple[Tensor, Tensor]]
"""Per layer: target [B, Hkv, T] and valid."""


class StudentModule(TrainingModule):
    """Trains a retrofitted model's scorers and, with `base = full`, the model itself.

    * `base = frozen`: a step is one dense forward, from which both the scorers' inputs and the target come;
      the KL of the sparse forward is a validation metric.
    * `base = full`: the KL to the dense teacher trains the base through the hard eviction mask, the retention
      loss trains the scorers on detached inputs; neither loss reaches the other's parameters.

    Args:
        model: retrofitted causal language model (`model.kvpop` is its policy).
        distill: losses and target.
        config: optimisation.
        teacher: `base = full`: a retrofitted copy of the untrained model that is run dense; None = a deep
            copy of `model` as it is now. Never part of the module tree, hence of no checkpoint and no
            optimiser.
        seed: of the drawn query positions.

    Raises:
        UserError: a target that the chosen base cannot have.
    """

    def __init__(
        self,
        model: Any,
        distill: DistillConfig,
        config: TrainerConfig,
        *,
        teacher: Any = None,
        seed: int = 0,
    ) -> None:
        super().__init__(config)
        self.distill, self.frozen = distill, config.base == "frozen"
        self.source = distill.target.source or ("teacher" if self.frozen else "student")
        _check_target(distill, config, self.source)
        self.model = model
        policy = model.kvpop
        self.retention = RetentionLoss(distill, policy.budget, policy.decay_step, seed)
        self.learns_scores = any(True for _ in policy.parameters())
        trained = {id(p) for p in policy.parameters()} if self.frozen else {id(p) for p in model.parameters()}
        for parameter in model.parameters():
            parameter.requires_grad_(id(parameter) in trained)
        if not self.frozen and teacher is None:
            teacher = copy.deepcopy(model)
        # In a list: assigning a module as an attribute would make it part of the module tree.
        self._teacher: list[Any] = [model if self.frozen else teacher]
        if self.frozen:
            model.eval()
        else:
            self._teacher[0].requires_grad_(False).eval()

    # What is trained ----------------------------------------------------------------------------------------

    def scorer_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        return self.model.kvpop.named_parameters()

    def base_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        scorers = {id(p) for p in self.model.kvpop.parameters()}
        return [(n, p) for n, p in self.model.named_parameters() if id(p) not in scorers and p.requires_grad]

    def saved_prefixes(self) -> tuple[str, ...]:
        return ("model.kvpop.",) if self.frozen else ("model.",)

    def on_fit_start(self) -> None:
        self._teacher[0].to(self.device)

    def on_validation_start(self) -> None:
        self._teacher[0].to(self.device)

    # Losses -------------------------------------------------------------------------------------------------

    def counts(self, batch: Batch) -> Tensor:
        retention = self.retention.counts(batch["document_ids"], self._query_mask(batch))
        return torch.stack(
            [*retention, supervised_positions(batch["loss_mask"], batch["document_ids"]).sum()]
        )

    def share(self, batch: Batch, totals: Tensor) -> tuple[Tensor, Metrics]:
        *retention_totals, supervised_total = totals.unbind()
        counts = RetentionCounts(*retention_totals)
        metrics: Metrics = {}
        if self.frozen:
            watch = _Watch(self, batch, self._query_mask(batch), sparse=False)
            with torch.no_grad(), dense(self.model), observe(self.model, watch):
                last_hidden(self.model, batch)
            return watch.finish(counts, metrics), metrics
        watch = _Watch(self, batch, self._query_mask(batch), sparse=True)
        teacher = self._teacher[0]
        with torch.no_grad(), dense(teacher), observe(teacher, watch.keep_target):
            teacher_hidden = last_hidden(teacher, batch)
        with observe(self.model, watch, gradients=True):
            hidden = last_hidden(self.model, batch)
        kl = self._kl(hidden, teacher_hidden, batch) / supervised_total.clamp(min=1)
        metrics["kl"] = kl
        return kl + watch.finish(counts, metrics), metrics

    def _query_mask(self, batch: Batch) -> Tensor:
        return self.retention.query_mask(batch["document_ids"], batch["row"], self.trainer.global_step)

    def _kl(self, hidden: Tensor, teacher_hidden: Tensor, batch: Batch) -> Tensor:
        chosen = supervised_positions(batch["loss_mask"], batch["document_ids"])
        return kl_sum(
            hidden[chosen],
            output_head(self.model),
            teacher_hidden[chosen],
            output_head(self._teacher[0]),
            topk=self.distill.kl_topk,
            chunk=self.distill.kl_chunk,
            reverse=self.distill.kl_direction == "reverse",
        )

    @torch.no_grad()
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Logs `val/kl`, nats per supervised position of the sparse student against the dense teacher."""
        teacher = self._teacher[0]
        with dense(teacher):
            teacher_hidden = last_hidden(teacher, batch)
        kl = self._kl(last_hidden(self.model, batch), teacher_hidden, batch)
        count = int(supervised_positions(batch["loss_mask"], batch["document_ids"]).sum())
        self.log("val/kl", kl / max(count, 1), batch_size=max(count, 1), sync_dist=True)


class _Watch:
    """Called once per layer during a forward; turns what it sees into loss sums, so that no layer's tensors
    pile up.
    """

    def __init__(self, module: StudentModule, batch: Batch, query_mask: Tensor, *, sparse: bool) -> None:
        self.module, self.batch, self.query_mask, self.sparse = module, batch, query_mask, sparse
        self.policy = module.model.kvpop
        self.sums: RetentionSums | None = None
        self.targets: Targets = {}
        self.correlation: list[Tensor] = []
        self.highest: list[Tensor] = []

    def target(self, seen: Any) -> tuple[Tensor, Tensor]:
        """The future-attention target of what is seen, float32 and outside autocast."""
        own_normalizer = self.sparse and self.module.distill.target.normalizer == "sparse"
        with torch.autocast(seen.query.device.type, enabled=False):
            target, valid = future_attention_target(
                seen.query.detach(),
                seen.key.detach(),
                window=self.policy.budget.window,
                document_ids=self.batch["document_ids"],
                normalizer=seen.lse.detach() if own_normalizer else None,
                aggregation=self.module.distill.target.aggregation,
                scale=seen.scale,
                backend=seen.target_backend,
            )
        return target, valid

    def keep_target(self, seen: Any) -> None:
        """For the teacher's forward: its target is what the student's scores are compared with."""
        if self.module.source == "teacher" and self.module.learns_scores:
            self.targets[seen.layer] = self.target(seen)

    def __call__(self, seen: Any) -> None:
        if not self.module.learns_scores:
            return
        document_ids = self.batch["document_ids"]
        target, valid = self.targets.pop(seen.layer) if seen.layer in self.targets else self.target(seen)
        with torch.enable_grad(), torch.autocast(target.device.type, enabled=False):
            score = seen.score  # the sparse forward's own, with gradients to the scorers only
            if score is None:
                score = self.policy.score(
                    seen.layer,
                    seen.key.detach(),
                    seen.value.detach(),
                    seen.hidden.detach() if self.policy.needs_hidden else None,
                    position=seen.position,
                    document_ids=document_ids,
                )
            decay = self.policy.decay[seen.layer]
            retention = self.module.retention
            decisions = retention.decide(target, valid, decay, document_ids)
            sums = retention.sums(score, target, valid, decisions, decay, document_ids, self.query_mask)
            self.sums = sums if self.sums is None else self.sums + sums
        if self.module.logs_this_step:
            self.correlation.append(rank_correlation(score, target, valid).mean())
            self.highest.append(target.masked_fill(~valid, float("-inf")).amax())

    def finish(self, totals: RetentionCounts, metrics: Metrics) -> Tensor:
        """The retention loss of all layers seen; adds the metrics."""
        if self.sums is None:
            return torch.zeros((), device=self.query_mask.device)
        heads = self.policy.decay.numel()
        metrics["boundary"] = self.sums.boundary / (heads * totals.decisions.clamp(min=1))
        metrics["regression"] = self.sums.regression / (heads * totals.tokens.clamp(min=1))
        metrics["boundary_accuracy"] = self.sums.right / (heads * totals.decisions.clamp(min=1))
        if self.correlation:
            pieces = self.module.config.accumulate * self.module.trainer.world_size
            metrics["rank_correlation"] = torch.stack(self.correlation).mean() / pieces
            # With the student's own normaliser the mass may exceed 1: the inflation of METHOD.md, section 3.
            metrics["target_maximum"] = torch.stack(self.highest).amax() / pieces
        return self.module.retention.loss(self.sums, totals, heads)


def _check_target(distill: DistillConfig, config: TrainerConfig, source: str) -> None:
    if config.base not in ("frozen", "full"):
        raise UserError(f"trainer.base must be frozen or full, got {config.base!r}")
    if source not in ("teacher", "student"):
        raise UserError(f"distill.target.source must be teacher or student, got {source!r}")
    if config.base == "frozen" and source != "teacher":
        raise UserError(
            "distill.target.source=student needs trainer.base=full: with a frozen base the target comes from "
            "the dense teacher; leave distill.target.source unset"
        )
    if distill.target.normalizer == "sparse" and source != "student":
        raise UserError(
            "distill.target.normalizer=sparse is the student's own normaliser and needs "
            "distill.target.source=student (trainer.base=full); use distill.target.normalizer=dense"
        )
