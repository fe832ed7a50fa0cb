"""Mean and standard deviation per channel over the first training tokens (METHOD.md, section 5)."""

from __future__ import annotations

import torch
from torch import Tensor

STANDARDIZATION_TOKENS = 16_384
"""Tokens that the statistics are taken over."""


class Moments:
    """Streaming mean and standard deviation over tokens, accumulated in float64 (Chan's parallel update).

    `update` takes [B, ..., T, C] (e.g. keys [B, H, T, D], hidden [B, T, Hid]) and a token mask [B, T]; `mean`
    and `std` are [..., C] float64, `std` the population value.
    """

    def __init__(self) -> None:
        self.count = 0
        self._mean: Tensor | None = None
        self._square: Tensor | None = None  # sum of squared deviations

    def update(self, x: Tensor, valid: Tensor | None = None) -> None:
        """Adds the tokens of x where `valid` bool [B, T] (None = all)."""
        x = x.detach().double().movedim(-2, 1)  # [B, T, ..., C]
        x = x.flatten(0, 1) if valid is None else x[valid]
        if len(x) == 0:
            return
        mean = x.mean(dim=0)
        square = (x - mean).square().sum(dim=0)
        if self._mean is None or self._square is None:
            self.count, self._mean, self._square = len(x), mean, square
            return
        total = self.count + len(x)
        shift = mean - self._mean
        self._mean = self._mean + shift * (len(x) / total)
        self._square = self._square + square + shift.square() * (self.count * len(x) / total)
        self.count = total

    @property
    def mean(self) -> Tensor:
        """[..., C] float64."""
        assert self._mean is not None, "no token seen yet"
        return self._mean

    @property
    def std(self) -> Tensor:
        """[..., C] float64."""
        assert self._square is not None, "no token seen yet"
        return torch.sqrt(self._square / self.count)
