"""Ctrl-C and SIGTERM end the training at the next whole step, with a checkpoint."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

import lightning.pytorch as pl

from kvpop_lightning.errors import Terminated
from kvpop_lightning.training.callbacks.checkpoint import TrainingCheckpoint


class GracefulStop(pl.Callback):
    """Notes the signal, lets the step finish, saves through `checkpoint` and stops the loop.

    A step that is cut in the middle cannot be resumed exactly (weights moved, schedule not yet), hence the
    delay. A second Ctrl-C stops at once; the last periodic checkpoint remains. After `fit`, `received` names
    the signal. Must be the last callback, so that all others have seen the step before the checkpoint is
    written.
    """

    def __init__(self, checkpoint: TrainingCheckpoint) -> None:
        self.checkpoint = checkpoint
        self.received: int | None = None
        self._previous: dict[int, Any] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        self._restore()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        stop = self.received is not None
        if (
            trainer.world_size > 1
        ):  # one process may have got the signal alone; all must leave the loop together
            stop = trainer.strategy.reduce_boolean_decision(stop, all=False)
            if stop and self.received is None:
                self.received = signal.SIGTERM
        if stop:
            self.checkpoint.save(trainer)
            trainer.should_stop = True

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._restore()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._restore()

    def raise_again(self, message: str) -> None:
        """The interruption that was put off, if there was one.

        Raises:
            KeyboardInterrupt: `message`; `Terminated` for SIGTERM.
        """
        if self.received is not None:
            raise Terminated(message) if self.received == signal.SIGTERM else KeyboardInterrupt(message)

    def _restore(self) -> None:
        while self._previous:
            number, handler = self._previous.popitem()
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
