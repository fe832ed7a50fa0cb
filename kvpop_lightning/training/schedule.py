"""Parameter groups and learning rates: scorers warm up and follow a cosine, the base keeps a fixed small
rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from kvpop_lightning.config.schema import TrainerConfig

BETAS = (0.9, 0.99)  # a few hundred steps: the second moment must forget the first ones


def cosine_with_warmup(step: int, *, warmup: int, total: int, final: float) -> float:
    """Share of the peak rate at `step` (0-based): linear to 1 over `warmup` steps, cosine to `final` at
    `total`.
    """
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * progress))


def _decays(name: str) -> bool:
    """Matrices decay; biases (gates included) and norms do not."""
    return not any(word in name for word in ("bias", "norm"))


def parameter_groups(
    scorers: Iterable[tuple[str, nn.Parameter]],
    base: Iterable[tuple[str, nn.Parameter]],
    config: TrainerConfig,
) -> list[dict[str, Any]]:
    """AdamW groups with a `group` label (`scorer` or `base`); biases, gates and norms do not decay."""
    groups: list[dict[str, Any]] = []
    for label, named, rate in (
        ("scorer", list(scorers), config.scorer_lr),
        ("base", list(base), config.base_lr),
    ):
        for decays in (True, False):
            chosen = [p for n, p in named if p.requires_grad and _decays(n) is decays]
            if chosen:
                decay = config.weight_decay if decays else 0.0
                groups.append({"params": chosen, "group": label, "lr": rate, "weight_decay": decay})
    return groups


def build_optimizer(
    groups: list[dict[str, Any]], config: TrainerConfig, betas: tuple[float, float] = BETAS
) -> tuple[torch.optim.Optimizer, LambdaLR]:
    """AdamW over `groups` and the schedule of each, to be stepped after every optimiser step."""
    # Hundreds of small tensors: one fused call on the CPU. Not on CUDA, where a fused step unscales gradients
    # itself and clipping under 16-mixed would see them scaled.
    on_cpu = all(p.device.type == "cpu" for group in groups for p in group["params"])
    optimizer = torch.optim.AdamW(groups, betas=betas, fused=on_cpu)
    rules = [
        (
            (lambda _: 1.0)
            if group["group"] == "base"
            else (
                lambda step: cosine_with_warmup(
                    step, warmup=config.warmup_steps, total=config.max_steps, final=config.scorer_lr_final
                )
            )
        )
        for group in groups
    ]
    return optimizer, LambdaLR(optimizer, rules)
