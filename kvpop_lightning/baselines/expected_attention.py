"""Expected Attention: keys that coming queries should attend stay (Devoto et al., 2025)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvpop_lightning.baselines.registry import PolicySpec, register
from kvpop_lightning.policy.rope import angles, inverse_frequencies, rotate
from kvpop_lightning.policy.scorers import register_scorer
from kvpop_lightning.policy.stepwise import EMPTY, Held, Moment, StepwiseRule


class ExpectedAttention(StepwiseRule):
    """Score `softmax(k mu / sqrt(D) + k' Sigma k / (2 D)) * ||v||` over the held keys, mean over the group.

    mu and Sigma are mean and covariance of the queries so far before RoPE (the first `skip` left out), turned
    by RoPE averaged over the next `future` positions. They are kept per query head, D + D^2 numbers, and
    counted. With another factor on the logits than 1 / sqrt(D), that one is used. KVpop's sinks and window
    are protected.

    Args:
        inv_freq: radians per token of the model's rotations (`retrofit` reads them); None = theta 10000.
        groups: query heads per KV head, to know the size of the state beforehand.
    """

    kind = "expected_attention"

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        hidden_size: int,
        *,
        future: int = 512,
        skip: int = 4,
        inv_freq: Sequence[float] | None = None,
        groups: int = 1,
    ) -> None:
        super().__init__(num_heads, head_dim, hidden_size)
        if future < 1 or skip < 0:
            raise ValueError(f"expected_attention: needs future >= 1 and skip >= 0, got {future} and {skip}")
        self.future, self.skip, self.groups = future, skip, groups
        self.inv_freq = list(inv_freq) if inv_freq is not None else inverse_frequencies(head_dim)
        ahead = angles(torch.arange(1, future + 1), self.inv_freq)
        self.mean_cos, self.mean_sin = ahead.cos().mean(0), ahead.sin().mean(0)

    def options(self) -> dict[str, Any]:
        return {"future": self.future, "skip": self.skip, "inv_freq": self.inv_freq, "groups": self.groups}

    def new_state(self, batch: int, heads: int, like: Tensor) -> dict[str, Tensor]:
        group, dim = self.groups, self.head_dim
        return {
            "count": like.new_zeros(batch, 1),
            "scale": like.new_zeros(batch, 1),
            "sum": like.new_zeros(batch, heads, group, dim),
            "square": like.new_zeros(batch, heads, group, dim, dim),
        }

    def observe(self, held: Held, moment: Moment) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        state = held.state
        angle = angles(-moment.position, self.inv_freq)[:, None, None]
        query = rotate(moment.query.to(state["sum"].dtype), angle)
        query = query.masked_fill((moment.position < self.skip)[:, None, None, None], 0.0)
        counts = (moment.position >= self.skip).to(query.dtype)[:, None]
        return held.notes, {
            "count": state["count"] + counts,
            "scale": torch.full_like(state["scale"], moment.scale),
            "sum": state["sum"] + query,
            "square": state["square"] + query[..., :, None] * query[..., None, :],
        }

    def value_of(self, held: Held, newest: Tensor) -> Tensor:
        state = held.state
        count = state["count"].clamp(min=1)[..., None, None]
        mean, square = state["sum"] / count, state["square"] / count[..., None]
        keys = held.keys.to(mean.dtype)
        scale = state["scale"][..., None, None]
        # k' R S R' k: turning the keys back is less work than turning the covariance.
        turned = self._behind(keys, newest)[:, :, None]
        product = mean @ turned[:, :, 0].mT
        spread = ((turned @ square) * turned).sum(-1) - product.square()
        logits = product * scale + spread * scale.square() / 2
        logits = logits.masked_fill((held.position == EMPTY)[:, :, None], -torch.inf)
        return torch.softmax(logits, dim=-1).mean(2) * held.values.to(mean.dtype).norm(dim=-1)

    def _behind(self, x: Tensor, newest: Tensor) -> Tensor:
        """x [B, ..., D] under the transpose of RoPE averaged over `future` positions after `newest` [B]."""
        cos, sin = self.mean_cos.to(x.device, x.dtype), self.mean_sin.to(x.device, x.dtype)
        first, second = x.chunk(2, dim=-1)
        averaged = torch.cat([first * cos + second * sin, second * cos - first * sin], dim=-1)
        now = angles(-newest, self.inv_freq).view(-1, *[1] * (x.dim() - 2), self.head_dim // 2)
        return rotate(averaged, now)


register_scorer("expected_attention", ExpectedAttention, ("future", "skip", "inv_freq", "groups"))
register(
    PolicySpec(
        "expected_attention",
        "expected_attention",
        "keys that future queries are expected to attend",
        reads_rope=True,
    )
)
