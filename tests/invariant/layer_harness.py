"""A cache fed with random queries, keys and values, without a transformers model."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from loop_reference import decode_layer, plain_scores
from torch import Tensor, nn

from kvpop_lightning.cache import BoundedCache
from kvpop_lightning.policy import Budget
from kvpop_lightning.policy.priority import priority_at
from kvpop_lightning.policy.scorers import build_scorer

HID = 10


class Policy(nn.Module):
    """The part of a retention policy that the cache uses."""

    def __init__(self, budget: Budget, scorers: list[nn.Module], decay: Tensor, decay_step: int) -> None:
        super().__init__()
        self.budget, self.decay_step = budget, decay_step
        self.scorers = nn.ModuleList(scorers)
        self.register_buffer("decay", decay)

    def priority(self, layer: int, score: Tensor, position: Tensor) -> Tensor:
        return priority_at(score, position, decay=self.decay[layer], decay_step=self.decay_step)


def strengthen(scorer: nn.Module, gain: float = 20.0) -> None:
    """Makes scores differ by nats instead of tenths, so that decisions are not those of the decay alone."""
    with torch.no_grad():
        if scorer.kind == "linear":
            scorer.projection.key_weight.mul_(gain)
        elif hasattr(scorer, "output_weight"):
            scorer.output_weight.mul_(gain)


def make_policy(
    scorer: str = "mlp",
    budget: Budget | None = None,
    *,
    layers: int = 1,
    heads: int = 2,
    dim: int = 6,
    decay: float = 0.8,
    decay_step: int = 5,
    seed: int = 0,
    **options: object,
) -> Policy:
    budget = budget or Budget(2, 4, 5)
    torch.manual_seed(seed)
    scorers = []
    for layer in range(layers):
        one = build_scorer(
            scorer, num_heads=heads, head_dim=dim, hidden_size=HID, width=8, memory_dim=3, value_dim=4,
            window=budget.window, layer=layer, **options,
        )  # fmt: skip
        strengthen(one)
        scorers.append(one.double())
    gamma = torch.full((layers, heads), decay, dtype=torch.float64)
    if decay < 1:
        gamma = gamma.pow(torch.linspace(0.5, 1.5, heads, dtype=torch.float64))
    return Policy(budget, scorers, gamma, decay_step)


def make_cache(policy: nn.Module, **options: object) -> BoundedCache:
    config = SimpleNamespace(_attn_implementation="kvpop")
    return BoundedCache(SimpleNamespace(kvpop=policy, config=config), **options)


def random_text(length: int, *, batch: int = 1, heads: int = 2, group: int = 3, dim: int = 6, seed: int = 0):
    """query, key, value, hidden of one layer in float64."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    return (
        draw(batch, heads * group, length, dim),
        draw(batch, heads, length, dim),
        draw(batch, heads, length, dim),
        draw(batch, length, HID),
    )


def feed(cache: BoundedCache, text, sizes: list[int], mask: Tensor | None = None) -> Tensor:
    """Feeds one layer's text in pieces of the given sizes (the last one repeats); out [B, Hq, T, D]."""
    query, key, value, hidden = text
    length, start, outputs = query.shape[2], 0, []
    sizes = list(sizes)
    while start < length:
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        stop = min(start + size, length)
        cut = slice(start, stop)
        cache.begin(query.shape[0], stop - start, None if mask is None else mask[:, :stop])
        cache.update(key[:, :, cut], value[:, :, cut], 0)
        outputs.append(
            cache.attend(0, query[:, :, cut], key[:, :, cut], value[:, :, cut], hidden[:, cut], 0.5)
        )
        start = stop
    return torch.cat(outputs, dim=2)


def loop(policy: Policy, text, row: int = 0) -> tuple[Tensor, Tensor]:
    """The plain loop on one row: out [Hq, T, D] and evictions [Hkv, T]."""
    query, key, value, hidden = (x[row] for x in text)
    scores = plain_scores(policy.scorers[0], key, value, hidden)
    return decode_layer(
        query, key, value, scores, budget=policy.budget, decay=policy.decay[0].tolist(),
        decay_step=policy.decay_step, scaling=0.5,
    )  # fmt: skip
