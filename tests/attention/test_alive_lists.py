"""Lists of alive keys against the mask itself; the kernels against the reference where a GPU is."""

from __future__ import annotations

import importlib.util
import logging

import pytest
import torch
from torch import Tensor

from kvpop_lightning.attention import reference_attention, sparse_attention, visible_keys
from kvpop_lightning.attention.kernels import plan_for, unsupported
from kvpop_lightning.attention.lists import alive_lists_torch, last_sight
from kvpop_lightning.policy import triton_choice
from kvpop_lightning.policy.budget import NEVER, Budget
from kvpop_lightning.policy.eviction import eviction_time

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("triton") is None,
    reason="needs a CUDA device and Triton",
)


def pattern(T: int, documents: bool, seed: int) -> tuple[Tensor, Tensor | None]:
    g = torch.Generator().manual_seed(seed)
    e = torch.arange(T) + torch.randint(-1, max(1, T // 2), (2, 2, T), generator=g)
    e[torch.rand(2, 2, T, generator=g) < 0.1] = NEVER
    e[:, :, 0] = 0
    ids = None
    if documents:
        ids = (torch.rand(2, T, generator=g) < 0.1).cumsum(1)
        ids[torch.rand(2, T, generator=g) < 0.15] = -1
    return e, ids


@pytest.mark.parametrize(("T", "block"), [(1, 16), (63, 8), (63, 7), (200, 128), (300, 21)])
@pytest.mark.parametrize("documents", [False, True])
def test_lists_hold_exactly_what_a_block_sees(T: int, block: int, documents: bool) -> None:
    e, ids = pattern(T, documents, seed=T)
    end = last_sight(e, ids)
    mask = visible_keys(e, ids)
    real = torch.ones(2, T, dtype=torch.bool) if ids is None else ids != -1
    index = torch.arange(T)
    by_end = (index <= index[:, None]) & (index[:, None] < end[:, :, None, :]) & real[:, None, :, None]
    assert torch.equal(mask, by_end)
    lists = alive_lists_torch(end, block)
    assert lists.index.shape[:3] == (2, 2, -(-T // block))
    unmasked = (index <= index[:, None]) & (index[:, None] < end[:, :, None, :])
    for b in range(2):
        for h in range(2):
            for c in range(lists.index.shape[2]):
                rows = unmasked[b, h, c * block : (c + 1) * block]
                n, full = int(lists.count[b, h, c]), int(lists.full[b, h, c])
                listed = lists.index[b, h, c, :n].tolist()
                assert listed[:full] == rows.all(0).nonzero().flatten().tolist()
                assert sorted(listed) == rows.any(0).nonzero().flatten().tolist()


def test_lists_grow_with_the_budget_and_not_with_the_row() -> None:
    budget = Budget(2, 16, 46)
    rooms = []
    for T in (1024, 4096):
        p = torch.rand(1, 2, T, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        lists = alive_lists_torch(last_sight(eviction_time(p, budget), None), 64)
        assert int(lists.count.max()) <= budget.total + 64
        rooms.append(lists.index.shape[-1])
    assert rooms == [128, 128]


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 16, 71, 128])
def test_lists_of_a_plan_fit_its_tiles(group: int) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for D in (64, 80, 128, 256):
            plan = plan_for(dtype, group, D)
            for tile in (plan.forward, plan.query_gradient):
                queries = plan.queries(tile.m)
                assert queries >= 1
                assert queries * group <= tile.m
                assert plan.list_block % queries == 0
            assert 1 <= plan.queries(plan.key_gradient.m) * group <= plan.key_gradient.m


def test_auto_says_once_why_the_cpu_takes_no_kernel(caplog: pytest.LogCaptureFixture) -> None:
    q, k, v = torch.randn(3, 1, 1, 8, 4)
    e = torch.full((1, 1, 8), NEVER)
    triton_choice.say.cache_clear()
    with caplog.at_level(logging.INFO, logger=triton_choice.__name__):
        for _ in range(2):
            sparse_attention(q, k, v, e, budget=Budget(1, 4, 3), need_lse=False)
    assert len(caplog.messages) == 1
    assert "sdpa" in caplog.messages[0]
    assert "triton" in caplog.messages[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_triton_without_its_means_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    q, k, v = torch.randn(3, 1, 1, 8, 4)
    with pytest.raises(ValueError, match="is not usable: triton ") as error:
        sparse_attention(q, k, v, torch.full((1, 1, 8), NEVER), budget=Budget(1, 4, 3), backend="triton")
    assert "\n" not in str(error.value)
    assert unsupported(q, k, 1.0)


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("T", "D", "G"), [(63, 64, 3), (700, 80, 4), (1, 64, 1)])
def test_kernels_equal_the_reference(T: int, D: int, G: int, deterministic: bool, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(T)
    q = torch.randn(2, 2 * G, T, D, generator=g).to("cuda", dtype)
    k, v = torch.randn(2, 2, 2, T, D, generator=g).to("cuda", dtype)
    e, ids = pattern(T, True, seed=T)
    e, ids = e.cuda(), ids.cuda()
    grad = torch.randn(q.shape, generator=g).cuda()
    results = []
    for exact in (False, True):
        leaves = [(x.double() if exact else x).detach().requires_grad_() for x in (q, k, v)]
        if exact:
            out, lse = reference_attention(*leaves, e, document_ids=ids, scale=0.2)
        else:  # the pattern exceeds the budget, which must only cost time
            out, lse = sparse_attention(
                *leaves, e, budget=Budget(1, 2, 1), document_ids=ids, scale=0.2, backend="triton",
                deterministic=deterministic,
            )  # fmt: skip
        ((out * grad).sum() + lse.masked_fill(lse.isinf(), 0.0).sum()).backward()
        results.append([out.detach(), lse.detach(), *(x.grad for x in leaves)])
    limit = 1e-4 if dtype == torch.float32 else 5e-2
    for a, b in zip(*results, strict=True):
        assert torch.equal(a.isinf(), b.isinf())
        fine = ~b.isinf()
        torch.testing.assert_close(a.double()[fine], b[fine], atol=limit, rtol=limit)


@pytest.mark.cuda
@needs_gpu
def test_lists_of_the_kernel_are_those_of_pytorch() -> None:
    from kvpop_lightning.attention.triton_lists import alive_lists_triton

    for T, block in ((1, 16), (700, 7), (3000, 21)):
        e, ids = pattern(T, True, seed=T)
        end = last_sight(e, ids).cuda()
        expected = alive_lists_torch(end, block)
        got, most, rooms = alive_lists_triton(end, block, T)
        assert all(a <= b for a, b in zip(most.tolist(), rooms, strict=True))
        assert torch.equal(expected.count, got.count)
        assert torch.equal(expected.full, got.full)
        listed = torch.arange(T, device="cuda") < expected.count[..., None]
        assert torch.equal(expected.index[..., :T][listed[..., : expected.index.shape[-1]]],
                           got.index[..., :T][listed[..., : got.index.shape[-1]]])  # fmt: skip


@pytest.mark.cuda
@needs_gpu
def test_deterministic_gradients_repeat_bit_for_bit() -> None:
    q = torch.randn(1, 8, 3000, 128, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 1, 2, 3000, 128, device="cuda", dtype=torch.bfloat16)
    budget = Budget(4, 64, 400)
    e = eviction_time(torch.rand(1, 2, 3000, device="cuda", dtype=torch.float64), budget)
    found = []
    for _ in range(2):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out, _ = sparse_attention(*leaves, e, budget=budget, backend="triton", deterministic=True)
        found.append([out, *torch.autograd.grad(out.float().square().sum(), leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
