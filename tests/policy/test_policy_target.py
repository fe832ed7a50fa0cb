from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_cases import document_rows, documents, visible_by_time
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvpop_lightning.policy import (
    Budget,
    dense_log_normalizer,
    eviction_time,
    future_attention_target,
    normalizer_inflation,
)

AGGREGATIONS = ("max", "mean", "logmeanexp")
SOME = settings(max_examples=40, derandomize=True, deadline=None)


def draw_qk(
    seed: int,
    batch: int,
    heads: int,
    kv_heads: int,
    length: int,
    dim: int,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, heads, length, dim, generator=generator, dtype=torch.float64) * 2
    key = torch.randn(batch, kv_heads, length, dim, generator=generator, dtype=torch.float64)
    return query.to(dtype), key.to(dtype)


def target_by_loops(
    query: Tensor, key: Tensor, window: int, ids: Tensor | None, aggregation: str, eps: float, scale: float
) -> tuple[Tensor, Tensor]:
    batch, heads, length, _ = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    target = torch.zeros(batch, kv_heads, length, dtype=torch.float64)
    valid = torch.zeros(batch, kv_heads, length, dtype=torch.bool)
    for b, rows in documents(ids, batch, length):
        for h in range(kv_heads):
            mass = torch.zeros(group, len(rows), dtype=torch.float64)
            for g in range(group):
                for place, i in enumerate(rows):
                    logits = [
                        float(query[b, h * group + g, i] @ key[b, h, j]) * scale for j in rows[: place + 1]
                    ]
                    p = torch.tensor(logits, dtype=torch.float64).softmax(0)
                    for j in range(place - window + 1):
                        mass[g, j] += p[j] / (len(rows) - j - window)
            for j in range(len(rows) - window):
                m = mass[:, j]
                logs = (m + eps).log()
                target[b, h, rows[j]] = {
                    "max": logs.max(),
                    "mean": logs.mean(),
                    "logmeanexp": (m.mean() + eps).log(),
                }[aggregation]
                valid[b, h, rows[j]] = True
    return target, valid


@SOME
@given(
    st.data(),
    st.integers(1, 20),
    st.integers(1, 5),
    st.sampled_from(AGGREGATIONS),
    st.sampled_from([1e-9, 1e-2, 0.0]),
    st.booleans(),
)
def test_both_backends_agree_with_loops(
    data: st.DataObject, length: int, window: int, aggregation: str, eps: float, packed: bool
) -> None:
    query, key = draw_qk(data.draw(st.integers(0, 999)), 2, 4, 2, length, 3)
    ids = torch.tensor([data.draw(document_rows(length)) for _ in range(2)]) if packed else None
    expected, expected_valid = target_by_loops(query, key, window, ids, aggregation, eps, 0.4)
    for backend in ("reference", "chunked"):
        target, valid = future_attention_target(
            query,
            key,
            window=window,
            document_ids=ids,
            aggregation=aggregation,
            eps=eps,
            scale=0.4,
            backend=backend,
            max_elements=1,
        )
        assert torch.equal(valid, expected_valid), backend
        torch.testing.assert_close(target, expected, rtol=0, atol=1e-10, msg=backend)


