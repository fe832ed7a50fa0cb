"""Attention over the held slots and the new tokens; the heads of a group share the stored keys."""

from __future__ import annotations

import torch
from torch import Tensor


def softmax_dtype(dtype: torch.dtype) -> torch.dtype:
    """Softmax runs in float32, or in float64 when the model does."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def grouped_attention(
    query: Tensor, keys: list[Tensor], values: list[Tensor], visible: Tensor | None, scaling: float
) -> Tensor:
    """Softmax attention over the concatenation of `keys` without concatenating or repeating them.

    Args:
        query: [B, Hq, Q, D]; query head g reads KV head g // (Hq / Hkv).
        keys, values: pieces [B, Hkv, N_i, D] in the model's dtype; N = sum of N_i.
        visible: bool, broadcastable to [B, Hkv, Q, N]; None = everything. A query that sees nothing gets a
            meaningless finite output (the caller blanks padding).
        scaling: factor of the logits.

    Returns:
        [B, Hq, Q, D] in the dtype of `values`; the softmax runs in float32 (float64 for float64).
    """
    batch, query_heads, length, dim = query.shape
    heads = keys[0].shape[1]
    group = query_heads // heads
    folded = (query * scaling).reshape(batch, heads, group * length, dim)
    pieces = [folded @ piece.transpose(-1, -2) for piece in keys]
    logits = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1)
    work = softmax_dtype(logits.dtype)
    logits = logits.to(work).view(batch, heads, group, length, -1)
    if visible is not None:
        logits = logits.masked_fill(~visible[:, :, None], torch.finfo(work).min)
    probability = torch.softmax(logits, dim=-1)
    weight = probability.to(values[0].dtype).view(batch, heads, group * length, -1)
    start = 0
    out = None
    for piece in values:
        part = weight[..., start : start + piece.shape[2]] @ piece
        out = part if out is None else out + part
        start += piece.shape[2]
    assert out is not None
    return out.view(batch, query_heads, length, -1)
