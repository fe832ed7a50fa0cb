"""Runs end in the right state, go on in the same run, and never stop a training because the server is
away."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from mlflow.tracking import MlflowClient

from kvpop_lightning.config import Config, compose
from kvpop_lightning.errors import Terminated, UserError
from kvpop_lightning.tracking import TrackedRun, current_run, mlflow_run, store
from kvpop_lightning.tracking.store import Store, tracking_uri


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow database with all its tables: making one takes seconds, copying it does not."""
    file = tmp_path_factory.mktemp("mlflow") / "empty.db"
    Store(f"sqlite:///{file}", "unused").call("make", lambda client: client.search_experiments())
    assert file.exists()
    return file


@pytest.fixture
def config(tmp_path: Path, empty_database: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Tracking into a fresh database in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    words = [
        "tracking.system_metrics=false",
        "tracking.experiment=test",
        "tracking.run_name=run",
        "tracking.final_wait_s=0.1",
        "run_dir=out",
    ]
    return compose(words)


def client() -> MlflowClient:
    return MlflowClient(f"sqlite:///{Path('mlflow.db').resolve()}")  # MLflow keeps one store per URI


def run_of(run: TrackedRun) -> Any:
    assert run.run_id is not None
    return client().get_run(run.run_id)


def local_metrics(folder: str = "out") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def test_a_finished_run_holds_everything(config: Config, tmp_path: Path) -> None:
    config = replace(config, tracking=replace(config.tracking, tags={"owner": "ann"}))
    with TrackedRun(config, command="train", overrides=["seed=0"], tags={"data.fingerprint": "abc"}) as run:
        assert current_run() is run
        run.log_metrics(
            {"train/loss": 1.5, "kl/random+decay": 2, "nothing": None, "eval/top1 %": 0.5}, step=7
        )
        run.log_metrics({"train/loss": math.nan}, step=8)
        run.log_params({"extra": {"rows": [1, 2]}})
        run.set_tags({"late": 3})
        (tmp_path / "figure.svg").write_text("<svg/>")
        run.log_artifact("figure.svg", "figures")
    assert current_run() is None
    stored = run_of(run)
    assert run.status == stored.info.status == "FINISHED"
    assert stored.info.run_name == "run"
    assert stored.data.params["policy.budget.topk"] == "92"
    assert stored.data.params["extra.rows"] == "[1, 2]"
    tags = stored.data.tags
    assert (tags["owner"], tags["data.fingerprint"], tags["policy"], tags["late"]) == (
        "ann",
        "abc",
        "kvpop_mlp",
        "3",
    )
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True
    )
    assert commit.returncode or tags["commit"] == commit.stdout.strip()
    history = client().get_metric_history(run.run_id, "train/loss")
    assert (history[0].step, history[0].value) == (7, 1.5)
    assert math.isnan(history[1].value)
    assert {"kl/random_plus_decay", "eval/top1 _percent"} <= set(stored.data.metrics)
    names = {item.path for item in client().list_artifacts(run.run_id)}
    assert {"config.yaml", "overrides.txt", "environment.json", "figures"} <= names
    lines = local_metrics()
    assert lines[0] | {"time": 0} == {
        "run": "run",
        "step": 7,
        "time": 0,
        "train/loss": 1.5,
        "kl/random_plus_decay": 2.0,
        "eval/top1 _percent": 0.5,
    }
    assert lines[1]["train/loss"] == "nan"
    assert yaml.safe_load(Path("out/config.yaml").read_text())["run_dir"] == "out"
    assert compose(["experiment=out/config.yaml"]) == config
    assert "train seed=0" in Path("out/overrides.txt").read_text()
    facts = json.loads(Path("out/environment.json").read_text())
    assert facts["packages"]["omegaconf"]
    assert facts["python"].startswith("3.")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RuntimeError("x"), "FAILED"),
        (SystemExit(1), "FAILED"),
        (SystemExit(0), "FINISHED"),
        (KeyboardInterrupt(), "KILLED"),
        (Terminated(), "KILLED"),
    ],
)
def test_the_end_is_what_happened(config: Config, error: BaseException, status: str) -> None:
    run = TrackedRun(config)
    with pytest.raises(type(error)), run:
        raise error
    assert run_of(run).info.status == status


