"""How a training runs on this machine: the Trainer, its callbacks, interruption and errors in one line."""

from __future__ import annotations

import json
import logging
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only

import kvpop_lightning
from kvpop_lightning.config.choices import RAGGED
from kvpop_lightning.config.schema import Config
from kvpop_lightning.errors import UserError
from kvpop_lightning.training.callbacks import (
    GracefulStop,
    GradientNorm,
    RandomState,
    TrainingCheckpoint,
    TrainingProgress,
)

_SHAPES_TRAINING = (
    "base",
    "max_steps",
    "rows_per_step",
    "accumulate",
    "scorer_lr",
    "scorer_lr_final",
    "base_lr",
    "warmup_steps",
    "weight_decay",
    "gradient_clip",
    "precision",
    "devices",
)
"""Fields of `trainer` that change the result; the others only say how it is run or reported."""


_HINTS = (
    "does not have many workers",
    "eval mode",
    "GPU available but not used",
    "smaller than the logging interval",
    "no `val_dataloader`",
    "LeafSpec",
    "`IterableDataset` has `__len__` defined",
)
"""Lightning's warnings about what is meant to be so here."""


SHOWN = tuple(
    f"train/{name}" for name in ("loss", "boundary_accuracy", "closed_hard", "closed_target", "soft_keys")
)
"""Metrics of the progress line, where a training has them."""


def settings_key(config: Config, data_fingerprint: str, base_fingerprint: str) -> str:
    """Hex digest of everything that shapes a training: equal keys, equal policies."""
    trainer = asdict(config.trainer)
    described: dict[str, Any] = {
        "policy": asdict(config.policy),
        "distill": asdict(config.distill),
        "trainer": {name: trainer[name] for name in _SHAPES_TRAINING},
        "seed": config.seed,
        "data": data_fingerprint,
        "base": base_fingerprint,
        "version": kvpop_lightning.__version__,
    }
    if not config.policy.options:
        described["policy"].pop("options")  # as before there were any
    if config.policy.name in RAGGED and config.distill.gate.reduction is None:
        described["reference_length"] = config.eval.reference_length  # F follows from it and the budget
    return sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def resolve_precision(config: Config, device: torch.device) -> str:
    """`trainer.precision`, `auto` = bfloat16 autocast where the base is trained on CUDA, else float32."""
    if config.trainer.precision != "auto":
        return config.trainer.precision
    return "bf16-mixed" if config.trainer.base != "frozen" and device.type == "cuda" else "32-true"


def build_trainer(
    config: Config,
    device: torch.device,
    callbacks: list[pl.Callback],
    *,
    logger: Any,
    precision: str,
) -> pl.Trainer:
    """A Trainer that runs `trainer.max_steps` steps where the model already is, and prints nothing of its
    own.
    """
    accelerator: str = config.trainer.accelerator
    if accelerator == "auto":
        accelerator = "gpu" if device.type == "cuda" else "cpu"
    devices: Any = config.trainer.devices
    if accelerator == "gpu" and devices == 1 and device.index is not None:
        devices = [device.index]
    with quiet_lightning():
        return pl.Trainer(
            max_steps=config.trainer.max_steps,
            accelerator=accelerator,
            devices=devices,
            strategy=config.trainer.strategy,
            precision=precision,  # type: ignore[arg-type]
            logger=logger or False,
            log_every_n_steps=1 if config.trainer.fast_dev_run else config.trainer.log_every,
            fast_dev_run=config.trainer.fast_dev_run,
            callbacks=callbacks,
            default_root_dir=config.run_dir,
            enable_checkpointing=False,  # our own checkpoint callback: one file, atomic, at whole steps
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            num_sanity_val_steps=0,
            limit_val_batches=0,
        )


def build_callbacks(
    config: Config, key: str, data: str
) -> tuple[list[pl.Callback], TrainingCheckpoint, GracefulStop]:
    """All callbacks in order; the graceful stop is last, when every other one has seen the step."""
    folder = Path(config.run_dir) / "checkpoints" / config.policy.name
    checkpoint = TrainingCheckpoint(folder, config.trainer.checkpoint_every, key, data)
    stop = GracefulStop(checkpoint)
    callbacks: list[pl.Callback] = [RandomState(), GradientNorm()]
    if config.trainer.progress:
        callbacks.append(TrainingProgress(f"train {config.policy.name}", SHOWN))
    return [*callbacks, checkpoint, stop], checkpoint, stop


