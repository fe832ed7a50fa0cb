"""Gradient norms of scorers and base, apart."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import Optimizer


def logs_step(trainer: pl.Trainer) -> bool:
    """Whether the Trainer keeps the metrics of the step that is running; the last step always counts."""
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    step = trainer.global_step + 1
    return step % every == 0 or step == trainer.max_steps


def group_parameters(optimizer: Optimizer) -> dict[str, list[Tensor]]:
    """Parameters that have a gradient, by the `group` label of their parameter group."""
    found: dict[str, list[Tensor]] = {}
    for group in optimizer.param_groups:
        with_gradient = [p for p in group["params"] if p.grad is not None]
        found.setdefault(group.get("group", "all"), []).extend(with_gradient)
    return {label: parameters for label, parameters in found.items() if parameters}


def group_norms(optimizer: Optimizer) -> dict[str, Tensor]:
    """L2 norm of the gradients of each labelled group (before any clipping)."""
    return {
        label: torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        for label, parameters in group_parameters(optimizer).items()
    }


class GradientNorm(pl.Callback):
    """Logs `gradient_norm/<group>` at every logged step, as it is before clipping."""

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        if logs_step(trainer):
            for label, norm in group_norms(optimizer).items():
                pl_module.log(f"gradient_norm/{label}", norm)
