"""How the next token is chosen: per request, from its own seed, whatever runs beside it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

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
        for name, kinds in _KINDS.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, kinds):
                what = "a whole number" if kinds is int else "a number"
                raise ValueError(f"{name} must be {what}, got {value!r}")
        for name, fine, range_ in (
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("temperature", 0 <= self.temperature < inf, "a finite number, at least 0 (0 = greedy)"),
            ("top_k", self.top_k >= 0, "at least 0 (0 = all)"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1]"),
            ("samples", self.samples >= 1, "at least 1"),
        ):
            if not fine:
                raise ValueError(f"{name} must be {range_}, got {getattr(self, name)}")
        if isinstance(self.stop, str) or not all(self.stop):
            raise ValueError(f"stop must be texts that are not empty, as in stop=('END',), got {self.stop!r}")

    def numbers(self, sample: int) -> random.Random:
        """The random numbers of one sample, one a token."""
        return random.Random(f"{self.seed}/{sample}")


_KINDS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("max_new_tokens", "top_k", "seed", "samples"), int),
    **dict.fromkeys(("temperature", "top_p", "min_p"), (int, float)),
}


def choose(logits: Tensor, settings: Sequence[Sampling], uniform: Sequence[float]) -> list[int]:
    """Next token of each row: logits [B, V]; `uniform` in [0, 1), one a row (unused by greedy rows).

    A row is drawn by its own settings alone: by falling probability where top-k or top-p cut it off, which
    takes a sort of the vocabulary, in the vocabulary's order otherwise. On a GPU every operation is a launch
    that the token waits for, so what no row asks for is left out where leaving it out changes no bit.
    """
    groups: dict[Callable[..., Tensor], list[int]] = {}
    for row, one in enumerate(settings):
        way = _likeliest if one.temperature == 0 else _draw_cut if one.top_k or one.top_p < 1 else _draw
        groups.setdefault(way, []).append(row)
    found = [0] * len(settings)
    for way, rows in groups.items():
        part = logits if len(rows) == len(settings) else logits[rows]
        chosen = way(part, [settings[row] for row in rows], [uniform[row] for row in rows])
        for row, token in zip(rows, chosen.tolist(), strict=True):
            found[row] = token
    return found


def _likeliest(logits: Tensor, settings: Sequence[Sampling], uniform: Sequence[float]) -> Tensor:
    return logits.argmax(dim=-1)


def _draw(logits: Tensor, settings: Sequence[Sampling], uniform: Sequence[float]) -> Tensor:
    """int64 [B]: rows without top-k and top-p."""
    temperature, number, _, _, min_p = _columns(settings, uniform, logits.device)
    probability = (logits.double() / temperature).softmax(dim=-1)
    if any(one.min_p for one in settings):
        likeliest = probability.amax(dim=-1, keepdim=True)
        probability = probability.masked_fill(probability < min_p * likeliest, 0.0)
    return _place(probability, number)[:, 0]


def _draw_cut(logits: Tensor, settings: Sequence[Sampling], uniform: Sequence[float]) -> Tensor:
    """int64 [B]: rows with top-k or top-p."""
    temperature, number, top_k, top_p, min_p = _columns(settings, uniform, logits.device)
    # The shares fall as the logits do, and half as many bytes sort in half the time.
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    probability = (ordered.double() / temperature).softmax(dim=-1)
    if any(one.top_k for one in settings):
        rank = torch.arange(probability.shape[-1], device=logits.device)
        probability = probability.masked_fill((rank >= top_k) & (top_k > 0), 0.0)
    probability = probability / probability.sum(dim=-1, keepdim=True)
    out = probability.cumsum(dim=-1) - probability >= top_p  # never the likeliest: nothing lies before it
    if any(one.min_p for one in settings):
        out |= probability < min_p * probability[:, :1]
    return order.gather(-1, _place(probability.masked_fill(out, 0.0), number))[:, 0]


def _columns(
    settings: Sequence[Sampling], uniform: Sequence[float], device: torch.device
) -> tuple[Tensor, ...]:
    """float64 [B, 1] each: temperature, uniform, top_k, top_p, min_p; in one transfer to the device."""
    # Below this bound no product with a sum of shares is rounded up to that sum (`_place`).
    values = [
        [one.temperature, min(number, 1 - 2**-52), one.top_k, one.top_p, one.min_p]
        for one, number in zip(settings, uniform, strict=True)
    ]
    return torch.tensor(values, dtype=torch.float64, device=device)[:, :, None].unbind(1)


def _place(probability: Tensor, number: Tensor) -> Tensor:
    """int64 [B, 1]: the first place whose cumulated share exceeds that part of the sum; its own is not 0."""
    share = probability.cumsum(dim=-1)
    place = torch.searchsorted(share, number * share[:, -1:], right=True)
    return place.clamp(max=share.shape[-1] - 1)  # logits that are not numbers: any token, no fault on a GPU
