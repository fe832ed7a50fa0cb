"""What a sweep's file and the command line must satisfy together, found before anything starts."""

from __future__ import annotations

from collections.abc import Sequence

from kvpop_lightning.config.checks import value_at
from kvpop_lightning.config.describe import settings
from kvpop_lightning.config.schema import Config
from kvpop_lightning.errors import ConfigError
from kvpop_lightning.sweeps.point import trial_config
from kvpop_lightning.sweeps.space import Point, complete_point
from kvpop_lightning.sweeps.spec import Sweep, conflicts


def total_trials(sweep: Sweep, asked: int | None) -> int:
    """The total that the user asked for, else the file's; a grid has no more than its points."""
    if asked is None:
        return sweep.trials
    return min(asked, sweep.trials) if sweep.sampler.name == "grid" else asked


def check_settings(sweep: Sweep, own: Sequence[str], words: Sequence[str], total: int) -> Config:
    """The configuration that points are put into.

    Args:
        own: words of the command line that concern a trial; words: those of the file in front of them.

    Raises:
        ConfigError: all that is wrong.
    """
    problems = conflicts(list(own), sweep.space, "command line")
    if total < len(sweep.baseline):
        problems.append(f"sweep.trials={total}: the sweep has {len(sweep.baseline)} baseline points already")
    if problems:
        raise ConfigError(problems)
    base = trial_config(words, {}, sweep.objective)
    for key, rows in (("objective.rows", sweep.objective.rows), ("rescore.rows", sweep.rescore_rows)):
        if rows > base.data.eval_rows:
            problems.append(
                f"{sweep.path}: {key}={rows}: only data.eval_rows {base.data.eval_rows} are prepared: raise "
                "data.eval_rows in overrides"
            )
    if sweep.pruner.measured and base.trainer.base != "frozen":
        problems.append(
            f"{sweep.path}: pruner.metric={sweep.pruner.metric}: is measured with a frozen base "
            "only: use train/kl"
        )
    if problems:
        raise ConfigError(problems)
    return base


def baseline_points(sweep: Sweep, words: Sequence[str], base: Config) -> list[Point]:
    """Baseline points, completed from the configuration and composed once.

    Raises:
        ConfigError: a point lies outside the space or cannot be.
    """
    defaults = {p.key: value_at(base, p.key) for p in sweep.space if p.key in settings()}
    points, problems = [], []
    for index, given in enumerate(sweep.baseline):
        point, wrong = complete_point(sweep.space, given, defaults)
        if not wrong:
            try:
                trial_config(words, point, sweep.objective)
            except ConfigError as error:
                wrong = error.problems
        problems += [f"{sweep.path}: baseline {index + 1}: {line}" for line in wrong]
        points.append(point)
    if problems:
        raise ConfigError(problems)
    return points
