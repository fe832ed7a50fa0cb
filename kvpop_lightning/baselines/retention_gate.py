"""Retention gates in the manner of TRIM-KV: a token's score fades with its age, at a rate of its own (Bui et
al., 2025, "Cache What Lasts").

A gate gives every token and KV head `beta_t` in (0, 1) when it is written; at query i its score is
`beta_t ** (i - t)`. As tokens fade at different rates their order changes with age, so there is no priority
that never changes: the rule decides query by query, though without looking at the attention.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpop_lightning.baselines.registry import PolicySpec, register
from kvpop_lightning.policy.budget import NEVER, Budget
from kvpop_lightning.policy.documents import document_layout
from kvpop_lightning.policy.scorers import register_scorer
from kvpop_lightning.policy.scorers.base import full_precision
from kvpop_lightning.policy.scorers.gate import GatedRule
from kvpop_lightning.policy.stepwise import Held, StepwiseRule

INITIAL_LOGIT = 8.0
"""beta = 0.99966: a fresh gate forgets a token to 0.7 in a thousand, and its gradient is not yet lost."""


class RetentionGate(GatedRule, StepwiseRule):
    """The gates of one layer's KV heads; arguments as for `GatedRule`."""

    kind = "retention_gate"
    initial = INITIAL_LOGIT

    def log_beta(self, hidden: Tensor) -> Tensor:
        """[B, Hkv, T] < 0 from hidden [B, T, Hid]; gradients reach `hidden`."""
        return F.logsigmoid(self.read(hidden))

    def new_notes(self, batch: int, heads: int, slots: int, like: Tensor) -> dict[str, Tensor]:
        return {"log_beta": like.new_zeros(batch, heads, slots)}

    def written(self, hidden: Tensor | None) -> dict[str, Tensor]:
        assert hidden is not None
        with full_precision(hidden.device):
            return {"log_beta": self.log_beta(hidden)}

    def value_of(self, held: Held, newest: Tensor) -> Tensor:
        return (newest[:, None, None] - held.position) * held.notes["log_beta"]

    @torch.no_grad()
    def row_times(self, hidden: Tensor, budget: Budget, document_ids: Tensor | None) -> Tensor:
        """Eviction times of whole rows, int64 [B, Hkv, T]: the rule's steps without the attention, O(T B)
        per head.

        Packed documents run one after the other, all rows and heads at once.
        """
        self.check(budget)
        with full_precision(hidden.device):
            log_beta = self.log_beta(hidden)
        batch, heads, length = log_beta.shape
        layout = document_layout(document_ids, batch=batch, length=length, device=hidden.device)
        first, newest = self.protected(budget)
        place = torch.zeros(batch, heads, budget.total, dtype=torch.int64, device=hidden.device)
        column, rate = torch.zeros_like(place), log_beta.new_zeros(place.shape)
        out = torch.full((batch, heads, length + 1), NEVER, dtype=torch.int64, device=hidden.device)
        for i in range(length):
            seen = layout.position[:, i][:, None, None]  # tokens of the document before this one
            real = layout.real[:, i][:, None, None]
            value = (seen - 1 - place) * rate
            spared = (place < first) | (place >= seen - newest)
            value = value.masked_fill(spared, torch.inf)
            lowest = value == value.amin(-1, keepdim=True)
            victim = torch.where(lowest & ~spared, place, NEVER).argmin(
                -1, keepdim=True
            )  # the oldest of equals
            full = seen >= budget.total
            slot = torch.where(full, victim, seen.clamp(max=budget.total - 1))
            # A column more takes what did not happen.
            out.scatter_(-1, torch.where(full & real, column.gather(-1, slot), length), i)
            here = torch.full_like(seen, i)
            for store, new in ((place, seen), (column, here), (rate, log_beta[..., i : i + 1])):
                store.scatter_(-1, slot, torch.where(real, new.expand_as(slot), store.gather(-1, slot)))
        return out[..., :length]


register_scorer("retention_gate", RetentionGate, ("gate_width", "width", "inputs", "generator"))
register(
    PolicySpec(
        "retention_gate",
        "retention_gate",
        "a trained gate sets the rate at which each token fades",
        trained=True,
    )
)
