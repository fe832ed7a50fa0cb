"""What a report shows of a study: finite results only, and numbers drawn from them."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvpop_lightning.sweeps.storage import quieten_optuna

log = logging.getLogger(__name__)

DECAY, TOPK = "policy.decay", "policy.budget.topk"


@dataclass(frozen=True)
class StudyView:
    """A study as its report sees it."""

    study: Any
    """In memory, with the finished trials whose values are finite, renumbered."""
    numbers: tuple[int, ...]
    """Of these trials in the real study."""
    metrics: tuple[str, ...]
    directions: tuple[str, ...]
    states: dict[str, int]
    """Trials of the real study by state; `not_finite` are complete ones with NaN or infinity."""

    @property
    def trials(self) -> list[Any]:
        return list(self.study.trials)

    @property
    def several(self) -> bool:
        return len(self.metrics) > 1

    def target(self, index: int) -> Any:
        """Optuna's `target` for one of the metrics."""
        return lambda trial: trial.values[index]

    def varied(self) -> list[str]:
        """Parameters with more than one value among the finished trials."""
        seen: dict[str, set[Any]] = {}
        for trial in self.trials:
            for key, value in trial.params.items():
                seen.setdefault(key, set()).add(value)
        return [key for key, values in seen.items() if len(values) > 1]

    def parameters(self) -> list[str]:
        return list(dict.fromkeys(key for trial in self.trials for key in trial.params))

    def numeric(self, key: str) -> bool:
        values = [trial.params[key] for trial in self.trials if key in trial.params]
        return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def view_of(study: Any, metrics: Sequence[str]) -> StudyView:
    """The study with what cannot be drawn left out."""
    import optuna

    quieten_optuna()
    directions = [direction.name.lower() for direction in study.directions]
    clean = optuna.create_study(directions=directions, sampler=optuna.samplers.RandomSampler(seed=0))
    numbers, states = [], Counter[str]()
    for trial in study.get_trials(deepcopy=False):
        values = trial.values or []
        complete = trial.state == optuna.trial.TrialState.COMPLETE
        if complete and len(values) == len(directions) and all(math.isfinite(v) for v in values):
            clean.add_trial(
                optuna.trial.create_trial(
                    params=trial.params, distributions=trial.distributions, values=list(values)
                )
            )
            numbers.append(trial.number)
            states["complete"] += 1
        else:
            states["not_finite" if complete else trial.state.name.lower()] += 1
    return StudyView(clean, tuple(numbers), tuple(metrics), tuple(directions), dict(states))


def importances(view: StudyView, index: int = 0) -> dict[str, float]:
    """Share of the metric's variance that each parameter explains (fANOVA); empty where it says nothing."""
    import optuna

    values = {trial.values[index] for trial in view.trials}
    if len(view.trials) < 4 or len(values) < 2 or not view.varied():
        return {}
    try:
        found = optuna.importance.get_param_importances(
            view.study,
            evaluator=optuna.importance.FanovaImportanceEvaluator(seed=0),
            target=view.target(index),
        )
    except Exception as error:  # a degenerate study must not cost the report
        log.warning("no parameter importances: %s", " ".join(str(error).split())[:200])
        return {}
    return {key: float(value) for key, value in found.items() if math.isfinite(value)}


def contour_pair(view: StudyView, weights: dict[str, float]) -> tuple[str, str] | None:
    """Budget and decay where both were searched, else the two numeric parameters that matter most."""
    usable = [key for key in view.varied() if view.numeric(key)]
    if TOPK in usable and DECAY in usable:
        return TOPK, DECAY
    usable.sort(key=lambda key: -weights.get(key, 0.0))
    return (usable[0], usable[1]) if len(usable) > 1 else None


def best_so_far(view: StudyView) -> list[float]:
    """The first metric's best value after each finished trial."""
    better = min if view.directions[0] == "minimize" else max
    found: list[float] = []
    for trial in view.trials:
        value = float(trial.values[0])
        found.append(value if not found else better(found[-1], value))
    return found


def summary(view: StudyView, name: str) -> dict[str, Any]:
    """The report in numbers, as JSON values."""
    best = sorted(view.study.best_trials, key=lambda trial: trial.values[0]) if view.trials else []
    return {
        "sweep": name,
        "metrics": dict(zip(view.metrics, view.directions, strict=True)),
        "states": view.states,
        "best": [
            {
                "number": view.numbers[trial.number],
                "values": dict(zip(view.metrics, trial.values, strict=True)),
                "point": trial.params,
            }
            for trial in best
        ],
        "importances": {metric: importances(view, i) for i, metric in enumerate(view.metrics)},
        "history": [
            {"number": number, "values": dict(zip(view.metrics, trial.values, strict=True)), "best": value}
            for number, trial, value in zip(view.numbers, view.trials, best_so_far(view), strict=True)
        ],
    }
