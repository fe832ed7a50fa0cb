"""SIGTERM, which schedulers send before they take a machine back, cleans up as Ctrl-C does."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from kvpop_lightning.errors import Terminated


@contextmanager
def sigterm_interrupts(closing: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """The first SIGTERM within the block raises `Terminated` in the main thread; further ones are ignored,
    so that what cleans up is not cut off. Processes forked in the block die of it as usual.

    In another thread, where Python lets nobody handle signals, nothing changes.

    Args:
        closing: True = the block is cleaning up already: nothing is raised any more.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    owner, raised = os.getpid(), False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal raised
        if os.getpid() != owner:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif not raised and not closing():
            raised = True
            raise Terminated(f"signal {number}")

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():  # a block may be left in another one
            signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)
