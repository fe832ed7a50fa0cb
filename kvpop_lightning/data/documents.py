"""A document: a conversation, where it comes from, and the hashes it is split and compared by."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property

from kvpop_lightning.data.chat import Message


@dataclass(frozen=True)
class Document:
    """`origin` is readable (`file.jsonl:12`, `ledger seed 0/train/3/1`); `family` groups them in reports."""

    messages: tuple[Message, ...]
    origin: str
    family: str

    @cached_property
    def hash(self) -> str:
        """Hash of the whole conversation: equal documents are duplicates."""
        return _digest([[m["role"], m["content"]] for m in self.messages])

    @cached_property
    def problem_hash(self) -> str:
        """Hash of everything before the first answer, white space aside.

        Documents are split by it, so two solutions of one problem never lie on both sides.
        """
        problem = []
        for message in self.messages:
            if message["role"] == "assistant":
                break
            problem.append(" ".join(message["content"].split()))
        return _digest(problem)

    def in_share(self, share: float) -> bool:
        """Whether the document falls into the share (0 to 1) of problems that is kept for evaluation."""
        return int(self.problem_hash[:8], 16) < share * 2**32


def _digest(content: object) -> str:
    return hashlib.sha256(
        json.dumps(content, ensure_ascii=False).encode("utf-8", "surrogatepass")
    ).hexdigest()
