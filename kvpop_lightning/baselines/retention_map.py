"""Which keys each query attends under a policy's step-by-step rule: for tests, diagnostics and pictures."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvpop_lightning.attention import visible_keys
from kvpop_lightning.attention.dispatch import check_shapes
from kvpop_lightning.attention.segments import find_segments
from kvpop_lightning.baselines.build import build_policy
from kvpop_lightning.baselines.oracle import OracleScorer
from kvpop_lightning.baselines.registry import get
from kvpop_lightning.policy import (
    NEVER,
    Budget,
    RetentionPolicy,
    future_attention_target,
    position_in_document,
)
from kvpop_lightning.policy.budget import checked_budget
from kvpop_lightning.policy.own_attention import OwnAttention


@torch.no_grad()
def retention_map(
    name: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    budget: Budget | int,
    document_ids: Tensor | None = None,
    hidden: Tensor | None = None,
    policy: RetentionPolicy | None = None,
    layer: int = 0,
    scores: Tensor | None = None,
    scale: float | None = None,
    **options: Any,
) -> Tensor:
    """bool [B, Hkv, T, T]: entry [b, h, i, j] says whether query i attends key j; at most `budget` per query.

    Args:
        name: of the policy, one of `available()`.
        query: [B, Hq, T, D] after RoPE; key, value: [B, Hkv, T, D] (key after RoPE): one layer's tensors.
        budget: keys per KV head, or their total: 4 sinks and a quarter as window then, as far as they fit.
        document_ids: int64 [B, T], -1 = padding, which neither attends nor is attended; None = one document.
        hidden: [B, T, Hid], what q_proj reads, for scorers that read it.
        policy: a ready policy (a trained one's scorers) instead of a fresh one; its `layer` is used.
        scores: [B, Hkv, T], the oracle's; None = the future-attention target of these tensors.
        scale: factor on the dot products, None = D ** -0.5.
        options: as for `build_policy` (`decay`, `decay_step`, `seed`, `averaging`, `inv_freq`, ...).

    Raises:
        ValueError: an unknown policy or option, one that merges keys (`dmc`), shapes that do not fit, hidden
            states that are missing.
    """
    check_shapes(query, key, value)
    batch, heads, length, dim = key.shape
    _check_ids(document_ids, batch, length)
    if hidden is not None and hidden.shape[:2] != (batch, length):
        raise ValueError(
            f"retention_map: hidden must be [{batch}, {length}, Hid] like the keys, got {list(hidden.shape)}"
        )
    spec = get(name)
    if spec.merges:
        raise ValueError(
            f"{name} has no retention map: it merges keys, so no query attends a key as it was; "
            "`observe` gives the eviction times that say which token was merged into the next"
        )
    if spec.scorer is None:
        never = torch.full((batch, heads, length), NEVER, dtype=torch.int64, device=key.device)
        return visible_keys(never, document_ids)
    budget = split_total(budget) if isinstance(budget, int) else checked_budget(budget)
    if policy is None:
        if spec.reads_rope:
            options.setdefault("groups", query.shape[1] // heads)
        policy = build_policy(
            name,
            budget,
            num_layers=layer + 1,
            num_heads=heads,
            head_dim=dim,
            hidden_size=1 if hidden is None else hidden.shape[-1],
            **options,
        ).to(key.device)
    elif options:
        raise ValueError(f"retention_map: {', '.join(sorted(options))} belong to a policy that is made here")
    if policy.needs_hidden and hidden is None:
        raise ValueError(f"retention_map: {name} reads hidden states: pass hidden=[B, T, Hid]")
    oracle = policy.layer_scorer(layer)
    if isinstance(oracle, OwnAttention) and oracle.holds_all:
        every = torch.arange(length, device=key.device)
        return oracle.visible(query, key, policy.budget, document_ids, every)
    if isinstance(oracle, OracleScorer):
        if scores is None:
            scores, _ = future_attention_target(
                query, key, window=policy.budget.window, document_ids=document_ids, scale=scale
            )
        oracle.set_scores(scores, document_ids)
    times, _, _ = policy.eviction_times(
        layer,
        key,
        value,
        hidden,
        position=position_in_document(document_ids, batch=batch, length=length, device=key.device),
        document_ids=document_ids,
        query=query,
        scale=scale,
    )
    return visible_keys(times, document_ids)


def _check_ids(document_ids: Tensor | None, batch: int, length: int) -> None:
    if document_ids is None:
        return
    whole = isinstance(document_ids, Tensor) and document_ids.dtype in (torch.int64, torch.int32)
    if not whole or document_ids.shape != (batch, length):
        raise ValueError(
            f"retention_map: document_ids must be whole numbers [{batch}, {length}] like the keys"
        )
    find_segments(document_ids, batch=batch, length=length)  # refuses ids that fall within a row


def split_total(total: int) -> Budget:
    """A budget of `total` keys: at most 4 sinks, a quarter as window, the rest for the long range.

    Raises:
        ValueError: fewer than 2 keys.
    """
    if total < 2:
        raise ValueError(f"a budget must hold at least 2 keys, the query's own and another, got {total}")
    sink, window = min(4, total // 4), max(1, total // 4)
    return Budget(sink, window, total - sink - window)
