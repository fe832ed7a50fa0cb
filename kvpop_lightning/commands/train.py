"""`kvpop train`: train the policies of a configuration, one after the other."""

from __future__ import annotations

from contextlib import nullcontext

from kvpop_lightning.commands import Call
from kvpop_lightning.config.policies import policies_to_train, with_policy
from kvpop_lightning.config.schema import Config

SUMMARY = "train an eviction policy (and the base model, if asked)"
DETAILS = """Trains every policy of train_policies, or the one that policy=NAME chooses, and saves it in
    RUN_DIR/policy/NAME. The same command goes on from the newest checkpoint in RUN_DIR, in the same
    tracking run; trainer.resume=false starts anew."""
KEYS = (
    "policy.budget.sink",
    "policy.budget.window",
    "policy.budget.topk",
    "policy.scorer.inputs",
    "policy.scorer.delay",
    "policy.decay",
    "policy.decay_step",
    "distill.temperature",
    "distill.margin",
    "distill.boundary",
    "distill.weighting",
    "distill.regression_weight",
    "distill.target.source",
    "distill.target.aggregation",
    "trainer.base",
    "trainer.max_steps",
    "trainer.rows_per_step",
    "trainer.accumulate",
    "trainer.scorer_lr",
    "trainer.base_lr",
    "trainer.accelerator",
    "trainer.devices",
    "trainer.precision",
    "trainer.fast_dev_run",
    "trainer.resume",
    "data.row_length",
    "data.train_rows",
    "tracking.enabled",
    "tracking.uri",
    "train_policies",
    "run_dir",
    "seed",
)
DEFAULT_EXPERIMENT: str | None = None


def run(config: Config, call: Call) -> int:
    policies = policies_to_train(config)  # a mistake here should not wait for torch

    from kvpop_lightning.tracking import TrackedRun
    from kvpop_lightning.training.fit import train

    alone = len(policies) == 1
    words = (config.tracking.run_name, "train", policies[0] if alone else None)
    name = " ".join(word for word in words if word)
    root = with_policy(config, policies[0]) if alone else config
    with TrackedRun(root, name=name, command=call.command, overrides=call.overrides) as tracked:
        for policy in policies:
            chosen = with_policy(config, policy)
            with nullcontext() if alone else tracked.child(policy, chosen):
                result = train(chosen)
            print(f"{policy}: {result.policy_path or 'nothing saved (trainer.fast_dev_run)'}")
    return 0
