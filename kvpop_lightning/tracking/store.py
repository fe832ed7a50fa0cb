"""The connection to an MLflow tracking server: a failure costs a warning and never the training."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from kvpop_lightning.config.files import project_folder
from kvpop_lightning.errors import UserError
from kvpop_lightning.tracking.naming import public_uri

log = logging.getLogger(__name__)

RETRY_AFTER_S = 60.0
"""Seconds before a server that failed is asked again."""
PROBE_TIMEOUT_S = 3.0
PARAMS_PER_BATCH = 100
METRICS_PER_BATCH = 500
MAX_WAITING = 100_000
"""Metrics kept for a server that is away; older ones stay in metrics.jsonl only."""


def tracking_uri(configured: str | None) -> str:
    """The configured URI, else $MLFLOW_TRACKING_URI, else sqlite in the project folder.

    Raises:
        UserError: a file store, which MLflow no longer writes.
    """
    uri = configured or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{project_folder() / 'mlflow.db'}"
    if "://" not in uri or uri.startswith("file:"):
        raise UserError(
            f"tracking.uri={uri}: MLflow no longer writes file stores: use sqlite:///FILE.db or a "
            "server's address"
        )
    return uri


def sqlite_file(uri: str) -> Path | None:
    """The database file of an sqlite URI (`sqlite:///relative.db`, `sqlite:////absolute.db`), else None."""
    scheme, _, path = uri.partition(":///")
    return Path(path.partition("?")[0]) if scheme.startswith("sqlite") and path else None


def unreachable(uri: str) -> str | None:
    """Why the server cannot be reached, None when it can; a few seconds at most."""
    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https"):
        return None
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname or "", port), timeout=PROBE_TIMEOUT_S).close()
    except (OSError, ValueError) as error:
        return f"{public_uri(uri)} does not answer ({error})"
    return None


class Store:
    """One MLflow client whose failures are reported once and then waited out.

    `call` returns None when the server is away, `tell` False. After a failure nothing is tried for `retry_s`
    seconds, so that a dead server does not slow the training down.
    """

    def __init__(
        self, uri: str, experiment: str, *, retry_s: float = RETRY_AFTER_S, warns: bool = True
    ) -> None:
        self.uri = uri
        self.experiment = experiment
        self.retry_s = retry_s
        self.experiment_id: str | None = None
        self._client: Any = None
        self._closed_until = 0.0
        self._warned = not warns
        self.last_error = ""

    def call(self, what: str, action: Callable[[Any], Any], *, final: bool = False) -> Any:
        """`action(client)`, or None with one warning when that fails; `final` tries even a server that
        just failed."""
        if time.monotonic() < self._closed_until and not final:
            return None
        try:
            return action(self._connected())
        except Exception as error:
            # Whatever the server, the network or the database throws: the training is worth more than its
            # log.
            self._closed_until = time.monotonic() + self.retry_s
            self.last_error = f"{what}: {' '.join(str(error).split())[:300]}"
            if not self._warned:
                log.warning(
                    "tracking at %s failed (%s); the run goes on, its metrics are in metrics.jsonl",
                    public_uri(self.uri),
                    self.last_error,
                )
                self._warned = True
            return None

    def tell(self, what: str, action: Callable[[Any], Any], *, final: bool = False) -> bool:
        """`action(client)`; False = try again later. What the server refuses for good is dropped with a
        warning: it would be refused again, and everything behind it would wait."""

        def act(client: Any) -> bool:
            try:
                action(client)
            except Exception as error:
                if not _is_refusal(error):
                    raise
                log.warning("tracking refused %s (%s): left out", what, " ".join(str(error).split())[:300])
            return True

        return bool(self.call(what, act, final=final))

    def _connected(self) -> Any:
        if reason := unreachable(self.uri):
            raise ConnectionError(reason)
        if self._client is None or self.experiment_id is None:
            _be_patient_but_not_for_minutes()
            with _whole():
                from mlflow.tracking import MlflowClient  # seconds to import

            quiet_mlflow()
            if file := sqlite_file(self.uri):
                file.parent.mkdir(parents=True, exist_ok=True)
            self._client = self._client or MlflowClient(self.uri)
            self.experiment_id = self._experiment(self._client)
        return self._client

    def _experiment(self, client: Any) -> str:
        known = client.get_experiment_by_name(self.experiment)
        if known is not None:
            if known.lifecycle_stage == "deleted":
                client.restore_experiment(known.experiment_id)
            return str(known.experiment_id)
        file = sqlite_file(self.uri)
        place = (file.resolve().parent / "mlruns" / self.experiment).as_uri() if file else None
        try:
            return str(client.create_experiment(self.experiment, artifact_location=place))
        except Exception:
            known = client.get_experiment_by_name(self.experiment)  # another process was first
            if known is None:
                raise
            return str(known.experiment_id)

    def log_params(self, run_id: str, params: Mapping[str, str], *, final: bool = False) -> bool:
        """Logs what is new; a value that differs from the run's first one becomes a tag `changed.<name>`."""

        def action(client: Any) -> None:
            from mlflow.entities import Param, RunTag

            known = client.get_run(run_id).data.params
            new = [Param(name, text) for name, text in params.items() if name not in known]
            changed = [
                RunTag(f"changed.{name}"[:250], text)
                for name, text in params.items()
                if name in known and known[name] != text
            ]
            for start in range(0, len(new), PARAMS_PER_BATCH):
                client.log_batch(run_id, params=new[start : start + PARAMS_PER_BATCH])
            for start in range(0, len(changed), PARAMS_PER_BATCH):
                client.log_batch(run_id, tags=changed[start : start + PARAMS_PER_BATCH])

        return self.tell("parameters", action, final=final)

    def log_metrics(self, run_id: str, waiting: list[tuple[str, float, int, int]], *, final: bool) -> bool:
        """Sends `(name, value, time in ms, step)` and removes from `waiting` what arrived; True = all."""

        def action(client: Any) -> None:
            from mlflow.entities import Metric

            while waiting:
                batch = waiting[:METRICS_PER_BATCH]
                client.log_batch(run_id, metrics=[Metric(*item) for item in batch])
                del waiting[: len(batch)]

        self.call("metrics", action, final=final)
        return not waiting