def test_lightnings_answer_to_an_interruption_is_killed() -> None:
    def context(inner: type[BaseException], outer: BaseException) -> BaseException:
        try:
            try:
                raise inner
            except BaseException:
                raise outer  # noqa: B904  (the context is the point)
        except BaseException as error:
            return error

    def status(error: BaseException) -> str:
        return mlflow_run._status(type(error), error)

    assert status(context(KeyboardInterrupt, SystemExit(1))) == "KILLED"
    assert status(context(Terminated, SystemExit(1))) == "KILLED"
    assert status(context(KeyboardInterrupt, RuntimeError())) == "FAILED"
    assert status(context(ValueError, SystemExit(1))) == "FAILED"
    from lightning.pytorch.utilities.exceptions import SIGTERMException

    assert status(SIGTERMException()) == "KILLED"


def test_a_resumed_run_is_the_same_run(config: Config) -> None:
    first = TrackedRun(config)
    with pytest.raises(RuntimeError), first:  # noqa: PT012  (the block is a run)
        first.log_metrics({"loss": 1}, step=1)
        raise RuntimeError
    changed = replace(config, seed=9)
    with TrackedRun(changed) as second:
        assert second.resumed
        assert run_of(second).info.status == "RUNNING"
        second.log_metrics({"loss": 0.5}, step=2)
    stored = run_of(second)
    assert second.run_id == first.run_id
    assert stored.info.status == "FINISHED"
    assert stored.data.params["seed"] == "0"  # MLflow keeps the first value
    assert stored.data.tags["changed.seed"] == "9"
    assert [metric.step for metric in client().get_metric_history(second.run_id, "loss")] == [1, 2]
    assert len(client().search_runs([stored.info.experiment_id])) == 1
    assert [line["loss"] for line in local_metrics()] == [1, 0.5]
    assert len(Path("out/overrides.txt").read_text().splitlines()) == 2


def test_a_new_run_when_asked_or_when_the_old_one_is_gone(config: Config) -> None:
    with TrackedRun(config) as first:
        pass
    with TrackedRun(replace(config, trainer=replace(config.trainer, resume=False))) as second:
        pass
    assert second.run_id != first.run_id
    client().delete_run(second.run_id)
    with TrackedRun(config) as third:
        assert not third.resumed
    with TrackedRun(replace(config, run_dir="other")) as fourth:
        pass
    (Path("out") / "tracking.json").write_text("{ broken")
    with TrackedRun(config) as fifth:
        pass
    assert len({first.run_id, second.run_id, third.run_id, fourth.run_id, fifth.run_id}) == 5


def test_children_are_nested_and_resume_each(config: Config) -> None:
    ids = []
    for _ in range(2):
        with TrackedRun(config) as parent:
            with parent.child("kvpop_mlp", replace(config, seed=5)) as child:
                assert current_run() is child
                child.log_metrics({"loss": 1}, step=1)
            assert current_run() is parent
            broken = parent.child("kvpop_mlstm")
            with pytest.raises(RuntimeError), broken:
                raise RuntimeError
        assert run_of(child).data.tags["mlflow.parentRunId"] == parent.run_id
        assert run_of(child).info.run_name == "kvpop_mlp"
        assert [run_of(run).info.status for run in (parent, child, broken)] == [
            "FINISHED",
            "FINISHED",
            "FAILED",
        ]
        ids.append((parent.run_id, child.run_id, broken.run_id))
    assert ids[0] == ids[1]
    assert {line["run"] for line in local_metrics()} == {"run/kvpop_mlp"}
    assert (
        yaml.safe_load(Path("out/config.yaml").read_text())["seed"] == 0
    )  # the parent's, not the last child's
    assert "config.yaml" in {item.path for item in client().list_artifacts(child.run_id)}


