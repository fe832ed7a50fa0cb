"""Wall time and peak memory of this process and all its children."""

from __future__ import annotations

import threading
import time
from types import TracebackType

import psutil


class ResourceMeter:
    """Context manager; `seconds` and `peak_bytes` (resident memory of the process tree, sampled) after or
    inside it."""

    def __init__(self, interval_s: float = 0.25) -> None:
        self._interval = interval_s
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._start = self._end = 0.0
        self.peak_bytes = 0

    @property
    def seconds(self) -> float:
        return (self._end or time.perf_counter()) - self._start

    def __enter__(self) -> ResourceMeter:
        self._start, self._end = time.perf_counter(), 0.0
        self._sample()
        self._thread = threading.Thread(target=self._watch, name="ResourceMeter", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end = time.perf_counter()
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._sample()

    def _watch(self) -> None:
        while not self._stop.wait(self._interval):
            self._sample()

    def _sample(self) -> None:
        me, total = psutil.Process(), 0
        for process in (me, *me.children(recursive=True)):
            try:
                total += process.memory_info().rss
            except psutil.Error:
                continue  # it ended between the listing and the question
        self.peak_bytes = max(self.peak_bytes, total)
