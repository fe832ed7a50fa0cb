"""One training from configuration to saved policy: setup -> data -> fit -> save."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from kvpop_lightning.config.choices import RAGGED
from kvpop_lightning.config.policies import retrofit_options
from kvpop_lightning.config.schema import Config
from kvpop_lightning.errors import UserError
from kvpop_lightning.locks import exclusive
from kvpop_lightning.models import retrofit
from kvpop_lightning.models.fingerprint import base_fingerprint
from kvpop_lightning.models.persist import DESCRIPTION, WEIGHTS
from kvpop_lightning.policy import Budget
from kvpop_lightning.tracking.flops import DecoderShape, StepCost
from kvpop_lightning.tracking.lightning_logger import RunLogger
from kvpop_lightning.tracking.mlflow_run import current_run
from kvpop_lightning.training.callbacks import GracefulStop, Throughput, TrainingCheckpoint
from kvpop_lightning.training.dms import DMSModule, reduction_of
from kvpop_lightning.training.feature_store import Features
from kvpop_lightning.training.features import FeatureCache, FeatureRequest, dense_features
from kvpop_lightning.training.forward import to_device
from kvpop_lightning.training.gates import GateModule
from kvpop_lightning.training.loader import StepLoader
from kvpop_lightning.training.module import TrainingModule
from kvpop_lightning.training.retention_gate import RetentionGateModule
from kvpop_lightning.training.runtime import (
    build_callbacks,
    build_trainer,
    checkpoint_to_resume,
    fit,
    refuse_changed_data,
    resolve_precision,
    say,
    say_if_nothing_drops,
    settings_key,
)
from kvpop_lightning.training.scorers import FeatureRows, ScorerModule
from kvpop_lightning.training.standardization import standardize_scorers
from kvpop_lightning.training.student import StudentModule

RECORD = "training.json"
"""File beside the policy that says which settings it was trained with, and how it went."""


@dataclass(frozen=True)
class TrainResult:
    """What a training left behind."""

    policy_path: Path | None
    """Folder for `kvpop_lightning.load`; None after `trainer.fast_dev_run`, which saves nothing."""
    metrics: dict[str, float]
    """Last values of the training metrics, and over all rows where that is cheap (`final/...`)."""
    reused: bool = False
    """The same training was finished before; nothing ran."""
    steps: int = 0
    seconds: float = 0.0


def train(
    config: Config,
    *,
    model: Any = None,
    tokenizer: Any = None,
    data: Any = None,
    logger: Any = None,
    run: Any = None,
    callbacks: Sequence[pl.Callback] = (),
) -> TrainResult:
    """Trains `config.policy` and saves it to `<run_dir>/policy/<policy name>/`.

    A finished training with the same settings, data and base weights is not repeated; an interrupted one goes
    on from its last step (`trainer.resume`). With a frozen base the rows' features are computed once and
    cached; several policies trained on one model share them.

    Args:
        config: resolved configuration.
        model, tokenizer: a loaded base, to share it between trainings; retrofitted in place (an earlier
            policy on it is replaced). None = `config.model`.
        data: a prepared DataModule with `train_rows` and `fingerprint`; None = `config.data`.
        logger: a Lightning logger; None = that of `run`, if given.
        run: an open `tracking.TrackedRun`; None = the innermost one open in this process, if any.
        callbacks: further ones, which see each step before those of the training itself.

    Raises:
        UserError: nothing to train, data or model missing, no space, out of memory: one line that says what
            to change.
        KeyboardInterrupt: interrupted; the checkpoint is written.
    """
    started = time.monotonic()
    pl.seed_everything(config.seed, verbose=False)
    if model is None:
        from kvpop_lightning.models.sources import load_model

        model, tokenizer = load_model(_model_config(config), train_base=config.trainer.base != "frozen")
    if data is None:
        data = _data(config, tokenizer)
    model = retrofit(model, Budget(**asdict(config.policy.budget)), **retrofit_options(config))
    if config.trainer.base == "frozen" and not any(True for _ in model.kvpop.parameters()):
        raise UserError(
            f"policy={config.policy.name} has no parameters, and trainer.base=frozen: nothing to train; "
            "choose a learned policy (policy=kvpop_mlp, policy=kvpop_mlstm) or trainer.base=full"
        )
    say_if_nothing_drops(config)
    fingerprint = str(data.fingerprint)
    key = settings_key(config, fingerprint, base_fingerprint(model))
    folder = Path(config.run_dir) / "policy" / config.policy.name
    run = run if run is not None else current_run()
    if run is not None:
        run.set_tags({"data.fingerprint": fingerprint})
    finished = None if config.trainer.fast_dev_run else _finished(folder, key)
    if finished is not None:
        say(f"{folder} is trained with these settings already: reused")
        return TrainResult(folder, finished["metrics"], reused=True, steps=finished["steps"])

    own_callbacks, checkpoint, stop = build_callbacks(config, key, fingerprint)
    if logger is None and run is not None:
        logger = RunLogger(run)
    job = _Job(config, model, data, fingerprint, [*callbacks, *own_callbacks], checkpoint, stop, logger)
    mend = "wait for it, or set run_dir to another folder"
    with exclusive(None if config.trainer.fast_dev_run else checkpoint.folder, "trains", mend):
        refuse_changed_data(config, checkpoint)
        metrics = job.run()
    seconds = time.monotonic() - started
    metrics["seconds"] = seconds
    path = None if config.trainer.fast_dev_run else folder
    if path is not None:
        if job.trainer.is_global_zero:
            record = {
                "settings_key": key,
                "steps": job.trainer.global_step,
                "metrics": metrics,
                **job.details,
            }
            _save(model, folder, record)
        job.trainer.strategy.barrier()
        if run is not None:
            for file in kept_files(config, folder, checkpoint.path):
                run.log_artifact(
                    file, f"{'checkpoints' if file == checkpoint.path else 'policy'}/{folder.name}"
                )
            summary = {n.removeprefix("final_"): v for n, v in metrics.items() if n.startswith("final_")}
            run.log_metrics(
                {f"final/{n}": v for n, v in {**summary, "seconds": seconds}.items()},
                step=job.trainer.global_step,
            )
    stop.raise_again(f"{config.policy.name} is trained and saved; the same command goes on behind it")
    return TrainResult(path, metrics, steps=job.trainer.global_step, seconds=seconds)


@dataclass
class _Job:
    """The part of a training that runs when nothing can be reused."""

    config: Config
    model: Any
    data: Any
    fingerprint: str
    callbacks: list[pl.Callback]
    checkpoint: TrainingCheckpoint
    stop: GracefulStop
    logger: Any
    details: dict[str, Any] = field(default_factory=dict)
    """What goes into the record beside the metrics."""

    def run(self) -> dict[str, float]:
        frozen = self.config.trainer.base == "frozen"
        device = next(self.model.parameters()).device
        # Scores are float32 whatever else is lowered, and cached features need no model.
        precision = resolve_precision(self.config, device)
        gated = self.model.kvpop.layer_scorer(0).gated  # learns from the KL, so the model runs in every step
        cached = frozen and not self.config.data.streaming and not gated
        self.trainer = build_trainer(
            self.config,
            device,
            self.callbacks,
            logger=self.logger,
            precision="32-true" if cached else precision,
        )
        module, source = self._cached() if cached else self._live()
        if self.logger:  # before the graceful stop, which must be last
            cost = StepCost(
                base=None if cached else DecoderShape.of(self.model),
                scorer_weights=sum(p.numel() for p in self.model.kvpop.parameters()),
                trains_base=not frozen,
            )
            budget = self.model.kvpop.budget.total
            meter = Throughput(cost, budget, self.config.tracking.peak_tflops)
            self.trainer.callbacks.insert(0, meter)  # type: ignore[attr-defined]
        fit(self.trainer, module, source, self.stop, checkpoint_to_resume(self.config, self.checkpoint))
        self.model.to(device)  # Lightning leaves a module on the CPU when it is done
        metrics = {n: float(v) for n, v in self.trainer.callback_metrics.items() if n.startswith("train/")}
        if isinstance(module, ScorerModule):
            metrics |= module.to(device).summary(source.rows)
        if isinstance(module, GateModule) and not self.config.data.streaming:
            found, self.details = module.to(device).measure(self.data.train_rows)
            metrics |= found
        return {name.removeprefix("train/"): value for name, value in metrics.items()}

    def _cached(self) -> tuple[TrainingModule, StepLoader]:
        """Frozen base: train the scorers on features that are computed once per row."""
        config, policy, trainer = self.config, self.model.kvpop, self.config.trainer
        rows = self.data.train_rows
        if len(rows) == 0:
            raise UserError("there are no training rows: raise data.train_rows or check data.path")
        request = FeatureRequest(
            policy.budget.window, config.distill.target.aggregation, hidden=policy.needs_hidden
        )
        cache = FeatureCache(
            trainer.feature_cache_dir,
            self.model,
            self.fingerprint,
            request,
            limit_gb=trainer.feature_cache_limit_gb,
        )
        rows_per_batch = trainer.rows_per_step * trainer.accumulate
        # A training shorter than one pass must not compute features that it never reads.
        steps = 1 if trainer.fast_dev_run else trainer.max_steps
        wanted = range(min(len(rows), steps * rows_per_batch * self.trainer.world_size))
        cache.fill(rows, wanted, progress=trainer.progress)
        features = FeatureRows(cache, wanted)
        standardize_scorers(policy, (features[index] for index in range(len(features))))
        loader = StepLoader(
            features,
            steps=trainer.max_steps,
            rows_per_batch=rows_per_batch,
            seed=config.seed,
            process=lambda: (self.trainer.global_rank, self.trainer.world_size),
        )
        return ScorerModule(policy, config.distill, trainer, seed=config.seed), loader

    def _live(self) -> tuple[TrainingModule, Any]:
        """The model runs in every step: its weights change, or the rows are not known beforehand."""
        config, data = self.config, self.data
        if any(True for _ in self.model.kvpop.parameters()):
            standardize_scorers(self.model.kvpop, self._first_rows())
        data.rows_per_step = config.trainer.rows_per_step * config.trainer.accumulate
        vars(data).pop("position", None)  # an earlier training on the same data left it at its end
        return live_module(config, self.model), data

    def _first_rows(self) -> Iterator[Features]:
        """Keys, values and hidden states of training rows as they come, one at a time."""
        request = FeatureRequest(
            self.model.kvpop.budget.window, hidden=self.model.kvpop.needs_hidden, target=False
        )
        device = next(self.model.parameters()).device
        fresh = type(self.data)(self.data.config, self.data.tokenizer, rows_per_step=1, seed=self.data.seed)
        for batch in fresh.train_dataloader():
            features = dense_features(self.model, to_device(batch, device), request)
            yield {name: tensor[0] for name, tensor in features.items()}


def live_module(config: Config, model: Any) -> TrainingModule:
    """The training module of a policy whose model runs in every step."""
    kind = model.kvpop.layer_scorer(0).kind
    given = model, config.distill, config.trainer
    if kind in RAGGED:
        return DMSModule(*given, reduction=reduction_of(config), seed=config.seed)
    if kind == "retention_gate":
        return RetentionGateModule(*given, seed=config.seed)
    return StudentModule(*given, seed=config.seed)


def kept_files(config: Config, folder: Path, checkpoint: Path) -> list[Path]:
    """What `tracking.checkpoints` keeps as artifacts of a trained policy."""
    if config.tracking.checkpoints == "none":
        return []
    if config.tracking.checkpoints == "all":
        return [*sorted(folder.iterdir()), *([checkpoint] if checkpoint.exists() else [])]
    return [path for name in (DESCRIPTION, WEIGHTS, RECORD) if (path := folder / name).exists()]


def _model_config(config: Config) -> Any:
    # A base that is trained keeps float32 weights under autocast: bfloat16 cannot hold steps of 1e-5 of a
    # weight.
    if config.trainer.base != "frozen" and config.model.dtype == "auto":
        return replace(config.model, dtype="float32")
    return config.model


def _data(config: Config, tokenizer: Any) -> Any:
    from kvpop_lightning.data import PackedMathDataModule

    data = PackedMathDataModule(
        config.data,
        tokenizer,
        rows_per_step=config.trainer.rows_per_step * config.trainer.accumulate,
        seed=config.seed,
    )
    data.prepare_data()
    data.setup("fit")
    return data


def _finished(folder: Path, key: str) -> dict[str, Any] | None:
    """The record of a finished training with this key."""
    try:
        record = json.loads((folder / RECORD).read_text())
    except (OSError, ValueError):
        return None
    return record if record.get("settings_key") == key else None


def _save(model: Any, folder: Path, record: dict[str, Any]) -> None:
    """The policy and its record; a reader finds the old folder or the new one, never half of it."""
    temporary, old = folder.with_name(f".{folder.name}.new"), folder.with_name(f".{folder.name}.old")
    try:
        for leftover in (temporary, old):
            shutil.rmtree(leftover, ignore_errors=True)
        temporary.parent.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(temporary)
        (temporary / RECORD).write_text(json.dumps(record, indent=2) + "\n")
        if folder.exists():
            os.replace(folder, old)
        os.replace(temporary, folder)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise UserError(
            f"cannot save the policy to {folder}: {error.strerror}; free space or change run_dir"
        ) from error
