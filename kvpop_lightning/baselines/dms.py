"""DMS, dynamic memory sparsification: a gate closes keys one by one (Lancucki et al., 2025; METHOD.md,
section 8).

`alpha_t = 100 a_t - 5`, a_t a zero-initialised map of the layer's normalised hidden state, one per KV head.
Training adds `logsigmoid(-z)` to the logit of key t once it is outside the window, `z = (alpha_{t+1} +
logistic noise) / 0.1`; at inference the key leaves where `alpha_{t+1} > 0`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpop_lightning.baselines.registry import PolicySpec, register
from kvpop_lightning.policy.documents import DocumentLayout
from kvpop_lightning.policy.ragged import RaggedRule, shifted
from kvpop_lightning.policy.scorers import register_scorer
from kvpop_lightning.policy.scorers.gate import GatedRule

ALPHA_SCALE, ALPHA_OFFSET = 100.0, -5.0
TEMPERATURE = 0.1


class DMSGate(GatedRule, RaggedRule):
    """The gates of one layer's KV heads; `gate_width` 0 is the authors' linear map."""

    kind = "dms"

    def gate(self, hidden: Tensor) -> Tensor:
        return ALPHA_SCALE * self.network(hidden[:, None]) + ALPHA_OFFSET


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


register_scorer("dms", DMSGate, ("gate_width", "width", "inputs", "generator"))
register(
    PolicySpec(
        "dms",
        "dms",
        "DMS: a trained gate closes keys, caches of the heads differ",
        trained=True,
        bounded=False,
    )
)
