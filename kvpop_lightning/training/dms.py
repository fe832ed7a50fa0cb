"""Training of DMS and DMC (METHOD.md, section 8): the KL through `logsigmoid(-z)`, a one-sided loss on the
share of closed keys, a target that rises. DMC attends merged keys and values besides.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvpop_lightning.baselines import dms
from kvpop_lightning.config.schema import Config, DistillConfig, TrainerConfig
from kvpop_lightning.errors import UserError
from kvpop_lightning.policy import NEVER, DocumentLayout, document_layout
from kvpop_lightning.policy.merge import merged_rows
from kvpop_lightning.training.forward import Batch
from kvpop_lightning.training.gates import GateModule, SoftPass
from kvpop_lightning.training.module import Metrics
from kvpop_lightning.training.runtime import say

STEPS_PER_UNIT = 34.0
"""The authors' ramp of the reduction factor."""
SHORT_OF = 0.02
"""Share of keys short of the target that a training is warned of."""


def reduction_of(config: Config) -> float:
    """The factor F to reach: `distill.gate.reduction`, or what leaves the budget's keys of a reference text.

    A text of T tokens holds its window of w (DMC: the newest entry, 1) and 1/F of the rest: `B = w + (T - w)
    / F`.

    Raises:
        UserError: the reference text is not longer than the budget.
    """
    if config.distill.gate.reduction is not None:
        return config.distill.gate.reduction
    budget, reference = config.policy.budget, config.eval.reference_length
    total = budget.sink + budget.window + budget.topk
    if reference < total:
        raise UserError(
            f"{config.policy.name}: a text of eval.reference_length {reference} tokens fits into the budget "
            f"of {total} keys: raise it, lower policy.budget.topk, or set distill.gate.reduction"
        )
    window = 1 if config.policy.name == "dmc" else budget.window
    return (reference - window) / (total - window)


class DMSPass(SoftPass):
    """One training forward: noise drawn anew, the closed share summed over layers."""

    def addition(self, layer: int, hidden: Tensor, layout: DocumentLayout) -> Any:
        alpha = self.policy.layer_scorer(layer).gate(hidden)
        return self.masked(layer, alpha, dms.logistic_noise(alpha), layout)

    def masked(self, layer: int, alpha: Tensor, noise: Tensor, layout: DocumentLayout) -> Any:
        """The addition from alpha and noise [B, Hkv, T]; adds to `sums` and `facts`."""
        z = dms.soft_gate(alpha, noise, layout)
        closed, count = dms.closed_share(z)
        self.sums.append(closed / count.clamp(min=1))
        hard = dms.soft_gate(alpha.detach(), 0.0, layout) > 0
        self.note(closed_hard=hard.sum() / count.clamp(min=1))
        opened = dms.log_open(z)
        window = self.policy.layer_scorer(layer).protects(self.policy.budget)

        def add(first: int, last: int, keys: int) -> Tensor:
            far = dms.outside_window(layout.position, window, first, last, keys)
            return torch.where(far, opened[:, :, None, :keys], 0.0)

        return add


class DMCPass(DMSPass):
    """One training forward of DMC: every query sees every partial accumulation, closed ones less."""

    def soften(
        self, layer: int, key: Tensor, value: Tensor, hidden: Tensor, layout: DocumentLayout
    ) -> tuple[Tensor, Tensor, Any]:
        rule = self.policy.layer_scorer(layer)
        alpha, importance = rule.decisions(hidden)
        noise = dms.logistic_noise(alpha)
        merges = torch.sigmoid((alpha + noise) / dms.TEMPERATURE)
        keys, values = merged_rows(key, value, merges, importance, layout, rule.inv_freq)
        return keys, values, self.masked(layer, alpha, noise, layout)


class DMSModule(GateModule):
    """Trains the gates of DMS or DMC.

    Args:
        reduction: F to reach.
        ramp: steps in which F rises by 1.
        others: as for `StudentModule`.
    """

    def __init__(
        self,
        model: Any,
        distill: DistillConfig,
        config: TrainerConfig,
        *,
        reduction: float,
        ramp: float | None = None,
        **others: Any,
    ) -> None:
        super().__init__(model, distill, config, **others)
        self.reduction = reduction
        reached = 0.8 * config.max_steps / max(reduction - 1.0, 1e-9)
        self.ramp = ramp or distill.gate.ramp or min(STEPS_PER_UNIT, reached)

    @property
    def target(self) -> float:
        """Share of keys to close at this step."""
        return dms.closed_target(dms.reduction_at(self.trainer.global_step, self.reduction, self.ramp))

    def soft_pass(self) -> SoftPass:
        policy = self.model.kvpop
        return DMCPass(policy) if policy.layer_scorer(0).merges else DMSPass(policy)

    def weighed(self, batch: Batch) -> Tensor:
        """Keys that have a gate: all but the last one of a document."""
        ids = batch["document_ids"]
        layout = document_layout(ids, batch=ids.shape[0], length=ids.shape[1])
        return (layout.real & (layout.later(1) != NEVER)).sum()

    def penalty(self, done: SoftPass) -> tuple[Tensor, Metrics]:
        closed = torch.stack(done.sums).mean()
        hard = torch.stack(done.facts["closed_hard"]).mean()
        target = closed.new_tensor(self.target)
        facts = {"closed": closed.detach(), "closed_hard": hard, "closed_target": target}
        return dms.compression_loss(closed, self.target), facts

    def facts_of(
        self, evictions: list[Tensor], layouts: list[DocumentLayout]
    ) -> tuple[dict[str, float], dict[str, Any]]:
        """Share of keys closed, by the gate and in all, and by head."""
        policy = self.model.kvpop
        window = policy.layer_scorer(0).protects(policy.budget)
        closed = torch.zeros(evictions[0].shape[:2], dtype=torch.float64, device=evictions[0].device)
        seen = 0
        for times, layout in zip(evictions, layouts, strict=True):
            # A key that leaves is closed; one too near its document's end to leave is not counted.
            could = layout.real[0] & (layout.later(window)[0] != NEVER)
            closed += ((times != NEVER) & could).sum(-1)
            seen += int(could.sum())
        share = closed / max(seen, 1)
        target = dms.closed_target(self.reduction)
        facts = {
            "final_closed": float(share.mean()),
            "final_closed_target": target,
            "final_closed_lowest_head": float(share.min()),
            "final_closed_highest_head": float(share.max()),
            "final_reduction": 1.0 / max(1.0 - float(share.mean()), 1e-9),
        }
        if facts["final_closed"] < target - SHORT_OF:
            say(
                f"warning: {policy.name} closed {facts['final_closed']:.1%} of the keys, its target is "
                f"{target:.1%}: raise trainer.max_steps or distill.gate.weight, or lower "
                "distill.gate.reduction"
            )
        return facts, {"closed_by_head": share.tolist()}
