"""One trial = one child process: start it, stream its metrics, stop it, say how it ended."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from kvpop_lightning.sweeps import exit_codes
from kvpop_lightning.sweeps.files import (
    CHILD_FILE,
    JOB_FILE,
    LOG_FILE,
    RESULT_FILE,
    STOP_FILE,
    MetricsTail,
    last_lines,
    read_json,
    run_id_in,
    write_json,
)
from kvpop_lightning.sweeps.nursery import TrialProcess, shared_nursery
from kvpop_lightning.sweeps.objective import Objective

FINISHED, PRUNED, INVALID, OUT_OF_MEMORY, FAILED, INTERRUPTED = STATES = (
    "finished",
    "pruned",
    "invalid",
    "out_of_memory",
    "failed",
    "interrupted",
)
CHILD = (sys.executable, "-m", "kvpop_lightning.sweeps.child")
"""Command that runs one trial from nothing; the path of its job file comes last."""

OnMetrics = Callable[[int, dict[str, float]], bool]


@dataclass(frozen=True)
class TrialResult:
    """How a trial ended."""

    state: str
    """One of `STATES`."""
    values: dict[str, float]
    """The objective's metrics; empty unless finished."""
    last_lines: str
    """The end of what the child printed."""
    seconds: float
    run_dir: Path
    run_id: str | None
    """Its MLflow run."""
    message: str = ""
    """Why, in one line; empty when finished."""
    exit_code: int | None = None
    """Exit status of the child, negative = the signal that ended it."""
    rows: dict[str, list[float]] = field(default_factory=dict)
    """The metrics of each held-out row, for paired comparisons."""
    name: str = "trial"
    """Of its MLflow run."""

    @property
    def again(self) -> bool:
        """It may end otherwise when run again: after a crash, a full disk, a signal; not NaN."""
        return self.state == FAILED and self.exit_code != exit_codes.DIVERGED


