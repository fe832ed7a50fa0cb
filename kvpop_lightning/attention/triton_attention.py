"""Sparse attention as Triton kernels, forward and backward (docs/training_attention.md).

Cost `T * (budget.total + block)`, memory linear in T. Importing this module needs Triton; `dispatch.py` asks
`kernels.py` first.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from kvpop_lightning.attention.kernels import KernelPlan, plan_for
from kvpop_lightning.attention.lists import AliveLists, last_sight
from kvpop_lightning.attention.segments import PADDING
from kvpop_lightning.attention.triton_backward import (
    delta_kernel,
    key_gradient_kernel,
    query_gradient_kernel,
)
from kvpop_lightning.attention.triton_forward import forward_kernel
from kvpop_lightning.attention.triton_lists import alive_lists_triton, begin_reading

_LARGEST_OFFSET = 2**31 - 1


def triton_sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    eviction_time: Tensor,
    *,
    document_ids: Tensor | None,
    scale: float,
    expected: int | None = None,
    deterministic: bool = False,
    plan: KernelPlan | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention under `j <= i < e_j` inside each document, by lists of alive keys.

    Args:
        query: [B, Hq, T, D]; key, value: [B, Hkv, T, D]; bfloat16, float16 or float32, the last dimension
        contiguous
            (it is made so otherwise). Sums are float32; float32 inputs are multiplied without tf32.
        eviction_time: int64 [B, Hkv, T], row indices.
        document_ids: int64 [B, T], non-decreasing over real tokens, -1 = padding; None = one document.
        scale: factor on the dot products, > 0.
        expected: keys that a query sees at most, the budget's total; more are found out and cost a second
        forward.
        deterministic: gradients without atomics, the same bits in every run, at a fifth more time.
        plan: tile sizes, for measurements.

    Returns:
        out [B, Hq, T, D] in the dtype and memory order of query, lse float32 [B, Hq, T] (natural log);
        differentiable in query, key and value through both, once. A query that sees no key has out 0, lse
        -inf.
    """
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    plan = plan or plan_for(query.dtype, query.shape[1] // key.shape[1], query.shape[3])
    if query.numel() == 0:
        return query.clone(), query.new_zeros(query.shape[:3], dtype=torch.float32)
    real = None
    if document_ids is not None:
        real = (document_ids != PADDING).to(torch.uint8).contiguous()
    end = last_sight(eviction_time, document_ids)
    expected = query.shape[2] if expected is None else min(expected, query.shape[2])
    return _Attention.apply(query, key, value, end, real, float(scale), expected, deterministic, plan)


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:3]]


def _wide(*tensors: Tensor) -> bool:
    """Whether an offset inside one head can pass what 32 bits hold."""
    return any(x.shape[2] * x.stride(2) > _LARGEST_OFFSET for x in tensors)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        end: Tensor,
        real: Tensor | None,
        scale: float,
        expected: int,
        deterministic: bool,
        plan: KernelPlan,
    ) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(query)
        lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
        while True:
            lists, most, rooms = alive_lists_triton(end, plan.list_block, expected)
            lengths = begin_reading(most)
            _forward((query, key, value, end), real, lists, out, lse, scale, plan)
            # The kernel is under way while the host looks whether the lists had room enough.
            longest = lengths()
            if all(found <= room for found, room in zip(longest, rooms, strict=True)):
                break
            expected = max(longest)
        ctx.save_for_backward(query, key, value, end, out, lse)
        # No stretch of queries sees more than one block's keys and those born after it.
        ctx.expected = longest[-1]
        ctx.scale, ctx.deterministic, ctx.plan = scale, deterministic, plan
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, key, value, end, out, lse = ctx.saved_tensors
        plan: KernelPlan = ctx.plan
        if grad is None:
            grad = torch.zeros_like(out)
        elif grad.stride(-1) != 1:
            grad = grad.contiguous()
        lse2, delta = _delta(out, grad, lse, grad_lse, plan)
        inputs = (query, key, value, grad, end)
        dq = torch.empty_like(query)
        lists, _, _ = alive_lists_triton(end, plan.list_block, ctx.expected)
        _query_gradient(inputs, lists, lse2, delta, dq, ctx.scale, plan)
        del lists
        if ctx.deterministic:
            lists = lifetime_lists(end, plan.lifetime_chunk)
        else:
            lists, _, _ = alive_lists_triton(end, plan.gradient_block, ctx.expected)
        dk = torch.zeros(key.shape, dtype=torch.float32, device=query.device)
        dv = torch.zeros_like(dk)
        _key_gradient(inputs, lists, lse2, delta, (dk, dv), ctx.scale, not ctx.deterministic, plan)
        return dq, dk.to(key.dtype), dv.to(value.dtype), *(None,) * 6


