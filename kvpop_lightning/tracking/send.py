"""Sends what a tracking server missed, from the run or later from the run folders."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvpop_lightning.tracking import local
from kvpop_lightning.tracking.naming import public_uri
from kvpop_lightning.tracking.outbox import Waiting, put, read_outbox
from kvpop_lightning.tracking.store import Store, set_tags, sqlite_file, unreachable

log = logging.getLogger(__name__)

LOOK_S = 0.5


@dataclass
class Sent:
    """What a sending did."""

    runs: list[str] = field(default_factory=list)
    """`folder: key` of the runs that are complete now."""
    left: list[str] = field(default_factory=list)
    """The others, with the reason."""
    metrics: int = 0
    """Values that the server lacked."""


def send_waiting(store: Store, run_id: str, todo: Waiting, *, final: bool = False) -> bool:
    """Parameters, tags and artifacts; what arrived is taken out of `todo`. True = all of it."""
    if todo.params and store.log_params(run_id, todo.params, final=final):
        todo.params = {}
    if todo.tags and store.tell("tags", lambda c: set_tags(c, run_id, todo.tags), final=final):
        todo.tags = {}
    while todo.artifacts:
        text, folder = todo.artifacts[0]
        path = Path(str(text))

        def log_one(client: Any, path: Path = path, folder: str | None = folder) -> None:
            if not path.exists():
                raise FileNotFoundError(f"{path} does not exist")
            (client.log_artifacts if path.is_dir() else client.log_artifact)(run_id, str(path), folder)

        if not store.tell(f"artifact {path.name}", log_one, final=final):
            break
        todo.artifacts.pop(0)
    return not todo.anything


def send_folder(folder: Path, uri: str, sent: Sent | None = None) -> Sent:
    """Everything that waits in one run folder: missing runs are made, missing metrics added, runs ended.

    Doing it twice sends nothing twice: metrics are compared with what the server has.

    Args:
        uri: the tracking server; entries for another one stay.
    """
    sent = sent if sent is not None else Sent()
    entries = read_outbox(folder)
    for key in sorted(entries, key=lambda key: key.count("/")):  # parents first: children name their run
        entry, label = entries[key], f"{folder}: {key}"
        if entry.uri != public_uri(uri):
            sent.left.append(f"{label} belongs to {entry.uri}: give tracking.uri=...")
        elif entry.alive():
            sent.left.append(f"{label} is still running and sends itself")
        else:
            store = Store(uri, entry.experiment, warns=False)
            if _send_run(store, folder, key, entry, sent):
                sent.runs.append(label)
            else:
                sent.left.append(f"{label} ({store.last_error})")
    return sent


def send_at_the_end(store: Store, folders: Sequence[Path], wait_s: float) -> None:
    """The end of a process whose server is away: waits for it up to `wait_s` seconds, then leaves a word."""
    until = time.monotonic() + wait_s
    while True:
        if unreachable(store.uri) is None:
            left = [folder for folder in folders if send_folder(folder, store.uri).left]
            if not left:
                return
        if sqlite_file(store.uri) is not None or time.monotonic() >= until:
            break
        time.sleep(min(LOOK_S, max(0.0, until - time.monotonic())))
    words = " ".join(str(folder) for folder in folders)
    log.warning("%s did not come back: kvpop runs send %s sends the rest later", public_uri(store.uri), words)


def _send_run(store: Store, folder: Path, key: str, entry: Waiting, sent: Sent) -> bool:
    uri = public_uri(store.uri)
    run_id = local.stored_run(folder, uri, key)
    if run_id is None or store.call("look", lambda client: _exists(client, str(run_id))) is False:
        run_id = _create(store, folder, key, entry)
        if run_id is None:
            return False
    if not send_waiting(store, run_id, entry):
        put(folder, key, entry)  # what arrived need not be sent again
        return False
    known = run_id
    metrics = list(dict.fromkeys(local.local_metrics(folder, key)))
    there = store.call("metrics", lambda client: _histories(client, known, {m[0] for m in metrics}))
    if there is None:
        return False
    missing = [metric for metric in metrics if (metric[0], metric[3], metric[2]) not in there]
    count = len(missing)
    if not store.log_metrics(run_id, missing, final=True):
        return False
    status, last = entry.status or "KILLED", max((metric[2] for metric in metrics), default=None)
    ended = entry.ended_ms or last
    if not store.tell("end", lambda client: client.set_terminated(known, status, ended)):
        return False
    sent.metrics += count
    put(folder, key, None)
    return True


def _create(store: Store, folder: Path, key: str, entry: Waiting) -> str | None:
    uri = public_uri(store.uri)
    parent = entry.parent_run_id
    if parent is None and entry.parent_key is not None:
        parent = local.stored_run(folder, uri, entry.parent_key)
    tags = {**entry.tags, **({"mlflow.parentRunId": parent} if parent else {})}
    run = store.call(
        "start",
        lambda client: client.create_run(
            store.experiment_id, start_time=entry.started_ms, tags=tags, run_name=entry.name
        ),
    )
    if run is None:
        return None
    run_id = str(run.info.run_id)
    local.store_run(folder, uri, str(store.experiment_id), key, run_id)
    return run_id


def _exists(client: Any, run_id: str) -> bool:
    from mlflow.exceptions import MlflowException

    try:
        return bool(client.get_run(run_id).info.lifecycle_stage == "active")
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return False
        raise


def _histories(client: Any, run_id: str, names: set[str]) -> set[tuple[str, int, int]]:
    return {
        (name, metric.step, metric.timestamp)
        for name in sorted(names)
        for metric in client.get_metric_history(run_id, name)
    }
