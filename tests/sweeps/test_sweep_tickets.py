"""Exactly so many trials: claims, losses, retries and repairs on every embedded storage."""

from __future__ import annotations

import subprocess
import sys
import threading
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import optuna
import pytest

from kvpop_lightning.errors import UserError
from kvpop_lightning.sweeps import tickets as module
from kvpop_lightning.sweeps.space import Parameter, suggest_point
from kvpop_lightning.sweeps.storage import lock_file, open_storage, storage_address
from kvpop_lightning.sweeps.tickets import Tickets

SPACE = (Parameter("policy.decay", "float", 0.5, 1.0),)
FIXED = {"policy.decay": 0.75}


def sampler(ticket: int) -> Any:
    return optuna.samplers.RandomSampler(seed=ticket)


@pytest.fixture(params=["sqlite", "journal"])
def storage(request: pytest.FixtureRequest, project: Path) -> Any:
    kind = None if request.param == "sqlite" else "journal"
    return open_storage(storage_address(kind, project), heartbeat_s=1)


LOCK = Path("study.db.lock")


def make(storage: Any, total: int = 3, **options: Any) -> Tickets:
    study = optuna.create_study(storage=storage, study_name="s", load_if_exists=True)
    tickets = Tickets(study, **{"retries": 1, "heartbeat_s": 1, "lock": LOCK} | options)
    tickets.top_up(total, [FIXED], None)
    return tickets


def take(tickets: Tickets) -> Any:
    trial = tickets.claim(sampler)
    assert trial is not None
    return trial, suggest_point(SPACE, trial)


def states(tickets: Tickets) -> list[str]:
    return [trial.state.name for trial in tickets.study.trials]


def test_baseline_first_then_the_sampler_until_none_is_left(storage: Any) -> None:
    tickets = make(storage)
    trial, point = take(tickets)
    assert point == FIXED
    assert trial.user_attrs["baseline"] is True
    assert tickets.finish(trial, "complete", [1.0], {"outcome": "finished"})
    points = []
    for state in ("pruned", "failed"):
        trial, point = take(tickets)
        points.append(point)
        assert tickets.finish(trial, state, None, {})
    assert points[0] != points[1]
    assert tickets.claim(sampler) is None
    assert states(tickets) == ["COMPLETE", "PRUNED", "FAIL"]
    progress = tickets.progress()
    assert progress.complete
    assert (progress.total, progress.finished) == (3, 3)


def test_a_larger_total_goes_on_and_a_smaller_one_leaves_the_rest(storage: Any) -> None:
    tickets = make(storage, total=2)
    for _ in range(2):
        tickets.finish(take(tickets)[0], "complete", [1.0], {})
    tickets.top_up(4, [FIXED], None)
    assert len(tickets.study.trials) == 4
    tickets.top_up(3, [FIXED], None)
    tickets.finish(take(tickets)[0], "complete", [1.0], {})
    assert tickets.claim(sampler) is None
    assert tickets.progress().complete


def test_a_crashed_trial_runs_again_with_the_same_values_under_a_limit(storage: Any) -> None:
    tickets = make(storage, total=2)
    tickets.finish(take(tickets)[0], "complete", [1.0], {})
    trial, point = take(tickets)
    assert tickets.give_back(trial, {"outcome": "failed"}, counted=True)
    assert not tickets.progress().complete
    trial, again = take(tickets)
    assert again == point
    assert trial.user_attrs["replaces"] == trial.number - 1
    assert not tickets.give_back(trial, {"outcome": "failed"}, counted=True)
    assert tickets.claim(sampler) is None
    assert tickets.progress().complete
    assert states(tickets) == ["COMPLETE", "FAIL", "FAIL"]


def test_an_interruption_costs_no_retry(storage: Any) -> None:
    tickets = make(storage, total=1)
    for _ in range(4):
        assert tickets.give_back(take(tickets)[0], {}, counted=False)
    trial, point = take(tickets)
    assert point == FIXED
    assert trial.user_attrs["attempt"] == 0


def test_many_threads_never_share_a_ticket(storage: Any) -> None:
    make(storage, total=24)
    taken: list[int] = []

    def work() -> None:
        study = optuna.load_study(study_name="s", storage=storage)
        tickets = Tickets(study, retries=1, heartbeat_s=1, lock=LOCK)
        while (trial := tickets.claim(sampler)) is not None:
            taken.append(trial.user_attrs["ticket"])
            suggest_point(SPACE, trial)
            tickets.finish(trial, "complete", [0.0], {})

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == list(range(24))


