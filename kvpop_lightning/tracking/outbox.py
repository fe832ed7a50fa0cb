"""What a run still has to tell its server, kept in the run folder until it is told (`kvpop runs send`)."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import psutil

from kvpop_lightning.tracking.environment import write_atomically

OUTBOX_FILE = "outbox.json"


@dataclass
class Waiting:
    """One run's unsent part; its metrics are in `metrics.jsonl` and `system_metrics.jsonl`."""

    name: str = ""
    experiment: str = ""
    uri: str = ""
    """The server, without password."""
    parent_run_id: str | None = None
    parent_key: str | None = None
    """The parent's key in this folder, for a parent that has no run id yet either."""
    tags: dict[str, str] = field(default_factory=dict)
    params: dict[str, str] = field(default_factory=dict)
    artifacts: list[list[str | None]] = field(default_factory=list)
    """Pairs of a local path and a folder in the run's artifacts."""
    started_ms: int = 0
    ended_ms: int | None = None
    status: str | None = None
    """None while the run goes on."""
    process: str = ""
    """Host, process id and its start: while that lives nobody else may send."""

    @property
    def anything(self) -> bool:
        return bool(self.tags or self.params or self.artifacts)

    def alive(self) -> bool:
        """Whether the process that writes this run is still there."""
        if self.status is not None:
            return False
        host, _, rest = self.process.partition(" ")
        number, _, created = rest.partition(" ")
        if host != socket.gethostname() or not number.isdigit():
            return False
        try:
            return abs(psutil.Process(int(number)).create_time() - float(created)) < 1
        except psutil.Error:
            return False


def this_process() -> str:
    return f"{socket.gethostname()} {os.getpid()} {psutil.Process().create_time()}"


def read_outbox(folder: Path) -> dict[str, Waiting]:
    """What waits in a run folder, by the runs' keys."""
    try:
        content = json.loads((folder / OUTBOX_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    known = {item.name for item in fields(Waiting)}
    return {
        key: Waiting(**{name: value for name, value in entry.items() if name in known})
        for key, entry in content.items()
    }


def put(folder: Path, key: str, entry: Waiting | None) -> None:
    """Writes one run's entry, or removes it (None); the file goes with the last entry."""
    known = read_outbox(folder)
    if entry is None and key not in known:
        return
    known.pop(key, None)
    if entry is not None:
        known[key] = entry
    file = folder / OUTBOX_FILE
    if known:
        content: dict[str, Any] = {name: asdict(one) for name, one in known.items()}
        write_atomically(file, json.dumps(content, indent=1) + "\n")
    else:
        file.unlink(missing_ok=True)


def folders_with_outbox(root: Path) -> list[Path]:
    """`root` and the folders below it in which something waits."""
    return sorted(file.parent for file in root.rglob(OUTBOX_FILE))
