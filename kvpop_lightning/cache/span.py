"""One stretch of columns of a forward call: everything that depends on the rows alone and not on a layer.

Rows of a batch may be padded on either side, so a column is not a position: `seen` counts the real tokens
of each row, and a stretch is compacted per row (its real tokens first) before the cache looks at it.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from kvpop_lightning.policy.budget import Budget


class Span:
    """Columns `start .. stop - 1` of one forward call (METHOD.md section 6).

    Args:
        start, stop: columns inside this forward call.
        seen: int64 [B], real tokens of each row before this stretch.
        real: bool [B, C], which columns hold a real token; None when all do.
        budget: slots per KV head.
        filled: every slot of every row is known to be taken once this stretch is in (saves a mask).
    """

    def __init__(
        self, start: int, stop: int, seen: Tensor, real: Tensor | None, budget: Budget, filled: bool = False
    ) -> None:
        self.start, self.stop = start, stop
        self.seen = seen
        self.real = real
        self.budget = budget
        self.filled = filled

    @property
    def length(self) -> int:
        """Columns, C."""
        return self.stop - self.start

    @cached_property
    def count(self) -> Tensor:
        """int64 [B]: real tokens of each row in this stretch."""
        if self.real is None:
            return torch.full_like(self.seen, self.length)
        return self.real.sum(dim=1)

    @cached_property
    def valid(self) -> Tensor:
        """bool [B, C]: after compaction, which places hold a token (a prefix of each row)."""
        return self._columns[None] < self.count[:, None]

    @cached_property
    def position(self) -> Tensor:
        """int64 [B, C]: position in the row's text of each compacted token (counts on past the real ones)."""
        return self.seen[:, None] + self._columns[None]

    @cached_property
    def _columns(self) -> Tensor:
        return torch.arange(self.length, device=self.seen.device)

    @cached_property
    def _order(self) -> Tensor:
        """int64 [B, C]: column of the c-th compacted token, real ones first and in order."""
        assert self.real is not None
        return torch.argsort((~self.real).to(torch.int8), dim=1, stable=True)

    @cached_property
    def _rank(self) -> Tensor:
        """int64 [B, C]: where each column's token went."""
        return torch.argsort(self._order, dim=1)

    def compact(self, x: Tensor) -> Tensor:
        """This stretch, real tokens first: [B, H, T, D] -> [B, H, C, D], [B, T, E] -> [B, C, E]."""
        axis = x.dim() - 2
        x = x.narrow(axis, self.start, self.length)
        if self.real is None:
            return x
        return take(x, self._order)

    def spread(self, out: Tensor) -> Tensor:
        """Inverse of `compact` for an attention output [B, H, C, D]; columns of padding become 0."""
        if self.real is None:
            return out
        return take(out, self._rank).masked_fill(~self.real[:, None, :, None], 0.0)

    @cached_property
    def ring_slot(self) -> Tensor:
        """int64 [B, w]: ring slots from the oldest token of the window to the newest."""
        ring = torch.arange(self.budget.window, device=self.seen.device)
        return (self.seen[:, None] + ring) % self.budget.window

    @cached_property
    def held_position(self) -> Tensor:
        """int64 [B, w + C]: positions of the window before the stretch, then of it; negative = no token."""
        steps = torch.arange(self.budget.window + self.length, device=self.seen.device)
        return self.seen[:, None] - self.budget.window + steps

    @cached_property
    def left_window(self) -> Tensor:
        """int64 [B]: tokens that had left the window before the stretch."""
        return (self.seen - self.budget.window).clamp(min=0)

    @cached_property
    def last_ring(self) -> Tensor:
        """int64 [B, C]: index into window + stretch of what goes into the ring (clamped, so repeats occur).

        A row without a real token points at its newest held token, which then writes itself.
        """
        newest = self.count[:, None] - 1
        oldest = (self.count[:, None] - self.budget.window).clamp(min=0)
        return self.budget.window + torch.minimum(torch.maximum(self._columns[None], oldest), newest)

    # -------- single-token step
    @cached_property
    def rows(self) -> Tensor:
        """int64 [B]: row numbers, for indexed reads and writes."""
        return torch.arange(self.seen.shape[0], device=self.seen.device)

    @cached_property
    def slot(self) -> Tensor:
        """int64 [B]: ring slot that the next token takes and that its predecessor by `w` leaves."""
        return self.seen % self.budget.window

    @cached_property
    def step_visible(self) -> Tensor | None:
        """bool [B, 1, 1, total]: slots that hold a token once this single token is in; None when all do."""
        if self.filled:
            return None
        budget = self.budget
        seen = self.seen + self.count
        left = (seen - budget.window).clamp(min=0)
        ring = torch.arange(budget.window, device=seen.device)[None] < seen[:, None]
        rest = torch.arange(budget.sink + budget.topk, device=seen.device)[None] < left[:, None]
        return torch.cat([ring, rest], dim=1)[:, None, None]


def take(x: Tensor, index: Tensor) -> Tensor:
    """Gathers places along the token axis: x [B, H, N, D] or [B, N, E], index [B, M] or [B, H, M]."""
    if x.dim() == 3:
        return x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]))
    if index.dim() == 2:
        index = index[:, None].expand(-1, x.shape[1], -1)
    return x.gather(2, index[..., None].expand(-1, -1, -1, x.shape[-1]))


def put(x: Tensor, index: Tensor, source: Tensor) -> None:
    """Scatters along the token axis, in place; repeated places must carry equal values; see `take`."""
    if x.dim() == 3:
        x.scatter_(1, index[..., None].expand(-1, -1, x.shape[-1]), source)
        return
    if index.dim() == 2:
        index = index[:, None].expand(-1, x.shape[1], -1)
    x.scatter_(2, index[..., None].expand(-1, -1, -1, x.shape[-1]), source)
