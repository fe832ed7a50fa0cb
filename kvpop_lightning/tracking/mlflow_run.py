"""One run in MLflow, and beside it in the run folder: started or resumed, and always ended in the right
state."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from kvpop_lightning.config.compose import to_yaml
from kvpop_lightning.config.schema import Config
from kvpop_lightning.signals import sigterm_interrupts
from kvpop_lightning.tracking import local
from kvpop_lightning.tracking.environment import write_atomically, write_run_folder
from kvpop_lightning.tracking.naming import flat_params, metric_name, public_uri
from kvpop_lightning.tracking.outbox import Waiting, put, read_outbox, this_process
from kvpop_lightning.tracking.run_facts import first_tags, reopen
from kvpop_lightning.tracking.run_facts import is_rank_zero as _is_rank_zero
from kvpop_lightning.tracking.run_facts import status_of as _status
from kvpop_lightning.tracking.send import send_at_the_end, send_waiting
from kvpop_lightning.tracking.store import MAX_WAITING, Store, tracking_uri
from kvpop_lightning.tracking.system import SystemSampler

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
    SIGTERM). Metrics always go to `metrics.jsonl` too; with `tracking.enabled=false` only there. What a
    server that is away misses is sent when it is back, at the latest by `kvpop runs send`. Other processes
    than rank 0 do nothing.

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
        self._todo = Waiting()
        self._unsent: set[Path] = set()
        self._cut = False
        self._word_left = False
        self._started_ms = 0
        self._flushed_at = 0.0
        self._lock = threading.RLock()
        self._local_system: local.LocalMetrics | None = None
        self._sampler: SystemSampler | None = None
        self._signals = ExitStack()
        self._closing = False
        if _is_rank_zero() and config.tracking.enabled:
            uri = tracking_uri(config.tracking.uri)
            shared = parent._store if parent else None
            fresh = Store(uri, config.tracking.experiment, retry_s=config.tracking.retry_s)
            self._store = shared if shared and shared.uri == uri else fresh

    def __enter__(self) -> TrackedRun:
        if self.parent is None:  # only the outermost run ends itself at SIGTERM
            self._signals.enter_context(sigterm_interrupts(lambda: self._closing))
        try:
            if _is_rank_zero():
                # A child in its parent's folder must not replace what the parent wrote about the command.
                shares = self.parent is not None and self.parent.folder == self.folder
                files = [] if shares else write_run_folder(self.config, self.overrides, self.command)
                self._local = local.LocalMetrics(self.folder, self.key)
                self._started_ms = int(time.time() * 1000)
                if self._store is not None:
                    self._open(files)
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
        if values:
            self._record(self._local, values, step)

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Nested or flat parameters. A value that differs from an earlier one of the same run becomes a
        tag."""
        self._todo.params |= flat_params(params)
        self._send_soon()

    def set_tags(self, tags: Mapping[str, Any]) -> None:
        self._todo.tags |= {metric_name(name): str(text) for name, text in tags.items()}
        self._send_soon()

    def log_artifact(self, path: str | Path, folder: str | None = None) -> None:
        """A file, or a folder with all that is in it; `folder` is the place inside the run's artifacts."""
        self._todo.artifacts.append([str(Path(path).absolute()), folder])
        self._send_soon()

    def flush(self, *, final: bool = False) -> bool:
        """Sends what waits; a server that is away leaves it waiting. True = nothing is left."""
        # A sample of the system may be on its way in another thread: then the next flush is soon enough.
        if not self._lock.acquire(blocking=final):
            return False
        try:
            self._flushed_at = time.monotonic()
            store = self._store
            if store is None:
                return True
            if self.run_id is None and not self._start(store, final=final):
                self._leave_word()
                return False
            assert self.run_id is not None
            sent = send_waiting(store, self.run_id, self._todo, final=final)
            sent &= store.log_metrics(self.run_id, self._waiting, final=final)
            if not sent:
                self._leave_word()
            self._cut |= len(self._waiting) > MAX_WAITING
            del self._waiting[:-MAX_WAITING]
            return sent
        finally:
            self._lock.release()

    def _open(self, files: Sequence[Path]) -> None:
        if left := read_outbox(self.folder).get(self.key):  # an earlier process could not send everything
            self._cut = True
            self._todo.tags = left.tags | self._todo.tags
            self._todo.artifacts = [*left.artifacts, *self._todo.artifacts]
        self._todo.params = flat_params(asdict(self.config)) | self._todo.params
        if not files:  # a child in its parent's folder: its settings under a name of their own
            name = re.sub(r"[^A-Za-z0-9_.-]+", "_", self.key)
            config = write_atomically(self.folder / "children" / name / "config.yaml", to_yaml(self.config))
            files = [config]
        self._todo.artifacts = [*([str(path.absolute()), None] for path in files), *self._todo.artifacts]
        self.flush(final=False)
        if self.config.tracking.system_metrics and self.parent is None:
            self._local_system = local.LocalMetrics(self.folder, self.key, local.SYSTEM_FILE)
            first = local.next_step(self.folder, self.key) if self.resumed else 0
            self._sampler = SystemSampler(self._record_system, first).start()

    def _record_system(self, values: Mapping[str, float], number: int) -> None:
        assert self._local_system is not None
        self._record(self._local_system, values, number)

    def _record(self, local_file: local.LocalMetrics, values: Mapping[str, float], step: int | None) -> None:
        now = int(time.time() * 1000)
        local_file.write(values, step, now)
        if self._store is not None:
            self._waiting += [(name, value, now, step or 0) for name, value in values.items()]
            overdue = time.monotonic() - self._flushed_at > FLUSH_AFTER_S
            if len(self._waiting) >= FLUSH_AFTER_METRICS or overdue:
                self.flush()

    def _send_soon(self) -> None:
        """At once when there is a run to send to; before `with` and without a server it waits."""
        if self._store is None:
            self._todo = Waiting()
        elif self.run_id is not None:
            self.flush()

    def _leave_word(self) -> None:
        """Notes in the run folder that something is unsent, once: the process may be killed before it is."""
        if not self._word_left:
            self._word_left = True
            put(self.folder, self.key, self._entry(status=None))

    def _entry(self, status: str | None) -> Waiting:
        assert self._store is not None
        ended = None if status is None else int(time.time() * 1000)
        return replace(
            self._todo,
            name=self.name,
            experiment=self._store.experiment,
            uri=public_uri(self._store.uri),
            tags=self._todo.tags if self.run_id else self._first_tags() | self._todo.tags,
            parent_run_id=self.parent.run_id if self.parent else None,
            parent_key=self.parent.key if self.parent else None,
            started_ms=self._started_ms,
            ended_ms=ended,
            status=status,
            process=this_process(),
        )

    def _start(self, store: Store, *, final: bool = False) -> bool:
        """Goes on in the stored run or makes a new one; False = the server is away."""
        if self.parent is not None and self.parent.run_id is None and self.parent._store is store:
            self.parent._start(store, final=final)  # the parent began while the server was away
        uri = public_uri(store.uri)
        earlier = local.stored_run(self.folder, uri, self.key) if self.config.trainer.resume else None
        if earlier and store.call("resume", lambda client: reopen(client, earlier), final=final):
            self.run_id, self.resumed = earlier, True
            self._todo.tags = self._tags | self._todo.tags
        else:
            run = store.call(
                "start",
                lambda client: client.create_run(
                    store.experiment_id,
                    start_time=self._started_ms,
                    tags=self._first_tags(),
                    run_name=self.name,
                ),
                final=final,
            )
            if run is None:
                return False
            self.run_id = str(run.info.run_id)
        local.store_run(self.folder, uri, str(store.experiment_id), self.key, self.run_id)
        return True

    def _first_tags(self) -> dict[str, str]:
        parent = self.parent.run_id if self.parent else None
        return first_tags(self.config, self.name, self.command, parent) | self._tags

    def _end(self, kind: type[BaseException] | None, error: BaseException | None) -> None:
        self._closing = True
        status = self.status = _status(kind, error)
        if self in _open_runs:
            _open_runs.remove(self)
        try:
            if self._sampler is not None:
                self._sampler.finish()
            if self._store is not None:
                self._tell_the_end(self._store, status)
        finally:
            for file in (self._local, self._local_system):
                if file is not None:
                    file.close()
            self._signals.close()

    def _tell_the_end(self, store: Store, status: str) -> None:
        told = self.flush(final=True) and not self._cut
        if self.run_id is not None:
            run_id, ended = self.run_id, int(time.time() * 1000)
            told &= store.tell("end", lambda c: c.set_terminated(run_id, status, ended), final=True)
        put(self.folder, self.key, None if told else self._entry(status))
        if self.parent is not None:  # the outermost run waits, once for all
            self.parent._unsent |= self._unsent | (set() if told else {self.folder})
        elif unsent := self._unsent | (set() if told else {self.folder}):
            wait_s = 0.0 if status == "KILLED" else self.config.tracking.final_wait_s
            send_at_the_end(store, sorted(unsent), wait_s)
