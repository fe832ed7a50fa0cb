"""Training progress on a terminal or in a log."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from kvpop_lightning.training.progress import ProgressLine


class TrainingProgress(pl.Callback):
    """Steps done, speed, time left and the metrics named in `show`."""

    def __init__(self, label: str, show: tuple[str, ...] = ("loss",)) -> None:
        self.label, self.show = label, show
        self._line: ProgressLine | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        total = trainer.max_steps if trainer.max_steps > 0 else int(trainer.num_training_batches)
        self._line = ProgressLine(self.label, total, done=trainer.global_step, enabled=trainer.is_global_zero)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        assert self._line is not None

        def note() -> str:  # reading a metric waits for the device: only when a line is due
            values = trainer.callback_metrics
            return "  ".join(f"{n.split('/')[-1]} {float(values[n]):.4f}" for n in self.show if n in values)

        self._line.update(trainer.global_step, note)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._close()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._close()

    def _close(self) -> None:
        if self._line is not None:
            self._line.close()
