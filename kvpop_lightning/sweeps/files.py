"""Files through which a trial's parent and child talk, all in the trial's folder."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvpop_lightning.tracking.environment import write_atomically
from kvpop_lightning.tracking.local import METRICS_FILE, RUNS_FILE

JOB_FILE = "job.json"
"""What to do: written by the parent."""
RESULT_FILE = "result.json"
"""What came of it: written by the child, whole or not at all."""
STOP_FILE = "stop_request"
"""Its presence asks the child to write a checkpoint and to end."""
LOG_FILE = "child.log"
"""What the child prints."""
CHILD_FILE = "child.json"
"""The running child's process."""
LAST_LINES = 15
LAST_BYTES = 6000


def write_json(path: Path, content: Any) -> Path:
    return write_atomically(path, json.dumps(content, indent=1) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """The object in the file; empty when there is none, or no whole one."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def run_id_in(run_dir: Path, name: str) -> str | None:
    """The MLflow run that the trial's folder names."""
    entry = read_json(run_dir / RUNS_FILE).get("runs", {}).get(name, {})
    run_id = entry.get("run_id")
    return run_id if isinstance(run_id, str) else None


class MetricsTail:
    """Reads the lines that are added to `metrics.jsonl` from now on; keeps nothing but its place."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / METRICS_FILE
        self._place = self.path.stat().st_size if self.path.exists() else 0

    def lines(self) -> Iterator[tuple[int, dict[str, float]]]:
        """(global step, metrics) of every whole new line that has a step."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._place)
                new = file.read()
        except FileNotFoundError:
            return
        whole = new[: new.rfind(b"\n") + 1]  # a line that is being written is read when it is whole
        self._place += len(whole)
        for line in whole.splitlines():
            try:
                entry = json.loads(line)
                step = entry.pop("step")
                values = {k: float(v) for k, v in entry.items() if k not in ("run", "time")}
            except (ValueError, TypeError, KeyError, AttributeError):
                continue  # a damaged line is no reason to lose the trial
            if step is not None:
                yield int(step), values


def last_lines(path: Path, start: int = 0) -> str:
    """The end of a log from byte `start` on; of a rewritten progress line only its last state."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(start, size - LAST_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = [line.rpartition("\r")[2].rstrip() for line in text.split("\n") if line.strip()]
    return "\n".join(lines[-LAST_LINES:])
