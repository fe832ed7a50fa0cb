"""What all training modules share: micro-batches with globally counted means, clipping per group, schedule,
checkpoints.

Optimisation is manual because a loss that is a mean over everything one optimiser step sees must know that
count before the first micro-batch runs backward (METHOD.md, section 4): with Lightning's own accumulation
each micro-batch would count equally however many positions it holds.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed
from torch import Tensor, nn
from torch.optim import Optimizer

from kvpop_lightning.config.schema import TrainerConfig
from kvpop_lightning.errors import UserError
from kvpop_lightning.training.callbacks.gradient_norm import group_parameters, logs_step
from kvpop_lightning.training.forward import Batch
from kvpop_lightning.training.schedule import BETAS, build_optimizer, parameter_groups

Metrics = dict[str, Tensor]
"""Local shares of means: summed over micro-batches and processes they give the mean of the step."""


class TrainingModule(pl.LightningModule):
    """Base of the training modules. One batch of the loader is one optimiser step of one process:
    `accumulate` micro-batches of `rows_per_step` rows.

    Args:
        config: learning rates, clipping, accumulation.
    """

    betas: tuple[float, float] = BETAS
    """Of AdamW."""

    def __init__(self, config: TrainerConfig) -> None:
        super().__init__()
        self.config = config
        self.automatic_optimization = False
        self.strict_loading = (
            False  # a frozen base is not in the checkpoint; `on_load_checkpoint` checks what must be
        )

    # What a subclass says -----------------------------------------------------------------------------------

    def scorer_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """Trained parameters with the scorers' rate and schedule."""
        return []

    def base_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """Trained parameters with the base's fixed rate."""
        return []

    def counts(self, batch: Batch) -> Tensor:
        """int64 [n]: what the means of this micro-batch divide by, known without a forward."""
        raise NotImplementedError

    def share(self, batch: Batch, totals: Tensor) -> tuple[Tensor, Metrics]:
        """The micro-batch's share of the step's loss, given the step's `totals`, and of the metrics."""
        raise NotImplementedError

    def saved_prefixes(self) -> tuple[str, ...]:
        """State-dict keys with these prefixes go into checkpoints."""
        return ("",)

    # The step -----------------------------------------------------------------------------------------------

    @property
    def logs_this_step(self) -> bool:
        """Whether the running step's metrics are kept (costly ones are computed only then)."""
        return logs_step(self.trainer)

    def micro_batches(self, batch: Batch) -> list[Batch]:
        """The batch in `accumulate` pieces of equally many rows (fewer pieces if there are fewer rows)."""
        rows = next(iter(batch.values())).shape[0]
        size = -(-rows // self.config.accumulate)
        return [{name: t[i : i + size] for name, t in batch.items()} for i in range(0, rows, size)]

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        pieces = self.micro_batches(batch)
        totals = self.over_processes(torch.stack([self.counts(piece) for piece in pieces]).sum(0))
        metrics: Metrics = {}
        for number, piece in enumerate(pieces):
            with self._without_sync(last=number == len(pieces) - 1):
                loss, found = self.share(piece, totals)
                # DDP averages over processes, the loss is already a share of the global mean.
                self.manual_backward(loss * self.trainer.world_size)
            for name, value in {"loss": loss, **found}.items():
                metrics[name] = metrics.get(name, 0.0) + value.detach().float()
        logged = self.logs_this_step  # asked before the optimiser moves the step counter
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if logged:  # Lightning's logging costs a millisecond per value
            self.log_step(metrics, optimizer)
        schedule: Any = self.lr_schedulers()
        schedule.step()

    def log_step(self, metrics: Metrics, optimizer: Any) -> None:
        """Logs `train/<metric>` of the whole step and `learning_rate/<group>`."""
        values = self.over_processes(torch.stack(list(metrics.values())))
        for name, value in zip(metrics, values, strict=True):
            self.log(f"train/{name}", value)
        for group in optimizer.param_groups:
            self.log(f"learning_rate/{group['group']}", group["lr"])

    def over_processes(self, tensor: Tensor) -> Tensor:
        """Sum over all processes."""
        if self.trainer.world_size > 1:
            tensor = tensor.clone()
            torch.distributed.all_reduce(tensor)
        return tensor

    def _without_sync(self, *, last: bool) -> Any:
        block = getattr(self.trainer.strategy, "block_backward_sync", None)
        return nullcontext() if last or block is None else block()

    # Optimiser ----------------------------------------------------------------------------------------------

    def configure_optimizers(self) -> Any:
        groups = parameter_groups(self.scorer_parameters(), self.base_parameters(), self.config)
        if not groups:
            raise UserError(
                "nothing to train: the policy has no parameters and trainer.base=frozen; choose a learned "
                "policy or trainer.base=full"
            )
        optimizer, schedule = build_optimizer(groups, self.config, self.betas)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        # Scorers and base are trained by different losses: the norm of one must not shrink the other's step.
        if self.config.gradient_clip > 0:
            for parameters in group_parameters(optimizer).values():
                torch.nn.utils.clip_grad_norm_(parameters, self.config.gradient_clip)

    # Checkpoints --------------------------------------------------------------------------------------------

    def _kept(self) -> set[str]:
        return {key for key in self.state_dict() if key.startswith(self.saved_prefixes())}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        kept = self._kept()
        checkpoint["state_dict"] = {k: v for k, v in checkpoint["state_dict"].items() if k in kept}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        missing = self._kept() - set(checkpoint["state_dict"])
        if missing:
            raise UserError(
                f"the checkpoint lacks {len(missing)} tensors of this policy, e.g. {min(missing)}: it "
                "belongs to another configuration; set trainer.resume=false or another run_dir"
            )
