"""What the tracking server is told of a trial's end, also when it is told late."""

from __future__ import annotations

from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from kvpop_lightning.config import compose
from kvpop_lightning.sweeps import runs
from kvpop_lightning.sweeps import trial as trials


def test_a_loss_told_late_does_not_undo_the_end_of_the_next_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = MlflowClient(uri)
    run_id = client.create_run(client.create_experiment("kvpop")).info.run_id
    told = runs.TrialRuns(compose([f"tracking.uri={uri}"]))
    with monkeypatch.context() as away:
        away.setattr(told._store, "tell", lambda *arguments, **options: False)
        told.ended(run_id, trials.FAILED, {"sweep.message": "its worker was lost"})
    runs.TrialRuns(compose([f"tracking.uri={uri}"])).ended(run_id, trials.FINISHED, {})  # another worker's
    assert told.settle(tmp_path)
    run = client.get_run(run_id)
    assert (run.data.tags["sweep.state"], run.info.status) == ("finished", "FINISHED")
    assert "sweep.message" not in run.data.tags
