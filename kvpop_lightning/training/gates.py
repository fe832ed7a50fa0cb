"""Training of gates through a soft mask: the distillation itself, and a loss on what is held.

Unlike the scorers, which learn from the target and never see the KL, a gate gets its gradient from the KL of
a forward whose attention carries the gate softly; the dense teacher, data, optimiser steps, checkpoints and
tracking are those of `student.StudentModule`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvpop_lightning.attention import soft_attention
from kvpop_lightning.config.schema import DistillConfig, TrainerConfig
from kvpop_lightning.models import dense, observe, softly
from kvpop_lightning.policy import DocumentLayout, document_layout
from kvpop_lightning.policy.scorers.base import full_precision
from kvpop_lightning.training.forward import Batch, collate, last_hidden, to_device
from kvpop_lightning.training.kl import supervised_positions
from kvpop_lightning.training.module import Metrics
from kvpop_lightning.training.student import StudentModule

LINEAR_LR, UNITS_LR = 3e-5, 1e-3


class SoftPass:
    """Called for every layer of a training forward instead of its attention; gathers the layers' sums."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy
        self.sums: list[Tensor] = []
        """One differentiable scalar per layer."""
        self.facts: dict[str, list[Tensor]] = {}
        """Detached scalars per layer, for the log."""

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, hidden: Tensor, call: Any, scale: float
    ) -> Tensor:
        batch, _, length, _ = key.shape
        layout = document_layout(call.document_ids, batch=batch, length=length, device=key.device)
        with full_precision(key.device):
            work = torch.promote_types(hidden.dtype, torch.float32)
            key, value, addition = self.soften(layer, key, value, hidden.to(work), layout)
        return soft_attention(query, key, value, addition, document_ids=call.document_ids, scale=scale)

    def soften(
        self, layer: int, key: Tensor, value: Tensor, hidden: Tensor, layout: DocumentLayout
    ) -> tuple[Tensor, Tensor, Any]:
        """Keys and values [B, Hkv, T, D] to attend, and what goes onto their logits."""
        return key, value, self.addition(layer, hidden, layout)

    def addition(self, layer: int, hidden: Tensor, layout: DocumentLayout) -> Any:
        """What goes onto the layer's logits (`attention/soft.py`); adds to `sums` and `facts`."""
        raise NotImplementedError

    def note(self, **facts: Tensor) -> None:
        for name, value in facts.items():
            self.facts.setdefault(name, []).append(value.detach())


class GateModule(StudentModule):
    """Base of the gates' modules; `base = frozen` trains the gates alone, `full` the model with them.

    Loss: KL + `distill.gate.weight` * `penalty`. AdamW at a constant rate, betas 0.9 and 0.95.
    """

    betas = (0.9, 0.95)

    def __init__(
        self, model: Any, distill: DistillConfig, config: TrainerConfig, *, teacher: Any = None, seed: int = 0
    ) -> None:
        network = model.kvpop.layer_scorer(0).network
        linear = network is not None and network.width == 0
        rate = distill.gate.lr or (LINEAR_LR if linear else UNITS_LR)
        config = replace(config, scorer_lr=rate, scorer_lr_final=1.0, warmup_steps=0)
        super().__init__(model, distill, config, teacher=teacher, seed=seed)

    # What a subclass says

    def soft_pass(self) -> SoftPass:
        raise NotImplementedError

    def weighed(self, batch: Batch) -> Tensor:
        """int64 scalar: the micro-batch's weight in the mean of the penalties."""
        raise NotImplementedError

    def penalty(self, done: SoftPass) -> tuple[Tensor, Metrics]:
        """The micro-batch's own penalty, and metrics that are means like it."""
        raise NotImplementedError

    # The step

    def counts(self, batch: Batch) -> Tensor:
        supervised = supervised_positions(batch["loss_mask"], batch["document_ids"]).sum()
        return torch.stack([supervised, self.weighed(batch)])

    def share(self, batch: Batch, totals: Tensor) -> tuple[Tensor, Metrics]:
        teacher = self._teacher[0]
        with torch.no_grad(), dense(teacher):
            teacher_hidden = last_hidden(teacher, batch)
        done = self.soft_pass()
        with softly(self.model, done):
            hidden = last_hidden(self.model, batch)
        kl = self._kl(hidden, teacher_hidden, batch) / totals[0].clamp(min=1)
        penalty, metrics = self.penalty(done)
        # One-sided losses are taken per micro-batch; their mean goes by the number of keys.
        part = self.weighed(batch) / totals[1].clamp(min=1)
        metrics = {name: value * part for name, value in metrics.items()}
        metrics |= {"kl": kl, "penalty": penalty * part}
        return kl + self.distill.gate.weight * penalty * part, metrics

    @torch.no_grad()
    def measure(self, rows: Any, limit: int = 4) -> tuple[dict[str, float], dict[str, Any]]:
        """What the trained policy does on the first `limit` rows, decisions hard as at inference.

        Returns:
            `final_kl` and what `facts_of` finds; and details by head for `training.json`.
        """
        device = next(self.model.parameters()).device
        kl, count = 0.0, 0
        evictions: list[list[Tensor]] = []
        layouts: list[DocumentLayout] = []
        for index in range(min(limit, len(rows))):
            batch = to_device(collate([rows[index]]), device)
            times: list[Tensor] = []
            with dense(self._teacher[0]):
                teacher_hidden = last_hidden(self._teacher[0], batch)
            with observe(self.model, lambda seen, times=times: times.append(seen.eviction[0])):  # type: ignore
                hidden = last_hidden(self.model, batch)
            kl += float(self._kl(hidden, teacher_hidden, batch))
            count += int(supervised_positions(batch["loss_mask"], batch["document_ids"]).sum())
            ids = batch["document_ids"]
            evictions.append(times)
            layouts.append(document_layout(ids, batch=1, length=ids.shape[1], device=device))
        if not evictions:
            return {}, {}
        found, details = self.facts_of([torch.stack(times) for times in evictions], layouts)
        parameters = sum(p.numel() for p in self.model.kvpop.parameters())
        return {"final_kl": kl / max(count, 1), "gate_parameters": float(parameters), **found}, details

    def facts_of(
        self, evictions: list[Tensor], layouts: list[DocumentLayout]
    ) -> tuple[dict[str, float], dict[str, Any]]:
        """Figures and per-head details from eviction times [L, Hkv, T] of some rows."""
        return {}, {}

    def scorer_parameters(self) -> Iterable[tuple[str, torch.nn.Parameter]]:
        return self.model.kvpop.named_parameters()
