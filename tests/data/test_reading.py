"""The order of rows, and that a resumed run reads exactly the rows that were to come."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from kvpop_lightning.data import PackedMathDataModule
from kvpop_lightning.data.position import Position, RowBatchSampler
from kvpop_lightning.data.stream import StreamingRows
from kvpop_lightning.errors import UserError


def sampler(rows=11, step=2, **kwargs):
    return RowBatchSampler(rows, step, kwargs.pop("position", Position("f", 0, "rows")), **kwargs)


def test_an_epoch_is_a_permutation_and_epochs_differ():
    orders = []
    position = Position("f", 3, "rows")
    for epoch in range(3):
        position.epoch = epoch
        batches = list(sampler(position=position))
        assert [len(batch) for batch in batches] == [2] * 5
        rows = [row for batch in batches for row in batch]
        assert len(set(rows)) == 10
        orders.append(rows)
    assert orders[0] != orders[1] != orders[2]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_processes_deal_out_one_common_order(world):
    whole = [row for batch in sampler(rows=16, step=1) for row in batch]
    parts = [list(sampler(rows=16, step=1, rank=rank, world_size=world)) for rank in range(world)]
    assert len({len(part) for part in parts}) == 1
    assert [row for step in zip(*parts, strict=True) for batch in step for row in batch] == whole


def test_a_step_larger_than_the_data_is_refused():
    with pytest.raises(UserError, match=r"trainer\.rows_per_step"):
        sampler(rows=3, step=2, world_size=2)


class Recorder(LightningModule):
    """Notes the rows of every training step; `fail_at` breaks off inside a step."""

    def __init__(self, fail_at: int | None = None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.rows: list[list[int]] = []
        self.fail_at = fail_at

    def training_step(self, batch, batch_idx):
        if self.global_step == self.fail_at:
            raise RuntimeError("broken step")
        self.rows.append(batch["row"].tolist())
        return self.layer(torch.ones(1)).sum()

    def configure_optimizers(self):
        # Makes Lightning build the loader before it restores the loops, as cosine schedules do.
        _ = self.trainer.estimated_stepping_batches
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(config, tokenizer, steps, folder, *, resume=None, fail_at=None, **loop):
    data = PackedMathDataModule(config, tokenizer, rows_per_step=2, seed=7, progress=False)
    module = Recorder(fail_at)
    callbacks = [
        ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1),
        OnExceptionCheckpoint(folder, "broken"),
    ]
    trainer = Trainer(
        accelerator="cpu", devices=1, max_steps=steps, max_epochs=-1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=callbacks, use_distributed_sampler=False, **loop,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="broken step") if fail_at is not None else nullcontext():
        trainer.fit(module, data, ckpt_path=resume)
    return module.rows


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("streaming", [False, True])
def test_a_resumed_run_reads_the_rows_that_were_to_come(config, tokenizer, tmp_path, streaming):
    """Epochs of 5 steps; stops in the middle of an epoch, at its end, twice in a row; other workers."""
    config = replace(config, streaming=streaming)
    straight = fit(config, tokenizer, 13, tmp_path / "straight")
    assert len(straight) == 13
    if not streaming:
        assert len({row for step in straight[:5] for row in step}) == 10
        assert straight[:5] != straight[5:10]
    else:
        assert len({row for step in straight for row in step}) == 26
    for first, second, workers in ((3, 8, 0), (5, 6, 0), (2, 7, 3)):
        folder = tmp_path / f"{first}"
        read = fit(config, tokenizer, first, folder)
        other = replace(config, workers=workers)
        read += fit(other, tokenizer, second, folder, resume=folder / f"step={first}.ckpt")
        read += fit(config, tokenizer, 13, folder, resume=folder / f"step={second}.ckpt")
        assert read == straight, (first, second, workers)


@pytest.mark.filterwarnings("ignore")
def test_a_step_that_failed_is_read_again(config, tokenizer, tmp_path):
    straight = fit(config, tokenizer, 6, tmp_path / "straight")
    read = fit(config, tokenizer, 6, tmp_path / "b", fail_at=3)
    assert read == straight[:3]
    assert read + fit(config, tokenizer, 6, tmp_path / "b", resume=tmp_path / "b" / "broken.ckpt") == straight


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("workers", [1, 3])
def test_workers_do_not_change_the_order_or_the_state(config, tokenizer, workers):
    def read(number, streaming):
        asked = replace(config, workers=number, streaming=streaming)
        loader = PackedMathDataModule(asked, tokenizer, rows_per_step=2).train_dataloader()
        rows, states = [], []
        for _ in range(2):
            for batch in loader:
                rows.append(batch["row"].tolist())
                states.append(loader.position.state_dict())
        return rows, states

    for streaming in (False, True):
        assert read(workers, streaming) == read(0, streaming)


def test_a_changed_data_set_is_refused_with_both_fingerprints(config, tokenizer):
    before = PackedMathDataModule(config, tokenizer)
    after = PackedMathDataModule(replace(config, seed=1), tokenizer)
    with pytest.raises(UserError, match=rf"{before.fingerprint}.*{after.fingerprint}"):
        after.load_state_dict(before.state_dict())
    with pytest.raises(UserError, match="seed=0, now it is 5"):
        PackedMathDataModule(config, tokenizer, seed=5).load_state_dict(before.state_dict())
    streaming = PackedMathDataModule(replace(config, streaming=True), tokenizer)
    with pytest.raises(UserError, match="mode=rows, now it is stream"):
        streaming.load_state_dict(before.state_dict())


@pytest.mark.parametrize("source", ["procedural", "jsonl"])
def test_streams_of_processes_and_resumes_are_one_sequence(config, tokenizer, tmp_path, source):
    """Two processes deal out what one reads, also resumed in the middle and past the end of the source."""
    from kvpop_lightning.data.loader import RowLoader

    if source == "jsonl":
        from test_prepare import write_jsonl

        write_jsonl(tmp_path / "a.jsonl", 12)
        write_jsonl(tmp_path / "e.jsonl", 1)
        files = {"path": str(tmp_path / "a.jsonl"), "eval_path": str(tmp_path / "e.jsonl")}
        config = replace(config, source="jsonl", **files)

    def loader(rank, world, state=None):
        module = PackedMathDataModule(replace(config, streaming=True, train_rows=12), tokenizer)
        blocks_source = module.train_dataloader().source
        assert isinstance(blocks_source, StreamingRows)
        if state:
            module.load_state_dict(state)
        stream = StreamingRows(
            blocks_source.blocks, module.position, num_rows=12, rows_per_step=2, rank=rank, world_size=world
        )
        return RowLoader(stream, stream)

    def numbers(batches):
        return [row for batch in batches for row in batch["row"].tolist()]

    single = loader(0, 1)
    whole = numbers(single) + numbers(single)
    assert len(whole) == 24
    assert whole == sorted(set(whole))
    pair = [loader(rank, 2) for rank in range(2)]
    dealt = []
    iterators = [iter(part) for part in pair]
    for _ in range(2):
        dealt += numbers(next(iterator) for iterator in iterators)
    assert dealt == whole[:8]
    states = [part.position.state_dict() for part in pair]
    for world, state in ((2, states), (1, states[:1])):
        parts = [loader(rank, world, state[rank]) for rank in range(world)]
        rest = [list(part) for part in parts]
        assert numbers(batch for step in zip(*rest, strict=True) for batch in step) == whole[8:12]


def test_streamed_rows_are_the_prepared_rows(config, tokenizer):
    prepared = PackedMathDataModule(config, tokenizer).train_rows
    streamed = iter(PackedMathDataModule(replace(config, streaming=True), tokenizer).train_dataloader())
    for index, batch in zip(range(5), streamed, strict=False):
        assert torch.equal(batch["input_ids"][0], prepared[index]["input_ids"])
    with pytest.raises(UserError, match=r"data\.streaming=false"):
        _ = PackedMathDataModule(replace(config, streaming=True), tokenizer).train_rows


def test_loaders_of_the_module(config, tokenizer):
    module = PackedMathDataModule(config, tokenizer, rows_per_step=3)
    module.prepare_data()
    module.setup("fit")
    assert len(module.train_dataloader()) == 3
    assert [batch["row"].tolist() for batch in module.val_dataloader()] == [[0, 1]]
    rows = [row for batch in module.predict_dataloader() for row in batch["row"].tolist()]
    assert rows == list(range(11))
    batch = next(iter(module.train_dataloader()))
    assert {name: tensor.dtype for name, tensor in batch.items()} == {
        "input_ids": torch.int64,
        "position_ids": torch.int64,
        "document_ids": torch.int64,
        "loss_mask": torch.bool,
        "row": torch.int64,
    }
