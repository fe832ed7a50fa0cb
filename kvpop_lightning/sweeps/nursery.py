"""Trials' processes without the wait for their imports: a server that has loaded everything forks each one.

Loading torch, Lightning, transformers and MLflow takes longer than many a trial's training. The server
(`python -m kvpop_lightning.sweeps.nursery REQUESTS REPLIES`, two pipes) loads them once and touches neither
data nor a GPU; a trial is a fork of it in a session of its own, with its own environment and log. When the
sweep dies the server sees its pipe close and ends; the trials see that and end in order.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

PRELOADED = (
    "kvpop_lightning.sweeps.child",
    "kvpop_lightning.sweeps.callbacks",
    "kvpop_lightning.training.fit",
    "kvpop_lightning.evaluation.evaluate",
    "kvpop_lightning.data",
    "kvpop_lightning.models.sources",
    "kvpop_lightning.models.tiny",
    "kvpop_lightning.tracking",
    "transformers.models.llama.modeling_llama",
    "mlflow",
    "mlflow.tracking",
    "mlflow.store.tracking.sqlalchemy_store",
)
LOOK_S = 0.05
SERVER_LOST = -signal.SIGKILL


class TrialProcess(Protocol):
    """What a trial's parent needs of its process; `subprocess.Popen` has it."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...


class ForkedTrial:
    """A process that the server forked; used like `subprocess.Popen`."""

    def __init__(self) -> None:
        self.pid = 0
        self.returncode: int | None = None
        self._started, self._ended = threading.Event(), threading.Event()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired("trial", timeout or 0)
        assert self.returncode is not None
        return self.returncode

    def started(self, pid: int) -> None:
        self.pid = pid
        self._started.set()

    def ended(self, code: int) -> None:
        self.returncode = code
        self._ended.set()
        self._started.set()

    def wait_for_start(self) -> None:
        self._started.wait()


class Nursery:
    """The server as its owner sees it; started by the first trial, and again if it is lost."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._server: subprocess.Popen[bytes] | None = None
        self._requests = -1
        self._trials: dict[int, ForkedTrial] = {}
        self._next = 0
        self._ready = False

    def start(self, job: Path, log: Path, env: Mapping[str, str]) -> ForkedTrial:
        """A process that runs the job; returns when it exists.

        Raises:
            RuntimeError: the server ended while it loaded the libraries; the reason is on standard error.
        """
        trial = ForkedTrial()
        with self._lock:
            if self._server is None or self._server.poll() is not None:
                self._open()
            number, self._next = self._next, self._next + 1
            self._trials[number] = trial
            request = {
                "trial": number,
                "job": str(job),
                "log": str(log),
                "env": dict(env),
                "cwd": os.getcwd(),
            }
            try:
                os.write(self._requests, json.dumps(request).encode() + b"\n")
            except OSError:
                trial.ended(SERVER_LOST)
        trial.wait_for_start()
        if trial.pid == 0 and not self._ready:
            raise RuntimeError("no trial can be started: loading the libraries failed, see the error above")
        return trial

    def close(self) -> None:
        """Ends the server when its trials have ended."""
        with self._lock:
            if self._requests >= 0:
                os.close(self._requests)
                self._requests = -1
            if self._server is not None:
                with suppress(subprocess.TimeoutExpired):
                    self._server.wait(5)
                self._server = None

    def _open(self) -> None:
        if self._requests >= 0:
            os.close(self._requests)
        request_read, self._requests = os.pipe()
        reply_read, reply_write = os.pipe()
        self._trials, self._ready = {}, False
        self._server = subprocess.Popen(
            [sys.executable, "-m", "kvpop_lightning.sweeps.nursery", str(request_read), str(reply_write)],
            pass_fds=(request_read, reply_write),
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the sweep, which then stops its trials
            # Asking CUDA how many GPUs there are would make it useless after the fork.
            env={**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
        )
        os.close(request_read)
        os.close(reply_write)
        threading.Thread(
            target=self._read, args=(reply_read, self._trials), name="nursery", daemon=True
        ).start()

    def _read(self, replies: int, trials: dict[int, ForkedTrial]) -> None:
        with os.fdopen(replies, encoding="utf-8") as lines:
            for line in lines:
                reply = json.loads(line)
                if "ready" in reply:
                    self._ready = True
                elif "pid" in reply:
                    trials[reply["trial"]].started(reply["pid"])
                else:
                    trials.pop(reply["trial"]).ended(reply["exit"])
        with self._lock:  # the server is gone, and nobody else knows of its trials' ends
            for trial in trials.values():
                trial.ended(SERVER_LOST)
            trials.clear()


_shared: Nursery | None = None
_shared_lock = threading.Lock()


def shared_nursery() -> Nursery:
    """This process's server."""
    global _shared
    with _shared_lock:
        if _shared is None:
            _shared = Nursery()
        return _shared


def serve(requests: int, replies: int) -> None:
    """Forks a process per request until the requests' pipe closes."""
    import importlib

    # A scheduler that takes a job back signals every process of it. The sweep answers, and closes the pipe.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what is loaded stays shared between the forks
    _reply(replies, {"ready": 1})
    running: dict[int, int] = {}
    waiting = b""
    open_for_requests = True
    while open_for_requests or running:
        ready, _, _ = select.select([requests] if open_for_requests else [], [], [], LOOK_S)
        if ready:
            new = os.read(requests, 65536)
            if not new:
                return  # the sweep has ended or died: running trials see that their parent is gone
            waiting += new
        while b"\n" in waiting:
            line, waiting = waiting.split(b"\n", 1)
            request = json.loads(line)
            pid = os.fork()
            if pid == 0:
                for descriptor in (requests, replies):
                    os.close(descriptor)
                _become_trial(request)
            running[pid] = request["trial"]
            _reply(replies, {"trial": request["trial"], "pid": pid})
        while running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            _reply(replies, {"trial": running.pop(pid), "exit": os.waitstatus_to_exitcode(status)})


def _become_trial(request: Mapping[str, Any]) -> None:
    """In the fork: never returns."""
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.chdir(request["cwd"])  # the paths are relative to the sweep's folder of today
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        os.environ.clear()
        os.environ.update(request["env"])
        time.tzset()
        if threads := os.environ.get("OMP_NUM_THREADS"):
            import torch

            torch.set_num_threads(int(threads))
        # Lightning starts further ranks with the words of this process: they run the same job.
        sys.argv = [sys.argv[0], request["job"]]
        from kvpop_lightning.sweeps.child import main

        code = main([request["job"]])
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _reply(replies: int, content: Mapping[str, int]) -> None:
    with suppress(OSError):
        os.write(replies, json.dumps(content).encode() + b"\n")


if __name__ == "__main__":
    if len(sys.argv) == 2:  # a further rank of a trial's training
        from kvpop_lightning.sweeps.child import main

        sys.exit(main(sys.argv[1:]))
    serve(int(sys.argv[1]), int(sys.argv[2]))
