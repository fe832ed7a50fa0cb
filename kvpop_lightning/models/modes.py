"""How a retrofitted model runs for a while: dense, with imposed evictions, or watched."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from kvpop_lightning.models.context import LayerObservation, LayerPrefix, Observer, runtime_of


@contextmanager
def _mode(model: nn.Module, **changes: Any) -> Iterator[nn.Module]:
    runtime = runtime_of(model)
    before = runtime.mode
    runtime.mode = replace(before, **changes)
    try:
        yield model
    finally:
        runtime.mode = before


@contextmanager
def dense(model: nn.Module) -> Iterator[nn.Module]:
    """Inside, `model` is its own dense teacher: full causal attention on the same weights, documents still
    apart.

    `generate` then uses the library's ordinary cache. Nothing of the policy runs.

    Raises:
        ValueError: the model is not retrofitted.
    """
    with _mode(model, dense=True, replay=None, soft=None):
        yield model


@contextmanager
def replay(model: nn.Module, eviction_times: Sequence[Tensor]) -> Iterator[nn.Module]:
    """Inside, the parallel forward evicts at the given times instead of asking the scorers.

    Args:
        model: retrofitted.
        eviction_times: one int64 [B or 1, Hkv, T] per layer, row indices, as `BoundedCache.eviction_times` or
            `LayerObservation.eviction` give them.

    Raises:
        ValueError: not retrofitted, or another number of layers, heads or (at the forward) tokens than the
            model's.
    """
    layers, heads = runtime_of(model).policy.decay.shape
    times = tuple(eviction_times)
    if len(times) != layers or any(t.dim() != 3 or t.shape[1] != heads for t in times):
        shapes = sorted({tuple(t.shape) for t in times})
        raise ValueError(
            f"replay needs {layers} tensors of eviction times [B, {heads}, T], one per layer, "
            f"got {len(times)} of shapes {shapes}"
        )
    with _mode(model, dense=False, replay=times):
        yield model


@contextmanager
def softly(model: nn.Module, attention: Callable[..., Tensor]) -> Iterator[nn.Module]:
    """Inside, every layer of a parallel forward attends as `attention` says; the policy decides nothing.

    For baselines that are trained through a soft mask. Observers are not called.

    Args:
        model: retrofitted.
        attention: called as `attention(layer, query, key, value, hidden, call, scale)` with query [B, Hq, T,
        D],
            key and value [B, Hkv, T, D] after RoPE, hidden [B, T, Hid], all with gradients; `call` has
            `document_ids` and `position` [B, T]. Returns [B, Hq, T, D].

    Raises:
        ValueError: the model is not retrofitted.
    """
    with _mode(model, dense=False, replay=None, soft=attention):
        yield model


@contextmanager
def after_prefix(model: nn.Module, prefix: Sequence[LayerPrefix]) -> Iterator[nn.Module]:
    """Inside, a parallel forward over whole rows computes only the tokens behind a known prefix.

    The model is called with whole rows as ever; its hidden states and logits are those of the tokens from P
    on. Exact as long as the prefix is what the model itself would compute there: a query that has seen at
    most B tokens has lost none, so the first B tokens of a row are the dense forward's under any policy of B
    keys.

    Args:
        model: retrofitted.
        prefix: one `LayerPrefix` of P tokens per layer, of the same rows.

    Raises:
        ValueError: not retrofitted, another number of layers than the model's; at the forward: rows that are
            not longer than the prefix.
    """
    layers = len(runtime_of(model).policy.decay)
    if len(prefix) != layers:
        raise ValueError(f"after_prefix needs one LayerPrefix per layer, {layers}, got {len(prefix)}")
    with _mode(model, prefix=tuple(prefix)):
        yield model


@contextmanager
def observe(
    model: nn.Module, callback: Callable[[LayerObservation], None], *, gradients: bool = False
) -> Iterator[nn.Module]:
    """Inside, `callback` gets every layer of every parallel forward, dense or sparse, in order.

    Args:
        model: retrofitted.
        callback: called once per layer, before the layer's output projection; what it keeps, stays in memory.
        gradients: hand out the tensors of the graph: query, key, value and hidden with the base's gradient,
            scores with the scorers' (the scorers' inputs are detached either way). By default all are
            detached.

    Raises:
        ValueError: not retrofitted; at the forward: a cache is in use.
    """
    observers = (*runtime_of(model).mode.observers, Observer(callback, gradients))
    with _mode(model, observers=observers):
        yield model
