"""Writing files so that a full disk or an interrupt leaves the old state, never half of the new one."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvpop_lightning.disk import is_disk_full
from kvpop_lightning.errors import UserError


@contextmanager
def staging(target: str | Path) -> Iterator[Path]:
    """A fresh folder beside `target`, on the same file system; removed afterwards, whatever happens.

    Move or rename what is finished out of it (`os.replace` is atomic there).

    Raises:
        UserError: the disk is full, or the place cannot be written.
    """
    target = Path(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        stage = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise _explained(error, target) from error
    try:
        yield stage
    except Exception as error:
        if is_disk_full(error):
            raise _explained(error, target) from error
        if isinstance(error, PermissionError):
            raise _explained(error, target) from error
        raise
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def move_into(stage: Path, target: Path, last: str) -> None:
    """Moves every file of `stage` into the folder `target`; the one named `last` goes last and so marks
    completeness.
    """
    target.mkdir(parents=True, exist_ok=True)
    names = sorted(os.listdir(stage), key=lambda name: (name == last, name))
    for name in names:
        shutil.copymode(stage / last, stage / name)  # safetensors writes for the owner alone
        os.replace(stage / name, target / name)


def _explained(error: BaseException, target: Path) -> UserError:
    if is_disk_full(error):
        return UserError(
            f"no space left on device while writing {target}: free some space and run again; nothing was kept"
        )
    return UserError(f"cannot write {target}: {getattr(error, 'strerror', None) or error}")
