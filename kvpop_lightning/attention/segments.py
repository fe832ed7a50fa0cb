"""Where each document of a packed row lies, as plain slices (METHOD.md, section 1: documents never see each
other).

Attending document by document, on slices, makes the isolation hold by construction: no number of one document
enters any sum of another, and the cost is the sum of the squared document lengths instead of the square of
the row's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpop_lightning.policy.kept import Kept

PADDING = -1
"""Document id of a padding token."""


@dataclass(frozen=True)
class Segment:
    """One document: `start:stop` of the rows `rows` (half open).

    `valid` is None when every token between the ends is real; otherwise a bool [B', stop - start] that is
    False on padding inside the document (B' rows of `rows`).
    """

    rows: slice
    start: int
    stop: int
    valid: Tensor | None = None


def find_segments(document_ids: Tensor | None, *, batch: int, length: int) -> list[Segment]:
    """The documents of a batch of rows.

    Args:
        document_ids: int64 [B, T], non-decreasing over the real tokens of a row, -1 = padding anywhere; None
            = one document per row without padding.
        batch: B.
        length: T.

    Returns:
        One segment per document; rows with the same layout and no padding share their segments, so that a
        batch of equal rows costs one call. Padding belongs to no segment. Reads the ids on the host, once per
        batch (`policy/kept.py`).

    Raises:
        ValueError: wrong shape, or ids that fall within a row.
    """
    if document_ids is None:
        return [Segment(slice(0, batch), 0, length)] if length else []
    if tuple(document_ids.shape) != (batch, length):
        raise ValueError(
            f"document_ids must be [{batch}, {length}] like the keys, got {list(document_ids.shape)}: "
            "give one id per token, -1 for padding"
        )
    return list(_segments.get(document_ids, _find))


_segments: Kept[tuple[Segment, ...]] = Kept()


def _find(document_ids: Tensor) -> tuple[Segment, ...]:
    ids_BT = document_ids.detach().to("cpu", torch.int64)
    device = document_ids.device
    if bool((ids_BT == ids_BT[:1]).all()) and not bool((ids_BT == PADDING).any()):
        return tuple(_row_segments(ids_BT[0], slice(0, len(ids_BT)), device))
    found: list[Segment] = []
    for row, ids_T in enumerate(ids_BT):
        found += _row_segments(ids_T, slice(row, row + 1), device)
    return tuple(found)


def _row_segments(ids_T: Tensor, rows: slice, device: torch.device) -> list[Segment]:
    real_N = (ids_T != PADDING).nonzero().flatten()
    if not len(real_N):
        return []
    ids_N = ids_T[real_N]
    step_N = ids_N.diff()
    if bool((step_N < 0).any()):
        raise ValueError(
            "document_ids must not fall within a row: number the documents of a row in order, -1 for padding"
        )
    change = (step_N > 0).nonzero().flatten()
    firsts = real_N[torch.cat([change.new_zeros(1), change + 1])].tolist()
    lasts = real_N[torch.cat([change, change.new_tensor([len(real_N) - 1])])].tolist()
    found = []
    for first, last in zip(firsts, lasts, strict=True):
        valid_N = ids_T[first : last + 1] != PADDING
        valid = None if bool(valid_N.all()) else valid_N[None].to(device)
        found.append(Segment(rows, first, last + 1, valid))
    return found
