"""Run by test_reading_processes.py: `python reading_worker.py FOLDER '{"steps": 3, "processes": 2, ...}'`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from small_tokenizer import CHATML, build_tokenizer

from kvpop_lightning.config.schema import DataConfig
from kvpop_lightning.data import PackedMathDataModule
from kvpop_lightning.training.runtime import quiet_lightning

ROWS_PER_STEP = 4


class Reader(LightningModule):
    """Notes which rows this process was given in which step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.rows: list[list[int]] = []

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.rows.append(batch["row"].tolist())
        return self.layer(torch.ones(1)).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def read(
    folder: Path, *, steps: int, processes: int, workers: int, streaming: bool, resume: str | None
) -> None:
    """Trains to `steps` and writes `rows-RANK.json` and `last.ckpt`."""
    config = DataConfig(
        families=["ledger", "codebook"], eval_families=["road_trips"], row_length=256, train_rows=11,
        eval_rows=1, min_document_tokens=80, max_document_tokens=300, cache_dir=str(folder / "cache"),
        workers=workers, streaming=streaming,
    )  # fmt: skip
    data = PackedMathDataModule(
        config, build_tokenizer(CHATML), rows_per_step=ROWS_PER_STEP // processes, seed=7, progress=False
    )
    module = Reader()
    with quiet_lightning():
        trainer = Trainer(
            accelerator="cpu", devices=processes, strategy="ddp" if processes > 1 else "auto",
            max_steps=steps, max_epochs=-1, logger=False, enable_progress_bar=False,
            enable_model_summary=False, use_distributed_sampler=False, limit_val_batches=0,
            num_sanity_val_steps=0,
            callbacks=[ModelCheckpoint(folder, filename="last", every_n_train_steps=steps)],
        )  # fmt: skip
        (folder / "last.ckpt").unlink(missing_ok=True)
        trainer.fit(module, data, ckpt_path=resume, weights_only=False)
    (folder / f"rows-{trainer.global_rank}.json").write_text(json.dumps(module.rows))


if __name__ == "__main__":
    asked: dict[str, Any] = json.loads(sys.argv[2])
    read(Path(sys.argv[1]), **asked)
