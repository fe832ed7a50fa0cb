"""One child process: every way it can end, and every way it is stopped."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from sweep_cases import FAKE

from kvpop_lightning.errors import ConfigError, Terminated, UserError
from kvpop_lightning.sweeps import exit_codes
from kvpop_lightning.sweeps.child import exit_code_of
from kvpop_lightning.sweeps.files import MetricsTail, last_lines
from kvpop_lightning.sweeps.objective import Objective
from kvpop_lightning.sweeps.trial import TrialResult, run_trial

OBJECTIVE = Objective(32, 2, ("kl", "bytes_held"))
POINT = {"policy.decay": 0.9, "policy.budget.topk": 10}


def go(folder: Path, monkeypatch: pytest.MonkeyPatch, mode: str = "ok", **options: Any) -> TrialResult:
    monkeypatch.setenv("FAKE_PLAN", json.dumps({"*": [mode]}))
    given = {"grace_s": 5.0, "kill_s": 5.0, "poll_s": 0.02, "command": FAKE} | options
    return run_trial([], POINT, run_dir=folder / "trial", objective=OBJECTIVE, **given)


def test_a_finished_trial(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, dict[str, float]]] = []

    def watch(step: int, metrics: dict[str, float]) -> bool:
        seen.append((step, metrics))
        return False

    result = go(project, monkeypatch, on_metrics=watch)
    assert result.state == "finished"
    assert result.values == {"kl": pytest.approx(0.02), "bytes_held": 1010}
    assert result.rows["kl"] == [pytest.approx(0.02), pytest.approx(0.021)]
    assert [step for step, _ in seen] == [10, 20]
    assert set(seen[0][1]) == {"train/loss", "objective/kl"}
    assert (result.exit_code, result.message) == (0, "")


@pytest.mark.parametrize(
    ("mode", "state", "message", "again"),
    [
        ("crash", "failed", "something broke", True),
        ("invalid", "invalid", "policy.budget.topk=1: too small", False),
        ("oom", "out_of_memory", "no memory left", False),
        ("nan", "failed", "loss is nan at step 20", False),
        ("interrupt", "interrupted", "interrupted", False),
        ("sigkill", "failed", "killed by SIGKILL", True),
        ("silent", "failed", "without a result", True),
    ],
)
def test_every_end_has_its_state_and_the_last_lines(
    project: Path, monkeypatch: pytest.MonkeyPatch, mode: str, state: str, message: str, again: bool
) -> None:
    result = go(project, monkeypatch, mode)
    assert (result.state, result.again, result.values) == (state, again, {})
    assert message in result.message
    assert f"attempt 0 of trial: {mode}" in result.last_lines
    if mode == "crash":
        assert result.last_lines.endswith("Traceback: the last words\nRuntimeError: something broke")


@pytest.mark.parametrize(
    ("mode", "code", "longest"),
    [("slow", exit_codes.STOPPED, 3.0), ("stubborn", -signal.SIGTERM, 5.0), ("deaf", -signal.SIGKILL, 6.0)],
)
def test_a_pruned_trial_is_asked_then_terminated_then_killed(
    project: Path, monkeypatch: pytest.MonkeyPatch, mode: str, code: int, longest: float
) -> None:
    asked_at: list[float] = []

    def prune(step: int, metrics: dict[str, float]) -> bool:
        if step >= 50:
            asked_at.append(time.monotonic())
        return step >= 50

    result = go(project, monkeypatch, mode, on_metrics=prune, grace_s=0.4, kill_s=0.4)
    assert (result.state, result.exit_code) == ("pruned", code)
    assert time.monotonic() - asked_at[0] < longest
    assert (project / "trial" / "checkpoint").exists() == (mode == "slow")


def test_a_stop_from_outside_is_an_interruption(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = threading.Event()
    threading.Timer(0.6, stop.set).start()
    result = go(project, monkeypatch, "slow", stop=stop)
    assert (result.state, result.again) == ("interrupted", False)
    assert (project / "trial" / "checkpoint").exists()


def test_a_trial_that_takes_too_long_fails(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = go(project, monkeypatch, "slow", timeout_s=0.6)
    assert result.state == "failed"
    assert "longer than 0.6 s" in result.message


def test_the_child_gets_its_gpu_threads_and_job(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go(project, monkeypatch, gpu="3", threads=2, tags={"sweep": "x"}, measure={"every": 5}, name="trial 4")
    environment = json.loads((project / "trial" / "environment.json").read_text())
    assert (environment["CUDA_VISIBLE_DEVICES"], environment["OMP_NUM_THREADS"]) == ("3", "2")
    job = json.loads((project / "trial" / "job.json").read_text())
    assert (job["point"], job["name"], job["measure"]) == (POINT, "trial 4", {"every": 5})


def test_a_stale_result_or_request_does_not_count(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = project / "trial"
    folder.mkdir()
    (folder / "result.json").write_text('{"values": {"kl": 1.0, "bytes_held": 2}}')
    (folder / "stop_request").write_text("pruned")
    assert go(project, monkeypatch, "silent").state == "failed"
    assert go(project, monkeypatch, "ok").state == "finished"


def test_only_whole_new_lines_are_read(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = project / "trial"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 5, "objective/kl": 9.0}\n')
    seen: list[tuple[int, dict[str, float]]] = []
    go(project, monkeypatch, "half_line", on_metrics=lambda step, m: bool(seen.append((step, m))))
    assert [step for step, _ in seen] == [10, 20, 40, 50]
    assert seen[2][1] == {"objective/kl": 1.5, "train/loss": 2.0}
    assert math.isnan(seen[3][1]["a"])


def test_a_child_that_a_killed_worker_left_is_ended_first(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = project / "trial"
    folder.mkdir()
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    created = psutil.Process(left.pid).create_time()
    (folder / "child.json").write_text(json.dumps({"pid": left.pid, "created": created}))
    try:
        assert go(project, monkeypatch).state == "finished"
        left.wait(5)
        assert not psutil.pid_exists(left.pid)
    finally:
        left.kill()
    innocent = {"pid": os.getpid(), "created": 1.0}  # the number was given to another process since
    (folder / "child.json").write_text(json.dumps(innocent))
    assert go(project, monkeypatch).state == "finished"


def test_an_error_of_the_parent_does_not_leave_the_child_behind(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(step: int, metrics: dict[str, float]) -> bool:
        raise RuntimeError("storage is away")

    with pytest.raises(RuntimeError, match="storage is away"):
        go(project, monkeypatch, "stubborn", on_metrics=broken)
    pid = json.loads((project / "trial" / "child.json").read_text())["pid"]
    assert not psutil.pid_exists(pid)


def test_last_lines_are_short_and_of_this_attempt(project: Path) -> None:
    log = project / "child.log"
    log.write_text("old\n")
    start = log.stat().st_size
    with log.open("a") as file:
        file.write("".join(f"line {n}\n" for n in range(100)) + "step 1\rstep 2\rstep 3\n")
    lines = last_lines(log, start).splitlines()
    assert (len(lines), lines[-2:]) == (15, ["line 99", "step 3"])
    assert "old" not in last_lines(log, start)
    assert last_lines(project / "away.log") == ""
    assert list(MetricsTail(project / "away").lines()) == []


def _raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as caught:
        return caught


class OutOfMemoryError(RuntimeError):
    pass


@pytest.mark.parametrize(
    ("error", "cause", "asked", "code"),
    [
        (ConfigError(["a"]), None, False, exit_codes.INVALID),
        (UserError("scorer does not fit"), None, False, exit_codes.INVALID),
        (UserError("out of GPU memory"), OutOfMemoryError("CUDA"), False, exit_codes.OUT_OF_MEMORY),
        (MemoryError(), None, False, exit_codes.OUT_OF_MEMORY),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
            None,
            False,
            exit_codes.OUT_OF_MEMORY,
        ),
        (UserError("cannot write"), OSError(28, "No space left"), False, exit_codes.FAILED),
        (RuntimeError("broken"), None, False, exit_codes.FAILED),
        (ValueError("from elsewhere"), None, False, exit_codes.FAILED),
        (Terminated("15"), None, True, exit_codes.STOPPED),
        (Terminated("15"), None, False, exit_codes.TERMINATED),
        (KeyboardInterrupt(), None, False, exit_codes.INTERRUPTED),
        (KeyboardInterrupt(), None, True, exit_codes.STOPPED),
    ],
)
def test_exit_status_of_an_error(
    error: BaseException, cause: BaseException | None, asked: bool, code: int
) -> None:
    assert exit_code_of(_raised(error, cause), asked_to_stop=asked) == code
    assert code in exit_codes.MEANING
