"""Rules that do not attend as the model does: pages chosen anew by every query, sinks at moved positions.

Their parallel forward is written out here, block by block over the queries; it is for evaluation, not fast.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from kvpop_lightning.policy.budget import Budget
from kvpop_lightning.policy.scorers.base import Scorer

_BLOCK_ELEMENTS = 2**24
"""Logits held at once."""


class OwnAttention(Scorer):
    """A rule of this kind.

    Attributes:
        holds_all: nothing is ever evicted; the rule chooses what each query attends. Its memory is unbounded.
    """

    holds_all: bool = False

    @abstractmethod
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
        """Attention of whole rows, [B, Hq, T, D]; shapes as for `sparse_attention`, padding gives 0."""

    def visible(
        self, query: Tensor, key: Tensor, budget: Budget, document_ids: Tensor | None, at: Tensor
    ) -> Tensor:
        """bool [B, Hkv, N, T]: keys that the queries in columns `at` int64 [N] attend, if `holds_all`."""
        raise NotImplementedError

    def whole_below(self, budget: Budget) -> int:
        """Tokens of a text that all its queries up to there attend: the forward is dense so far."""
        return budget.total


def attend_in_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    visible: Callable[[int, int], Tensor],
    *,
    other: Tensor | None = None,
    meets_other: Tensor | None = None,
) -> Tensor:
    """Softmax attention [B, Hq, T, D] over explicitly visible keys; 0 for a query that sees none.

    Args:
        query: [B, Hq, T, D]; key, value: [B, Hkv, T, D].
        visible: bool [B, Hkv, Q, T] of the queries `first .. last - 1`.
        other: [B, Hq, T, D], the queries as the keys in the columns `meets_other` bool [B, T] meet them.
    """
    batch, query_heads, length, dim = query.shape
    heads = key.shape[1]
    block = max(1, _BLOCK_ELEMENTS // max(1, batch * query_heads * length))
    work = torch.promote_types(query.dtype, torch.float32)
    out = []
    for first in range(0, length, block):
        last = min(first + block, length)

        def logits_of(x: Tensor, first: int = first, last: int = last) -> Tensor:
            part = (x[:, :, first:last] * scale).reshape(batch, heads, -1, dim)
            return (part @ key[:, :, :last].mT).to(work).unflatten(2, (-1, last - first))

        logits = logits_of(query)
        if other is not None:
            assert meets_other is not None
            logits = torch.where(meets_other[:, None, None, None, :last], logits_of(other), logits)
        sees = visible(first, last)[:, :, None, :, :last]
        logits = logits.masked_fill(~sees, torch.finfo(work).min)
        weight = torch.softmax(logits, -1).masked_fill(~sees, 0.0).to(value.dtype)
        mixed = weight.flatten(2, 3) @ value[:, :, :last]
        out.append(mixed.reshape(batch, query_heads, last - first, -1))
    return torch.cat(out, 2) if out else torch.zeros_like(query)
