"""A decay of its own for every layer and KV head from three numbers (METHOD.md, section 2).

Free decays per head would be layers * heads numbers, too many to search; their order carries the structure:
early layers look nearby, late ones further back or the other way round. What is spread is the rate
`-log(gamma)`, on a logarithmic scale, so that every result is a decay in (0, 1] and 0 changes nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def spread_decay(
    decay: Any, num_layers: int, num_heads: int, *, depth: float = 0.0, heads: float = 0.0
) -> Tensor:
    """`gamma[l, h] = exp(log(decay) * exp(depth * x_l + heads * x_h))`, float64 [layers, KV heads].

    Args:
        decay: gamma in (0, 1], one number; it is that of the middle layer and head.
        depth: x_l runs evenly from -1 in the first layer to 1 in the last: positive = later layers forget
            sooner. One layer: x = 0.
        heads: the same over the KV heads of a layer.

    Raises:
        ValueError: decay is not one number in (0, 1].
    """
    gamma = torch.as_tensor(decay, dtype=torch.float64)
    if gamma.dim() != 0:
        raise ValueError(
            "policy.decay_depth and policy.decay_heads spread one decay: give policy.decay as one number, or "
            "set both to 0"
        )
    if not bool((gamma > 0) & (gamma <= 1)):
        raise ValueError(f"policy.decay must lie in (0, 1] (1 = no decay), got {float(gamma)}")
    exponent = depth * _evenly(num_layers)[:, None] + heads * _evenly(num_heads)[None, :]
    # The smallest positive double: a rate so high that exp underflows would leave the allowed range.
    return torch.exp(gamma.log() * exponent.exp()).clamp(min=torch.finfo(torch.float64).tiny)


def _evenly(count: int) -> Tensor:
    return (
        torch.linspace(-1, 1, count, dtype=torch.float64)
        if count > 1
        else torch.zeros(1, dtype=torch.float64)
    )
