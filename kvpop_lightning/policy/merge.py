"""Keys and values that are merged into weighted means (DMC): the running accumulation as a parallel scan.

`z_i = a_i z_{i-1} + w_i`, `k_i = (a_i z_{i-1} k_{i-1} + w_i k_i) / z_i`, values likewise: with a_i = 1 token
i is taken into the entry before it, with 0 it starts one of its own. The sums `z k`, `z v` and z obey one
linear recurrence, whose factors lie in [0, 1], so that nothing overflows and no logarithm of 0 is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvpop_lightning.policy.documents import DocumentLayout
from kvpop_lightning.policy.rope import angles, rotate


def _scan(factor: Tensor, x: Tensor) -> Tensor:
    """`s_i = factor_i s_{i-1} + x_i` along the second axis from the end, log2(T) rounds; factor [..., T]."""
    step, length = 1, x.shape[-2]
    factor = factor[..., None]
    while step < length:
        earlier = x[..., :-step, :] * factor[..., step:, :]
        x = torch.cat([x[..., :step, :], x[..., step:, :] + earlier], -2)
        wider = factor[..., step:, :] * factor[..., :-step, :]
        factor = torch.cat([factor[..., :step, :], wider], -2)
        step *= 2
    return x


class _Recurrence(torch.autograd.Function):
    """The scan; its gradient is the same scan from the end, so that no round's sums are kept."""

    @staticmethod
    def forward(context: Any, factor: Tensor, x: Tensor) -> Tensor:
        sums = _scan(factor, x)
        context.save_for_backward(factor, sums)
        return sums

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        factor, sums = context.saved_tensors
        following = torch.cat([factor[..., 1:], torch.zeros_like(factor[..., :1])], -1)
        through = _scan(following.flip(-1), gradients[0].flip(-2)).flip(-2)
        before = torch.cat([torch.zeros_like(sums[..., :1, :]), sums[..., :-1, :]], -2)
        return (through * before).sum(-1), through


def recurrence(factor: Tensor, x: Tensor) -> Tensor:
    """`s_i = factor_i s_{i-1} + x_i`, `s_{-1} = 0`; differentiable (once) in both.

    Args:
        factor: [..., T] in [0, 1].
        x: [..., T, N].
    """
    result: Tensor = _Recurrence.apply(factor, x)
    return result


def weighted(
    key: Tensor, value: Tensor, importance: Tensor, position: Tensor, inv_freq: Sequence[float]
) -> Tensor:
    """What a token adds to its entry's sums, [B, H, T, 2 D + 1]: `w k` before RoPE, `w v`, w.

    Args:
        key: [B, H, T, D] after RoPE; value [B, H, T, D]; importance [B, H, T] sets the dtype.
        position: int64 [B or 1, T], what RoPE turned by, or any other count of the text's tokens.
    """
    work = importance.dtype
    plain = rotate(key.to(work), -angles(position, inv_freq)[:, None])
    one = torch.ones_like(importance)[..., None]
    return torch.cat([plain, value.to(work), one], -1) * importance[..., None]


def entries(sums: Tensor, position: Tensor, inv_freq: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Keys and values [B, H, T, D] of entries from their sums; a key is turned to its newest token's
    position. An empty entry is 0.
    """
    dim = sums.shape[-1] // 2
    weight = sums[..., -1:]
    mean = sums[..., :-1] / torch.where(weight > 0, weight, torch.ones_like(weight))
    return rotate(mean[..., :dim], angles(position, inv_freq)[:, None]), mean[..., dim:]


def merged_rows(
    key: Tensor,
    value: Tensor,
    merges: Tensor,
    importance: Tensor,
    layout: DocumentLayout,
    inv_freq: Sequence[float],
) -> tuple[Tensor, Tensor]:
    """Every token's entry as it is when the token has come, in whole rows; no document reaches the next.

    Args:
        key, value: [B, H, T, D], key after RoPE.
        merges: [B, H, T] in [0, 1], how far each token is taken into the entry before it.
        importance: [B, H, T] > 0, the tokens' weights; float32 or float64, in which it is computed.

    Returns:
        Keys and values [B, H, T, D] in the dtype of key and value.
    """
    real, first = layout.real[:, None], (layout.position == 0)[:, None]
    merges = merges.to(importance.dtype).masked_fill(first, 0.0)
    merges = torch.where(real, merges, torch.ones_like(merges))  # padding leaves the entry as it is
    importance = torch.where(real, importance, torch.zeros_like(importance))
    sums = recurrence(merges, weighted(key, value, importance, layout.position, inv_freq))
    keys, values = entries(sums, layout.position, inv_freq)
    return keys.to(key.dtype), values.to(value.dtype)
