"""Sparse attention against a loop over queries in float64, with gradients, on awkward sizes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvpop_lightning.attention import dense_attention, find_segments, segments, sparse_attention
from kvpop_lightning.policy.budget import Budget

NEVER = torch.iinfo(torch.int64).max
BUDGET = Budget(1, 4, 3)


def by_hand(
    q: Tensor, k: Tensor, v: Tensor, e: Tensor, ids: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """One query at a time, over a Python list of the keys it sees."""
    B, Hq, T, D = q.shape
    group = Hq // k.shape[1]
    out = torch.zeros(B, Hq, T, D, dtype=q.dtype)
    lse = torch.full((B, Hq, T), float("-inf"), dtype=q.dtype)
    for b in range(B):
        for g in range(Hq):
            h = g // group
            for i in range(T):
                if ids is not None and ids[b, i] < 0:
                    continue
                seen = [
                    j
                    for j in range(i + 1)
                    if i < int(e[b, h, j]) and (ids is None or int(ids[b, j]) == int(ids[b, i]))
                ]
                if seen:
                    logit = (k[b, h, seen] @ q[b, g, i]) * scale
                    lse[b, g, i] = logit.logsumexp(0)
                    out[b, g, i] = logit.softmax(0) @ v[b, h, seen]
    return out, lse


def problem(
    seed: int, *, B: int = 2, H: int = 2, G: int = 3, T: int = 63, D: int = 12, documents: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(B, H * G, T, D, generator=g, dtype=torch.float64)
    k, v = torch.randn(2, B, H, T, D, generator=g, dtype=torch.float64)
    e = torch.arange(T) + torch.randint(-1, T, (B, H, T), generator=g)  # some keys are seen by nobody
    e[torch.rand(B, H, T, generator=g) < 0.2] = NEVER
    e[:, :, 0] = 0  # the first query sees nothing, not even itself
    ids = None
    if documents:
        ids = (torch.rand(B, T, generator=g) < 0.1).cumsum(1)
        ids[torch.rand(B, T, generator=g) < 0.15] = -1
    return q, k, v, e, ids


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("chunk", [None, 1, 17])
def test_reference_equals_the_loop(documents: bool, chunk: int | None) -> None:
    q, k, v, e, ids = problem(0, documents=documents)
    out, lse = sparse_attention(
        q, k, v, e, budget=BUDGET, document_ids=ids, backend="reference", query_chunk=chunk
    )
    expected_out, expected_lse = by_hand(q, k, v, e, ids, 12**-0.5)
    torch.testing.assert_close(out, expected_out, atol=1e-12, rtol=0)
    torch.testing.assert_close(lse, expected_lse, atol=1e-12, rtol=0)
    assert torch.isinf(lse).any(), "the case must contain a query that sees nothing"


@pytest.mark.parametrize("chunk", [None, 5])
def test_gradients_of_out_and_lse_are_right(chunk: int | None) -> None:
    q, k, v, e, ids = problem(1, B=1, H=2, G=2, T=7, D=2)
    for x in (q, k, v):
        x.requires_grad_()

    def f(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = sparse_attention(q, k, v, e, budget=BUDGET, document_ids=ids, query_chunk=chunk)
        return out, lse.masked_fill(lse.isinf(), 0.0)

    assert torch.autograd.gradcheck(f, (q, k, v), fast_mode=chunk is not None)


def test_a_row_that_sees_nothing_is_clean() -> None:
    q, k, v, _, _ = problem(2, T=7)
    e = torch.zeros(2, 2, 7, dtype=torch.int64)
    for backend, need_lse in (("reference", True), ("sdpa", False)):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out, lse = sparse_attention(*leaves, e, budget=BUDGET, backend=backend, need_lse=need_lse)
        assert (out == 0).all()
        assert lse is None or (lse == float("-inf")).all()
        (out.sum() if lse is None else out.sum() + lse.exp().sum()).backward()
        assert all((x.grad == 0).all() for x in leaves)


@pytest.mark.parametrize(("T", "total"), [(1, 8), (63, 8), (300, 40), (517, 8)])
@pytest.mark.parametrize("documents", [False, True])
def test_fused_form_equals_the_reference_with_gradients(T: int, total: int, documents: bool) -> None:
    """517 tokens under 8 keys takes the gathered path; an imposed pattern may hold more keys than the budget
    says.
    """
    for seed in range(3 if T > 100 else 2):
        q, k, v, e, ids = problem(seed, T=T, D=20)
        if not documents:
            ids = None
        elif seed == 2 and T > 300:  # one long document with holes
            ids = torch.where(ids < 0, ids, 0)
        if seed == 0:
            e = (torch.arange(T) + 5 + 3 * (torch.arange(T) % 2)).expand(2, 2, T).contiguous()
        g = torch.randn(q.shape, generator=torch.Generator().manual_seed(seed), dtype=q.dtype)
        results = []
        for need_lse in (True, False):
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            out, _ = sparse_attention(
                *leaves, e, budget=Budget(1, 4, total - 5), document_ids=ids, need_lse=need_lse
            )
            (out * g).sum().backward()
            results.append([out.detach(), *(x.grad for x in leaves)])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, atol=1e-10, rtol=0)


def test_gathered_path_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the comparison above would pass without it."""
    from kvpop_lightning.attention import sdpa

    widths = []
    original = sdpa._attend
    monkeypatch.setattr(
        sdpa, "_attend", lambda q, k, v, m, s: (widths.append(k.shape[2]), original(q, k, v, m, s))[1]
    )
    q, k, v, _, _ = problem(0, T=517)
    e = (torch.arange(517) + 5).expand(2, 2, 517).contiguous()
    sparse_attention(q, k, v, e, budget=BUDGET, need_lse=False)
    assert widths == [128, 136, 136, 136, 136]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    q, k, v, e, ids = problem(4)
    exact, exact_lse = sparse_attention(q, k, v, e, budget=BUDGET, document_ids=ids)
    for need_lse in (True, False):
        out, lse = sparse_attention(
            q.to(dtype), k.to(dtype), v.to(dtype), e, budget=BUDGET, document_ids=ids, need_lse=need_lse
        )
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), exact, atol=5e-2, rtol=0)
        if lse is not None:
            assert lse.dtype == torch.float32
            torch.testing.assert_close(lse.double(), exact_lse, atol=5e-2, rtol=0)


