"""One entry for attention under an eviction-time mask; `backend` picks the form."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpop_lightning.attention.kernels import unsupported
from kvpop_lightning.attention.reference import reference_attention
from kvpop_lightning.attention.sdpa import sdpa_sparse_attention
from kvpop_lightning.attention.segments import Segment, find_segments
from kvpop_lightning.policy.budget import Budget
from kvpop_lightning.policy.triton_choice import say

BACKENDS = ("auto", "reference", "sdpa", "flex", "triton")
"""What `backend=` takes: `reference` (dense, with LSE), `sdpa` (fused, no LSE), `flex` (compiled
FlexAttention), `triton` (kernels over lists of alive keys, CUDA), `auto` = the fastest as measured."""

_SHORT, _SHORT_WITH_LSE = 1024, 512
"""Rows up to this length are not worth the lists. On an H200, forward and with backward: 1024 tokens under
256 keys took 0.22 and 0.91 ms by `sdpa`, 0.31 and 1.58 by `triton`; 2048 tokens under 512 keys 0.86 and 2.37
by `sdpa`, 0.36 and 1.88 by `triton`, 1.72 and 3.12 by `flex`, slower than `triton` at every length. With
the LSE the other form is `reference`, at 1024 tokens 1.19 and 3.1."""


def choose_backend(query: Tensor, key: Tensor, *, budget: Budget, need_lse: bool, scale: float) -> str:
    """What `auto` takes for these tensors; said once per choice and reason in the log, at level INFO."""
    T, short = query.shape[2], _SHORT_WITH_LSE if need_lse else _SHORT
    reason = unsupported(query, key, scale)
    if reason is None and short >= T:
        reason = f"rows of up to {short} tokens were faster without lists of alive keys"
    if reason is None and query.dtype == torch.float32:
        reason = "float32 products without tf32 do not use the tensor cores in Triton kernels"
    if reason is None and budget.total >= T and not need_lse:
        reason = "the budget holds the whole row"
    other = "reference" if need_lse else "sdpa"
    chosen = other if reason else "triton"
    say("sparse_attention", chosen, reason or f"cost linear in the length, the fastest beyond {short} tokens")
    return chosen


def as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Floating-point tensors as a surrounding autocast hands them to PyTorch's own attention.

    The library's RoPE leaves queries and keys in float32 there, values in half precision.
    """
    device = tensors[0].device.type
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def backend_refusal(backend: str, query: Tensor, key: Tensor, value: Tensor, scale: float) -> str | None:
    """Why a backend of `BACKENDS` cannot take these tensors (which may hold no token), in a few words."""
    if backend == "triton":
        return unsupported(query, key, scale)
    if backend == "flex":
        from kvpop_lightning.attention.flex import flex_unsupported  # imports dynamo

        return flex_unsupported(query, key, value)
    return None


