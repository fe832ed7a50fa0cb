"""What tracking keeps in the run folder, whatever becomes of the server: metrics.jsonl and tracking.json."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvpop_lightning.tracking.environment import write_atomically

METRICS_FILE = "metrics.jsonl"
RUNS_FILE = "tracking.json"


class LocalMetrics:
    """Appends one JSON object per call: `run`, `step`, `time` (seconds since 1970), then the metrics.

    After a resume steps may appear twice: the later line counts.
    """

    def __init__(self, folder: Path, run: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._run = run
        self._file = (folder / METRICS_FILE).open("a", encoding="utf-8")

    def write(self, metrics: Mapping[str, float], step: int | None) -> None:
        # NaN and infinity are not JSON: they go in as text.
        values = {name: value if math.isfinite(value) else str(value) for name, value in metrics.items()}
        line = {"run": self._run, "step": step, "time": round(time.time(), 3)} | values
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def stored_run(folder: Path, uri: str, key: str) -> str | None:
    """The MLflow run id that `key` had in this folder on the same tracking server."""
    stored = _read(folder)
    entry = stored["runs"].get(key, {}) if stored.get("uri") == uri else {}
    run_id = entry.get("run_id")
    return run_id if isinstance(run_id, str) else None


def store_run(folder: Path, uri: str, experiment_id: str, key: str, run_id: str) -> None:
    """Remembers the run id under `key`; runs of another server are forgotten."""
    stored = _read(folder)
    runs = stored["runs"] if stored.get("uri") == uri else {}
    runs[key] = {"run_id": run_id, "experiment_id": experiment_id}
    write_atomically(folder / RUNS_FILE, json.dumps({"uri": uri, "runs": runs}, indent=1) + "\n")


def _read(folder: Path) -> dict[str, Any]:
    try:
        stored = json.loads((folder / RUNS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        stored = None
    if isinstance(stored, dict) and isinstance(stored.get("runs"), dict):
        return stored
    return {"runs": {}}
