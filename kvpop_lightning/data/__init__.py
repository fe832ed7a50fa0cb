"""Packed mathematics: sources, chat template, packing, memory-mapped rows, resumable reading.

Public names are imported on first use; importing the data module costs the import of Lightning.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_PUBLIC = {
    "ChatRenderer": "chat",
    "PackedMathDataModule": "module",
    "PackedRows": "rows",
    "Position": "position",
    "Problem": "problem",
    "RowBatchSampler": "position",
    "fact_distances": "distances",
    "prepare": "prepare",
    "sample_text": "sample",
    "tokenizer_fingerprint": "chat",
}
__all__ = [*_PUBLIC]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
