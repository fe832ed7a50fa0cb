"""Where the documents of a packed row begin and end, and which tokens are padding (METHOD.md, section 1).

`document_ids` is int64 [B, T], non-decreasing over the real tokens of a row; -1 marks padding, anywhere. A
document is the run of real tokens with one id. Padding inside a document takes no part in any distance:
sinks, window, age and order count real tokens only, so that a row behaves like the same tokens without the
padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpop_lightning.policy.budget import NEVER
from kvpop_lightning.policy.kept import Kept
from kvpop_lightning.policy.triton_choice import missing


@dataclass(frozen=True)
class DocumentLayout:
    """One packed batch, token by token; every tensor is [B, T] int64 unless it says otherwise.

    Padding has `real` False, position 0, length 0, and an empty range `start == end`.
    """

    real: Tensor
    """bool: not padding."""
    position: Tensor
    """Place inside the document, from 0."""
    length: Tensor
    """Tokens of the document."""
    start: Tensor
    """Row index of the document's first token."""
    end: Tensor
    """Row index one past the document's last token."""
    ordinal: Tensor
    """Place among the row's real tokens (padding: that of the last real token before it, at least 0)."""
    row_at: Tensor
    """`row_at[b, n]` = row index of the row's n-th real token (past the last one: T - 1)."""
    packed: bool
    """Several documents or padding are possible; False = one document fills each row."""

    def later(self, tokens: int) -> Tensor:
        """Row index of the token `tokens` places later in the document; NEVER where there is none. [B, T]."""
        row = self.row_at.gather(-1, (self.ordinal + tokens).clamp(max=self.real.shape[-1] - 1))
        return row.masked_fill(self.position + tokens >= self.length, NEVER)

    def earlier(self, tokens: int) -> Tensor:
        """Row index of the token `tokens` places earlier in the document; -1 where there is none. [B, T]."""
        row = self.row_at.gather(-1, (self.ordinal - tokens).clamp(min=0))
        return row.masked_fill((self.position < tokens) | ~self.real, -1)

    def competing(self, sink: int) -> Tensor:
        """Tokens that compete for long-range slots once outside the window: no sinks, no padding. [B, T]."""
        return self.real & (self.position >= sink)


_layouts: Kept[DocumentLayout] = Kept()


def document_layout(
    document_ids: Tensor | None, *, batch: int, length: int, device: torch.device | str | None = None
) -> DocumentLayout:
    """Everything the other functions need to know of `document_ids` [B, T] (None = one document, no padding).

    Every layer asks it of the same batch many times: what was found is kept with the tensor (`kept.py`).

    Raises:
        ValueError: wrong shape or dtype.
    """
    device = document_ids.device if document_ids is not None and device is None else device
    index = torch.arange(length, device=device).expand(batch, length)
    if document_ids is None:
        whole = torch.full_like(index, length)
        zero = torch.zeros_like(index)
        real = torch.ones_like(index, dtype=torch.bool)
        return DocumentLayout(real, index, whole, zero, whole, index, index, packed=False)
    _check_shape(document_ids, batch, length)
    ids = document_ids.to(device)
    return _layouts.get(ids, _layout_of)


def _layout_of(ids: Tensor) -> DocumentLayout:
    batch, length = ids.shape
    index = torch.arange(length, device=ids.device).expand(batch, length)
    if ids.is_cuda and ids.dtype == torch.int64 and not missing(ids):
        from kvpop_lightning.policy.triton_documents import layout_triton

        real, fields, row_at = layout_triton(ids)
        position, of_document, start, end, ordinal = fields.unbind()
        return DocumentLayout(real, position, of_document, start, end, ordinal, row_at, packed=True)
    real = ids >= 0
    ordinal = real.long().cumsum(-1) - 1
    is_start = real & (ids != _previous_real(ids, real, outside=-1))
    start = torch.where(is_start, index, 0).cummax(-1).values if length else index
    # The last real token of a document is the one whose next real token starts another one (or does not
    # exist).
    next_real = _previous_real(ids.flip(-1), real.flip(-1), outside=-1).flip(-1)
    is_last = real & (ids != next_real)
    last = torch.where(is_last, index, length).flip(-1).cummin(-1).values.flip(-1) if length else index
    safe_last = last.clamp(max=max(length - 1, 0))
    start_ordinal = ordinal.gather(-1, start)
    position = (ordinal - start_ordinal).masked_fill(~real, 0)
    doc_length = (ordinal.gather(-1, safe_last) - start_ordinal + 1).masked_fill(~real, 0)
    row_at = torch.full((batch, length + 1), max(length - 1, 0), dtype=torch.int64, device=ids.device)
    row_at = row_at.scatter(-1, torch.where(real, ordinal, length), index)[:, :length]
    return DocumentLayout(
        real=real,
        position=position,
        length=doc_length,
        start=torch.where(real, start, index),
        end=torch.where(real, last + 1, index),
        ordinal=ordinal.clamp(min=0),
        row_at=row_at,
        packed=True,
    )


