"""The chunked distillation losses against float64 formulas over whole logits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kvpop_lightning.training.kl import (
    cross_entropy_sum,
    kl_full,
    kl_sum,
    kl_to_top_logits,
    supervised_positions,
    top_logits,
)

N, HIDDEN, VOCABULARY = 13, 7, 29


def _models(seed: int = 0, sharpness: float = 1.0, dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(seed)
    make = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)  # noqa: E731
    student, teacher = nn.Linear(HIDDEN, VOCABULARY, bias=False), nn.Linear(HIDDEN, VOCABULARY, bias=False)
    student.weight = nn.Parameter(make(VOCABULARY, HIDDEN))
    teacher.weight = nn.Parameter(make(VOCABULARY, HIDDEN) * sharpness, requires_grad=False)
    return student, teacher, make(N, HIDDEN).requires_grad_(), make(N, HIDDEN)


def _reference(student, teacher, hidden, teacher_hidden, topk: int) -> torch.Tensor:
    """KL over the vocabulary, the tokens outside the teacher's top-K merged into one, straight from the
    definition.
    """
    p, q = teacher(teacher_hidden).softmax(-1), student(hidden).softmax(-1)
    ids = p.topk(topk, -1).indices
    chosen_p, chosen_q = p.gather(-1, ids), q.gather(-1, ids)
    inside = torch.zeros_like(p, dtype=torch.bool).scatter(-1, ids, True)
    rest_p, rest_q = p.masked_fill(inside, 0).sum(-1), q.masked_fill(inside, 0).sum(-1)
    kl = (chosen_p * (chosen_p / chosen_q).log()).sum(-1)
    if topk < p.shape[-1]:
        kl = kl + rest_p * (rest_p / rest_q).log()
    return kl.sum()


@pytest.mark.parametrize("topk", [1, 5, VOCABULARY - 1, VOCABULARY])
@pytest.mark.parametrize("chunk", [1, 4, 13, 100])
def test_chunked_kl_and_its_gradients_equal_the_definition(topk: int, chunk: int) -> None:
    student, teacher, hidden, teacher_hidden = _models()
    expected = _reference(student, teacher, hidden, teacher_hidden, topk)
    wanted = torch.autograd.grad(expected, [hidden, student.weight])
    got = kl_sum(hidden, student, teacher_hidden, teacher, topk=topk, chunk=chunk)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(
        torch.autograd.grad(got, [hidden, student.weight]), wanted, rtol=1e-9, atol=1e-10
    )


def test_topk_kl_is_below_the_full_one_and_zero_means_full() -> None:
    student, teacher, hidden, teacher_hidden = _models()
    full = kl_full(hidden, student, teacher_hidden, teacher, chunk=3)
    torch.testing.assert_close(kl_sum(hidden, student, teacher_hidden, teacher, topk=0, chunk=5), full)
    values = [kl_sum(hidden, student, teacher_hidden, teacher, topk=k).item() for k in (1, 4, 16, 28)]
    assert values == sorted(values)
    assert values[-1] < full.item() * (1 + 1e-12)


@pytest.mark.parametrize("sharpness", [50.0, 2000.0])
def test_confident_rows_give_finite_values_and_gradients(sharpness: float) -> None:
    student, teacher, hidden, teacher_hidden = _models(sharpness=sharpness, dtype=torch.float32)
    top = top_logits(teacher_hidden, teacher, 4, chunk=5)
    assert float(top.log_probs.exp().sum(-1).max()) == pytest.approx(1.0, abs=1e-4)
    assert torch.isfinite(top.rest).all()
    loss = kl_to_top_logits(hidden, student, top, chunk=5)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(hidden.grad).all()
    assert torch.isfinite(student.weight.grad).all()


def test_a_confident_student_is_no_trouble_either() -> None:
    student, teacher, hidden, teacher_hidden = _models(dtype=torch.float32)
    with torch.no_grad():
        student.weight.mul_(1000.0)
    loss = kl_sum(hidden, student, teacher_hidden, teacher, topk=4, chunk=5)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(hidden.grad).all()


def test_no_supervised_position_gives_zero_that_still_reaches_the_parameters() -> None:
    student, teacher, hidden, teacher_hidden = _models()
    loss = kl_sum(hidden[:0], student, teacher_hidden[:0], teacher, topk=4)
    loss.backward()
    assert float(loss) == 0.0
    assert hidden.grad is not None


def test_peak_memory_is_a_few_chunks_not_all_logits() -> None:
    """Counts the largest tensor that passes through the head, forward and backward."""
    student, teacher, hidden, teacher_hidden = _models()
    seen: list[int] = []

    def head(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.shape[0])
        return student(x)

    kl_sum(hidden, head, teacher_hidden, teacher, topk=4, chunk=4).backward()
    assert max(seen) == 4
    assert sum(seen) == 2 * N, "each chunk runs once forward and once again in the backward pass"


def test_cross_entropy_equals_the_library_and_its_gradients() -> None:
    student, _, hidden, _ = _models()
    labels = torch.randint(0, VOCABULARY, (N,), generator=torch.Generator().manual_seed(1))
    expected = nn.functional.cross_entropy(student(hidden), labels, reduction="sum")
    got = cross_entropy_sum(hidden, student, labels, chunk=4)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(
        torch.autograd.grad(got, student.weight), torch.autograd.grad(expected, student.weight)
    )


def test_a_position_is_supervised_iff_its_next_token_is_in_the_same_document_and_in_the_loss_mask() -> None:
    document_ids = torch.tensor([[0, 0, 0, 1, 1, 2, -1, -1], [-1, 3, 3, 3, -1, 4, 4, 5]])
    loss_mask = torch.tensor([[1, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 1, 1, 1, 1]], dtype=torch.bool)
    expected = torch.tensor([[0, 1, 0, 1, 0, 0, 0, 0], [0, 1, 0, 0, 0, 1, 0, 0]], dtype=torch.bool)
    assert torch.equal(supervised_positions(loss_mask, document_ids), expected)
