"""Gates are trained: DMS reaches its target, retention gates their capacity, the base StreamingLLM's
pattern.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_modules import run
from training_cases import BUDGET, Rows, row

from kvpop_lightning.config.policies import policies_to_train, with_policy
from kvpop_lightning.config.schema import (
    BudgetConfig,
    Config,
    DistillConfig,
    EvalConfig,
    GateConfig,
    GateTrainingConfig,
    PolicyConfig,
    ScorerConfig,
    TrainerConfig,
)
from kvpop_lightning.errors import UserError
from kvpop_lightning.models import load, softly
from kvpop_lightning.policy import Budget, document_layout
from kvpop_lightning.training.dms import DMCPass, DMSModule, DMSPass, reduction_of
from kvpop_lightning.training.fit import live_module, train
from kvpop_lightning.training.forward import collate, last_hidden
from kvpop_lightning.training.kl import kl_sum
from kvpop_lightning.training.retention_gate import RetentionGateModule, capacity
from kvpop_lightning.training.runtime import settings_key

TRAINER = TrainerConfig(max_steps=120, base_lr=1e-3, progress=False)
DISTILL = DistillConfig(kl_topk=0, gate=GateTrainingConfig(lr=1e-2))


@pytest.mark.parametrize(("name", "width"), [("dms", 0), ("dms", 6), ("dmc", 6)])
def test_the_target_is_reached(make_model: Any, rows: Rows, name: str, width: int) -> None:
    """Within two points of `1 - 1/F`, decided hard; only the gates move, and each head has its own share."""
    torch.manual_seed(0)
    model = make_model(name, Budget(0, 4, 8), gate_width=width)
    before = {n: p.clone() for n, p in model.named_parameters()}
    lr = 1e-3 if width == 0 else 1e-2
    module = DMSModule(
        model, replace(DISTILL, gate=GateTrainingConfig(lr=lr, weight=20.0)), TRAINER, reduction=3.0
    )
    record = run(module, rows, steps=120, batch=2)
    assert record.metrics[0]["train/closed_target"] == 0.0
    assert record.metrics[-1]["train/closed_target"] == pytest.approx(2 / 3)
    found, details = module.measure(rows, limit=6)
    # One-sided: to have merged more than asked costs nothing, and it costs this model little KL.
    above = 0.02 if name == "dms" else 0.04
    assert 2 / 3 - 0.02 < found["final_closed"] < 2 / 3 + above, (found, record.metrics[-1])
    assert len(details["closed_by_head"]) == 3
    assert found["final_closed_highest_head"] > found["final_closed_lowest_head"] + 0.01
    for name, parameter in model.named_parameters():
        moved = not torch.equal(parameter, before[name])
        assert moved == name.startswith("kvpop."), name


@pytest.mark.parametrize("name", ["dms", pytest.param("dmc", marks=pytest.mark.slow)])
def test_a_borrowed_channel_is_learned_by_the_base(make_model: Any, rows: Rows, name: str) -> None:
    """No parameters but the base's; the share closed moves from nothing to its target."""
    torch.manual_seed(0)
    model = make_model(name, Budget(0, 4, 8), gate_source="channel")
    assert not list(model.kvpop.parameters())
    trainer = replace(TRAINER, base="full", base_lr=3e-3)
    module = DMSModule(
        model, replace(DISTILL, gate=GateTrainingConfig(weight=20.0)), trainer, reduction=2.0, ramp=40.0
    )
    record = run(module, rows, steps=100, batch=2)
    assert record.metrics[0]["train/closed"] < (0.5 if name == "dms" else 0.1)  # alpha = 100 a - 5, or a - 5
    assert record.metrics[-1]["train/closed"] > 0.45
    assert record.metrics[-1]["train/closed_target"] == 0.5


def test_the_kl_reaches_the_gates_through_the_mask(make_model: Any, rows: Rows) -> None:
    """Without the compression loss the gradient comes from the KL alone; closing costs KL, so it opens the
    gates.
    """
    torch.manual_seed(0)
    model = make_model("dms", Budget(0, 4, 8), gate_width=0)
    with torch.no_grad():
        for scorer in model.kvpop.scorers:
            scorer.network.projection.bias.fill_(0.06)  # alpha = 1: most keys closed
    module = DMSModule(
        model, replace(DISTILL, gate=GateTrainingConfig(lr=1e-3, weight=0.0)), TRAINER, reduction=3.0
    )
    record = run(module, rows, steps=30, batch=2)
    assert record.metrics[0]["train/kl"] > 1e-3
    assert record.metrics[-1]["train/closed"] < record.metrics[0]["train/closed"] - 0.1
    assert record.metrics[-1]["train/kl"] < record.metrics[0]["train/kl"]


