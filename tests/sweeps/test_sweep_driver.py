"""Whole sweeps with a child that trains nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna
import psutil
import pytest
import yaml
from rich.console import Console
from sweep_cases import FAKE, body, config_of, write

from kvpop_lightning.config.compose import compose
from kvpop_lightning.errors import UserError
from kvpop_lightning.locks import exclusive
from kvpop_lightning.sweeps import driver
from kvpop_lightning.sweeps.driver import SweepOutcome, run_sweep
from kvpop_lightning.sweeps.show import SweepScreen
from kvpop_lightning.sweeps.storage import open_storage, storage_address
from kvpop_lightning.sweeps.tickets import Progress
from kvpop_lightning.sweeps.worker import TrialView

FOLDER = Path("runs/sweeps/mine")


def go(words: Sequence[str] = (), *, plan: dict[str, list[str]] | None = None) -> SweepOutcome:
    os.environ["FAKE_PLAN"] = json.dumps(plan or {})
    quick = ["sweep.heartbeat_s=1", "sweep.grace_s=2", "storage=journal", *words]
    return run_sweep(config_of("mine", quick), quick, command=FAKE)


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_PLAN", "{}")
    monkeypatch.setattr(driver, "LOOK_S", 0.05)


def study_of(folder: Path = FOLDER, name: str = "mine") -> Any:
    kind = "journal" if (folder / "study.log").exists() else None  # a journal is made sooner than a database
    return optuna.load_study(study_name=name, storage=open_storage(storage_address(kind, folder), 1))


def states() -> list[str]:
    return [trial.state.name for trial in study_of().trials]


def test_a_sweep_from_file_to_best_point(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(project)
    outcome = go(["workers=2", "storage=null"])
    assert outcome.progress == Progress(5, finished=5)
    assert (FOLDER / "study.db").exists()
    assert states() == ["COMPLETE"] * 5
    study = study_of()
    assert study.trials[0].params == {"policy.budget.topk": 8, "policy.decay": 1.0}
    assert study.metric_names == ["kl"]
    assert [entry["rescored"]["kl"] for entry in outcome.best] == sorted(
        entry["rescored"]["kl"] for entry in outcome.best
    )
    assert sum(entry["baseline"] for entry in outcome.best) == 1
    winner = outcome.best[0]
    assert winner["values"]["kl"] == min(trial.value for trial in study.trials)
    assert len(winner["rows"]["kl"]) == 4
    assert json.loads((FOLDER / "best.json").read_text()) == json.loads(json.dumps(outcome.best))
    assert len(json.loads((FOLDER / "trials.json").read_text())) == 5
    text = capsys.readouterr().out
    assert all(f"trial {number} finished" in text for number in range(5))
    assert "topk=8  decay=1" in text


def test_the_best_point_is_an_experiment(project: Path) -> None:
    write(project, overrides=[*body()["overrides"], "trainer.max_steps=3", "seed=9"])
    outcome = go()
    assert outcome.experiment == project / "configs" / "experiment" / "mine_best.yaml"
    config = compose(["experiment=mine_best"])
    best = outcome.best[0]["point"]
    assert config.policy.decay == best["policy.decay"]
    assert config.policy.budget.topk == best["policy.budget.topk"]
    assert (config.trainer.max_steps, config.seed, config.model.source) == (3, 9, "tiny-llama")
    assert config.run_dir == "runs/mine_best"
    content = outcome.experiment.read_text()
    assert content.startswith("# Best point of sweep mine, trial")
    assert len(content.splitlines()) < 40
    assert yaml.safe_load(content)["defaults"]["policy"] == "kvpop_mlp"


def test_a_second_run_does_nothing_and_a_larger_total_goes_on(project: Path) -> None:
    write(project)
    go()
    before = [trial.params for trial in study_of().trials]
    started = time.monotonic()
    assert go().progress.complete
    assert [trial.params for trial in study_of().trials] == before
    assert time.monotonic() - started < 10
    outcome = go(["trials=7"])
    assert outcome.progress == Progress(7, finished=7)
    points = [tuple(trial.params.values()) for trial in study_of().trials]
    assert len(set(points)) == 7  # the sampler did not start over
    attempts = [int((FOLDER / "trials" / f"{n:04d}" / "attempts").read_text()) for n in range(7)]
    assert set(attempts) <= {1, 2}  # the trial, and its re-scoring


def test_another_question_is_refused_with_the_difference(project: Path) -> None:
    write(project, trials=1, baseline=None, rescore={"best": 0, "rows": 4})
    go()
    space: dict[str, Any] = body()["space"]
    lower = {"type": "float", "low": 0.4, "high": 1.0}
    more = {"type": "int", "low": 0, "high": 9}
    for changes, words, line in (
        ({"space": {**space, "policy.decay": lower}}, [], "low: 0.5 -> 0.4"),
        ({"metrics": {"kl": "maximize"}}, [], "metrics.kl: minimize -> maximize"),
        ({"objective": {"budget": 28, "rows": 2}}, [], "objective.budget: 32 -> 28"),
        ({}, ["seed=4"], "settings.seed: 0 -> 4"),
        ({"space": {**space, "seed": more}}, [], "space.seed.high: (nothing) -> 9"),
    ):
        write(project, trials=2, baseline=None, **changes)
        with pytest.raises(UserError, match="another question") as caught:
            go(words)
        assert line in str(caught.value)
        assert len(study_of().trials) == 1
    assert go([*words, "sweep.study=other", "run_dir=runs/sweeps/other"]).progress.complete


def test_what_does_not_change_the_question_may_change(project: Path) -> None:
    write(project, trials=1, baseline=None)
    go()
    write(project, trials=2, baseline=None, sampler={"name": "tpe", "seed": 1}, time_limit_s=1000)
    assert go(["trainer.progress=false", "data.cache_dir=elsewhere", "workers=2"]).progress.complete


def test_every_end_of_a_trial_is_documented_and_the_total_is_exact(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(project, trials=8)
    plan = {
        "trial 1": ["crash", "ok"],
        "trial 2": ["sigkill", "sigkill", "crash", "ok"],
        "trial 3": ["oom"],
        "trial 4": ["invalid"],
        "trial 5": ["nan"],
        "trial 6": ["interrupt", "ok"],
    }
    outcome = go(["workers=2", "retries=2"], plan=plan)
    assert outcome.progress == Progress(8, finished=8)
    ends: dict[int, list[tuple[str, str]]] = {}
    for entry in outcome.table:
        ends.setdefault(entry["ticket"], []).append((entry["state"], entry["outcome"]))
    assert ends[0] == ends[7] == [("complete", "finished")]
    assert ends[1] == [("fail", "failed"), ("complete", "finished")]
    assert ends[2] == [("fail", "failed")] * 3
    assert ends[3] == [("fail", "out_of_memory")]
    assert ends[4] == [("fail", "invalid")]
    assert ends[5] == [("fail", "failed")]
    assert ends[6] == [("fail", "interrupted"), ("complete", "finished")]
    retried = [entry["point"] for entry in outcome.table if entry["ticket"] == 1]
    assert retried[0] == retried[1]
    text = capsys.readouterr().out
    for message in ("no memory left", "too small", "loss is nan", "Traceback: the last words"):
        assert message in text
    assert "crash" not in json.dumps([entry["rescored"] for entry in outcome.best])


def test_the_pruner_stops_a_bad_trial_which_keeps_its_checkpoint(project: Path) -> None:
    pruner = {"name": "median", "metric": "objective/kl", "startup_trials": 2}
    write(project, trials=4, pruner=pruner)
    outcome = go(plan={"trial 3": ["bad"]})
    assert [entry["state"] for entry in outcome.table] == ["complete"] * 3 + ["pruned"]
    trial = study_of().trials[3]
    assert set(trial.intermediate_values) >= {10}
    assert trial.user_attrs["outcome"] == "pruned"
    assert (FOLDER / "trials" / "0003" / "checkpoint").exists()
    assert outcome.progress.complete


def test_several_metrics_give_a_front(project: Path) -> None:
    write(project, metrics={"kl": "minimize", "bytes_held": "minimize"}, sampler="nsga2", trials=6)
    outcome = go()
    front = {trial.number for trial in study_of().best_trials}
    assert {entry["number"] for entry in outcome.best if not entry["baseline"]} <= front
    assert set(outcome.best[0]["rescored"]) == {"kl", "bytes_held"}


@pytest.mark.parametrize("sampler", ["grid", "qmc"])
def test_laid_out_points_are_each_tried_once(project: Path, sampler: str) -> None:
    space = {
        "policy.budget.topk": {"type": "int", "low": 4, "high": 8, "step": 2},
        "distill.margin": {"choices": ["raw", "effective"]},
    }
    write(project, sampler=sampler, space=space, baseline=None, trials=6)
    outcome = go(["workers=3"])
    points = {tuple(sorted(entry["point"].items())) for entry in outcome.table}
    assert len(outcome.table) == 6
    assert len(points) == 6 if sampler == "grid" else len(points) > 3


def test_the_time_limit_gives_running_trials_back(project: Path) -> None:
    write(project)
    outcome = go(["time_limit_s=2"], plan={"trial 1": ["slow", "ok"]})
    assert not outcome.progress.complete
    assert "time limit of 2 s" in outcome.stopped
    assert outcome.best == []
    assert outcome.table[1]["outcome"] == "interrupted"
    outcome = go()
    assert outcome.progress == Progress(5, finished=5)
    assert outcome.table[1]["point"] == next(e["point"] for e in outcome.table if e["number"] == 5)


def test_ctrl_c_gives_running_trials_back_and_the_same_command_goes_on(project: Path) -> None:
    write(project)
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from sweep_cases import FAKE, config_of\n"
        "from kvpop_lightning.sweeps.driver import run_sweep\n"
        "run_sweep(config_of('mine', sys.argv[2:]), sys.argv[2:], command=FAKE)\n"
    )
    env = {**os.environ, "FAKE_PLAN": json.dumps({"trial 1": ["slow", "ok"], "trial 2": ["slow", "ok"]})}
    here = str(Path(__file__).parent)
    process = subprocess.Popen(
        [sys.executable, "-c", script, here, "workers=2", "storage=journal"], env=env, stderr=subprocess.PIPE
    )
    try:
        log = FOLDER / "trials" / "0002" / "metrics.jsonl"
        until = time.monotonic() + 60
        while not (log.exists() and log.stat().st_size > 200) and time.monotonic() < until:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    finally:
        process.kill()
    assert b"KeyboardInterrupt" in error
    assert b"a worker ended" not in error, error.decode()
    assert (FOLDER / "trials" / "0002" / "checkpoint").exists()
    assert states()[1:3] == ["FAIL", "FAIL"]
    outcome = go()
    assert outcome.progress == Progress(5, finished=5)
    assert max(entry["attempt"] for entry in outcome.table) == 0


@pytest.mark.slow
def test_memory_of_the_parent_is_flat(project: Path) -> None:
    write(project, trials=30, rescore={"best": 1, "rows": 2})
    used: list[tuple[float, int]] = []
    process, stop = psutil.Process(), threading.Event()

    def sample() -> None:
        while not stop.wait(0.1):
            used.append((time.time(), process.memory_info().rss))

    thread = threading.Thread(target=sample)
    go(["trials=2"])  # imports and caches
    thread.start()
    go()
    stop.set()
    thread.join()
    # The report at the end imports what it draws with: that is not the trials' memory.
    last = max(trial.datetime_complete for trial in study_of().trials).timestamp()
    held = [size for moment, size in used if moment <= last]
    quarter = len(held) // 4
    assert quarter >= 3
    growth = max(held[-quarter:]) - max(held[:quarter])
    assert growth < 6e6, f"{growth / 1e6:.1f} MB over {len(states())} trials"


def test_a_worker_joins_what_another_process_made(project: Path) -> None:
    write(project)
    address = f"storage={project / 'shared.db'}"
    made = go(["workers=0", address])
    assert (made.stopped, made.progress.waiting) == ("only made", 5)
    outcome = go([address, "sweep.worker=true", "run_dir=elsewhere"])
    assert outcome.progress.complete
    assert outcome.best == []
    assert go([address]).best  # the first process concludes
    with pytest.raises(UserError, match=r"another question.*seed: 0 -> 3"):
        go([address, "sweep.worker=true", "seed=3"])


def test_a_worker_without_a_study_says_so(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(project)
    with pytest.raises(UserError, match="needs the storage"):
        go(["sweep.worker=true", "storage=null"])
    monkeypatch.setattr(driver.studies.join_study, "__defaults__", (0.3,))
    with pytest.raises(UserError, match="there is no study 'mine'"):
        go(["sweep.worker=true", f"storage={project / 'empty.db'}"])


def test_an_error_in_a_worker_ends_the_sweep(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(project)

    def broken(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("no process to be had")

    monkeypatch.setattr("kvpop_lightning.sweeps.worker.run_trial", broken)
    with pytest.raises(RuntimeError, match="no process to be had"):
        go(["workers=2"])


def test_gpus_take_turns(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    write(project, trials=6)
    go(["workers=2"])
    seen = {
        json.loads((FOLDER / "trials" / f"{n:04d}" / "environment.json").read_text())["CUDA_VISIBLE_DEVICES"]
        for n in range(6)
    }
    assert seen == {"4", "5"}


def test_the_live_table_shows_points_results_and_an_estimate() -> None:
    keys = ["policy.budget.topk", "policy.decay"]
    screen = SweepScreen("mine", keys, {"kl": "minimize"}, 2, Console(width=120, record=True))
    screen.progress(Progress(4, finished=0, running=1, waiting=3))
    assert screen.seconds_left() is None
    done = TrialView(0, {"policy.budget.topk": 8, "policy.decay": 0.75}, time.monotonic(), baseline=True)
    screen.update(done)
    done.state, done.values, done.seconds = "finished", {"kl": 0.125}, 61.0
    screen.update(done)
    screen.update(TrialView(1, {"policy.decay": 0.5}, time.monotonic(), step=40, report=0.2))
    screen.progress(Progress(4, finished=1, running=1, waiting=2), {"text": "kl 0.125 (trial 0)"})
    screen.console.print(screen.render())
    text = screen.console.export_text()
    for part in (
        "topk",
        "finished (baseline)",
        "0.125",
        "1:01",
        "(0.2)",
        "40",
        "1/4 trials",
        "left",
        "best: kl",
    ):
        assert part in text


def test_a_folder_belongs_to_one_study(project: Path) -> None:
    write(project)
    assert go(["trials=2"]).progress.complete
    before = (FOLDER / "trials.json").read_bytes()
    with pytest.raises(
        UserError, match=r"holds the trials of study 'mine' in .*study\.log, not of .*'other'"
    ):
        go(["trials=2", "sweep.study=other"])
    with pytest.raises(UserError, match=r"not of 'mine' in .*elsewhere\.db: set run_dir"):
        go(["trials=2", f"storage={project / 'elsewhere.db'}"])
    assert not (project / "elsewhere.db").exists()
    assert (FOLDER / "trials.json").read_bytes() == before
    assert go(["trials=3"]).progress.complete


def test_the_same_sweep_does_not_run_twice_at_once(project: Path) -> None:
    write(project)
    with (
        exclusive(FOLDER, "runs this sweep", "wait"),
        pytest.raises(
            UserError, match=rf"process {os.getpid()} runs this sweep there: wait for it; .*--worker"
        ),
    ):
        go()
    assert go().progress.complete
