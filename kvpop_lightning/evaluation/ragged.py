"""What a policy without a budget really held: its heads differ, and only the rows can tell (DMS, DMC)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvpop_lightning.cache.paged import PAGE
from kvpop_lightning.evaluation.statistics import mean
from kvpop_lightning.policy import Budget
from kvpop_lightning.policy.memory import ACCOUNTING_BYTES
from kvpop_lightning.policy.own_attention import OwnAttention


def dense_below(rule: Any, budget: Budget) -> int:
    """Tokens of a text that all its queries up to there attend: nothing has been evicted so far."""
    if isinstance(rule, OwnAttention):
        return rule.whole_below(budget)
    if rule.ragged:
        return 0 if rule.borrows or rule.merges else rule.protects(budget)
    return budget.total


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

    Bytes are those of the window and the pages, as `RaggedLayer` allocates them; of DMC's those of the pages
    and the sums of the newest entry (`MergedLayer`).
    """
    if policy is None or not policy.layer_scorer(0).ragged:
        return {}
    scorer = policy.layer_scorer(0)
    window = scorer.protects(policy.budget)
    held = torch.stack([torch.as_tensor(r["keys_held"], dtype=torch.float64) for r in records])
    behind = (held - window).clamp(min=0)
    slots = torch.ceil(behind / PAGE) * PAGE + (0 if scorer.merges else window)
    total = float(slots.sum((1, 2)).mean()) * 2 * scorer.head_dim
    # The sums of the newest entry are float32 or float64, whatever the model's dtype.
    sums = len(policy.scorers) * scorer.num_heads * (2 * scorer.head_dim + 1) if scorer.merges else 0
    held_bytes = round(total * element_bytes) + sums * max(element_bytes, 4)
    return {
        "keys_held": mean(held.flatten(1).mean(1).tolist()),
        "keys_held_by_head": held.mean(0).tolist(),
        "compression": 1.0 - float(held.mean()) / reference_length,
        "bytes_held": held_bytes,
        "peak_bytes": held_bytes,
        "bytes_accounted": round(total * ACCOUNTING_BYTES) + sums * 4,
    }
