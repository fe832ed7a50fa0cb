"""`kvpop ui`: the MLflow UI on the configured run database."""

from __future__ import annotations

import importlib.util
import os
import sys

from kvpop_lightning.commands import Call
from kvpop_lightning.config.schema import Config
from kvpop_lightning.errors import UserError

SUMMARY = "open the MLflow UI on the run database"
DETAILS = """Serves the database of tracking.uri on this machine only; Ctrl-C ends it. With a server's
    address as tracking.uri there is nothing to start: it prints the address."""
KEYS = ("tracking.uri", "tracking.port")
DEFAULT_EXPERIMENT: str | None = None


def run(config: Config, call: Call) -> int:
    from kvpop_lightning.tracking.naming import public_uri
    from kvpop_lightning.tracking.store import sqlite_file, tracking_uri

    uri = tracking_uri(config.tracking.uri)
    if uri.startswith(("http://", "https://")):
        print(f"open {public_uri(uri)}")
        return 0
    if importlib.util.find_spec("mlflow") is None:
        raise UserError("mlflow is not installed: pip install mlflow")
    file = sqlite_file(uri)
    if file is not None and not file.exists():
        raise UserError(f"no runs yet: {file} does not exist; start with kvpop demo")
    port = config.tracking.port
    print(f"MLflow on {public_uri(uri)}: open http://127.0.0.1:{port} (Ctrl-C ends it)", flush=True)
    words = ["-m", "mlflow", "ui", "--backend-store-uri", uri, "--host", "127.0.0.1", "--port", str(port)]
    # Takes this process's place, so that Ctrl-C and signals reach the server itself.
    os.execv(sys.executable, [sys.executable, *words])
