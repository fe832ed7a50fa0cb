from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from policy_cases import FAST, Case, cases, documents, visible_by_definition, visible_by_time

from kvpop_lightning.policy import (
    NEVER,
    Budget,
    eviction_time,
    position_in_document,
    running_kth_best,
    static_priority,
)

BACKENDS = ("parallel", "reference")


def times(case: Case, backend: str = "auto") -> torch.Tensor:
    return eviction_time(case.priority, case.budget, document_ids=case.document_ids, backend=backend)


@FAST
@given(cases())
def test_queries_see_what_the_definition_says(case: Case) -> None:
    expected = visible_by_definition(case)
    for backend in BACKENDS:
        assert torch.equal(visible_by_time(times(case, backend), case.document_ids), expected), backend
    assert torch.equal(times(case, "parallel"), times(case, "reference"))


@FAST
@given(cases())
def test_a_dropped_token_never_returns(case: Case) -> None:
    seen = visible_by_definition(case)  # the property of the definition that makes one integer per key enough
    batch, _, length = case.priority.shape
    for b, rows in documents(case.document_ids, batch, length):
        of_document = seen[b][:, rows][:, :, rows]  # [H, queries, keys]
        for place in range(len(rows)):
            history = of_document[:, place:, place].int()
            assert (history.diff(dim=-1) <= 0).all()


@FAST
@given(cases())
def test_exactly_the_budget_is_seen(case: Case) -> None:
    counts = visible_by_time(times(case), case.document_ids).sum(-1)
    batch, _, length = case.priority.shape
    budget = case.budget
    expected = torch.zeros(batch, length, dtype=torch.int64)
    for b, rows in documents(case.document_ids, batch, length):
        for place, i in enumerate(rows):
            waiting = max(0, place - budget.window - budget.sink + 1)
            expected[b, i] = place + 1 - max(0, waiting - budget.topk)
            # Sinks may lie inside the window, so the budget is full only from here on.
            assert expected[b, i] == min(place + 1, budget.total)
    assert torch.equal(counts, expected.unsqueeze(1).expand_as(counts))


@FAST
@given(cases())
def test_times_are_outside_the_window_and_inside_the_document(case: Case) -> None:
    time = times(case)
    assert time.dtype == torch.int64
    index = torch.arange(time.shape[-1]).expand_as(time)
    assert (time >= index + case.budget.window).all()
    batch, _, length = time.shape
    for b, rows in documents(case.document_ids, batch, length):
        assert (time[b][:, rows[: case.budget.sink]] == NEVER).all()
        found = set(time[b][:, rows].flatten().tolist()) - {NEVER}
        assert found <= set(rows)
    if case.document_ids is not None:
        assert (time.transpose(0, 1)[:, case.document_ids < 0] == NEVER).all()


@FAST
@given(cases(packed=True))
def test_packed_documents_are_decoded_alone(case: Case) -> None:
    together = times(case)
    batch, _, length = case.priority.shape
    for b, rows in documents(case.document_ids, batch, length):
        alone = eviction_time(case.priority[b : b + 1][:, :, rows], case.budget)[0]
        index = torch.tensor([*rows, NEVER])
        assert torch.equal(together[b][:, rows], index[alone.clamp(max=len(rows))])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("decay", [1.0, 0.7])
def test_constant_scores_are_a_sliding_window(backend: str, decay: float) -> None:
    budget = Budget(3, 5, 8)
    ids = torch.tensor([[0] * 40 + [1] * 23 + [-1] * 3])
    priority = static_priority(torch.full((1, 2, 66), 1.5), decay=decay, decay_step=4, document_ids=ids)
    seen = visible_by_time(eviction_time(priority, budget, document_ids=ids, backend=backend), ids)
    position = position_in_document(ids)[0]
    age = position[:, None] - position
    same = (ids[0][:, None] == ids[0]) & (ids[0] >= 0)
    expected = same & (age >= 0) & ((age < budget.window + budget.topk) | (position < budget.sink))
    assert torch.equal(seen, expected.expand_as(seen))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_newer_wins_a_tie(backend: str) -> None:
    # window 1, two slots; 0 and 1 hold them, 2 (equal to 0) replaces the oldest among the lowest equals.
    priority = torch.tensor([[[1.0, 1.0, 1.0, 0.0, 2.0, 0.0]]])
    time = eviction_time(priority, Budget(0, 1, 2), backend=backend)
    assert time.tolist() == [[[3, 5, NEVER, 4, NEVER, NEVER]]]


