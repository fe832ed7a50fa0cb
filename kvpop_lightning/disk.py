"""Why a file could not be written: above all a full disk, however the library wraps the system's word."""

from __future__ import annotations

import errno
from collections.abc import Iterator

_TEXTS = ("no space left on device", "disk is full")
_TORCH_TEXTS = ("file write failed", "unexpected pos")
"""What torch's archive writer says of a write cut short; it drops the system's error."""


def is_disk_full(error: BaseException | None) -> bool:
    """True when `error`, or what it came from, is a write for which the disk had no room (or no quota)."""
    return any(_says_full(cause) for cause in causes(error))


def unwritable(error: BaseException) -> str | None:
    """Why a file could not be written, in a few words; None when the disk is not to blame."""
    if is_disk_full(error):
        return "no space left on device"
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EROFS, errno.ENOTDIR):
        return str(error.strerror).lower()
    return None


def path_without_room(error: BaseException | None) -> str:
    """The file that did not fit, "" where no cause names one."""
    full = (cause for cause in causes(error) if isinstance(cause, OSError) and _says_full(cause))
    return next((str(cause.filename) for cause in full if cause.filename), "")


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """`error` and what led to it, each once."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _says_full(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    text = str(error).lower()
    # torch, safetensors, sqlite and pyarrow wrap the system's error in types of their own.
    wrapped = type(error).__name__ in ("RuntimeError", "SafetensorError", "OperationalError", "ArrowInvalid")
    return (wrapped and any(words in text for words in _TEXTS)) or (
        type(error) is RuntimeError and any(words in text for words in _TORCH_TEXTS)
    )
