"""`kvpop ui`: the MLflow UI on the configured run database, and optuna-dashboard on a sweep's study."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

from kvpop_lightning.commands import Call
from kvpop_lightning.config.schema import Config
from kvpop_lightning.errors import UserError

SUMMARY = "open the MLflow UI on the run database, and optuna-dashboard on the newest sweep"
DETAILS = """Serves the database of tracking.uri on this machine only, and beside it the study of the newest
    sweep (sweep.storage=... chooses another) if optuna-dashboard is installed; Ctrl-C ends both. A port
    that is taken is named and the next free one used. A server's address as tracking.uri is printed."""
KEYS = ("tracking.uri", "tracking.port", "sweep.storage")
DEFAULT_EXPERIMENT: str | None = None

HOST = "127.0.0.1"
DASHBOARD_OFFSET = 3080
"""optuna-dashboard's port is MLflow's and this much: with MLflow's own 5000, its own 8080."""
BLOCKED = frozenset({5060, 5061, 6000, 6566, *range(6665, 6670), 6679, 6697, 10080})
"""Ports from 1024 on that browsers refuse to open."""
STOP_S = 10.0


def run(config: Config, call: Call) -> int:
    from kvpop_lightning.tracking.naming import public_uri
    from kvpop_lightning.tracking.store import sqlite_file, tracking_uri

    uri = tracking_uri(config.tracking.uri)
    commands: list[list[str]] = []
    ports: list[int] = []
    if uri.startswith(("http://", "https://")):
        print(f"open {public_uri(uri)}", flush=True)
    else:
        if importlib.util.find_spec("mlflow") is None:
            raise UserError("mlflow is not installed: pip install mlflow")
        file = sqlite_file(uri)
        if file is not None and not file.exists():
            raise UserError(f"no runs yet: {file} does not exist; start with kvpop demo")
        port = free_port(config.tracking.port)
        print(f"starting MLflow on {public_uri(uri)} ...", flush=True)
        ports.append(port)
        words = ["--backend-store-uri", uri, "--host", HOST, "--port", str(port), "--workers", "1"]
        commands.append([sys.executable, "-m", "mlflow", "ui", *words])
    if study := newest_study(config):
        dashboard = dashboard_program()
        if dashboard is None:
            print(f"sweep study {public_uri(study)}: pip install optuna-dashboard shows it here", flush=True)
        else:
            port = free_port(min(config.tracking.port + DASHBOARD_OFFSET, 65000))
            print(f"starting optuna-dashboard on {public_uri(study)} ...", flush=True)
            ports.append(port)
            commands.append([dashboard, study, "--host", HOST, "--port", str(port)])
    return serve(commands, ports) if commands else 0


def free_port(first: int, tries: int = 50) -> int:
    """`first` or the next free port; says so when it is not `first`.

    Raises:
        UserError: none of them is free.
    """
    for port in range(first, min(first + tries, 65536)):
        if port in BLOCKED:
            continue
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one just left is free
            try:
                sock.bind((HOST, port))
            except OSError:
                continue
        if port != first:
            why = "refused by browsers" if first in BLOCKED else "busy"
            print(f"port {first} is {why}: taking {port}", flush=True)
        return port
    raise UserError(f"no free port from {first} on: set tracking.port to another range")


def answers(port: int) -> bool:
    with socket.socket() as sock:
        sock.settimeout(1.0)
        return sock.connect_ex((HOST, port)) == 0


def newest_study(config: Config) -> str | None:
    """Storage of `sweep.storage`, else of the study that was written last under runs/ or run_dir."""
    from kvpop_lightning.config.files import project_folder
    from kvpop_lightning.sweeps.storage import JOURNAL_FILE, SQLITE_FILE, storage_address

    if config.sweep.storage is not None:
        return storage_address(config.sweep.storage, Path(config.run_dir)).removeprefix("journal:")
    roots = {(project_folder() / "runs").resolve(), Path(config.run_dir).resolve()}
    files = [file for root in roots for name in (SQLITE_FILE, JOURNAL_FILE) for file in root.rglob(name)]
    if not files:
        return None
    newest = max(files, key=lambda file: file.stat().st_mtime)
    return f"sqlite:///{newest}" if newest.name == SQLITE_FILE else str(newest)


def dashboard_program() -> str | None:
    beside = Path(sys.executable).with_name("optuna-dashboard")
    return str(beside) if beside.exists() else shutil.which("optuna-dashboard")


def serve(commands: list[list[str]], ports: list[int]) -> int:
    """Runs the servers until Ctrl-C or SIGTERM, or until one ends; then ends all, their workers included.

    Each address is printed when it answers: before, a browser would show an error.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    servers: list[subprocess.Popen[bytes]] = []
    try:
        # In sessions of their own: Ctrl-C reaches this process alone, which ends them in order.
        servers += [subprocess.Popen(words, start_new_session=True) for words in commands]
        silent = dict(zip(ports, commands, strict=True))
        while all(server.poll() is None for server in servers):
            for port in [port for port in silent if answers(port)]:
                words = silent.pop(port)
                name = "MLflow" if "mlflow" in words else "optuna-dashboard"
                print(f"{name}: open http://{HOST}:{port}  (Ctrl-C ends it)", flush=True)
            time.sleep(0.2)
        ended = next(server for server in servers if server.poll() is not None)
        words = commands[servers.index(ended)]
        raise UserError(f"{' '.join(words[:4])} ended with status {ended.returncode}")
    except KeyboardInterrupt:
        return 0
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # an impatient second Ctrl-C must not leave one running
        for sign in (signal.SIGTERM, signal.SIGKILL):
            for server in servers:
                with suppress(ProcessLookupError):
                    os.killpg(server.pid, sign)
            until = time.monotonic() + STOP_S
            while time.monotonic() < until and any(server.poll() is None for server in servers):
                time.sleep(0.1)
        for number, handler in before.items():
            signal.signal(number, handler)