def packed_ids(length: int) -> Tensor:
    """Two rows: four documents and padding everywhere; one document of one token, then a long one."""
    first = [-1, -1] + [0] * 30 + [1] + [-1] * 3 + [2] * (length // 3)
    first += [3] * (length - len(first) - 5) + [-1] * 5
    second = [5] + [6] * (length - 1)
    second[length // 2] = -1
    return torch.tensor([first, second])


@pytest.mark.parametrize("length", [63, 129, 300])
@pytest.mark.parametrize("packing", ["one document", "documents", "documents and padding"])
@pytest.mark.parametrize("max_elements", [1, 40_000, None])
def test_float32_strips_agree_with_float64(length: int, packing: str, max_elements: int | None) -> None:
    query, key = draw_qk(length, 2, 9, 3, length, 60, torch.float32)
    ids = None if packing == "one document" else packed_ids(length)
    if packing == "documents":  # strips that no padding keeps from skipping masks
        ids = torch.tensor([[0] * 25 + [1] * (length - 25), [0] * 5 + [1] * (length - 23) + [2] * 18])
    generator = torch.Generator().manual_seed(1)
    sparse = torch.randn(2, 9, length, generator=generator) + 3
    for normalizer in (None, sparse):
        for aggregation in AGGREGATIONS:
            arguments: dict[str, Any] = {
                "window": 7,
                "document_ids": ids,
                "normalizer": normalizer,
                "aggregation": aggregation,
            }
            target, valid = future_attention_target(query, key, max_elements=max_elements, **arguments)
            expected, expected_valid = future_attention_target(query, key, backend="reference", **arguments)
            assert target.dtype == torch.float32
            assert torch.equal(valid, expected_valid)
            torch.testing.assert_close(target, expected, rtol=0, atol=2e-5)


def test_half_precision_inputs_are_computed_in_float32() -> None:
    query, key = draw_qk(0, 1, 2, 1, 80, 16, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):  # as under a mixed-precision trainer
        target, _ = future_attention_target(query, key, window=3)
        log_normalizer = dense_log_normalizer(query, key)
    expected, _ = future_attention_target(query.double(), key.double(), window=3, backend="reference")
    torch.testing.assert_close(target.double(), expected, rtol=0, atol=1e-5)
    exact = dense_log_normalizer(query.double(), key.double())
    torch.testing.assert_close(log_normalizer.double(), exact, rtol=0, atol=1e-5)


def test_without_eps_nothing_underflows() -> None:
    query, key = draw_qk(3, 1, 2, 1, 40, 8, torch.float32)
    query = query * 100  # masses far below the smallest float32
    target, valid = future_attention_target(query, key, window=2, eps=0.0)
    expected, _ = future_attention_target(query.double(), key.double(), window=2, eps=0.0, backend="chunked")
    assert float(target[valid].min()) < -150
    assert torch.isfinite(target).all()
    torch.testing.assert_close(target.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("backend", ["chunked", "reference"])
def test_packed_is_alone_and_padding_is_never_read(backend: str, normalized: bool) -> None:
    length = 120
    query, key = draw_qk(5, 2, 4, 2, length, 8)
    ids = packed_ids(length)
    normalizer = dense_log_normalizer(query, key, document_ids=ids) if normalized else None
    query = query.masked_fill((ids < 0)[:, None, :, None], float("nan"))
    key = key.masked_fill((ids < 0)[:, None, :, None], float("nan"))
    target, valid = future_attention_target(
        query, key, window=4, document_ids=ids, normalizer=normalizer, backend=backend, max_elements=1
    )
    assert torch.isfinite(target).all()
    assert not valid[(ids < 0)[:, None].expand_as(valid)].any()
    assert (target[~valid] == 0).all()
    for b, rows in documents(ids, 2, length):
        alone, alone_valid = future_attention_target(
            query[b : b + 1][:, :, rows], key[b : b + 1][:, :, rows], window=4, backend=backend
        )
        assert torch.equal(valid[b][:, rows], alone_valid[0])
        torch.testing.assert_close(target[b][:, rows], alone[0], rtol=0, atol=1e-10)


def test_short_documents_have_no_target() -> None:
    query, key = draw_qk(6, 2, 2, 1, 12, 4)
    for ids in (torch.arange(12).expand(2, 12), torch.full((2, 12), -1)):
        target, valid = future_attention_target(query, key, window=1, document_ids=ids)
        assert not valid.any()
        assert (target == 0).all()
    _, valid = future_attention_target(query, key, window=12)
    assert not valid.any()
    _, valid = future_attention_target(query, key, window=11)
    assert (
        valid.sum().item() == 2
    )  # the first token of each row, seen from outside its window by the last query
    assert future_attention_target(query[:, :, :0], key[:, :, :0], window=2)[0].shape == (2, 1, 0)


def sparse_normalizer(query: Tensor, key: Tensor, budget: Budget, ids: Tensor | None) -> Tensor:
    group = query.shape[1] // key.shape[1]
    priority = torch.randn(key.shape[:3], generator=torch.Generator().manual_seed(0))
    time = eviction_time(priority, budget, document_ids=ids)
    seen = visible_by_time(time, ids).repeat_interleave(group, 1)
    logits = query @ key.repeat_interleave(group, 1).transpose(-1, -2) * query.shape[-1] ** -0.5
    return logits.masked_fill(~seen, -math.inf).logsumexp(-1)


@pytest.mark.parametrize("packed", [False, True])
def test_sparse_normalizer_is_dense_when_the_budget_holds_the_text(packed: bool) -> None:
    query, key = draw_qk(7, 2, 4, 2, 70, 8)
    ids = packed_ids(70) if packed else None
    dense, valid = future_attention_target(query, key, window=5, document_ids=ids)
    full = sparse_normalizer(query, key, Budget(2, 5, 63), ids)
    sparse, sparse_valid = future_attention_target(query, key, window=5, document_ids=ids, normalizer=full)
    assert torch.equal(valid, sparse_valid)
    torch.testing.assert_close(sparse, dense, rtol=0, atol=1e-12)
    inflation = normalizer_inflation(query, key, full, document_ids=ids)
    assert float(inflation.per_query.abs().max()) < 1e-12


def test_sparse_normalizer_inflates_and_is_not_clamped() -> None:
    query, key = draw_qk(8, 2, 4, 2, 120, 8)
    query = query * 4
    ids = packed_ids(120)
    normalizer = sparse_normalizer(query, key, Budget(1, 4, 3), ids)
    inflation = normalizer_inflation(query, key, normalizer, document_ids=ids)
    real = (ids >= 0)[:, None].expand_as(normalizer)
    dense = dense_log_normalizer(query, key, document_ids=ids)
    torch.testing.assert_close(inflation.per_query[real], (dense - normalizer)[real])
    assert (inflation.per_query >= -1e-12).all()
    assert (inflation.per_query[~real] == 0).all()
    assert float(inflation.mean) == pytest.approx(float(inflation.per_query[real].mean()))
    assert inflation.maximum == inflation.per_query.max()
    plain, _ = future_attention_target(query, key, window=4, document_ids=ids)
    inflated, _ = future_attention_target(query, key, window=4, document_ids=ids, normalizer=normalizer)
    assert (inflated >= plain - 1e-9).all()
    assert float(inflated.max()) > 0  # more than the whole attention of a query


@pytest.mark.parametrize("backend", ["chunked", "reference"])
def test_a_query_that_saw_nothing_adds_nothing(backend: str) -> None:
    query, key = draw_qk(14, 1, 2, 1, 30, 4)
    normalizer = dense_log_normalizer(query, key)
    normalizer[:, :, 20] = -math.inf
    target, valid = future_attention_target(query, key, window=3, normalizer=normalizer, backend=backend)
    assert torch.isfinite(target).all()
    assert (target[valid] <= 0).all()


def test_dense_log_normalizer() -> None:
    query, key = draw_qk(9, 2, 6, 2, 90, 8)
    ids = packed_ids(90)
    never = torch.full((2, 6, 90), 2**62)
    logits = query @ key.repeat_interleave(3, 1).transpose(-1, -2) * 0.3
    expected = logits.masked_fill(~visible_by_time(never, ids), -math.inf).logsumexp(-1)
    got = dense_log_normalizer(query, key, document_ids=ids, scale=0.3)
    torch.testing.assert_close(got, expected)
    assert (got[(ids < 0)[:, None].expand_as(got)] == -math.inf).all()


class LargestTensor(TorchDispatchMode):
    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


@pytest.mark.parametrize("normalized", [False, True])
def test_the_square_is_never_built(normalized: bool) -> None:
    length, heads = 1024, 3
    query, key = draw_qk(10, 1, heads, 1, length, 4, torch.float32)
    normalizer = torch.zeros(1, heads, length) if normalized else None
    with LargestTensor() as largest:
        future_attention_target(query, key, window=8, normalizer=normalizer, max_elements=2**17)
    assert largest.elements <= 2**17


def test_the_target_is_detached() -> None:
    query, key = draw_qk(11, 1, 2, 1, 20, 4)
    target, _ = future_attention_target(query.requires_grad_(), key.requires_grad_(), window=2)
    assert not target.requires_grad


def test_bad_input_is_named() -> None:
    query, key = draw_qk(12, 1, 4, 2, 6, 4)
    with pytest.raises(ValueError, match="Hkv dividing Hq"):
        future_attention_target(query[:, :3], key, window=2)
    with pytest.raises(ValueError, match="aggregation must be"):
        future_attention_target(query, key, window=2, aggregation="sum")
    with pytest.raises(ValueError, match="backend must be"):
        future_attention_target(query, key, window=2, backend="flexible")
    with pytest.raises(ValueError, match="window must be"):
        future_attention_target(query, key, window=0)
    with pytest.raises(ValueError, match="normalizer must be"):
        future_attention_target(query, key, window=2, normalizer=torch.zeros(1, 2, 6))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_gives_the_same_target() -> None:
    query, key = draw_qk(13, 2, 8, 2, 500, 64, torch.float32)
    ids = packed_ids(500)
    expected, valid = future_attention_target(query, key, window=9, document_ids=ids)
    target, on_gpu = future_attention_target(query.cuda(), key.cuda(), window=9, document_ids=ids.cuda())
    assert torch.equal(valid, on_gpu.cpu())
    torch.testing.assert_close(target.cpu(), expected, rtol=0, atol=1e-4)
