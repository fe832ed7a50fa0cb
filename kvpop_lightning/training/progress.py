"""One line of progress with an estimate of what is left, on a terminal or in a log file."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO


def clock(seconds: float) -> str:
    """`m:ss`, or `h:mm:ss` from an hour on."""
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    minutes, left = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes}:{left:02d}"


class ProgressLine:
    """Rewrites one line on a terminal; elsewhere prints a new line at most every `interval` seconds and at
    the end.

    Args:
        label: what is going on, e.g. `features`.
        total: units of work in all.
        done: units finished before (a resumed run); they do not enter the estimate.
        unit: name of one unit, for the rate.
        stream: where to write, stderr by default.
        enabled: False writes nothing.
    """

    def __init__(
        self,
        label: str,
        total: int,
        *,
        done: int = 0,
        unit: str = "step",
        stream: TextIO | None = None,
        interval: float = 10.0,
        enabled: bool = True,
    ) -> None:
        self.label, self.total, self.unit = label, total, unit
        self.stream = stream if stream is not None else sys.stderr
        self.enabled = enabled
        self.terminal = bool(getattr(self.stream, "isatty", lambda: False)())
        self.interval = 0.2 if self.terminal else interval
        self._first = self._done = done
        self._start = time.monotonic()
        self._written = self._start if not self.terminal else 0.0
        self._width = 0

    def update(self, done: int, note: Callable[[], str] | None = None) -> None:
        """`done` units are finished; `note`, called only when a line is written, gives its end."""
        self._done = done
        now = time.monotonic()
        if self.enabled and (done >= self.total or now - self._written >= self.interval):
            self._written = now
            self._write(self.line(now, note() if note is not None else ""))

    def line(self, now: float, note: str = "") -> str:
        """The text shown at time `now` (seconds of the monotonic clock)."""
        elapsed, fresh = now - self._start, self._done - self._first
        rate = fresh / elapsed if elapsed > 0 else 0.0
        share = 100 * self._done // max(1, self.total)
        parts = [f"{self.label}  {self._done}/{self.total}  {share} %"]
        if fresh > 0:
            speed = f"{rate:.1f} {self.unit}/s" if rate >= 1 else f"{1 / rate:.1f} s/{self.unit}"
            left = (self.total - self._done) / rate
            parts.append(f"{speed}  " + (f"left {clock(left)}" if left > 0 else f"took {clock(elapsed)}"))
        if note:
            parts.append(note)
        return "  ".join(parts)

    def close(self) -> None:
        """Ends the line on a terminal."""
        if self.enabled and self.terminal and self._width:
            self.stream.write("\n")
            self.stream.flush()
            self._width = 0

    def _write(self, text: str) -> None:
        if self.terminal:
            self.stream.write("\r" + text.ljust(self._width))
            self._width = len(text)
        else:
            self.stream.write(text + "\n")
        self.stream.flush()
