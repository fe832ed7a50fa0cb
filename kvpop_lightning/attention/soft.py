"""Dense attention with something added to the logits, for baselines that learn through a soft mask.

The addition depends on the KV head, the query and the key and is made one block of queries at a time; with
gradients a block is recomputed in the backward pass, so that memory stays at one block of logits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kvpop_lightning.attention.reference import visible_keys

Addition = Callable[[int, int, int], Tensor]
"""(first query, last query, keys) -> [B, Hkv, last - first, keys], for the first `keys` keys of the row."""

_BLOCK_ELEMENTS = 2**24


def soft_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    addition: Addition,
    *,
    document_ids: Tensor | None,
    scale: float,
    query_chunk: int | None = None,
) -> Tensor:
    """Causal attention inside each document with `addition` on the scaled logits.

    Args:
        query: [B, Hq, T, D]; key, value: [B, Hkv, T, D]; query head g reads KV head `g // (Hq // Hkv)`.
        addition: differentiable; called again in the backward pass, with equal results.
        document_ids: int64 [B, T], -1 = padding; None = one document.
        scale: factor on the dot products.
        query_chunk: queries per block; None = as many as fit `2**24` logits.

    Returns:
        [B, Hq, T, D] in the dtype of query; 0 on padding.
    """
    batch, query_heads, length, _ = query.shape
    chunk = query_chunk or min(length, max(16, _BLOCK_ELEMENTS // max(1, batch * query_heads * length)))
    outs = []
    for first in range(0, length, chunk):
        arguments = (query, key, value, addition, document_ids, scale, first, min(first + chunk, length))
        if torch.is_grad_enabled() and chunk < length:
            outs.append(checkpoint(_block, *arguments, use_reentrant=False, preserve_rng_state=False))
        else:
            outs.append(_block(*arguments))
    return torch.cat(outs, dim=2) if outs else torch.zeros_like(query)


def _block(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    addition: Addition,
    document_ids: Tensor | None,
    scale: float,
    first: int,
    last: int,
) -> Tensor:
    batch, query_heads, _, dim = query.shape
    heads = key.shape[1]
    never = torch.full((batch, 1, last), last, dtype=torch.int64, device=key.device)
    ids = None if document_ids is None else document_ids[:, :last]
    mask = visible_keys(never, ids, first_query=first, last_query=last)  # [B, 1, Q, N]
    folded = (query[:, :, first:last] * scale).reshape(batch, heads, -1, dim)  # group and queries together
    logits = folded @ key[:, :, :last].transpose(-1, -2)
    work = torch.promote_types(logits.dtype, torch.float32)
    logits = logits.to(work).view(batch, heads, -1, last - first, last)
    logits = logits + addition(first, last, last).to(work)[:, :, None]
    sees = mask.any(-1, keepdim=True)
    # A query that sees nothing sees everything for a moment: no NaN, and its result is erased.
    logits = logits.masked_fill(~(mask | ~sees)[:, :, None], -torch.inf)
    weight = torch.softmax(logits, dim=-1).to(value.dtype)
    out = weight.view(batch, heads, -1, last) @ value[:, :, :last]
    out = out.view(batch, query_heads, last - first, -1)
    return out.masked_fill(~sees, 0.0)
