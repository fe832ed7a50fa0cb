"""`compare(config)`: train what is not trained yet, evaluate everything, print the table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console

from kvpop_lightning.config.policies import with_policy
from kvpop_lightning.config.schema import Config
from kvpop_lightning.errors import UserError
from kvpop_lightning.evaluation.evaluate import EvaluationResult, evaluate
from kvpop_lightning.evaluation.table import budgets_of, notes, summary_lines, terminal_table
from kvpop_lightning.evaluation.trained import is_trained, policy_folder, trained_names


def print_result(result: EvaluationResult, console: Console | None = None) -> None:
    """The table, what separates the best learned policy from the best rule, and where the files are."""
    console = console or Console()
    if not console.is_terminal:  # a log has no width that would cut a cell
        console.width = max(console.width, 24 * (2 + len(budgets_of(result.table))))
    console.print(terminal_table(result.table))
    for line in (
        *summary_lines(result.table),
        *notes(result.table),
        *(str(path) for path in result.artifacts),
    ):
        console.print(line, highlight=False, soft_wrap=True)


def train_all(policies: Sequence[str], train_one: Callable[[str], None]) -> dict[str, str]:
    """Trains one policy after the other; one that cannot be trained does not stop the rest.

    Returns:
        Why each of those could not be trained, one line by name, for `evaluate(refused=...)`.

    Raises:
        UserError: none of them could: the first one's reason.
    """
    failed: dict[str, UserError | ValueError] = {}
    for policy in policies:
        try:
            train_one(policy)
        except (UserError, ValueError) as error:  # ValueError: settings that the policy refuses
            failed[policy] = error
    if failed and len(failed) == len(policies):
        raise next(iter(failed.values()))
    return {name: f"not trained: {' '.join(str(error).split())}" for name, error in failed.items()}


def compare(config: Config, *, console: Console | None = None, **options: Any) -> EvaluationResult:
    """Train every policy of `eval.policies` that needs it and is not in `run_dir/policy`, then evaluate all.

    The command line's `kvpop compare` does the same under one tracking run.

    Args:
        config: the whole configuration.
        console: where the table is printed; None = standard output.
        options: for `evaluate` (`model`, `tokenizer`, `data`, `progress`).
    """
    from kvpop_lightning.training.fit import train

    missing = [n for n in trained_names(config.eval.policies) if not is_trained(policy_folder(config, n))]

    def train_one(policy: str) -> None:
        train(with_policy(config, policy))

    refused = train_all(missing, train_one)
    result = evaluate(config, refused=refused, **options)
    print_result(result, console)
    return result
