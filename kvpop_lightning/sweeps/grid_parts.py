"""The parts of an ablation's file: levels, cells, constraints, and what may be wrong with each."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvpop_lightning.config import files
from kvpop_lightning.config.choices import did_you_mean
from kvpop_lightning.config.describe import groups, settings, top_groups
from kvpop_lightning.sweeps.objective import METRICS, Objective
from kvpop_lightning.sweeps.space import GROUPS_NOT_SEARCHED, NOT_SEARCHED

Levels = dict[str, str]
"""One level of every axis."""
_MEASURED_OTHERWISE = ("eval.decay_by_budget",)
"""Evaluation settings that are part of the method, and so may be an axis."""


@dataclass(frozen=True)
class Cell:
    """One combination of levels."""

    levels: Levels
    words: tuple[str, ...]
    """What it sets, as `key=value`."""
    excluded: str = ""
    """Why it cannot or shall not be run; empty = it is run."""

    @property
    def label(self) -> str:
        """`aggregation=mean scorer=mlp`."""
        return " ".join(f"{axis}={level}" for axis, level in self.levels.items())

    @property
    def slug(self) -> str:
        """For a folder's name."""
        return "-".join(re.sub(r"[^A-Za-z0-9_.]", "_", level) for level in self.levels.values())


@dataclass(frozen=True)
class Constraint:
    """Cells that are left out, and why."""

    when: Mapping[str, tuple[str, ...]]
    reason: str

    def holds(self, levels: Levels) -> bool:
        return all(levels[axis] in names for axis, names in self.when.items())


def axes_of(body: Any, problems: list[str]) -> dict[str, dict[str, tuple[str, ...]]]:
    if not isinstance(body, Mapping) or not body:
        problems.append("axes: name at least one, as in `decay: {on: {}, off: {policy.decay: 1.0}}`")
        return {}
    axes: dict[str, dict[str, tuple[str, ...]]] = {}
    owners: dict[str, str] = {}
    for axis, levels in body.items():
        if not isinstance(levels, Mapping) or len(levels) < 1 or not re.fullmatch(r"[\w.]+", str(axis)):
            problems.append(f"axes: {axis}: expected levels, as in {{on: {{}}, off: {{policy.decay: 1.0}}}}")
            continue
        axes[str(axis)] = {}
        for level, words in levels.items():
            here = f"axes: {axis}: {level}"
            if not re.fullmatch(r"[\w.+-]+", str(level)):
                problems.append(f"{here}: use letters, digits and _ . + - in a level's name")
            axes[str(axis)][_text(level)] = tuple(words_of(words, here, problems))
        for key in {key for words in axes[str(axis)].values() for key in keys_of(words)}:
            if key in owners:
                problems.append(f"axes: {key} is set by both {owners[key]} and {axis}")
            owners[key] = str(axis)
    return axes


