"""Blocks of packed rows: the unit in which a data set is produced, prepared, streamed and resumed.

A block is packed by itself and depends on nothing but its number (and the content of the files), so preparing
can stop after any block, streaming can start at any block, and any number of workers produces the same rows.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvpop_lightning.config.schema import DataConfig
from kvpop_lightning.data import families, reasoning
from kvpop_lightning.data.chat import ChatRenderer
from kvpop_lightning.data.documents import Document
from kvpop_lightning.data.packing import OpenRows, Piece, pack, pieces_of
from kvpop_lightning.data.problem import Problem
from kvpop_lightning.data.records import file_hashes, find_files, read_documents
from kvpop_lightning.errors import UserError

SPLITS = ("train", "eval")
ROWS_PER_BLOCK = 16
DOCUMENTS_PER_BLOCK = 1024
SMALLEST_GAP = 64  # tokens; hardly any short problem is shorter


@dataclass
class Block:
    """Rows of one block in order, and what happened to its documents by name."""

    rows: list[list[Piece]]
    counts: Counter[str] = field(default_factory=Counter)


class Blocks(ABC):
    """Numbered blocks of one split. `length` is None for a source that never ends."""

    def __init__(self, config: DataConfig, renderer: ChatRenderer, split: str) -> None:
        assert split in SPLITS
        self.config, self.renderer, self.split = config, renderer, split
        self.single = split == "eval" and config.eval_single_document
        self.source_counts: Counter[str] = Counter()

    @abstractmethod
    def from_block(self, first: int) -> Iterator[tuple[int, Block]]:
        """Blocks from number `first` on, with their numbers."""


class ProceduralBlocks(Blocks):
    """Generated documents. Each block draws from its own random stream and fills exactly `ROWS_PER_BLOCK`
    rows (evaluation: one document of at least a row's length, cut to it)."""

    def __init__(self, config: DataConfig, renderer: ChatRenderer, split: str) -> None:
        super().__init__(config, renderer, split)
        names = chosen_families(config, split)
        self.fill = reasoning.FAMILY in names and len(names) > 1 and not self.single
        self.families = [name for name in names if name != reasoning.FAMILY] or names

    def from_block(self, first: int) -> Iterator[tuple[int, Block]]:
        number = first
        while True:
            yield number, self.block(number)
            number += 1

    def block(self, number: int) -> Block:
        """The block of that number."""
        return self._single_row(number) if self.single else self._packed(number)

    def _single_row(self, number: int) -> Block:
        length = self.config.row_length
        document = self._document(self.families[number % len(self.families)], f"{number}/0", length)
        block = Block([])
        rendered = self.renderer(document.messages)
        assert len(rendered) >= length
        block.counts["cut_to_the_row"] += len(rendered) > length
        counts: Counter[str] = Counter()
        block.rows.append(pieces_of(document, rendered, length, "truncate", counts))
        block.counts["documents"] += 1
        return block

    def _packed(self, number: int) -> Block:
        config, counts = self.config, Counter[str]()
        rng = random.Random(f"{config.seed}/{self.split}/{number}")
        order = rng.sample(self.families, len(self.families))
        rows = OpenRows(config.row_length)
        drawn, full = 0, False
        while not full:
            # Log-uniform lengths: short and long documents are equally at home.
            low, high = math.log(config.min_document_tokens), math.log(config.max_document_tokens)
            tokens = math.floor(math.exp(rng.uniform(low, high)))
            document = self._document(order[drawn % len(order)], f"{number}/{drawn}", tokens)
            drawn += 1
            if drawn > 1000 * ROWS_PER_BLOCK:
                raise UserError("data.too_long=drop drops all documents; lower data.max_document_tokens")
            drawn_counts: Counter[str] = Counter()
            pieces = pieces_of(
                document, self.renderer(document.messages), config.row_length, config.too_long, drawn_counts
            )
            fits = [rows.place(piece, may_open=len(rows.rows) < ROWS_PER_BLOCK) for piece in pieces]
            full = not all(fits)
            if any(fits) or not pieces:
                counts += drawn_counts
        if self.fill:
            for index in range(12 * ROWS_PER_BLOCK):
                if rows.largest_gap < SMALLEST_GAP:
                    break
                document = self._short(f"{number}/{index}")
                rendered = self.renderer(document.messages)
                if len(rendered) <= rows.largest_gap:
                    pieces = pieces_of(document, rendered, config.row_length, "drop", counts)
                    assert all(rows.place(piece, may_open=False) for piece in pieces)
        return Block(rows.rows, counts)

    def _document(self, name: str, key: str, tokens: int) -> Document:
        if name == reasoning.FAMILY:
            return self._short(key)
        seed = f"{self.config.seed}/{self.split}/{key}"
        problem = families.problem_of_length(name, seed, tokens, self._count)
        return Document(tuple(problem.messages), f"{name} seed {seed}", name)

    def _short(self, key: str) -> Document:
        seed = f"{self.config.seed}/{self.split}/{key}"
        problem = reasoning.short_problem(seed)
        return Document(tuple(problem.messages), f"{problem.family} seed {seed}", reasoning.FAMILY)

    def _count(self, problem: Problem) -> int:
        return len(self.renderer(problem.messages))


class FileBlocks(Blocks):
    """Documents of local files, `DOCUMENTS_PER_BLOCK` at a time, shuffled inside a block by the seed."""

    def __init__(self, config: DataConfig, renderer: ChatRenderer, split: str) -> None:
        super().__init__(config, renderer, split)
        self.own_file = config.eval_path is not None
        key = "data.eval_path" if split == "eval" and self.own_file else "data.path"
        self.files = find_files(config.eval_path if key == "data.eval_path" else config.path, key)

    def from_block(self, first: int) -> Iterator[tuple[int, Block]]:
        # Starting later still reads the rows before (hashes decide on duplicates), but does not tokenise
        # them.
        self.source_counts = Counter()
        waiting: list[Document] = []
        number = 0
        for document in self._documents():
            waiting.append(document)
            if len(waiting) == DOCUMENTS_PER_BLOCK:
                if number >= first:
                    yield number, self._block(waiting, number)
                number, waiting = number + 1, []
        if waiting and number >= first:
            yield number, self._block(waiting, number)

    def _documents(self) -> Iterator[Document]:
        counts, seen = self.source_counts, set[str]()
        evaluation: set[str] = set()
        if self.split == "train" and self.own_file:
            others = find_files(self.config.eval_path, "data.eval_path")
            known = read_documents(others, self.config.source, self.config.on_bad_row, Counter())
            evaluation = {document.problem_hash for document in known}
        for document in read_documents(self.files, self.config.source, self.config.on_bad_row, counts):
            if document.hash in seen:
                counts["duplicate"] += 1
            elif self.own_file and document.problem_hash in evaluation:
                counts["problem_in_evaluation"] += 1
            elif not self.own_file and document.for_evaluation != (self.split == "eval"):
                counts["other_split"] += 1
            else:
                counts["kept"] += 1
                yield document
            seen.add(document.hash)

    def _block(self, documents: Sequence[Document], number: int) -> Block:
        counts, pieces = Counter[str](), list[Piece]()
        length = self.config.row_length
        order = random.Random(f"{self.config.seed}/{self.split}/{number}").sample(
            range(len(documents)), len(documents)
        )
        for index in order:
            document = documents[index]
            rendered = self.renderer(document.messages)
            if self.single:
                if len(rendered) < length:
                    counts["shorter_than_a_row"] += 1
                    continue
                counts["cut_to_the_row"] += len(rendered) > length
                pieces += pieces_of(document, rendered, length, "truncate", Counter())
                counts["documents"] += 1
            else:
                pieces += pieces_of(document, rendered, length, self.config.too_long, counts)
        return Block([[piece] for piece in pieces] if self.single else pack(pieces, length), counts)


def chosen_families(config: DataConfig, split: str) -> list[str]:
    """Families of a split, `all` and `held_out` resolved, in the order of the configuration.

    Raises:
        UserError: an unknown family, none, or one that would be both trained on and evaluated on while held
        out.
    """
    key = "data.families" if split == "train" else "data.eval_families"
    asked = config.families if split == "train" else config.eval_families
    names: list[str] = []
    for name in asked:
        if name == "all":
            names += [*families.available(held_out=False), reasoning.FAMILY]
        elif name == "held_out":
            names += families.available(held_out=True)
        elif name == reasoning.FAMILY or families.get(name):
            names.append(name)
    if not names:
        raise UserError(f"{key} is empty; give `all`, `held_out` or names of families")
    names = list(dict.fromkeys(names))
    if split == "eval" and config.eval_single_document and reasoning.FAMILY in names:
        raise UserError(
            f"{key}: {reasoning.FAMILY} problems are too short for data.eval_single_document=true"
        )
    return names


def make_blocks(config: DataConfig, renderer: ChatRenderer, split: str) -> Blocks:
    """Blocks of a split for the configured source."""
    if config.source == "procedural":
        return ProceduralBlocks(config, renderer, split)
    return FileBlocks(config, renderer, split)


def source_identity(config: DataConfig) -> dict[str, Any]:
    """What the content of the source depends on, for the fingerprint."""
    if config.source == "procedural":
        return {
            "families": chosen_families(config, "train"),
            "eval_families": chosen_families(config, "eval"),
            "min_document_tokens": config.min_document_tokens,
            "max_document_tokens": config.max_document_tokens,
            "reasoning_gym": reasoning.package_version(),
        }
    if config.source not in ("jsonl", "parquet"):
        raise UserError(f"data.source must be procedural, jsonl or parquet, got {config.source!r}")
    identity: dict[str, Any] = {"files": file_hashes(find_files(config.path, "data.path"))}
    if config.eval_path is not None:
        identity["eval_files"] = file_hashes(find_files(config.eval_path, "data.eval_path"))
    return identity
