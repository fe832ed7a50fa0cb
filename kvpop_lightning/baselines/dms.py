"""DMS, dynamic memory sparsification: a gate closes keys one by one (Lancucki et al., 2025; METHOD.md,
section 8).

`alpha_t = 100 a_t - 5`, a_t a zero-initialised map of the layer's normalised hidden state, one per KV head,
or a channel borrowed from the query. Training adds `logsigmoid(-z)` to the logit of key t once it is outside
the window, `z = (alpha_{t+1} + logistic noise) / 0.1`; at inference the key leaves where `alpha_{t+1} > 0`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpop_lightning.baselines.registry import PolicySpec, register
from kvpop_lightning.policy.borrow import lend_channel
from kvpop_lightning.policy.documents import DocumentLayout
from kvpop_lightning.policy.ragged import RaggedRule, shifted
from kvpop_lightning.policy.rope import inverse_frequencies
from kvpop_lightning.policy.scorers import register_scorer
from kvpop_lightning.policy.scorers.gate import GatedRule

ALPHA_SCALE, ALPHA_OFFSET = 100.0, -5.0
TEMPERATURE = 0.1
GATE_OPTIONS = ("gate_width", "gate_source", "width", "inputs", "generator", "inv_freq", "groups")


class DMSGate(GatedRule, RaggedRule):
    """The gates of one layer's KV heads; `gate_width` 0 is the authors' linear map, `gate_source` `channel`
    their other form: the last channel, before RoPE, of the first query head of each group.

    Args:
        inv_freq: radians per token of the model's rotations (`retrofit` reads them); None = theta 10000.
        groups: query heads per KV head; not needed, the tensors say it.
        others: as for `GatedRule`.
    """

    kind = "dms"

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        hidden_size: int,
        *,
        inv_freq: Sequence[float] | None = None,
        groups: int | None = None,
        **others: Any,
    ) -> None:
        super().__init__(num_heads, head_dim, hidden_size, **others)
        self.inv_freq = list(inv_freq) if inv_freq is not None else inverse_frequencies(head_dim)

    def options(self) -> dict[str, Any]:
        return super().options() | ({"inv_freq": self.inv_freq} if self.borrows or self.merges else {})

    def gate(self, hidden: Tensor) -> Tensor:
        return ALPHA_SCALE * self.read(hidden) + ALPHA_OFFSET

    def borrow(self, query: Tensor, key: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query [B, Hq, T, D] without the channel that the gates read, key as it is, and that channel [B, T,
        Hkv].
        """
        grouped = query.unflatten(1, (self.num_heads, -1))
        lender, channel = lend_channel(grouped[:, :, 0], position, self.inv_freq)
        left = torch.cat([lender[:, :, None], grouped[:, :, 1:]], 2).flatten(1, 2)
        return left, key, channel.transpose(1, 2)


def logistic_noise(like: Tensor) -> Tensor:
    """Draws from the standard logistic distribution, in the shape and dtype of `like`."""
    tiny = torch.finfo(like.dtype).tiny
    uniform = torch.rand_like(like).clamp(min=tiny, max=1.0 - torch.finfo(like.dtype).eps)
    return uniform.log() - torch.log1p(-uniform)


def soft_gate(alpha: Tensor, noise: Tensor | float, layout: DocumentLayout) -> Tensor:
    """`z` [B, H, T] of every key: the gate of key t is that of token t + 1; -inf (open) where there is
    none.
    """
    return shifted((alpha + noise) / TEMPERATURE, layout, -torch.inf)


def log_open(z: Tensor) -> Tensor:
    """`logsigmoid(-z)` [B, H, T], what the logit of a key outside the window gets; 0 where z is -inf."""
    return F.logsigmoid(-z.clamp(min=-1e4)).masked_fill(z == -torch.inf, 0.0)


def outside_window(position: Tensor, window: int, first: int, last: int, keys: int) -> Tensor:
    """bool [B, 1, last - first, keys]: query i is `window` or more tokens after key j of its document.

    Args:
        position: int64 [B, T], place inside the document (pairs of different documents mean nothing).
    """
    distance = position[:, first:last, None] - position[:, None, :keys]
    return (distance >= window)[:, None]


def closed_share(z: Tensor) -> tuple[Tensor, Tensor]:
    """(sum of `sigmoid(z)` over keys with a gate, number of such keys), over all rows, heads and tokens."""
    there = z != -torch.inf
    return torch.sigmoid(z).masked_fill(~there, 0.0).sum(), there.sum()


def compression_loss(closed: Tensor, target: float) -> Tensor:
    """One-sided: `max(0, target - closed)`, closing more than asked costs nothing."""
    return (target - closed).clamp(min=0.0)


def reduction_at(step: int, final: float, steps_per_unit: float) -> float:
    """The cache's reduction factor F, rising linearly from 1 by 1 per `steps_per_unit` steps up to
    `final`.
    """
    return min(final, 1.0 + step / steps_per_unit)


def closed_target(reduction: float) -> float:
    """`1 - 1 / F`, the share of keys to close."""
    return 1.0 - 1.0 / reduction


register_scorer("dms", DMSGate, GATE_OPTIONS)
register(
    PolicySpec(
        "dms",
        "dms",
        "DMS: a trained gate closes keys, caches of the heads differ",
        trained=True,
        bounded=False,
        reads_rope=True,
    )
)
