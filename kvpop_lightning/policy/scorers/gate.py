"""A gate per KV head and token that reads the layer's hidden state: what trained baselines decide by.

One output per head (two where a rule needs them), from a linear map or from a layer of SiLU units before it.
The output layer starts at zero, so that a fresh gate gives the same number, its bias, for every token. In
place of the map a gate may read a channel borrowed from query and key (`policy/borrow.py`).
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvpop_lightning.policy.scorers.base import Scorer
from kvpop_lightning.policy.scorers.learned import head_output
from kvpop_lightning.policy.scorers.projection import InputProjection

GATE_SOURCES = ("hidden", "channel")


def matched_width(head_dim: int, hidden_size: int, inputs: str, width: int, outputs: int = 1) -> int:
    """Units that give a gate about as many parameters as an MLP scorer of `width` on `inputs`, per KV head.

    The scorer has `width (I + 2) + 1` (I = 2 D, Hid or both), the gate of O outputs `n (Hid + 1 + O) + O`; at
    least 1.
    """
    size = {"kv": 2 * head_dim, "hidden": hidden_size, "kv_hidden": 2 * head_dim + hidden_size}[inputs]
    return max(1, round(width * (size + 2) / (hidden_size + 1 + outputs)))


class GateNetwork(nn.Module):
    """[B, H, T] (several outputs: [B, H, T, O]) from hidden states [B, G, T, Hid]; every parameter has a
    leading head axis.

    Args:
        width: SiLU units per head; 0 = a linear map.
        bias: initial output.
        outputs: O, numbers per head and token.
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
        outputs: int = 1,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if width < 0:
            raise ValueError(f"policy.gate.width must be at least 0 (0 = a linear map), got {width}")
        self.width, self.outputs = width, outputs
        self.projection = InputProjection(
            num_heads,
            head_dim,
            hidden_size,
            "hidden",
            width or outputs,
            gain=1.0 if width else 0.0,
            generator=generator,
        )
        if width:
            several = (outputs,) if outputs > 1 else ()
            self.output_weight = nn.Parameter(torch.zeros(num_heads, width, *several, dtype=torch.float32))
            self.output_bias = nn.Parameter(torch.full((num_heads, *several), bias, dtype=torch.float32))
        else:
            nn.init.constant_(self.projection.bias, bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, H, T] or [B, H, T, O], in the parameters' dtype; gradients reach `hidden` too."""
        nothing = hidden.new_zeros(())  # keys and values are not read
        found: Tensor = self.projection(nothing, nothing, hidden)
        if not self.width:
            return found[..., 0] if self.outputs == 1 else found
        if self.outputs == 1:
            return head_output(found, self.output_weight, self.output_bias)
        return F.silu(found) @ self.output_weight + self.output_bias[:, None]

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
        gate_source: `hidden`, a map of the hidden state; `channel`, a borrowed channel of query (and key),
            without parameters of its own: what is trained is the base. What the rule is given as hidden state
            is then what `borrow` returns.
        generator: source of the units' initial weights.

    Attributes:
        initial: output of a fresh gate.
        outputs: numbers that the rule reads per head and token.
    """

    gated = True
    initial: float = 0.0
    outputs: ClassVar[int] = 1

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        hidden_size: int,
        *,
        gate_width: int | None = 0,
        gate_source: str = "hidden",
        width: int = 64,
        inputs: str = "kv",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(num_heads, head_dim, hidden_size, "hidden")
        if gate_source not in GATE_SOURCES:
            raise ValueError(
                f"policy.gate.source must be one of {', '.join(GATE_SOURCES)}, got {gate_source!r}"
            )
        self.network: GateNetwork | None = None
        if gate_source == "channel":
            self.borrows = True
            return
        if gate_width is None:
            gate_width = matched_width(head_dim, hidden_size, inputs, width, self.outputs)
        self.network = GateNetwork(
            num_heads,
            head_dim,
            hidden_size,
            gate_width,
            bias=self.initial,
            outputs=self.outputs,
            generator=generator,
        )

    def options(self) -> dict[str, Any]:
        return {"gate_source": "channel"} if self.network is None else self.network.options()

    def read(self, hidden: Tensor) -> Tensor:
        """The gates' numbers [B, Hkv, T] (several: [B, Hkv, T, O]) from hidden [B, T, Hid], or from borrowed
        channels [B, T, O * Hkv].
        """
        if self.network is not None:
            found: Tensor = self.network(hidden[:, None])
            return found
        found = hidden.unflatten(-1, (self.outputs, -1)).permute(0, 3, 1, 2)
        return found[..., 0] if self.outputs == 1 else found

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
        if self.network is not None:
            self.network.set_standardization(hidden_mean, hidden_std)
