"""Best-fit packing of documents into rows of fixed length."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvpop_lightning.data.chat import Rendered
from kvpop_lightning.data.documents import Document
from kvpop_lightning.errors import UserError

TOO_LONG = ("truncate", "drop", "split")


@dataclass(frozen=True)
class Piece:
    """A document, or what `too_long` left of it: at most one row of tokens."""

    input_ids: np.ndarray
    loss_mask: np.ndarray
    origin: str
    family: str
    hash: str

    def __len__(self) -> int:
        return len(self.input_ids)


def pieces_of(
    document: Document, rendered: Rendered, row_length: int, too_long: str, counts: Counter[str]
) -> list[Piece]:
    """The document as pieces of at most `row_length` tokens; what was done to a longer one is counted."""
    if too_long not in TOO_LONG:
        raise UserError(f"data.too_long must be one of {', '.join(TOO_LONG)}, got {too_long!r}")

    def piece(start: int, end: int) -> Piece:
        ids, mask = rendered.input_ids[start:end], rendered.loss_mask[start:end]
        return Piece(ids, mask, document.origin, document.family, document.hash)

    counts["documents"] += 1
    if len(rendered) <= row_length:
        return [piece(0, len(rendered))]
    if too_long == "drop":
        counts["too_long_dropped"] += 1
        counts["documents"] -= 1
        return []
    if too_long == "truncate":
        counts["too_long_truncated"] += 1
        return [piece(0, row_length)]
    counts["too_long_split"] += 1
    return [piece(start, start + row_length) for start in range(0, len(rendered), row_length)]


@dataclass
class OpenRows:
    """Rows that still have room. `place` puts a piece into the fullest row that it fits (best fit)."""

    row_length: int
    rows: list[list[Piece]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._room: list[tuple[int, int]] = []  # (tokens left, row number), sorted

    def place(self, piece: Piece, *, may_open: bool) -> bool:
        """False: the piece fits no row and none may be opened."""
        index = bisect_left(self._room, (len(piece), -1))
        if index < len(self._room):
            room, number = self._room.pop(index)
        elif may_open:
            room, number = self.row_length, len(self.rows)
            self.rows.append([])
        else:
            return False
        self.rows[number].append(piece)
        insort(self._room, (room - len(piece), number))
        return True

    @property
    def largest_gap(self) -> int:
        """Tokens left in the emptiest row."""
        return self._room[-1][0] if self._room else 0


def pack(pieces: Sequence[Piece], row_length: int) -> list[list[Piece]]:
    """Best-fit decreasing over a block of pieces; the order within a row is the order of arrival."""
    rank = {id(piece): index for index, piece in enumerate(pieces)}
    rows = OpenRows(row_length)
    for piece in sorted(pieces, key=len, reverse=True):
        rows.place(piece, may_open=True)
    return [sorted(row, key=lambda piece: rank[id(piece)]) for row in rows.rows]


def assemble(row: Sequence[Piece], row_length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens int32 [T], document numbers int32 [T] (-1 padding) and loss mask bool [T] of one row."""
    tokens = np.zeros(row_length, dtype=np.int32)
    documents = np.full(row_length, -1, dtype=np.int32)
    loss = np.zeros(row_length, dtype=bool)
    start = 0
    for number, piece in enumerate(row):
        end = start + len(piece)
        assert end <= row_length, f"row overfull: {end} > {row_length}"
        tokens[start:end], documents[start:end], loss[start:end] = piece.input_ids, number, piece.loss_mask
        start = end
    return tokens, documents, loss


def row_tensors(
    tokens: np.ndarray, documents: np.ndarray, loss: np.ndarray, number: int
) -> dict[str, np.ndarray]:
    """One row of a batch: int64 `input_ids position_ids document_ids` [T], bool `loss_mask`, `row`."""
    documents = documents.astype(np.int64)
    index = np.arange(len(documents), dtype=np.int64)
    starts = np.ones(len(documents), dtype=bool)
    starts[1:] = documents[1:] != documents[:-1]
    position = index - np.maximum.accumulate(np.where(starts, index, 0))
    real = documents >= 0
    return {
        "input_ids": tokens.astype(np.int64),
        "position_ids": np.where(real, position, 0),
        "document_ids": documents,
        "loss_mask": loss.astype(bool) & real,
        "row": np.asarray(number, dtype=np.int64),
    }
