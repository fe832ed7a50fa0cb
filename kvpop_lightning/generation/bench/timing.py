"""Times of single steps: warm-up excluded, the device awaited."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch


def summary(milliseconds: Sequence[float]) -> dict[str, float]:
    """Median, 95th percentile and mean of steps, ms."""
    each = sorted(milliseconds)
    return {
        "median_ms": round(statistics.median(each), 4),
        "p95_ms": round(each[round(0.95 * (len(each) - 1))], 4),
        "mean_ms": round(statistics.fmean(each), 4),
    }


def replay_times(graph: Any, steps: int, warmup: int = 5) -> dict[str, float]:
    """Of replays of a CUDA graph back to back, by events on the device."""
    for _ in range(warmup):
        graph.replay()
    torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    return summary([a.elapsed_time(b) for a, b in itertools.pairwise(marks)])


def step_times(step: Callable[[], object], steps: int, warmup: int, device: torch.device) -> dict[str, float]:
    """Of calls of `step`, each awaited, by the host's clock: what the host does in between counts."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for _ in range(warmup):
        step()
    wait()
    each = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        wait()
        each.append(1000 * (time.perf_counter() - start))
    return summary(each)


class Peak:
    """Peak memory of what runs inside it: allocated on a GPU; on a CPU nothing counts allocations, and the
    weights and the cache are added up (`counted`)."""

    def __init__(self, model: Any, cache_bytes: Callable[[], int]) -> None:
        self.device = next(model.parameters()).device
        self._model, self._cache_bytes = model, cache_bytes
        self.kind = "allocated" if self.device.type == "cuda" else "counted"
        self.bytes = 0

    def __enter__(self) -> Peak:
        if self.kind == "allocated":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        return self

    def __exit__(self, *_: object) -> None:
        if self.kind == "allocated":
            self.bytes = torch.cuda.max_memory_allocated(self.device)
        else:
            weights = sum(parameter.nbytes for parameter in self._model.parameters())
            self.bytes = weights + self._cache_bytes()