def _text(value: Any) -> str:
    """YAML reads `on` and `off` as truth values."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def words_of(body: Any, here: str, problems: list[str]) -> list[str]:
    """`key=value` words from a mapping or a list of words, with known keys."""
    if isinstance(body, Mapping):
        body = [f"{key}={'null' if value is None else value}" for key, value in body.items()]
    if body is None:
        return []
    if not isinstance(body, list) or not all(isinstance(word, str) and "=" in word for word in body):
        problems.append(f"{here}: expected key: value pairs or a list of key=value")
        return []
    for word in body:
        key, _, value = word.partition("=")
        top = key.partition(".")[0]
        if key in top_groups():
            if value not in files.names(key):
                problems.append(
                    f"{here}: no file configs/{key}/{value}.yaml{did_you_mean(value, files.names(key))}"
                )
        elif key in groups() and key:
            problems.append(f"{here}: {key} is a group of keys")
        elif key not in settings() and top != "tracking":
            problems.append(f"{here}: unknown key{did_you_mean(key, [*settings(), *top_groups()])}")
        fixed = key in (*NOT_SEARCHED, "seed") or top in GROUPS_NOT_SEARCHED
        if here != "overrides" and fixed and key not in _MEASURED_OTHERWISE:
            problems.append(f"{here}: {key} says how points are run or measured: it cannot be an axis")
        elif key == "seed":
            problems.append(f"{here}: seed: write the seeds under `seeds`")
    return body


def keys_of(words: Sequence[str]) -> set[str]:
    return {word.partition("=")[0].strip() for word in words}


def clashes(words: Sequence[str], varied: set[str], source: str) -> list[str]:
    """Words that fix what an axis varies."""
    return [
        f"{source}: {word}: an axis of the grid sets {key}"
        for word in words
        if (key := word.partition("=")[0].strip()) in varied
    ]


def default_of(body: Any, axes: Mapping[str, Mapping[str, Any]], problems: list[str]) -> Levels:
    if body is not None and not isinstance(body, Mapping):
        problems.append("default: expected one level of each axis, as in {scorer: mlp}")
        body = None
    given = {str(axis): _text(level) for axis, level in (body or {}).items()}
    for axis, level in given.items():
        if axis not in axes:
            problems.append(f"default: {axis} is no axis{did_you_mean(axis, axes)}")
        elif level not in axes[axis]:
            problems.append(f"default: {axis}={level} is no level{did_you_mean(level, axes[axis])}")
    return {axis: given.get(axis, next(iter(levels), "")) for axis, levels in axes.items()}


def objective_of(body: Any, problems: list[str]) -> Objective:
    if body is not None and not isinstance(body, Mapping):
        problems.append("objective: expected {budgets: [128, 64], rows: 4, metrics: [kl]}")
        body = None
    given = dict(body or {})
    for key in given:
        if key not in ("budgets", "rows", "metrics"):
            problems.append(
                f"objective: unknown key '{key}'{did_you_mean(key, ('budgets', 'rows', 'metrics'))}"
            )
    budgets, rows, metrics = given.get("budgets"), given.get("rows", 4), given.get("metrics", ["kl", "top1"])
    if budgets is not None and (
        not isinstance(budgets, list)
        or not budgets
        or not all(isinstance(b, int) and b > 0 for b in budgets)
        or len(set(budgets)) < len(budgets)
    ):
        problems.append(
            f"objective.budgets={budgets}: expected a list of keys per head, or null = a point's own"
        )
        budgets = None
    if not isinstance(rows, int) or isinstance(rows, bool) or rows < 1:
        problems.append(f"objective.rows={rows}: must be a whole number of at least 1")
        rows = 1
    if not isinstance(metrics, list) or not metrics:
        problems.append(f"objective.metrics={metrics}: expected a list, as in [kl, top1]")
        metrics = ["kl"]
    for name in metrics:
        if name not in METRICS:
            problems.append(f"objective.metrics: {name} is no metric{did_you_mean(str(name), METRICS)}")
    first, *more = budgets or [None]
    return Objective(first, rows, tuple(metrics), tuple(more))


def constraints_of(body: Any, axes: Mapping[str, Mapping[str, Any]], problems: list[str]) -> list[Constraint]:
    found = []
    for index, entry in enumerate(body or [], 1):
        here = f"constraints {index}"
        if not isinstance(entry, Mapping) or not entry.get("when") or not entry.get("reason"):
            problems.append(f"{here}: expected {{when: {{axis: [level]}}, reason: why these are left out}}")
            continue
        when = {}
        for axis, levels in entry["when"].items():
            names = tuple(_text(level) for level in (levels if isinstance(levels, list) else [levels]))
            unknown = [name for name in names if name not in axes.get(axis, {})]
            if axis not in axes:
                problems.append(f"{here}: {axis} is no axis{did_you_mean(str(axis), axes)}")
            elif unknown:
                problems.append(
                    f"{here}: {axis}={unknown[0]} is no level{did_you_mean(unknown[0], axes[axis])}"
                )
            when[str(axis)] = names
        found.append(Constraint(when, str(entry["reason"])))
    return found
