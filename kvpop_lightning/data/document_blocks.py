"""Blocks of documents that somebody else wrote: rows of files and hub data sets, every one accounted for.

Each row read ends in exactly one place: among the documents of a block or under one name of `DROPPED` (or
`bad_row_...`), and `account` shows that the sums agree.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kvpop_lightning.config.schema import DataConfig
from kvpop_lightning.data.blocks import Block, Blocks
from kvpop_lightning.data.chat import ChatRenderer
from kvpop_lightning.data.conversation import BadRowError, has_answer, messages_of, uses_tools
from kvpop_lightning.data.decontaminate import Overlaps, suite_problems
from kvpop_lightning.data.documents import Document
from kvpop_lightning.data.packing import Piece, pack, pieces_of
from kvpop_lightning.data.records import Row, find_files, read_rows
from kvpop_lightning.data.sources import Source
from kvpop_lightning.errors import UserError

DROPPED = (
    "tool_row",
    "no_answer",
    "duplicate",
    "other_split",
    "problem_in_evaluation",
    "contaminated",
    "over_max_tokens",
    "shorter_than_a_row",
    "too_long_dropped",
)
_SHORTENED = {
    "too_long_truncated": "cut to it (data.too_long)",
    "cut_to_the_row": "cut to it (data.eval_single_document)",
    "too_long_split": "split over several (data.too_long)",
}
OVERLAPS_LISTED = 1000


@dataclass
class _Window:
    """Documents of one block, and what happened to the rows read since the one before."""

    documents: list[Document]
    counts: Counter[str]
    overlaps: list[dict[str, str]]


class DocumentBlocks(Blocks):
    """Documents of a source, `data.window` at a time, shuffled inside a window by the seed and packed."""

    def __init__(self, config: DataConfig, renderer: ChatRenderer, split: str, source: Source) -> None:
        super().__init__(config, renderer, split)
        if config.on_bad_row not in ("error", "skip"):
            raise UserError(f"data.on_bad_row must be error or skip, got {config.on_bad_row!r}")
        self.source: Source | None = source
        self.own_file = config.eval_path is not None
        self._evaluation: set[str] | None = None
        self._overlaps: Overlaps | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Other processes only make blocks: they read nothing and look nothing up.
        return {**self.__dict__, "source": None, "_evaluation": None, "_overlaps": None}

    def tasks(self, first: int) -> Iterator[tuple[int, _Window]]:
        # Starting later still reads the rows before (hashes decide on duplicates), but does not tokenise
        # them.
        assert self.source is not None, "blocks of another process only make"
        evaluation, overlaps = self._prepared()
        window, number, seen = _Window([], Counter(), []), 0, set[int]()
        for row in self.source.rows():
            window.counts["rows"] += 1
            document, reason = self._document(row)
            if document is not None:
                reason = self._left_out(document, seen, evaluation)
                if not reason and overlaps is not None and (overlap := overlaps.first(document)):
                    window.counts["overlaps_suites"] += 1
                    window.overlaps.append(asdict(overlap))
                    reason = "contaminated" if self.config.decontaminate == "remove" else ""
            if document is None or reason:
                window.counts[reason] += 1
                continue
            window.counts["kept"] += 1
            window.documents.append(document)
            if len(window.documents) == self.config.window:
                if number >= first:
                    yield number, window
                number, window = number + 1, _Window([], Counter(), [])
        if window.counts and number >= first:
            yield number, window

    def _left_out(self, document: Document, seen: set[int], evaluation: set[str]) -> str:
        """Why a sound document is not for this split; empty = it is."""
        key = int(document.hash[:16], 16)
        if key in seen:
            return "duplicate"
        seen.add(key)
        if self.own_file:
            return "problem_in_evaluation" if document.problem_hash in evaluation else ""
        mine = document.in_share(self.config.eval_share) == (self.split == "eval")
        return "" if mine else "other_split"

    def _document(self, row: Row) -> tuple[Document | None, str]:
        """The document of a row, or None and the reason."""
        try:
            if isinstance(row.record, BadRowError):
                raise row.record
            if self.config.tools == "drop" and uses_tools(row.record):
                return None, "tool_row"
            messages = messages_of(row.record)
            if self.config.require_answer and not has_answer(row.record):
                return None, "no_answer"
            return Document(tuple(messages), row.origin, row.family), ""
        except BadRowError as error:
            if self.config.on_bad_row == "error":
                raise UserError(
                    f"{row.where}: {error} (data.on_bad_row=skip skips and counts such rows)"
                ) from error
            return None, f"bad_row_{error.reason}"

    def _prepared(self) -> tuple[set[str], Overlaps | None]:
        """Hashes of the evaluation file's problems, and what to look for in training documents."""
        if self.split != "train":
            return set(), None
        if self._evaluation is None:
            self._evaluation, texts = set(), list[tuple[str, str]]()
            if self.own_file:
                for row in read_rows(find_files(self.config.eval_path, "data.eval_path")):
                    document, _ = self._document(row)
                    if document is not None:
                        self._evaluation.add(document.problem_hash)
                        asked = [m["content"] for m in document.messages if m["role"] == "user"]
                        texts.append((row.origin, asked[0] if asked else ""))
            if self.config.decontaminate != "off" and (texts or self.config.suites):
                self._overlaps = Overlaps([*texts, *suite_problems(self.config.suites)], self.config.ngram)
        return self._evaluation, self._overlaps

    def make(self, number: int, task: _Window) -> Block:
        config, counts, pieces = self.config, Counter(task.counts), list[Piece]()
        length, documents = config.row_length, task.documents
        order = random.Random(f"{config.seed}/{self.split}/{number}").sample(
            range(len(documents)), len(documents)
        )
        for index in order:
            document = documents[index]
            rendered = self.renderer(document.messages)
            if config.max_tokens is not None and len(rendered) > config.max_tokens:
                counts["over_max_tokens"] += 1
            elif not self.single:
                pieces += pieces_of(document, rendered, length, config.too_long, counts)
            elif len(rendered) < length:
                counts["shorter_than_a_row"] += 1
            else:
                counts["cut_to_the_row"] += len(rendered) > length
                pieces += pieces_of(document, rendered, length, "truncate", Counter())
                counts["documents"] += 1
        rows = [[piece] for piece in pieces] if self.single else pack(pieces, length)
        return Block(rows, counts, task.overlaps)


