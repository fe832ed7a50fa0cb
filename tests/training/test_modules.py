"""Teacher, student and scorer modules under a real Trainer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from training_cases import BUDGET, Rows

from kvpop_lightning.config.schema import DistillConfig, TargetConfig, TrainerConfig
from kvpop_lightning.errors import UserError
from kvpop_lightning.models import dense
from kvpop_lightning.training.features import FeatureCache, FeatureRequest
from kvpop_lightning.training.forward import collate, last_hidden, output_head
from kvpop_lightning.training.kl import kl_sum, supervised_positions
from kvpop_lightning.training.loader import StepLoader
from kvpop_lightning.training.runtime import quiet_lightning
from kvpop_lightning.training.scorers import FeatureRows, ScorerModule
from kvpop_lightning.training.student import StudentModule
from kvpop_lightning.training.teacher import TeacherModule

TRAINER = TrainerConfig(max_steps=30, scorer_lr=1e-2, warmup_steps=2, base_lr=1e-3, log_every=1)


class Record(pl.Callback):
    """Every logged step's metrics, and the gradients of the first step."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []
        self.gradients: dict[str, torch.Tensor] = {}

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any
    ) -> None:
        if not self.gradients:
            named = pl_module.named_parameters()
            self.gradients = {
                n.split("scorers.", 1)[-1]: p.grad.clone() for n, p in named if p.grad is not None
            }

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.metrics.append({n: float(v) for n, v in trainer.callback_metrics.items()})

    def mean(self, name: str, steps: slice) -> float:
        values = [m[name] for m in self.metrics[steps]]
        return sum(values) / len(values)


def run(
    module: pl.LightningModule,
    rows: Any,
    steps: int = 30,
    batch: int = 1,
    callbacks: Any = (),
    **options: Any,
) -> Record:
    record = Record()
    with quiet_lightning():
        trainer = pl.Trainer(
            max_steps=steps,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            log_every_n_steps=1,
            callbacks=[record, *callbacks],
            **options,
        )
        trainer.fit(module, train_dataloaders=StepLoader(rows, steps=steps, rows_per_batch=batch))
    return record


def features_of(
    model: Any, rows: Rows, folder: Any, dtype: torch.dtype = torch.float32, **request: Any
) -> FeatureRows:
    cache = FeatureCache(folder, model, "data", FeatureRequest(BUDGET.window, **request), dtype=dtype)
    cache.fill(rows, range(len(rows)), progress=False)
    return FeatureRows(cache, range(len(rows)))


@pytest.mark.parametrize(
    ("policy", "options", "distill"),
    [
        ("kvpop_mlp", {}, DistillConfig()),
        ("kvpop_mlstm", {"delay": 3}, DistillConfig(margin="raw", boundary="displaced", query_fraction=0.4)),
        (
            "kvpop_mlp",
            {"inputs": "kv_hidden"},
            DistillConfig(weighting="margin_balance", regression_weight=0.0),
        ),
        (
            "kvpop_linear",
            {"inputs": "hidden"},
            DistillConfig(target=TargetConfig(aggregation="logmeanexp"), temperature=0.5),
        ),
    ],
)
def test_cached_and_plain_training_give_the_same_loss_and_gradients(
    make_model: Any, rows: Rows, tmp_path: Any, policy: str, options: dict[str, Any], distill: DistillConfig
) -> None:
    config = replace(TRAINER, accumulate=2, gradient_clip=0.0)
    model = make_model(policy, **options)
    hidden = model.kvpop.needs_hidden
    features = features_of(model, rows, tmp_path, hidden=hidden, aggregation=distill.target.aggregation)
    fast = run(ScorerModule(model.kvpop, distill, config, seed=3), features, steps=3, batch=3)
    plain = run(StudentModule(make_model(policy, **options), distill, config, seed=3), rows, steps=3, batch=3)
    assert fast.gradients.keys() == plain.gradients.keys()
    for name, gradient in plain.gradients.items():
        torch.testing.assert_close(fast.gradients[name], gradient, rtol=1e-3, atol=1e-6, msg=name)
    assert sum(float(g.abs().sum()) for g in plain.gradients.values()) > 0
    names = ["loss", "boundary", "boundary_accuracy", "rank_correlation"]
    if (
        distill.regression_weight
    ):  # else the bias has a gradient of rounding errors, which Adam makes steps of
        names.append("regression")
    for a, b in zip(fast.metrics, plain.metrics, strict=True):
        for name in (f"train/{n}" for n in names):
            assert a[name] == pytest.approx(b[name], rel=2e-4, abs=1e-6), name


