"""`kvpop compare`: train what is to be trained, then evaluate everything in one table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvpop_lightning.commands import Call, evaluate, train
from kvpop_lightning.commands.evaluate import keep_result
from kvpop_lightning.config.policies import policies_to_compare, with_policy
from kvpop_lightning.config.schema import Config

if TYPE_CHECKING:
    from kvpop_lightning.evaluation.evaluate import EvaluationResult

SUMMARY = "train policies and compare them with all baselines in one table"
DETAILS = """Trains what train_policies names and whatever else eval.policies needs, then evaluates
    eval.policies at eval.budgets: `kvpop train` and `kvpop evaluate` under one tracking run, with one
    nested run per trained policy. A policy that cannot be trained in this setting says why in its cells.
    An interrupted comparison goes on with the same command, a finished one reuses everything."""
KEYS = tuple(dict.fromkeys(("train_policies", *evaluate.KEYS, *train.KEYS)))
DEFAULT_EXPERIMENT: str | None = None


def run(config: Config, call: Call) -> int:
    from kvpop_lightning.evaluation.compare import print_result

    print_result(compare(config, call))
    return 0


def compare(config: Config, call: Call) -> EvaluationResult:
    """Prepare, train, evaluate under one tracking run; returns the evaluation's result.

    With a frozen base one copy of the model and one set of rows serve all trainings and the evaluation.
    """
    from kvpop_lightning.data import PackedMathDataModule
    from kvpop_lightning.evaluation.compare import train_all
    from kvpop_lightning.evaluation.evaluate import evaluate as evaluate_policies
    from kvpop_lightning.models import is_retrofitted, load_model, unretrofit
    from kvpop_lightning.tracking import TrackedRun
    from kvpop_lightning.training.fit import train as train_policy

    name = config.tracking.run_name or call.command
    with TrackedRun(config, name=name, command=call.command, overrides=call.overrides) as tracked:
        shared: dict[str, Any] = {}
        if config.trainer.base == "frozen":
            model, tokenizer = load_model(config.model)
            data = PackedMathDataModule(
                config.data,
                tokenizer,
                rows_per_step=config.trainer.rows_per_step * config.trainer.accumulate,
                seed=config.seed,
            )
            data.prepare_data()
            data.setup("fit")
            tracked.set_tags({"data.fingerprint": data.fingerprint})
            shared = {"model": model, "tokenizer": tokenizer, "data": data}

        def train_one(policy: str) -> None:
            chosen = with_policy(config, policy)
            with tracked.child(policy, chosen):
                # A base that is trained gets a copy of its own.
                train_policy(chosen, **(shared if chosen.trainer.base == "frozen" else {}))

        refused = train_all(policies_to_compare(config), train_one)
        if shared and is_retrofitted(shared["model"]):
            unretrofit(shared["model"])
        result = evaluate_policies(config, refused=refused, **shared)
        keep_result(tracked, result)
    return result
