"""An ablation's progress: a bar with an estimate on a terminal, a line per point in a log."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from kvpop_lightning.sweeps.ablation_points import GridPoint, expected_seconds
from kvpop_lightning.sweeps.grid_parts import Cell
from kvpop_lightning.sweeps.trial import FINISHED
from kvpop_lightning.training.progress import clock


class AblationScreen:
    """Context manager; its methods may be called from any thread.

    Args:
        name: of the ablation.
        points: those that are to be run.
        known: cell and seconds of finished points, for the estimate.
        workers: points at the same time.
    """

    def __init__(
        self,
        name: str,
        points: list[GridPoint],
        known: Mapping[tuple[str, int], tuple[Cell, float]],
        workers: int,
        console: Console | None = None,
    ) -> None:
        self.console = console or Console()
        self.points, self.known, self.workers = list(points), dict(known), max(1, workers)
        self._open = {point.key: point for point in points}
        self._started: dict[tuple[str, int], float] = {}
        self._lock = threading.Lock()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._task = self._bar.add_task(name, total=len(points), left=self._left_text())

    def __enter__(self) -> AblationScreen:
        self._bar.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._bar.__exit__(None, None, None)

    def starts(self, point: GridPoint) -> None:
        with self._lock:
            self._started[point.key] = time.monotonic()
        self.say(f"{point.name} starts")

    def ends(self, point: GridPoint, record: Mapping[str, Any], last_lines: str) -> None:
        with self._lock:
            self._open.pop(point.key, None)
            if record["state"] == FINISHED:
                self.known[point.key] = point.cell, record["seconds"]
            done = len(self.points) - len(self._open)
        values = "  ".join(f"{name} {value:.5g}" for name, value in record["values"].items())
        text = f"{point.name}: {record['state']} in {clock(record['seconds'])}  {values or record['message']}"
        if record["state"] != FINISHED and last_lines:
            text += "\n  " + last_lines.replace("\n", "\n  ")
        self.say(f"{text}\n[{done}/{len(self.points)}]  {self._left_text()}")
        self._bar.update(self._task, completed=done, left=self._left_text())

    def tick(self) -> None:
        """Called from time to time: moves the estimate."""
        self._bar.update(self._task, left=self._left_text())

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True, markup=False)

    def seconds_left(self) -> float | None:
        """Of all open points, on all workers; None while nothing is known."""
        with self._lock:
            now, total = time.monotonic(), 0.0
            for key, point in self._open.items():
                expected = expected_seconds(point, self.known)
                if expected is None:
                    return None
                spent = now - self._started[key] if key in self._started else 0.0
                total += max(expected - spent, 0.0)
            return total / min(self.workers, max(1, len(self._open)))

    def _left_text(self) -> str:
        left = self.seconds_left()
        return "no estimate before the first point ends" if left is None else f"about {clock(left)} left"
