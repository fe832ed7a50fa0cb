"""`kvpop doctor`: what is here, what is missing, and the command that mends it."""

from __future__ import annotations

from kvpop_lightning.commands import Call
from kvpop_lightning.config.schema import Config

SUMMARY = "say what is installed and usable, and how to mend what is missing"
DETAILS = """Exit status 0 when the demo could run here, 1 when something it needs is missing. Nothing is
changed."""
KEYS = ("model.source", "model.path", "tracking.uri", "run_dir")
DEFAULT_EXPERIMENT: str | None = "demo"

MARKS = {"ok": "ok     ", "note": "note   ", "missing": "MISSING"}


def run(config: Config, call: Call) -> int:
    from kvpop_lightning.commands.diagnosis import diagnose

    missing = 0
    for finding in diagnose(config):
        print(f"{MARKS[finding.state]} {finding.subject}: {finding.text}", flush=True)
        if finding.mend:
            print(f"{'':8}-> {finding.mend}", flush=True)
        missing += finding.state == "missing"
    print()
    print("the demo can run here: make demo" if not missing else f"{missing} thing(s) missing for the demo")
    return int(missing > 0)
