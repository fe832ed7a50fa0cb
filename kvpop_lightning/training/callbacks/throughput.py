"""Tokens, rows and steps per second, and the model FLOPs utilisation, at every logged step."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from kvpop_lightning.tracking.flops import StepCost, peak_flops


class Throughput(pl.Callback):
    """Logs `throughput/...` over the steps since it logged last.

    Counted are real tokens (no padding) of all processes, by the clock on the wall: reading data, logging and
    whatever other callbacks do in between is part of it. `throughput/mfu` is that of one device.

    Args:
        cost: FLOPs of what the module does.
        budget: keys that a query of the bounded forward sees at most.
        peak_tflops: of one device; None = looked up or measured.
    """

    def __init__(self, cost: StepCost, budget: int, peak_tflops: float | None = None) -> None:
        self.cost, self.budget, self._peak_tflops = cost, budget, peak_tflops
        self._peak: float | None = None
        self._reset()

    def _reset(self) -> None:
        self._sums: Tensor | None = None  # tokens, dense keys, bounded keys; on the device, so nothing waits
        self._rows = self._steps = 0
        self._since = time.perf_counter()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._peak = peak_flops(pl_module.device, self._peak_tflops)
        self._reset()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._count(batch)
        step, every = trainer.global_step, trainer.log_every_n_steps  # type: ignore[attr-defined]
        if step % every and step != trainer.max_steps:
            return
        assert self._sums is not None
        tokens, dense_keys, sparse_keys = self._sums.tolist()  # waits for the device
        seconds = max(time.perf_counter() - self._since, 1e-9)
        flops = self.cost.flops(tokens, dense_keys, sparse_keys) / seconds
        metrics = {
            "tokens_per_s": tokens * trainer.world_size / seconds,
            "rows_per_s": self._rows * trainer.world_size / seconds,
            "steps_per_s": self._steps / seconds,
            "tflops_per_device": flops / 1e12,
        }
        if self._peak:
            metrics["mfu"] = flops / self._peak
        for name, value in metrics.items():
            pl_module.log(f"throughput/{name}", value)
        self._reset()

    def _count(self, batch: dict[str, Tensor]) -> None:
        document_ids = batch["document_ids"]
        position = batch["position"] if "position" in batch else batch["position_ids"]
        real = document_ids >= 0
        keys = torch.where(real, position + 1, 0)
        sums = torch.stack([real.sum(), keys.sum(), keys.clamp(max=self.budget).sum()]).double()
        self._sums = sums if self._sums is None else self._sums + sums
        self._rows += document_ids.shape[0]
        self._steps += 1
