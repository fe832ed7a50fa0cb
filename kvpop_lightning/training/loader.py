"""Batches in an order that depends on the seed and the step number only, so that a resumed run sees the same
rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from kvpop_lightning.training.forward import Batch, collate


class StepLoader:
    """One batch per optimiser step and process, for exactly `steps` steps, over a data set of any length.

    Rows come in a fresh random order every pass; passes follow each other without a gap. Its position is part
    of Lightning's checkpoint, and its length is known, so nothing is fetched ahead or skipped on resume.

    Args:
        rows: data set, `rows[i] -> dict` of tensors without batch dimension.
        steps: optimiser steps in all.
        rows_per_batch: rows of one process in one step, all micro-batches together.
        seed: of the order.
        process: gives (rank, world size); asked when rows are drawn, since a Trainer knows them only after
            its start.
    """

    def __init__(
        self,
        rows: Any,
        *,
        steps: int,
        rows_per_batch: int,
        seed: int = 0,
        process: Callable[[], tuple[int, int]] = lambda: (0, 1),
    ) -> None:
        self.rows, self.steps, self.rows_per_batch, self.seed = rows, steps, rows_per_batch, seed
        self.process = process
        self._position = 0
        self._order: tuple[int, list[int]] = (-1, [])

    def __len__(self) -> int:
        return self.steps

    def indices(self, step: int) -> list[int]:
        """Indices of this process's rows in `step`."""
        rank, world_size = self.process()
        first = (step * world_size + rank) * self.rows_per_batch
        return [self._index(first + n) for n in range(self.rows_per_batch)]

    def _index(self, drawn: int) -> int:
        number, place = divmod(drawn, len(self.rows))
        if self._order[0] != number:
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + number) % 2**63)
            self._order = (number, torch.randperm(len(self.rows), generator=generator).tolist())
        return self._order[1][place]

    def __iter__(self) -> Iterator[Batch]:
        while self._position < self.steps:
            batch = collate([self.rows[index] for index in self.indices(self._position)])
            self._position += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Steps handed out so far."""
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on after that many steps."""
        self._position = state["position"]
