from __future__ import annotations

import math

import pytest
import torch

from kvpop_lightning.policy import priority_at, static_priority

IDS = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, -1, 2], [-1, -1, 0, 0, 0, 0, 0, 0, 0, 0]])
POSITION = [[0, 1, 2, 3, 4, 0, 1, 2, 0, 0], [0, 0, 0, 1, 2, 3, 4, 5, 6, 7]]


def test_formula_per_head_and_document() -> None:
    score = torch.randn(2, 3, 10)
    gamma = [1.0, 0.7, 0.25]
    priority = static_priority(score, decay=gamma, decay_step=3, document_ids=IDS)
    assert priority.dtype == torch.float64
    for b in range(2):
        for h in range(3):
            for j in range(10):
                expected = score[b, h, j].double() - (POSITION[b][j] // 3) * math.log(gamma[h])
                assert priority[b, h, j] == pytest.approx(float(expected), abs=1e-14)


def test_decays_of_stacked_layers_and_single_numbers() -> None:
    score = torch.randn(1, 4, 20)
    per_layer = torch.tensor([[0.9, 0.8], [0.7, 1.0]])
    stacked = static_priority(score, decay=per_layer, decay_step=4)
    for head, gamma in enumerate(per_layer.flatten().tolist()):
        alone = static_priority(score[:, head : head + 1], decay=gamma, decay_step=4)
        assert torch.equal(stacked[:, head : head + 1], alone)
    assert torch.equal(static_priority(score, decay=1.0, decay_step=1), score.double())


def test_ranking_by_priority_is_ranking_by_effective_score() -> None:
    score = torch.randn(1, 1, 50, dtype=torch.float64)
    priority = static_priority(score, decay=0.6, decay_step=7)
    for i in range(50):
        age_steps = i // 7 - torch.arange(i + 1) // 7
        effective = score[0, 0, : i + 1] + age_steps * math.log(0.6)
        assert torch.equal(effective.argsort(), priority[0, 0, : i + 1].argsort())


def test_positions_per_head_are_what_a_cache_holds() -> None:
    score = torch.randn(2, 3, 10)
    whole = static_priority(score, decay=[0.5, 0.6, 0.7], decay_step=2, document_ids=IDS)
    slots = torch.tensor([[[3, 1], [4, 0], [2, 3]]] * 2)
    slots[1] += 4
    position = torch.tensor(POSITION)[:, None].expand(2, 3, 10).gather(-1, slots)
    at = priority_at(score.gather(-1, slots), position, decay=[0.5, 0.6, 0.7], decay_step=2)
    assert torch.equal(at, whole.gather(-1, slots))


def test_long_texts_keep_thousandths_of_a_nat() -> None:
    score = torch.zeros(1, 1, 131072)
    score[0, 0, -1] = 1e-5  # float32 cannot tell this from 0 beside 614 nats
    priority = static_priority(score, decay=math.exp(-0.3), decay_step=64)
    assert priority[0, 0, -1] > 600
    assert float(priority[0, 0, -1] - priority[0, 0, -2]) == pytest.approx(1e-5, rel=1e-6)


def test_gradient_reaches_the_score() -> None:
    score = torch.randn(1, 2, 5, requires_grad=True)
    static_priority(score, decay=0.9, decay_step=2).sum().backward()
    assert torch.equal(score.grad, torch.ones_like(score))


@pytest.mark.parametrize(
    ("decay", "step", "message"),
    [
        (0.0, 4, r"decay must lie in \(0, 1\]"),
        (1.5, 4, r"decay must lie in \(0, 1\]"),
        (float("nan"), 4, r"decay must lie in \(0, 1\]"),
        ([0.5, 0.5, 0.5], 4, "one per head"),
        (0.5, 0, "decay_step must be at least 1"),
    ],
)
def test_bad_decay_is_named(decay: float, step: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        static_priority(torch.zeros(1, 2, 3), decay=decay, decay_step=step)
