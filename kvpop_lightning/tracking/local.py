"""What tracking keeps in the run folder, whatever becomes of the server: metrics.jsonl and tracking.json."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvpop_lightning.tracking.environment import write_atomically

METRICS_FILE = "metrics.jsonl"
SYSTEM_FILE = "system_metrics.jsonl"
"""Samples of the machine, numbered; apart, because their numbers are no training steps."""
RUNS_FILE = "tracking.json"


class LocalMetrics:
    """Appends one JSON object per call: `run`, `step`, `time` (seconds since 1970), then the metrics.

    After a resume steps may appear twice: the later line counts.
    """

    def __init__(self, folder: Path, run: str, file: str = METRICS_FILE) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._run = run
        self._file = (folder / file).open("a", encoding="utf-8")

    def write(self, metrics: Mapping[str, float], step: int | None, time_ms: int) -> None:
        # NaN and infinity are not JSON: they go in as text.
        values = {name: value if math.isfinite(value) else str(value) for name, value in metrics.items()}
        line = {"run": self._run, "step": step, "time": time_ms / 1000} | values
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def local_metrics(folder: Path, run: str | None = None) -> Iterator[tuple[str, float, int, int]]:
    """`(name, value, time in ms, step)` of one run (None = all) as this folder keeps them; the form that
    `Store.log_metrics` takes."""
    for name in (METRICS_FILE, SYSTEM_FILE):
        try:
            text = (folder / name).read_text(encoding="utf-8")
        except OSError:
            continue
        for line in text.splitlines():
            try:
                entry = json.loads(line)
                owner, step, time_ms = entry.pop("run"), entry.pop("step"), round(entry.pop("time") * 1000)
                values = {key: float(value) for key, value in entry.items()}
            except (ValueError, TypeError, KeyError, AttributeError):
                continue  # a line that was cut off when the process was killed
            if run is None or owner == run:
                yield from ((key, value, time_ms, step or 0) for key, value in values.items())


def next_step(folder: Path, run: str) -> int:
    """Number for the next system sample of a run that goes on."""
    steps = [step for name, _, _, step in local_metrics(folder, run) if name.startswith("system/")]
    return max(steps, default=-1) + 1


def stored_runs(folder: Path) -> dict[str, str]:
    """Run ids by key, whatever the server."""
    return {key: entry["run_id"] for key, entry in _read(folder)["runs"].items() if "run_id" in entry}


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
