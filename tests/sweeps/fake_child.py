"""Stands in for a trial's process: logs a few steps, then ends as the plan in $FAKE_PLAN says.

The plan maps a trial's name to the modes of its attempts, the last one for all further attempts; `*` is for
all trials that it does not name. It reads and writes the same files as the real child and imports
nothing of it.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

parent = os.getppid()
job = json.loads(Path(sys.argv[1]).read_text())
folder = Path(job["run_dir"])
plan = json.loads(os.environ.get("FAKE_PLAN", "{}"))
attempts = folder / "attempts"
attempt = int(attempts.read_text()) if attempts.exists() else 0
attempts.write_text(str(attempt + 1))
modes = plan.get(job["name"], plan.get("*", ["ok"]))
mode = modes[min(attempt, len(modes) - 1)]
(folder / "environment.json").write_text(json.dumps(dict(os.environ)))


def log(step, **metrics):
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"run": job["name"], "step": step, "time": 0, **metrics}) + "\n")


def result(**content):
    (folder / ".result").write_text(json.dumps(content))
    (folder / ".result").replace(folder / "result.json")


def value():
    decay = job["point"].get("policy.decay", 1.0)
    topk = job["point"].get("policy.budget.topk", 8)
    return (decay - 0.8) ** 2 + 0.001 * abs(topk - 10) + 0.01


if mode == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(f"attempt {attempt} of {job['name']}: {mode}", flush=True)
start = value() * (10 if mode == "bad" else 1)
for step in (10, 20):
    log(step, **{"train/loss": 1.0 / step, "objective/kl": start * (1 + 1 / step)})
endings = {
    "crash": (1, "RuntimeError: something broke"),
    "invalid": (2, "policy.budget.topk=1: too small"),
    "oom": (4, "OutOfMemoryError: no memory left"),
    "nan": (5, "train/loss is nan at step 20"),
    "interrupt": (130, "interrupted"),
}
if mode in endings:
    code, message = endings[mode]
    print("Traceback: the last words", flush=True)
    print(message, flush=True)
    result(values={}, message=message)
    sys.exit(code)
if mode == "sigkill":
    os.kill(os.getpid(), signal.SIGKILL)
if mode == "silent":
    sys.exit(0)
step = 30
while mode in ("slow", "bad", "stubborn", "deaf"):
    if mode in ("slow", "bad") and (folder / "stop_request").exists():
        (folder / "checkpoint").write_text(str(step))
        sys.exit(3)
    if os.getppid() != parent:  # a test that was killed must not leave this behind
        sys.exit(143)
    log(step, **{"train/loss": 0.1, "objective/kl": start})
    step += 10
    time.sleep(0.05)
if mode == "half_line":
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 40, "objective/kl": 1.5, "tr')
        file.flush()
        time.sleep(0.6)
        file.write('ain/loss": 2}\nnot json\n{"step": 50, "a": "nan"}\n')
metrics = {"kl": value(), "bytes_held": 1000 + job["point"].get("policy.budget.topk", 8)}
rows = job["objective"]["rows"]
result(
    values={name: metrics[name] for name in job["objective"]["metrics"]},
    rows={"kl": [metrics["kl"] + 0.001 * row for row in range(rows)]},
    steps=30,
)
