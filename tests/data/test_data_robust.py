"""Killed for real, made by several processes, read by several workers and processes, resumed twice."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from kvpop_lightning.data import PackedMathDataModule
from kvpop_lightning.data import prepare as prepare_module
from kvpop_lightning.data import rows as rows_module
from kvpop_lightning.data.fingerprint import describe, fingerprint
from kvpop_lightning.data.prepare import load_rows, prepare
from kvpop_lightning.data.rows import PackedRows
from kvpop_lightning.errors import UserError


def files_of(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.glob("*.npy"))}


def test_a_prepare_that_is_killed_leaves_nothing_to_be_read_and_goes_on(
    config, tokenizer, tmp_path, monkeypatch
):
    monkeypatch.setattr(prepare_module, "TOKENS_PER_SHARD", 256 * 16)
    asked = replace(config, train_rows=40)
    whole = prepare(
        replace(asked, cache_dir=str(tmp_path / "whole")), tokenizer, splits=("train",), progress=False
    )
    child = os.fork()
    if child == 0:  # killed in the middle of the second shard's third file
        save = rows_module.np.save

        def dying(stream, array):
            if "loss-00001" in stream.name:
                stream.write(b"half")
                stream.flush()
                os.kill(os.getpid(), signal.SIGKILL)
            save(stream, array)

        rows_module.np.save = dying
        prepare(asked, tokenizer, splits=("train",), progress=False)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    folder = Path(asked.cache_dir) / fingerprint(describe(asked, tokenizer))
    assert list(folder.rglob("*.tmp"))
    with pytest.raises(UserError, match="no prepared rows"):
        PackedRows(folder / "train")
    first = (folder / "train.partial" / "tokens-00000.npy").stat().st_mtime_ns
    resumed = prepare(asked, tokenizer, splits=("train",), progress=False)
    assert (resumed.folder / "train" / "tokens-00000.npy").stat().st_mtime_ns == first
    assert files_of(resumed.folder / "train") == files_of(whole.folder / "train")
    assert not list(folder.rglob("*.tmp"))


@pytest.mark.slow
def test_several_processes_make_the_same_bytes(config, tokenizer, tmp_path):
    asked = replace(config, train_rows=70, families=["ledger", "codebook"])
    made = []
    for processes in (1, 2, 3):
        where = replace(asked, processes=processes, cache_dir=str(tmp_path / str(processes)))
        made.append(prepare(where, tokenizer, progress=False))
    assert len({prepared.fingerprint for prepared in made}) == 1
    for split in ("train", "eval"):
        contents = [files_of(prepared.folder / split) for prepared in made]
        assert contents[0] == contents[1] == contents[2]
        counts = [load_rows(prepared, split).index["counts"] for prepared in made]
        assert counts[0] == counts[1] == counts[2]


class _Ranked(PackedMathDataModule):
    place = (0, 1)

    def _process(self):
        return self.place


def read(config, tokenizer, world, steps, state):
    """Rows of `steps` global steps read by `world` processes from `state` on, and the state after them."""
    modules = []
    for rank in range(world):
        module = _Ranked(config, tokenizer, rows_per_step=4 // world, seed=5, progress=False)
        module.place = (rank, world)
        if state is not None:
            module.load_state_dict(state)
        modules.append(module)
    rows, loaders = [], [module.train_dataloader() for module in modules]
    iterators = [iter(loader) for loader in loaders]
    for _ in range(steps):
        batches = []
        for rank, loader in enumerate(loaders):
            batch = next(iterators[rank], None)
            if batch is None:  # the epoch is over
                iterators[rank] = iter(loader)
                batch = next(iterators[rank])
            batches.append(batch)
        rows += [row for batch in batches for row in batch["row"].tolist()]
    states = [module.state_dict() for module in modules]
    return rows, states[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_stopped_twice_in_the_middle_of_epochs_with_other_processes(config, tokenizer, workers):
    """Epochs of 2 steps of 4 rows; 1 process, then 2, then 1, then 2: the same rows as without a stop."""
    straight, last = read(config, tokenizer, 1, 7, None)
    assert len(set(straight[:8])) == 8
    state, rows = None, []
    for world, steps in ((1, 1), (2, 2), (1, 3), (2, 1)):
        more, state = read(replace(config, workers=workers), tokenizer, world, steps, state)
        rows += more
    assert rows == straight
    assert state == last
    assert set(state) >= {"fingerprint", "seed", "epoch", "rows_consumed"}
