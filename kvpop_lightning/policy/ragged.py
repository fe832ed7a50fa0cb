"""Rules that close keys one by one, without a budget: each KV head holds as many as its gate left open
(METHOD.md, section 8).

The gate of key t is the one computed at token t + 1. A closed key stays as long as the window protects it
(`i - t < window`, so that `window` keys are protected, the query's own included) and leaves after that: its
eviction time is `t + window`. An open key stays for ever, so the caches of the heads differ in length
("ragged").
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from kvpop_lightning.policy.budget import NEVER, Budget
from kvpop_lightning.policy.documents import DocumentLayout, document_layout
from kvpop_lightning.policy.scorers.base import Scorer, full_precision


class RaggedRule(Scorer):
    """A rule of this kind; its score is the gate logit `alpha`, and a key is closed where alpha is above 0.

    The budget's window is what is protected; its other slots are what the rule was trained to hold on
    average, and no bound.
    """

    ragged = True

    def protects(self, budget: Budget) -> int:
        """Keys that no gate closes, the query's own included."""
        return budget.window

    @abstractmethod
    def gate(self, hidden: Tensor) -> Tensor:
        """alpha [B, Hkv, T] computed at each token from hidden [B, T, Hid]; gradients reach `hidden`."""

    def score_rows(
        self, key: Tensor, value: Tensor, hidden: Tensor | None, position: Tensor, document_ids: Tensor | None
    ) -> Tensor:
        assert hidden is not None
        return self.gate(hidden[:, 0])

    @torch.no_grad()
    def decide(self, hidden: Tensor) -> Tensor:
        """bool [B, Hkv, T]: token t's gate closes the key of token t - 1."""
        with full_precision(hidden.device):
            return self.gate(hidden.to(torch.promote_types(hidden.dtype, torch.float32))) > 0


def shifted(at_token: Tensor, layout: DocumentLayout, outside: float | bool) -> Tensor:
    """What was computed at token t + 1 of the document, for key t; `outside` for a document's last token,
    padding.

    Args:
        at_token: [B, H, T].
    """
    following = layout.later(1)
    none = (following == NEVER) | ~layout.real
    index = following.masked_fill(none, 0)[:, None].expand_as(at_token)
    return at_token.gather(-1, index).masked_fill(none[:, None], outside)


def closing_times(closes: Tensor, window: int, document_ids: Tensor | None) -> Tensor:
    """Eviction times int64 [B, H, T] (row indices, NEVER = stays) of whole rows.

    Args:
        closes: bool [B, H, T], the gate computed at each token.
        window: protected keys, the query's own included (>= 1).
        document_ids: int64 [B, T], -1 = padding; None = one document.
    """
    batch, _, length = closes.shape
    layout = document_layout(document_ids, batch=batch, length=length, device=closes.device)
    leaves = layout.later(window)[:, None].expand_as(closes)
    return torch.where(shifted(closes, layout, False), leaves, NEVER)


def keys_held(eviction: Tensor, length: Tensor | int) -> Tensor:
    """Keys that each head holds at the end of a text of `length` tokens, int64 [..., H], from times [..., H,
    T].
    """
    return (eviction >= length).sum(-1)
