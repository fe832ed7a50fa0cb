"""A gate per KV head and token that reads the layer's hidden state: what trained baselines decide by.

One output per head, from a linear map or from a layer of SiLU units before it. The output layer starts at
zero, so that a fresh gate gives the same number, its bias, for every token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kvpop_lightning.policy.scorers.base import Scorer
from kvpop_lightning.policy.scorers.learned import head_output
from kvpop_lightning.policy.scorers.projection import InputProjection


def matched_width(head_dim: int, hidden_size: int, inputs: str, width: int) -> int:
    """Units that give a gate about as many parameters as an MLP scorer of `width` on `inputs`, per KV head.

    The scorer has `width (I + 2) + 1` (I = 2 D, Hid or both), the gate `n (Hid + 2) + 1`; at least 1.
    """
    size = {"kv": 2 * head_dim, "hidden": hidden_size, "kv_hidden": 2 * head_dim + hidden_size}[inputs]
    return max(1, round(width * (size + 2) / (hidden_size + 2)))


class GateNetwork(nn.Module):
    """[B, H, T] from hidden states [B, G, T, Hid]; every parameter has a leading head axis.

    Args:
        width: SiLU units per head; 0 = a linear map.
        bias: initial output.
        generator: source of the initial weights of the units; the output layer is 0.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        hidden_size: int,
        width: int,
        *,
        bias: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if width < 0:
            raise ValueError(f"policy.gate.width must be at least 0 (0 = a linear map), got {width}")
        self.width = width
        self.projection = InputProjection(
            num_heads,
            head_dim,
            hidden_size,
            "hidden",
            width or 1,
            gain=1.0 if width else 0.0,
            generator=generator,
        )
        if width:
            self.output_weight = nn.Parameter(torch.zeros(num_heads, width, dtype=torch.float32))
            self.output_bias = nn.Parameter(torch.full((num_heads,), bias, dtype=torch.float32))
        else:
            nn.init.constant_(self.projection.bias, bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, H, T], in the parameters' dtype; gradients reach `hidden` too."""
        nothing = hidden.new_zeros(())  # keys and values are not read
        found: Tensor = self.projection(nothing, nothing, hidden)
        return head_output(found, self.output_weight, self.output_bias) if self.width else found[..., 0]

    def set_standardization(self, mean: Tensor | None, std: Tensor | None) -> None:
        """Mean and standard deviation [Hid] of the hidden state; None = as they are."""
        if mean is not None and std is not None:
            self.projection.set_standardization("hidden", mean, std)

    def options(self) -> dict[str, Any]:
        return {"gate_width": self.width}


class GatedRule(Scorer):
    """A rule that decides by a `GateNetwork`; mixed into the base of its family.

    Args:
        gate_width: SiLU units before the output; 0 = a linear map, None = as many parameters as an MLP scorer
            of `width` on `inputs`.
        generator: source of the units' initial weights.

    Attributes:
        initial: output of a fresh gate.
    """

    gated = True
    initial: float = 0.0

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        hidden_size: int,
        *,
        gate_width: int | None = 0,
        width: int = 64,
        inputs: str = "kv",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(num_heads, head_dim, hidden_size, "hidden")
        if gate_width is None:
            gate_width = matched_width(head_dim, hidden_size, inputs, width)
        self.network = GateNetwork(
            num_heads, head_dim, hidden_size, gate_width, bias=self.initial, generator=generator
        )

    def options(self) -> dict[str, Any]:
        return self.network.options()

    def parameter_count(self) -> int:
        """Trainable numbers of this layer's gates, all heads."""
        return sum(parameter.numel() for parameter in self.parameters())

    def set_standardization(
        self,
        key_mean: Tensor | None = None,
        key_std: Tensor | None = None,
        value_mean: Tensor | None = None,
        value_std: Tensor | None = None,
        hidden_mean: Tensor | None = None,
        hidden_std: Tensor | None = None,
    ) -> None:
        self.network.set_standardization(hidden_mean, hidden_std)
