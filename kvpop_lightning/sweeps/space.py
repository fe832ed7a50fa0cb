"""The search space: parameters checked against the schema before anything starts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvpop_lightning.config import files
from kvpop_lightning.config.bounds import BOUNDS
from kvpop_lightning.config.choices import CHOICES, did_you_mean
from kvpop_lightning.config.describe import Setting, groups, settings, top_groups

Point = dict[str, Any]
"""Values of one trial by dotted key, active parameters only."""

TYPES = ("int", "float", "categorical")
FIELDS = {
    "int": ("type", "low", "high", "step", "log", "when"),
    "float": ("type", "low", "high", "step", "log", "when"),
    "categorical": ("type", "choices", "when"),
}
NOT_SEARCHED = ("run_dir", "experiment", "train_policies")
GROUPS_NOT_SEARCHED = ("tracking", "sweep", "ablate", "generate", "eval")
MAX_GRID = 10_000


@dataclass(frozen=True)
class Parameter:
    """One key of the space."""

    key: str
    type: str
    low: float | None = None
    high: float | None = None
    step: float | None = None
    log: bool = False
    choices: tuple[Any, ...] = ()
    when: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """The parameter exists only where each of these keys has one of these values."""

    def active(self, point: Mapping[str, Any]) -> bool:
        return all(key in point and point[key] in values for key, values in self.when.items())

    def suggest(self, trial: Any) -> Any:
        """The value that an Optuna trial gives."""
        if self.type == "categorical":
            return trial.suggest_categorical(self.key, list(self.choices))
        if self.type == "int":
            return trial.suggest_int(
                self.key, int(self.low or 0), int(self.high or 0), step=int(self.step or 1), log=self.log
            )
        return trial.suggest_float(self.key, self.low, self.high, step=self.step, log=self.log)

    def contains(self, value: Any) -> bool:
        if self.type == "categorical":
            return any(value == choice and type(value) is type(choice) for choice in self.choices)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        assert self.low is not None
        assert self.high is not None
        if self.type == "int" and value != int(value):
            return False
        return self.low <= value <= self.high

    def grid(self) -> list[Any]:
        """All its values; a float needs `step`."""
        if self.type == "categorical":
            return list(self.choices)
        assert self.low is not None
        assert self.high is not None
        step = self.step or 1
        count = math.floor((self.high - self.low) / step + 1e-9) + 1
        values = [self.low + step * index for index in range(count)]
        return [int(value) for value in values] if self.type == "int" else values

    def at(self, share: float) -> Any:
        """The value at `share` in [0, 1) of its range: what a low-discrepancy sequence turns into a point."""
        if self.type == "categorical":
            return self.choices[int(share * len(self.choices))]
        assert self.low is not None
        assert self.high is not None
        low, high = self.low, self.high
        if self.type == "int" and self.log:
            start, end = math.log(low - 0.5), math.log(high + 0.5)
            return min(max(round(math.exp(start + share * (end - start))), int(low)), int(high))
        if self.type == "int" or self.step is not None:
            values = self.grid()
            return values[int(share * len(values))]
        if self.log:
            return min(low * (high / low) ** share, high)
        return low + share * (high - low)

    def describe(self) -> dict[str, Any]:
        """What a study remembers of it, as JSON values."""
        if self.type == "categorical":
            text: dict[str, Any] = {"type": self.type, "choices": list(self.choices)}
        else:
            text = {"type": self.type, "low": self.low, "high": self.high, "step": self.step, "log": self.log}
        return text | ({"when": {key: list(v) for key, v in self.when.items()}} if self.when else {})


def suggest_point(space: Sequence[Parameter], trial: Any) -> Point:
    """A point from an Optuna trial; the space is in an order in which conditions are known first."""
    point: Point = {}
    for parameter in space:
        if parameter.active(point):
            point[parameter.key] = parameter.suggest(trial)
    return point


def complete_point(
    space: Sequence[Parameter], given: Mapping[str, Any], defaults: Mapping[str, Any]
) -> tuple[Point, list[str]]:
    """A baseline point with missing keys filled in from the configuration, and what is wrong with it."""
    point: Point = {}
    problems = []
    known = {parameter.key for parameter in space}
    for key in given:
        if key not in known:
            problems.append(f"{key} is no key of the space{did_you_mean(key, known)}")
    for parameter in space:
        key = parameter.key
        if not parameter.active(point):
            if key in given:
                conditions = ", ".join(f"{k} in {list(v)}" for k, v in parameter.when.items())
                problems.append(f"{key}={given[key]} is only there when {conditions}")
            continue
        if key not in given and key not in defaults:
            problems.append(f"{key} is missing")
            continue
        value = given.get(key, defaults.get(key))
        if parameter.type == "float" and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not parameter.contains(value):
            source = "" if key in given else " (the configuration's value, as the point names none)"
            problems.append(f"{key}={value}{source} lies outside the space")
        point[key] = value
    return point, problems


def grid_points(space: Sequence[Parameter]) -> list[Point]:
    """Every combination, conditions respected, each once and in order."""

    def extend(point: Point, rest: Sequence[Parameter]) -> Iterator[Point]:
        if not rest:
            yield point
            return
        parameter, *later = rest
        if not parameter.active(point):
            yield from extend(point, later)
            return
        for value in parameter.grid():
            yield from extend({**point, parameter.key: value}, later)

    return list(itertools.islice(extend({}, space), MAX_GRID + 1))


def parse_space(body: Any, problems: list[str]) -> tuple[Parameter, ...]:
    """The parameters of a file's `space`, conditions first; adds one line per problem to `problems`."""
    if not isinstance(body, Mapping) or not body:
        problems.append(
            "space: name at least one key, as in `policy.decay: {type: float, low: 0.5, high: 1.0}`"
        )
        return ()
    found = {}
    for key, entry in body.items():
        before = len(problems)
        parameter = _parse_parameter(str(key), entry, problems)
        if parameter is not None and len(problems) == before:
            found[parameter.key] = parameter
    return _in_order(found, {str(key) for key in body}, problems)


