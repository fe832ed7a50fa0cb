"""One optimiser step: accumulation, counting, clipping per group, learning rates, progress lines."""

from __future__ import annotations

import io
from dataclasses import replace
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from test_modules import Record, features_of, run
from training_cases import Rows

from kvpop_lightning.config.schema import DistillConfig, TrainerConfig
from kvpop_lightning.training.callbacks import GradientNorm
from kvpop_lightning.training.callbacks.gradient_norm import group_norms
from kvpop_lightning.training.progress import ProgressLine, clock
from kvpop_lightning.training.retention_loss import rank_correlation
from kvpop_lightning.training.schedule import build_optimizer, cosine_with_warmup, parameter_groups
from kvpop_lightning.training.scorers import ScorerModule
from kvpop_lightning.training.student import StudentModule

TRAINER = TrainerConfig(max_steps=10, scorer_lr=1e-2, warmup_steps=2, base_lr=1e-3, gradient_clip=0.0)


@pytest.mark.parametrize("kind", ["scorers", "full"])
def test_accumulated_micro_batches_give_the_gradient_of_the_whole_batch(
    make_model: Any, rows: Rows, tmp_path: Any, kind: str
) -> None:
    """Rows hold different numbers of decisions: a mean of the micro-batches' means would differ."""
    counts = [int((rows[i]["document_ids"] >= 0).sum()) for i in range(6)]
    assert len(set(counts)) > 1

    def step(accumulate: int) -> Record:
        config = replace(TRAINER, accumulate=accumulate, base="full" if kind == "full" else "frozen")
        model = make_model()
        if kind == "full":
            return run(StudentModule(model, DistillConfig(), config), rows, steps=1, batch=6)
        return run(
            ScorerModule(model.kvpop, DistillConfig(), config),
            features_of(model, rows, tmp_path),
            steps=1,
            batch=6,
        )

    whole = step(1)
    for accumulate in (2, 6, 4):
        parts = step(accumulate)
        for name, gradient in whole.gradients.items():
            torch.testing.assert_close(parts.gradients[name], gradient, rtol=1e-4, atol=1e-7, msg=name)
        for name in ("train/loss", "train/boundary", "train/regression", "train/boundary_accuracy"):
            assert parts.metrics[0][name] == pytest.approx(whole.metrics[0][name], rel=1e-5), name


def test_groups_are_clipped_apart_and_norms_logged_before_clipping(make_model: Any, rows: Rows) -> None:
    after: dict[str, float] = {}

    class After(pl.Callback):
        def on_before_zero_grad(self, trainer: Any, module: Any, optimizer: Any) -> None:
            after.update({n: float(v) for n, v in group_norms(optimizer).items()})

    norms: dict[float, dict[str, float]] = {}
    for clip in (0.0, 0.05):
        config = replace(TRAINER, base="full", gradient_clip=clip)

        class Step(StudentModule):
            def on_before_optimizer_step(self, optimizer: Any) -> None:
                super().on_before_optimizer_step(optimizer)
                norms[clip] = {n: float(v) for n, v in group_norms(optimizer).items()}  # noqa: B023

        record = run(Step(make_model(), DistillConfig(), config), rows, steps=1, callbacks=[GradientNorm()])
        logged = {n: record.metrics[0][f"gradient_norm/{n}"] for n in ("scorer", "base")}
        if clip == 0.0:
            assert logged == pytest.approx(norms[clip])
            unclipped = logged
        else:
            assert logged == pytest.approx(unclipped), "logged as they are before clipping"
            assert norms[clip] == pytest.approx({"scorer": clip, "base": clip}, rel=1e-3)


def test_scorers_warm_up_and_follow_a_cosine_while_the_base_keeps_its_rate() -> None:
    shares = [cosine_with_warmup(s, warmup=4, total=20, final=0.1) for s in range(25)]
    assert shares[:4] == [0.25, 0.5, 0.75, 1.0]
    assert shares[4] == 1.0
    assert all(a > b for a, b in pairwise(shares[4:21]))
    assert shares[12] == pytest.approx(0.55)
    assert shares[20:] == pytest.approx([0.1] * 5)
    assert cosine_with_warmup(0, warmup=0, total=5, final=0.0) == 1.0
    scorer, base = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    groups = parameter_groups(scorer.named_parameters(), base.named_parameters(), TRAINER)
    optimizer, schedule = build_optimizer(groups, TRAINER)
    for _ in range(10):
        for group in optimizer.param_groups:
            if group["group"] == "base":
                assert group["lr"] == TRAINER.base_lr
        optimizer.step()
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(TRAINER.scorer_lr * TRAINER.scorer_lr_final)


def test_only_matrices_decay(make_model: Any) -> None:
    model = make_model("kvpop_mlstm")
    names = {id(p): n for n, p in model.named_parameters()}
    groups = parameter_groups(
        model.kvpop.named_parameters(),
        [(n, p) for n, p in model.named_parameters() if "kvpop" not in n],
        TRAINER,
    )
    assert sum(len(g["params"]) for g in groups) == len(names)
    for group in groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            assert ("bias" in name or "norm" in name) == (group["weight_decay"] == 0.0), name


def test_rank_correlation_is_spearmans() -> None:
    generator = torch.Generator().manual_seed(0)
    score, target = torch.randn(2, 3, 40, generator=generator), torch.randn(2, 3, 40, generator=generator)
    valid = torch.rand(2, 3, 40, generator=generator) < 0.7
    valid[0, 0] = False
    found = rank_correlation(score, target, valid)
    for b in range(2):
        for h in range(3):
            a, c = score[b, h][valid[b, h]], target[b, h][valid[b, h]]
            ranks = torch.stack([x.argsort().argsort().double() for x in (a, c)])
            expected = torch.corrcoef(ranks)[0, 1] if len(a) else torch.tensor(0.0)
            assert float(found[b, h]) == pytest.approx(float(expected), abs=1e-9)
    assert torch.allclose(
        rank_correlation(target, target.exp(), valid)[1], torch.ones(3, dtype=torch.float64)
    )


def test_progress_lines_go_to_logs_rarely_and_rewrite_a_terminal() -> None:
    log = io.StringIO()
    line = ProgressLine("train", 100, done=40, stream=log, interval=1000.0)
    for done in range(41, 101):
        line.update(done, lambda: "loss 0.5")
    line.close()
    assert log.getvalue().count("\n") == 1
    assert "train  100/100  100 %" in log.getvalue()
    assert log.getvalue().endswith("loss 0.5\n")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    line = ProgressLine("train", 2, stream=terminal)
    line.update(1)
    line.update(2)
    line.close()
    assert terminal.getvalue().count("\r") == 2
    assert terminal.getvalue().endswith("\n")
    line = ProgressLine("train", 100, done=40)
    line.update(50)
    assert "left 0:50" in line.line(line._start + 10.0), "resumed steps do not count as speed"
    assert [clock(s) for s in (0, 61, 3725)] == ["0:00", "1:01", "1:02:05"]
    silent = io.StringIO()
    ProgressLine("x", 1, stream=silent, enabled=False).update(1)
    assert silent.getvalue() == ""
