"""The trials' MLflow runs, seen from outside: told how their trial ended, and never left RUNNING."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpop_lightning.config.schema import Config
from kvpop_lightning.locks import one_at_a_time
from kvpop_lightning.sweeps import trial as trials
from kvpop_lightning.sweeps.files import run_id_in
from kvpop_lightning.tracking.outbox import folders_with_outbox, read_outbox
from kvpop_lightning.tracking.send import Sent, send_folder
from kvpop_lightning.tracking.store import Store, set_tags, tracking_uri, unreachable

log = logging.getLogger(__name__)

PARENT_TAG = "mlflow.parentRunId"
STATUS = {
    trials.FINISHED: "FINISHED",
    trials.PRUNED: "KILLED",
    trials.INTERRUPTED: "KILLED",
    trials.INVALID: "FAILED",
    trials.OUT_OF_MEMORY: "FAILED",
    trials.FAILED: "FAILED",
}
"""A trial's state as that of its run. MLflow has no word for pruned: KILLED, and the tag `sweep.state`."""
PATIENCE_S = 60.0
"""Seconds for which a tracking server that is away is asked again when the sweep ends."""


@dataclass(frozen=True)
class _Ending:
    """What a run is to be told; its id may be known only later."""

    run_id: str | None
    run_dir: Path | None
    name: str
    tags: dict[str, str]
    state: str


class TrialRuns:
    """Access to the runs of one sweep's trials; does nothing when tracking is off.

    Args:
        config: its `tracking` section says where.
    """

    def __init__(self, config: Config) -> None:
        self._store: Store | None = None
        self._untold: list[_Ending] = []
        if config.tracking.enabled:
            self._store = Store(
                tracking_uri(config.tracking.uri),
                config.tracking.experiment,
                retry_s=config.tracking.retry_s,
            )

    def ended(
        self,
        run_id: str | None,
        state: str,
        tags: Mapping[str, str],
        *,
        run_dir: Path | None = None,
        name: str = "",
    ) -> None:
        """Tags a trial's run with how it ended, and closes it if its process could not.

        Args:
            run_id: of the run; None = not known yet, or none.
            state: of the trial.
            run_dir, name: the trial's folder and the run's name in it: given these, what a server that is
                away misses is kept for `settle`.
        """
        if self._store is None:
            return
        ending = _Ending(run_id, run_dir, name, {"sweep.state": state, **tags}, state)
        if not self._tell(ending, final=False):
            self._untold.append(ending)

    def settle(self, folder: Path, patience_s: float = PATIENCE_S) -> bool:
        """Sends what a tracking server that was away has missed of the trials below `folder`.

        Args:
            patience_s: for how long a server that does not answer is asked again.

        Returns:
            Whether nothing is left; what is left stays in the trials' folders for `kvpop runs send`.
        """
        if self._store is None:
            return True
        until = time.monotonic() + patience_s
        while True:
            left = self._settle_once(folder)
            if not left or time.monotonic() > until:
                break
            time.sleep(min(2.0, patience_s))
        for reason in left:
            log.warning("not sent to the tracking server: %s", reason)
        return not left

    def _settle_once(self, folder: Path) -> list[str]:
        assert self._store is not None
        if not folder.is_dir():
            return []
        if (reason := unreachable(self._store.uri)) is not None:
            return [reason] if self._untold or folders_with_outbox(folder) else []
        sent = Sent()
        with one_at_a_time(folder / ".send.lock"):  # workers may share the folder
            for place in folders_with_outbox(folder):
                send_folder(place, self._store.uri, sent)
        self._untold = [ending for ending in self._untold if not self._tell(ending, final=True)]
        untold = [f"the end of {ending.run_dir or ending.run_id}" for ending in self._untold]
        return [line for line in sent.left if "still running" not in line] + untold

    def _tell(self, ending: _Ending, *, final: bool) -> bool:
        """True also when there is no run to tell it to and none to come."""
        assert self._store is not None
        run_id = ending.run_id
        if run_id is None and ending.run_dir is not None:
            run_id = run_id_in(ending.run_dir, ending.name)
        if run_id is None:
            return ending.run_dir is None or ending.name not in read_outbox(ending.run_dir)

        def action(client: Any) -> None:
            if final and ending.run_dir is None:  # a loss told late: the trial's next attempt may have ended
                now = client.get_run(run_id).data.tags.get("sweep.state")
                if now in (trials.FINISHED, trials.PRUNED):
                    return
            set_tags(client, run_id, ending.tags)
            if client.get_run(run_id).info.status == "RUNNING":
                client.set_terminated(run_id, STATUS[ending.state])

        return self._store.tell("trial's end", action, final=final)

    def close_left_over(
        self,
        parent_run_id: str | None,
        still_running: set[str],
        ended: Mapping[str, str] | None = None,
        patience_s: float = PATIENCE_S,
    ) -> int:
        """Closes runs under `parent_run_id` that are RUNNING although no process runs them.

        Args:
            still_running: run ids of trials that other workers are busy with.
            ended: states of trials by run id, for runs whose process could not tell the end.
            patience_s: for how long a server that does not answer is asked again.

        Returns:
            How many there were.
        """
        if self._store is None or parent_run_id is None:
            return 0
        states = ended or {}

        def action(client: Any) -> int:
            assert self._store is not None
            found = client.search_runs(
                [self._store.experiment_id],
                filter_string=f"tags.`{PARENT_TAG}` = '{parent_run_id}' and attributes.status = 'RUNNING'",
                max_results=1000,
            )
            left = [run.info.run_id for run in found if run.info.run_id not in still_running]
            for run_id in left:
                state = states.get(run_id, trials.INTERRUPTED)
                set_tags(client, run_id, {"sweep.state": state})
                client.set_terminated(run_id, STATUS[state])
            return len(left)

        until = time.monotonic() + patience_s
        while (closed := self._store.call("closing runs", action, final=True)) is None:
            if time.monotonic() > until:
                log.warning(
                    "the tracking server is away: runs may be left RUNNING until the sweep is run again"
                )
                return 0
            time.sleep(min(2.0, patience_s))
        return int(closed)
