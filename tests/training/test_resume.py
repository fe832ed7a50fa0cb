"""An interrupted and resumed training is the uninterrupted one, bit for bit; what checkpoints hold."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from training_cases import BUDGET, Rows

from kvpop_lightning.config.schema import DistillConfig, TrainerConfig
from kvpop_lightning.errors import UserError
from kvpop_lightning.locks import exclusive
from kvpop_lightning.training.callbacks import GracefulStop, RandomState, TrainingCheckpoint
from kvpop_lightning.training.features import FeatureCache, FeatureRequest
from kvpop_lightning.training.loader import StepLoader
from kvpop_lightning.training.runtime import quiet_lightning
from kvpop_lightning.training.scorers import FeatureRows, ScorerModule
from kvpop_lightning.training.student import StudentModule

STEPS = 7
CONFIG = TrainerConfig(max_steps=STEPS, warmup_steps=2, scorer_lr=1e-2, accumulate=2, base_lr=1e-3)
DISTILL = DistillConfig(query_fraction=0.5, kl_topk=8, weighting="margin_balance")


class Noisy(ScorerModule):
    """Draws from the global generators in every step, as dropout or a user's augmentation would."""

    def share(self, batch: Any, totals: Any) -> Any:
        loss, metrics = super().share(batch, totals)
        return loss * (0.5 + torch.rand(())), metrics


class Interrupt(pl.Callback):
    """Sends the process a real signal while step `at` runs, as a user does."""

    def __init__(self, at: int, number: int = signal.SIGINT) -> None:
        self.at, self.number = at, number

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.at - 1:
            os.kill(os.getpid(), self.number)


class Losses(pl.Callback):
    def __init__(self) -> None:
        self.values: dict[int, float] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.values[trainer.global_step] = float(trainer.callback_metrics["train/loss"])


def train(
    make: Any, folder: Path, rows: Any, *, stop_at: int = 0, number: int = signal.SIGINT, key: str = "k"
) -> tuple[dict[str, torch.Tensor], dict[str, Any], dict[int, float], GracefulStop]:
    """Weights, optimiser state, losses by step, after training to the end or to the interruption."""
    torch.manual_seed(11)
    module = make()
    checkpoint = TrainingCheckpoint(folder, 0, key)
    stop, losses = GracefulStop(checkpoint), Losses()
    extra = [Interrupt(stop_at, number)] if stop_at else []
    with quiet_lightning():
        trainer = pl.Trainer(
            max_steps=STEPS,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            log_every_n_steps=1,
            num_sanity_val_steps=0,
            callbacks=[RandomState(), losses, *extra, checkpoint, stop],
        )
        loader = StepLoader(rows, steps=STEPS, rows_per_batch=4, seed=5)
        resume = checkpoint.path if checkpoint.path.exists() else None
        trainer.fit(module, train_dataloaders=loader, ckpt_path=resume, weights_only=True)
    weights = {n: t.clone() for n, t in module.state_dict().items()}
    return weights, trainer.optimizers[0].state_dict()["state"], losses.values, stop


@pytest.fixture
def cached(make_model: Any, tmp_path: Path) -> tuple[Any, FeatureRows]:
    model, rows = make_model("kvpop_mlstm"), Rows(5)
    cache = FeatureCache(tmp_path / "features", model, "data", FeatureRequest(BUDGET.window))
    cache.fill(rows, range(5), progress=False)
    return lambda: Noisy(make_model("kvpop_mlstm").kvpop, DISTILL, CONFIG, seed=2), FeatureRows(
        cache, range(5)
    )


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return torch.equal(a, b)


@pytest.mark.parametrize("at", range(1, STEPS))
def test_scorer_training_resumes_bit_for_bit_from_any_step(cached: Any, tmp_path: Path, at: int) -> None:
    make, rows = cached
    whole = train(make, tmp_path / "whole", rows)
    broken = train(make, tmp_path / "broken", rows, stop_at=at)
    assert broken[3].received == signal.SIGINT
    assert max(broken[2]) == at, "the running step is finished, no other begun"
    assert not same(broken[0], whole[0])
    resumed = train(make, tmp_path / "broken", rows)
    assert same(resumed[0], whole[0])
    assert same(resumed[1], whole[1])
    assert broken[2] | resumed[2] == whole[2]
    assert min(resumed[2]) == at + 1


def test_two_interruptions_one_of_them_sigterm(cached: Any, tmp_path: Path) -> None:
    make, rows = cached
    whole = train(make, tmp_path / "whole", rows)
    assert (
        train(make, tmp_path / "broken", rows, stop_at=2, number=signal.SIGTERM)[3].received == signal.SIGTERM
    )
    train(make, tmp_path / "broken", rows, stop_at=5)
    assert same(train(make, tmp_path / "broken", rows)[0], whole[0])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("at", [1, 4])
