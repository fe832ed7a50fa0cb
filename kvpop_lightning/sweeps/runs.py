"""The trials' MLflow runs, seen from outside: told how their trial ended, and never left RUNNING."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from kvpop_lightning.config.schema import Config
from kvpop_lightning.sweeps import trial as trials
from kvpop_lightning.tracking.store import Store, set_tags, tracking_uri

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


class TrialRuns:
    """Access to the runs of one sweep's trials; does nothing when tracking is off.

    Args:
        config: its `tracking` section says where.
    """

    def __init__(self, config: Config) -> None:
        self._store: Store | None = None
        if config.tracking.enabled:
            self._store = Store(tracking_uri(config.tracking.uri), config.tracking.experiment)

    def ended(self, run_id: str | None, state: str, tags: Mapping[str, str]) -> None:
        """Tags a trial's run with how it ended, and closes it if its process could not."""
        if self._store is None or run_id is None:
            return

        def action(client: Any) -> None:
            set_tags(client, run_id, {"sweep.state": state, **tags})
            if client.get_run(run_id).info.status == "RUNNING":
                client.set_terminated(run_id, STATUS[state])

        self._store.call("trial's end", action)

    def close_left_over(
        self, parent_run_id: str | None, still_running: set[str], patience_s: float = PATIENCE_S
    ) -> int:
        """Closes runs under `parent_run_id` that are RUNNING although no process runs them.

        Args:
            still_running: run ids of trials that other workers are busy with.
            patience_s: for how long a server that does not answer is asked again.

        Returns:
            How many there were.
        """
        if self._store is None or parent_run_id is None:
            return 0

        def action(client: Any) -> int:
            assert self._store is not None
            found = client.search_runs(
                [self._store.experiment_id],
                filter_string=f"tags.`{PARENT_TAG}` = '{parent_run_id}' and attributes.status = 'RUNNING'",
                max_results=1000,
            )
            left = [run.info.run_id for run in found if run.info.run_id not in still_running]
            for run_id in left:
                set_tags(client, run_id, {"sweep.state": trials.INTERRUPTED})
                client.set_terminated(run_id, "KILLED")
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
