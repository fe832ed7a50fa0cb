"""The identity of a data set: everything that its rows depend on, hashed."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

from kvpop_lightning.config.schema import DataConfig
from kvpop_lightning.data.chat import tokenizer_fingerprint
from kvpop_lightning.data.sources import source_identity

FORMAT = 1
# What decides about the content of a row. A changed template is a changed data set even if nobody counts
# versions.
_COMMON = ("chat.py", "documents.py", "packing.py", "blocks.py")
_PROCEDURAL = ("problem.py", "reasoning.py")
_WRITTEN = ("records.py", "conversation.py", "hub.py", "decontaminate.py", "document_blocks.py")


def describe(config: DataConfig, tokenizer: Any) -> dict[str, Any]:
    """JSON-able description of the data set; its hash is the fingerprint."""
    return {
        "format": FORMAT,
        "source": config.source,
        "identity": source_identity(config),
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "row_length": config.row_length,
        "train_rows": config.train_rows,
        "eval_rows": config.eval_rows,
        "eval_single_document": config.eval_single_document,
        "loss_on": config.loss_on,
        "too_long": config.too_long,
        "on_bad_row": config.on_bad_row,
        "seed": config.seed,
        "code": code_hash(config.source),
    }


def fingerprint(description: dict[str, Any]) -> str:
    """16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:16]


@cache
def code_hash(source: str) -> str:
    """Hash of the code that a source's rows depend on."""
    room = Path(__file__).parent
    procedural = source == "procedural"
    files = [room / name for name in (*_COMMON, *(_PROCEDURAL if procedural else _WRITTEN))]
    files += sorted((room / "families").glob("*.py")) if procedural else []
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()
