"""FlexAttention as a backend: its block mask, its values, and that it never runs unfused on a GPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kvpop_lightning.attention import flex_target, reference_attention, sparse_attention, visible_keys
from kvpop_lightning.attention.flex import BLOCK, _attend, eviction_block_mask, flex_unsupported
from kvpop_lightning.attention.flex_target import range_block_mask
from kvpop_lightning.policy import dense_log_normalizer, future_attention_target
from kvpop_lightning.policy.budget import NEVER, Budget
from kvpop_lightning.policy.documents import document_layout
from kvpop_lightning.policy.eviction import eviction_time

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
BUDGET = Budget(2, 60, 70)


def pattern(T: int, documents: str) -> tuple[Tensor, Tensor | None]:
    """Times [2, 2, T] and ids [2, T] or None."""
    g = torch.Generator().manual_seed(T)
    ids = None
    if documents != "one":
        ids = (torch.rand(2, T, generator=g) < 3 / T).long().cumsum(1)
    if documents == "padding":
        assert ids is not None
        ids[torch.rand(2, T, generator=g) < 0.1] = -1
        ids[1, T // 2 :] = -1
    priority = torch.rand(2, 2, T, generator=g, dtype=torch.float64)
    e = eviction_time(priority, BUDGET, document_ids=ids)
    e[0, 1, ::3] = NEVER
    e[:, :, 0] = 0  # the first query sees nothing
    return e, ids


@pytest.mark.parametrize("documents", ["one", "several", "padding"])
@pytest.mark.parametrize("T", [1, 127, 128, 700])
def test_block_mask_says_which_blocks_are_empty_and_full(T: int, documents: str) -> None:
    e, ids = pattern(T, documents)
    mask = eviction_block_mask(e, ids, 4)
    sees = visible_keys(e, ids)
    blocks = -(-T // BLOCK)
    for b in range(2):
        for h in range(4):
            some, full = torch.zeros(2, blocks, blocks, dtype=torch.bool)
            for i in range(blocks):
                some[i, mask.kv_indices[b, h, i, : mask.kv_num_blocks[b, h, i]].long()] = True
                full[i, mask.full_kv_indices[b, h, i, : mask.full_kv_num_blocks[b, h, i]].long()] = True
            assert not (some & full).any()
            for i in range(blocks):
                for j in range(blocks):
                    tile = sees[b, h // 2, i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK]
                    assert not full[i, j] or tile.all()
                    assert some[i, j] or full[i, j] or not tile.any()
    if documents == "several" and T == 700:
        assert (
            int(mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum()) < 2 * 4 * blocks * (blocks + 1) / 2
        )


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("documents", ["one", "padding"])
def test_values_equal_the_reference_on_the_cpu(documents: str) -> None:
    e, ids = pattern(300, documents)
    q = torch.randn(2, 4, 300, 12, dtype=torch.float64)
    k, v = torch.randn(2, 2, 2, 300, 12, dtype=torch.float64)
    out, lse = sparse_attention(q, k, v, e, budget=BUDGET, document_ids=ids, scale=0.3, backend="flex")
    expected, expected_lse = reference_attention(q, k, v, e, document_ids=ids, scale=0.3)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(lse, expected_lse, atol=1e-12, rtol=0)
    assert torch.isinf(expected_lse).any()


def test_what_it_cannot_do_is_named() -> None:
    q = torch.randn(1, 2, 8, 16)
    e = torch.full((1, 2, 8), NEVER)
    with pytest.raises(ValueError, match="no backward pass on the CPU"):
        sparse_attention(q.requires_grad_(), q, q, e, budget=BUDGET, backend="flex")
    long = torch.empty(1, 1, 1).expand(1, 40000, 16)[None]
    assert "scores at once" in str(flex_unsupported(long, long, long))


@pytest.mark.cuda
@needs_gpu
def test_uncompiled_on_a_gpu_is_an_error() -> None:
    q = torch.randn(1, 2, 256, 64, device="cuda", dtype=torch.bfloat16)
    e = torch.full((1, 2, 256), NEVER, device="cuda")
    with pytest.raises(RuntimeError, match=r"without torch\.compile"):
        _attend(q, q, q, eviction_block_mask(e, None, 2), 0.1)
    with torch.compiler.set_stance("force_eager"), pytest.raises(RuntimeError, match="such as auto"):
        sparse_attention(q, q, q, e, budget=BUDGET, backend="flex")


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize("documents", ["one", "padding"])
def test_compiled_equals_the_reference_with_gradients(documents: str) -> None:
    e, ids = pattern(700, documents)
    e, ids = e.cuda(), None if ids is None else ids.cuda()
    q = torch.randn(2, 4, 700, 64, device="cuda")
    k, v = torch.randn(2, 2, 2, 700, 64, device="cuda")
    results = []
    for exact in (False, True):
        leaves = [(x.bfloat16().double() if exact else x.bfloat16()).requires_grad_() for x in (q, k, v)]
        backend = "reference" if exact else "flex"
        out, lse = sparse_attention(*leaves, e, budget=BUDGET, document_ids=ids, backend=backend)
        assert lse is not None
        (out.sin().sum() + lse.masked_fill(lse.isinf(), 0.0).cos().sum()).backward()
        results.append([out.detach(), lse.exp().detach(), *(x.grad for x in leaves)])
    for got, expected in zip(*results, strict=True):
        assert (got.double() - expected).norm() <= 2e-2 * expected.norm()


def target_problem(documents: str, device: str = "cpu", dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Arguments of `future_attention_target`: 4 query and 2 KV heads, 300 tokens."""
    T = 300
    g = torch.Generator().manual_seed(3)
    _, ids = pattern(T, documents)
    query, key = (torch.randn(2, h, T, 32, generator=g).to(device, dtype) for h in (4, 2))
    return {"query": query, "key": key, "document_ids": None if ids is None else ids.to(device)}


