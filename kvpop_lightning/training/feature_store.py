"""Features of training rows on disk: one safetensors file per row and part, written atomically, read by
memory map.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvpop_lightning.disk import unwritable
from kvpop_lightning.errors import UserError

Features = dict[str, Tensor]
FLOAT16_SAFE = 6.0e4
"""Largest magnitude stored in float16 (its maximum is 65504)."""


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below `folder`."""
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) if folder.exists() else 0


class FeatureStore:
    """Parts of rows below `folder`, e.g. `<folder>/kv/0000012.safetensors`.

    Args:
        folder: stands for one (model, data, split); the caller puts their fingerprints into its name.
        dtype: how keys, values and hidden states are stored. float16 keeps 11 bits of them; values that would
            overflow are stored in float32.
    """

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float16) -> None:
        self.folder, self.dtype = folder, dtype

    def path(self, row: int, part: str) -> Path:
        """The file of one part of one row."""
        return self.folder / part / f"{row:07d}.safetensors"

    def has(self, row: int, parts: list[str]) -> bool:
        """Whether all `parts` of the row are there."""
        return all(self.path(row, part).exists() for part in parts)

    @contextmanager
    def claim(self, rows: list[int], *, wait: bool = False) -> Iterator[list[int]]:
        """Those of `rows` that no other process works on, kept from others until the block ends.

        Args:
            wait: wait for each instead of leaving out what another process has; the system frees a lock
                whose process dies.
        """
        with ExitStack() as stack:
            claimed = []
            for row in rows:
                path = self.path(row, "claims").with_suffix("")
                path.parent.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(path.open("w"))
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
                except BlockingIOError:
                    continue
                claimed.append(row)
            yield claimed

    def compress(self, tensor: Tensor) -> Tensor:
        """The tensor in the stored dtype, or in float32 when float16 would overflow."""
        if self.dtype == torch.float16 and tensor.numel() and float(tensor.abs().amax()) > FLOAT16_SAFE:
            return tensor.float()
        return tensor.to(self.dtype)

    def write(self, row: int, part: str, tensors: Features) -> None:
        """Store one part; a reader sees the whole file or none.

        Raises:
            UserError: no space left, or the folder cannot be written.
        """
        path = self.path(row, part)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, temporary)
            os.replace(temporary, path)
        except Exception as error:  # safetensors wraps the system's error in its own type
            temporary.unlink(missing_ok=True)
            if (reason := unwritable(error)) is not None:
                raise UserError(
                    f"cannot write features to {self.folder}: {reason}; free space or set "
                    "trainer.feature_cache_dir to another disk"
                ) from error
            raise

    def read(self, row: int, part: str) -> Features:
        """One part of a row as stored, memory-mapped."""
        with safe_open(self.path(row, part), framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
