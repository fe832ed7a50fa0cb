"""What of a machine each of its workers uses, a GPU and threads, found without loading torch."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

from kvpop_lightning.errors import UserError


def visible_gpus() -> list[str]:
    """Device numbers (or UUIDs) that this process may use."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [name.strip() for name in given.split(",") if name.strip() not in ("", "-1")]
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    count = sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    return [str(index) for index in range(count)] if listed.returncode == 0 else []


def assign_gpus(wanted: Sequence[str], workers: int) -> list[str | None]:
    """A GPU for each worker, in turn; None = without.

    Raises:
        UserError: a GPU is named that is not there.
    """
    names = [str(name) for name in wanted]
    if not names or names == ["none"]:
        return [None] * workers
    visible = visible_gpus()
    if names != ["auto"]:
        missing = [name for name in names if name not in visible]
        if missing:
            raise UserError(
                f"gpus={','.join(names)}: there is no GPU {missing[0]} "
                f"(visible: {', '.join(visible) or 'none'}): use auto or none"
            )
        visible = names
    return [visible[index % len(visible)] if visible else None for index in range(workers)]


def thread_share(workers: int) -> int:
    """CPU threads for each of `workers`, of the cores that this process may use."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        cores = os.cpu_count() or 1
    return max(1, cores // workers)
