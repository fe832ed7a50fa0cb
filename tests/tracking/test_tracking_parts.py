"""Names, files of the run folder, the Lightning logger and the resource meter."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as search
from hypothesis import strategies as st

from kvpop_lightning.config import compose
from kvpop_lightning.tracking import environment, local, store
from kvpop_lightning.tracking.environment import (
    git_state,
    required_versions,
    write_atomically,
    write_run_folder,
)
from kvpop_lightning.tracking.naming import flat_params, metric_name, public_uri
from kvpop_lightning.tracking.resources import ResourceMeter


@search(deadline=None)
@given(st.text())
def test_any_name_becomes_one_that_mlflow_takes(name: str) -> None:
    cleaned = metric_name(name)
    assert re.fullmatch(r"[A-Za-z0-9_/. -]{1,250}", cleaned)
    assert not cleaned.startswith("/")
    assert ".." not in cleaned.split("/")
    assert metric_name(cleaned) == cleaned


def test_names_that_differ_stay_apart() -> None:
    names = ["kl/random", "kl/random+decay", "kl/key_norm", "kl/key_norm+decay"]
    assert len({metric_name(name) for name in names}) == 4
    assert metric_name("train/loss") == "train/loss"


def test_params_are_flat_and_fit() -> None:
    tree = {"a": {"b": 1, "c": {"d": None}}, "e": [1, 2], "f": {}, "g": "x" * 10_000}
    flat = flat_params(tree)
    assert flat | {"g": ""} == {"a.b": "1", "a.c.d": "None", "e": "[1, 2]", "f": "{}", "g": ""}
    assert len(flat["g"]) == 6000


def test_passwords_are_not_shown() -> None:
    assert public_uri("http://ann:secret@host:1/x") == "http://***@host:1/x"
    assert public_uri("sqlite:////a/b@c.db") == "sqlite:////a/b@c.db"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    folder.mkdir()
    for words in (
        ["init", "-q"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "x"],
    ):
        subprocess.run(["git", *words], cwd=folder, check=True)
    return folder


def test_git_state_tells_commit_and_changes(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = git_state(checkout)
    assert re.fullmatch(r"[0-9a-f]{40}", state["commit"])
    assert (state["dirty"], state["diff"]) == (False, "")
    (checkout / "new.txt").write_text("hello\n")
    state = git_state(checkout)
    assert (state["dirty"], state["untracked"]) == (True, ["new.txt"])
    subprocess.run(["git", "add", "new.txt"], cwd=checkout, check=True)
    assert "+hello" in git_state(checkout)["diff"]
    monkeypatch.setattr(environment, "MAX_DIFF_BYTES", 20)
    assert len(git_state(checkout)["diff"]) < 40
    assert git_state(tmp_path / "nowhere") == {}
    monkeypatch.setenv("PATH", "")
    assert git_state(checkout) == {}


def test_run_folder_keeps_the_diff_of_a_changed_checkout(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state: dict[str, Any] = {"commit": "c", "dirty": True, "diff": "+x\n"}
    monkeypatch.setattr(environment, "git_state", lambda: dict(state))
    config = compose([f"run_dir={tmp_path / 'run'}"])
    names = {path.name for path in write_run_folder(config, ["seed=1"], "train")}
    assert names == {"config.yaml", "overrides.txt", "environment.json", "git.diff"}
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["git"] == {
        "commit": "c",
        "dirty": True,
    }
    state["diff"] = ""
    write_run_folder(config, [], "evaluate")
    assert not (tmp_path / "run" / "git.diff").exists()
    assert [
        line.split(" ", 1)[1] for line in (tmp_path / "run" / "overrides.txt").read_text().splitlines()
    ] == [
        "train seed=1",
        "evaluate",
    ]
    assert not [path for path in (tmp_path / "run").iterdir() if path.name.startswith(".")]


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_atomically(tmp_path / "a.txt", "old")

    def full(self: Path, *args: object, **kwargs: object) -> int:
        raise OSError(28, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, "new")
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert [item.name for item in tmp_path.iterdir()] == ["a.txt"]


def test_run_ids_belong_to_one_server(tmp_path: Path) -> None:
    local.store_run(tmp_path, "sqlite:///a", "1", "x", "id-x")
    local.store_run(tmp_path, "sqlite:///a", "1", "y", "id-y")
    assert local.stored_run(tmp_path, "sqlite:///a", "x") == "id-x"
    assert local.stored_run(tmp_path, "sqlite:///b", "x") is None
    local.store_run(tmp_path, "sqlite:///b", "1", "x", "id-b")
    assert local.stored_run(tmp_path, "sqlite:///a", "y") is None


def test_versions_from_the_project_file_or_the_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    from_file = required_versions()
    assert from_file["omegaconf"] == ">=2.3.1,<2.4"
    assert "pytest" in required_versions("dev")
    monkeypatch.setattr(environment, "SOURCE_FOLDER", Path("/nowhere"))
    assert set(required_versions()) == set(from_file)
    assert "pytest" in required_versions("dev")


def test_lightning_logger_writes_into_the_run(tmp_path: Path) -> None:
    from kvpop_lightning.tracking import TrackedRun
    from kvpop_lightning.tracking.lightning_logger import RunLogger

    config = compose([f"run_dir={tmp_path}", "tracking.enabled=false", "tracking.run_name=run"])
    with TrackedRun(config) as run:
        logger = RunLogger(run, prefix="mlp")
        logger.log_metrics({"train/loss": 0.5, "epoch": 0}, step=4)
        logger.log_hyperparams({"a": 1})
        assert logger.experiment is run
        assert (logger.name, logger.version, logger.save_dir) == ("kvpop", "run", str(tmp_path))
        # Lightning says so of every fit that breaks off; the run decides at its own end.
        logger.finalize("failed")
        assert run.status is None
    [line] = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert (line["step"], line["mlp/train/loss"]) == (4, 0.5)
    assert "mlp/epoch" not in line


def test_lightning_trainer_steps_are_global_steps(tmp_path: Path) -> None:
    import lightning.pytorch as pl
    import torch
    from lightning.pytorch.demos.boring_classes import BoringModel

    from kvpop_lightning.tracking import TrackedRun
    from kvpop_lightning.tracking.lightning_logger import RunLogger

    class Model(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("train/step", torch.tensor(float(self.global_step)))
            return super().training_step(batch, batch_idx)

    config = compose([f"run_dir={tmp_path}", "tracking.enabled=false"])
    with TrackedRun(config) as run:
        trainer = pl.Trainer(
            max_steps=6,
            log_every_n_steps=1,
            logger=RunLogger(run),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            accelerator="cpu",
            limit_val_batches=0,
        )
        trainer.fit(Model())
    lines = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [line["train/step"] for line in lines] == list(range(6))


def test_resource_meter_sees_children() -> None:
    code = "import time; block = bytearray(b'x') * 200_000_000; time.sleep(10)"
    with ResourceMeter(interval_s=0.05) as alone:
        pass
    with ResourceMeter(interval_s=0.05) as meter:
        child = subprocess.Popen([sys.executable, "-c", code])
        while meter.peak_bytes < alone.peak_bytes + 200_000_000 and meter.seconds < 20:
            child.poll()
            if child.returncode is not None:
                break
        child.kill()
        child.wait()
    assert meter.peak_bytes > alone.peak_bytes + 150_000_000
    assert 0 < meter.seconds < 30


def test_tracking_imports_no_mlflow(tmp_path: Path) -> None:
    code = "import sys, kvpop_lightning.tracking; print({'mlflow', 'torch', 'lightning'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_ctrl_c_waits_for_an_import_to_end() -> None:
    done = []

    def import_something_long() -> None:
        with store._whole():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
            done.append("whole")

    with pytest.raises(KeyboardInterrupt):
        import_something_long()
    assert done == ["whole"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