def _parse_parameter(key: str, entry: Any, problems: list[str]) -> Parameter | None:
    here = f"space: {key}"
    setting = settings().get(key)
    if setting is None and key not in top_groups():
        if key in groups() and key:
            children = ", ".join(f"{key}.{name}" for name in groups()[key])
            problems.append(f"{here} is a group of keys: search one of {children}")
        else:
            problems.append(f"{here}: unknown key{did_you_mean(key, [*settings(), *top_groups()])}")
        return None
    if key in NOT_SEARCHED or key.partition(".")[0] in GROUPS_NOT_SEARCHED:
        problems.append(f"{here} says how a sweep is run or measured: it cannot be searched")
        return None
    if not isinstance(entry, Mapping):
        problems.append(f"{here}: expected {{type: float, low: ..., high: ...}} or the like, got {entry!r}")
        return None
    kind = entry.get("type", "categorical" if "choices" in entry else None)
    if kind not in TYPES:
        problems.append(f"{here}: type={kind} is none of {', '.join(TYPES)}")
        return None
    for name in entry:
        if name not in FIELDS[kind]:
            problems.append(f"{here}: unknown field '{name}'{did_you_mean(str(name), FIELDS[kind])}")
    when = _parse_when(here, entry.get("when", {}), problems)
    if kind == "categorical":
        return _categorical(key, setting, entry.get("choices"), when, problems)
    return _numeric(key, setting, kind, entry, when, problems)


def _parse_when(here: str, when: Any, problems: list[str]) -> dict[str, tuple[Any, ...]]:
    if not isinstance(when, Mapping):
        problems.append(f"{here}: when must map keys of the space to values, as in {{policy: [kvpop_mlstm]}}")
        return {}
    return {str(k): tuple(v) if isinstance(v, list) else (v,) for k, v in when.items()}


def _categorical(
    key: str, setting: Setting | None, choices: Any, when: dict[str, tuple[Any, ...]], problems: list[str]
) -> Parameter:
    here = f"space: {key}"
    if not isinstance(choices, list) or not choices:
        problems.append(f"{here}: choices must be a list with at least one value")
        choices = []
    for choice in choices:
        if choices.count(choice) > 1 and f"{here}: {choice} is listed twice" not in problems:
            problems.append(f"{here}: {choice} is listed twice")
        if setting is None:
            if choice not in files.names(key):
                known = files.names(key)
                problems.append(
                    f"{here}: no file configs/{key}/{choice}.yaml{did_you_mean(str(choice), known)}"
                )
        else:
            problems += _value_problems(here, setting, choice)
    return Parameter(key, "categorical", choices=tuple(choices), when=when)


