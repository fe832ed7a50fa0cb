"""One entry for attention under an eviction-time mask; `backend` picks the form."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpop_lightning.attention.reference import reference_attention
from kvpop_lightning.attention.sdpa import sdpa_sparse_attention
from kvpop_lightning.attention.segments import Segment, find_segments
from kvpop_lightning.policy.budget import Budget

BACKENDS = ("auto", "reference", "sdpa")
"""What `backend=` takes: `reference` (dense, with LSE), `sdpa` (fused, no LSE), `auto` = whichever serves."""


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
    need_lse: bool = True,
    query_chunk: int | None = None,
    segments: list[Segment] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention in which query `i` sees key `j` iff `j <= i < eviction_time[j]`, in the same document
    (METHOD.md, section 2).

    Args:
        query: [B, Hq, T, D], after RoPE.
        key, value: [B, Hkv, T, D], not repeated for the query heads; query head g reads KV head `g // (Hq //
            Hkv)`.
        eviction_time: int64 [B, Hkv, T], row index of the first query that no longer sees the key (NEVER =
            int64 max).
        budget: what the pattern was made for; the mask itself is `eviction_time` alone.
        document_ids: int64 [B, T], non-decreasing over real tokens, -1 = padding; None = one document.
        scale: factor on the dot products, `D ** -0.5` by default.
        backend: `auto`, `reference` or `sdpa`.
        need_lse: False lets `auto` take the fused kernel and returns None for the LSE.
        query_chunk: queries per block of the reference.
        segments: what `find_segments(document_ids)` returned, when the caller has it already.

    Returns:
        out [B, Hq, T, D] in the dtype of query and lse [B, Hq, T] (natural log, float32 or float64),
        differentiable in query, key and value. A query that sees no key (padding, or times below its own) has
        out 0 and lse -inf.

    Raises:
        ValueError: shapes that do not fit, an unknown backend, `backend="sdpa"` with `need_lse=True`.
    """
    check_shapes(query, key, value, eviction_time)
    B, _, T, D = query.shape
    scale = D**-0.5 if scale is None else float(scale)
    if backend not in BACKENDS:
        raise ValueError(
            f"backend {backend!r} of sparse_attention is not available: use one of {', '.join(BACKENDS)}"
        )
    if backend == "auto":
        backend = "reference" if need_lse else "sdpa"
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
    out, lse = reference_attention(
        query, key, value, eviction_time, document_ids=document_ids, scale=scale, query_chunk=query_chunk
    )
    return out, lse if need_lse else None


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