@pytest.mark.parametrize("policy", ["kvpop_linear", "kvpop_mlp", "kvpop_mlstm"])
def test_scorer_training_lowers_the_loss_and_agrees_better_with_the_teacher(
    make_model: Any, rows: Rows, tmp_path: Any, policy: str
) -> None:
    model = make_model(policy)
    features = features_of(model, rows, tmp_path)
    base = {n: p.clone() for n, p in model.named_parameters() if "kvpop" not in n}
    module = ScorerModule(model.kvpop, DistillConfig(), replace(TRAINER, max_steps=40, scorer_lr=3e-2))
    before = module.summary(features)
    run(module, features, steps=40)
    after = module.summary(features)
    assert after["final_boundary"] < 0.9 * before["final_boundary"]
    assert after["final_boundary_accuracy"] > before["final_boundary_accuracy"]
    assert after["final_rank_correlation"] > before["final_rank_correlation"]
    for name, parameter in model.named_parameters():
        if "kvpop" not in name:
            assert torch.equal(parameter, base[name])


def _kl(model: Any, teacher: Any, rows: Rows) -> float:
    batch = collate([rows[i] for i in range(len(rows))])
    chosen = supervised_positions(batch["loss_mask"], batch["document_ids"])
    with torch.no_grad():
        with dense(teacher):
            wanted = last_hidden(teacher, batch)[chosen]
        got = last_hidden(model, batch)[chosen]
        return float(kl_sum(got, output_head(model), wanted, output_head(teacher), topk=0)) / int(
            chosen.sum()
        )


@pytest.mark.parametrize(
    "target",
    [TargetConfig(), TargetConfig(normalizer="sparse"), TargetConfig(source="teacher", aggregation="mean")],
)
def test_full_training_lowers_kl_and_retention_loss_and_leaves_the_teacher_alone(
    make_model: Any, rows: Rows, target: TargetConfig
) -> None:
    model, teacher = make_model(), make_model()
    before = {n: p.clone() for n, p in teacher.named_parameters()}
    kl_before = _kl(model, teacher, rows)
    assert kl_before > 0.05, "the budget must cost something"
    config = replace(TRAINER, base="full", max_steps=20, base_lr=4e-3, scorer_lr=3e-2)
    module = StudentModule(
        model, DistillConfig(target=target, kl_topk=16, kl_chunk=7), config, teacher=teacher
    )
    record = run(module, rows, steps=20)
    assert _kl(model, teacher, rows) < 0.8 * kl_before
    assert record.mean("train/boundary", slice(-6, None)) < record.mean("train/boundary", slice(0, 6))
    assert all(torch.equal(p, before[n]) for n, p in teacher.named_parameters())
    rates = record.metrics
    assert rates[0]["learning_rate/base"] == rates[-1]["learning_rate/base"] == pytest.approx(4e-3)
    assert rates[-1]["learning_rate/scorer"] < rates[5]["learning_rate/scorer"]


def test_the_two_losses_do_not_reach_each_others_parameters(make_model: Any, rows: Rows) -> None:
    config = replace(TRAINER, base="full", gradient_clip=0.0)

    def gradients(distill: DistillConfig) -> dict[str, torch.Tensor]:
        return run(StudentModule(make_model(), distill, config), rows, steps=1).gradients

    both = gradients(DistillConfig(kl_topk=0))
    without = gradients(DistillConfig(kl_topk=0, retention_weight=0.0))
    scorer_names = {n for n in both if n[0].isdigit()}
    assert scorer_names
    assert scorer_names < set(both)
    for name, gradient in both.items():
        if name in scorer_names:
            assert not without[name].any(), f"the KL reached {name}"
        else:
            torch.testing.assert_close(
                gradient, without[name], rtol=0, atol=0, msg=f"the retention loss reached {name}"
            )


