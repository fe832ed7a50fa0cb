"""The same configuration for another policy, as `policy=NAME` on the command line would choose it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvpop_lightning.config.choices import (
    GATED,
    POLICIES,
    RAGGED,
    SCORER_OF_TRAINED_POLICY,
    TRAINS_BASE_ONLY,
    did_you_mean,
)
from kvpop_lightning.config.schema import Config, PolicyConfig
from kvpop_lightning.errors import UserError


def with_policy(config: Config, name: str) -> Config:
    """`config` with the policy `name`: its scorer type changes with it, budget, decay and scorer sizes stay,
    its own options do not.

    Where there is nothing to train but the base, `trainer.base` becomes `full`.

    Raises:
        UserError: an unknown policy name.
    """
    if name not in POLICIES:
        raise UserError(f"unknown policy '{name}'{did_you_mean(name, POLICIES)}")
    scorer = config.policy.scorer
    if name in SCORER_OF_TRAINED_POLICY:
        scorer = replace(scorer, type=SCORER_OF_TRAINED_POLICY[name])
    if name in TRAINS_BASE_ONLY:
        config = replace(config, trainer=replace(config.trainer, base="full"))
    policy = replace(config.policy, name=name, scorer=scorer, options=own_options(config, name))
    return replace(config, policy=policy)


def own_options(config: Config, name: str) -> dict[str, Any]:
    """`policy.options`, which belong to the policy that `policy.name` names: empty for any other."""
    return config.policy.options if name == config.policy.name else {}


def policies_to_train(config: Config) -> list[str]:
    """`train_policies`, or the one policy of the configuration.

    Raises:
        UserError: that policy has nothing to train.
    """
    if config.train_policies:
        return list(config.train_policies)
    name = config.policy.name
    if name not in SCORER_OF_TRAINED_POLICY:
        raise UserError(
            f"policy.name={name} has nothing to train: choose one of {', '.join(SCORER_OF_TRAINED_POLICY)}, "
            "or compare it with kvpop evaluate"
        )
    return [name]


def policies_to_compare(config: Config) -> list[str]:
    """What a comparison must train: `train_policies` and every trained policy that its table lists."""
    listed = [name for name in config.eval.policies if name in SCORER_OF_TRAINED_POLICY]
    return list(dict.fromkeys([*config.train_policies, *listed]))


def scorer_inputs(policy: PolicyConfig) -> str:
    """`policy.scorer.inputs` with `auto` decided.

    A scorer that scores at insertion reads the hidden state for nothing, and it serves it best. A delayed one
    would have to keep the hidden states of a whole window, which costs more keys than they are worth.
    """
    scorer = policy.scorer
    if scorer.inputs != "auto":
        return scorer.inputs
    return "kv" if scorer.type == "mlstm" and scorer.delay != 0 else "kv_hidden"


def retrofit_options(config: Config) -> dict[str, Any]:
    """What `retrofit` takes beside the model and the budget."""
    policy, scorer = config.policy, config.policy.scorer
    gate: dict[str, Any] = {"gate_width": policy.gate.width} if policy.name in GATED else {}
    if policy.name in RAGGED:
        gate["gate_source"] = policy.gate.source
    return gate | {
        "policy": policy.name,
        "decay": policy.decay,
        "decay_depth": policy.decay_depth,
        "decay_heads": policy.decay_heads,
        "decay_step": policy.decay_step,
        "inputs": scorer_inputs(policy),
        "delay": scorer.delay,
        "width": scorer.width,
        "memory_dim": scorer.memory_dim,
        "value_dim": scorer.value_dim,
        "match_bytes": policy.equal_bytes,
        "seed": config.seed,
        "attention_backend": config.model.attention_backend,
        "target_backend": config.model.target_backend,
        **policy.options,
    }
