"""How a model computes attention and target: names that change the time a result takes, never the result.

They are kept beside the base, in no checkpoint, cache or record: what one backend computed serves all others.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from kvpop_lightning.attention import BACKENDS, unavailable_backends
from kvpop_lightning.config.choices import did_you_mean
from kvpop_lightning.errors import UserError
from kvpop_lightning.models.context import decoder_of
from kvpop_lightning.policy.target import TARGET_BACKENDS, unavailable_target_backends

_KEPT = "_kvpop_backends"
"""Attribute of the decoder that holds the names, from `load_model` or `retrofit` on."""


class Backends(NamedTuple):
    """Of `sparse_attention` and `future_attention_target`."""

    attention: str = "auto"
    target: str = "auto"


def backends_of(model: nn.Module) -> Backends:
    """What was set on the model, `auto` where nothing was."""
    return getattr(decoder_of(model), _KEPT, Backends())


def set_backends(model: nn.Module, attention: str | None = None, target: str | None = None) -> Backends:
    """Set the names given, keep the others, and return both.

    Raises:
        UserError: an unknown name, or one that cannot run where the model is; nothing is set then.
    """
    before, weight = backends_of(model), next(model.parameters())
    chosen = Backends(attention or before.attention, target or before.target)
    check_backends(chosen, weight.device, weight.dtype)
    setattr(decoder_of(model), _KEPT, chosen)
    return chosen


def check_backends(backends: Backends, device: torch.device, dtype: torch.dtype) -> None:
    """Refuse what cannot run on this device.

    Raises:
        UserError: names the key, the choices, and what is not available here and why.
    """
    for key, name, known, find in (
        ("model.attention_backend", backends.attention, BACKENDS, unavailable_backends),
        ("model.target_backend", backends.target, TARGET_BACKENDS, unavailable_target_backends),
    ):
        if name == "auto":
            continue
        missing = find(device, dtype)
        if name in known and name not in missing:
            continue
        here = [choice for choice in known if choice not in missing]
        wrong = missing[name] if name in missing else f"no such backend{did_you_mean(name, known)}"
        others = "; ".join(f"{choice}: {why}" for choice, why in missing.items() if choice != name)
        raise UserError(
            f"{key}={name}: {wrong}; available here: {', '.join(here)}"
            + (f" (not available: {others})" if others else "")
        )
