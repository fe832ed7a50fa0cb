"""`kvpop runs` on a database, on run folders alone, and what it says to mistakes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from kvpop_lightning.cli import main
from kvpop_lightning.commands.runs_show import in_order
from kvpop_lightning.config import compose
from kvpop_lightning.tracking import TrackedRun
from kvpop_lightning.tracking.read import Record, quoted


def make(name: str, topk: int, kl: float, *words: str, sweep: str = "s") -> TrackedRun:
    settings = ["tracking.system_metrics=false", f"policy.budget.topk={topk}", f"run_dir=runs/{name}", *words]
    with TrackedRun(compose([*settings, "tracking.final_wait_s=0"]), name=name, tags={"sweep": sweep}) as run:
        run.log_metrics({"kl": kl, "top1": 1 - kl}, step=1)
    return run


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Three runs in a database."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "configs").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        made = [make("one", 92, 0.3), make("two", 8, 0.1, sweep="t"), make("three", 188, math.nan)]
    return folder, made


@pytest.fixture
def here(project: Any, monkeypatch: pytest.MonkeyPatch) -> list[TrackedRun]:
    folder, made = project
    monkeypatch.chdir(folder)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return made


def said(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    assert main(["runs", *words]) == status
    captured = capsys.readouterr()
    return captured.err if status else captured.out


def names(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    return [run["name"] for run in json.loads(said(capsys, "list", "--json", *words))]


def test_list_filters_and_sorts(here: list[TrackedRun], capsys: pytest.CaptureFixture[str]) -> None:
    assert names(capsys) == ["three", "two", "one"]  # newest first
    assert names(capsys, "--where", "params.policy.budget.topk = 92") == ["one"]
    assert names(capsys, "--where", "metrics.kl < 0.2 and tags.sweep = 't'") == ["two"]
    assert names(capsys, "--sweep", "t", "--state", "finished") == ["two"]
    assert names(capsys, "--state", "failed") == []
    assert names(capsys, "--sort", "kl") == ["two", "one", "three"]  # without a value last
    assert names(capsys, "--sort", "top1") == ["two", "one", "three"]
    assert names(capsys, "--sort", "params.policy.budget.topk") == ["two", "one", "three"]  # as numbers
    assert names(capsys, "--sort", "kl", "--descending", "--limit", "1") == ["one"]
    text = said(capsys, "list", "--experiment", "kvpop", "--columns", "kl,params.seed")
    assert here[0].run_id is not None
    assert here[0].run_id[:8] in text
    assert "3 runs of sqlite" in text


def test_show_compare_best(here: list[TrackedRun], capsys: pytest.CaptureFixture[str]) -> None:
    one, two, three = (str(run.run_id) for run in here)
    shown = json.loads(said(capsys, "show", one[:10], "--json"))
    assert "policy.budget.topk" not in shown["changed"]  # 92 is the default
    assert shown["changed"]["run_dir"] == {"value": "runs/one", "default": "runs/default"}
    assert "config.yaml" in shown["artifact_files"]
    assert "runs/one" in said(capsys, "show", "one")
    compared = json.loads(said(capsys, "compare", one, two, "--json"))
    assert "policy.budget.topk" in json.loads(said(capsys, "show", two, "--json"))["changed"]
    assert compared["params"] == {
        "policy.budget.topk": ["92", "8"],
        "run_dir": ["runs/one", "runs/two"],
    }
    assert compared["metrics"]["kl"] == [0.3, 0.1]
    assert "0.1" in said(capsys, "compare", "one", "two", "three")
    best = json.loads(said(capsys, "best", "--metric", "kl", "--json"))
    assert (best["id"], best["direction"]) == (two, "min")
    best = json.loads(said(capsys, "best", "--metric", "kl", "--direction", "max", "--json"))
    assert best["id"] == one
    assert two in said(capsys, "best", "--metric", "top1")
    assert json.loads(said(capsys, "show", three, "--json"))["metrics"]["kl"] == "nan"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["show", "zzz"], "no run zzz"),
        (["show", "0" * 32], "no run 000"),
        (["show", ""], "may mean 3 runs"),
        (["show"], "show RUN"),
        (["compare", "one"], "compare RUN RUN"),
        (["lst"], "did you mean list"),
        (["best"], "--metric"),
        (["best", "--metric", "kll"], "no run has kll"),
        (["list", "--experiment", "nope"], "no experiment nope"),
        (["list", "--where", "kl <<"], "--where kl <<"),
        (["list", "--limit", "x"], "--limit"),
        (["register", "one"], "--name NAME"),
        (["register", "one", "--name", "x"], "trained no policy"),
        (["send", "nowhere"], "nowhere is no folder"),
        (["list", "--bad"], "--bad"),
    ],
)
def test_mistakes_are_one_line(
    here: list[TrackedRun], capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    text = said(capsys, *words, status=2)
    assert message in text
    assert len(text.splitlines()) == 1


def test_run_folders_when_there_is_no_store(
    here: list[TrackedRun],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    away = "tracking.uri=sqlite:///nowhere.db"
    assert sorted(names(capsys, away)) == ["one", "three", "two"]
    assert names(capsys, away, "--where", "params.policy.budget.topk = 8") == ["two"]
    assert names(capsys, away, "--sort", "kl", "--limit", "1") == ["two"]
    assert "run folders" in said(capsys, "list", away)
    assert json.loads(said(capsys, "show", "two", away, "--json"))["metrics"]["kl"] == 0.1
    assert "needs a tracking server" in said(capsys, "register", "one", "--name", "x", away, status=2)
    monkeypatch.chdir(tmp_path)
    assert "no runs" in said(capsys, "list", status=2)


def test_send_completes_what_an_absent_server_missed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvpop_lightning.tracking import send, store

    (tmp_path / "configs").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for module in (store, send):
        monkeypatch.setattr(module, "unreachable", lambda uri: "away")
    config = compose(["tracking.system_metrics=false", "tracking.final_wait_s=0", "run_dir=runs/a"])
    with TrackedRun(config, name="outage") as run:
        run.log_metrics({"kl": 1.0}, step=1)
        run.set_tags({"late": "1"})
        with run.child("part") as part:
            part.log_metrics({"kl": 2.0}, step=5)
    assert run.run_id is None
    for module in (store, send):
        monkeypatch.setattr(module, "unreachable", lambda uri: None)
    assert "2 runs, 2 metric values" in said(capsys, "send")
    assert "nothing waits" in said(capsys, "send")
    parent, child = (json.loads(said(capsys, "show", name, "--json")) for name in ("outage", "part"))
    assert child["tags"]["mlflow.parentRunId"] == parent["id"]
    assert (parent["state"], parent["metrics"], parent["tags"]["late"]) == ("FINISHED", {"kl": 1.0}, "1")
    assert (child["state"], child["metrics"]) == ("FINISHED", {"kl": 2.0})
    assert parent["ended_ms"] >= parent["started_ms"] > 0
    assert "config.yaml" in parent["artifact_files"]


def test_values_get_their_quotes() -> None:
    assert quoted("params.a.b = 92 and metrics.kl < 3") == "params.a.b = '92' and metrics.kl < 3"
    assert quoted("params.a = '92' and tags.x != y") == "params.a = '92' and tags.x != 'y'"


def test_order_keeps_runs_without_a_value() -> None:
    records = [Record(str(i), "", "", metrics=m) for i, m in enumerate([{}, {"kl": 2.0}, {"kl": 1.0}])]
    assert [record.id for record in in_order(records, "kl")] == ["2", "1", "0"]
