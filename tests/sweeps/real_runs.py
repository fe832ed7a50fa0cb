"""The real command line on the toy model, and its runs in MLflow."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
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


class TrackingServer:
    """`mlflow server` on a free port, that can go away and come back there with what it knew."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.uri = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, timeout: float = 120) -> None:
        """Returns when it answers."""
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        places = ["--backend-store-uri", f"sqlite:///{self.folder / 'server.db'}"]
        places += ["--artifacts-destination", str(self.folder / "artifacts"), "--workers", "1"]
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*command, *places],
                cwd=self.folder,
                env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        until = time.monotonic() + timeout
        while True:
            try:
                urllib.request.urlopen(f"{self.uri}/health", timeout=5).close()
                return
            except OSError:
                assert self._process.poll() is None, (self.folder / "server.log").read_text()
                assert time.monotonic() < until, "the tracking server does not answer"
                time.sleep(0.3)

    def stop(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(20)
            self._process = None


def runs(where: Path | str) -> list[Any]:
    """All MLflow runs of a project folder or of a server, oldest first."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(where if isinstance(where, str) else f"sqlite:///{where / 'mlflow.db'}")
    names = [experiment.experiment_id for experiment in client.search_experiments()]
    return list(reversed(client.search_runs(names, max_results=1000)))


def check_runs(found: Sequence[Any], tickets: int) -> Any:
    """One parent with a child per ticket, none left RUNNING; returns the parent."""
    assert [run.info.run_name for run in found if run.info.status == "RUNNING"] == []
    (parent,) = [run for run in found if run.info.run_name.startswith("sweep ")]
    children = [
        run
        for run in found
        if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id and "confirm" not in run.data.tags
    ]
    assert sorted(int(run.data.tags["trial"]) for run in children) == list(range(tickets))
    return parent
