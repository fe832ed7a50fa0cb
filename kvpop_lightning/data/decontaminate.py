"""Training documents that contain a problem of an evaluation suite: n-gram overlap.

Words are lower-cased runs of letters and digits, so that spacing, punctuation and LaTeX's signs do not hide a
copy. A document overlaps with a suite's problem when they share `ngram` words in a row; a problem with fewer
words must occur whole, and one of fewer than `SHORTEST` words says too little to be looked for.
Candidates are found by 64-bit hashes of all n-grams at once and confirmed word by word.
"""

from __future__ import annotations

import re
import unicodedata
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvpop_lightning.data.documents import Document
from kvpop_lightning.data.records import find_files, read_rows
from kvpop_lightning.errors import UserError

SHORTEST = 5
_WORD = re.compile(r"[^\W_]+")
_BASE = np.uint64(0x9E3779B97F4A7C15)
_QUESTION = ("problem", "question", "prompt", "input")


@dataclass(frozen=True)
class Overlap:
    """The first words that a document shares with a problem of a suite."""

    document: str
    suite: str
    words: str


class Overlaps:
    """Looks for the problems of evaluation suites in documents.

    Args:
        problems: (name of the problem, its text).
        ngram: words in a row that make an overlap.
    """

    def __init__(self, problems: Iterable[tuple[str, str]], ngram: int) -> None:
        self.ngram = ngram
        self.problems = self.too_short = 0
        found: dict[int, dict[int, list[tuple[tuple[str, ...], str]]]] = {}
        for name, text in problems:
            words = words_of(text)
            self.problems += 1
            if len(words) < SHORTEST:
                self.too_short += 1
                continue
            length = min(ngram, len(words))
            table = found.setdefault(length, {})
            for start, value in enumerate(_hashes(words, length).tolist()):
                gram = tuple(words[start : start + length])
                entries = table.setdefault(value, [])
                if all(known != gram for known, _ in entries):
                    entries.append((gram, name))
        # One table per length: problems shorter than an n-gram are looked for whole.
        self._tables = {n: (np.array(sorted(t), dtype=np.uint64), t) for n, t in sorted(found.items())}

    def first(self, document: Document) -> Overlap | None:
        """The first overlap of the conversation, or None."""
        for message in document.messages:
            words = words_of(message["content"])
            for length, (known, table) in self._tables.items():
                hashes = _hashes(words, length)
                if not len(hashes):
                    continue
                place = np.searchsorted(known, hashes)
                place[place == len(known)] = 0
                for start in np.flatnonzero(known[place] == hashes).tolist():
                    gram = tuple(words[start : start + length])
                    for candidate, name in table[int(hashes[start])]:
                        if candidate == gram:
                            return Overlap(document.origin, name, " ".join(gram))
        return None


def words_of(text: str) -> list[str]:
    """Lower-cased words of a text."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def _hashes(words: Sequence[str], length: int) -> np.ndarray:
    """Hash of every run of `length` words, uint64 [max(0, N - length + 1)]."""
    count = len(words) - length + 1
    if count < 1:
        return np.empty(0, dtype=np.uint64)
    single = np.fromiter((zlib.crc32(word.encode()) for word in words), dtype=np.uint64, count=len(words))
    result = np.zeros(count, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for offset in range(length):
            result = result * _BASE + single[offset : offset + count]
    return result


def suite_problems(patterns: Sequence[str]) -> Iterable[tuple[str, str]]:
    """Problems of the suites' files: `problem`, `question`, `prompt` or `input`, or what stands before the
    first answer in `messages`.

    Raises:
        UserError: a file that cannot be read, or a row without a problem.
    """
    for file in suite_files(patterns):
        for row in read_rows([file], None, columns=(*_QUESTION, "messages", "conversations")):
            yield row.origin, problem_of(row.record, f"data.suites: {row.where}")


def suite_files(patterns: Sequence[str]) -> list[Path]:
    """Files of `data.suites`."""
    return [file for pattern in patterns for file in find_files(pattern, "data.suites")]


def problem_of(record: Any, where: str) -> str:
    """The text of a row's problem.

    Raises:
        UserError: there is none; the message names the place.
    """
    if isinstance(record, dict):
        for name in _QUESTION:
            if isinstance(record.get(name), str) and record[name].strip():
                return str(record[name])
        messages = record.get("messages")
        texts: list[str] = []
        for message in messages if isinstance(messages, list) else []:
            if isinstance(message, dict) and message.get("role") == "user":
                texts.append(str(message.get("content")))
        if texts:
            return "\n".join(texts)
    raise UserError(f"{where} holds no problem (one of {', '.join(_QUESTION)}, or messages)")
