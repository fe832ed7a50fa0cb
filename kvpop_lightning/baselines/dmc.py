"""DMC, dynamic memory compression: tokens are merged into the newest entry or start one of their own (Nawrot
et al., 2024; METHOD.md, section 8).

Per KV head and token a decision alpha and an importance omega. With alpha above 0 the token is taken into the
newest entry, `z' = z + omega`, `k' = (z k + omega k_t) / z'`, the value likewise; otherwise it is appended
with `z = omega`. Keys are merged as before RoPE and stand at the position of the entry's newest token.
Training relaxes the decision to `sigmoid((alpha + logistic noise) / 0.1)`: every query sees every partial
accumulation j <= i, those before its own with `log(1 - decision of token j + 1)` on the logit.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from kvpop_lightning.baselines.dms import ALPHA_OFFSET, ALPHA_SCALE, GATE_OPTIONS, DMSGate
from kvpop_lightning.baselines.registry import PolicySpec, register
from kvpop_lightning.policy.borrow import lend_channel
from kvpop_lightning.policy.budget import Budget
from kvpop_lightning.policy.documents import document_layout
from kvpop_lightning.policy.merge import merged_rows
from kvpop_lightning.policy.scorers import register_scorer
from kvpop_lightning.policy.scorers.base import full_precision

CHANNEL_OFFSET = 5.0
"""Of both borrowed channels: alpha is the key's channel - 5, omega the sigmoid of the query's + 5."""


class DMCGate(DMSGate):
    """Decisions and importances of one layer's KV heads.

    By default two zero-initialised outputs of a map of the hidden state, `alpha = 100 a - 5` and
    `omega = sigmoid(b)`. With `gate_source` `channel` as the authors: the last channel before RoPE, of the
    key for alpha and of the query (mean over the group) for omega; both leave the attention. Arguments as for
    `DMSGate`.
    """

    kind = "dmc"
    merges = True
    outputs: ClassVar[int] = 2

    def protects(self, budget: Budget) -> int:
        """The newest entry, the query's own token in it."""
        return 1

    def decisions(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """alpha and omega, each [B, Hkv, T], from hidden [B, T, Hid]; omega is above 0. Differentiable."""
        first, second = self.read(hidden).unbind(-1)
        smallest = torch.finfo(second.dtype).eps
        if self.borrows:
            return first - CHANNEL_OFFSET, torch.sigmoid(second + CHANNEL_OFFSET) + smallest
        return ALPHA_SCALE * first + ALPHA_OFFSET, torch.sigmoid(second) + smallest

    def gate(self, hidden: Tensor) -> Tensor:
        return self.decisions(hidden)[0]

    @torch.no_grad()
    def choose(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """bool and float32 (float64) [B, Hkv, T]: is the token taken into the newest entry, and its
        importance.
        """
        with full_precision(hidden.device):
            alpha, importance = self.decisions(hidden.to(torch.promote_types(hidden.dtype, torch.float32)))
        return alpha > 0, importance

    def borrow(self, query: Tensor, key: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query [B, Hq, T, D] and key [B, Hkv, T, D] without their channel, both channels [B, T, 2 Hkv]."""
        query, weight = lend_channel(query, position, self.inv_freq)
        key, decision = lend_channel(key, position, self.inv_freq)
        weight = weight.unflatten(1, (self.num_heads, -1)).mean(2)
        return query, key, torch.cat([decision, weight], 1).transpose(1, 2)

    @torch.no_grad()
    def merged(
        self, key: Tensor, value: Tensor, hidden: Tensor, eviction: Tensor, document_ids: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The entries of whole rows, [B, Hkv, T, D] each: that of token j as queries j to e_j - 1 attend it.

        Args:
            key, value: [B, Hkv, T, D], key after RoPE; hidden [B, T, Hid].
            eviction: int64 [B, Hkv, T]; a token that is taken into the entry before it ends that at its own
                row index.
        """
        batch, _, length = eviction.shape
        layout = document_layout(document_ids, batch=batch, length=length, device=key.device)
        index = torch.arange(length, device=key.device)
        before = layout.earlier(1)[:, None].expand_as(eviction)
        merges = (eviction.gather(-1, before.clamp(min=0)) == index) & (before >= 0)
        _, importance = self.choose(hidden)
        return merged_rows(key, value, merges, importance, layout, self.inv_freq)


register_scorer("dmc", DMCGate, GATE_OPTIONS)
register(
    PolicySpec(
        "dmc",
        "dmc",
        "DMC: a trained gate merges tokens into the newest entry, caches of the heads differ",
        trained=True,
        bounded=False,
        reads_rope=True,
        merges=True,
    )
)