def _value_problems(here: str, setting: Setting, value: Any) -> list[str]:
    if value is None:
        return [] if setting.optional else [f"{here}: null is no {setting.expected}"]
    simple = setting.type in (int, float, bool, str)
    allowed: Any = {float: (int, float)}.get(setting.type, setting.type) if simple else str
    if not isinstance(value, allowed) or (isinstance(value, bool) and setting.type is not bool):
        text = setting.expected if simple else f"{setting.expected}, written as text ('[256,128]')"
        return [f"{here}: {value!r} is no {text}"]
    names = CHOICES.get(setting.key)
    if names is not None and value not in names:
        return [f"{here}: {value} is no choice{did_you_mean(str(value), names)}"]
    bounds = BOUNDS.get(setting.key)
    if bounds is not None and isinstance(value, int | float) and not bounds.holds(value):
        return [f"{here}: {value} must be {bounds.text()}"]
    return []


def _numeric(
    key: str,
    setting: Setting | None,
    kind: str,
    entry: Mapping[str, Any],
    when: dict[str, tuple[Any, ...]],
    problems: list[str],
) -> Parameter | None:
    here = f"space: {key}"
    if setting is None or setting.type not in (int, float) or (setting.type is int and kind == "float"):
        expected = setting.expected if setting is not None else "the name of a file"
        problems.append(f"{here}: type={kind} does not fit, the setting is {expected}")
        return None
    low, high, step, log = entry.get("low"), entry.get("high"), entry.get("step"), entry.get("log", False)
    numbers = {"low": low, "high": high} | ({"step": step} if step is not None else {})
    for name, value in numbers.items():
        right = int if kind == "int" else (int, float)
        if isinstance(value, bool) or not isinstance(value, right) or not math.isfinite(value):
            problems.append(f"{here}: {name}={value} must be a {'whole ' if kind == 'int' else ''}number")
            return None
    if not isinstance(log, bool):
        problems.append(f"{here}: log must be true or false, got {log!r}")
        return None
    assert isinstance(low, int | float)
    assert isinstance(high, int | float)
    if low > high:
        problems.append(f"{here}: low={low} is above high={high}")
    if step is not None and step <= 0:
        problems.append(f"{here}: step={step} must be above 0")
    if log and low <= 0:
        problems.append(f"{here}: low={low} must be above 0 with log: true")
    if log and step is not None:
        problems.append(f"{here}: step and log exclude each other")
    bounds = BOUNDS.get(key)
    for name, value in (("low", low), ("high", high)):
        if bounds is not None and not bounds.holds(value):
            problems.append(f"{here}: {name}={value}: {key} must be {bounds.text()}")
    cast = int if kind == "int" else float
    return Parameter(
        key, kind, cast(low), cast(high), cast(step) if step is not None else None, log, (), when
    )


def _in_order(found: Mapping[str, Parameter], named: set[str], problems: list[str]) -> tuple[Parameter, ...]:
    """Parameters with those that their conditions read in front of them."""
    for parameter in found.values():
        for key, values in parameter.when.items():
            here = f"space: {parameter.key}: when: {key}"
            if key not in named:
                problems.append(f"{here} is no key of the space{did_you_mean(key, named)}")
            elif key in found:
                impossible = [value for value in values if not found[key].contains(value)]
                if impossible:
                    problems.append(f"{here} never takes the value {impossible[0]}")
    ordered: dict[str, Parameter] = {}
    waiting = dict(found)
    while waiting:
        ready = [p for p in waiting.values() if not any(key in waiting for key in p.when)]
        if not ready:
            problems.append(f"space: the conditions of {', '.join(sorted(waiting))} run in a circle")
            break
        for parameter in ready:
            ordered[parameter.key] = waiting.pop(parameter.key)
    return tuple(ordered.values())
