from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpop_lightning.data.chat import Rendered
from kvpop_lightning.data.documents import Document
from kvpop_lightning.data.packing import OpenRows, Piece, assemble, pack, pieces_of, row_tensors
from kvpop_lightning.errors import UserError


def piece(length: int, mark: int = 1) -> Piece:
    return Piece(np.full(length, mark, np.int32), np.ones(length, bool), f"d{mark}", "f", str(mark))


def rendered(length: int) -> Rendered:
    ids = np.arange(length, dtype=np.int32)
    return Rendered(ids, ids % 2 == 0, np.zeros((length, 2), np.int64), ())


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 63), min_size=1, max_size=80))
def test_every_piece_lies_whole_in_one_row_and_rows_are_well_filled(lengths):
    pieces = [piece(length, mark) for mark, length in enumerate(lengths)]
    rows = pack(pieces, 63)
    assert sorted(p.hash for row in rows for p in row) == sorted(p.hash for p in pieces)
    assert all(sum(map(len, row)) <= 63 for row in rows)
    # Two rows that would fit into one are never left: best fit would have used the first.
    fills = sorted(sum(map(len, row)) for row in rows)
    assert len(rows) < 2 or fills[0] + fills[1] > 63


def test_best_fit_takes_the_fullest_row():
    rows = OpenRows(100)
    for length in (60, 45, 70):
        rows.place(piece(length), may_open=True)
    assert [len(row) for row in rows.rows] == [1, 1, 1]
    for length, expected in ((38, 0), (30, 2), (50, 1), (4, 1), (2, 0), (1, 1)):
        assert rows.place(piece(length, length), may_open=False)
        assert int(rows.rows[expected][-1].hash) == length
    assert not rows.place(piece(1), may_open=False)
    assert rows.largest_gap == 0


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 20), min_size=0, max_size=5))
def test_row_tensors(lengths):
    row_length = sum(lengths) + 3
    tokens, documents, loss = assemble([piece(length, i + 1) for i, length in enumerate(lengths)], row_length)
    row = row_tensors(tokens, documents, loss, 7)
    expected_documents = [i for i, length in enumerate(lengths) for _ in range(length)] + [-1] * 3
    expected_positions = [p for length in lengths for p in range(length)] + [0] * 3
    assert row["document_ids"].tolist() == expected_documents
    assert row["position_ids"].tolist() == expected_positions
    assert row["loss_mask"].tolist() == [d >= 0 for d in expected_documents]
    assert row["row"] == 7
    types = {name: array.dtype.name for name, array in row.items()}
    assert types.pop("loss_mask") == "bool"
    assert types == dict.fromkeys(("input_ids", "position_ids", "document_ids", "row"), "int64")


@pytest.mark.parametrize(
    ("too_long", "lengths", "counted"),
    [
        ("truncate", [10], {"documents": 1, "too_long_truncated": 1}),
        ("drop", [], {"too_long_dropped": 1}),
        ("split", [10, 10, 3], {"documents": 1, "too_long_split": 1}),
    ],
)
def test_too_long(too_long, lengths, counted):
    document = Document(({"role": "user", "content": "x"},), "here", "f")
    counts: Counter[str] = Counter()
    pieces = pieces_of(document, rendered(23), 10, too_long, counts)
    assert [len(p) for p in pieces] == lengths
    assert +counts == counted
    assert np.concatenate([p.input_ids for p in pieces] or [np.arange(0)]).tolist() == list(
        range(sum(lengths))
    )
    counts = Counter()
    assert [len(p) for p in pieces_of(document, rendered(10), 10, too_long, counts)] == [10]
    assert +counts == {"documents": 1}
    with pytest.raises(UserError, match=r"data\.too_long"):
        pieces_of(document, rendered(3), 10, "cut", counts)
