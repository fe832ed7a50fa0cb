"""Caches as after so many tokens, filled by hand: what a step costs depends on how much is held."""

from __future__ import annotations

from typing import Any

import torch

from kvpop_lightning.cache import BoundedCache
from kvpop_lightning.cache.paged import PagedLayer
from kvpop_lightning.cache.step_state import StepState, keeps_waiting
from kvpop_lightning.models.compat import cache_keyword
from kvpop_lightning.policy import Budget


def shapes_of(model: Any) -> dict[str, Any]:
    """layers, heads (KV), head_dim, dtype and device of a model."""
    config, weight = model.config, next(model.parameters())
    return {
        "layers": config.num_hidden_layers, "heads": config.num_key_value_heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "dtype": weight.dtype, "device": weight.device,
    }  # fmt: skip


def filled_state(model: Any, budget: Budget, rows: int, seen: int, policy: Any) -> StepState:
    """The step kernels' cache with random keys and values in all slots, as after `seen` tokens.

    `policy` None: nothing is ever evicted, `budget.window` is the length of a full cache.
    """
    shapes = shapes_of(model)
    scorer = None if policy is None else policy.layer_scorer(0)
    state = StepState.empty(
        budget, rows=rows, **shapes,
        memory=None if scorer is None else scorer.init_state(1, shapes["device"]),
        waiting=scorer is not None and keeps_waiting(scorer, budget),
    )  # fmt: skip
    for layer in range(shapes["layers"]):
        state.keys[layer].normal_()
        state.values[layer].normal_()
    move_to(state, seen, policy)
    return state


def move_to(state: StepState, seen: int, policy: Any) -> None:
    """Rows as after `seen` tokens: residents spread over all that have left the window."""
    budget, device = state.budget, state.seen.device
    left = max(seen - budget.window - budget.sink, 0)
    position = torch.linspace(0, max(left - 1, 0), budget.topk, device=device).int() + budget.sink
    state.position.copy_(position.expand_as(state.position))
    if policy is not None:
        for layer in range(state.keys.shape[0]):
            score = torch.randn(state.position[layer].shape, device=device)
            state.priority[layer].copy_(policy.priority(layer, score, state.position[layer].long()))
    state.seen.fill_(seen)


def dynamic_cache(model: Any, rows: int, seen: int) -> Any:
    """The library's growing cache with `seen` random keys and values of every row."""
    from transformers import DynamicCache

    shapes = shapes_of(model)
    cache = DynamicCache(config=model.config)
    for layer in range(shapes["layers"]):
        keys, values = (
            torch.randn(
                rows, shapes["heads"], seen, shapes["head_dim"], dtype=shapes["dtype"],
                device=shapes["device"],
            )
            for _ in range(2)
        )  # fmt: skip
        cache.update(keys, values, layer)
    return cache


def static_cache(model: Any, rows: int, seen: int, room: int) -> Any:
    """The library's static cache of `seen + room` slots, `seen` of them filled."""
    from transformers import StaticCache

    shapes = shapes_of(model)
    cache: Any = StaticCache(config=model.config, max_cache_len=seen + room)
    cache.early_initialization(
        batch_size=rows, num_heads=shapes["heads"], head_dim=shapes["head_dim"], dtype=shapes["dtype"],
        device=shapes["device"],
    )  # fmt: skip
    for layer in cache.layers:
        layer.keys[:, :, :seen].normal_()
        layer.values[:, :, :seen].normal_()
        layer.cumulative_length.fill_(seen)
    return cache


@torch.no_grad()
def advance(model: Any, cache: BoundedCache, rows: int, seen: int, *, reduction: float, chunk: int) -> None:
    """Brings a BoundedCache to `seen` tokens: by reading random ones; under a gate (DMS, DMC), whose
    untrained form closes nothing, by hand: each head then holds from half to one and a half times `seen /
    reduction` keys.
    """
    config, device = model.config, next(model.parameters()).device
    if not isinstance(cache.layers[0], PagedLayer):
        more = seen - cache.tokens_seen
        if more > 0:
            ids = torch.randint(3, config.vocab_size, (rows, more), device=device)
            for piece in ids.split(chunk, dim=1):
                read_text_rows(model, cache, piece)
        return
    if cache.tokens_seen == 0:  # allocates
        read_text_rows(model, cache, torch.full((rows, 1), 3, device=device))
    window = cache.budget.window
    for layer in cache.layers:
        assert isinstance(layer, PagedLayer)
        assert layer.keys is not None
        heads, dim = layer.keys.shape[1], layer.keys.shape[3]
        share = torch.linspace(0.5, 1.5, heads, device=device) if heads > 1 else torch.ones(1, device=device)
        wanted = (share * max(seen - window, 0) / reduction).long()
        more = (wanted - layer.held[0]).clamp(min=0)
        longest = int(more.max())
        fresh = torch.randn(rows, heads, longest, dim, dtype=layer.keys.dtype, device=device)
        stays = (torch.arange(longest, device=device) < more[:, None]).expand(rows, -1, -1)
        layer.append(fresh, fresh, stays)
        layer.columns = seen
    cache.resume(torch.full((rows,), seen, device=device))


def read_text_rows(model: Any, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits [B, V] behind ids [B, T], in one forward call."""
    out: torch.Tensor = model(ids, **{cache_keyword(model): cache}, use_cache=True, logits_to_keep=1).logits[
        :, -1
    ]
    return out