def checkpoint_to_resume(config: Config, checkpoint: TrainingCheckpoint) -> Path | None:
    """The checkpoint of this very training, if there is one and `trainer.resume` allows it.

    Raises:
        UserError: the file cannot be read.
    """
    stored = _stored(config, checkpoint)
    if stored is None:
        return None
    if stored["settings_key"] != checkpoint.settings_key:
        say(f"{checkpoint.path} was made with other settings, model or data: training starts anew")
        return None
    say(f"going on from step {stored['global_step']} ({checkpoint.path})")
    return checkpoint.path


def refuse_changed_data(config: Config, checkpoint: TrainingCheckpoint) -> None:
    """An interrupted training does not begin anew, its steps lost, because a file of its data was touched.

    Raises:
        UserError: it read another data set; both fingerprints are named. Or the file cannot be read.
    """
    stored = _stored(config, checkpoint) or {}
    before = stored.get("data_fingerprint", checkpoint.data)
    if stored.get("unfinished") and before != checkpoint.data:
        raise UserError(
            f"the data set changed: {checkpoint.path}, interrupted after step {stored['global_step']}, was "
            f"trained on {before}, the configuration now gives {checkpoint.data}: restore the data settings "
            "and files, train in another run_dir, or start anew with trainer.resume=false"
        )


def _stored(config: Config, checkpoint: TrainingCheckpoint) -> dict[str, Any] | None:
    """What the checkpoint holds; None: there is none, or it is not to be used."""
    path = checkpoint.path
    if not config.trainer.resume or config.trainer.fast_dev_run or not path.exists():
        return None
    try:
        stored = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        _ = stored["settings_key"], stored["global_step"]
    except Exception as error:
        raise UserError(
            f"cannot read the checkpoint {path} ({error}): delete it or set trainer.resume=false"
        ) from error
    return dict(stored)


def fit(
    trainer: pl.Trainer, module: pl.LightningModule, source: Any, stop: GracefulStop, resume: Path | None
) -> None:
    """`trainer.fit` on a DataModule or a loader, with interruption as KeyboardInterrupt and CUDA memory
    exhaustion as one line.

    Raises:
        KeyboardInterrupt: Ctrl-C (`Terminated` for SIGTERM); the checkpoint of the last whole step is
            written.
        UserError: out of GPU memory.
    """
    try:
        with quiet_lightning():
            data = {
                "datamodule" if isinstance(source, pl.LightningDataModule) else "train_dataloaders": source
            }
            trainer.fit(module, ckpt_path=resume, weights_only=True, **data)
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"out of GPU memory while training ({str(error).splitlines()[0]}): lower trainer.rows_per_step "
            "(and raise trainer.accumulate), data.row_length or distill.kl_chunk, or use a smaller model"
        ) from error
    except SystemExit as error:  # how Lightning ends after a Ctrl-C that came outside a step
        signal.signal(signal.SIGINT, signal.default_int_handler)
        raise KeyboardInterrupt from error
    if trainer.global_step < trainer.max_steps:  # else the training is saved first
        stop.raise_again(f"stopped after step {trainer.global_step}; the same command goes on from there")


def say(text: str) -> None:
    """One line for the user, from the first process only."""
    if getattr(rank_zero_only, "rank", 0) in (None, 0):
        print(text, flush=True)


def say_if_nothing_drops(config: Config) -> None:
    """Rows within the budget give every scorer a loss of zero: a mistake that no later figure explains."""
    budget = config.policy.budget
    total = budget.sink + budget.window + budget.topk
    if config.data.row_length <= total:
        say(
            f"warning: rows of data.row_length={config.data.row_length} tokens fit into policy.budget's "
            f"{total} keys: nothing is ever dropped, so nothing is learned; raise data.row_length or lower "
            "the budget"
        )


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Lightning's hints about hardware, workers and modules in eval mode are not for this library's users."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric", "lightning")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.WARNING)
        with warnings.catch_warnings():
            for hint in _HINTS:
                warnings.filterwarnings("ignore", message=f".*{hint}.*")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