def test_full_training_resumes_bit_for_bit_with_the_original_teacher(
    make_model: Any, tmp_path: Path, at: int
) -> None:
    rows = Rows(5)

    def make() -> StudentModule:
        return StudentModule(make_model(), DISTILL, replace(CONFIG, base="full"), seed=2)

    whole = train(make, tmp_path / "whole", rows)
    train(make, tmp_path / "broken", rows, stop_at=at)
    assert same(train(make, tmp_path / "broken", rows)[0], whole[0])


def _checkpoint(make: Any, folder: Path, rows: Any) -> dict[str, Any]:
    train(make, folder, rows, stop_at=1)
    return torch.load(folder / "last.ckpt", weights_only=True)


def test_checkpoints_hold_scorers_only_when_the_base_is_frozen(
    cached: Any, make_model: Any, tmp_path: Path
) -> None:
    make, rows = cached
    stored = _checkpoint(make, tmp_path / "scorers", rows)
    assert stored["state_dict"]
    assert all(n.startswith("policy.") for n in stored["state_dict"])
    plain = _checkpoint(lambda: StudentModule(make_model(), DISTILL, CONFIG), tmp_path / "student", Rows(5))
    assert plain["state_dict"]
    assert all(n.startswith("model.kvpop.") for n in plain["state_dict"])
    scorer_numbers = sum(p.numel() for p in make_model().kvpop.parameters())
    moments = [s["exp_avg"].numel() for o in plain["optimizer_states"] for s in o["state"].values()]
    assert sum(moments) == scorer_numbers


def test_checkpoints_of_a_trained_base_hold_it_once_and_no_teacher(make_model: Any, tmp_path: Path) -> None:
    config = replace(CONFIG, base="full")
    module = StudentModule(make_model(), DISTILL, config)
    assert len(list(module.parameters())) == len(list(make_model().parameters())), (
        "the teacher is outside the tree"
    )
    stored = _checkpoint(lambda: StudentModule(make_model(), DISTILL, config), tmp_path, Rows(5))
    model = make_model()
    assert set(stored["state_dict"]) == {f"model.{n}" for n in model.state_dict()}
    moments = [s["exp_avg"].numel() for o in stored["optimizer_states"] for s in o["state"].values()]
    assert sum(moments) == sum(p.numel() for p in model.parameters())


def test_a_checkpoint_of_another_policy_is_refused(cached: Any, make_model: Any, tmp_path: Path) -> None:
    make, rows = cached
    train(make, tmp_path / "x", rows, stop_at=1)
    with pytest.raises(UserError, match="another configuration"):
        train(
            lambda: ScorerModule(make_model("kvpop_mlp", inputs="hidden").kvpop, DISTILL, CONFIG),
            tmp_path / "x",
            rows,
        )


def test_the_order_of_rows_is_a_function_of_seed_and_step() -> None:
    loader = StepLoader(Rows(5), steps=10, rows_per_batch=2, seed=1)
    order = [loader.indices(step) for step in range(10)]
    assert [StepLoader(Rows(5), steps=10, rows_per_batch=2, seed=1).indices(s) for s in (7, 3)] == [
        order[7],
        order[3],
    ]
    drawn = [i for step in order for i in step]
    passes = [drawn[i : i + 5] for i in range(0, 20, 5)]
    assert all(sorted(p) == list(range(5)) for p in passes)
    assert len({tuple(p) for p in passes}) > 1
    parts = [
        StepLoader(Rows(5), steps=5, rows_per_batch=1, seed=1, process=lambda r=r: (r, 2)) for r in (0, 1)
    ]
    assert [[p.indices(s)[0] for p in parts] for s in range(5)] == order[:5]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "no space left"),
        (RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0"), "no space left"),
        (OSError(errno.EROFS, "Read-only file system"), "read-only"),
    ],
)
def test_half_a_checkpoint_is_taken_away(tmp_path: Path, error: Exception, said: str) -> None:
    class Full:
        fast_dev_run, is_global_zero = False, True

        def save_checkpoint(self, path: Path) -> None:
            path.write_bytes(b"half")
            raise error

    with pytest.raises(UserError, match=said) as caught:
        TrainingCheckpoint(tmp_path, 0).save(Full())  # type: ignore[arg-type]
    assert str(tmp_path / "last.ckpt") in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_use_is_refused_until_its_process_ends(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, time; from pathlib import Path\n"
            "from kvpop_lightning.locks import exclusive\n"
            "with exclusive(Path(sys.argv[1]), 'trains', ''): print('held', flush=True); time.sleep(60)",
            str(tmp_path),
        ],
        stdout=subprocess.PIPE,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(UserError, match=f"process {holder.pid} trains there: set run_dir"):
            hold(tmp_path)
    finally:
        holder.kill()
        holder.wait()
    hold(tmp_path)  # nobody tidied up


def hold(folder: Path) -> None:
    with exclusive(folder, "trains", "set run_dir"):
        pass
