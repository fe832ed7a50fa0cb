"""What a trial's process says with its exit status."""

from __future__ import annotations

FINISHED = 0
"""Trained and measured; `result.json` holds the values."""
FAILED = 1
"""An error of the program or of the machine (disk, network): may be run again."""
INVALID = 2
"""The point cannot be: settings that exclude each other, a scorer whose state does not fit the budget."""
STOPPED = 3
"""Asked to stop, checkpoint written: pruned, or to be continued."""
OUT_OF_MEMORY = 4
"""The device or the process had no memory left."""
DIVERGED = 5
"""The loss or the objective is NaN or infinite."""
INTERRUPTED = 130
"""Ctrl-C reached the trial itself."""
TERMINATED = 143
"""SIGTERM reached the trial itself."""

MEANING = {
    FINISHED: "finished",
    FAILED: "failed",
    INVALID: "invalid point",
    STOPPED: "stopped on request",
    OUT_OF_MEMORY: "out of memory",
    DIVERGED: "diverged",
    INTERRUPTED: "interrupted",
    TERMINATED: "terminated",
}
