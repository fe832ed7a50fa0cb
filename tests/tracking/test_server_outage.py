"""A real MLflow server that is stopped and started again while a run goes on."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from kvpop_lightning.cli import main
from kvpop_lightning.config import compose
from kvpop_lightning.tracking import TrackedRun
from kvpop_lightning.tracking.store import unreachable

pytestmark = pytest.mark.slow


class Server:
    """`mlflow server` on a port of its own; the database outlives it."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.port = sock.getsockname()[1]
        self.folder, self.uri = folder, f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        words = ["--backend-store-uri", f"sqlite:///{self.folder}/server.db", "--workers", "1"]
        words += ["--port", str(self.port), "--artifacts-destination", str(self.folder / "artifacts")]
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "mlflow", "server", *words],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        until = time.monotonic() + 240
        while unreachable(self.uri) is not None:
            assert self.process.poll() is None, (self.folder / "server.log").read_text()
            assert time.monotonic() < until, "the server did not start"
            time.sleep(0.2)

    def stop(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


def test_nothing_is_lost_in_an_outage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "configs").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.2")
    server = Server(tmp_path)
    words = [f"tracking.uri={server.uri}", "tracking.retry_s=0.5", "tracking.final_wait_s=1"]
    try:
        server.start()
        with TrackedRun(compose([*words, "run_dir=runs/a"]), name="a") as run:
            run.log_metrics({"kl": 1.0}, step=1)
            run.flush()
            server.stop()
            for step in range(2, 40):  # training goes on, no call waits long
                started = time.monotonic()
                run.log_metrics({"kl": float(step)}, step=step)
                run.flush()
                assert time.monotonic() - started < 20
            run.set_tags({"during": "outage"})
            (tmp_path / "figure.svg").write_text("<svg/>")
            run.log_artifact("figure.svg", "figures")
            server.start()
            run.log_metrics({"kl": 40.0}, step=40)
            until = time.monotonic() + 120
            while not run.flush() and time.monotonic() < until:
                time.sleep(0.5)
            seen = MlflowClient(server.uri).get_metric_history(run.run_id, "kl")
            assert [metric.step for metric in seen] == list(range(1, 41))  # before the run ends
            server.stop()
            run.log_metrics({"kl": 41.0}, step=41)
        assert "a" in (tmp_path / "runs/a/outbox.json").read_text()  # away at the end: left for later
        server.start()
        assert main(["runs", "send", words[0]]) == 0
        assert "sent" in capsys.readouterr().out
        client = MlflowClient(server.uri)
        stored = client.get_run(run.run_id)
        history = client.get_metric_history(run.run_id, "kl")
        assert [(m.step, m.value) for m in history] == [(step, float(step)) for step in range(1, 42)]
        assert (stored.info.status, stored.data.tags["during"]) == ("FINISHED", "outage")
        assert [item.path for item in client.list_artifacts(run.run_id, "figures")] == ["figures/figure.svg"]
        assert "system/cpu_utilization_percentage" in stored.data.metrics
        assert not (tmp_path / "runs/a/outbox.json").exists()
        assert len(client.search_runs([stored.info.experiment_id])) == 1
    finally:
        server.stop()
