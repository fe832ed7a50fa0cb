"""The stateless learned scorers: linear, and a two-layer MLP (METHOD.md, section 5: KVpop_mlp)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvpop_lightning.policy.scorers.base import Scorer
from kvpop_lightning.policy.scorers.projection import InputProjection, unit_normal

OUTPUT_GAIN = 0.1
"""Initial standard deviation of a score, in nats: small beside the decay of one step (0.3), so that training
starts close to pure decay, and not zero, so that an untrained policy is not silently a sliding window."""


class LearnedScorer(Scorer):
    """A scorer whose parameters begin with an `InputProjection` (`self.projection`)."""

    projection: InputProjection

    def set_standardization(
        self,
        key_mean: Tensor | None = None,
        key_std: Tensor | None = None,
        value_mean: Tensor | None = None,
        value_std: Tensor | None = None,
        hidden_mean: Tensor | None = None,
        hidden_std: Tensor | None = None,
    ) -> None:
        """See `Scorer.set_standardization`; the statistics are buffers, saved with the scorer.

        Raises:
            ValueError: wrong shape.
        """
        given = {
            "key": (key_mean, key_std),
            "value": (value_mean, value_std),
            "hidden": (hidden_mean, hidden_std),
        }
        for part, (mean, std) in given.items():
            if mean is not None and std is not None:
                self.projection.set_standardization(part, mean, std)

    def parameter_count(self) -> int:
        """Trainable numbers of this layer's scorer, all heads."""
        return sum(parameter.numel() for parameter in self.parameters())


class LinearScorer(LearnedScorer):
    """`r_t = w_h . x_t + b_h`; I + 1 parameters per head, I the size of x_t (2D, Hid or 2D + Hid)."""

    kind = "linear"

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        hidden_size: int,
        *,
        inputs: str = "kv",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(num_heads, head_dim, hidden_size, inputs)
        self.projection = InputProjection(
            num_heads, head_dim, hidden_size, inputs, 1, gain=OUTPUT_GAIN, generator=generator
        )

    def options(self) -> dict[str, Any]:
        return {"inputs": self.inputs}

    def score_rows(
        self, key: Tensor, value: Tensor, hidden: Tensor | None, position: Tensor, document_ids: Tensor | None
    ) -> Tensor:
        return self.projection(key, value, hidden)[..., 0]


class MLPScorer(LearnedScorer):
    """`r_t = w_h . silu(W_h x_t + b_h) + c_h`; width * (I + 2) + 1 parameters per head."""

    kind = "mlp"

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        hidden_size: int,
        *,
        inputs: str = "kv",
        width: int = 64,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(num_heads, head_dim, hidden_size, inputs)
        if width < 1:
            raise ValueError(f"scorer.width must be at least 1, got {width}")
        self.width = width
        self.projection = InputProjection(
            num_heads, head_dim, hidden_size, inputs, width, generator=generator
        )
        self.output_weight = nn.Parameter(
            unit_normal(num_heads, width, generator=generator) * OUTPUT_GAIN / (0.6 * width**0.5)
        )  # silu of a unit normal has root mean square 0.6
        self.output_bias = nn.Parameter(torch.zeros(num_heads, dtype=torch.float32))

    def options(self) -> dict[str, Any]:
        return {"inputs": self.inputs, "width": self.width}

    def score_rows(
        self, key: Tensor, value: Tensor, hidden: Tensor | None, position: Tensor, document_ids: Tensor | None
    ) -> Tensor:
        return head_output(self.projection(key, value, hidden), self.output_weight, self.output_bias)


def head_output(activation: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`silu(activation [B, H, T, W]) . weight [H, W] + bias [H]` -> [B, H, T]."""
    return (F.silu(activation) @ weight[:, :, None]).squeeze(-1) + bias[:, None]