def test_micro_batches_share_the_loss(make_model: Any, rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    """KL over all supervised positions of the step, penalties by their keys, whatever the split (no noise
    here).
    """
    monkeypatch.setattr("kvpop_lightning.baselines.dms.logistic_noise", torch.zeros_like)
    gradients = []
    for accumulate in (1, 3):
        module = DMSModule(
            make_model("dms", gate_width=0),
            DISTILL,
            replace(TRAINER, accumulate=accumulate),
            reduction=4.0,
            ramp=0.1,
        )
        gradients.append(run(module, rows, steps=2, batch=3).gradients)
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-3, atol=1e-6, msg=name)


@pytest.mark.parametrize("name", ["dms", "dmc"])
def test_soft_forward_is_dense_while_gates_are_open(make_model: Any, name: str) -> None:
    """alpha far below 0 adds and merges nothing; far above it does what inference does."""
    model = make_model(name, Budget(0, 4, 8), gate_width=0)
    soft_pass = DMCPass if name == "dmc" else DMSPass
    batch = collate([row(0), row(2, padding=6)])
    from kvpop_lightning.models import dense

    with torch.no_grad():
        for bias, exact in ((-1.0, True), (1.0, False)):
            for scorer in model.kvpop.scorers:
                scorer.network.projection.bias.fill_(bias)
            with softly(model, soft_pass(model.kvpop)):
                soft = last_hidden(model, batch)
            hard = last_hidden(model, batch)
            with dense(model):
                full = last_hidden(model, batch)
            real = batch["document_ids"] >= 0
            torch.testing.assert_close(soft[real], hard[real], atol=1e-4, rtol=0)
            assert ((soft - full)[real].abs().max() < 1e-4) == exact


def test_retention_gates_learn_to_fit(make_model: Any, rows: Rows) -> None:
    torch.manual_seed(0)
    model = make_model("retention_gate", BUDGET, gate_width=6)
    distill = replace(DISTILL, gate=GateTrainingConfig(lr=3e-2, weight=20.0))
    module = RetentionGateModule(model, distill, TRAINER)
    record = run(module, rows, steps=80, batch=2)
    assert record.metrics[0]["train/penalty"] > 0.05
    assert record.metrics[-1]["train/penalty"] < 0.2 * record.metrics[0]["train/penalty"]
    assert record.metrics[-1]["train/soft_keys"] < record.metrics[0]["train/soft_keys"]
    assert math.isfinite(module.measure(rows)[0]["final_kl"])


