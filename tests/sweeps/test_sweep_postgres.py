"""Two workers on one study in PostgreSQL, one killed in mid-trial while the tracking server is away."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest
from mlflow.tracking import MlflowClient
from real_runs import TrackingServer, check_runs, finish, runs, start

from kvpop_lightning.errors import UserError
from kvpop_lightning.sweeps.storage import open_storage, storage_address

pytestmark = pytest.mark.slow
TRIALS = 5
OUTAGE_S = 30


def _binaries() -> Path | None:
    found = shutil.which("initdb")
    places = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    places += [Path(found).parent] if found else []
    return next((p for p in places if (p / "initdb").exists() and (p / "pg_ctl").exists()), None)


@pytest.fixture
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of this test's own, on a free port, gone afterwards."""
    binaries = _binaries()
    if binaries is None:
        pytest.skip("PostgreSQL is not installed (apt-get install postgresql)")
    folder = Path("/tmp") / f"kvpop-pg-{os.getpid()}"  # a socket's path must be short
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    as_user: list[str] = []
    if os.getuid() == 0:  # the server refuses root
        shutil.chown(folder, "postgres", "postgres")
        as_user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--init-groups"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def call(tool: str, *words: str) -> None:
        command = [*as_user, str(binaries / tool), *words]
        subprocess.run(command, check=True, cwd=folder, stdout=subprocess.DEVNULL, timeout=120)

    data = str(folder / "data")
    call("initdb", "-D", data, "-U", "kvpop", "-A", "trust", "--no-sync")
    options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={folder} -c fsync=off"
    call("pg_ctl", "-D", data, "-w", "-l", str(folder / "log"), "-o", options, "start")
    try:
        yield f"postgresql://kvpop@127.0.0.1:{port}/postgres"
    finally:
        call("pg_ctl", "-D", data, "-m", "immediate", "stop")
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def tracking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrackingServer]:
    server = TrackingServer(tmp_path_factory.mktemp("tracking"))
    server.start()
    try:
        yield server
    finally:
        server.stop()


def test_a_killed_worker_and_an_absent_tracking_server_lose_nothing(
    project: Path, database: str, tracking: TrackingServer
) -> None:
    # Steps enough that a trial is surely in its training when its worker dies.
    given = ["smoke", f"storage={database}", f"trials={TRIALS}", "trainer.max_steps=60", "time_limit_s=900"]
    given += [f"tracking.uri={tracking.uri}", "tracking.retry_s=2", "tracking.final_wait_s=1"]
    driver = start(*given)
    study = None
    workers = []
    try:
        workers = [start(*given, "--worker"), start(*given, "--worker", "run_dir=runs/sweeps/smoke")]
        storage = open_storage(storage_address(database, project), 1)
        victim, pid = workers[0], workers[0].pid
        until = time.monotonic() + 300
        trained: list[int] = []
        while not trained and time.monotonic() < until:
            time.sleep(0.3)
            try:
                study = optuna.load_study(study_name="smoke", storage=storage)
            except KeyError:
                continue
            running = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,))
            mine = [t for t in running if t.user_attrs.get("worker", {}).get("pid") == pid]
            for trial in mine:
                log = Path(f"runs/sweeps/smoke/trials/{trial.user_attrs['ticket']:04d}/metrics.jsonl")
                if log.exists() and '"train/loss"' in log.read_text():
                    trained.append(trial.number)
        assert trained, "the worker never came to train"
        tracking.stop()
        gone = time.monotonic()
        victim.send_signal(signal.SIGKILL)
        time.sleep(OUTAGE_S)
        ended = [t for t in study.get_trials() if t.datetime_complete is not None and t.state.name != "FAIL"]
        assert ended, "no trial ended while the tracking server was away: nothing was tried"
        tracking.start()
        assert time.monotonic() - gone >= OUTAGE_S
        text = finish(driver)
        assert f"all {TRIALS} trials are done" in text, text
        assert "all" in finish(workers[1], 60)
    finally:
        for process in (driver, *workers):
            if process.poll() is None:
                process.kill()
    assert study is not None
    trials = study.get_trials()
    lost = trials[trained[0]]
    assert (lost.state.name, lost.user_attrs["message"]) == ("FAIL", "its worker was lost")
    counted = [t for t in trials if t.state.name in ("COMPLETE", "PRUNED")]
    assert sorted(t.user_attrs["ticket"] for t in counted) == list(range(TRIALS))
    assert len(trials) == TRIALS + 1
    replaced = next(t for t in counted if t.user_attrs["ticket"] == lost.user_attrs["ticket"])
    assert replaced.params == lost.params
    assert replaced.user_attrs["replaces"] == lost.number
    hosts = {t.user_attrs["worker"]["pid"] for t in counted}
    assert len(hosts) >= 2
    found = runs(tracking.uri)
    parent = check_runs(found, TRIALS)
    assert parent.info.status == "FINISHED"
    client = MlflowClient(tracking.uri)
    for run in found:
        if (ticket := run.data.tags.get("trial")) is None:
            continue
        assert run.data.tags["sweep.state"] in ("finished", "pruned"), run.data.tags
        assert run.info.status == ("FINISHED" if run.data.tags["sweep.state"] == "finished" else "KILLED")
        # Every value that its folder has arrived.
        lines = Path(f"runs/sweeps/smoke/trials/{int(ticket):04d}/metrics.jsonl").read_text().splitlines()
        kept = {entry["step"] for entry in map(json.loads, lines) if "train/loss" in entry}
        sent = {metric.step for metric in client.get_metric_history(run.info.run_id, "train/loss")}
        assert sent == kept


def test_workers_that_start_together_on_an_empty_database(database: str) -> None:
    """The tasks of a job array do: all but one used to die of tables that another was making."""
    context = multiprocessing.get_context("fork")
    together, found = context.Barrier(6), context.Queue()

    def opens() -> None:
        together.wait(60)
        try:
            open_storage(storage_address(database, Path()), 1)
        except UserError as error:
            found.put(str(error))
        else:
            found.put("open")

    workers = [context.Process(target=opens) for _ in range(6)]
    for worker in workers:
        worker.start()
    assert [found.get(timeout=120) for _ in workers] == ["open"] * 6
    for worker in workers:
        worker.join(60)
