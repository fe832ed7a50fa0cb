"""What a sweep concludes: the best trials measured again on more rows, the winner as an experiment file."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml

from kvpop_lightning.config.compose import compose, to_yaml
from kvpop_lightning.config.describe import groups, settings, top_groups
from kvpop_lightning.config.files import config_roots, group_file, project_folder, read_yaml
from kvpop_lightning.config.schema import Config
from kvpop_lightning.evaluation.statistics import paired_interval
from kvpop_lightning.sweeps.objective import Objective
from kvpop_lightning.sweeps.point import trial_config
from kvpop_lightning.sweeps.space import Point
from kvpop_lightning.sweeps.spec import Sweep
from kvpop_lightning.tracking.environment import write_atomically


def finished_trials(study: Any) -> list[Any]:
    import optuna

    return list(study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,)))


def ranked(study: Any, sweep: Sweep) -> list[Any]:
    """Finished trials, best first; with several metrics the Pareto front, ordered by the first one."""
    found = list(study.best_trials) if sweep.several else finished_trials(study)
    sign = 1 if sweep.directions[0] == "minimize" else -1
    return sorted(found, key=lambda trial: sign * trial.values[0])


def to_rescore(study: Any, sweep: Sweep) -> list[Any]:
    """The best trials and every finished baseline, each once."""
    chosen = ranked(study, sweep)[: sweep.rescore_best]
    if chosen:
        chosen += [trial for trial in finished_trials(study) if trial.user_attrs.get("baseline")]
    return list({trial.number: trial for trial in chosen}.values())


def rescore(
    study: Any, sweep: Sweep, measure: Callable[[list[Any], Objective], Iterable[tuple[Any, Any]]]
) -> list[dict[str, Any]]:
    """The chosen trials on `rescore.rows` rows, best first, each with its paired difference to the baseline.

    Args:
        measure: runs trials' policies again, (frozen trials, objective) -> pairs of a trial and its
            TrialResult; their trainings are reused.
    """
    objective = replace(sweep.objective, rows=sweep.rescore_rows)
    known: dict[str, Any] = dict(study.user_attrs.get("rescored", {}))
    keys = {trial.number: f"{trial.number}-rows{objective.rows}" for trial in to_rescore(study, sweep)}
    missing = [trial for trial in to_rescore(study, sweep) if keys[trial.number] not in known]
    for trial, result in measure(missing, objective):
        if result.state == "finished":
            known[keys[trial.number]] = {"values": result.values, "rows": result.rows}
            study.set_user_attr("rescored", known)
    entries = []
    for trial in to_rescore(study, sweep):
        key = keys[trial.number]
        if key not in known:
            continue
        entries.append(
            {
                "number": trial.number,
                "point": trial.user_attrs.get("point", dict(trial.params)),
                "baseline": bool(trial.user_attrs.get("baseline")),
                "values": dict(zip(objective.metrics, trial.values, strict=True)),
                "rescored": known[key]["values"],
                "rows": known[key]["rows"],
            }
        )
    _compare(entries)
    sign = 1 if sweep.directions[0] == "minimize" else -1
    return sorted(entries, key=lambda entry: sign * entry["rescored"][objective.metrics[0]])


def _compare(entries: Sequence[dict[str, Any]]) -> None:
    baseline = next((entry for entry in entries if entry["baseline"]), None)
    for entry in entries:
        entry["versus_baseline"] = {}
        for name, values in entry["rows"].items():
            if baseline is not None and entry is not baseline and len(values) == len(baseline["rows"][name]):
                interval = paired_interval(values, baseline["rows"][name])
                entry["versus_baseline"][name] = interval.to_dict()


def write_best(sweep: Sweep, words: Sequence[str], point: Point, note: str) -> Path:
    """`configs/experiment/NAME_best.yaml`: `experiment=NAME_best` composes to what the best trial ran with.

    Args:
        words: of the trials.
        note: for the file's first line.
    """
    path = (config_roots() or [project_folder() / "configs"])[0] / "experiment" / f"{sweep.name}_best.yaml"
    wanted = trial_config(words, point, sweep.objective)
    body = _experiment_body(words, point)
    head = f"# {note}\n"
    run_dir = f"runs/{sweep.name}_best"
    if body is not None:
        body["run_dir"] = run_dir
        body.setdefault("tracking", {})["run_name"] = f"{sweep.name}_best"
        write_atomically(path, head + yaml.safe_dump(body, sort_keys=False, allow_unicode=True, width=110))
        if _same(compose([f"experiment={path}"]), wanted):
            return path
    # Settings that a compact file cannot express: write them all.
    whole = replace(
        wanted, run_dir=run_dir, experiment=f"{sweep.name}_best", sweep=Config().sweep, eval=Config().eval
    )
    budget = wanted.policy.budget
    whole = replace(
        whole,
        eval=replace(
            wanted.eval,
            policies=["full", wanted.policy.name],
            budgets=[budget.sink + budget.window + budget.topk],
        ),
    )
    return write_atomically(path, head + to_yaml(whole))


def _experiment_body(words: Sequence[str], point: Point) -> dict[str, Any] | None:
    """The experiment's file with the sweep's settings and the point in it."""
    experiment: str | None = None
    for word in words:
        key, _, value = word.partition("=")
        if key.strip() == "experiment":
            experiment = value
    if experiment is not None and experiment.endswith((".yaml", ".yml")):
        return None
    body = read_yaml(group_file("experiment", experiment)) if experiment else {}
    defaults = dict(body.get("defaults") or {})
    parsed = [word.partition("=")[::2] for word in words]
    for key, value in (*parsed, *point.items()):
        key = key.strip()
        if key in top_groups():
            defaults[key] = value
        elif key in settings() and key != "experiment" and not key.startswith("tracking."):
            _put(body, key, yaml.safe_load(value) if isinstance(value, str) else value)
    body.pop("defaults", None)
    body.pop("train_policies", None)
    return ({"defaults": defaults} if defaults else {}) | body


def _put(body: dict[str, Any], key: str, value: Any) -> None:
    node, parts = body, key.split(".")
    for part in parts[:-1]:
        assert ".".join(parts[: parts.index(part) + 1]) in groups()
        node = node.setdefault(part, {})
    node[parts[-1]] = value


def _same(one: Config, other: Config) -> bool:
    """Equal in all that shapes a training."""
    parts = ("model", "data", "policy", "distill", "trainer")
    first, second = asdict(one), asdict(other)
    return one.seed == other.seed and all(first[part] == second[part] for part in parts)


def headline_of(best: Mapping[str, Any], metrics: Sequence[str]) -> str:
    """`kl 0.123 (rows 2: 0.120), 0.040 below the baseline [0.030, 0.050]` for a person."""
    name = metrics[0]
    rescored, first = best["rescored"][name], best["values"][name]
    text = f"{name} {rescored:.5g} (in the sweep {first:.5g})"
    interval = best.get("versus_baseline", {}).get(name)
    if interval is not None and interval["low"] is not None and math.isfinite(interval["low"]):
        text += (
            f", {interval['difference']:+.4g} against the baseline "
            f"[{interval['low']:+.4g}, {interval['high']:+.4g}] on the same {interval['rows']} rows"
        )
    return text
