"""How far a long job is: a bar with an estimate on a terminal, a line every half minute elsewhere."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

EVERY_S = 30.0
logger = logging.getLogger(__name__)


class Advance(Protocol):
    def __call__(self, more: int, total: int | None = None) -> None:
        """`more` are done; `total`, where given, is what is now expected in all."""


@contextmanager
def bar(title: str, total: int | None, done: int, show: bool) -> Iterator[Advance]:
    """Shows `title` and how many of `total` (None: unknown) are done, from `done` on."""
    console = Console(stderr=True)
    if show and not console.is_terminal:
        yield _Lines(title, total, done)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    # A block takes up to a minute and the default forgets after half of one, so there was never an estimate.
    with Progress(*columns, console=console, disable=not show, speed_estimate_period=3600) as progress:
        progress.add_task(title, total=total, completed=done)
        task = progress.tasks[0]
        progress.advance(task.id, 0)  # the sample that the first estimate starts from

        def advance(more: int, total: int | None = None) -> None:
            if total is not None:
                task.total = total  # `update` would forget the speed
            progress.advance(task.id, more)

        yield advance


class _Lines:
    """For logs: at most a line every `EVERY_S` seconds."""

    def __init__(self, title: str, total: int | None, done: int) -> None:
        self.title, self.total, self.first, self.done = title, total, done, done
        self.began = self.told = time.monotonic()

    def __call__(self, more: int, total: int | None = None) -> None:
        self.done += more
        self.total = self.total if total is None else total
        now = time.monotonic()
        if now - self.told < EVERY_S:
            return
        self.told = now
        logger.info("%s: %s", self.title, self._text(now - self.began))

    def _text(self, elapsed: float) -> str:
        text = f"{self.done}{'' if self.total is None else f' of {self.total}'} in {_clock(elapsed)}"
        if self.total is not None and self.done > self.first:
            text += f", {_clock(elapsed * (self.total - self.done) / (self.done - self.first))} left"
        return text


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
