"""Blocks of packed rows: the unit in which a data set is produced, prepared, streamed and resumed.

A block is packed by itself and depends on nothing but its number (and the content of the files), so preparing
can stop after any block, streaming can start at any block, and any number of workers produces the same rows.
"""

from __future__ import annotations

import itertools
import math
import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kvpop_lightning.config.schema import DataConfig
from kvpop_lightning.data import families, reasoning
from kvpop_lightning.data.chat import ChatRenderer
from kvpop_lightning.data.documents import Document
from kvpop_lightning.data.packing import OpenRows, Piece, pieces_of
from kvpop_lightning.data.problem import Problem
from kvpop_lightning.errors import UserError

SPLITS = ("train", "eval")
ROWS_PER_BLOCK = 16
SMALLEST_GAP = 64  # tokens; hardly any short problem is shorter


@dataclass
class Block:
    """Rows of one block in order, what happened to its documents by name, and the overlaps with evaluation
    suites that were found in them."""

    rows: list[list[Piece]]
    counts: Counter[str] = field(default_factory=Counter)
    overlaps: list[dict[str, str]] = field(default_factory=list)


class Blocks(ABC):
    """Numbered blocks of one split.

    The work is in two parts: `tasks` is cheap and sequential (it reads the source), `make` is expensive and
    depends on its arguments alone, so that any process may do it.
    """

    def __init__(self, config: DataConfig, renderer: ChatRenderer, split: str) -> None:
        assert split in SPLITS
        self.config, self.renderer, self.split = config, renderer, split
        self.single = split == "eval" and config.eval_single_document

    @abstractmethod
    def tasks(self, first: int) -> Iterator[tuple[int, Any]]:
        """What blocks are made from, from number `first` on, with their numbers."""

    @abstractmethod
    def make(self, number: int, task: Any) -> Block:
        """The block of that number."""

    def from_block(self, first: int) -> Iterator[tuple[int, Block]]:
        """Blocks from number `first` on, with their numbers."""
        for number, task in self.tasks(first):
            yield number, self.make(number, task)


class ProceduralBlocks(Blocks):
    """Generated documents. Each block draws from its own random stream and fills exactly `ROWS_PER_BLOCK`
    rows (evaluation: one document of at least a row's length, cut to it)."""

    def __init__(self, config: DataConfig, renderer: ChatRenderer, split: str) -> None:
        super().__init__(config, renderer, split)
        names = chosen_families(config, split)
        self.fill = reasoning.FAMILY in names and len(names) > 1 and not self.single
        self.families = [name for name in names if name != reasoning.FAMILY] or names

    def tasks(self, first: int) -> Iterator[tuple[int, Any]]:
        return ((number, None) for number in itertools.count(first))

    def make(self, number: int, task: Any) -> Block:
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