def unavailable_backends(device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """The backends that serve no model of this dtype on this device, each with the reason."""
    query, key, value = torch.empty(3, 1, 1, 0, 64, device=device, dtype=dtype)
    refusals = {name: backend_refusal(name, query, key, value, 1.0) for name in BACKENDS}
    return {name: reason for name, reason in refusals.items() if reason}


def sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    eviction_time: Tensor,
    *,
    budget: Budget,
    document_ids: Tensor | None = None,
    scale: float | None = None,
    backend: str = "auto",
    need_lse: bool | None = True,
    query_chunk: int | None = None,
    segments: list[Segment] | None = None,
    deterministic: bool | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention in which query `i` sees key `j` iff `j <= i < eviction_time[j]`, in the same document
    (METHOD.md, section 2).

    Args:
        query: [B, Hq, T, D], after RoPE; under autocast all three are taken in its dtype.
        key, value: [B, Hkv, T, D], not repeated for the query heads; query head g reads KV head `g // (Hq //
            Hkv)`.
        eviction_time: int64 [B, Hkv, T], row index of the first query that no longer sees the key (NEVER =
            int64 max).
        budget: what the pattern was made for; the mask itself is `eviction_time` alone.
        document_ids: int64 [B, T], non-decreasing over real tokens, -1 = padding; None = one document.
        scale: factor on the dot products, `D ** -0.5` by default.
        backend: `auto`, `reference`, `sdpa`, `flex` or `triton`.
        need_lse: False lets `auto` take the fused kernel and returns None for the LSE; None does too, but
            returns the LSE where the backend has it at no cost.
        query_chunk: queries per block of the reference.
        segments: what `find_segments(document_ids)` returned, when the caller has it already.
        deterministic: gradients of `triton` without atomics, the same bits in every run; None = whether
            `torch.use_deterministic_algorithms` is on. The other backends have no choice to make here.

    Returns:
        out [B, Hq, T, D] in the dtype of query and lse [B, Hq, T] (natural log, float32 or float64),
        differentiable in query, key and value. A query that sees no key (padding, or times below its own) has
        out 0 and lse -inf.

    Raises:
        ValueError: shapes that do not fit, an unknown backend, `backend="sdpa"` with `need_lse=True`,
        `backend="triton"`
            or `"flex"` where its kernels cannot run.
        RuntimeError: `backend="flex"` on a GPU where torch.compile is switched off or gave up.
    """
    check_shapes(query, key, value, eviction_time)
    query, key, value = as_autocast(query, key, value)
    B, _, T, D = query.shape
    scale = D**-0.5 if scale is None else float(scale)
    if backend not in BACKENDS:
        raise ValueError(
            f"backend {backend!r} of sparse_attention is not available: use one of {', '.join(BACKENDS)}"
        )
    if backend == "auto":
        backend = choose_backend(query, key, budget=budget, need_lse=bool(need_lse), scale=scale)
    elif refusal := backend_refusal(backend, query, key, value, scale):
        raise ValueError(
            f'backend "{backend}" of sparse_attention is not usable: {refusal}; use backend="auto" '
            "(model.attention_backend=auto)"
        )
    if backend == "sdpa":
        if need_lse:
            raise ValueError(
                'backend "sdpa" of sparse_attention gives no LSE: pass need_lse=False or backend="reference"'
            )
        found = find_segments(document_ids, batch=B, length=T) if segments is None else segments
        out = sdpa_sparse_attention(
            query, key, value, eviction_time, budget_total=budget.total, segments=found, scale=scale
        )
        return out, None
    if document_ids is not None and tuple(document_ids.shape) != (B, T):
        raise ValueError(
            f"document_ids must be [{B}, {T}] like the keys, got {list(document_ids.shape)}: "
            "give one id per token, -1 for padding"
        )
    if backend in ("triton", "flex") and document_ids is not None and segments is None:
        find_segments(document_ids, batch=B, length=T)  # refuses ids that fall
    if backend == "flex":
        from kvpop_lightning.attention.flex import flex_sparse_attention

        out, lse = flex_sparse_attention(
            query, key, value, eviction_time, document_ids=document_ids, scale=scale
        )
        return out, None if need_lse is False else lse
    if backend == "triton":
        from kvpop_lightning.attention.triton_attention import triton_sparse_attention

        if deterministic is None:
            deterministic = torch.are_deterministic_algorithms_enabled()
        out, lse = triton_sparse_attention(
            query,
            key,
            value,
            eviction_time,
            document_ids=document_ids,
            scale=scale,
            expected=budget.total,
            deterministic=deterministic,
        )
        return out, None if need_lse is False else lse
    out, lse = reference_attention(
        query, key, value, eviction_time, document_ids=document_ids, scale=scale, query_chunk=query_chunk
    )
    return out, None if need_lse is False else lse


def check_shapes(query: Tensor, key: Tensor, value: Tensor, eviction_time: Tensor | None = None) -> None:
    """One clear line for tensors that do not belong together."""
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        raise ValueError(
            "query, key and value must be [B, H, T, D], "
            f"got {list(query.shape)}, {list(key.shape)}, {list(value.shape)}"
        )
    B, Hq, T, D = query.shape
    H = key.shape[1]
    if tuple(key.shape) != (B, H, T, D) or tuple(value.shape[:3]) != (B, H, T):
        raise ValueError(
            f"key and value must be [{B}, Hkv, {T}, {D}] to go with query {list(query.shape)}, "
            f"got {list(key.shape)} and {list(value.shape)}"
        )
    if H == 0 or Hq % H:
        raise ValueError(
            f"{Hq} query heads cannot share {H} KV heads: the first must be a multiple of the second"
        )
    if eviction_time is not None:
        if tuple(eviction_time.shape) != (B, H, T):
            raise ValueError(
                f"eviction_time must be [{B}, {H}, {T}] like the keys, got {list(eviction_time.shape)}"
            )
        if eviction_time.dtype != torch.int64:
            raise ValueError(
                f"eviction_time must be int64, got {eviction_time.dtype}: use eviction_time() of policy"
            )
