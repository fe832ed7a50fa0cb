"""Lightning's logger interface on a TrackedRun: the Trainer logs, the run decides when and how it ends."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from kvpop_lightning.tracking.mlflow_run import TrackedRun


class RunLogger(Logger):
    """Passes a Trainer's metrics on to `run`.

    Lightning calls `finalize` at the end of every `fit`, `validate` and `test`; the run may go on after
    that (the evaluation, the next policy), so `finalize` only flushes. Its state is set when the `with
    TrackedRun` block ends.

    Args:
        run: an entered TrackedRun.
        prefix: put before every metric name, with a slash.
    """

    def __init__(self, run: TrackedRun, prefix: str = "") -> None:
        super().__init__()
        self._run = run
        self._prefix = f"{prefix}/" if prefix else ""

    @property
    def name(self) -> str:
        return self._run.config.tracking.experiment

    @property
    def version(self) -> str:
        return self._run.run_id or self._run.key

    @property
    def save_dir(self) -> str:
        return str(self._run.folder)

    @property
    @rank_zero_experiment
    def experiment(self) -> TrackedRun:
        """The run itself."""
        return self._run

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        values = vars(params) if isinstance(params, Namespace) else dict(params)
        self._run.log_params({"hparams": values})

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        named = {f"{self._prefix}{name}": value for name, value in metrics.items() if name != "epoch"}
        self._run.log_metrics(named, step)

    @rank_zero_only
    def save(self) -> None:
        self._run.flush()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        self._run.flush()
