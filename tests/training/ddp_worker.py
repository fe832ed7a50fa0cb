"""Run by test_ddp.py in two gloo processes of its own: `python ddp_worker.py KIND FOLDER [STOP_AT]`."""

from __future__ import annotations

import copy
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from training_cases import _BASE, BUDGET, Rows

from kvpop_lightning import retrofit
from kvpop_lightning.config.schema import DistillConfig, TrainerConfig
from kvpop_lightning.training.callbacks import GracefulStop, RandomState, TrainingCheckpoint
from kvpop_lightning.training.features import FeatureCache, FeatureRequest
from kvpop_lightning.training.loader import StepLoader
from kvpop_lightning.training.runtime import quiet_lightning
from kvpop_lightning.training.scorers import FeatureRows, ScorerModule
from kvpop_lightning.training.student import StudentModule

STEPS = 4
CONFIG = TrainerConfig(max_steps=STEPS, warmup_steps=1, scorer_lr=1e-2, accumulate=2, base_lr=1e-3)
DISTILL = DistillConfig(query_fraction=0.5, kl_topk=8)


class StopOneProcess(pl.Callback):
    """Only the second process gets the signal; both must stop."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.at - 1 and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)


class Losses(pl.Callback):
    def __init__(self) -> None:
        self.values: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.values.append({n: float(v) for n, v in trainer.callback_metrics.items()})


def train(kind: str, folder: Path, *, processes: int, stop_at: int = 0) -> None:
    """Writes `result-<processes>.pt`: weights, metrics of every step."""
    torch.manual_seed(3)
    model = retrofit(copy.deepcopy(_BASE), BUDGET, policy="kvpop_mlp", decay=0.8, decay_step=5, width=8)
    rows: Any = Rows(6)
    module: pl.LightningModule
    if kind == "scorers":
        cache = FeatureCache(folder / "features", model, "data", FeatureRequest(BUDGET.window))
        cache.fill(rows, range(6), progress=False)
        rows = FeatureRows(cache, range(6))
        module = ScorerModule(model.kvpop, DISTILL, CONFIG)
    else:
        module = StudentModule(model, DISTILL, replace(CONFIG, base="full"))
    checkpoint = TrainingCheckpoint(folder / f"checkpoint-{processes}", 0)
    losses = Losses()
    stop = GracefulStop(checkpoint)
    with quiet_lightning():
        trainer = pl.Trainer(
            max_steps=STEPS,
            accelerator="cpu",
            devices=processes,
            strategy="ddp" if processes > 1 else "auto",
            use_distributed_sampler=False,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            log_every_n_steps=1,
            num_sanity_val_steps=0,
            limit_val_batches=0,
            callbacks=[
                RandomState(),
                losses,
                *([StopOneProcess(stop_at)] if stop_at else []),
                checkpoint,
                stop,
            ],
        )
        loader = StepLoader(
            rows,
            steps=STEPS,
            rows_per_batch=4 // processes,
            process=lambda: (trainer.global_rank, trainer.world_size),
        )
        resume = checkpoint.path if checkpoint.path.exists() else None
        trainer.fit(module, train_dataloaders=loader, ckpt_path=resume, weights_only=True)
    if trainer.is_global_zero:
        content = {
            "weights": module.state_dict(),
            "metrics": losses.values,
            "stopped": int(stop.received or 0),
        }
        torch.save(content, folder / f"result-{processes}.pt")


if __name__ == "__main__":
    train(sys.argv[1], Path(sys.argv[2]), processes=2, stop_at=int(sys.argv[3]) if len(sys.argv) > 3 else 0)
