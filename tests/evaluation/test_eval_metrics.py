"""Row metrics against plain float64 references."""

from __future__ import annotations

import pytest
import scipy.stats
import torch

from kvpop_lightning.evaluation.metrics import (
    decision_accuracy,
    dense_attention_rows,
    retained_mass,
    spearman,
    supervised_positions,
    teacher_logits,
    token_metrics,
)


def _outputs(positions=37, vocabulary=61, hidden=12, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)  # noqa: E731
    return draw(positions, hidden), draw(positions, hidden), draw(vocabulary, hidden), draw(vocabulary)


def _reference(student, teacher, weight, bias, target):
    logits, reference = (x.double() @ weight.double().T + bias.double() for x in (student, teacher))
    log_q, log_p = logits.log_softmax(-1), reference.log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    top1 = (log_q.argmax(-1) == log_p.argmax(-1)).double().mean()
    nll = -log_q.gather(-1, target[:, None]).mean()
    return kl.item(), top1.item(), nll.item()


@pytest.mark.parametrize("chunk", [1, 7, 37, 64])
@pytest.mark.parametrize("keep_bytes", [0, 1 << 29])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_token_metrics_equal_the_full_reference(chunk, keep_bytes, dtype):
    student, teacher, weight, bias = _outputs(dtype=dtype)
    target = torch.randint(0, 61, (37,))
    kept = teacher_logits(teacher, weight, bias, chunk=chunk, keep_bytes=keep_bytes)
    assert (kept.log_probs is None) == (keep_bytes == 0)
    got = token_metrics(student, kept, target, weight, bias, chunk=chunk)
    expected = _reference(student, teacher, weight, bias, target)
    tolerance = 1e-12 if dtype == torch.float64 else 2e-5
    assert got[:3] == pytest.approx(expected, abs=tolerance, rel=tolerance)
    assert got.positions == 37
    assert got.kl > 0.05  # the two models differ, so the comparison is not vacuous


def test_token_metrics_leave_the_teacher_unchanged():
    student, teacher, weight, bias = _outputs()
    target = torch.zeros(37, dtype=torch.long)
    kept = teacher_logits(teacher, weight, bias)
    first = token_metrics(student, kept, target, weight, bias)
    assert token_metrics(student, kept, target, weight, bias) == first


def test_equal_models_have_no_divergence_on_confident_rows():
    _, teacher, weight, bias = _outputs(hidden=8, vocabulary=5000)
    teacher = teacher * 30  # a softmax of nearly one entry
    kept = teacher_logits(teacher, weight, bias, chunk=37)
    got = token_metrics(teacher, kept, torch.zeros(37, dtype=torch.long), weight, bias, chunk=5)
    assert abs(got.kl) < 1e-6
    assert got.top1 == 1.0


def test_no_position_is_an_error():
    student, teacher, weight, bias = _outputs()
    kept = teacher_logits(teacher[:0], weight, bias)
    with pytest.raises(ValueError, match="no supervised position"):
        token_metrics(student[:0], kept, torch.zeros(0, dtype=torch.long), weight, bias)


def test_supervised_positions_follow_documents_and_the_loss_mask():
    document = torch.tensor([0, 0, 0, 1, 1, 1, -1, -1])
    loss = torch.tensor([1, 0, 1, 1, 1, 1, 1, 1]).bool()
    # 0 -> token 1 not in the mask; 2 -> token 3 opens another document; 5 -> padding follows; 6 -> padding
    assert supervised_positions(loss, document).tolist() == [1, 3, 4]
    assert supervised_positions(loss, document, first=3).tolist() == [3, 4]


@pytest.mark.parametrize("packed", [False, True])
def test_retained_mass_equals_a_loop(packed):
    torch.manual_seed(1)
    layers, hkv, group, length, width = 2, 3, 2, 29, 5
    query = torch.randn(layers, hkv * group, length, width)
    key = torch.randn(layers, hkv, length, width)
    document = (
        torch.tensor([0] * 12 + [1] * 14 + [-1] * 3) if packed else torch.zeros(length, dtype=torch.long)
    )
    position = torch.tensor([3, 11, 14, 20, 25])
    eviction = torch.arange(length) + torch.randint(3, 30, (layers, hkv, length))
    probability = torch.stack(
        [
            dense_attention_rows(query[n], key[n], position, scale=0.4, document_ids=document)
            for n in range(layers)
        ]
    )
    got = retained_mass(probability, position, eviction)
    expected = torch.zeros(layers, hkv * group, dtype=torch.float64)
    for layer in range(layers):
        for head in range(hkv * group):
            for i in position.tolist():
                seen = [j for j in range(i + 1) if document[j] == document[i]]
                logits = torch.stack(
                    [
                        query[layer, head, i].double() @ key[layer, head // group, j].double() * 0.4
                        for j in seen
                    ]
                )
                for j, p in zip(seen, logits.softmax(0).tolist(), strict=True):
                    expected[layer, head] += p * (i < eviction[layer, head // group, j]) / len(position)
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)
    assert (got < 0.999).any()
    whole = retained_mass(probability, position, torch.full_like(eviction, torch.iinfo(torch.int64).max))
    torch.testing.assert_close(whole, torch.ones_like(whole))


@pytest.mark.parametrize("levels", [3, 10, 100000])
def test_spearman_equals_scipy_with_ties(levels):
    generator = torch.Generator().manual_seed(levels)
    first = torch.randint(0, levels, (2, 4, 83), generator=generator).float()
    second = first * 0.3 + torch.randint(0, levels, (2, 4, 83), generator=generator)
    valid = torch.rand(2, 4, 83, generator=generator) < 0.7
    got = spearman(first, second, valid)
    for row in range(2):
        for head in range(4):
            keep = valid[row, head]
            expected = scipy.stats.spearmanr(first[row, head][keep], second[row, head][keep]).statistic
            assert got[row, head].item() == pytest.approx(expected, abs=1e-12)


def test_spearman_is_undefined_for_constant_scores_and_single_tokens():
    valid = torch.ones(2, 9, dtype=torch.bool)
    assert spearman(torch.zeros(2, 9), torch.randn(2, 9), valid).isnan().all()
    valid[:, 1:] = False
    assert spearman(torch.randn(2, 9), torch.randn(2, 9), valid).isnan().all()


def test_decision_accuracy_by_hand():
    priority = torch.tensor([[1.0, 5.0, 3.0, 3.0, 2.0]], dtype=torch.float64)
    newcomer = torch.tensor([[-1, 2, 3, 4, 4]])
    boundary = torch.tensor([[-1, 1, 2, 0, 2]])
    # says: 3 >= 5 no, 3 >= 3 yes (tie keeps), 2 >= 1 yes, 2 >= 3 no
    keep = torch.tensor([[True, False, True, False, False]])
    valid = torch.tensor([[False, True, True, True, True]])
    got = decision_accuracy(priority, newcomer, boundary, keep, valid)
    assert got.accuracy.item() == pytest.approx(3 / 4)
    assert got.balanced.item() == pytest.approx((1 + 2 / 3) / 2)
    assert got.decisions.item() == 4
    none = decision_accuracy(priority, newcomer, boundary, keep, torch.zeros_like(valid))
    assert none.accuracy.isnan().all()
    assert none.balanced.isnan().all()
