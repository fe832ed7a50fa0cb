"""Scorers by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from kvpop_lightning.policy.scorers.base import Scorer
from kvpop_lightning.policy.scorers.learned import LinearScorer, MLPScorer
from kvpop_lightning.policy.scorers.mlstm import MLSTMScorer

Factory = Callable[..., Scorer]
_FACTORIES: dict[str, tuple[Factory, tuple[str, ...]]] = {}


def register_scorer(name: str, factory: Factory, options: tuple[str, ...] = ()) -> None:
    """Makes `build_scorer(name)` call `factory(num_heads, head_dim, hidden_size, **chosen options)`."""
    _FACTORIES[name] = (factory, options)


register_scorer("linear", LinearScorer, ("inputs", "generator"))
register_scorer("mlp", MLPScorer, ("inputs", "width", "generator"))
register_scorer("mlstm", MLSTMScorer, ("inputs", "width", "memory_dim", "value_dim", "delay", "generator"))


def scorer_types() -> list[str]:
    """Every name `build_scorer` takes, the parameter-free rules of `kvpop_lightning.baselines` included."""
    import_module(
        "kvpop_lightning.baselines"
    )  # registers its rules; late, since that room stands above this one
    return sorted(_FACTORIES)


def build_scorer(
    type: str,
    *,
    num_heads: int,
    head_dim: int,
    hidden_size: int,
    inputs: str = "kv",
    width: int = 64,
    memory_dim: int = 16,
    value_dim: int = 32,
    delay: int | None = None,
    window: int | None = None,
    layer: int = 0,
    seed: int = 0,
    scale: float = 1.0,
    generator: torch.Generator | None = None,
    **rule_options: Any,
) -> Scorer:
    """One layer's scorer for all its KV heads.

    Args:
        type: `linear`, `mlp`, `mlstm` or a parameter-free rule (`streaming_llm`, `random`, `key_norm`,
            `oracle`).
        inputs, width, memory_dim, value_dim, delay: see the scorer classes; a type ignores what it does not
            have.
        delay: None = `window`.
        window: the budget's protected window; a longer delay is refused.
        layer, seed, scale: of the random rule.
        rule_options: what the type was registered with beside these (see its class).
        generator: source of the initial weights; None = the global one.

    Raises:
        ValueError: unknown type (with the nearest names), impossible option.
    """
    if type not in _FACTORIES and type not in scorer_types():
        near = difflib.get_close_matches(type, scorer_types(), n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"choose one of {', '.join(scorer_types())}"
        raise ValueError(f"unknown scorer.type {type!r}: {hint}")
    factory, options = _FACTORIES[type]
    if "delay" in options:
        if delay is None:
            if window is None:
                raise ValueError("scorer.delay is not set: give it, or the window it defaults to")
            delay = window
        if window is not None and delay > window:
            raise ValueError(
                f"scorer.delay {delay} is longer than budget.window {window}: a token must be scored when "
                "it leaves the window; lower scorer.delay"
            )
    unknown = sorted(rule_options.keys() - set(options))
    if unknown:
        raise ValueError(
            f"scorer.type {type!r} has no option {unknown[0]!r}; it takes {', '.join(options) or 'none'}"
        )
    given: dict[str, Any] = {
        "inputs": inputs,
        "width": width,
        "memory_dim": memory_dim,
        "value_dim": value_dim,
        "delay": delay,
        "layer": layer,
        "seed": seed,
        "scale": scale,
        "generator": generator,
    }
    return factory(
        num_heads, head_dim, hidden_size, **{n: given[n] for n in options if n in given}, **rule_options
    )


def scorer_from_dict(description: dict[str, Any]) -> Scorer:
    """The inverse of `Scorer.to_dict`, with fresh weights."""
    return build_scorer(**description)
