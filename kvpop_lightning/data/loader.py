"""The training loader: an ordinary DataLoader that keeps the reading position as batches are handed out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from kvpop_lightning.data.position import Position, RowBatchSampler
from kvpop_lightning.data.rows import PackedRows
from kvpop_lightning.data.stream import StreamingRows

Batch = dict[str, torch.Tensor]


class RowLoader(DataLoader[Batch]):
    """Batches from `position` on; `len` is always that of a whole epoch.

    Lightning compares the steps it counted before a resume with the length, so a loader that only knew the
    rest would end early, and one without a length makes it fetch (and lose) a batch ahead.
    """

    def __init__(
        self, source: RowBatchSampler | StreamingRows, dataset: PackedRows | StreamingRows, **kwargs: Any
    ) -> None:
        self.source = source
        if isinstance(source, RowBatchSampler):
            super().__init__(dataset, batch_sampler=source, **kwargs)
        else:
            super().__init__(dataset, batch_size=source.rows_per_step, **kwargs)

    @property
    def position(self) -> Position:
        """Where the next batch comes from."""
        return self.source.position

    def __len__(self) -> int:
        return len(self.source) if isinstance(self.source, RowBatchSampler) else self.source.steps

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        # A generator: nothing moves before the first batch is asked for, whoever calls iter() and how often.
        self.source.begin()
        for batch in super().__iter__():
            source = self.source
            if isinstance(source, StreamingRows):
                # The rows of the processes after this one belong to the same step and follow this batch.
                others = (source.world_size - 1 - source.rank) * source.rows_per_step
                self.position.advance(source.rows_of_step, cursor=int(batch["row"][-1]), skip=others)
            else:
                self.position.advance(source.rows_of_step)
            yield batch

    # Lightning asks for these before it believes that a loader can resume in the middle of an epoch. The
    # position is saved by the data module, whose state is restored before any loader exists (a loader's own
    # state is lost when `estimated_stepping_batches` makes the loader early).
    def state_dict(self) -> dict[str, Any]:
        """Empty: see `PackedMathDataModule.state_dict`."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to do."""