def test_capacity_is_the_double_sum() -> None:
    ids = torch.tensor([[0] * 9 + [1] * 4 + [-1], [-1] * 2 + [0] * 12])
    layout = document_layout(ids, batch=2, length=14)
    log_beta = -torch.rand(2, 3, 14, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    excess, held, queries, ends = 0.0, 0.0, 0, 0
    for b in range(2):
        for i in range(14):
            if ids[b, i] < 0:
                continue
            place = int((ids[b, :i] == ids[b, i]).sum())
            queries += 1
            ends += int(i == 13 or ids[b, i + 1] != ids[b, i])
            for h in range(3):
                total = sum(
                    math.exp(float(log_beta[b, h, t]) * (i - t))
                    for t in range(i + 1)
                    if ids[b, t] == ids[b, i]
                )
                excess += max(0.0, total - 2) / (place + 1)
                held += total if i == 13 or ids[b, i + 1] != ids[b, i] else 0.0
    found = capacity(log_beta, 2, layout)
    assert float(found[0]) == pytest.approx(excess / (3 * queries))
    assert float(found[1]) == pytest.approx(held / (3 * ends))


@pytest.mark.parametrize("topk", [0, 7])
@pytest.mark.parametrize("reverse", [False, True])
def test_both_directions_of_the_kl(topk: int, reverse: bool) -> None:
    g = torch.Generator().manual_seed(0)
    student, teacher, head = (
        torch.randn(*n, generator=g, dtype=torch.float64) for n in ((5, 6), (5, 6), (6, 30))
    )
    student.requires_grad_()
    total = kl_sum(
        student, lambda h: h @ head, teacher, lambda h: h @ head, topk=topk, chunk=2, reverse=reverse
    )
    p, q = torch.softmax(teacher @ head, -1), torch.softmax(student @ head, -1)
    if topk:
        ids = p.topk(topk).indices
        p, q = (
            torch.cat([x.gather(-1, ids), 1 - x.gather(-1, ids).sum(-1, keepdim=True)], -1) for x in (p, q)
        )
    first, second = (q, p) if reverse else (p, q)
    expected = (first * (first / second).log()).sum()
    assert float(total.detach()) == pytest.approx(float(expected.detach()), rel=1e-9)
    (found,) = torch.autograd.grad(total, student)
    (wanted,) = torch.autograd.grad(expected, student)
    torch.testing.assert_close(found, wanted, atol=1e-9, rtol=1e-7)


def config_of(tmp_path: Any, name: str, **trainer: Any) -> Config:
    config = Config(
        policy=PolicyConfig(
            budget=BudgetConfig(sink=2, window=4, topk=6),
            scorer=ScorerConfig(inputs="kv", width=4),
            gate=GateConfig(width=0),
        ),
        distill=replace(DISTILL, gate=GateTrainingConfig(lr=1e-3)),
        trainer=TrainerConfig(max_steps=6, progress=False, checkpoint_every=100, **trainer),
        eval=EvalConfig(reference_length=48),
        run_dir=str(tmp_path),
    )
    return with_policy(config, name)


class Data(SimpleNamespace):
    """What `train` asks of a DataModule."""


@pytest.mark.parametrize("name", ["dms", "dmc", "retention_gate", "streaming_llm_plus"])
def test_train_saves_a_policy_that_loads(
    tmp_path: Any, plain_model: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path, name)
    assert (config.trainer.base == "full") == (name == "streaming_llm_plus")
    assert policies_to_train(config) == [name]
    monkeypatch.setattr("kvpop_lightning.training.fit._Job._live", live_on_rows)
    before = {n: p.clone() for n, p in plain_model.named_parameters()}
    result = train(config, model=plain_model, data=Data(fingerprint="x", train_rows=Rows()))
    record = json.loads((result.policy_path / "training.json").read_text())
    assert result.steps == 6
    assert math.isfinite(result.metrics["kl"])
    again = load(result.policy_path, base=None if name == "streaming_llm_plus" else plain_model)
    assert again.kvpop.name == name
    after = dict(again.named_parameters())
    moved = [n for n, p in before.items() if not torch.equal(after[n], p)]
    assert bool(moved) == (name == "streaming_llm_plus")
    if name == "dms":
        assert reduction_of(config) == pytest.approx((48 - 4) / (12 - 4))
        assert len(record["closed_by_head"]) == 3
        assert record["metrics"]["gate_parameters"] == 3 * 2 * 33
    if name == "dmc":
        assert reduction_of(config) == pytest.approx((48 - 1) / (12 - 1))
        assert record["metrics"]["gate_parameters"] == 3 * 2 * 2 * 33
        assert len(record["closed_by_head"]) == 3
    assert train(config, model=plain_model, data=Data(fingerprint="x", train_rows=Rows())).reused or name == (
        "streaming_llm_plus"
    )


def live_on_rows(job: Any) -> tuple[Any, Any]:
    loader = torch.utils.data.DataLoader(Rows(), batch_size=2, collate_fn=collate)
    return live_module(job.config, job.model), loader


def test_reduction_from_the_budget(tmp_path: Any) -> None:
    config = config_of(tmp_path, "dms")
    set_by_hand = replace(config, distill=replace(DISTILL, gate=GateTrainingConfig(reduction=8.0)))
    assert reduction_of(set_by_hand) == 8.0
    with pytest.raises(UserError, match=r"eval\.reference_length 8"):
        reduction_of(replace(config, eval=EvalConfig(reference_length=8)))


def test_a_reference_length_that_sets_the_target_is_part_of_the_settings(tmp_path: Any) -> None:
    """DMS's F follows from it: another length is another training; for other policies, or an F set by hand,
    not."""

    def key(config: Config, length: int) -> str:
        return settings_key(
            replace(config, eval=replace(config.eval, reference_length=length)), "data", "base"
        )

    dms = config_of(tmp_path, "dms")
    assert reduction_of(dms) != reduction_of(replace(dms, eval=EvalConfig(reference_length=96)))
    assert key(dms, 48) != key(dms, 96)
    set_by_hand = replace(dms, distill=replace(DISTILL, gate=GateTrainingConfig(reduction=8.0)))
    assert key(set_by_hand, 48) == key(set_by_hand, 96)
    gate = config_of(tmp_path, "retention_gate")
    assert key(gate, 48) == key(gate, 96)
