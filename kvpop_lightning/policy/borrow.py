"""Gates that read a channel borrowed from query or key, as the authors of DMS and DMC do (METHOD.md, section
8).

The borrowed channel is the last one before RoPE. It says when to close or to merge, and the attention does
without it. A gate so needs no parameters of its own, and what is trained is the base.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvpop_lightning.policy.rope import angles


def lend_channel(x: Tensor, position: Tensor, inv_freq: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Takes the last channel of queries or keys out of the attention.

    Before RoPE the channel becomes 0; of what RoPE then turns into its place, nothing is left either.

    Args:
        x: [B, H, T, D] after RoPE; channel D - 1 is paired with D / 2 - 1.
        position: int64 [B or 1, T], what RoPE turned by.
        inv_freq: radians per token of the D / 2 rotations.

    Returns:
        What is left of `x`, and the channel before RoPE [B, H, T].
    """
    half = x.shape[-1] // 2
    angle = angles(position, inv_freq[half - 1 : half])[:, None, :, 0]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x[..., half - 1], x[..., -1]
    partner, channel = first * cos + second * sin, second * cos - first * sin
    left = torch.cat(
        [
            x[..., : half - 1],
            (partner * cos)[..., None],
            x[..., half:-1],
            torch.zeros_like(channel)[..., None],
        ],
        -1,
    )
    return left, channel
