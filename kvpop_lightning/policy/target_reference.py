"""The future-attention target as it is defined, in float64, with the whole probability matrix (METHOD.md,
section 3)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvpop_lightning.policy.documents import document_layout


def future_attention_target_reference(
    query: Tensor,
    key: Tensor,
    *,
    window: int,
    document_ids: Tensor | None = None,
    normalizer: Tensor | None = None,
    aggregation: str = "max",
    eps: float = 1e-9,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`future_attention_target` in float64 from the definition; arguments, shapes as there. Builds [T, T]."""
    batch, heads, length, head_dim = query.shape
    kv_heads = key.shape[1]
    layout = document_layout(document_ids, batch=batch, length=length, device=query.device)
    q = query.detach().to(torch.float64).view(batch, kv_heads, heads // kv_heads, length, head_dim)
    k = key.detach().to(torch.float64)
    scale = head_dim**-0.5 if scale is None else scale
    logits = torch.einsum("bkgid,bkjd->bkgij", q, k) * scale

    document = layout.start.masked_fill(~layout.real, -1)
    same = (document[:, :, None] == document[:, None, :]) & layout.real[:, None, :]
    age = layout.position[:, :, None] - layout.position[:, None, :]
    causal = (same & (age >= 0))[:, None, None]
    later = (same & (age >= window))[:, None, None]
    if normalizer is None:
        log_normalizer = logits.masked_fill(~causal, -math.inf).logsumexp(-1)
    else:
        log_normalizer = normalizer.detach().to(torch.float64).view(*logits.shape[:-1])
    log_normalizer = log_normalizer.masked_fill(log_normalizer == -math.inf, math.inf)
    p = (logits - log_normalizer.unsqueeze(-1)).exp()
    count = later.sum(-2)  # n_j, [B, 1, 1, T]
    mass = torch.where(later, p, 0.0).sum(-2) / count.clamp(min=1)
    target = aggregate_heads(mass.log(), aggregation, eps)
    valid = (count[:, :, 0] > 0).expand(target.shape)
    return target.masked_fill(~valid, 0.0), valid


def aggregate_heads(log_mean: Tensor, aggregation: str, eps: float) -> Tensor:
    """Log mean mass [B, Hkv, G, T] of a group's query heads to one target [B, Hkv, T]."""
    if aggregation == "max":
        pooled = log_mean.amax(2)  # the log and + eps keep the order
    elif aggregation == "logmeanexp":
        pooled = log_mean.logsumexp(2) - math.log(log_mean.shape[2])
    elif aggregation == "mean":
        return _log_add(log_mean, eps).mean(2)
    else:
        raise ValueError(f"target.aggregation must be max, mean or logmeanexp, got {aggregation!r}")
    return _log_add(pooled, eps)


def _log_add(log_value: Tensor, eps: float) -> Tensor:
    """`log(exp(log_value) + eps)` without leaving the log domain."""
    if eps == 0.0:
        return log_value
    return torch.logaddexp(
        log_value, torch.full((), math.log(eps), dtype=log_value.dtype, device=log_value.device)
    )
