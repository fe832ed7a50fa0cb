"""How the next token is chosen: per request, from its own seed, whatever runs beside it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """Settings of one request.

    Args:
        max_new_tokens: at most so many new tokens.
        temperature: 0 = greedy.
        top_k: only the k most likely tokens; 0 = all.
        top_p: of those, the smallest set with at least this share of their mass.
        min_p: of those, tokens at least `min_p` times as likely as the likeliest.
        seed: of this request; sample number j of a prompt draws from (seed, j).
        samples: continuations of the prompt, which is read once.
        stop: texts that end a continuation; they are not part of it.
        ignore_eos: go on behind the model's end token.

    Raises:
        ValueError: a value out of range, named.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    samples: int = 1
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name, fine, range_ in (
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("temperature", self.temperature >= 0, "at least 0 (0 = greedy)"),
            ("top_k", self.top_k >= 0, "at least 0 (0 = all)"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1]"),
            ("samples", self.samples >= 1, "at least 1"),
        ):
            if not fine:
                raise ValueError(f"{name} must be {range_}, got {getattr(self, name)}")
        if isinstance(self.stop, str) or not all(self.stop):
            raise ValueError(f"stop must be a tuple of texts that are not empty, got {self.stop!r}")

    def numbers(self, sample: int) -> random.Random:
        """The random numbers of one sample, one a token."""
        return random.Random(f"{self.seed}/{sample}")


def choose(logits: Tensor, settings: Sequence[Sampling], uniform: Sequence[float]) -> list[int]:
    """Next token of each row: logits [B, V]; `uniform` in [0, 1), one a row (unused by greedy rows)."""
    if all(one.temperature == 0 for one in settings):
        return logits.argmax(dim=-1).tolist()
    work = logits.double()

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device)[:, None]

    work = work / column([one.temperature or 1.0 for one in settings])
    probability, order = work.softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(probability.shape[-1], device=logits.device)
    top_k = column([one.top_k or probability.shape[-1] for one in settings])
    probability = probability.masked_fill(rank >= top_k, 0.0)
    probability = probability / probability.sum(dim=-1, keepdim=True)
    before = probability.cumsum(dim=-1) - probability
    # The likeliest token always stays; sums of rounded shares may reach 1 too early.
    cut = (before >= column([one.top_p for one in settings])) & (rank > 0)
    cut |= probability < column([one.min_p for one in settings]) * probability[:, :1]
    probability = probability.masked_fill(cut, 0.0)
    share = probability.cumsum(dim=-1)
    place = (share <= column(list(uniform)) * share[:, -1:]).sum(dim=-1)
    last = (probability > 0).sum(dim=-1) - 1
    place = torch.minimum(place, last)
    place = torch.where(column([one.temperature for one in settings])[:, 0] == 0, 0, place)
    return order.gather(-1, place[:, None])[:, 0].tolist()
