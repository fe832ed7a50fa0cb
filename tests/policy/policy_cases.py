"""Packed rows for the policy tests, and what METHOD.md section 1 says a query sees, written out as loops."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from kvpop_lightning.policy import Budget

FAST = settings(max_examples=100, derandomize=True, deadline=None)


@dataclass(frozen=True)
class Case:
    priority: Tensor  # float64 [B, H, T]
    document_ids: Tensor | None  # int64 [B, T]
    budget: Budget


@st.composite
def document_rows(draw: st.DrawFn, length: int) -> list[int]:
    """Ids of one row: documents of 1 to 25 tokens, padding before, between, inside and after them."""
    row: list[int] = []
    document = draw(st.integers(0, 3))
    while len(row) < length:
        row += [-1] * draw(st.sampled_from([0, 0, 0, 1, 4]))
        tokens = draw(st.one_of(st.just(1), st.integers(1, 25)))
        row += [document] * tokens
        if draw(st.booleans()):  # padding inside a document: the same id goes on after it
            row += [-1] * draw(st.integers(1, 3)) + [document] * draw(st.integers(1, 9))
        document += draw(st.integers(1, 2))
    return row[:length]


@st.composite
def cases(draw: st.DrawFn, *, packed: bool | None = None) -> Case:
    """Small awkward problems: ties, infinite priorities, budgets on either side of the text's length."""
    batch, heads = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    length = draw(st.one_of(st.integers(1, 4), st.integers(1, 48)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    priority = torch.randn(batch, heads, length, generator=generator, dtype=torch.float64)
    kind = draw(st.sampled_from(["distinct", "ties", "constant", "infinite"]))
    if kind == "ties":
        priority = (priority * 1.5).round()
    elif kind == "constant":
        priority = torch.zeros_like(priority)
    elif kind == "infinite":
        priority = torch.where(priority.abs() > 0.8, priority * float("inf"), priority.round())
    budget = Budget(draw(st.integers(0, 3)), draw(st.integers(1, 6)), draw(st.integers(1, 9)))
    packed = draw(st.booleans()) if packed is None else packed
    ids = torch.tensor([draw(document_rows(length)) for _ in range(batch)]) if packed else None
    return Case(priority, ids, budget)


def documents(document_ids: Tensor | None, batch: int, length: int) -> list[tuple[int, list[int]]]:
    """(row of the batch, row indices of its tokens) per document."""
    if document_ids is None:
        return [(b, list(range(length))) for b in range(batch)]
    found = []
    for b, row in enumerate(document_ids.tolist()):
        for document in sorted(set(row) - {-1}):
            found.append((b, [i for i, value in enumerate(row) if value == document]))
    return found


def eligible(rows: list[int], place: int, budget: Budget) -> list[int]:
    """E_i of the token at `place` of a document, as places."""
    return [j for j in range(budget.sink, len(rows)) if j <= place - budget.window]


def best_first(places: list[int], priority: list[float], rows: list[int]) -> list[int]:
    """Places by priority, the newer first among equals."""
    return sorted(places, key=lambda j: (priority[rows[j]], j), reverse=True)


def visible_by_definition(case: Case) -> Tensor:
    """bool [B, H, T (query), T (key)]: sinks, window and the topk best of E_i, per document."""
    batch, heads, length = case.priority.shape
    seen = torch.zeros(batch, heads, length, length, dtype=torch.bool)
    for b, rows in documents(case.document_ids, batch, length):
        for h in range(heads):
            priority = case.priority[b, h].tolist()
            for place, i in enumerate(rows):
                best = best_first(eligible(rows, place, case.budget), priority, rows)[: case.budget.topk]
                for j in range(place + 1):
                    if j < case.budget.sink or place - j < case.budget.window or j in best:
                        seen[b, h, i, rows[j]] = True
    return seen


def visible_by_time(eviction: Tensor, document_ids: Tensor | None) -> Tensor:
    """bool [B, H, T, T]: `j <= i < e_j`, same document, no padding."""
    batch, _, length = eviction.shape
    index = torch.arange(length)
    seen = (index <= index[:, None]) & (index[:, None] < eviction.unsqueeze(-2))
    if document_ids is None:
        return seen
    same = (document_ids[:, :, None] == document_ids[:, None, :]) & (document_ids[:, None, :] >= 0)
    return seen & same.view(batch, 1, length, length)
