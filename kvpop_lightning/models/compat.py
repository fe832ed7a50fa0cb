"""What differs between transformers 5.17 and 5.24, in one place.

The cache is called `past_key_values` in 5.17 and `cache` in 5.24 (which still takes the old name); the hooks
ask the model's own signature instead of the version.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

CACHE_KEYWORDS = ("cache", "past_key_values")


@cache
def _parameter_names(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Named parameters of a forward, without `self` and `**kwargs`."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(
        n for n, p in inspect.signature(forward).parameters.items() if p.kind in kinds and n != "self"
    )


def bind_positional(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of `module.forward` by name."""
    return dict(zip(_parameter_names(type(module).forward), args, strict=False)) | dict(kwargs)


def cache_keyword(module: Any) -> str:
    """The name under which `module.forward` takes its cache."""
    names = _parameter_names(type(module).forward)
    return next((name for name in CACHE_KEYWORDS if name in names), CACHE_KEYWORDS[1])


def given_cache(kwargs: Mapping[str, Any]) -> Any:
    """The cache among a call's arguments, under either name; None if there is none."""
    return next((kwargs[name] for name in CACHE_KEYWORDS if kwargs.get(name) is not None), None)


def register_attention(name: str, attention: Callable[..., Any], mask: Callable[..., Any]) -> None:
    """Makes `config._attn_implementation = name` select `attention`, and `mask` as its mask builder.

    Without a mask builder the library drops padding silently.
    """
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