def test_a_dead_worker_on_this_machine_is_noticed_at_once(storage: Any) -> None:
    lost: list[int] = []
    tickets = make(storage, total=1, on_lost=lambda trial: lost.append(trial.number))
    trial, _ = take(tickets)
    assert tickets.rescue() == 0  # this process lives
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    worker = dict(trial.user_attrs["worker"], pid=ended.pid)
    trial.set_user_attr("worker", worker)
    assert tickets.rescue() == 1
    assert lost == [0]
    assert tickets.rescue() == 0
    again, point = take(tickets)
    assert point == FIXED
    assert again.user_attrs["attempt"] == 1
    again.set_user_attr("worker", worker)
    assert tickets.rescue() == 1
    assert tickets.progress().complete  # the one retry is spent
    assert not tickets.finish(again, "complete", [1.0], {})  # its own worker comes too late
    assert states(tickets) == ["FAIL", "FAIL"]


def test_silence_of_another_machine_counts_after_four_heartbeats(
    storage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tickets = make(storage, total=1)
    trial, _ = take(tickets)
    trial.set_user_attr("worker", {"host": "elsewhere", "boot": "x", "pid": 1, "created": 0.0})
    assert tickets.rescue() == 0
    if hasattr(tickets._storage, "record_heartbeat"):
        monkeypatch.setattr(tickets._storage, "_get_stale_trial_ids", lambda study: [trial._trial_id])
    else:
        now = module.time.time()
        monkeypatch.setattr(module.time, "time", lambda: now + 3.5)
        assert tickets.rescue() == 0
        monkeypatch.setattr(module.time, "time", lambda: now + 4.5)
    assert tickets.rescue() == 1


def test_a_claim_without_a_sign_of_life_is_found(storage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tickets = make(storage, total=1)
    monkeypatch.setattr(Tickets, "beat", lambda self, trial_id: (_ for _ in ()).throw(SystemExit))
    with pytest.raises(SystemExit):
        tickets.claim(sampler)
    assert tickets.rescue() == 0

    class Later(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.now(tz) + timedelta(seconds=5)

    monkeypatch.setattr(module, "datetime", Later)
    assert tickets.rescue() == 1


def test_a_worker_that_died_between_two_writes_loses_nothing(
    storage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tickets = make(storage, total=1)
    trial, _ = take(tickets)
    with monkeypatch.context() as patch:
        patch.setattr(Tickets, "_replace", lambda self, trial, counted: (_ for _ in ()).throw(SystemExit))
        with pytest.raises(SystemExit):
            tickets.give_back(trial, {}, counted=True)
    assert tickets.rescue() == 0  # it may be about to write
    assert not tickets.progress().complete
    monkeypatch.setattr(module, "REPLACED_WITHIN_S", -1.0)
    assert tickets.rescue() == 1
    assert take(tickets)[1] == FIXED


def test_of_two_replacements_one_counts(storage: Any) -> None:
    tickets = make(storage, total=1)
    trial, _ = take(tickets)
    tickets.give_back(trial, {}, counted=True)
    tickets._replace(tickets.study.trials[0], counted=True)
    tickets.finish(take(tickets)[0], "complete", [1.0], {})
    assert tickets.claim(sampler) is None
    assert tickets.progress().complete
    assert states(tickets) == ["FAIL", "COMPLETE", "WAITING"]


def test_addresses(project: Path) -> None:
    assert storage_address(None, project) == f"sqlite:///{project / 'study.db'}"
    assert lock_file(f"sqlite:///{project / 'study.db'}") == project / "study.db.lock"
    assert lock_file("postgresql+psycopg://h/d") is None
    assert storage_address("journal", project) == f"journal:{project / 'study.log'}"
    assert storage_address("a/b.log", project).startswith("journal:/")
    assert storage_address("x.db", project).startswith("sqlite:////")
    assert storage_address("postgresql://u:p@h/d", project) == "postgresql+psycopg://u:p@h/d"
    for text, part in [
        ("study", "ends in .db or .log"),
        ("oracle://x", "unknown kind"),
        ("mysql://h/d", "pymysql"),
    ]:
        with pytest.raises(UserError, match=part):
            storage_address(text, project)
    with pytest.raises(UserError, match="cannot be opened") as caught:
        open_storage("postgresql+psycopg://u:secret@127.0.0.1:9/d?connect_timeout=1", 1)
    assert "secret" not in str(caught.value).split("cannot be opened")[0]
