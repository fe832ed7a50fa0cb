from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kvpop_lightning.policy import (
    Budget,
    Decisions,
    boundary_accuracy,
    boundary_loss,
    regression_loss,
    sample_queries,
    static_priority,
    student_score,
    teacher_decisions,
)

BUDGET = Budget(2, 3, 5)
IDS = torch.tensor([[0] * 30 + [1] * 25 + [2] + [-1] * 4, [-1] * 6 + [0] * 54])


def teacher(boundary: str = "cutoff", seed: int = 0) -> Decisions:
    target = torch.randn(2, 3, 60, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    priority = static_priority(target, decay=0.8, decay_step=4, document_ids=IDS)
    return teacher_decisions(priority, BUDGET, document_ids=IDS, boundary=boundary)


def student(seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(2, 3, 60, generator=generator, dtype=torch.float64) * 2).to(dtype).requires_grad_()


def loss_by_loops(
    score: Tensor, decisions: Decisions, tau: float, weighting: str, scale: float, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    batch, heads, length = score.shape
    total = torch.zeros(batch, heads, dtype=torch.float64)
    count = torch.zeros(batch, heads, dtype=torch.int64)
    for b in range(batch):
        for h in range(heads):
            places = [
                i for i in range(length) if decisions.valid[b, h, i] and (mask is None or mask[b, 0, i])
            ]
            keep = [bool(decisions.keep[b, h, i]) for i in places]
            weights = [1.0] * len(places)
            if weighting == "margin_balance":
                for n, i in enumerate(places):
                    members = sum(keep) if keep[n] else len(keep) - sum(keep)
                    balance = min(5.0, max(0.2, len(keep) / (2 * members)))
                    weights[n] = min(1.0, abs(float(decisions.margin[b, h, i])) / scale) * balance
                mean = sum(weights) / len(weights)
                weights = [weight / mean for weight in weights]
            for n, i in enumerate(places):
                difference = (
                    score[b, h, decisions.newcomer[b, 0, i]] - score[b, h, decisions.boundary[b, h, i]]
                )
                y = 1.0 if keep[n] else -1.0
                total[b, h] = total[b, h] + weights[n] * torch.log1p(torch.exp(-y * difference / tau))
            count[b, h] = len(places)
    return total, count


@pytest.mark.parametrize("boundary", ["cutoff", "displaced"])
@pytest.mark.parametrize("weighting", ["none", "margin_balance"])
@pytest.mark.parametrize("masked", [False, True])
def test_boundary_loss_and_gradient_agree_with_loops(boundary: str, weighting: str, masked: bool) -> None:
    decisions, score = teacher(boundary), student()
    mask = (
        sample_queries(decisions.valid, 0.5, generator=torch.Generator().manual_seed(3)) if masked else None
    )
    parts = boundary_loss(
        score, decisions, temperature=0.7, weighting=weighting, margin_scale=0.9, query_mask=mask
    )
    total, count = loss_by_loops(score, decisions, 0.7, weighting, 0.9, mask)
    torch.testing.assert_close(parts.total, total)
    assert torch.equal(parts.count, count)
    torch.testing.assert_close(parts.mean(), total.sum() / count.sum())
    (gradient,) = torch.autograd.grad(parts.total.sum(), score)
    (expected,) = torch.autograd.grad(total.sum(), score)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("weighting", ["none", "margin_balance"])
def test_gradients_against_finite_differences(weighting: str) -> None:
    decisions = teacher()
    score = student()

    def through_priority(raw: Tensor) -> Tensor:
        effective = student_score(raw, margin="effective", decay=0.8, decay_step=4, document_ids=IDS)
        return boundary_loss(effective, decisions, weighting=weighting).mean()

    assert torch.autograd.gradcheck(through_priority, (score,))
    target = torch.randn(2, 3, 60, dtype=torch.float64)
    valid = torch.rand(2, 3, 60) > 0.3
    assert torch.autograd.gradcheck(
        lambda raw: regression_loss(raw, target, valid, sink=2, document_ids=IDS, offset=0.5).total, (score,)
    )


def test_float32_gradients_agree_with_float64() -> None:
    decisions = teacher()
    single, double = student(dtype=torch.float32), student()
    boundary_loss(single, decisions, weighting="margin_balance").mean().backward()
    boundary_loss(double, decisions, weighting="margin_balance").mean().backward()
    torch.testing.assert_close(single.grad.double(), double.grad, rtol=1e-4, atol=1e-7)


def test_effective_and_raw_margins_differ_by_the_decay() -> None:
    score = torch.randn(1, 2, 40)
    effective = student_score(score, margin="effective", decay=0.5, decay_step=10)
    assert torch.equal(effective, static_priority(score, decay=0.5, decay_step=10))
    assert student_score(score, margin="raw", decay=0.5, decay_step=10) is score
    decisions = teacher_decisions(effective, Budget(0, 2, 4))
    assert boundary_accuracy(effective, decisions).mean() == 1
    assert boundary_accuracy(score, decisions).mean() < 1
    with pytest.raises(ValueError, match="margin must be effective or raw"):
        student_score(score, margin="signed", decay=0.5, decay_step=10)


def test_a_better_student_has_a_lower_loss() -> None:
    target = torch.randn(2, 3, 60, dtype=torch.float64)
    decisions = teacher_decisions(target, BUDGET, document_ids=IDS)
    noise = torch.randn(2, 3, 60, dtype=torch.float64)
    losses = [
        float(boundary_loss(20 * (target + level * noise), decisions).mean())
        for level in (0.0, 0.3, 1.0, 3.0)
    ]
    assert losses == sorted(losses)
    assert float(boundary_loss(torch.zeros_like(target), decisions).mean()) == pytest.approx(math.log(2))
    confident = boundary_loss(1e4 * target, decisions, temperature=0.1)
    assert torch.isfinite(confident.total).all()


def test_rows_may_be_grouped_in_any_way() -> None:
    decisions, score = teacher(), student()
    together = boundary_loss(score, decisions, weighting="margin_balance")
    for b in range(2):
        one = Decisions(*(field[b : b + 1] for field in decisions))
        alone = boundary_loss(score[b : b + 1], one, weighting="margin_balance")
        torch.testing.assert_close(alone.total, together.total[b : b + 1])
        assert torch.equal(alone.count, together.count[b : b + 1])


def test_weights_have_mean_one_and_balance_keep_and_drop() -> None:
    decisions = teacher()
    loss = boundary_loss(torch.zeros(2, 3, 60), decisions, weighting="margin_balance", margin_scale=1e-12)
    torch.testing.assert_close(loss.total / loss.count, torch.full((2, 3), math.log(2)))
    score = torch.zeros(2, 3, 60, dtype=torch.float64, requires_grad=True)
    parts = boundary_loss(score, decisions, weighting="margin_balance", margin_scale=1e-12)
    # At equal scores every decision pulls by weight / 2: a keep pulls the newcomer up, a drop pulls it down.
    keeps = torch.where(decisions.keep, 1.0, -1.0) * decisions.valid
    assert (keeps.sum(-1) != 0).any()  # unbalanced without weights
    (gradient,) = torch.autograd.grad(parts.total.sum(), score)
    pull = torch.zeros_like(score)
    share = decisions.keep.sum(-1) / decisions.valid.sum(-1)
    weight = torch.where(decisions.keep, 0.5 / share[..., None], 0.5 / (1 - share)[..., None]) * keeps / 2
    pull.scatter_add_(-1, decisions.newcomer.expand_as(weight), -weight.double())
    pull.scatter_add_(-1, decisions.boundary, weight.double())
    torch.testing.assert_close(gradient, pull)


def test_equal_teacher_margins_of_zero_weigh_nothing() -> None:
    decisions = teacher_decisions(torch.zeros(1, 2, 30), Budget(0, 2, 3))
    assert decisions.valid.any()
    parts = boundary_loss(torch.randn(1, 2, 30), decisions, weighting="margin_balance")
    assert (parts.total == 0).all()


@pytest.mark.parametrize("weighting", ["none", "margin_balance"])
def test_nothing_to_decide_is_zero_not_nan(weighting: str) -> None:
    score = torch.randn(1, 2, 9, requires_grad=True)
    parts = boundary_loss(score, teacher_decisions(score, Budget(0, 4, 9)), weighting=weighting)
    assert (parts.count == 0).all()
    parts.mean().backward()
    assert parts.mean() == 0
    assert (score.grad == 0).all()


@pytest.mark.parametrize("weighting", ["none", "margin_balance"])
def test_padding_and_undecided_tokens_get_no_gradient(weighting: str) -> None:
    decisions = teacher()
    padding = (IDS < 0)[:, None].expand(2, 3, 60)
    score = student().detach().masked_fill(padding, float("nan")).requires_grad_()
    target = torch.randn(2, 3, 60, dtype=torch.float64)
    loss = boundary_loss(score, decisions, weighting=weighting).mean()
    loss = loss + regression_loss(score, target, ~padding, sink=2, document_ids=IDS).mean()
    loss.backward()
    assert torch.isfinite(loss)
    assert (score.grad[padding] == 0).all()
    assert torch.isfinite(score.grad).all()


def test_regression_by_loops() -> None:
    score, target = student().detach(), torch.randn(2, 3, 60, dtype=torch.float64) * 3 - 8
    valid = torch.rand(2, 3, 60, generator=torch.Generator().manual_seed(5)) > 0.3
    parts = regression_loss(score, target, valid, sink=2, document_ids=IDS, offset=8.0)
    position = [[*range(30), *range(25), 0, 0, 0, 0, 0], [0] * 6 + [*range(54)]]
    for b in range(2):
        for h in range(3):
            terms = []
            for j in range(60):
                if not valid[b, h, j] or IDS[b, j] < 0 or position[b][j] < 2:
                    continue
                error = abs(float(score[b, h, j]) - 8.0 - float(target[b, h, j]))
                terms.append(0.5 * error**2 if error < 1 else error - 0.5)
            assert float(parts.total[b, h]) == pytest.approx(sum(terms))
            assert parts.count[b, h] == len(terms)


def test_sampled_queries() -> None:
    valid = teacher().valid
    mask = sample_queries(valid, 0.4, generator=torch.Generator().manual_seed(0))
    assert mask.shape == (2, 1, 60)
    candidates = valid.any(1, keepdim=True)
    assert not (mask & ~candidates).any()
    assert torch.equal(mask.sum(-1), (candidates.sum(-1) * 0.4).ceil().long())
    again = sample_queries(valid, 0.4, generator=torch.Generator().manual_seed(0))
    other = sample_queries(valid, 0.4, generator=torch.Generator().manual_seed(1))
    assert torch.equal(mask, again)
    assert not torch.equal(mask, other)
    assert torch.equal(sample_queries(valid, 1.0), candidates)
    assert torch.equal(sample_queries(candidates[:, 0], 1.0), candidates)
    frequency = torch.stack(
        [sample_queries(valid, 0.4, generator=torch.Generator().manual_seed(n)) for n in range(300)]
    )
    rate = frequency.double().mean(0)[candidates]
    assert float(rate.min()) > 0.25
    assert float(rate.max()) < 0.55
    for fraction in (0.0, 1.1):
        with pytest.raises(ValueError, match="query_fraction"):
            sample_queries(valid, fraction)


def test_bad_settings_are_named() -> None:
    decisions, score = teacher(), student()
    with pytest.raises(ValueError, match="temperature"):
        boundary_loss(score, decisions, temperature=0.0)
    with pytest.raises(ValueError, match="weighting"):
        boundary_loss(score, decisions, weighting="focal")
    with pytest.raises(ValueError, match="margin_scale"):
        boundary_loss(score, decisions, weighting="margin_balance", margin_scale=0.0)
