"""From a sweep's words and one point to the trial's configuration: the same `compose` as any training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvpop_lightning.config.compose import compose
from kvpop_lightning.config.describe import settings
from kvpop_lightning.config.schema import Config
from kvpop_lightning.sweeps.objective import Objective

_ANY_BUDGET = 2**30
"""A budget that holds any sinks and window: the trial's own is known only when it is composed."""
_LEFT_OUT = ("run_dir", "tracking.run_name")


def trial_config(
    words: Sequence[str], point: Mapping[str, Any], objective: Objective, run_dir: str = "runs/trial"
) -> Config:
    """The configuration of one trial, evaluation included.

    Args:
        words: `key=value` words of the sweep.
        point: the trial's values; a word of the same key would win over them.
        objective: budget and rows that the trained policy is measured at.

    Raises:
        ConfigError: the point cannot be; every problem as one line.
    """
    fixed = [*words, f"run_dir={run_dir}", "eval.figures=false", f"eval.rows={objective.rows}"]
    budget = objective.budget
    if budget is None:
        given = _composed(fixed, point, [_ANY_BUDGET]).policy.budget
        budget = given.sink + given.window + given.topk
    return _composed(fixed, point, [budget, *objective.more_budgets])


def _composed(words: Sequence[str], point: Mapping[str, Any], budgets: Sequence[int]) -> Config:
    # The table of a trial has one line, that of its own policy, whatever the experiment compares.
    return compose([*words, f"eval.budgets={list(budgets)}", "eval.policies=[full]"], sweep_point=point)


def trial_words(words: Sequence[str]) -> list[str]:
    """Those words of a sweep's command line that concern a trial."""
    return [word for word in words if not _is_sweep_word(word)]


def _is_sweep_word(word: str) -> bool:
    key = word.partition("=")[0].strip()
    return key in _LEFT_OUT or key.startswith("sweep.") or f"sweep.{key}" in settings()
