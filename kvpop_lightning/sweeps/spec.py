"""`sweeps/NAME.yaml` read and checked: everything wrong with it is reported at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kvpop_lightning.config.choices import did_you_mean
from kvpop_lightning.config.files import config_roots, read_yaml
from kvpop_lightning.errors import ConfigError, UserError
from kvpop_lightning.sweeps.objective import Objective
from kvpop_lightning.sweeps.parts import (
    PrunerSpec,
    SamplerSpec,
    metrics_of,
    pruner_of,
    sampler_of,
    table_of,
    whole_of,
)
from kvpop_lightning.sweeps.space import MAX_GRID, Parameter, Point, grid_points, parse_space

Parsed = TypeVar("Parsed")
FOLDER = "sweeps"
NOT_A_SWEEP = "ablation_"
"""File names that begin so are grids for `kvpop ablate`."""
_KEYS = (
    "experiment",
    "overrides",
    "objective",
    "metrics",
    "sampler",
    "pruner",
    "trials",
    "time_limit_s",
    "rescore",
    "confirm",
    "baseline",
    "space",
)


@dataclass(frozen=True)
class Sweep:
    """A checked sweep file."""

    name: str
    path: Path
    experiment: str | None
    overrides: tuple[str, ...]
    objective: Objective
    directions: tuple[str, ...]
    """`minimize` or `maximize` for each of `objective.metrics`."""
    sampler: SamplerSpec
    pruner: PrunerSpec
    trials: int
    """All trials, baseline points included."""
    time_limit_s: float | None
    rescore_best: int
    rescore_rows: int
    confirm_seeds: int
    """Seeds over which the winner, the baseline and the winner `without` are compared; 1 = no further."""
    without: Point
    """Values that the winner is also trained with, to see what its own were good for."""
    baseline: tuple[Point, ...]
    space: tuple[Parameter, ...]

    @property
    def words(self) -> list[str]:
        """The settings that the file fixes, as on a command line."""
        first = [f"experiment={self.experiment}"] if self.experiment else []
        return [*first, *self.overrides]

    @property
    def several(self) -> bool:
        """More than one metric: the result is a Pareto front."""
        return len(self.directions) > 1


def sweep_roots() -> list[Path]:
    """The folders `sweeps` beside the folders of configuration files, best first."""
    return [root.parent / FOLDER for root in config_roots() if (root.parent / FOLDER).is_dir()]


def sweep_names() -> list[str]:
    found = {path.stem for root in sweep_roots() for path in root.glob("*.yaml")}
    return sorted(name for name in found if not name.startswith(NOT_A_SWEEP))


def sweep_file(name: str) -> Path:
    """`sweeps/NAME.yaml`, or a path that ends in .yaml.

    Raises:
        UserError: there is none; the message names the choices.
    """
    return find_file("sweep", name, "", sweep_names)


def find_file(kind: str, name: str, prefix: str, names: Callable[[], list[str]]) -> Path:
    """`sweeps/<prefix>NAME.yaml`, or a path that ends in .yaml; `prefix` may be part of the name already.

    Args:
        kind: what the message calls it.
        names: those that exist, without prefix.

    Raises:
        UserError: there is none; the message names the choices.
    """
    if name.endswith((".yaml", ".yml")):
        if Path(name).is_file():
            return Path(name)
        raise UserError(f"{kind} {name}: there is no such file")
    short = name.removeprefix(prefix)
    file = f"{prefix}{short}.yaml"
    for root in sweep_roots():
        if (root / file).is_file():
            return root / file
    raise UserError(f"{kind} {name}: there is no {FOLDER}/{file}{did_you_mean(short, names())}")


def read_checked(path: Path, parse: Callable[[Path, dict[str, Any], list[str]], Parsed | None]) -> Parsed:
    """What `parse(path, body, problems)` makes of the file.

    Raises:
        ConfigError: everything that it found wrong, one line each.
    """
    problems: list[str] = []
    parsed = parse(path, read_yaml(path), problems)
    if problems:
        raise ConfigError([f"{path}: {problem}" for problem in problems])
    assert parsed is not None
    return parsed


def load_sweep(name: str) -> Sweep:
    """The sweep NAME.

    Raises:
        ConfigError: everything that is wrong with the file, one line each.
        UserError: no such file.
    """
    return read_checked(sweep_file(name), _parse)


def words_of_sweep(name: str) -> list[str]:
    """Settings that go in front of the user's: the file's own, and the sweep's folder."""
    sweep = load_sweep(name)
    return [*sweep.words, f"run_dir=runs/sweeps/{sweep.name}"]


