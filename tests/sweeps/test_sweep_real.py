"""Real trainings of the toy model: the shipped smoke sweep, and every documented end of a trial."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import optuna
import psutil
import pytest
import sweep_cases
from mlflow.tracking import MlflowClient
from real_runs import check_runs, finish, runs, start

from kvpop_lightning.sweeps import exit_codes, worker
from kvpop_lightning.sweeps.driver import run_sweep
from kvpop_lightning.sweeps.objective import Objective
from kvpop_lightning.sweeps.storage import open_storage, storage_address
from kvpop_lightning.sweeps.trial import CHILD, TrialResult, run_trial

pytestmark = pytest.mark.slow
WORDS = ["experiment=smoke", "policy=kvpop_mlp", "tracking.system_metrics=false", "data.eval_rows=2"]
OBJECTIVE = Objective(32, 2, ("kl", "bytes_held"))


def trial(folder: Path, *words: str, point: dict[str, Any] | None = None, **options: Any) -> TrialResult:
    return run_trial(
        [*WORDS, *words],
        point or {},
        run_dir=folder / "trial",
        objective=OBJECTIVE,
        name="trial 0",
        **options,
    )


def run_of(project: Path, result: TrialResult) -> Any:
    assert result.run_id is not None, result.last_lines
    return MlflowClient(f"sqlite:///{project / 'mlflow.db'}").get_run(result.run_id)


def test_the_shipped_smoke_sweep(project: Path) -> None:
    text = finish(start("smoke", "trials=6", "time_limit_s=600", "workers=2"))
    assert "all 6 trials are done" in text, text
    assert "against the baseline" in text
    assert "type hints" not in text  # what MLflow says of a registered model
    best = json.loads(Path("runs/sweeps/smoke/best.json").read_text())
    assert best[0]["rescored"]["kl"] == min(entry["rescored"]["kl"] for entry in best)
    assert len(best[0]["rows"]["kl"]) == 4
    found = runs(project)
    parent = check_runs(found, 6)
    assert (parent.info.status, parent.data.metrics["best/kl"]) == ("FINISHED", best[0]["rescored"]["kl"])
    by_trial = {run.data.tags.get("trial"): run for run in found}
    assert parent.data.tags["registered"] == "models:/kvpop_smoke/1"
    versions = MlflowClient(f"sqlite:///{project / 'mlflow.db'}").search_model_versions(
        "name = 'kvpop_smoke'"
    )
    assert [version.run_id for version in versions] == [by_trial[str(best[0]["number"])].info.run_id]
    baseline = by_trial["0"]
    assert baseline.data.params["policy.decay"] == "1.0"
    assert {"kl", "rescored/kl", "train/loss"} <= set(baseline.data.metrics)
    assert baseline.data.tags["sweep.state"] == "finished"
    # The best point is an experiment like any other, and trains to the same policy.
    point = best[0]["point"]
    words = ["experiment=smoke_best", "data.eval_rows=4", "tracking.enabled=false"]
    again = run_trial(words, {}, run_dir=project / "again", objective=OBJECTIVE)
    assert again.state == "finished", again.last_lines
    assert again.values["kl"] == pytest.approx(best[0]["values"]["kl"], rel=1e-6)
    assert point["policy.decay"] < 1.0


def test_five_trials_in_a_row_leave_the_parents_memory_flat(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rescore = {"best": 0, "rows": 2}
    sweep_cases.write(project, overrides=[*WORDS[1:], "trainer.progress=false"], rescore=rescore)
    used: list[int] = []
    process = psutil.Process()

    def and_look(*arguments: Any, **options: Any) -> TrialResult:
        result = run_trial(*arguments, **options)
        used.append(process.memory_info().rss)
        return result

    monkeypatch.setattr(worker, "run_trial", and_look)
    words = ["trials=7"]
    outcome = run_sweep(sweep_cases.config_of("mine", words), words)
    assert [entry["state"] for entry in outcome.table] == ["complete"] * 7
    growth = used[-1] - used[1]  # the first two load what is loaded late
    assert len(used) == 7
    assert growth < 4e6, f"{growth / 1e6:.1f} MB in five trials"


def test_a_fork_of_the_server_and_a_process_of_its_own_agree(project: Path) -> None:
    point = {"policy.decay": 0.7}
    forked = trial(project / "a", point=point, measure={"every": 2})
    fresh = trial(project / "b", point=point, measure={"every": 2}, command=CHILD)
    assert forked.state == fresh.state == "finished", forked.last_lines + fresh.last_lines
    assert forked.values == fresh.values
    lines = [json.loads(line) for line in (project / "a/trial/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "objective/kl" in line] == [2]


def test_rows_are_reported_one_by_one(project: Path) -> None:
    seen: list[tuple[int, dict[str, float]]] = []
    result = trial(
        project,
        measure={"by_row": True},
        on_metrics=lambda step, metrics: bool(seen.append((step, metrics))),
    )
    rows = [(step, m["objective_row/kl"]) for step, m in seen if "objective_row/kl" in m]
    assert rows == list(enumerate(result.rows["kl"]))


def test_nan_fails_with_its_step(project: Path) -> None:
    result = trial(project, "trainer.scorer_lr=1.0e+30", "trainer.gradient_clip=0", "trainer.warmup_steps=0")
    assert (result.state, result.exit_code, result.again) == ("failed", exit_codes.DIVERGED, False)
    assert "nan" in result.message or "inf" in result.message
    assert "DivergedError" in result.last_lines
    assert run_of(project, result).info.status == "FAILED"


@pytest.mark.parametrize("command", [None, CHILD], ids=["forked", "fresh"])
def test_a_trial_that_wants_too_much_memory_ends_alone(project: Path, command: Any) -> None:
    result = trial(project, "policy.scorer.width=2000000", memory_limit_gb=2.5, command=command)
    assert (result.state, result.exit_code) == ("out_of_memory", exit_codes.OUT_OF_MEMORY), result.last_lines
    assert "memory" in result.message
    assert run_of(project, result).info.status == "FAILED"


def test_a_bad_point_is_invalid_before_anything_is_loaded(project: Path) -> None:
    point = {"policy": "kvpop_mlstm", "policy.scorer.delay": 99}
    result = trial(project, point=point)
    assert (result.state, result.exit_code) == ("invalid", exit_codes.INVALID)
    assert "policy.scorer.delay=99" in result.message
    assert "policy.scorer.delay=99" in result.last_lines
    assert result.run_id is None


def test_ctrl_c_in_the_trial_itself(project: Path) -> None:
    sent: list[float] = []

    def interrupt() -> None:
        child = project / "trial" / "child.json"
        if not sent and (project / "trial" / "tracking.json").exists():
            sent.append(time.monotonic())
            os.kill(json.loads(child.read_text())["pid"], signal.SIGINT)

    result = trial(project, "trainer.max_steps=2000", on_tick=interrupt, poll_s=0.05)
    assert (result.state, result.exit_code) == ("interrupted", exit_codes.INTERRUPTED), result.last_lines
    assert run_of(project, result).info.status == "KILLED"


def test_a_pruned_trial_writes_a_checkpoint_and_can_go_on(project: Path) -> None:
    words = ["trainer.max_steps=200", "trainer.log_every=1", "trainer.checkpoint_every=1000"]

    def prune(step: int, metrics: dict[str, float]) -> bool:
        return "train/loss" in metrics and step >= 5

    result = trial(project, *words, on_metrics=prune, poll_s=0.05)
    assert (result.state, result.exit_code) == ("pruned", exit_codes.STOPPED), result.last_lines
    assert (project / "trial/checkpoints/kvpop_mlp/last.ckpt").exists()
    assert run_of(project, result).info.status == "KILLED"
    again = trial(project, *words)
    assert again.state == "finished"
    assert "going on from step" in (project / "trial/child.log").read_text()
    assert again.run_id == result.run_id
    assert run_of(project, again).info.status == "FINISHED"


def test_a_worker_that_a_scheduler_takes_back_gives_its_trial_back(project: Path) -> None:
    """A scheduler signals every process of the job at once: the worker, its fork server, the trial."""
    given = [
        "smoke",
        "trials=1",
        "trainer.max_steps=2000",
        "time_limit_s=600",
        f"storage={project}/study.log",
    ]
    finish(start(*given, "workers=0"))
    worker = start(*given, "--worker")
    checkpoint = project / "runs/sweeps/smoke/trials/0000/checkpoints/kvpop_mlp/last.ckpt"
    log = project / "runs/sweeps/smoke/trials/0000/metrics.jsonl"
    try:
        until = time.monotonic() + 200
        while not (log.exists() and '"train/loss"' in log.read_text()) and time.monotonic() < until:
            assert worker.poll() is None, finish(worker)
            time.sleep(0.1)
        first = psutil.Process(worker.pid)
        for process in [*first.children(recursive=True), first]:
            process.terminate()
        text = finish(worker, 60)
    finally:
        worker.kill()
    assert worker.returncode == 143, text
    assert "interrupted" in text, text
    assert checkpoint.exists()
    storage = open_storage(storage_address(f"{project}/study.log", project), 1)
    (taken, waiting) = optuna.load_study(study_name="smoke", storage=storage).get_trials()
    assert (taken.state.name, waiting.state.name) == ("FAIL", "WAITING")
    assert waiting.user_attrs.get("attempt", 0) == 0, "a scheduler's signal is no fault of the trial"
