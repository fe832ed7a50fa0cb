"""`sweeps/ablation_NAME.yaml` read and checked: axes of choices, their cells, what excludes each other."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvpop_lightning.config.choices import did_you_mean
from kvpop_lightning.errors import UserError
from kvpop_lightning.sweeps.grid_parts import (
    Cell,
    Constraint,
    Levels,
    axes_of,
    clashes,
    constraints_of,
    default_of,
    keys_of,
    objective_of,
    words_of,
)
from kvpop_lightning.sweeps.objective import Objective
from kvpop_lightning.sweeps.space import MAX_GRID
from kvpop_lightning.sweeps.spec import NOT_A_SWEEP, find_file, read_checked, sweep_roots

_KEYS = ("experiment", "overrides", "axes", "default", "design", "seeds", "objective", "constraints")
CROSSED, ONE_AT_A_TIME = DESIGNS = ("crossed", "one_at_a_time")
HIGHER_IS_BETTER = ("top1", "retained_mass", "boundary_balanced_accuracy", "rank_correlation")


@dataclass(frozen=True)
class Grid:
    """A checked grid."""

    name: str
    path: Path
    experiment: str | None
    overrides: tuple[str, ...]
    axes: Mapping[str, Mapping[str, tuple[str, ...]]]
    """Axis -> level -> the words that it sets."""
    default: Levels
    design: str
    seeds: tuple[int, ...]
    objective: Objective
    cells: tuple[Cell, ...] = field(default=())
    """The default's first."""

    @property
    def words(self) -> list[str]:
        """The settings that the file fixes, as on a command line."""
        first = [f"experiment={self.experiment}"] if self.experiment else []
        return [*first, *self.overrides]

    @property
    def budgets(self) -> list[int | None]:
        """Total keys per KV head that are measured; None = a point's own."""
        return [self.objective.budget, *self.objective.more_budgets]

    def select(self, only: str | None) -> list[Cell]:
        """The cells that `--only` asks for; all without it.

        Raises:
            UserError: an axis or a level that is not in the grid, or nothing left.
        """
        wanted: dict[str, set[str]] = {}
        for word in (only or "").split():
            axis, equals, levels = word.partition("=")
            if not equals or axis not in self.axes:
                raise UserError(f"--only {word}: write AXIS=LEVEL,LEVEL{did_you_mean(axis, self.axes)}")
            for level in filter(None, levels.split(",")):
                if level not in self.axes[axis]:
                    raise UserError(
                        f"--only {word}: {level} is no level{did_you_mean(level, self.axes[axis])}"
                    )
                wanted.setdefault(axis, set()).add(level)
        chosen = [
            cell
            for cell in self.cells
            if not cell.excluded and all(cell.levels[axis] in levels for axis, levels in wanted.items())
        ]
        if not chosen:
            raise UserError(f"--only {only}: no cell of the grid is left")
        return chosen


def grid_names() -> list[str]:
    found = {path.stem for root in sweep_roots() for path in root.glob(f"{NOT_A_SWEEP}*.yaml")}
    return sorted(name.removeprefix(NOT_A_SWEEP) for name in found)


def grid_file(name: str) -> Path:
    """`sweeps/ablation_NAME.yaml`, or a path that ends in .yaml.

    Raises:
        UserError: there is none; the message names the choices.
    """
    return find_file("ablation", name, NOT_A_SWEEP, grid_names)


def words_of_grid(name: str) -> list[str]:
    """Settings that go in front of the user's: the file's own, and the ablation's folder."""
    grid = load_grid(name)
    return [*grid.words, f"run_dir=runs/ablations/{grid.name}"]


def load_grid(name: str) -> Grid:
    """The grid NAME.

    Raises:
        ConfigError: everything that is wrong with the file, one line each.
        UserError: no such file.
    """
    return read_checked(grid_file(name), _parse)


def _parse(path: Path, body: Mapping[str, Any], problems: list[str]) -> Grid | None:
    for key in body:
        if key not in _KEYS:
            problems.append(f"unknown key '{key}'{did_you_mean(key, _KEYS)}")
    axes = axes_of(body.get("axes"), problems)
    design = body.get("design", CROSSED)
    if design not in DESIGNS:
        problems.append(f"design={design}: must be {' or '.join(DESIGNS)}")
    default = default_of(body.get("default"), axes, problems)
    seeds = body.get("seeds", [0, 1])
    if (
        not isinstance(seeds, list)
        or not seeds
        or not all(isinstance(s, int) and not isinstance(s, bool) and s >= 0 for s in seeds)
        or len(set(seeds)) < len(seeds)
    ):
        problems.append(f"seeds={seeds}: expected a list of different whole numbers, as in [0, 1]")
    objective = objective_of(body.get("objective"), problems)
    overrides = tuple(words_of(body.get("overrides"), "overrides", problems))
    varied = {key for levels in axes.values() for words in levels.values() for key in keys_of(words)}
    problems += clashes(overrides, varied, "overrides")
    constraints = constraints_of(body.get("constraints"), axes, problems)
    if problems:
        return None
    cells = tuple(_cells(axes, default, design, constraints))
    problems += [
        f"constraints: {dict(c.when)} fits no cell of the grid"
        for c in constraints
        if not any(c.holds(cell.levels) for cell in cells)
    ]
    if len(cells) > MAX_GRID:
        problems.append(f"axes: more than {MAX_GRID} cells")
    elif cells[0].excluded:
        problems.append(f"default: {cells[0].label} is left out by a constraint ({cells[0].excluded})")
    name = path.stem.removeprefix(NOT_A_SWEEP)
    return Grid(
        name, path, body.get("experiment"), overrides, axes, default, design, tuple(seeds), objective, cells
    )


def _cells(
    axes: Mapping[str, Mapping[str, tuple[str, ...]]],
    default: Levels,
    design: str,
    constraints: Sequence[Constraint],
) -> Iterator[Cell]:
    """The default, then all others in the order of the file."""
    if design == CROSSED:
        combinations = itertools.islice(itertools.product(*axes.values()), MAX_GRID + 1)
        chosen = [dict(zip(axes, levels, strict=True)) for levels in combinations]
    else:
        chosen = [{**default, axis: level} for axis, levels in axes.items() for level in levels]
    ordered = [default, *(levels for levels in chosen if levels != default)]
    for levels in ordered:
        words = tuple(word for axis, level in levels.items() for word in axes[axis][level])
        reason = next((c.reason for c in constraints if c.holds(levels)), "")
        yield Cell(levels, words, reason)
