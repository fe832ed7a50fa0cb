from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from policy_cases import FAST, document_rows, documents

from kvpop_lightning.policy import (
    NEVER,
    check_document_ids,
    document_bounds,
    document_ids_from,
    document_layout,
    position_in_document,
)


@FAST
@given(st.data(), st.integers(1, 60), st.integers(0, 7))
def test_layout_agrees_with_a_loop_over_documents(data: st.DataObject, length: int, shift: int) -> None:
    ids = torch.tensor([data.draw(document_rows(length)) for _ in range(2)])
    layout = document_layout(ids, batch=2, length=length)
    assert torch.equal(layout.real, ids >= 0)
    later, earlier = layout.later(shift), layout.earlier(shift)
    expected = {name: torch.zeros(2, length, dtype=torch.int64) for name in ("position", "length")}
    for name, got in (("position", layout.position), ("length", layout.length)):
        for b, rows in documents(ids, 2, length):
            for place, i in enumerate(rows):
                expected[name][b, i] = place if name == "position" else len(rows)
        assert torch.equal(got, expected[name]), name
    for b, rows in documents(ids, 2, length):
        for place, i in enumerate(rows):
            assert (layout.start[b, i], layout.end[b, i]) == (rows[0], rows[-1] + 1)
            assert later[b, i] == (rows[place + shift] if place + shift < len(rows) else NEVER)
            assert earlier[b, i] == (rows[place - shift] if place >= shift else -1)
    padding = ids < 0
    assert (later[padding] == NEVER).all()
    assert (earlier[padding] == -1).all()
    assert torch.equal(layout.start[padding], layout.end[padding])


def test_one_document_is_the_same_with_and_without_ids() -> None:
    plain = document_layout(None, batch=2, length=9)
    packed = document_layout(torch.zeros(2, 9, dtype=torch.int64), batch=2, length=9)
    for name in ("real", "position", "length", "start", "end", "ordinal", "row_at"):
        assert torch.equal(getattr(plain, name), getattr(packed, name)), name
    assert torch.equal(position_in_document(None, batch=2, length=9), plain.position)


def test_bounds_and_positions_of_a_packed_row() -> None:
    ids = torch.tensor([[-1, 0, 0, 0, 3, -1, 4, 4]])
    start, end = document_bounds(ids)
    assert start.tolist() == [[0, 1, 1, 1, 4, 5, 6, 6]]
    assert end.tolist() == [[0, 4, 4, 4, 5, 5, 8, 8]]
    assert position_in_document(ids).tolist() == [[0, 0, 1, 2, 0, 0, 0, 1]]


@pytest.mark.parametrize(
    ("position_ids", "mask", "expected"),
    [
        ([0, 1, 2, 3], None, [0, 0, 0, 0]),
        ([0, 1, 0, 1, 2, 0], None, [0, 0, 1, 1, 1, 2]),
        ([7, 8, 9], None, [0, 0, 0]),
        ([1, 1, 0, 1, 2], [0, 0, 1, 1, 1], [-1, -1, 0, 0, 0]),  # left padding, as generate fills it
        ([0, 1, 2, 1, 1], [1, 1, 1, 0, 0], [0, 0, 0, -1, -1]),
        ([0, 1, 1, 2, 3], [1, 1, 0, 1, 1], [0, 0, -1, 0, 0]),  # padding inside: positions go on after it
        ([0, 1, 0, 0, 1], [1, 1, 0, 1, 1], [0, 0, -1, 1, 1]),
        ([0, 0, 0], [1, 1, 1], [0, 1, 2]),
    ],
)
def test_document_ids_from_positions(
    position_ids: list[int], mask: list[int] | None, expected: list[int]
) -> None:
    attention_mask = None if mask is None else torch.tensor([mask])
    assert document_ids_from(torch.tensor([position_ids]), attention_mask).tolist() == [expected]


def test_document_ids_from_shares_positions_over_the_batch() -> None:
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    assert document_ids_from(torch.arange(3)[None], mask).tolist() == [[0, 0, 0], [0, 0, -1]]


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match=r"row 1 falls at 3"):
        check_document_ids(torch.tensor([[0, 0, 1, 1], [0, 2, -1, 1]]))
    check_document_ids(torch.tensor([[-1, 0, -1, 0, 2, -1]]))
    with pytest.raises(ValueError, match=r"document_ids must be \[B, T\] = \[2, 4\]"):
        document_layout(torch.zeros(1, 4, dtype=torch.int64), batch=2, length=4)
    with pytest.raises(ValueError, match="must be integers"):
        document_layout(torch.zeros(1, 4), batch=1, length=4)
    with pytest.raises(ValueError, match="attention_mask must be"):
        document_ids_from(torch.zeros(1, 4, dtype=torch.int64), torch.ones(1, 1, 4, 4))
    with pytest.raises(ValueError, match="needs batch="):
        position_in_document(None)


def test_a_layout_is_found_once_and_again_after_a_change() -> None:
    ids = torch.tensor([[0, 0, 1, 1, -1]])
    first = document_layout(ids, batch=1, length=5)
    assert document_layout(ids, batch=1, length=5) is first
    assert document_layout(ids.clone(), batch=1, length=5) is not first
    ids[0, 2] = 0
    changed = document_layout(ids, batch=1, length=5)
    assert changed.length.tolist() == [[3, 3, 3, 1, 0]]
    assert first.length.tolist() == [[2, 2, 2, 2, 0]]
    with pytest.raises(ValueError, match="must be"):
        document_layout(ids, batch=2, length=5)


def test_a_layout_goes_with_its_ids() -> None:
    ids = torch.zeros(1, 5, dtype=torch.int64)
    found = weakref.ref(document_layout(ids, batch=1, length=5))
    gc.collect()
    assert found() is not None
    del ids
    gc.collect()
    assert found() is None


def test_a_layout_of_inference_mode_enters_no_gradient() -> None:
    ids = torch.tensor([[0, 0, 1, 1]])
    with torch.inference_mode():
        assert document_layout(ids, batch=1, length=4).start.is_inference()
    assert not document_layout(ids, batch=1, length=4).start.is_inference()
    with torch.inference_mode():
        document_layout(ids.clone(), batch=1, length=4)
