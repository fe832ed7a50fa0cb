"""One run in MLflow, and beside it in the run folder: started or resumed, and always ended in the right
state."""

from __future__ import annotations

import getpass
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from kvpop_lightning.config.compose import to_yaml
from kvpop_lightning.config.schema import Config
from kvpop_lightning.errors import Terminated
from kvpop_lightning.tracking import local
from kvpop_lightning.tracking.environment import git_state, write_run_folder
from kvpop_lightning.tracking.naming import flat_params, metric_name, public_uri
from kvpop_lightning.tracking.store import Store, set_tags, tracking_uri

log = logging.getLogger(__name__)

FLUSH_AFTER_S = 5.0
FLUSH_AFTER_METRICS = 200

_open_runs: list[TrackedRun] = []


def current_run() -> TrackedRun | None:
    """The innermost run that is open in this process, so that deep code can log without passing it around."""
    return _open_runs[-1] if _open_runs else None


class TrackedRun:
    """Context manager around everything one command or one training does.

    On entry it writes `config.yaml`, `overrides.txt` and `environment.json` into `config.run_dir` and
    starts a run, or goes on in the one that `tracking.json` in that folder names (unless
    `trainer.resume=false`). On exit the run is FINISHED, FAILED (an exception) or KILLED (Ctrl-C,
    SIGTERM). Metrics always go to `metrics.jsonl` too; with `tracking.enabled=false`, or while the server
    is away, only there. Other processes than rank 0 do nothing.

    Args:
        config: the resolved configuration; its `tracking` section says where.
        name: name in the UI and key in `tracking.json`; default `tracking.run_name`, else command and policy.
        command, overrides: what the user typed, kept with the run.
        parent: the run this one is nested under (`run.child(...)` sets it).
        tags: further tags, for instance the data fingerprint.

    Raises:
        UserError: a tracking URI that MLflow refuses.
    """

    def __init__(
        self,
        config: Config,
        *,
        name: str | None = None,
        command: str = "",
        overrides: Sequence[str] = (),
        parent: TrackedRun | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        self.config = config
        self.name = name or config.tracking.run_name or f"{command} {config.policy.name}".strip()
        self.key: str = f"{parent.key}/{self.name}" if parent else self.name
        self.command, self.overrides = command, list(overrides)
        self.parent = parent
        self.folder = Path(config.run_dir)
        self.run_id: str | None = None
        self.resumed = False
        self.status: str | None = None
        self._tags = dict(tags or {})
        self._store: Store | None = None
        self._local: local.LocalMetrics | None = None
        self._waiting: list[tuple[str, float, int, int]] = []
        self._files: list[Path] = []
        self._flushed_at = 0.0
        self._monitor: Any = None
        self._old_handler: Any = None
        self._closing = False
        if _is_rank_zero() and config.tracking.enabled:
            uri = tracking_uri(config.tracking.uri)
            shared = parent._store if parent else None
            self._store = shared if shared and shared.uri == uri else Store(uri, config.tracking.experiment)

    def __enter__(self) -> TrackedRun:
        self._watch_sigterm()
        try:
            if _is_rank_zero():
                # A child in its parent's folder must not replace what the parent wrote about the command.
                shares = self.parent is not None and self.parent.folder == self.folder
                files = [] if shares else write_run_folder(self.config, self.overrides, self.command)
                self._local = local.LocalMetrics(self.folder, self.key)
                self._files = files
                if self._store is not None:
                    self._start(self._store, files)
        except BaseException as error:
            self._end(type(error), error)
            raise
        _open_runs.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(kind, error)

    def child(
        self, name: str, config: Config | None = None, tags: Mapping[str, str] | None = None
    ) -> TrackedRun:
        """A run nested under this one, for instance one policy's training inside the demo."""
        return TrackedRun(
            config or self.config,
            name=name,
            command=self.command,
            overrides=self.overrides,
            parent=self,
            tags=tags,
        )

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Numbers by global step; anything with a `float` value does, None is left out."""
        if self._local is None:
            return
        values = {metric_name(name): float(value) for name, value in metrics.items() if value is not None}
        if not values:
            return
        self._local.write(values, step)
        if self._store is not None:
            now = int(time.time() * 1000)
            self._waiting += [(name, value, now, step or 0) for name, value in values.items()]
            overdue = time.monotonic() - self._flushed_at > FLUSH_AFTER_S
            if len(self._waiting) >= FLUSH_AFTER_METRICS or overdue:
                self.flush()

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Nested or flat parameters. A value that differs from an earlier one of the same run becomes a
        tag."""
        self._with_run(lambda store, run_id: store.log_params(run_id, flat_params(params)))

    def set_tags(self, tags: Mapping[str, Any]) -> None:
        texts = {metric_name(name): str(text) for name, text in tags.items()}
        self._with_run(
            lambda store, run_id: store.call("tags", lambda client: set_tags(client, run_id, texts))
        )

    def log_artifact(self, path: str | Path, folder: str | None = None) -> None:
        """A file, or a folder with all that is in it; `folder` is the place inside the run's artifacts."""
        path = Path(path)

        def action(client: Any, run_id: str) -> None:
            log_one = client.log_artifacts if path.is_dir() else client.log_artifact
            log_one(run_id, str(path), folder)

        self._with_run(
            lambda store, run_id: store.call(f"artifact {path.name}", lambda client: action(client, run_id))
        )

    def flush(self, *, final: bool = False) -> None:
        """Sends the metrics that wait; a server that is away leaves them waiting."""
        self._flushed_at = time.monotonic()
        if self._store is None or not self._waiting:
            return
        if self.run_id is None:
            self._start(self._store, self._files)  # the server was away when the run began: it may be back
        self._with_run(lambda store, run_id: store.log_metrics(run_id, self._waiting, final=final))

    def _with_run(self, action: Callable[[Store, str], Any]) -> None:
        if self._store is not None and self.run_id is not None:
            action(self._store, self.run_id)

    def _start(self, store: Store, files: Sequence[Path]) -> None:
        uri = public_uri(store.uri)
        earlier = local.stored_run(self.folder, uri, self.key) if self.config.trainer.resume else None
        if earlier and store.call("resume", lambda client: _reopen(client, earlier)):
            self.run_id, self.resumed = earlier, True
        else:
            git = git_state()
            tags = {
                "mlflow.user": _user(),
                "mlflow.source.name": f"kvpop {self.command}".strip(),
                "mlflow.source.type": "LOCAL",
                "policy": self.config.policy.name,
                "model": self.config.model.name,
                "git.dirty": str(git.get("dirty", "unknown")).lower(),
                **({"mlflow.source.git.commit": git["commit"], "commit": git["commit"]} if git else {}),
                **({"mlflow.parentRunId": self.parent.run_id} if self.parent and self.parent.run_id else {}),
                **({"experiment": self.config.experiment} if self.config.experiment else {}),
                **self.config.tracking.tags,
                **self._tags,
            }
            run = store.call(
                "start",
                lambda client: client.create_run(store.experiment_id, tags=tags, run_name=self.name),
            )
            if run is None:
                return
            self.run_id = str(run.info.run_id)
        local.store_run(self.folder, uri, str(store.experiment_id), self.key, self.run_id)
        if self.resumed and self._tags:
            self.set_tags(self._tags)
        self.log_params(asdict(self.config))
        for path in files:
            self.log_artifact(path)
        if not files:
            run_id, text = self.run_id, to_yaml(self.config)
            store.call("config.yaml", lambda client: client.log_text(run_id, text, "config.yaml"))
        if self.config.tracking.system_metrics and self.parent is None:
            self._monitor = store.call("system metrics", self._start_monitor)

    def _start_monitor(self, client: Any) -> Any:
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        assert self._store is not None
        monitor = SystemMetricsMonitor(self.run_id, resume_logging=self.resumed, tracking_uri=self._store.uri)
        monitor.start()
        return monitor

    def _end(self, kind: type[BaseException] | None, error: BaseException | None) -> None:
        self._closing = True
        status = self.status = _status(kind, error)
        if self in _open_runs:
            _open_runs.remove(self)
        try:
            self.flush(final=True)
            if self._monitor is not None:
                with suppress(Exception):  # its thread writes to the same server: a failure there is no news
                    self._monitor.finish()
            if self._store is not None and self.run_id is not None:
                run_id = self.run_id
                self._store.call("end", lambda client: client.set_terminated(run_id, status), final=True)
        finally:
            if self._local is not None:
                self._local.close()
            self._unwatch_sigterm()

    def _watch_sigterm(self) -> None:
        """Turns SIGTERM into an exception, so that the run can be ended; only the outermost run does, in
        the main thread."""
        if self.parent is None and threading.current_thread() is threading.main_thread():
            self._old_handler = signal.signal(signal.SIGTERM, self._on_sigterm)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        if not self._closing:
            raise Terminated(f"signal {number}")

    def _unwatch_sigterm(self) -> None:
        if self._old_handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._old_handler)
            self._old_handler = None


def _status(kind: type[BaseException] | None, error: BaseException | None) -> str:
    """FINISHED, FAILED or KILLED. Lightning answers Ctrl-C with `sys.exit(1)`: the cause stands in the
    context."""
    if kind is None:
        return "FINISHED"
    seen: set[int] = set()
    cause = error
    while cause is not None and id(cause) not in seen:
        if isinstance(cause, KeyboardInterrupt) or type(cause).__name__ == "SIGTERMException":
            return "KILLED"
        if not isinstance(cause, SystemExit):
            break  # an ordinary exception: what it came from does not make it an interruption
        seen.add(id(cause))
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, SystemExit) and error.code in (None, 0):
        return "FINISHED"
    return "FAILED"


def _reopen(client: Any, run_id: str) -> bool:
    """Sets a run back to RUNNING; False when it is gone from the server (deleted, or another database)."""
    from mlflow.exceptions import MlflowException

    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return False
        raise
    if run.info.lifecycle_stage == "deleted":
        return False
    client.update_run(run_id, status="RUNNING")
    return True


def _is_rank_zero() -> bool:
    ranks = (os.environ.get(name) for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK"))
    return next((int(rank) == 0 for rank in ranks if rank and rank.isdigit()), True)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container without a password entry
        return "unknown"
