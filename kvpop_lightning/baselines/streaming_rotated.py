"""StreamingLLM with keys numbered by their place in the cache, as its authors do (Xiao et al., 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvpop_lightning.attention import visible_keys
from kvpop_lightning.policy.budget import Budget
from kvpop_lightning.policy.documents import position_in_document
from kvpop_lightning.policy.own_attention import OwnAttention, attend_in_blocks
from kvpop_lightning.policy.rope import angles, inverse_frequencies, rotate
from kvpop_lightning.policy.stepwise import Held, StepwiseRule


class RotatedStreaming(StepwiseRule, OwnAttention):
    """Sinks and the most recent tokens; the sinks stand just before the recent ones, whatever lies between.

    Once B keys are held, the query of token i is at place B - 1 and the key of a recent token j at
    `B - 1 - (i - j)`: distances among recent tokens stay. Only the distance to a sink p changes, from `i - p`
    to `B - 1 - p`, so a query meets the sinks turned back by `i - (B - 1)` positions.

    Args:
        inv_freq: radians per token of the model's rotations (`retrofit` reads them); None = theta 10000.
    """

    kind = "streaming_llm_rotated"
    layer_wide = True

    def __init__(
        self, num_heads: int, head_dim: int, hidden_size: int, *, inv_freq: Sequence[float] | None = None
    ) -> None:
        super().__init__(num_heads, head_dim, hidden_size)
        self.inv_freq = list(inv_freq) if inv_freq is not None else inverse_frequencies(head_dim)

    def options(self) -> dict[str, Any]:
        return {"inv_freq": self.inv_freq}

    def protected(self, budget: Budget) -> tuple[int, int]:
        return budget.sink, budget.total - budget.sink - 1

    def value_of(self, held: Held, newest: Tensor) -> Tensor:
        return torch.zeros_like(held.position, dtype=torch.float32)

    def _turned(self, query: Tensor, position: Tensor, budget: Budget) -> Tensor:
        """query [B, ..., N, D] as sinks meet it; position int64 [B, N]."""
        back = angles(-(position - (budget.total - 1)).clamp(min=0), self.inv_freq)  # [B, N, D / 2]
        return rotate(query, back.view(back.shape[0], *[1] * (query.dim() - 3), *back.shape[1:]))

    def logits(self, held: Held, query: Tensor, seen: Tensor, budget: Budget, scale: float) -> Tensor:
        turned = self._turned(query, seen[:, None], budget)
        sink = (held.position < budget.sink)[:, :, None]
        moved, plain = ((x * scale) @ held.keys.mT for x in (turned, query))
        return torch.where(sink, moved, plain)

    def attend_rows(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        eviction: Tensor,
        budget: Budget,
        *,
        document_ids: Tensor | None,
        scale: float,
    ) -> Tensor:
        position = position_in_document(
            document_ids, batch=key.shape[0], length=key.shape[2], device=key.device
        )
        return attend_in_blocks(
            query,
            key,
            value,
            scale,
            lambda first, last: visible_keys(eviction, document_ids, first_query=first, last_query=last),
            other=self._turned(query, position, budget),
            meets_other=position < budget.sink,
        )