def _forward(
    inputs: tuple[Tensor, ...],
    real: Tensor | None,
    lists: AliveLists,
    out: Tensor,
    lse: Tensor,
    scale: float,
    plan: KernelPlan,
) -> None:
    query, key, value, end = inputs
    B, Hq, T, D = query.shape
    H = key.shape[1]
    tile = plan.forward
    forward_kernel[(triton.cdiv(T, plan.queries(tile.m)), B * H)](
        query,
        key,
        value,
        end,
        end if real is None else real,
        lists.index,
        lists.full,
        lists.count,
        out,
        lse,
        *_strides(query, key, value, out),
        T,
        lists.index.shape[2],
        lists.index.shape[3],
        scale,
        H=H,
        G=Hq // H,
        D=D,
        BLOCK_D=plan.block_d,
        M=tile.m,
        N=tile.n,
        QUERIES=plan.queries(tile.m),
        PER_BLOCK=plan.list_block // plan.queries(tile.m),
        PADDED=real is not None,
        WIDE=_wide(key, value),
        PRECISION=plan.precision,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def _delta(
    out: Tensor, grad: Tensor, lse: Tensor, grad_lse: Tensor | None, plan: KernelPlan
) -> tuple[Tensor, Tensor]:
    B, Hq, T, D = out.shape
    lse2, delta = torch.empty_like(lse), torch.empty_like(lse)
    rows = 32
    delta_kernel[(triton.cdiv(T, rows), B * Hq)](
        out,
        grad,
        lse,
        lse if grad_lse is None else grad_lse.float().contiguous(),
        delta,
        lse2,
        *_strides(out, grad),
        T,
        HEADS=Hq,
        D=D,
        BLOCK_D=plan.block_d,
        M=rows,
        HAS_GRAD_LSE=grad_lse is not None,
    )
    return lse2, delta


def _query_gradient(
    inputs: tuple[Tensor, ...],
    lists: AliveLists,
    lse2: Tensor,
    delta: Tensor,
    dq: Tensor,
    scale: float,
    plan: KernelPlan,
) -> None:
    query, key, value, grad, end = inputs
    B, Hq, T, D = query.shape
    H = key.shape[1]
    tile = plan.query_gradient
    query_gradient_kernel[(triton.cdiv(T, plan.queries(tile.m)), B * H)](
        query,
        key,
        value,
        grad,
        end,
        lists.index,
        lists.full,
        lists.count,
        lse2,
        delta,
        dq,
        *_strides(query, key, value, grad, dq),
        T,
        lists.index.shape[2],
        lists.index.shape[3],
        scale,
        H=H,
        G=Hq // H,
        D=D,
        BLOCK_D=plan.block_d,
        M=tile.m,
        N=tile.n,
        QUERIES=plan.queries(tile.m),
        PER_BLOCK=plan.list_block // plan.queries(tile.m),
        WIDE=_wide(key, value),
        PRECISION=plan.precision,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def _key_gradient(
    inputs: tuple[Tensor, ...],
    lists: AliveLists,
    lse2: Tensor,
    delta: Tensor,
    gradients: tuple[Tensor, Tensor],
    scale: float,
    atomic: bool,
    plan: KernelPlan,
) -> None:
    query, key, value, grad, end = inputs
    B, Hq, T, D = query.shape
    H = key.shape[1]
    tile = plan.key_gradient
    blocks, room = lists.index.shape[2:]
    tiles = triton.cdiv(room, tile.n)
    key_gradient_kernel[(blocks * tiles, B * H)](
        query,
        key,
        value,
        grad,
        end,
        lists.index,
        lists.count,
        lse2,
        delta,
        *gradients,
        *_strides(query, key, value, grad),
        T,
        blocks,
        room,
        lists.block,
        tiles,
        scale,
        H=H,
        G=Hq // H,
        D=D,
        BLOCK_D=plan.block_d,
        M=tile.m,
        N=tile.n,
        QUERIES=plan.queries(tile.m),
        ATOMIC=atomic,
        PRECISION=plan.precision,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def lifetime_lists(end: Tensor, chunk: int) -> AliveLists:
    """Every key once, in one list per head: by birth in chunks, inside a chunk by the last query that sees
    it.

    Keys that follow each other then live through nearly the same queries, and a tile of them visits few
    others.
    """
    B, H, T = end.shape
    birth = torch.arange(T, device=end.device) // chunk
    order = (birth * (T + 1) + end).argsort(dim=-1, stable=True).to(torch.int32)
    count = torch.full((B, H, 1), T, dtype=torch.int32, device=end.device)
    return AliveLists(order.view(B, H, 1, T), torch.zeros_like(count), count, T)