def _is_refusal(error: Exception) -> bool:
    """The server answered, and will answer the same to the same question."""
    code = getattr(error, "error_code", None)
    return code in ("INVALID_PARAMETER_VALUE", "BAD_REQUEST", "PERMISSION_DENIED") or isinstance(
        error, FileNotFoundError
    )


def artifact_folder(uri: str) -> Path | None:
    """Local folder of a `file:` artifact URI, None for others."""
    parts = urlsplit(uri)
    return Path(url2pathname(parts.path)) if parts.scheme == "file" else None


def quiet_mlflow() -> None:
    """MLflow and its database migration tell of every step; a user needs only warnings."""
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")


def set_tags(client: Any, run_id: str, tags: Mapping[str, str]) -> None:
    from mlflow.entities import RunTag

    entries: Sequence[RunTag] = [RunTag(name[:250], str(text)[:8000]) for name, text in tags.items()]
    for start in range(0, len(entries), PARAMS_PER_BATCH):
        client.log_batch(run_id, tags=entries[start : start + PARAMS_PER_BATCH])


def _be_patient_but_not_for_minutes() -> None:
    """MLflow's own defaults keep a training waiting for four minutes per call to a dead server."""
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")


@contextmanager
def _whole() -> Iterator[None]:
    """Ctrl-C waits for the end of an import: MLflow's tables, half declared, cannot be imported again."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: asked.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before if before is not None else signal.default_int_handler)
    if asked:
        raise KeyboardInterrupt
