"""Eviction times and the running k-th best, one token after the other: what the fast forms must equal."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterator

import torch
from torch import Tensor

from kvpop_lightning.policy.budget import NEVER, Budget


def eviction_time_reference(
    priority: Tensor, budget: Budget, *, document_ids: Tensor | None = None
) -> Tensor:
    """`eviction_time` by a heap of the `topk` survivors, fed in the order in which tokens leave the window.

    Shapes and result as for `eviction_time`; O(T log k) per head, in Python.
    """
    batch, heads, _ = priority.shape
    time = torch.full(priority.shape, NEVER, dtype=torch.int64)
    values = priority.detach().to("cpu", torch.float64)
    for b, rows in _documents(document_ids, batch, priority.shape[-1]):
        for h in range(heads):
            held: list[
                tuple[float, int]
            ] = []  # (priority, place): the lowest, oldest among equals, is on top
            for place in range(budget.sink, len(rows) - budget.window):
                entry = (float(values[b, h, rows[place]]), place)
                if len(held) < budget.topk:
                    heapq.heappush(held, entry)
                    continue
                _, dropped = heapq.heappushpop(held, entry)
                time[b, h, rows[dropped]] = rows[place + budget.window]
    return time.to(priority.device)


def running_kth_best_reference(
    priority: Tensor, k: int, *, sink: int = 0, document_ids: Tensor | None = None
) -> Tensor:
    """`running_kth_best` by a sorted list that grows token by token; shapes and result as there."""
    batch, heads, length = priority.shape
    best = torch.full(priority.shape, -1, dtype=torch.int64)
    values = priority.detach().to("cpu", torch.float64)
    for b, rows in _documents(document_ids, batch, length):
        for h in range(heads):
            seen: list[tuple[float, int]] = []  # ascending by (priority, place)
            for place in range(sink, len(rows)):
                bisect.insort(seen, (float(values[b, h, rows[place]]), place))
                if len(seen) >= k:
                    best[b, h, rows[place]] = rows[seen[-k][1]]
    return best.to(priority.device)


def _documents(document_ids: Tensor | None, batch: int, length: int) -> Iterator[tuple[int, list[int]]]:
    """Every document as (row of the batch, row indices of its tokens in order)."""
    for b in range(batch):
        if document_ids is None:
            yield b, list(range(length))
            continue
        members: dict[int, list[int]] = {}
        for index, document in enumerate(document_ids[b].tolist()):
            if document >= 0:
                members.setdefault(document, []).append(index)
        for rows in members.values():
            yield b, rows
