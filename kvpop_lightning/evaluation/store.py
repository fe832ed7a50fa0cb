"""One JSON file per (model, data, row, policy, budget): an interrupted run goes on where it stopped."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FORMAT = 1
"""Raised whenever a metric changes its meaning, so that old files are not mistaken for new ones."""


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """Hash of names, shapes, dtypes and bytes; a changed weight anywhere changes it."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}|{tuple(tensor.shape)}|{tensor.dtype}|".encode())
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(data.numpy().data)
    return digest.hexdigest()


def json_digest(value: Any) -> str:
    """Hash of a JSON-able value, independent of key order."""
    return hashlib.blake2b(
        json.dumps(value, sort_keys=True, default=str).encode(), digest_size=16
    ).hexdigest()


def plain(value: Any) -> Any:
    """Tensors to lists and every non-finite number to None, so that the file is strict JSON."""
    if isinstance(value, Tensor):
        return plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value


def write_json(path: Path, value: Any) -> None:
    """Write strict JSON in one step: a reader sees the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(json.dumps(plain(value), indent=1, allow_nan=False) + "\n")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


class EvaluationStore:
    """Row records in `folder`, keyed by everything that decides their values.

    Args:
        folder: usually `run_dir/eval_cache`.
        base: what all records share (model hash, data fingerprint, evaluation settings); JSON-able.
    """

    def __init__(self, folder: str | Path, base: Mapping[str, Any]) -> None:
        self.folder = Path(folder)
        self.base = {"format": FORMAT, **base}
        self.reused = 0
        self.computed = 0

    def path(self, name: str, row: int, key: Mapping[str, Any]) -> Path:
        digest = json_digest({"base": self.base, "row": row, "of": dict(key)})
        return self.folder / f"{re.sub('[^A-Za-z0-9_+.-]', '_', name)}-row{row}-{digest[:16]}.json"

    def get(self, name: str, row: int, key: Mapping[str, Any]) -> dict[str, Any] | None:
        """The stored record, or None when there is none or it cannot be read (it is then computed again)."""
        try:
            record = json.loads(self.path(name, row, key).read_text())
        except (OSError, ValueError):
            return None
        if not isinstance(record, dict):
            return None
        self.reused += 1
        return record

    def put(self, name: str, row: int, key: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
        """Store a record and return it as it will be read back."""
        value = plain(record)
        write_json(self.path(name, row, key), value)
        self.computed += 1
        return value
