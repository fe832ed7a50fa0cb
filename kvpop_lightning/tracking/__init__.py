"""MLflow runs that survive failures, interruptions and an absent server; MLflow itself is imported on
first use."""

from __future__ import annotations

from kvpop_lightning.tracking.mlflow_run import TrackedRun, current_run

__all__ = ["TrackedRun", "current_run"]