def position_in_document(
    document_ids: Tensor | None,
    *,
    batch: int | None = None,
    length: int | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Place of every token inside its document, int64 [B, T], from 0; padding 0.

    `batch` and `length` are needed only when `document_ids` is None.
    """
    if document_ids is None:
        if batch is None or length is None:
            raise ValueError("position_in_document needs batch= and length= when document_ids is None")
        return torch.arange(length, device=device).expand(batch, length)
    return document_layout(document_ids, batch=document_ids.shape[0], length=document_ids.shape[-1]).position


def document_bounds(document_ids: Tensor) -> tuple[Tensor, Tensor]:
    """First row index of every token's document and the one past its last, int64 [B, T] each (padding:
    empty)."""
    layout = document_layout(document_ids, batch=document_ids.shape[0], length=document_ids.shape[-1])
    return layout.start, layout.end


def document_ids_from(position_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """Document ids of a batch, int64 [B, T], from what a model is given.

    A document starts where `position_ids` [B, T] is not that of the previous real token plus one, and at the
    first real token. `attention_mask` [B, T], non-zero = real token; None = no padding. Padding gets -1.

    Raises:
        ValueError: `attention_mask` is not two-dimensional, or the shapes do not fit.
    """
    if position_ids.dim() != 2:
        raise ValueError(f"position_ids must be [B, T], got shape {tuple(position_ids.shape)}")
    if attention_mask is None:
        real = torch.ones_like(position_ids, dtype=torch.bool)
    else:
        if attention_mask.dim() != 2 or attention_mask.shape[-1] != position_ids.shape[-1]:
            raise ValueError(
                f"attention_mask must be [B, T] like position_ids {tuple(position_ids.shape)}, "
                f"got {tuple(attention_mask.shape)}: pass the padding mask, not a ready attention mask"
            )
        real = attention_mask != 0
    position = position_ids.to(torch.int64).expand(real.shape)
    # -2 + 1 equals no position, so the first real token always starts a document.
    is_start = real & (position != _previous_real(position, real, outside=-2) + 1)
    return (is_start.long().cumsum(-1) - 1).masked_fill(~real, -1)


def check_document_ids(document_ids: Tensor) -> None:
    """Refuse ids that fall from one real token to the next (waits for the device: call it once a batch).

    Raises:
        ValueError: naming the first offending row and column.
    """
    _check_shape(document_ids, document_ids.shape[0], document_ids.shape[-1])
    falls = (document_ids >= 0) & (document_ids < _previous_real(document_ids, document_ids >= 0, outside=-1))
    if bool(falls.any()):
        row, column = (int(n) for n in falls.nonzero()[0])
        raise ValueError(
            f"document_ids must not decrease along a row (-1 = padding), but row {row} falls at {column}"
        )


def _previous_real(values: Tensor, real: Tensor, *, outside: int) -> Tensor:
    """Value at the nearest real token strictly before each column (`outside` where there is none). [B, T]."""
    length = values.shape[-1]
    if length == 0:
        return values
    index = torch.arange(length, device=values.device).expand(values.shape)
    nearest = torch.where(real, index, -1).cummax(-1).values.roll(1, -1)
    nearest[..., 0] = -1
    return torch.where(nearest >= 0, values.gather(-1, nearest.clamp(min=0)), outside)


def _check_shape(document_ids: Tensor, batch: int, length: int) -> None:
    if document_ids.shape != (batch, length):
        raise ValueError(
            f"document_ids must be [B, T] = [{batch}, {length}], got shape {tuple(document_ids.shape)}"
        )
    if document_ids.dtype.is_floating_point or document_ids.dtype == torch.bool:
        raise ValueError(f"document_ids must be integers (int64), got {document_ids.dtype}")