@pytest.mark.parametrize("documents", ["one", "several", "padding"])
@pytest.mark.parametrize("window", [1, 40, 128, 400])
def test_block_mask_of_the_target(documents: str, window: int) -> None:
    _, ids = pattern(300, documents)
    layout = document_layout(ids, batch=2, length=300)
    low = torch.where(layout.real, layout.later(window).clamp(max=300), 300)
    mask = range_block_mask(low, layout.end, layout.real)
    i = torch.arange(300)
    sees = (i >= low[..., None]) & (i < layout.end[..., None]) & layout.real[:, None]
    blocks = -(-300 // BLOCK)
    for b in range(2):
        for j in range(blocks):
            some = mask.kv_indices[b, 0, j, : mask.kv_num_blocks[b, 0, j]].tolist()
            full = mask.full_kv_indices[b, 0, j, : mask.full_kv_num_blocks[b, 0, j]].tolist()
            for c in range(blocks):
                tile = sees[b, j * BLOCK : (j + 1) * BLOCK, c * BLOCK : (c + 1) * BLOCK]
                assert c not in full or tile.all()
                assert c in some or c in full or not tile.any()
    if documents == "one" and window < BLOCK:
        assert int(mask.full_kv_num_blocks.sum()) > 0


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("documents", ["one", "several", "padding"])
@pytest.mark.parametrize("aggregation", ["max", "mean", "logmeanexp"])
def test_target_by_flex_equals_the_definition(documents: str, aggregation: str) -> None:
    problem = target_problem(documents)
    normalizer = dense_log_normalizer(problem["query"], problem["key"], document_ids=problem["document_ids"])
    normalizer[:, :, 17] = -math.inf  # a query that saw nothing
    for given in (None, normalizer):
        settings = {"window": 9, "aggregation": aggregation, "normalizer": given}
        exact, valid = future_attention_target(**problem, **settings, backend="reference")
        got, same = future_attention_target(**problem, **settings, backend="flex")
        assert torch.equal(valid, same)
        torch.testing.assert_close(got, exact, atol=1e-6, rtol=1e-6)


@needs_gpu
@pytest.mark.cuda
@pytest.mark.parametrize("documents", ["one", "several", "padding"])
def test_target_by_compiled_flex(documents: str) -> None:
    problem = target_problem(documents, "cuda", torch.bfloat16)
    exact, valid = future_attention_target(
        problem["query"].double(), problem["key"].double(), window=9,
        document_ids=problem["document_ids"], backend="chunked",
    )  # fmt: skip
    got, same = future_attention_target(**problem, window=9, backend="flex")
    assert torch.equal(valid, same)
    torch.testing.assert_close(got.double(), exact, atol=2e-3, rtol=2e-3)


@needs_gpu
@pytest.mark.cuda
def test_target_by_flex_never_runs_unfused_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex_target, "_compiled", flex_target._look)
    with pytest.raises(RuntimeError, match=r"without torch\.compile"):
        future_attention_target(**target_problem("one", "cuda", torch.bfloat16), window=9, backend="flex")
