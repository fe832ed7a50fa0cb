"""Attention under an eviction-time mask, written as its definition (METHOD.md, sections 1 and 2).

Every faster form is compared with this one, in float64 and with gradients. It builds the logits of a block of
queries against all keys, so its memory is `query_chunk * T` per head and not `T * T`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kvpop_lightning.attention.segments import PADDING

_CHUNK_ELEMENTS = 2**26
"""Logits held at once when no chunk is asked for (256 MB in float32)."""


def visible_keys(
    eviction_BHT: Tensor,
    document_ids: Tensor | None,
    *,
    first_query: int = 0,
    last_query: int | None = None,
) -> Tensor:
    """The mask itself: query `i` sees key `j` iff `j <= i < e_j`, same document, neither of them padding.

    Args:
        eviction_BHT: int64 [B, Hkv, T], row index of the first query that no longer sees key j (NEVER = int64
            max).
        document_ids: int64 [B, T] or None.
        first_query, last_query: block of queries (half open), the whole row by default.

    Returns:
        bool [B, Hkv, Q, T].
    """
    T = eviction_BHT.shape[-1]
    key_T = torch.arange(T, device=eviction_BHT.device)
    query_Q = key_T[first_query:last_query, None]
    mask_BHQT = (key_T <= query_Q) & (query_Q < eviction_BHT[:, :, None, :])
    if document_ids is not None:
        query_id_BQ = document_ids[:, first_query:last_query]
        same_BQT = (query_id_BQ[:, :, None] == document_ids[:, None, :]) & (query_id_BQ != PADDING)[
            :, :, None
        ]
        mask_BHQT = mask_BHQT & same_BQT[:, None]
    return mask_BHQT


def reference_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    eviction_time: Tensor,
    *,
    document_ids: Tensor | None,
    scale: float,
    query_chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Dense masked attention with its log-normaliser; differentiable in query, key and value through both
    outputs.

    Args:
        query: [B, Hq, T, D]; key, value: [B, Hkv, T, D]; query head g reads KV head `g // (Hq // Hkv)`.
        eviction_time: int64 [B, Hkv, T].
        document_ids: int64 [B, T] or None.
        scale: factor on the dot products.
        query_chunk: queries per block; None = as many as fit `2**26` logits. With gradients each block is
            recomputed in the backward pass, so memory stays at one block there too.

    Returns:
        out [B, Hq, T, D] in the dtype of query, lse [B, Hq, T] (natural log; float32, or float64 for float64
        inputs). A query that sees no key has out 0 and lse -inf, and passes no gradient on.
    """
    B, Hq, T, _ = query.shape
    chunk = query_chunk or max(1, _CHUNK_ELEMENTS // max(1, B * Hq * T))
    needs_grad = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    outs, lses = [], []
    for first in range(0, T, chunk):
        arguments = (query, key, value, eviction_time, document_ids, scale, first, min(first + chunk, T))
        if needs_grad and chunk < T:
            out, lse = checkpoint(_block, *arguments, use_reentrant=False)
        else:
            out, lse = _block(*arguments)
        outs.append(out)
        lses.append(lse)
    if not outs:
        return query.clone(), query.new_zeros(B, Hq, 0, dtype=_accumulation_dtype(query))
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def _accumulation_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _block(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    eviction_BHT: Tensor,
    document_ids: Tensor | None,
    scale: float,
    first: int,
    last: int,
) -> tuple[Tensor, Tensor]:
    """Queries `first:last` against all keys."""
    B, Hq = query.shape[:2]
    logit_BHGQT, sees_BHQ1 = _masked_logits(query, key, eviction_BHT, document_ids, scale, first, last)
    # A row that sees nothing would give -inf - (-inf): its maximum becomes 0 and its sum 1, and both outputs
    # are replaced.
    top = logit_BHGQT.detach().amax(dim=-1, keepdim=True).masked_fill(~sees_BHQ1, 0.0)
    weight_BHGQT = (logit_BHGQT - top).exp()
    total = weight_BHGQT.sum(dim=-1, keepdim=True).masked_fill(~sees_BHQ1, 1.0)
    out_BHGQD = torch.einsum("bhgqt,bhtd->bhgqd", weight_BHGQT / total, value.to(logit_BHGQT.dtype))
    lse_BHGQ = (total.log() + top).masked_fill(~sees_BHQ1, float("-inf")).squeeze(-1)
    return out_BHGQD.reshape(B, Hq, last - first, -1).to(query.dtype), lse_BHGQ.reshape(B, Hq, last - first)


def _masked_logits(
    query: Tensor,
    key: Tensor,
    eviction_BHT: Tensor,
    document_ids: Tensor | None,
    scale: float,
    first: int,
    last: int,
) -> tuple[Tensor, Tensor]:
    """Logits [B, Hkv, G, Q, T], -inf where masked, and which queries see anything, bool [B, Hkv, 1, Q, 1]."""
    B, Hq, _, D = query.shape
    H = key.shape[1]
    dtype = _accumulation_dtype(query)
    q_BHGQD = query[:, :, first:last].to(dtype).reshape(B, H, Hq // H, last - first, D)
    mask_BHQT = visible_keys(eviction_BHT, document_ids, first_query=first, last_query=last)
    logit_BHGQT = torch.einsum("bhgqd,bhtd->bhgqt", q_BHGQD, key.to(dtype)) * scale
    logit_BHGQT = logit_BHGQT.masked_fill(~mask_BHQT[:, :, None], float("-inf"))
    return logit_BHGQT, mask_BHQT.any(dim=-1, keepdim=True)[:, :, None]


@torch.no_grad()
def log_normalizer(
    query: Tensor,
    key: Tensor,
    eviction_time: Tensor,
    *,
    document_ids: Tensor | None,
    scale: float,
    query_chunk: int | None = None,
) -> Tensor:
    """The LSE of `reference_attention` alone, [B, Hq, T], natural log, without gradient or value product.

    Arguments and shapes as there; -inf for a query that sees no key.
    """
    B, Hq, T, _ = query.shape
    chunk = query_chunk or max(1, _CHUNK_ELEMENTS // max(1, B * Hq * T))
    parts = [query.new_zeros(B, Hq, 0, dtype=_accumulation_dtype(query))]
    for first in range(0, T, chunk):
        last = min(first + chunk, T)
        logit, _ = _masked_logits(query, key, eviction_time, document_ids, scale, first, last)
        parts.append(logit.logsumexp(dim=-1).reshape(B, Hq, last - first))
    return torch.cat(parts, dim=2)
