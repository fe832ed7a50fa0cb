"""Streaming: rows packed on the fly, without preparing them.

What it guarantees:
* The sequence of rows is a function of the data set and the seed alone: the same with any number of workers
  and processes, and the same again after a resume at any step.
* Memory does not grow with the source (hashes of the documents seen aside, about 90 bytes each, for files).
What it does not: rows are not shuffled beyond their block; every worker packs the whole stream and hands out
its share, so workers hide latency rather than add throughput; a resume on a file reads it again from the
start up to the recorded block (without tokenising). A finite source starts over when it ends. One epoch is
`data.train_rows` rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import IterableDataset, get_worker_info

from kvpop_lightning.data.blocks import Blocks
from kvpop_lightning.data.packing import Piece, assemble, row_tensors
from kvpop_lightning.data.position import Position
from kvpop_lightning.errors import UserError

# A row's number holds its place in the stream: pass over the source, block, row of the block.
_ROW_BITS, _BLOCK_BITS = 20, 24


def row_number(round_: int, block: int, row: int) -> int:
    """Number of a streamed row; increasing along the stream."""
    assert row < 1 << _ROW_BITS
    assert block < 1 << _BLOCK_BITS
    return (round_ << (_ROW_BITS + _BLOCK_BITS)) | (block << _ROW_BITS) | row


def rows_after(blocks: Blocks, cursor: int) -> Iterator[tuple[int, list[Piece]]]:
    """Rows of the endless stream that come after row `cursor` (-1: all), with their numbers.

    Raises:
        UserError: the source gives no row at all.
    """
    last = max(cursor, 0)
    round_, first = last >> (_ROW_BITS + _BLOCK_BITS), (last >> _ROW_BITS) & ((1 << _BLOCK_BITS) - 1)
    while True:
        found = False
        for number, block in blocks.from_block(first):
            for index, row in enumerate(block.rows):
                found = True
                if row_number(round_, number, index) > cursor:
                    yield row_number(round_, number, index), row
        if not found and first == 0:
            raise UserError("the stream gives no training rows: no document of the source can be used")
        round_, first = round_ + 1, 0


class StreamingRows(IterableDataset[dict[str, torch.Tensor]]):
    """This process's rows of one epoch from `position` on; items as in `PackedRows`."""

    def __init__(
        self,
        blocks: Blocks,
        position: Position,
        *,
        num_rows: int,
        rows_per_step: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.blocks, self.position, self.num_rows = blocks, position, num_rows
        self.rows_per_step, self.rank, self.world_size = rows_per_step, rank, world_size
        if num_rows < self.rows_of_step:
            raise UserError(
                f"data.train_rows={num_rows} rows are an epoch of the stream, but a step takes "
                f"{self.rows_of_step}"
            )

    @property
    def rows_of_step(self) -> int:
        """Rows of one step over all processes."""
        return self.rows_per_step * self.world_size

    @property
    def steps(self) -> int:
        """Steps of an epoch."""
        return self.num_rows // self.rows_of_step

    def begin(self) -> None:
        """Called before an epoch is read: moves on to the next one when this one is finished."""
        if self.position.rows_consumed + self.rows_of_step > self.num_rows:
            self.position.epoch += 1
            self.position.rows_consumed = 0

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        worker = get_worker_info()
        own, workers = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        left = self.steps - self.position.rows_consumed // self.rows_of_step
        skip = self.position.skip
        length = self.blocks.config.row_length
        rank_rows = range(self.rank * self.rows_per_step, (self.rank + 1) * self.rows_per_step)
        for index, (number, row) in enumerate(rows_after(self.blocks, self.position.cursor)):
            step, place = divmod(index - skip, self.rows_of_step)
            if index < skip:
                continue
            if step >= left:
                return
            # The loader takes steps from its workers in turn, so worker `own` serves the steps own, own +
            # workers ...
            if step % workers == own and place in rank_rows:
                yield {n: torch.from_numpy(a) for n, a in row_tensors(*assemble(row, length), number).items()}
