"""Rotary positions, as far as rules need them that look behind or beyond them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def inverse_frequencies(head_dim: int, theta: float = 10000.0) -> list[float]:
    """Radians per token of each of the `head_dim / 2` rotations, as plain RoPE has them."""
    return [theta ** (-2 * n / head_dim) for n in range(head_dim // 2)]


def rotate(x: Tensor, angle: Tensor) -> Tensor:
    """`x` [..., D] turned by `angle` [..., D / 2] radians; channel n is paired with n + D / 2 (Llama, Qwen,
    Mistral).
    """
    first, second = x.chunk(2, dim=-1)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def angles(position: Tensor, frequencies: Sequence[float]) -> Tensor:
    """float64 [..., D / 2]: the rotation of each position int64 [...]."""
    return position[..., None].to(torch.float64) * torch.tensor(
        list(frequencies), dtype=torch.float64, device=position.device
    )
