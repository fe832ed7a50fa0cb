"""What a policy without a budget really held: its heads differ, and only the rows can tell (DMS)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvpop_lightning.cache.ragged import PAGE
from kvpop_lightning.evaluation.statistics import mean
from kvpop_lightning.policy import Budget
from kvpop_lightning.policy.memory import ACCOUNTING_BYTES
from kvpop_lightning.policy.own_attention import OwnAttention


def dense_below(rule: Any, budget: Budget) -> int:
    """Tokens of a text that all its queries up to there attend: nothing has been evicted so far."""
    if isinstance(rule, OwnAttention):
        return rule.whole_below(budget)
    return budget.window if rule.ragged else budget.total


def held_at_end(rule: Any, eviction: Tensor, document_ids: Tensor) -> dict[str, Tensor]:
    """`keys_held` int64 [L, Hkv] after the row's last token, from times [L, Hkv, T]; empty for other rules.

    Counts the last document of a packed row, which is what a cache would hold.
    """
    if not rule.ragged:
        return {}
    ids = document_ids[0]
    last = ids == ids.max()
    return {"keys_held": ((eviction >= ids.shape[0]) & last).sum(-1)}


def ragged_facts(
    policy: Any, records: Sequence[dict[str, Any]], reference_length: int, element_bytes: int
) -> dict[str, Any]:
    """Table fields from the rows: keys and bytes held (mean over rows), by head, and the real compression.

    Bytes are those of the window and the pages, as `RaggedLayer` allocates them.
    """
    if policy is None or not policy.layer_scorer(0).ragged:
        return {}
    scorer, window = policy.layer_scorer(0), policy.budget.window
    held = torch.stack([torch.as_tensor(r["keys_held"], dtype=torch.float64) for r in records])
    behind = (held - window).clamp(min=0)
    slots = torch.ceil(behind / PAGE) * PAGE + window
    total = float(slots.sum((1, 2)).mean())
    return {
        "keys_held": mean(held.flatten(1).mean(1).tolist()),
        "keys_held_by_head": held.mean(0).tolist(),
        "compression": 1.0 - float(held.mean()) / reference_length,
        "bytes_held": round(total * 2 * scorer.head_dim * element_bytes),
        "peak_bytes": round(total * 2 * scorer.head_dim * element_bytes),
        "bytes_accounted": round(total * 2 * scorer.head_dim * ACCOUNTING_BYTES),
    }