def _parse(path: Path, body: dict[str, Any], problems: list[str]) -> Sweep | None:
    for key in body:
        if key not in _KEYS:
            problems.append(f"unknown key '{key}'{did_you_mean(key, _KEYS)}")
    metrics, directions = metrics_of(body.get("metrics"), problems)
    space = parse_space(body.get("space"), problems)
    sampler = sampler_of(body.get("sampler") or {}, space, directions, problems)
    pruner = pruner_of(body.get("pruner") or {}, metrics, directions, problems)
    objective = table_of(body, "objective", ("budget", "rows"), problems)
    rescore = table_of(body, "rescore", ("best", "rows"), problems)
    seeds, without = _confirm(body, space, directions, problems)
    rows = whole_of(objective, "rows", 2, problems, "objective")
    budget = (
        None if objective.get("budget") is None else whole_of(objective, "budget", 1, problems, "objective")
    )
    trials = None if body.get("trials") is None else whole_of(body, "trials", 1, problems)
    if sampler.name == "grid" and not problems:
        trials = _grid_trials(space, trials, problems)
    elif trials is None:
        problems.append("trials: give the total number of trials")
    if pruner.name == "wilcoxon" and rows < 2:
        problems.append("pruner: wilcoxon compares rows: objective.rows must be at least 2")
    limit = body.get("time_limit_s")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int | float) or limit <= 0):
        problems.append(f"time_limit_s={limit}: must be a number of seconds above 0")
    baseline = _baseline(body.get("baseline"), problems)
    if sampler.name == "grid" and baseline:
        problems.append("baseline: a grid has all its points; put the baseline's values among them")
    elif trials is not None and len(baseline) > trials:
        problems.append(f"trials={trials}: there are {len(baseline)} baseline points already")
    overrides = _overrides(body.get("overrides"), space, problems)
    best = whole_of(rescore, "best", 3, problems, "rescore", low=0)
    rescore_rows = whole_of(rescore, "rows", 8, problems, "rescore")
    if rescore_rows < rows:
        problems.append(f"rescore.rows={rescore_rows}: must be at least objective.rows {rows}")
    if problems:
        return None
    return Sweep(
        name=path.stem,
        path=path,
        experiment=body.get("experiment"),
        overrides=overrides,
        objective=Objective(budget, rows, metrics),
        directions=directions,
        sampler=sampler,
        pruner=pruner,
        trials=trials or 1,
        time_limit_s=limit,
        rescore_best=best,
        rescore_rows=rescore_rows,
        confirm_seeds=seeds,
        without=without,
        baseline=baseline,
        space=space,
    )


def _grid_trials(space: tuple[Parameter, ...], trials: int | None, problems: list[str]) -> int:
    steps = [p.key for p in space if p.type == "float" and p.step is None]
    if steps:
        problems.append(f"sampler: grid needs a step for {', '.join(steps)}, or type: categorical")
        return 1
    count = len(grid_points(space))
    if count > MAX_GRID:
        problems.append(f"sampler: the grid has more than {MAX_GRID} points: larger steps or fewer choices")
    return min(count, trials or count)


def _baseline(body: Any, problems: list[str]) -> tuple[Point, ...]:
    points = [body] if isinstance(body, Mapping) else body or []
    if not isinstance(points, list) or not all(isinstance(point, Mapping) for point in points):
        problems.append("baseline: expected a list of points, as in `- {policy.decay: 1.0}`")
        return ()
    return tuple({str(key): value for key, value in point.items()} for point in points)


def _confirm(
    body: dict[str, Any], space: tuple[Parameter, ...], directions: tuple[str, ...], problems: list[str]
) -> tuple[int, Point]:
    table = table_of(body, "confirm", ("seeds", "without"), problems)
    seeds = whole_of(table, "seeds", 2 if table else 1, problems, "confirm")
    without = table.get("without") or {}
    if not isinstance(without, Mapping):
        problems.append("confirm.without: expected values as in {policy.decay: 1.0}")
        without = {}
    searched = {parameter.key: parameter for parameter in space}
    for key, value in without.items():
        if key not in searched:
            problems.append(f"confirm.without: {key} is no key of the space{did_you_mean(key, searched)}")
        elif not searched[key].contains(value):
            problems.append(f"confirm.without: {key}={value} lies outside the space")
    if seeds > 1 and len(directions) > 1:
        problems.append("confirm: takes one metric, this sweep has several: a front has no single winner")
    return seeds, {str(key): value for key, value in without.items()}


def _overrides(body: Any, space: tuple[Parameter, ...], problems: list[str]) -> tuple[str, ...]:
    if isinstance(body, Mapping):
        body = [f"{key}={value}" for key, value in body.items()]
    if body is None:
        return ()
    if not isinstance(body, list) or not all(isinstance(word, str) and "=" in word for word in body):
        problems.append("overrides: expected a list of key=value")
        return ()
    problems += conflicts(body, space, "overrides")
    return tuple(body)


def conflicts(words: list[str], space: tuple[Parameter, ...], source: str) -> list[str]:
    """Words that fix what the space varies."""
    searched = {parameter.key for parameter in space}
    found = []
    for word in words:
        key = word.partition("=")[0].strip()
        if key in searched:
            found.append(f"{source}: {key} is a key of the space and cannot be fixed: leave {word} out")
    return found
