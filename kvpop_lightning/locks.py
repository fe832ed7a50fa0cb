"""Files that processes exclude each other by: waiting one's turn, or refusing the second one."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvpop_lightning.errors import UserError
from kvpop_lightning.tracking.run_facts import is_rank_zero

LOCK_FILE = ".in_use"


@contextmanager
def one_at_a_time(path: Path | None) -> Iterator[None]:
    """Only one thread of all processes of this machine holds `path` at a time; None = nothing to wait for."""
    if path is None:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:  # a file description of its own: threads exclude each other too
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def exclusive(folder: Path | None, what: str, mend: str) -> Iterator[None]:
    """Holds `folder` until the end of the block, or of the process, however it dies.

    Only rank 0 of a distributed training takes it.

    Args:
        folder: made if it is missing; None holds nothing.
        what: what goes on there, for the message.
        mend: what the user may do, for the message.

    Raises:
        UserError: another process, or another block of this one, holds it.
    """
    if folder is None or not is_rank_zero():
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / LOCK_FILE, "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise UserError(f"{folder}: process {file.read().strip() or '?'} {what} there: {mend}") from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