def test_sigterm_ends_a_run_as_killed_and_the_same_command_goes_on(config: Config, tmp_path: Path) -> None:
    code = """
import time
from kvpop_lightning.config import compose
from kvpop_lightning.tracking import TrackedRun
with TrackedRun(compose(["experiment=saved.yaml"])) as run:
    run.log_metrics({"loss": 1.0}, step=3)
    print(run.run_id, flush=True)
    time.sleep(60)
"""
    from kvpop_lightning.config import to_yaml

    (tmp_path / "saved.yaml").write_text(to_yaml(config))
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    assert process.stdout is not None
    run_id = process.stdout.readline().strip()
    assert client().get_run(run_id).info.status == "RUNNING"
    os.kill(process.pid, signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "Terminated" in err
    stored = client().get_run(run_id)
    assert stored.info.status == "KILLED"
    assert stored.data.metrics["loss"] == 1.0  # what waited was sent
    with TrackedRun(config) as again:
        pass
    assert again.run_id == run_id
    assert client().get_run(run_id).info.status == "FINISHED"


def test_sigterm_handler_is_put_back(config: Config) -> None:
    before = signal.getsignal(signal.SIGTERM)
    run = TrackedRun(config)
    with pytest.raises(Terminated), run:  # noqa: PT012  (the block is a run)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)
    assert signal.getsignal(signal.SIGTERM) is before
    assert run_of(run).info.status == "KILLED"


def test_works_outside_the_main_thread(config: Config) -> None:
    runs: list[TrackedRun] = []

    def work() -> None:
        with TrackedRun(config) as run:
            runs.append(run)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert run_of(runs[0]).info.status == "FINISHED"


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def test_an_absent_server_costs_one_warning(config: Config, caplog: pytest.LogCaptureFixture) -> None:
    uri = f"http://ann:secret@127.0.0.1:{free_port()}"
    config = replace(config, tracking=replace(config.tracking, uri=uri, system_metrics=True))
    started = time.monotonic()
    with caplog.at_level(logging.WARNING), TrackedRun(config) as run:
        for step in range(300):
            run.log_metrics({"loss": step}, step=step)
        run.log_artifact("out/config.yaml")
        run.set_tags({"a": "b"})
        with run.child("one") as child:
            child.log_metrics({"loss": 1}, step=1)
    assert time.monotonic() - started < 30
    assert (run.run_id, run.status) == (None, "FINISHED")
    assert len(local_metrics()) == 301
    warnings = [record.message for record in caplog.records if record.name.startswith("kvpop_lightning")]
    assert len(warnings) == 2  # when it failed, and at the end
    assert "metrics.jsonl" in warnings[0]
    assert "kvpop runs send out" in warnings[1]
    assert "secret" not in "".join(warnings) + Path("out/outbox.json").read_text()


def test_a_server_that_comes_back_gets_what_waited(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(config, tracking=replace(config.tracking, retry_s=0.0))
    away: list[str | None] = ["away"]
    monkeypatch.setattr(store, "unreachable", lambda uri: away[0])
    with TrackedRun(config) as run:
        run.log_metrics({"loss": 1}, step=1)
        run.flush()
        assert run.run_id is None
        away[0] = None
        run.log_metrics({"loss": 2}, step=2)
        run.flush()
        away[0] = "away again"
        run.log_metrics({"loss": 3}, step=3)
        run.flush()
        away[0] = None
    assert [metric.step for metric in client().get_metric_history(run.run_id, "loss")] == [1, 2, 3]
    assert run_of(run).data.params["seed"] == "0"
    assert run_of(run).info.status == "FINISHED"


def test_a_failing_database_does_not_stop_the_training(
    config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    Path("mlflow.db").write_text("this is no database at all, whatever its name says " * 100)
    with caplog.at_level(logging.WARNING), TrackedRun(config) as run:
        run.log_metrics({"loss": 1}, step=1)
    assert run.run_id is None
    assert len(local_metrics()) == 1
    assert sum("tracking" in record.message for record in caplog.records) == 1
    assert Path("out/outbox.json").exists()


def test_switched_off_keeps_the_local_files(config: Config) -> None:
    config = replace(config, tracking=replace(config.tracking, enabled=False))
    with TrackedRun(config) as run:
        run.log_metrics({"loss": 1}, step=1)
        run.log_artifact("nowhere")
    assert run.run_id is None
    assert local_metrics()[0]["loss"] == 1
    assert not (Path("out") / "tracking.json").exists()
    assert client().search_runs([e.experiment_id for e in client().search_experiments()]) == []


def test_other_ranks_do_nothing(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with TrackedRun(config) as run:
        run.log_metrics({"loss": 1}, step=1)
    assert run.run_id is None
    assert not Path("out").exists()


def test_system_metrics_are_recorded_in_the_run(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.2")
    config = replace(config, tracking=replace(config.tracking, system_metrics=True))
    with TrackedRun(config) as run:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and not Path("out/system_metrics.jsonl").read_text():
            time.sleep(0.05)
    assert "system/cpu_utilization_percentage" in run_of(run).data.metrics


def test_where_runs_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "configs").mkdir()
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    assert tracking_uri(None) == f"sqlite:///{tmp_path}/mlflow.db"  # one database for the whole project
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://host")
    assert tracking_uri(None) == "http://host"
    assert tracking_uri("sqlite:///x.db") == "sqlite:///x.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "./mlruns")
    with pytest.raises(UserError, match="file store"):
        tracking_uri(None)


def test_artifacts_lie_beside_the_database(
    config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with TrackedRun(config) as run:
        pass
    assert list((tmp_path / "mlruns" / "test" / str(run.run_id)).rglob("config.yaml"))