def run_trial(
    config_words: Sequence[str],
    point: Mapping[str, Any],
    *,
    run_dir: Path,
    objective: Objective,
    gpu: str | int | None = None,
    on_metrics: OnMetrics | None = None,
    timeout_s: float | None = None,
    tags: Mapping[str, str] | None = None,
    name: str = "trial",
    measure: Mapping[str, Any] | None = None,
    stop: threading.Event | None = None,
    on_tick: Callable[[], None] | None = None,
    grace_s: float = 60.0,
    kill_s: float = 20.0,
    poll_s: float = 0.25,
    memory_limit_gb: float | None = None,
    threads: int | None = None,
    command: Sequence[str] | None = None,
) -> TrialResult:
    """Trains and measures one point in a process of its own, and returns when that has ended.

    Args:
        config_words: `key=value` words that the child composes, as `kvpop train` would.
        point: values of the trial by dotted key, weaker than `config_words`.
        run_dir: the trial's folder; a checkpoint that lies there is gone on from.
        gpu: device number the child sees as its only one; None = as this process.
        on_metrics: called with (global step, metrics) of every line that the child logs; True = stop it now.
        timeout_s: a trial that takes longer is stopped and fails.
        tags: of its tracking run.
        name: of its tracking run.
        measure: what the child measures beside the objective: `{"every": steps, "rows": n}` evaluates the
            objective during the training, `{"by_row": True}` reports its rows one by one, `{"prefix": text}`
            goes before the names of the logged results.
        stop: set from outside = stop it, it is to go on later.
        on_tick: called about every `poll_s` seconds.
        grace_s: seconds from the stop request to SIGTERM; kill_s: from there to SIGKILL.
        memory_limit_gb: memory it may allocate on the CPU, in 10^9 bytes.
        threads: CPU threads it computes with.
        command: what to run, with the job file as its last word (`CHILD`, or a stand-in); None = a fork of
            the server that has loaded everything (`nursery`).
    """
    run_dir = Path(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    for leftover in (RESULT_FILE, STOP_FILE):
        (run_dir / leftover).unlink(missing_ok=True)
    _end_predecessor(run_dir)
    job = {
        "words": list(config_words),
        "point": dict(point),
        "run_dir": str(run_dir),
        "name": name,
        "objective": objective.to_dict(),
        "measure": dict(measure or {}),
        "tags": dict(tags or {}),
        "memory_limit_gb": memory_limit_gb,
    }
    write_json(run_dir / JOB_FILE, job)
    log_path = run_dir / LOG_FILE
    log_start = log_path.stat().st_size if log_path.exists() else 0
    watch = _Watch(run_dir, on_metrics, timeout_s, stop, on_tick, grace_s, kill_s)
    started = time.monotonic()
    oom_before = _oom_kills()
    process = _start(run_dir / JOB_FILE, log_path, _environment(gpu, threads), command)
    try:
        _note_child(run_dir, process.pid)
        while process.poll() is None:
            watch.step(process)
            with suppress(subprocess.TimeoutExpired):
                process.wait(poll_s)
        watch.read_metrics()
    finally:
        _kill_group(process)  # whatever happens here, and whatever the child left behind
    (run_dir / CHILD_FILE).unlink(missing_ok=True)
    lines = last_lines(log_path, log_start)
    code = process.wait()
    state, message = _outcome(code, watch, run_dir, lines, _oom_kills() > oom_before)
    result = read_json(run_dir / RESULT_FILE) if state == FINISHED else {}
    return TrialResult(
        state=state,
        values={key: float(value) for key, value in result.get("values", {}).items()},
        last_lines=lines,
        seconds=time.monotonic() - started,
        run_dir=run_dir,
        run_id=run_id_in(run_dir, name),
        message=message,
        exit_code=code,
        rows=result.get("rows", {}),
        name=name,
    )


def _start(job: Path, log_path: Path, env: dict[str, str], command: Sequence[str] | None) -> TrialProcess:
    """The child, in a session of its own: Ctrl-C on the terminal reaches this process alone, which then stops
    its trials in order, and a signal to the group reaches loaders and other ranks as well."""
    if command is None:
        return shared_nursery().start(job, log_path, env)
    with log_path.open("ab") as log:
        return subprocess.Popen(
            [*command, str(job)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
        )


class _Watch:
    """What the parent does while the child runs, and how it stops it: a file, SIGTERM, SIGKILL."""

    def __init__(
        self,
        run_dir: Path,
        on_metrics: OnMetrics | None,
        timeout_s: float | None,
        stop: threading.Event | None,
        on_tick: Callable[[], None] | None,
        grace_s: float,
        kill_s: float,
    ) -> None:
        self.run_dir, self.on_metrics, self.on_tick = run_dir, on_metrics, on_tick
        self.stop, self.grace_s, self.kill_s = stop, grace_s, kill_s
        self.tail = MetricsTail(run_dir)
        self.reason: str | None = None
        """Why it was asked to stop: `pruned`, `interrupted` or `timeout`."""
        self.timeout_s = timeout_s
        self._started = time.monotonic()
        self._asked = 0.0
        self._signals: set[int] = set()

    def step(self, process: TrialProcess) -> None:
        self.read_metrics()
        if self.on_tick is not None:
            self.on_tick()
        now = time.monotonic()
        if self.reason is None:
            if self.stop is not None and self.stop.is_set():
                self.ask(INTERRUPTED)
            elif self.timeout_s is not None and now - self._started > self.timeout_s:
                self.ask("timeout")
            return
        waited = now - self._asked
        if waited > self.grace_s and signal.SIGTERM not in self._signals:
            self._send(process, signal.SIGTERM)
        if waited > self.grace_s + self.kill_s and signal.SIGKILL not in self._signals:
            self._send(process, signal.SIGKILL)

    def read_metrics(self) -> None:
        for step, metrics in self.tail.lines():
            if self.on_metrics is not None and self.on_metrics(step, metrics) and self.reason is None:
                self.ask(PRUNED)

    def ask(self, reason: str) -> None:
        self.reason, self._asked = reason, time.monotonic()
        (self.run_dir / STOP_FILE).write_text(reason, encoding="utf-8")

    def _send(self, process: TrialProcess, number: int) -> None:
        self._signals.add(number)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)


def _outcome(code: int, watch: _Watch, run_dir: Path, lines: str, oom_killed: bool) -> tuple[str, str]:
    """State and reason from the exit status and what the parent did."""
    result = read_json(run_dir / RESULT_FILE)
    said = str(result.get("message") or "") or (lines.splitlines() or [""])[-1].strip()
    if code == exit_codes.FINISHED:
        values = result.get("values", {})
        if not values:
            return FAILED, "the child ended without a result"
        wrong = [key for key, value in values.items() if not math.isfinite(float(value))]
        return (FAILED, f"{wrong[0]} is {values[wrong[0]]}") if wrong else (FINISHED, "")
    if code == exit_codes.INVALID:
        return INVALID, said or "invalid point"
    if code == exit_codes.OUT_OF_MEMORY:
        return OUT_OF_MEMORY, said or "out of memory"
    if code in (exit_codes.FAILED, exit_codes.DIVERGED):
        return FAILED, said or exit_codes.MEANING[code]
    if watch.reason == PRUNED:
        return PRUNED, "pruned"
    if watch.reason == INTERRUPTED:
        return INTERRUPTED, "stopped from outside"
    if watch.reason == "timeout":
        return FAILED, f"took longer than {watch.timeout_s:g} s"
    if code in (exit_codes.INTERRUPTED, exit_codes.TERMINATED, -signal.SIGINT, -signal.SIGTERM):
        return INTERRUPTED, "interrupted"
    if code == -signal.SIGKILL and oom_killed:
        return OUT_OF_MEMORY, "the system ended it: no memory left"
    if code < 0:
        return FAILED, f"killed by {signal.Signals(-code).name}"
    return FAILED, f"exit status {code}: {said}"


def _environment(gpu: str | int | None, threads: int | None) -> dict[str, str]:
    env = dict(os.environ)
    if gpu is not None:
        env["CUDA_VISIBLE_DEVICES"] = str(gpu)
    if threads is not None:
        env |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    env["PYTHONUNBUFFERED"] = "1"
    return env


def _note_child(run_dir: Path, pid: int) -> None:
    with suppress(psutil.Error):
        write_json(run_dir / CHILD_FILE, {"pid": pid, "created": psutil.Process(pid).create_time()})


def _end_predecessor(run_dir: Path) -> None:
    """Two processes must not train in one folder: ends one that a killed worker left here."""
    noted = read_json(run_dir / CHILD_FILE)
    with suppress(psutil.Error, KeyError, ProcessLookupError):
        process = psutil.Process(noted["pid"])
        if abs(process.create_time() - noted["created"]) < 1:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


def _kill_group(process: TrialProcess) -> None:
    with suppress(ProcessLookupError, PermissionError):
        if process.pid > 0:
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _oom_kills() -> int:
    """Processes of this control group that the system ended for lack of memory so far."""
    with suppress(OSError, ValueError):
        for line in Path("/sys/fs/cgroup/memory.events").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
