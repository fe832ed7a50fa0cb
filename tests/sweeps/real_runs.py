"""The real command line on the toy model, and its runs in MLflow."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

QUICK = ("tracking.system_metrics=false", "trainer.progress=false", "sweep.heartbeat_s=1", "sweep.grace_s=30")
ROOT = Path(__file__).resolve().parents[2]


def environment() -> dict[str, str]:
    given = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    given.pop("MLFLOW_TRACKING_URI", None)
    return given


def start(*words: str) -> subprocess.Popen[str]:
    """`kvpop sweep WORDS` in the working folder."""
    return subprocess.Popen(
        [sys.executable, "-m", "kvpop_lightning.cli", "sweep", *words, *QUICK],
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], timeout: float = 400) -> str:
    text, _ = process.communicate(timeout=timeout)
    return text


def runs(folder: Path) -> list[Any]:
    """All MLflow runs of the project folder, oldest first."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    names = [experiment.experiment_id for experiment in client.search_experiments()]
    return list(reversed(client.search_runs(names, max_results=1000)))


def check_runs(found: Sequence[Any], tickets: int) -> Any:
    """One parent with a child per ticket, none left RUNNING; returns the parent."""
    assert [run.info.run_name for run in found if run.info.status == "RUNNING"] == []
    (parent,) = [run for run in found if run.info.run_name.startswith("sweep ")]
    children = [run for run in found if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    assert sorted(int(run.data.tags["trial"]) for run in children) == list(range(tickets))
    return parent
