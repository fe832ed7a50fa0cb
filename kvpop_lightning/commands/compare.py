"""`kvpop compare`: train what is to be trained, then evaluate everything in one table."""

from __future__ import annotations

from kvpop_lightning.commands import Call, evaluate, train
from kvpop_lightning.commands.evaluate import keep_result, show_result
from kvpop_lightning.config.policies import policies_to_compare, with_policy
from kvpop_lightning.config.schema import Config

SUMMARY = "train policies and compare them with all baselines in one table"
DETAILS = """Trains what train_policies names and whatever else eval.policies needs, then evaluates
    eval.policies at eval.budgets: `kvpop train` and `kvpop evaluate` under one tracking run, with one
    nested run per trained policy. An interrupted comparison goes on with the same command, a finished one
    reuses everything."""
KEYS = tuple(dict.fromkeys(("train_policies", *evaluate.KEYS, *train.KEYS)))
DEFAULT_EXPERIMENT: str | None = None


def run(config: Config, call: Call) -> int:
    show_result(compare(config, call))
    return 0


def compare(config: Config, call: Call):  # type: ignore[no-untyped-def]  # EvaluationResult, whose import loads torch
    """Prepare, train, evaluate under one tracking run; returns the evaluation's result."""
    from kvpop_lightning.evaluation.evaluate import evaluate as evaluate_policies
    from kvpop_lightning.tracking import TrackedRun
    from kvpop_lightning.training.fit import train as train_policy

    name = config.tracking.run_name or call.command
    with TrackedRun(config, name=name, command=call.command, overrides=call.overrides) as tracked:
        for policy in policies_to_compare(config):
            chosen = with_policy(config, policy)
            with tracked.child(policy, chosen):
                train_policy(chosen)
        result = evaluate_policies(config)
        keep_result(tracked, result)
    return result