def account(counts: Mapping[str, int]) -> dict[str, Any]:
    """Where the rows read went: `read` = `kept` + `not_needed` (packed beyond the rows asked for) + the sum
    of `dropped`, by reason."""
    dropped = {
        name: count
        for name, count in sorted(counts.items())
        if count and (name in DROPPED or name.startswith("bad_row_"))
    }
    read, beyond = counts.get("rows", 0), counts.get("documents_not_needed", 0)
    kept = counts.get("documents", 0) - beyond
    total = kept + beyond + sum(dropped.values())
    assert total == read, f"{read} rows read, {total} accounted for: {dict(counts)}"
    return {"read": read, "kept": kept, "not_needed": beyond, "dropped": dropped}


def told(index: Mapping[str, Any]) -> list[str]:
    """What became of the rows of a source, for a person, from a split's `index.json`; procedural: nothing."""
    found, counts = index.get("account"), index["counts"]
    if found is None:
        return []
    dropped = ", ".join(f"{reason} {count}" for reason, count in found["dropped"].items()) or "none"
    lines = [f"{found['read']} rows read, {found['kept']} kept, dropped: {dropped}"]
    if found["not_needed"]:
        key = f"data.{index['split']}_rows"
        lines.append(f"{found['not_needed']} more were not needed: {key}={index['rows_asked']}")
    for name, text in _SHORTENED.items():
        if counts.get(name):
            lines.append(f"{counts[name]} longer than a row: {text}")
    if counts.get("overlaps_suites"):
        lines.append(
            f"{counts['overlaps_suites']} overlap with evaluation problems, listed in index.json: "
            + "; ".join(f"{one['document']} with {one['suite']}" for one in index["overlaps"][:3])
        )
    return lines
