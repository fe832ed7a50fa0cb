"""Reading tokens `delay` tokens later: the shift of queries and its way back (METHOD.md, section 5)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpop_lightning.policy.documents import document_layout


@dataclass(frozen=True)
class DelayedRead:
    """Token t is read at the row of the token `delay` places after it in its document, if there is one.

    Places are counted in real tokens, so padding between two tokens of a document (prompts of several
    lengths, then generated text) does not shorten the delay.
    """

    delay: int
    valid: Tensor | None
    """bool [B, T]: token t has a read. None = every token but the last `delay`."""
    reader_row: Tensor | None
    """int64 [B, T]: the row token t is read at (any row where not valid). None = t + delay."""
    token_row: Tensor | None
    """int64 [B, T]: the token that is read at row p (any token where there is none). None = p - delay."""

    @classmethod
    def build(cls, delay: int, document_ids: Tensor | None) -> DelayedRead:
        """`document_ids` int64 [B, T], -1 = padding; None = one document without padding."""
        if document_ids is None:
            return cls(delay, None, None, None)
        batch, length = document_ids.shape
        layout = document_layout(document_ids, batch=batch, length=length)
        reader_row = layout.row_at.gather(1, (layout.ordinal + delay).clamp(max=length - 1))
        valid = layout.real & (layout.position + delay < layout.length)
        if document_ids.device.type == "cpu":
            # Padding at the ends only (nearly always): a plain shift, no gather. On CUDA looking would
            # synchronise.
            rows = torch.arange(length)
            if not bool((valid & (reader_row != rows + delay)).any()):
                return cls(delay, valid, None, None)
        token_row = layout.row_at.gather(1, (layout.ordinal - delay).clamp(min=0))
        return cls(delay, valid, reader_row, token_row)

    def to_readers(self, query: Tensor) -> Tensor:
        """[B, H, T, d] by token -> by reading row; rows that read no token hold zeros or another token's
        query."""
        if self.delay == 0:
            return query
        if self.token_row is None:
            length = query.shape[2]
            shift = min(self.delay, length)
            return F.pad(query[:, :, : length - shift], (0, 0, shift, 0))
        return _take_rows(query, self.token_row)

    def to_tokens(self, read: Tensor) -> Tensor:
        """[B, H, T, d] by reading row -> by token; tokens without a read hold arbitrary finite numbers."""
        if self.delay == 0:
            return read
        if self.reader_row is None:
            length = read.shape[2]
            shift = min(self.delay, length)
            return F.pad(read[:, :, shift:], (0, 0, 0, shift))
        return _take_rows(read, self.reader_row)

    def mask(self, score: Tensor) -> Tensor:
        """[B, H, T] with 0 for every token that has no read."""
        length = score.shape[2]
        if self.valid is None:
            valid = torch.arange(length, device=score.device) < length - self.delay
        else:
            valid = self.valid[:, None]
        return torch.where(valid, score, torch.zeros_like(score))


def _take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x [B, H, T, d] at rows [B, T]."""
    return x.gather(2, rows[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))