def test_frozen_student_runs_validation_kl_and_trains_only_scorers(make_model: Any, rows: Rows) -> None:
    model = make_model()
    module = StudentModule(model, DistillConfig(), TRAINER)
    base = {n: p.clone() for n, p in model.named_parameters() if "kvpop" not in n}
    record = run(module, rows, steps=24)
    assert record.mean("train/loss", slice(-6, None)) < record.mean("train/loss", slice(0, 6))
    assert all(torch.equal(p, base[n]) for n, p in model.named_parameters() if "kvpop" not in n)
    trainer = pl.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False
    )
    with quiet_lightning():
        found = trainer.validate(module, torch.utils.data.DataLoader(rows), verbose=False)[0]
    assert found["val/kl"] == pytest.approx(_kl(model, model, rows), rel=1e-4)


def test_a_policy_without_parameters_trains_the_base_alone(make_model: Any, rows: Rows) -> None:
    model, teacher = make_model("streaming_llm"), make_model("streaming_llm")
    before = _kl(model, teacher, rows)
    config = replace(TRAINER, base="full", max_steps=15, base_lr=4e-3)
    record = run(StudentModule(model, DistillConfig(), config, teacher=teacher), rows, steps=15)
    assert _kl(model, teacher, rows) < 0.8 * before
    assert "train/boundary" not in record.metrics[-1]
    with pytest.raises(UserError, match="nothing to train"):
        run(StudentModule(make_model("streaming_llm"), DistillConfig(), TRAINER), rows, steps=1)


@pytest.mark.parametrize("retrofitted", [True, False])
def test_teacher_fine_tunes_by_cross_entropy(make_model: Any, plain_model: Any, retrofitted: bool) -> None:
    model = make_model() if retrofitted else plain_model
    scorers = {n: p.clone() for n, p in model.named_parameters() if "kvpop" in n}
    config = replace(TRAINER, max_steps=20, base_lr=6e-3)
    rows = Rows(2)  # without padding, which a plain model separates from packing only by its own mask
    record = run(TeacherModule(model, config, chunk=7), rows, steps=20)
    assert record.mean("train/loss", slice(-4, None)) < 0.8 * record.mean("train/loss", slice(0, 4))
    assert all(torch.equal(p, scorers[n]) for n, p in model.named_parameters() if "kvpop" in n)


def test_teacher_loss_is_the_cross_entropy_of_supervised_positions(make_model: Any) -> None:
    model, rows = make_model(), Rows(3)
    batch = collate([rows[i] for i in range(3)])
    with torch.no_grad(), dense(model):
        logits = model(
            batch["input_ids"], position_ids=batch["position_ids"], document_ids=batch["document_ids"]
        ).logits
    chosen = supervised_positions(batch["loss_mask"], batch["document_ids"])
    expected = torch.nn.functional.cross_entropy(
        logits[:, :-1][chosen[:, :-1]], batch["input_ids"][:, 1:][chosen[:, :-1]]
    )
    record = run(TeacherModule(model, TRAINER, chunk=5), rows, steps=1, batch=3)
    assert record.metrics[0]["train/loss"] == pytest.approx(float(expected), rel=1e-5)


def test_teacher_predicts_features_and_fills_a_cache(make_model: Any, rows: Rows, tmp_path: Any) -> None:
    model = make_model()
    trainer = pl.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False
    )
    request = FeatureRequest(BUDGET.window, hidden=True, topk=5)
    loader = torch.utils.data.DataLoader(rows, batch_size=4)
    with quiet_lightning():
        given = trainer.predict(TeacherModule(model, TRAINER, request=request), loader)
        cache = FeatureCache(tmp_path, model, "data", request, dtype=torch.float32)
        assert trainer.predict(TeacherModule(model, TRAINER, cache=cache), loader) == [[0, 1, 2, 3], [4, 5]]
    assert all(index in cache for index in range(6))
    for name, tensor in cache.get(5).items():
        torch.testing.assert_close(tensor, given[1][name][1], msg=name)


def test_impossible_targets_are_refused(make_model: Any) -> None:
    for distill, config, word in (
        (DistillConfig(target=TargetConfig(source="student")), TRAINER, "trainer.base=full"),
        (DistillConfig(target=TargetConfig(normalizer="sparse")), TRAINER, "normalizer=dense"),
        (
            DistillConfig(target=TargetConfig(normalizer="sparse", source="teacher")),
            replace(TRAINER, base="full"),
            "student",
        ),
        (DistillConfig(), replace(TRAINER, base="lora"), "frozen or full"),
    ):
        with pytest.raises(UserError, match=word):
            StudentModule(make_model(), distill, config)
