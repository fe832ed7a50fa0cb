"""CPU, memory, disk, network and GPU use, sampled by MLflow's monitors and logged like every other metric.

MLflow's own thread ends for good at the first answer that a server does not give; here the samples go the
way of all metrics: kept in the run folder, sent when the server is back.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

SAMPLE_S = 10.0
INTERVAL_VARIABLE = "MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL"


class SystemSampler:
    """A thread that calls `record(metrics, number)` every few seconds (seconds: MLflow's own variable)."""

    def __init__(self, record: Callable[[dict[str, float], int], None], first: int = 0) -> None:
        self._record, self._number = record, first
        self._interval = float(os.environ.get(INTERVAL_VARIABLE) or SAMPLE_S)
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> SystemSampler:
        self._thread = threading.Thread(target=self._work, name="SystemSampler", daemon=True)
        self._thread.start()
        return self

    def finish(self) -> None:
        """Ends the thread; a short run still gets one sample."""
        self._end.set()
        if self._thread is not None:
            self._thread.join(5)

    def _work(self) -> None:
        monitors = _monitors()
        while True:
            last = self._end.wait(self._interval)
            metrics: dict[str, float] = {}
            for monitor in monitors:
                try:
                    monitor.collect_metrics()
                    metrics |= monitor.aggregate_metrics()
                    monitor.clear_metrics()
                except Exception:  # a sensor that fails must not end the others
                    continue
            if metrics:
                self._record({f"system/{name}": value for name, value in metrics.items()}, self._number)
                self._number += 1
            if last:
                return


def _monitors() -> list[Any]:
    from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
    from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
    from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
    from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

    found: list[Any] = [CPUMonitor(), DiskMonitor(), NetworkMonitor()]
    with suppress(Exception):  # no NVIDIA GPU, or its management library is missing
        found.append(GPUMonitor())
    return found
