"""A full disk is told from other failures, whatever library wraps the system's word for it."""

from __future__ import annotations

import errno

import pytest

from kvpop_lightning.disk import is_disk_full, path_without_room


class SafetensorError(Exception):
    """The name that safetensors gives its own."""


def from_cause(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        SafetensorError("I/O error: No space left on device (os error 28)"),
        RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0"),
        from_cause(ValueError("x"), OSError(errno.ENOSPC, "full")),
    ],
)
def test_a_full_disk(error: Exception) -> None:
    assert is_disk_full(error)


@pytest.mark.parametrize(
    "error",
    [
        None,
        OSError(errno.EACCES, "Permission denied"),
        ValueError("no space left on device"),
        RuntimeError("CUDA out of memory"),
        NotImplementedError("unexpected position"),
    ],
)
def test_something_else(error: Exception | None) -> None:
    assert not is_disk_full(error)
    assert path_without_room(error) == ""


def test_the_file_is_named_and_circles_end() -> None:
    first, second = RuntimeError("x"), OSError(errno.ENOSPC, "full", "a/b.bin")
    first.__cause__, second.__cause__ = second, first
    assert path_without_room(first) == "a/b.bin"
