"""Blocks made by several processes, in order: the same blocks as one process makes, sooner."""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from typing import Any

from kvpop_lightning.data.blocks import Block, Blocks
from kvpop_lightning.errors import UserError

_AHEAD = 2  # blocks per process that may wait to be taken: bounds the memory

_own: Blocks | None = None


def made(blocks: Blocks, first: int, processes: int = 1) -> Generator[tuple[int, Block], None, None]:
    """Blocks from number `first` on, made by `processes` processes; close it to end them.

    Raises:
        UserError: a process died.
    """
    if processes <= 1:
        yield from blocks.from_block(first)
        return
    # A fresh interpreter each: forking a process that runs threads (tokenizers, torch) may hang.
    pool = ProcessPoolExecutor(
        processes, mp_context=get_context("spawn"), initializer=_start, initargs=(blocks,)
    )
    waiting: deque[tuple[int, Future[Block]]] = deque()
    try:
        for number, task in blocks.tasks(first):
            waiting.append((number, pool.submit(_make, number, task)))
            if len(waiting) >= _AHEAD * processes:
                number, future = waiting.popleft()
                yield number, future.result()
        while waiting:
            number, future = waiting.popleft()
            yield number, future.result()
    except BrokenProcessPool as error:
        raise UserError(
            "a process that makes documents died (out of memory?): lower data.processes and run the same "
            "command again, finished shards are kept"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _start(blocks: Blocks) -> None:
    global _own
    _own = blocks
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the main process's to answer
    parent = parent_process()
    if parent is not None:  # a main process killed at once cannot end its children
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: Any) -> None:
    wait([sentinel])
    os._exit(1)


def _make(number: int, task: Any) -> Block:
    assert _own is not None
    return _own.make(number, task)
