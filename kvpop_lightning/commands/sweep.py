"""`kvpop sweep NAME`: search settings, one child process per trial."""

from __future__ import annotations

from collections.abc import Sequence

from kvpop_lightning.commands import Call, last_value
from kvpop_lightning.config.schema import Config

SUMMARY = "search settings over many trainings, on one or many machines"
DETAILS = """Reads sweeps/NAME.yaml (docs/sweeps.md): what is searched, by which sampler, judged by which
    metrics. Each trial is a training and a measurement in a process of its own. The same command goes on
    until the total number of trials; the best ones and the baseline are then measured again on more rows,
    and the winner is written as configs/experiment/NAME_best.yaml.

    More machines join with kvpop sweep NAME --worker storage=postgresql://... and the same settings.
    Settings of the group sweep may be written without it: workers=2."""
KEYS = (
    "sweep.workers",
    "sweep.gpus",
    "sweep.storage",
    "sweep.study",
    "sweep.trials",
    "sweep.time_limit_s",
    "sweep.retries",
    "sweep.heartbeat_s",
    "sweep.grace_s",
    "sweep.trial_timeout_s",
    "sweep.memory_limit_gb",
    "sweep.threads",
    "sweep.worker",
    "sweep.report",
    "run_dir",
    "seed",
)
DEFAULT_EXPERIMENT: str | None = None
ARGUMENT = "sweep.name"
FLAGS = {"--worker": "sweep.worker=true", "--report": "sweep.report=true"}


def words_before(settings: Sequence[str]) -> list[str]:
    """What the sweep's file fixes, in front of what the user typed."""
    from kvpop_lightning.sweeps.spec import words_of_sweep

    name = last_value(settings, "sweep.name", "name")
    return [] if name is None else words_of_sweep(name)


def run(config: Config, call: Call) -> int:
    if config.sweep.report:
        from kvpop_lightning.sweeps.report import report_sweep

        print(*report_sweep(config), sep="\n")
        return 0
    from kvpop_lightning.sweeps.confirm import headlines
    from kvpop_lightning.sweeps.driver import run_sweep

    outcome = run_sweep(config, call.overrides)
    done = outcome.progress
    if outcome.stopped == "only made":
        print(f"the study of {done.total} trials is made: workers join it with kvpop sweep ... --worker")
        return 0
    if not done.complete:
        print(f"{done.finished} of {done.total} trials ({outcome.stopped}): the same command goes on")
        if done.finished == 0 and "time limit" in outcome.stopped:
            print("not one trial ended within it: sweep.time_limit_s=SECONDS gives more")
        return 0
    print(f"all {done.total} trials are done")
    if config.sweep.worker:
        return 0
    for entry in outcome.best:
        print(_line(entry))
    for line in headlines(outcome.confirmed) if outcome.confirmed else ():
        print(line)
    if outcome.experiment is not None:
        print(f"the best point: {outcome.experiment}")
    if not any(entry["state"] == "complete" for entry in outcome.table):
        print("no trial finished: see the messages above and trials/*/child.log")
        return 1
    return 0


def _line(entry: dict) -> str:  # type: ignore[type-arg]
    from kvpop_lightning.sweeps.best import headline_of

    name = " (baseline)" if entry["baseline"] else ""
    point = " ".join(f"{key}={value}" for key, value in entry["point"].items())
    return f"trial {entry['number']}{name}: {headline_of(entry, list(entry['rescored']))}: {point}"
