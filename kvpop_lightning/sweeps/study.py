"""A sweep's study: made once, before any worker; joined by others; never mixed with another question."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kvpop_lightning.config.schema import Config
from kvpop_lightning.errors import UserError
from kvpop_lightning.sweeps.point import trial_config
from kvpop_lightning.sweeps.spec import Sweep
from kvpop_lightning.tracking.naming import public_uri

DESCRIPTION, PARENT_RUN, SWEEP_DIR, WORDS = "description", "parent_run_id", "run_dir", "words"
JOIN_WAIT_S = 60.0
"""Seconds that a worker waits for the study to appear: in a job array all start at once."""
_NO_QUESTION = (
    "run_dir",
    "tracking.",
    "sweep.",
    "ablate.",
    "generate.",
    "eval.policies",
    "eval.budgets",
    "eval.figures",
    "train_policies",
    "model.device",
    "model.cache_dir",
    "data.cache_dir",
    "data.workers",
    "trainer.feature_cache_",
    "trainer.progress",
    "trainer.log_every",
    "trainer.checkpoint_every",
    "trainer.resume",
    "trainer.accelerator",
)
"""Settings that change how or where a trial runs, and not what it measures."""


def describe(sweep: Sweep, words: Sequence[str]) -> dict[str, Any]:
    """What must stay the same for two runs to belong to one study, flat.

    Raises:
        ConfigError: the sweep's own settings cannot be.
    """
    config = trial_config(words, {}, sweep.objective)
    searched = {parameter.key for parameter in sweep.space}
    found: dict[str, Any] = {
        f"metrics.{name}": direction
        for name, direction in zip(sweep.objective.metrics, sweep.directions, strict=True)
    }
    found |= {"objective.budget": sweep.objective.budget, "objective.rows": sweep.objective.rows}
    for parameter in sweep.space:
        found |= {f"space.{parameter.key}.{name}": value for name, value in parameter.describe().items()}
    found |= {f"settings.{key}": value for key, value in question(config).items() if key not in searched}
    return json.loads(json.dumps(found))


def question(config: Config) -> dict[str, Any]:
    """The settings that decide what a trial measures, flat."""
    return {
        key: value
        for key, value in flat(asdict(config))
        if not key.startswith(_NO_QUESTION) and key != "eval.rows"
    }


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """One line for every entry that is not the same."""
    missing = "(nothing)"
    return [
        f"{key}: {before.get(key, missing)} -> {now.get(key, missing)}"
        for key in sorted({*before, *now})
        if before.get(key, missing) != now.get(key, missing)
    ]


def create_study(storage: Any, name: str, sweep: Sweep, words: Sequence[str]) -> Any:
    """The study, new or as an earlier run left it.

    Raises:
        UserError: there is one of this name that asks something else; the message shows the differences.
    """
    import optuna

    described = describe(sweep, words)
    try:
        study = optuna.load_study(study_name=name, storage=storage, sampler=_unused_sampler())
    except KeyError:
        study = optuna.create_study(
            study_name=name,
            storage=storage,
            directions=[*sweep.directions],  # type: ignore[list-item]
            sampler=_unused_sampler(),
        )
        study.set_user_attr(DESCRIPTION, described)
        study.set_user_attr(WORDS, list(words))
        study.set_metric_names(list(sweep.objective.metrics))
        return study
    before = study.user_attrs.get(DESCRIPTION)
    if before is None:
        if len(study.get_trials(deepcopy=False)) > 0:
            raise UserError(f"sweep.study={name}: the storage holds a study of this name that is no sweep")
        study.set_user_attr(DESCRIPTION, described)  # its maker died between two writes
        study.set_user_attr(WORDS, list(words))
        return study
    if changed := differences(before, described):
        raise UserError(
            f"study '{name}' was made for another question, its trials cannot be compared with new ones: "
            f"{'; '.join(changed)}: undo this, or start a new study with another run_dir "
            "(and sweep.study=OTHER_NAME where the storage is shared)"
        )
    return study


def join_study(storage: Any, name: str, address: str, wait_s: float = JOIN_WAIT_S) -> Any:
    """The study that `kvpop sweep NAME` made.

    Raises:
        UserError: it does not appear.
    """
    import optuna

    from kvpop_lightning.sweeps.tickets import TOTAL

    started, told = time.monotonic(), False
    while True:
        try:
            study = optuna.load_study(study_name=name, storage=storage, sampler=_unused_sampler())
            if study.user_attrs.get(TOTAL) is not None:
                return study
        except KeyError:
            pass
        waited = time.monotonic() - started
        if waited > 2 and not told:
            told = True
            print(f"waiting up to {wait_s:.0f} s for kvpop sweep to make the study '{name}'", flush=True)
        if waited > wait_s:
            raise UserError(
                f"there is no study '{name}' in {public_uri(address)}: make it first with kvpop sweep and "
                "the same storage (workers=0 only makes it)"
            )
        time.sleep(min(1.0, wait_s / 10))


def check_same_question(study: Any, sweep: Sweep, words: Sequence[str]) -> None:
    """Refuses a worker whose files or settings differ from those that the study was made with.

    Raises:
        UserError: with the differences.
    """
    if changed := differences(study.user_attrs.get(DESCRIPTION, {}), describe(sweep, words)):
        raise UserError(
            f"this worker would ask another question than study '{study.study_name}': {'; '.join(changed)}"
        )


def trials_table(study: Any, metrics: Sequence[str], seed: int | None = None) -> list[dict[str, Any]]:
    """Every trial as JSON values, in order; `seed` is that of their trainings."""
    found = []
    for trial in study.get_trials(deepcopy=False):
        attrs = trial.user_attrs
        found.append(
            {
                "number": trial.number,
                "ticket": attrs.get("ticket"),
                "attempt": attrs.get("attempt"),
                "state": trial.state.name.lower(),
                "outcome": attrs.get("outcome"),
                "message": attrs.get("message"),
                "baseline": bool(attrs.get("baseline")),
                "point": attrs.get("point") or dict(trial.params),
                "values": dict(zip(metrics, trial.values, strict=False)) if trial.values else None,
                "rows": attrs.get("rows"),
                "seconds": attrs.get("seconds"),
                "seed": seed,
                "run_id": attrs.get("run_id"),
            }
        )
    return found


def _unused_sampler() -> Any:
    """Each trial brings its own; the default one would load more."""
    import optuna

    return optuna.samplers.RandomSampler(seed=0)
