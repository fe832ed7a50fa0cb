"""The one checkpoint from which an interrupted run goes on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from kvpop_lightning.disk import unwritable
from kvpop_lightning.errors import UserError


class TrainingCheckpoint(pl.Callback):
    """Writes `<folder>/last.ckpt` every `every` optimiser steps, atomically, and records which settings it
    belongs to.

    Args:
        folder: where `last.ckpt` goes.
        every: optimiser steps between two saves; 0 = only when asked (`save`).
        settings_key: fingerprint of everything that shapes the training; a checkpoint with another one is not
            resumed.
        data: fingerprint of the training rows.
    """

    def __init__(self, folder: Path, every: int, settings_key: str = "", data: str = "") -> None:
        self.folder, self.every, self.settings_key, self.data = folder, every, settings_key, data

    @property
    def path(self) -> Path:
        """The checkpoint file."""
        return self.folder / "last.ckpt"

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if self.every and trainer.global_step % self.every == 0:
            self.save(trainer)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint["settings_key"] = self.settings_key
        checkpoint["data_fingerprint"] = self.data
        checkpoint["unfinished"] = trainer.global_step < trainer.max_steps

    def save(self, trainer: pl.Trainer) -> None:
        """Write the checkpoint now; all processes must call this together.

        Raises:
            UserError: no space left, or the folder cannot be written.
        """
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        temporary = self.folder / "writing.ckpt"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            trainer.save_checkpoint(temporary)
            if trainer.is_global_zero:
                os.replace(temporary, self.path)
        except (OSError, RuntimeError) as error:
            temporary.unlink(missing_ok=True)  # half of a checkpoint only fills the disk
            reason = unwritable(error)
            if reason is not None:
                raise UserError(
                    f"cannot write the checkpoint {self.path}: {reason}; free space or set run_dir to "
                    "another disk"
                ) from error
            raise
