"""`kvpop sweep`: make or join the study, run workers, conclude."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpop_lightning.config.schema import Config
from kvpop_lightning.errors import UserError
from kvpop_lightning.locks import exclusive, one_at_a_time
from kvpop_lightning.sweeps import best as conclusions
from kvpop_lightning.sweeps import study as studies
from kvpop_lightning.sweeps import trial as trials
from kvpop_lightning.sweeps.checks import baseline_points, check_settings, total_trials
from kvpop_lightning.sweeps.conclude import Conclusion
from kvpop_lightning.sweeps.files import run_id_in, write_json
from kvpop_lightning.sweeps.gpus import assign_gpus, thread_share
from kvpop_lightning.sweeps.owner import claim_folder
from kvpop_lightning.sweeps.point import trial_words
from kvpop_lightning.sweeps.report import report_files
from kvpop_lightning.sweeps.runs import PARENT_TAG, TrialRuns
from kvpop_lightning.sweeps.sampling import build_pruner, laid_out_points
from kvpop_lightning.sweeps.show import SweepScreen
from kvpop_lightning.sweeps.spec import load_sweep
from kvpop_lightning.sweeps.storage import lock_file, open_storage, storage_address
from kvpop_lightning.sweeps.tickets import Progress, Tickets
from kvpop_lightning.sweeps.worker import Worker, WorkPlan
from kvpop_lightning.tracking import TrackedRun
from kvpop_lightning.tracking.registry import register_trained

log = logging.getLogger(__name__)

LOOK_S = 0.2
COUNT_S = 2.0


@dataclass
class SweepOutcome:
    """What a run of a sweep left behind."""

    progress: Progress
    table: list[dict[str, Any]]
    """Every trial, also in `trials.json`."""
    best: list[dict[str, Any]]
    """Re-scored trials, best first, also in `best.json`; empty until the sweep is complete."""
    experiment: Path | None = None
    """`configs/experiment/NAME_best.yaml`."""
    confirmed: dict[str, Any] | None = None
    """The winner over several seeds (`confirm.conclusion`), also in `confirmed.json`."""
    stopped: str = ""
    """Why it ended before the total."""


class SweepRun:
    """One call of `kvpop sweep`.

    Args:
        config: the sweep's configuration: its `run_dir` is the sweep's folder.
        overrides: what the user typed; wins over the file.
        command: what runs a trial (tests).

    Raises:
        ConfigError, UserError: anything wrong with the file, the space, a baseline point or the settings,
            before anything starts.
    """

    def __init__(
        self, config: Config, overrides: Sequence[str] = (), *, command: Sequence[str] | None = None
    ) -> None:
        if not config.sweep.name:
            raise UserError("which sweep? kvpop sweep NAME reads sweeps/NAME.yaml")
        self.config, self.settings, self.command = config, config.sweep, command
        self.sweep = load_sweep(config.sweep.name)
        self.folder = Path(config.run_dir)
        own = trial_words(overrides)
        self.words = [*self.sweep.words, *own]
        self.total = total_trials(self.sweep, self.settings.trials)
        base = check_settings(self.sweep, own, self.words, self.total)
        self.baseline = baseline_points(self.sweep, self.words, base)
        self.steps, self.seed = base.trainer.max_steps, base.seed
        self.every = self.sweep.pruner.every or max(1, self.steps // 4)
        self.address = storage_address(self.settings.storage, self.folder)
        self.study_name = self.settings.study or self.sweep.name
        self.gpus = assign_gpus(self.settings.gpus, self.settings.workers)
        self.runs = TrialRuns(config)
        self.stop = threading.Event()
        self._errors: list[BaseException] = []

    def run(self) -> SweepOutcome:
        """Makes the study, works until its total, concludes. Ctrl-C gives running trials back and raises."""
        claim_folder(self.folder, self.study_name, self.address)
        more = "`--worker` with its storage adds workers"
        with exclusive(self.folder, "runs this sweep", f"wait for it; {more}"):  # two would conclude at once
            return self._run()

    def _run(self) -> SweepOutcome:
        storage = open_storage(self.address, self.settings.heartbeat_s)
        with one_at_a_time(self.folder / ".study.lock"):
            study = studies.create_study(storage, self.study_name, self.sweep, self.words)
        name = f"sweep {self.sweep.name}"  # the experiment's own run name is for its own training
        with TrackedRun(
            self.config, name=name, command="sweep", overrides=self.words, tags={"sweep": self.sweep.name}
        ) as parent:
            if parent.run_id is not None:
                study.set_user_attr(studies.PARENT_RUN, parent.run_id)
            with one_at_a_time(self.folder / ".study.lock"):  # workers begin when the tickets are there
                laid_out = laid_out_points(self.sweep, max(0, self.total - len(self.baseline)))
                self._tickets(study).top_up(self.total, self.baseline, laid_out)
            if self.settings.workers == 0:
                return SweepOutcome(self._tickets(study).progress(), [], [], stopped="only made")
            try:
                outcome = self._work(study, storage, parent.run_id)
                if outcome.progress.complete:
                    self._conclude(study, outcome)
            finally:
                self._settle(study, parent.run_id)
            self._keep(parent, study, outcome)
        return outcome

    def join(self) -> SweepOutcome:
        """Works for a study that another process made, until nothing waits any more."""
        storage = open_storage(self.address, self.settings.heartbeat_s)
        study = studies.join_study(storage, self.study_name, self.address)
        studies.check_same_question(study, self.sweep, self.words)
        claim_folder(self.folder, self.study_name, self.address)
        try:
            return self._work(study, storage, study.user_attrs.get(studies.PARENT_RUN))
        finally:
            self.runs.settle(self.folder)

    def _work(self, study: Any, storage: Any, parent_run_id: str | None) -> SweepOutcome:
        limit = self.settings.time_limit_s or self.sweep.time_limit_s
        until = time.monotonic() + limit if limit else None
        searched = [parameter.key for parameter in self.sweep.space]
        directions = dict(zip(self.sweep.objective.metrics, self.sweep.directions, strict=True))
        screen = SweepScreen(self.sweep.name, searched, directions, max(1, len(self.gpus)))
        own = self._tickets(study)
        plan = self._plan(parent_run_id)
        stopped = ""
        with screen:
            screen.progress(own.progress())
            ended = [
                self._start_worker(index, plan, storage, screen) for index in range(len(self.gpus or [None]))
            ]
            counted = time.monotonic()
            try:
                while not all(event.is_set() for event in ended):
                    time.sleep(LOOK_S)
                    if time.monotonic() - counted > COUNT_S:
                        counted = time.monotonic()
                        screen.progress(own.progress(), self._best_so_far(study))
                    if until is not None and time.monotonic() > until and not self.stop.is_set():
                        stopped = f"time limit of {limit:g} s"
                        self.stop.set()
            finally:  # also Ctrl-C: children write checkpoints, trials go back to the queue
                self.stop.set()
                while not all(event.is_set() for event in ended):
                    time.sleep(LOOK_S)
            screen.progress(own.progress(), self._best_so_far(study))
        if self._errors:
            raise self._errors[0]
        progress = own.progress()
        return SweepOutcome(
            progress,
            self._table(study),
            [],
            stopped="" if progress.complete else stopped,
        )

    def _start_worker(self, index: int, plan: WorkPlan, storage: Any, screen: SweepScreen) -> threading.Event:
        """A thread that works; the event is set when it has ended.

        Not `Thread.join`: interrupted by Ctrl-C, Python 3.11 takes the thread for ended from then on.
        """
        import optuna

        ended = threading.Event()

        def work() -> None:
            try:
                pruner = build_pruner(self.sweep.pruner, self.steps, self.every)
                study = optuna.load_study(study_name=self.study_name, storage=storage, pruner=pruner)
                gpu = self.gpus[index] if self.gpus else None
                Worker(plan, self._tickets(study), gpu=gpu, stop=self.stop, show=screen.update).run()
            except BaseException as error:  # of a thread: the main one raises it
                log.error("a worker ended: %s", error, exc_info=error)
                self._errors.append(error)
                self.stop.set()
            finally:
                ended.set()

        threading.Thread(target=work, name=f"worker {index}").start()
        return ended

    def _plan(self, parent_run_id: str | None) -> WorkPlan:
        settings, pruner = self.settings, self.sweep.pruner
        measure: dict[str, Any] = {"by_row": True} if pruner.name == "wilcoxon" else {}
        if pruner.measured:
            measure = {"every": self.every, "rows": pruner.rows}
        tags = {"sweep": self.sweep.name, "study": self.study_name}
        return WorkPlan(
            sweep=self.sweep,
            words=self.words,
            folder=self.folder,
            tags=tags | ({PARENT_TAG: parent_run_id} if parent_run_id else {}),
            runs=self.runs,
            measure=measure,
            heartbeat_s=settings.heartbeat_s,
            grace_s=settings.grace_s,
            timeout_s=settings.trial_timeout_s,
            memory_limit_gb=settings.memory_limit_gb,
            threads=settings.threads or thread_share(max(1, settings.workers)),
            command=self.command,
        )

    def _tickets(self, study: Any) -> Tickets:
        return Tickets(
            study,
            retries=self.settings.retries,
            heartbeat_s=self.settings.heartbeat_s,
            lock=lock_file(self.address),
            on_lost=lambda trial: self.runs.ended(
                self._run_of(trial), trials.FAILED, {"sweep.message": "its worker was lost"}
            ),
        )

    def _run_of(self, trial: Any) -> str | None:
        """The run of a trial whose worker could not tell it any more: its folder names it, if it is here."""
        ticket = trial.user_attrs.get("ticket")
        return run_id_in(self.folder / "trials" / f"{ticket:04d}", f"trial {ticket}")

    def _run_ids_elsewhere(self, study: Any) -> set[str]:
        import optuna

        running = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,))
        return {run_id for trial in running if (run_id := self._run_of(trial)) is not None}

    def _best_so_far(self, study: Any) -> dict[str, Any] | None:
        found = conclusions.ranked(study, self.sweep)
        if not found:
            return None
        metrics = self.sweep.objective.metrics
        if self.sweep.several:
            return {"text": f"{len(found)} on the front"}
        return {"text": f"{metrics[0]} {found[0].values[0]:.5g} (trial {found[0].number})"}

    def _conclude(self, study: Any, outcome: SweepOutcome) -> None:
        """Re-scores the best and the baseline, writes the winner as an experiment, tries further seeds."""
        plan = self._plan(study.user_attrs.get(studies.PARENT_RUN))
        workers = max(1, self.settings.workers)
        concluding = Conclusion(plan, study, gpus=self.gpus, workers=workers, seed=self.seed)
        outcome.best = concluding.rescored()
        if outcome.best:
            first = outcome.best[0]
            note = (
                f"Best point of sweep {self.sweep.name}, trial {first['number']}: "
                f"{conclusions.headline_of(first, self.sweep.objective.metrics)}."
            )
            outcome.experiment = conclusions.write_best(self.sweep, self.words, first["point"], note)
            outcome.confirmed = concluding.confirmed(outcome.best)

    def _table(self, study: Any) -> list[dict[str, Any]]:
        table = studies.trials_table(study, self.sweep.objective.metrics, self.seed)
        for entry in table:  # a run that the tracking server got only afterwards
            if entry["run_id"] is None and entry["ticket"] is not None:
                folder = self.folder / "trials" / f"{entry['ticket']:04d}"
                entry["run_id"] = run_id_in(folder, f"trial {entry['ticket']}")
        return table

    def _settle(self, study: Any, parent_run_id: str | None) -> None:
        """Also after Ctrl-C or an error of our own: no run of a trial may stay RUNNING."""
        self.runs.settle(self.folder)
        table = self._table(study)
        write_json(self.folder / "trials.json", table)
        ended = {e["run_id"]: e["outcome"] for e in table if e["run_id"] and e["outcome"] in trials.STATES}
        self.runs.close_left_over(parent_run_id, self._run_ids_elsewhere(study), ended)

    def _keep(self, parent: TrackedRun, study: Any, outcome: SweepOutcome) -> None:
        outcome.table = self._table(study)
        write_json(self.folder / "trials.json", outcome.table)
        files = [self.folder / "trials.json", self.sweep.path]
        if outcome.best:
            write_json(self.folder / "best.json", outcome.best)
            files.append(self.folder / "best.json")
            winner = outcome.best[0]
            parent.log_metrics({f"best/{name}": value for name, value in winner["rescored"].items()}, step=0)
            parent.set_tags({f"best.{key}": value for key, value in winner["point"].items()})
            self._register(parent, next(e for e in outcome.table if e["number"] == winner["number"]))
        if outcome.confirmed is not None:
            write_json(self.folder / "confirmed.json", outcome.confirmed)
            files.append(self.folder / "confirmed.json")
        if outcome.experiment is not None:
            files.append(outcome.experiment)
        states = [entry["state"] for entry in outcome.table]
        parent.log_metrics({f"trials/{s}": states.count(s) for s in ("complete", "pruned", "fail")}, step=0)
        for path in files:
            parent.log_artifact(path)
        for path in report_files(study, self.sweep.name, self.sweep.objective.metrics, self.folder):
            parent.log_artifact(path, "report")

    def _register(self, parent: TrackedRun, trained: dict[str, Any]) -> None:
        """The winner's policy as the newest version of the registered model `kvpop_SWEEP`."""
        place = self.folder / "trials" / f"{trained['ticket']:04d}"
        name, tags = f"kvpop_{self.sweep.name}", {"sweep": self.sweep.name, "trial": str(trained["number"])}
        if version := register_trained(self.config.tracking, trained["run_id"], place, name, tags):
            parent.set_tags({"registered": version.uri})


def run_sweep(
    config: Config, overrides: Sequence[str] = (), *, command: Sequence[str] | None = None
) -> SweepOutcome:
    """Runs or joins the sweep that `config.sweep` names; see `SweepRun`."""
    sweep_run = SweepRun(config, overrides, command=command)
    if config.sweep.worker:
        if config.sweep.storage is None:
            raise UserError(
                "--worker needs the storage of the sweep that it joins, as in storage=postgresql://user@host/database"
            )
        return sweep_run.join()
    return sweep_run.run()