def test_padding_inside_a_document_changes_nothing() -> None:
    priority = torch.randn(1, 2, 60, dtype=torch.float64)
    ids = torch.zeros(1, 60, dtype=torch.int64)
    ids[0, [0, 7, 8, 30, 59]] = -1
    real = (ids[0] >= 0).nonzero().flatten()
    priority[:, :, ids[0] < 0] = float("nan")  # nobody may look at it
    alone = eviction_time(priority[:, :, real], Budget(2, 4, 6))
    padded = eviction_time(priority, Budget(2, 4, 6), document_ids=ids)
    index = torch.cat([real, torch.tensor([NEVER])])
    assert torch.equal(padded[:, :, real], index[alone.clamp(max=len(real))])


def test_one_token_documents_and_budgets_larger_than_the_text() -> None:
    priority = torch.randn(2, 3, 17)
    for backend in BACKENDS:
        ones = eviction_time(
            priority, Budget(1, 2, 3), document_ids=torch.arange(17).expand(2, 17), backend=backend
        )
        large = eviction_time(priority, Budget(4, 10, 100), backend=backend)
        exact = eviction_time(priority, Budget(4, 3, 10), backend=backend)  # the budget is the text
        assert (torch.stack([ones, large, exact]) == NEVER).all()
        less = eviction_time(priority, Budget(4, 3, 9), backend=backend)
        assert ((less != NEVER).sum(-1) == 1).all()
        assert eviction_time(priority[:, :, :0], Budget(4, 3, 9), backend=backend).shape == (2, 3, 0)


@pytest.mark.parametrize("length", [63, 64, 65, 700])
def test_long_rows_and_many_heads(length: int) -> None:
    generator = torch.Generator().manual_seed(length)
    score = torch.randn(2, 7, length, generator=generator).mul(3).round()
    ids = torch.randint(0, 4, (2, length), generator=generator).sort(-1).values
    ids[:, -5:] = -1
    for document_ids in (None, ids):
        priority = static_priority(score, decay=0.8, decay_step=16, document_ids=document_ids)
        fast = eviction_time(priority, Budget(1, 4, 5), document_ids=document_ids)
        slow = eviction_time(priority, Budget(1, 4, 5), document_ids=document_ids, backend="reference")
        assert torch.equal(fast, slow)
        assert (fast != NEVER).any()


@FAST
@given(cases(), st.integers(1, 9))
def test_running_kth_best(case: Case, k: int) -> None:
    expected = torch.full(case.priority.shape, -1, dtype=torch.int64)
    batch, heads, length = case.priority.shape
    for b, rows in documents(case.document_ids, batch, length):
        for h in range(heads):
            for place in range(len(rows)):
                seen = [(float(case.priority[b, h, i]), i) for i in rows[case.budget.sink : place + 1]]
                if len(seen) >= k:
                    expected[b, h, rows[place]] = sorted(seen)[-k][1]
    for backend in BACKENDS:
        got = running_kth_best(
            case.priority, k, sink=case.budget.sink, document_ids=case.document_ids, backend=backend
        )
        assert torch.equal(got, expected), backend


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match=r"priority must be \[B, H, T\]"):
        eviction_time(torch.zeros(3, 4), Budget(0, 1, 1))
    with pytest.raises(ValueError, match="backend must be"):
        eviction_time(torch.zeros(1, 1, 4), Budget(0, 1, 1), backend="heap")
    with pytest.raises(ValueError, match="document_ids must be"):
        eviction_time(
            torch.zeros(1, 1, 4), Budget(0, 1, 1), document_ids=torch.zeros(1, 5, dtype=torch.int64)
        )


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_gives_the_same_times() -> None:
    priority = torch.randn(2, 9, 3000, dtype=torch.float64).mul(20).round()
    ids = torch.randint(0, 3, (2, 3000)).sort(-1).values
    ids[:, :7] = -1
    for document_ids in (None, ids):
        on_cpu = eviction_time(priority, Budget(4, 64, 100), document_ids=document_ids)
        device_ids = None if document_ids is None else document_ids.cuda()
        on_gpu = eviction_time(priority.cuda(), Budget(4, 64, 100), document_ids=device_ids)
        assert torch.equal(on_cpu, on_gpu.cpu())
