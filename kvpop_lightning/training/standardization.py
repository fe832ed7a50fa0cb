"""Means and standard deviations of the scorers' inputs, over the first training tokens (METHOD.md,
section 5).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from kvpop_lightning.policy.scorers import STANDARDIZATION_TOKENS, Moments
from kvpop_lightning.training.feature_store import Features

_INPUTS = ("key", "value", "hidden")


def standardize_scorers(
    policy: Any, rows: Iterable[Features], *, tokens: int = STANDARDIZATION_TOKENS
) -> int:
    """Sets every layer's statistics from the features of training rows, in order, until `tokens` real tokens
    are seen.

    Args:
        policy: `model.kvpop`; its scorers keep the statistics as buffers, saved with them.
        rows: features without batch dimension: `key`, `value` [L, Hkv, T, D], optionally `hidden` [L, T,
            Hid], `document_ids` [T]; only as many are read as are needed.
        tokens: real tokens to use; the last row is cut.

    Returns:
        tokens used.
    """
    layers = len(policy.scorers)
    names = [name for name in _INPUTS if name != "hidden" or policy.needs_hidden]
    moments = {name: [Moments() for _ in range(layers)] for name in names}
    seen = 0
    for row in rows:
        valid = (row["document_ids"] >= 0).clone()
        valid &= valid.long().cumsum(-1) <= tokens - seen
        for name in names:
            for layer in range(layers):  # one layer at a time: float64 copies of a whole row would be large
                moments[name][layer].update(row[name][layer][None], valid[None])
        seen += int(valid.sum())
        if seen >= tokens:
            break
    if seen:
        device = policy.decay.device
        for layer, scorer in enumerate(policy.scorers):
            statistics: dict[str, torch.Tensor] = {}
            for name in names:
                statistics[f"{name}_mean"] = moments[name][layer].mean.to(device)
                statistics[f"{name}_std"] = moments[name][layer].std.to(device)
            scorer.set_standardization(**statistics)
    return seen
