"""The trials of a sweep on a terminal, as a live table with an estimate; in a log, one line per trial."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvpop_lightning.sweeps import trial as trials
from kvpop_lightning.sweeps.tickets import Progress
from kvpop_lightning.sweeps.worker import TrialView
from kvpop_lightning.training.progress import clock

KEPT = 12
"""Ended trials that the table shows; the others are in the study."""
_STYLE = {trials.FINISHED: "green", trials.PRUNED: "yellow", "running": "cyan"}


class SweepScreen:
    """Context manager; `update` may be called from any thread.

    Args:
        name: of the sweep.
        keys: searched keys, columns in this order.
        metrics: columns of the results, with their directions.
        workers: trials at the same time, for the estimate.
    """

    def __init__(
        self,
        name: str,
        keys: Sequence[str],
        metrics: Mapping[str, str],
        workers: int,
        console: Console | None = None,
    ) -> None:
        self.name, self.keys, self.metrics, self.workers = name, list(keys), dict(metrics), max(1, workers)
        self.console = console or Console()
        self._lock = threading.Lock()
        self._running: dict[int, TrialView] = {}
        self._ended: deque[TrialView] = deque(maxlen=KEPT)
        self._best: dict[str, Any] | None = None
        self._progress = Progress(0)
        self._ended_since = 0
        self._started = time.monotonic()
        self._finished_before: int | None = None
        self._live: Live | None = None

    def __enter__(self) -> SweepScreen:
        if self.console.is_terminal:
            self._live = Live(console=self.console, refresh_per_second=2, get_renderable=self.render)
            self._live.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._live is not None:
            self._live.__exit__(None, None, None)

    def update(self, view: TrialView) -> None:
        """A trial started, reported or ended."""
        with self._lock:
            if view.state == "running":
                first = view.number not in self._running
                self._running[view.number] = view
                line = f"trial {view.number} starts: {_point_text(view.point)}" if first else None
            else:
                self._running.pop(view.number, None)
                self._ended.append(view)
                self._ended_since += view.state in (trials.FINISHED, trials.PRUNED)
                line = self._end_line(view)
        if line is not None and (self._live is None or view.message):
            self.console.print(line, highlight=False, soft_wrap=True, markup=False)

    def progress(self, progress: Progress, best: dict[str, Any] | None = None) -> None:
        """Counts over all workers, and the best finished trial so far."""
        with self._lock:
            if self._finished_before is None:
                self._finished_before = progress.finished
                if 0 < progress.finished < progress.total:
                    done = f"{progress.finished} of {progress.total}"
                    self.console.print(f"going on: {done} trials are finished", highlight=False)
            self._progress, self._best, self._ended_since = progress, best, 0

    def headline(self) -> str:
        """`smoke  5/8 trials  1 running  2:10, about 1:20 left`."""
        p, elapsed = self._progress, time.monotonic() - self._started
        parts = [f"{self.name}  {p.finished}/{p.total} trials", f"{p.running} running", clock(elapsed)]
        left = self.seconds_left()
        if left is not None:
            parts.append(f"about {clock(left)} left")
        if self._best is not None:
            parts.append(f"best: {self._best['text']}")
        return "  ".join(parts)

    def seconds_left(self) -> float | None:
        """From the pace of all workers together since this process began; None before the first end."""
        p, before = self._progress, self._finished_before or 0
        fresh = p.finished - before
        if fresh <= 0:
            return None
        return (time.monotonic() - self._started) / fresh * (p.total - p.finished)

    def _end_line(self, view: TrialView) -> str:
        p = self._progress
        values = "  ".join(f"{name} {value:.5g}" for name, value in view.values.items())
        head = f"trial {view.number} {view.state} in {clock(view.seconds or 0)}"
        done = f"[{min(p.finished + self._ended_since, p.total)}/{p.total} done]"
        return "  ".join(part for part in (head, values, _point_text(view.point), done) if part) + (
            f"\n  {view.message}".replace("\n", "\n  ") if view.message else ""
        )

    def render(self) -> Group:
        """The live table."""
        with self._lock:
            views = [*self._ended, *self._running.values()]
            table = Table(box=None, pad_edge=False, header_style="bold")
            table.add_column("trial", justify="right")
            table.add_column("state")
            for key in self.keys:
                table.add_column(_short(key, self.keys), justify="right")
            for name in self.metrics:
                table.add_column(name, justify="right")
            table.add_column("step", justify="right")
            table.add_column("time", justify="right")
            for view in views:
                seconds = view.seconds if view.seconds is not None else time.monotonic() - view.started
                state = view.state + (" (baseline)" if view.baseline else "")
                table.add_row(
                    str(view.number),
                    Text(state, style=_STYLE.get(view.state, "red")),
                    *(_value_text(view.point.get(key)) for key in self.keys),
                    *(self._metric_text(view, index, name) for index, name in enumerate(self.metrics)),
                    str(view.step or ""),
                    clock(seconds),
                )
            return Group(table, Text(self.headline(), style="bold"))

    def _metric_text(self, view: TrialView, index: int, name: str) -> str:
        if name in view.values:
            return f"{view.values[name]:.5g}"
        return f"({view.report:.4g})" if index == 0 and view.report is not None else ""


def _short(key: str, keys: Sequence[str]) -> str:
    """The last part of a key where that is enough to tell it from the others."""
    last = key.rpartition(".")[2]
    return last if sum(other.rpartition(".")[2] == last for other in keys) == 1 else key


def _value_text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _point_text(point: Mapping[str, Any]) -> str:
    return "  ".join(f"{key.rpartition('.')[2]}={_value_text(value)}" for key, value in point.items())
