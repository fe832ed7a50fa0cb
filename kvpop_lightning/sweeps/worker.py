"""One worker: takes a ticket, runs its trial, tells the study; until nothing is left."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvpop_lightning.sweeps import trial as trials
from kvpop_lightning.sweeps.runs import TrialRuns
from kvpop_lightning.sweeps.sampling import build_sampler
from kvpop_lightning.sweeps.space import Point, suggest_point
from kvpop_lightning.sweeps.spec import Sweep
from kvpop_lightning.sweeps.tickets import TICKET, Tickets
from kvpop_lightning.sweeps.trial import TrialResult, run_trial

log = logging.getLogger(__name__)

WAIT_S = 1.0
"""Seconds between two looks while others run the last trials."""


@dataclass
class TrialView:
    """What the table shows of a trial that this process runs or ran."""

    number: int
    point: dict[str, Any]
    started: float
    state: str = "running"
    step: int = 0
    report: float | None = None
    values: dict[str, float] = field(default_factory=dict)
    seconds: float | None = None
    message: str = ""
    baseline: bool = False


@dataclass(frozen=True)
class WorkPlan:
    """What all workers of a process share."""

    sweep: Sweep
    words: Sequence[str]
    """Words of a trial."""
    folder: Path
    """Of the sweep; trials lie below."""
    tags: Mapping[str, str]
    runs: TrialRuns
    measure: Mapping[str, Any]
    heartbeat_s: float
    grace_s: float
    timeout_s: float | None
    memory_limit_gb: float | None
    threads: int | None
    command: Sequence[str] | None = None

    def trial_folder(self, ticket: int) -> Path:
        """By ticket: a trial that is run again goes on from the checkpoint of the one that died."""
        return self.folder / "trials" / f"{ticket:04d}"


class Worker:
    """Runs trials one after the other on one GPU (or on none).

    Args:
        plan: what to run.
        tickets: with a study object of this thread's own.
        gpu: device number for the children.
        stop: set = take no further trial and give back the one that runs.
        show: told of every change of a trial.
    """

    def __init__(
        self,
        plan: WorkPlan,
        tickets: Tickets,
        *,
        gpu: str | None,
        stop: threading.Event,
        show: Callable[[TrialView], None],
    ) -> None:
        self.plan, self.tickets, self.gpu, self.stop, self.show = plan, tickets, gpu, stop, show

    def run(self) -> None:
        """Works until every ticket is finished, or `stop` is set."""
        while not self.stop.is_set():
            trial = self.tickets.claim(lambda ticket: build_sampler(self.plan.sweep, ticket))
            if trial is not None:
                self._run(trial)
            elif self.tickets.rescue() == 0:
                if self.tickets.progress().complete:
                    return
                self.stop.wait(WAIT_S)  # others run the last ones, and may die

    def _run(self, trial: Any) -> None:
        plan = self.plan
        try:
            point = suggest_point(plan.sweep.space, trial)
            trial.set_user_attr("point", point)
        except BaseException:
            self.tickets.give_back(trial, {"outcome": trials.INTERRUPTED}, counted=True)
            raise
        view = TrialView(trial.number, point, time.monotonic(), baseline="baseline" in trial.user_attrs)
        self.show(view)
        try:
            result = self._run_trial(trial, point, view)
        except BaseException:  # the machine, not the point: it has cost the ticket nothing
            self.tickets.give_back(trial, {"outcome": trials.INTERRUPTED}, counted=False)
            raise
        counts, state = self._tell(trial, result)
        if not counts:
            state, message = (
                trials.INTERRUPTED,
                "given up for lost by another worker; its result does not count",
            )
        else:
            message = result.message
        plan.runs.ended(
            result.run_id,
            result.state,
            {"sweep.message": message} if message else {},
            run_dir=result.run_dir,
            name=result.name,
        )
        view.state, view.seconds = state, result.seconds
        view.message = "" if state == trials.PRUNED else message  # the state says it
        view.values = result.values
        if state not in (trials.FINISHED, trials.PRUNED) and result.last_lines:
            view.message = f"{message}\n{result.last_lines}"
        self.show(view)

    def _run_trial(self, trial: Any, point: Point, view: TrialView) -> TrialResult:
        plan, ticket = self.plan, trial.user_attrs[TICKET]
        return run_trial(
            plan.words,
            point,
            run_dir=plan.trial_folder(ticket),
            objective=plan.sweep.objective,
            gpu=self.gpu,
            on_metrics=_Judge(trial, plan.sweep, view, self.show),
            timeout_s=plan.timeout_s,
            tags={
                **plan.tags,
                "trial": str(ticket),
                "optuna.trial": str(trial.number),
                "sweep.baseline": str(view.baseline).lower(),
            },
            name=f"trial {ticket}",
            measure=plan.measure,
            stop=self.stop,
            on_tick=self._heart(trial._trial_id),
            grace_s=plan.grace_s,
            memory_limit_gb=plan.memory_limit_gb,
            threads=plan.threads,
            command=plan.command,
        )

    def _tell(self, trial: Any, result: TrialResult) -> tuple[bool, str]:
        """Ends the trial in the study: (whether it still counted, what the table says)."""
        attrs: dict[str, Any] = {
            "outcome": result.state,
            "seconds": round(result.seconds, 1),
            "run_dir": str(result.run_dir),
            "exit_code": result.exit_code,
        }
        if result.run_id is not None:
            attrs["run_id"] = result.run_id
        if result.message:
            attrs["message"] = result.message[:1000]
            attrs["last_lines"] = result.last_lines[-1500:]
        if result.state == trials.FINISHED:
            values = [result.values[name] for name in self.plan.sweep.objective.metrics]
            attrs["rows"] = result.rows
            return self.tickets.finish(trial, "complete", values, attrs), result.state
        if result.state == trials.PRUNED:
            return self.tickets.finish(trial, "pruned", None, attrs), result.state
        if result.state == trials.INTERRUPTED and self.stop.is_set():
            self.tickets.give_back(trial, attrs, counted=False)
            return True, result.state
        if result.again or result.state == trials.INTERRUPTED:
            again = self.tickets.give_back(trial, attrs, counted=True)
            return True, f"{result.state}, runs again" if again else result.state
        return self.tickets.finish(trial, "failed", None, attrs), result.state

    def _heart(self, trial_id: int) -> Callable[[], None]:
        last = time.monotonic()

        def beat() -> None:
            nonlocal last
            if time.monotonic() - last >= self.plan.heartbeat_s:
                last = time.monotonic()
                try:
                    self.tickets.beat(trial_id)
                except Exception as error:  # a database that is away for a moment must not end the trial
                    log.warning("no sign of life written: %s", " ".join(str(error).split())[:200])

        return beat


class _Judge:
    """Passes a trial's metrics on to the pruner, by global step, and says when to stop."""

    def __init__(self, trial: Any, sweep: Sweep, view: TrialView, show: Callable[[TrialView], None]) -> None:
        self.trial, self.metric, self.view, self.show = trial, sweep.pruner.metric, view, show
        self.prunes = sweep.pruner.name != "none"
        self._reported = -1

    def __call__(self, step: int, metrics: dict[str, float]) -> bool:
        value = metrics.get(self.metric) if self.prunes else None
        # After a resume steps come twice; the study keeps the first.
        if value is None or step <= self._reported or not math.isfinite(value):
            if step > self.view.step and not any(name.startswith("objective_row/") for name in metrics):
                self.view.step = step
            return False
        self._reported = step
        self.view.step, self.view.report = max(step, self.view.step), value
        self.trial.report(value, step)
        self.show(self.view)
        return bool(self.trial.should_prune())
