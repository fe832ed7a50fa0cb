"""Exactly so many trials, whatever dies: each is a ticket that exists before work starts.

A ticket is a waiting Optuna trial. A worker takes one by changing its state to running, which the storage
lets only one worker do. A trial that dies is replaced by a new waiting trial of the same ticket. So trials
cannot be lost or doubled, and no worker has to count what others are about to start.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import psutil

from kvpop_lightning.locks import one_at_a_time
from kvpop_lightning.sweeps.space import Point
from kvpop_lightning.sweeps.storage import LOST_AFTER

TICKET, ATTEMPT, FINAL, WORKER, HEARTBEAT = "ticket", "attempt", "final", "worker", "heartbeat"
TOTAL = "trials"
REPLACED_WITHIN_S = 60.0
"""Seconds within which the worker that fails a trial writes its replacement; after them it must have died."""


@dataclass(frozen=True)
class Progress:
    """Tickets by state; a ticket's state is that of its last trial."""

    total: int
    finished: int = 0
    """Complete, pruned, or failed for good."""
    running: int = 0
    waiting: int = 0

    @property
    def complete(self) -> bool:
        return self.finished >= self.total


class Tickets:
    """The tickets of one study.

    Args:
        study: Optuna study, this thread's own object.
        retries: how often a ticket whose trial died is tried again.
        heartbeat_s: seconds between signs of life.
        lock: `lock_file` of the storage's address.
        on_lost: told of each trial (frozen) that was found dead, once over all workers.
    """

    def __init__(
        self,
        study: Any,
        *,
        retries: int,
        heartbeat_s: float,
        lock: Path | None = None,
        on_lost: Callable[[Any], None] | None = None,
    ) -> None:
        self.study, self.retries, self.heartbeat_s = study, retries, heartbeat_s
        self.on_lost, self.lock = on_lost, lock
        self._storage = study._storage

    @property
    def total(self) -> int:
        return int(self.study.user_attrs.get(TOTAL, 0))

    def top_up(self, total: int, fixed: Sequence[Point], laid_out: Sequence[Point] | None) -> None:
        """Makes the tickets that are missing up to `total`.

        Args:
            fixed: baseline points, the first tickets.
            laid_out: points of all later tickets where they are known beforehand.
        """
        import optuna

        there = {trial.user_attrs.get(TICKET) for trial in self._trials()}
        for ticket in range(total):
            if ticket in there:
                continue
            later = ticket - len(fixed)
            if ticket < len(fixed):
                point, attrs = fixed[ticket], {TICKET: ticket, ATTEMPT: 0, "baseline": True}
            else:
                point, attrs = (laid_out[later] if laid_out is not None else {}), {TICKET: ticket, ATTEMPT: 0}
            self.study.add_trial(
                optuna.trial.create_trial(
                    state=optuna.trial.TrialState.WAITING,
                    user_attrs=attrs,
                    system_attrs={"fixed_params": point} if point else {},
                )
            )
        self.study.set_user_attr(TOTAL, total)

    def claim(self, sampler_for: Callable[[int], Any]) -> Any | None:
        """The next waiting trial, now this worker's; None when nothing waits.

        Args:
            sampler_for: gives the sampler for a ticket's number.
        """
        import optuna

        waiting = optuna.trial.TrialState.WAITING
        for trial in self._owners():
            if trial.state == waiting and self._change(trial, optuna.trial.TrialState.RUNNING):
                self.beat(trial._trial_id)
                self._storage.set_trial_user_attr(trial._trial_id, WORKER, _this_process())
                self.study.sampler = sampler_for(trial.user_attrs[TICKET])
                return optuna.trial.Trial(self.study, trial._trial_id)
        return None

    def beat(self, trial_id: int) -> None:
        """A sign of life of a running trial."""
        if hasattr(self._storage, "record_heartbeat"):
            self._storage.record_heartbeat(trial_id)  # by the database's clock
        else:
            self._storage.set_trial_user_attr(trial_id, HEARTBEAT, time.time())

    def finish(
        self, trial: Any, state: str, values: Sequence[float] | None, attrs: Mapping[str, Any]
    ) -> bool:
        """Ends this worker's trial: `complete`, `pruned` or `failed` (for good).

        Returns:
            False when others gave it up for lost meanwhile: its result no longer counts.
        """
        import optuna

        states = optuna.trial.TrialState
        as_optuna = {"complete": states.COMPLETE, "pruned": states.PRUNED, "failed": states.FAIL}[state]
        try:
            for key, value in {**attrs, **({FINAL: True} if state == "failed" else {})}.items():
                trial.set_user_attr(key, value)
            with one_at_a_time(self.lock):
                self.study.tell(trial, values=values if state == "complete" else None, state=as_optuna)
        except (optuna.exceptions.UpdateFinishedTrialError, ValueError):
            if self._frozen(trial._trial_id).state == states.RUNNING:
                raise
            return False
        return True

    def give_back(self, trial: Any, attrs: Mapping[str, Any], *, counted: bool) -> bool:
        """Ends this worker's trial as failed and lets its ticket run again with the same values.

        Args:
            counted: it died by itself: one of the ticket's retries is spent, and without any left it has
                failed for good.

        Returns:
            True if the ticket runs again.
        """
        import optuna

        frozen = self._frozen(trial._trial_id)
        if counted and frozen.user_attrs.get(ATTEMPT, 0) >= self.retries:
            self.finish(trial, "failed", None, attrs)
            return False
        for key, value in attrs.items():
            trial.set_user_attr(key, value)
        if self._change(frozen, optuna.trial.TrialState.FAIL):
            self._replace(self._frozen(trial._trial_id), counted=counted)
        return True

    def rescue(self) -> int:
        """Fails trials whose worker is gone and lets their tickets run again; how many there were."""
        import optuna

        states = optuna.trial.TrialState
        found = 0
        stale = self._stale_ids()
        for trial in self._trials((states.RUNNING,)):
            if trial._trial_id not in stale and not _is_dead(trial.user_attrs.get(WORKER)):
                continue
            spent = trial.user_attrs.get(ATTEMPT, 0) >= self.retries
            attrs = {"outcome": "failed", "message": "its worker was lost"} | ({FINAL: True} if spent else {})
            try:
                for key, value in attrs.items():
                    self._storage.set_trial_user_attr(trial._trial_id, key, value)
            except optuna.exceptions.UpdateFinishedTrialError:
                continue
            if self._change(trial, states.FAIL):  # of several rescuers one gets here
                found += 1
                if not spent:
                    self._replace(self._frozen(trial._trial_id), counted=True)
                if self.on_lost is not None:
                    self.on_lost(trial)
        return found + self._repair()

    def progress(self) -> Progress:
        import optuna

        states, total = optuna.trial.TrialState, self.total
        running = waiting = finished = 0
        for trial in self._last_trials().values():
            if trial.state == states.RUNNING:
                running += 1
            elif trial.state == states.WAITING:
                waiting += 1
            elif trial.state != states.FAIL or trial.user_attrs.get(FINAL):
                finished += 1
        return Progress(total, finished, running, waiting)

    def _owners(self) -> list[Any]:
        """The one trial of each ticket that may run; by number. If ever two replacements of one trial exist,
        the first one counts."""
        owners: dict[int, Any] = {}
        total = self.total
        for trial in self._trials():
            ticket = trial.user_attrs.get(TICKET)
            if ticket is not None and ticket < total and trial.state.name != "FAIL":
                owners.setdefault(ticket, trial)
        return sorted(owners.values(), key=lambda trial: trial.number)

    def _last_trials(self) -> dict[int, Any]:
        """What each ticket has come to: the trial that counts, else its last failed one."""
        last: dict[int, Any] = {}
        total = self.total
        for trial in self._trials():
            ticket = trial.user_attrs.get(TICKET)
            if ticket is not None and ticket < total:
                last[ticket] = trial
        return last | {trial.user_attrs[TICKET]: trial for trial in self._owners()}

    def _repair(self) -> int:
        """Replacements that a worker could not write because it died between two writes."""
        repaired = 0
        for trial in self._last_trials().values():
            if trial.state.name != "FAIL" or trial.user_attrs.get(FINAL) or trial.datetime_complete is None:
                continue
            if datetime.now() - trial.datetime_complete > timedelta(seconds=REPLACED_WITHIN_S):
                self._replace(trial, counted=True)
                repaired += 1
        return repaired

    def _replace(self, trial: Any, *, counted: bool) -> None:
        import optuna

        kept = {
            key: trial.user_attrs[key] for key in (TICKET, "baseline", "run_dir") if key in trial.user_attrs
        }
        point = trial.params or trial.system_attrs.get("fixed_params", {})
        self.study.add_trial(
            optuna.trial.create_trial(
                state=optuna.trial.TrialState.WAITING,
                user_attrs={
                    **kept,
                    ATTEMPT: trial.user_attrs.get(ATTEMPT, 0) + int(counted),
                    "replaces": trial.number,
                },
                system_attrs={"fixed_params": dict(point)} if point else {},
            )
        )

    def _change(self, trial: Any, state: Any) -> bool:
        """Compare and set: False when another worker was first."""
        import optuna

        try:
            with one_at_a_time(self.lock):
                return bool(self._storage.set_trial_state_values(trial._trial_id, state=state))
        except optuna.exceptions.UpdateFinishedTrialError:
            return False

    def _frozen(self, trial_id: int) -> Any:
        return self._storage.get_trial(trial_id)

    def _trials(self, states: tuple[Any, ...] | None = None) -> list[Any]:
        return self.study.get_trials(deepcopy=False, states=states)

    def _stale_ids(self) -> set[int]:
        """Running trials without a sign of life for too long."""
        import optuna

        silence = LOST_AFTER * max(1.0, self.heartbeat_s)
        stale = set()
        if hasattr(self._storage, "_get_stale_trial_ids"):
            stale = set(self._storage._get_stale_trial_ids(self.study._study_id))
        for trial in self._trials((optuna.trial.TrialState.RUNNING,)):
            beat = trial.user_attrs.get(HEARTBEAT)
            if beat is not None:
                lost = time.time() - beat > silence
            else:  # killed between taking the trial and its first sign of life, or signs are in the database
                unsigned = WORKER not in trial.user_attrs and trial.datetime_start is not None
                lost = unsigned and datetime.now() - trial.datetime_start > timedelta(seconds=silence)
            if lost:
                stale.add(trial._trial_id)
        return stale


def _this_process() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "boot": _boot(),
        "pid": os.getpid(),
        "created": psutil.Process().create_time(),
    }


def _is_dead(worker: Mapping[str, Any] | None) -> bool:
    """True when the worker ran on this machine and is certainly gone: no need to wait for its silence."""
    if worker is None or worker.get("host") != socket.gethostname() or worker.get("boot") != _boot():
        return False
    try:
        return abs(psutil.Process(worker["pid"]).create_time() - worker["created"]) > 1
    except psutil.NoSuchProcess:
        return True
    except (psutil.Error, KeyError, TypeError):
        return False


def _boot() -> str:
    """Tells machines and containers of one name apart."""
    try:
        space = os.readlink("/proc/self/ns/pid")
        return f"{psutil.boot_time():.0f} {space}"
    except OSError:
        return f"{psutil.boot_time():.0f}"
