"""What a trial's training does beside training: stop on request, notice NaN, measure on the way."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from kvpop_lightning.config.schema import Config
from kvpop_lightning.training.callbacks import GracefulStop

LOOK_EVERY_S = 0.25
ORPHAN_GRACE_S = 30.0


class DivergedError(RuntimeError):
    """The loss or the objective is not finite."""


class StopWatch:
    """A thread that looks for the stop request, and for the parent's death, from start to end of a trial.

    During the training the request waits for the end of the step (`StopOnRequest`); at other times it becomes
    SIGTERM, which ends the tracking run in order.
    """

    def __init__(self, stop_file: Path, parent: int) -> None:
        self.stop_file, self.parent = stop_file, parent
        self.asked = threading.Event()
        self.training = False
        self._end = threading.Event()

    def start(self) -> StopWatch:
        threading.Thread(target=self._look, name="StopWatch", daemon=True).start()
        return self

    def close(self) -> None:
        self._end.set()

    def _look(self) -> None:
        orphaned_at: float | None = None
        signalled = False
        while not self._end.wait(LOOK_EVERY_S):
            if orphaned_at is None and os.getppid() != self.parent:
                # Nobody watches this trial any more; whoever finds that will run it again, perhaps here.
                orphaned_at = time.monotonic()
            if orphaned_at is not None and time.monotonic() - orphaned_at > ORPHAN_GRACE_S:
                os._exit(143)
            if orphaned_at is not None or self.stop_file.exists():
                self.asked.set()
            if self.asked.is_set() and not self.training and not signalled:
                signalled = True
                os.kill(os.getpid(), signal.SIGTERM)


class StopOnRequest(pl.Callback):
    """Ends the training after the step, with a checkpoint, when the parent asks for it."""

    def __init__(self, watch: StopWatch) -> None:
        self.watch = watch

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.watch.training = True

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if self.watch.asked.is_set():
            for callback in trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, GracefulStop) and callback.received is None:
                    callback.received = signal.SIGTERM

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.watch.training = False

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self.watch.training = False


class FiniteLoss(pl.Callback):
    """Ends a training whose loss became NaN or infinite; looks where metrics are logged anyway."""

    def __init__(self, every: int) -> None:
        self.every = max(1, every)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step % self.every != 0 and trainer.global_step < trainer.max_steps:
            return
        for name, value in trainer.callback_metrics.items():
            if name.endswith("loss") and not math.isfinite(float(value)):
                raise DivergedError(f"{name} is {float(value)} at step {trainer.global_step}")


class MeasureObjective(pl.Callback):
    """The objective on a few held-out rows every `every` steps: what a pruner may compare between points.

    Training losses of two points are no measure: temperature, decay and budget change the loss itself.

    Args:
        config: the trial's configuration, evaluation included.
        model: the retrofitted model in training; its base is frozen.
        rows: held-out rows as a data set; `count` of them are used.
        record: takes (metrics, step).
    """

    def __init__(
        self,
        config: Config,
        model: Any,
        rows: Any,
        count: int,
        every: int,
        record: Callable[[dict[str, float], int], None],
    ) -> None:
        self.config, self.rows, self.every, self._record = config, rows, max(1, every), record
        self.count = min(count, len(rows))
        self._model = [model]
        self._dense: list[Any] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        step = trainer.global_step
        if step % self.every == 0 and step < trainer.max_steps and trainer.is_global_zero:
            self._record({f"objective/{name}": value for name, value in self.measure().items()}, step)

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        """Means over the rows of kl, top1 and nll."""
        from kvpop_lightning.evaluation.contestants import Contestant, at_budget, budget_of, decay_exponent
        from kvpop_lightning.evaluation.evaluate import row_settings
        from kvpop_lightning.evaluation.rows import dense_row, policy_record
        from kvpop_lightning.training.forward import collate, to_device

        (model,) = self._model
        settings, chunk = row_settings(self.config), self.config.eval.kl_chunk
        total, frozen = self.config.eval.budgets[0], self.config.trainer.base == "frozen"
        was_training = model.training
        model.eval()
        try:
            device = next(model.parameters()).device
            while len(self._dense) < self.count:
                batch = to_device(collate([self.rows[len(self._dense)]]), device)
                self._dense.append(dense_row(model, batch, settings, chunk=chunk, prefix_tokens=total))
            policy = at_budget(
                model.kvpop,
                budget_of(self.config, total),
                decay_exponent(self.config, total),
                equal_bytes=self.config.policy.equal_bytes,
            )
            contestant = Contestant(self.config.policy.name, total, policy)
            records = []
            for dense in self._dense:
                with contestant.active(model, dense.layer_targets(), dense.document_ids) as active:
                    records.append(policy_record(active, dense, settings, chunk=chunk, reuse_prefix=frozen))
                dense.decisions.clear()
        finally:
            model.train(was_training)
        return {
            name: sum(float(record[name]) for record in records) / len(records)
            for name in ("kl", "top1", "nll")
        }