def test_dense_attention_is_causal_inside_documents() -> None:
    for seed in range(2):
        q, k, v, _, ids = problem(seed, B=2, G=1)
        never = torch.full((2, 2, 63), NEVER)
        for documents in (None, ids):
            expected, _ = by_hand(q, k, v, never, documents, 0.3)
            got = dense_attention(q, k, v, segments=find_segments(documents, batch=2, length=63), scale=0.3)
            torch.testing.assert_close(got, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("need_lse", [True, False])
def test_documents_are_isolated_bit_for_bit(need_lse: bool) -> None:
    """Everything of document 0 changes, its pattern included: document 1 must not move, nor its gradients."""
    T, cut = 400, 150
    q, k, v, _, _ = (x.float() if x is not None else x for x in problem(5, B=1, T=T, documents=False))
    ids = (torch.arange(T) >= cut).long()[None]
    e = torch.arange(T) + torch.randint(4, 60, (1, 2, T), generator=torch.Generator().manual_seed(0))
    results = []
    for change in (0.0, 5.0):
        leaves = [x.clone() for x in (q, k, v)]
        for x in leaves:
            x[:, :, :cut] += change
            x.requires_grad_()
        times = e.clone()
        times[..., :cut] += int(change)
        out, _ = sparse_attention(*leaves, times, budget=BUDGET, document_ids=ids, need_lse=need_lse)
        out.square().sum().backward()
        results.append([out.detach()[:, :, cut:], *(x.grad[:, :, cut:] for x in leaves)])
        first = out.detach()[:, :, :cut]
        results[-1].append(first)
    assert not torch.equal(results[0].pop(), results[1].pop())
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_segments() -> None:
    ids = torch.tensor([[-1, -1, 0, 0, 2, -1, 2, -1], [-1] * 8])
    found = find_segments(ids, batch=2, length=8)
    assert [(s.rows, s.start, s.stop) for s in found] == [(slice(0, 1), 2, 4), (slice(0, 1), 4, 7)]
    assert found[0].valid is None
    assert found[1].valid.tolist() == [[True, False, True]]
    same = find_segments(torch.tensor([[0, 0, 1], [0, 0, 1]]), batch=2, length=3)
    assert [(s.rows, s.start, s.stop) for s in same] == [(slice(0, 2), 0, 2), (slice(0, 2), 2, 3)]


def test_refusals_are_one_clear_line() -> None:
    q, k, v, e, ids = problem(0, T=8)
    cases = [
        (lambda: sparse_attention(q, k, v, e, budget=BUDGET, backend="fast"), "auto, reference, sdpa"),
        (lambda: sparse_attention(q, k, v, e, budget=BUDGET, backend="sdpa"), "need_lse=False"),
        (lambda: sparse_attention(q[:, :5], k, v, e, budget=BUDGET), "5 query heads cannot share 2 KV heads"),
        (lambda: sparse_attention(q, k[:, :, :7], v, e, budget=BUDGET), "key and value must be"),
        (lambda: sparse_attention(q, k, v, e[:, :1], budget=BUDGET), "eviction_time must be"),
        (lambda: sparse_attention(q, k, v, e.int(), budget=BUDGET), "int64"),
        (
            lambda: sparse_attention(q, k, v, e, budget=BUDGET, document_ids=ids[:, :7]),
            "document_ids must be",
        ),
        (
            lambda: sparse_attention(q, k, v, e, budget=BUDGET, document_ids=ids[:, :7], need_lse=False),
            "document_ids must be",
        ),
        (
            lambda: find_segments(torch.tensor([[0, 1, 0]]), batch=1, length=3),
            "must not fall within a row",
        ),
    ]
    for call, words in cases:
        with pytest.raises(ValueError) as error:
            call()
        assert words in str(error.value)
        assert "\n" not in str(error.value)


def test_segments_are_found_once_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Tensor] = []
    real = segments._find
    monkeypatch.setattr(segments, "_find", lambda ids: found.append(ids) or real(ids))
    ids = torch.tensor([[0, 0, 1, 1], [0, 0, 0, -1]])
    first = find_segments(ids, batch=2, length=4)
    first.clear()  # the caller's own list
    assert len(find_segments(ids, batch=2, length=4)) == 3
    assert len(found) == 1
    ids[0, 2:] = 0
    assert len(find_segments(ids, batch=2, length=4)) == 2
    assert len(found) == 2
    with pytest.raises(ValueError, match="must be"):
        find_segments(ids, batch=1, length=4)
