"""Random scores: the control that every learned scorer must beat (METHOD.md, section 7)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvpop_lightning.baselines.registry import PolicySpec, register
from kvpop_lightning.policy.scorers import Scorer, register_scorer

_LOW_32 = 0xFFFFFFFF


def hash_uniform(*keys: Tensor | int) -> Tensor:
    """float32 in (0, 1), the same on every device, from integers that broadcast (one a tensor at least).

    A 32-bit xor-shift-multiply mix per key. Products stay below 2^63, so no step relies on overflow.
    """
    state: Tensor | int = 0
    for key in keys:
        # Adding an odd constant keeps (0, 0, ...) from staying 0; the mix lets every key stir all bits.
        state = ((state ^ key) + 0x3C6EF35F) & _LOW_32
        for shift, multiplier in ((16, 0x45D9F3B5), (15, 0x2C1B3C6D), (16, 0x297A2D39)):
            state = ((state ^ (state >> shift)) * multiplier) & _LOW_32
        state = state ^ (state >> 15)
    assert isinstance(state, Tensor)
    return ((state >> 9).to(torch.float32) + 0.5) * 2.0**-23  # 23 bits and a half are exact in float32


class RandomScorer(Scorer):
    """A score per (seed, layer, head, position), uniform in (0, scale).

    Without decay only the order matters; with decay `scale` is the spread in nats that competes with it (1 by
    default, about three decay steps of the demo).
    """

    kind = "random"
    heads: Tensor
    layers: Tensor

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        hidden_size: int,
        *,
        layer: int = 0,
        seed: int = 0,
        scale: float = 1.0,
    ) -> None:
        super().__init__(num_heads, head_dim, hidden_size)
        if not scale > 0:
            raise ValueError(f"the random rule's scale must be above 0, got {scale}")
        self.layer, self.seed, self.scale = layer, seed, scale
        self.register_buffer("heads", torch.arange(num_heads))
        self.register_buffer("layers", torch.full((num_heads,), layer, dtype=torch.int64))

    def options(self) -> dict[str, Any]:
        return {"layer": self.layer, "seed": self.seed, "scale": self.scale}

    def score_rows(
        self, key: Tensor, value: Tensor, hidden: Tensor | None, position: Tensor, document_ids: Tensor | None
    ) -> Tensor:
        uniform = hash_uniform(self.seed, self.layers[:, None], self.heads[:, None], position[:, None])
        return self.scale * uniform.to(self.dtype_for(key))


register_scorer("random", RandomScorer, ("layer", "seed", "scale"))
register(PolicySpec("random", "random", "random scores", may_decay=True))
