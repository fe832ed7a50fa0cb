"""Runs the scorers of several layers as one: parameters concatenated along the head axis.

Training many small scorers one layer at a time is bound by the number of operations. Every parameter and
buffer of a scorer carries a leading head (or group) axis, so

    stacked = stack_scorers(policy.scorers)                    # name -> [L * H, ...]
    score = call_stacked(policy.scorers[0], stacked, key, ...)  # key [B, L * H, T, D], hidden [B, L, T, Hid]

equals the layers one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from kvpop_lightning.policy.scorers.base import Scorer


def stack_scorers(scorers: Iterable[Scorer]) -> dict[str, Tensor]:
    """Parameters and buffers of equally shaped scorers, detached copies concatenated along the first axis.

    Raises:
        ValueError: the scorers are not of one type and shape.
    """
    layers = list(scorers)
    first = {name: x.shape for name, x in layers[0].state_dict().items()}
    for index, scorer in enumerate(layers):
        same_shapes = {name: x.shape for name, x in scorer.state_dict().items()} == first
        if type(scorer) is not type(layers[0]) or not same_shapes:
            raise ValueError(
                f"scorers can only be stacked when they are alike; that of layer {index} differs"
            )
    states = [scorer.state_dict() for scorer in layers]
    return {name: torch.cat([state[name] for state in states]) for name in first}


@torch.no_grad()
def unstack_scorers(scorers: Sequence[Scorer], stacked: Mapping[str, Tensor]) -> None:
    """Writes stacked tensors back into the layers' scorers (the inverse of `stack_scorers`)."""
    for name, x in stacked.items():
        for scorer, part in zip(scorers, x.chunk(len(scorers)), strict=True):
            own = dict(scorer.named_parameters()) | dict(scorer.named_buffers())
            own[name].copy_(part)


def call_stacked(
    scorer: Scorer,
    stacked: Mapping[str, Tensor],
    key: Tensor,
    value: Tensor,
    hidden: Tensor | None,
    **kwargs: Any,
) -> Tensor:
    """`scorer.forward` with the stacked tensors in place of its own; heads ordered layer by layer.

    key, value [B, L * H, T, D], hidden [B, L, T, Hid] or None -> score [B, L * H, T].
    """
    result = torch.func.functional_call(scorer, dict(stacked), (key, value, hidden), kwargs)
    return cast(Tensor, result)
