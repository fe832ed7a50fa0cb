from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from policy_cases import FAST, Case, best_first, cases, documents, eligible

from kvpop_lightning.policy import Budget, boundary_accuracy, eviction_time, teacher_decisions

BOUNDARIES = st.sampled_from(["cutoff", "displaced"])
BACKENDS = ("parallel", "reference")


@FAST
@given(cases(), BOUNDARIES)
def test_decisions_are_those_of_the_definition(case: Case, boundary: str) -> None:
    batch, heads, length = case.priority.shape
    k = case.budget.topk
    expected: dict[tuple[int, int, int], tuple[int, int, bool]] = {}
    for b, rows in documents(case.document_ids, batch, length):
        for h in range(heads):
            priority = case.priority[b, h].tolist()
            for place, i in enumerate(rows):
                ranked = best_first(eligible(rows, place, case.budget), priority, rows)
                if len(ranked) <= k:
                    continue
                newcomer = place - case.budget.window
                if boundary == "cutoff":
                    rival = ranked[k] if ranked[k - 1] == newcomer else ranked[k - 1]
                else:
                    rival = best_first(eligible(rows, place - 1, case.budget), priority, rows)[k - 1]
                expected[b, h, i] = (rows[newcomer], rows[rival], newcomer in ranked[:k])
    for backend in BACKENDS:
        got = teacher_decisions(
            case.priority, case.budget, document_ids=case.document_ids, boundary=boundary, backend=backend
        )
        assert got.newcomer.shape == (batch, 1, length)
        places = [tuple(place) for place in got.valid.nonzero().tolist()]
        assert places == sorted(expected)
        for b, h, i in places:
            newcomer, rival, keep = expected[b, h, i]
            assert (got.newcomer[b, 0, i], got.boundary[b, h, i], got.keep[b, h, i]) == (
                newcomer,
                rival,
                keep,
            )
            p_newcomer, p_rival = case.priority[b, h, newcomer], case.priority[b, h, rival]
            assert got.margin[b, h, i] == (0.0 if p_newcomer == p_rival else p_newcomer - p_rival)
        invalid = ~got.valid
        assert not got.keep[invalid].any()
        assert (got.boundary[invalid] == 0).all()
        assert (got.margin[invalid] == 0).all()


@FAST
@given(cases(), BOUNDARIES)
def test_decisions_and_eviction_times_tell_one_story(case: Case, boundary: str) -> None:
    decisions = teacher_decisions(
        case.priority, case.budget, document_ids=case.document_ids, boundary=boundary
    )
    time = eviction_time(case.priority, case.budget, document_ids=case.document_ids)
    query = torch.arange(time.shape[-1]).expand_as(time)
    newcomer_time = time.gather(-1, decisions.newcomer.expand_as(time))
    boundary_time = time.gather(-1, decisions.boundary)
    valid, keep = decisions.valid, decisions.keep
    # Dropped at its boundary: gone the moment it leaves the window. Kept: still seen.
    assert torch.equal(newcomer_time[valid & ~keep], query[valid & ~keep])
    assert (newcomer_time[valid & keep] > query[valid & keep]).all()
    if boundary == "displaced":
        assert torch.equal(boundary_time[valid & keep], query[valid & keep])  # it makes room
        assert (boundary_time[valid & ~keep] > query[valid & ~keep]).all()
    # One token is evicted per valid query and head, never more or fewer.
    evicted = torch.zeros_like(time).scatter_add_(
        -1, time.clamp(max=time.shape[-1] - 1), (time < 2**62).long()
    )
    assert torch.equal(evicted, valid.long())


@FAST
@given(cases(), BOUNDARIES)
def test_margin_and_order(case: Case, boundary: str) -> None:
    decisions = teacher_decisions(
        case.priority, case.budget, document_ids=case.document_ids, boundary=boundary
    )
    valid = decisions.valid
    newcomer = decisions.newcomer.expand_as(valid)
    assert (decisions.boundary[valid] < newcomer[valid]).all()
    assert torch.equal((decisions.margin >= 0)[valid], decisions.keep[valid])
    assert not decisions.margin.isnan().any()
    finite = case.priority.nan_to_num(posinf=50.0, neginf=-50.0)
    accuracy = boundary_accuracy(finite, decisions)
    assert torch.equal(accuracy.total, accuracy.count.float())  # the teacher agrees with itself


def test_tokens_without_a_target_decide_nothing() -> None:
    priority = torch.randn(1, 2, 30, generator=torch.Generator().manual_seed(0))
    known = torch.rand(1, 2, 30, generator=torch.Generator().manual_seed(1)) > 0.2
    plain = teacher_decisions(priority, Budget(1, 3, 4))
    some = teacher_decisions(priority, Budget(1, 3, 4), valid=known)
    both_known = known.gather(-1, plain.newcomer.expand_as(plain.boundary)) & known.gather(-1, plain.boundary)
    assert torch.equal(some.valid, plain.valid & both_known)
    assert torch.equal(some.keep, plain.keep & both_known)
    assert 0 < some.valid.sum() < plain.valid.sum()


def test_no_gradient_and_clear_errors() -> None:
    priority = torch.randn(1, 1, 20, requires_grad=True)
    assert not teacher_decisions(priority, Budget(0, 2, 3)).margin.requires_grad
    with pytest.raises(ValueError, match="boundary must be"):
        teacher_decisions(priority, Budget(0, 2, 3), boundary="median")
    with pytest.raises(ValueError, match="priority must be"):
        teacher_decisions(priority[0], Budget(0, 2, 3))
    with pytest.raises(ValueError, match="backend must be"):
        teacher_decisions(priority, Budget(0, 2, 3), backend="fenwick")
