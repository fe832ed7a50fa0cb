"""Linear map of a token's standardised key, value and hidden state, per KV head (METHOD.md, section 5)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

SMALLEST_STD = 1e-6
"""A channel that varies less than this is constant: it is centred, not scaled."""


def unit_normal(*size: int, generator: torch.Generator | None) -> Tensor:
    """float32 on the default device (meta too), drawn on the CPU: one seed gives one start everywhere."""
    drawn = torch.randn(size, generator=generator, device="cpu", dtype=torch.float32)
    return drawn.to(torch.get_default_device())


def _pieces(length: int, device: torch.device) -> int:
    """Into how many equal pieces a row's product is cut.

    A GPU sums the gradient of a small weight over a long row with few of its processors: 1.1 ms for one of
    32768 tokens. As pieces of about 1024 tokens, added up afterwards, all of them take part.
    """
    pieces = 1
    while device.type != "cpu" and length % (2 * pieces) == 0 and length // (2 * pieces) >= 1024:
        pieces *= 2
    return pieces


class InputProjection(nn.Module):
    """`x_t W_h + b_h` with `x_t` = the standardised [key; value], [hidden] or [key; value; hidden] of token
    t.

    The weight is stored in parts, `key_weight`, `value_weight` [H, D, P] and `hidden_weight` [H, Hid, P], so
    that a hidden state, shared by the heads of a layer, is multiplied as it is and never copied per head.

    Args:
        gain: scale of the initial weights, one number or one per output; their standard deviation is
            gain / sqrt(inputs), so that standardised inputs give outputs of standard deviation `gain`.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        hidden_size: int,
        inputs: str,
        outputs: int,
        *,
        gain: float | Tensor = 1.0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        sizes = {"key": head_dim, "value": head_dim, "hidden": hidden_size}
        self.parts = {"kv": ("key", "value"), "hidden": ("hidden",), "kv_hidden": ("key", "value", "hidden")}[
            inputs
        ]
        scale = torch.as_tensor(gain, dtype=torch.float32) / math.sqrt(
            sum(sizes[part] for part in self.parts)
        )
        for part in self.parts:
            weight = unit_normal(num_heads, sizes[part], outputs, generator=generator) * scale
            self.register_parameter(f"{part}_weight", nn.Parameter(weight))
            groups = 1 if part == "hidden" else num_heads
            self.register_buffer(f"{part}_mean", torch.zeros(groups, sizes[part], dtype=torch.float32))
            self.register_buffer(f"{part}_std", torch.ones(groups, sizes[part], dtype=torch.float32))
        self.bias = nn.Parameter(torch.zeros(num_heads, outputs, dtype=torch.float32))

    def set_standardization(self, part: str, mean: Tensor, std: Tensor) -> None:
        """Sets the statistics of `part`, [H, D] or [Hid]; ignored when the projection does not read
        it."""
        if part not in self.parts:
            return
        own_mean, own_std = self._tensor(f"{part}_mean"), self._tensor(f"{part}_std")
        mean, std = mean.to(own_mean).reshape(-1, mean.shape[-1]), std.to(own_std).reshape(-1, std.shape[-1])
        if mean.shape != own_mean.shape or std.shape != own_std.shape:
            raise ValueError(
                f"standardisation of {part} must have shape {tuple(own_mean.shape)}, "
                f"got {tuple(mean.shape)} and {tuple(std.shape)}"
            )
        own_mean.copy_(mean)
        own_std.copy_(torch.where(std > SMALLEST_STD, std, torch.ones_like(std)))

    def _tensor(self, name: str) -> Tensor:
        """Parameter or buffer by name (`get_parameter` refuses what `functional_call` puts in place)."""
        tensor: Tensor = getattr(self, name)
        return tensor

    def standardize(self, key: Tensor, value: Tensor, hidden: Tensor | None) -> dict[str, Tensor]:
        """The parts that are read, as (x - mean) / std in the parameters' dtype; shapes as given."""
        given = {"key": key, "value": value, "hidden": hidden}
        standardized = {}
        for part in self.parts:
            x = given[part]
            assert x is not None, f"{part} is read but was not given"
            scale = self._tensor(f"{part}_std").reciprocal()[:, None]  # [H or G, 1, size]
            shift = -self._tensor(f"{part}_mean")[:, None] * scale
            standardized[part] = torch.addcmul(shift, x.to(self.bias.dtype), scale)
        return standardized

    def project(self, standardized: dict[str, Tensor], outputs: slice = slice(None)) -> Tensor:
        """[B, H, T, P'] for the chosen output columns, from what `standardize` returned."""
        bias = self.bias[:, outputs]
        heads, columns = bias.shape
        result: Tensor | None = None
        if "key" in standardized:
            batch, _, length, size = standardized["key"].shape
            pieces = _pieces(length, bias.device)
            lead = (batch, heads, pieces)
            result = bias[None, :, None, None].expand(*lead, 1, columns).reshape(-1, 1, columns)
            for part in ("key", "value"):
                weight = self._tensor(f"{part}_weight")[:, None, :, outputs].expand(*lead, size, columns)
                x = standardized[part].reshape(-1, length // pieces, size)
                result = torch.baddbmm(result, x, weight.reshape(-1, size, columns))
            result = result.view(batch, heads, length, columns)
        if "hidden" in standardized:
            hidden = standardized["hidden"]  # [B, G, T, Hid]
            batch, groups, length, size = hidden.shape
            weight = self._tensor("hidden_weight")[..., outputs].reshape(
                groups, heads // groups, size, columns
            )
            weight = weight.transpose(1, 2).reshape(groups, size, -1)  # heads of a group side by side
            shared = (hidden @ weight).view(batch, groups, length, heads // groups, columns)
            shared = shared.transpose(2, 3).reshape(batch, heads, length, columns)
            result = shared + bias[:, None] if result is None else result + shared
        assert result is not None
        return result

    def forward(self, key: Tensor, value: Tensor, hidden: Tensor | None) -> Tensor:
        """[B, H, T, P] from key, value [B, H, T, D] and hidden [B, G, T, Hid]."""
        return self.project(self.standardize(key, value, hidden))
