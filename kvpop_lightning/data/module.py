"""The data module: prepared or streamed training rows, held-out evaluation rows, exact resume."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from kvpop_lightning.config.schema import DataConfig
from kvpop_lightning.data.chat import ChatRenderer
from kvpop_lightning.data.fingerprint import describe, fingerprint
from kvpop_lightning.data.loader import RowLoader
from kvpop_lightning.data.position import Position, RowBatchSampler
from kvpop_lightning.data.prepare import Prepared, load_rows, prepare
from kvpop_lightning.data.rows import PackedRows
from kvpop_lightning.data.sources import make_blocks
from kvpop_lightning.data.stream import StreamingRows
from kvpop_lightning.errors import UserError


class PackedMathDataModule(LightningDataModule):
    """Rows of packed documents for training and evaluation.

    A batch is a dict: `input_ids`, `position_ids`, `document_ids` int64 [B, T] (-1 = padding), `loss_mask`
    bool [B, T] (this token is a supervised target: position i is supervised iff token i + 1 is in the same
    document and in the mask), `row` int64 [B].

    Its state (`state_dict`, saved in every checkpoint) is the fingerprint of the data, the seed, the epoch
    and the rows consumed. Resuming gives exactly the rows that were to come, with any number of workers; a
    changed data set is refused. Give the Trainer `use_distributed_sampler=False`: rows are dealt to the
    processes here.

    Args:
        config: see `DataConfig`.
        tokenizer: the model's own, with its chat template.
        rows_per_step: rows of one step on one process.
        seed: of the order of rows (the documents have their own, `config.seed`).
        progress: show a bar while preparing, when the output is a terminal.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: Any,
        *,
        rows_per_step: int = 1,
        seed: int = 0,
        progress: bool = True,
    ) -> None:
        super().__init__()
        if rows_per_step < 1:
            raise UserError(f"trainer.rows_per_step must be at least 1, got {rows_per_step}")
        self.config, self.tokenizer = config, tokenizer
        self.rows_per_step, self.seed, self.progress = rows_per_step, seed, progress
        self._prepared: Prepared | None = None
        self._rows: dict[str, PackedRows] = {}

    @cached_property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that name everything the rows depend on."""
        return fingerprint(describe(self.config, self.tokenizer))

    @cached_property
    def position(self) -> Position:
        """Where training stands in the data."""
        return Position(self.fingerprint, self.seed, "stream" if self.config.streaming else "rows")

    def prepare_data(self) -> None:
        """Makes the rows, or finds them made; a streaming module prepares the evaluation rows only."""
        splits = ("eval",) if self.config.streaming else ("train", "eval")
        self._prepared = prepare(self.config, self.tokenizer, splits=splits, progress=self.progress)

    def setup(self, stage: str | None = None) -> None:
        """Opens what the stage needs."""
        if stage in (None, "fit") and not self.config.streaming:
            _ = self.train_rows
        _ = self.eval_rows

    @property
    def train_rows(self) -> PackedRows:
        """Prepared training rows (prepares them when that has not happened).

        Raises:
            UserError: the module streams.
        """
        if self.config.streaming:
            raise UserError("a streamed data set has no prepared training rows; set data.streaming=false")
        return self._open("train")

    @property
    def eval_rows(self) -> PackedRows:
        """Prepared evaluation rows (prepares them when that has not happened)."""
        return self._open("eval")

    def _open(self, split: str) -> PackedRows:
        if split not in self._rows:
            if self._prepared is None:
                self.prepare_data()
            assert self._prepared is not None
            self._rows[split] = load_rows(self._prepared, split)
        return self._rows[split]

    def train_dataloader(self) -> RowLoader:
        """Batches of `rows_per_step` rows from the current position on."""
        rank, world = self._process()
        source: RowBatchSampler | StreamingRows
        if self.config.streaming:
            if self.config.train_rows is None:
                raise UserError(
                    "data.train_rows must be set with data.streaming=true: it is the epoch's length"
                )
            blocks = make_blocks(self.config, ChatRenderer(self.tokenizer, self.config.loss_on), "train")
            source = StreamingRows(
                blocks,
                self.position,
                num_rows=self.config.train_rows,
                rows_per_step=self.rows_per_step,
                rank=rank,
                world_size=world,
            )
            return RowLoader(source, source, **self._loading())
        source = RowBatchSampler(
            len(self.train_rows), self.rows_per_step, self.position, rank=rank, world_size=world
        )
        return RowLoader(source, self.train_rows, **self._loading())

    def val_dataloader(self) -> DataLoader[dict[str, torch.Tensor]]:
        """Evaluation rows in order, `rows_per_step` at a time."""
        return DataLoader(self.eval_rows, batch_size=self.rows_per_step, **self._loading())

    test_dataloader = val_dataloader

    def predict_dataloader(self) -> DataLoader[dict[str, torch.Tensor]]:
        """Training rows in order (features and targets are computed once per row)."""
        return DataLoader(self.train_rows, batch_size=self.rows_per_step, **self._loading())

    def _loading(self) -> dict[str, Any]:
        return {"num_workers": self.config.workers, "pin_memory": torch.cuda.is_available()}

    def _process(self) -> tuple[int, int]:
        if self.trainer is not None:
            return self.trainer.global_rank, self.trainer.world_size
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
        return 0, 1

    def state_dict(self) -> dict[str, Any]:
        """Fingerprint, seed, epoch and rows consumed by finished steps.

        A checkpoint written because a step failed must give that step's batch again.
        """
        unfinished = False
        if self.trainer is not None:
            steps: Any = self.trainer.fit_loop.epoch_loop.batch_progress.current
            unfinished = steps.ready > steps.processed
        return self.position.state_dict(unfinished=unfinished)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes back to a saved position.

        Raises:
            UserError: the data set, seed or mode is another one; both fingerprints are named.
        """
        self.position.load_state_dict(state_dict)
