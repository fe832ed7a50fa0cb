"""A retention policy from its name."""

from __future__ import annotations

from typing import Any

from kvpop_lightning.baselines.registry import get
from kvpop_lightning.policy.budget import Budget
from kvpop_lightning.policy.retention import Decay, RetentionPolicy


def build_policy(
    name: str,
    budget: Budget,
    *,
    num_layers: int,
    num_heads: int,
    head_dim: int,
    hidden_size: int,
    decay: Decay = 0.7408182206817179,
    decay_step: int = 64,
    match_bytes: bool = False,
    seed: int = 0,
    **scorer_options: Any,
) -> RetentionPolicy:
    """The policy `name` with fresh weights; arguments as for `RetentionPolicy.build`.

    Policies that do not decay get gamma 1 whatever `decay` says; `+decay` controls get `decay`.

    Raises:
        ValueError: unknown name, `full` (dense attention holds no policy), impossible settings.
    """
    spec = get(name)
    if spec.scorer is None:
        raise ValueError(
            f"policy {name!r} is dense attention: it has no budget or scorer; use the model as it is"
        )
    try:
        return RetentionPolicy.build(
            name,
            budget,
            spec.scorer,
            num_layers=num_layers,
            num_heads=num_heads,
            head_dim=head_dim,
            hidden_size=hidden_size,
            decay=decay if spec.uses_decay else 1.0,
            decay_step=decay_step,
            match_bytes=match_bytes,
            seed=seed,
            **scorer_options,
        )
    except TypeError as error:
        raise ValueError(f"{name}: an option has a value of the wrong kind ({error})") from error
