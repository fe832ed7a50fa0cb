"""The cache of a rule that merges tokens into the newest entry of each head (`baselines/dmc.py`).

An entry that is finished never changes, so it goes to the head's pages; only the newest one is open, and of
it the layer keeps the sums, from which key and value follow.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvpop_lightning.cache.attention import grouped_attention
from kvpop_lightning.cache.layer import BoundedLayer
from kvpop_lightning.cache.paged import PagedLayer
from kvpop_lightning.cache.span import Span
from kvpop_lightning.policy.merge import entries, recurrence, weighted


class MergedLayer(PagedLayer):
    """Finished entries in pages, and the sums of the open one.

    Attributes:
        keys, values: [B, Hkv, 0, D]: every key is in the pages or in the sums.
        open: float32 (float64) [B, Hkv, 2 D + 1]: `z k` before RoPE, `z v` and z of the newest entry; 0
            before the first token.
    """

    open: Tensor

    def _allocate(self, key: Tensor, value: Tensor, hidden: Tensor | None) -> dict[str, Tensor]:
        batch, heads, _, dim = key.shape
        work = self.scorer.dtype_for(key)
        return {
            "keys": key[:, :, :0],
            "values": value[:, :, :0],
            "open": key.new_zeros(batch, heads, 2 * dim + 1, dtype=work),
            **super()._allocate(key, value, hidden),
        }

    def _use(self, views: dict[str, Tensor]) -> None:
        super()._use(views)
        self.open = views["open"]

    def keys_per_head(self, seen: Tensor) -> Tensor:
        """int64 [B, Hkv]: entries of each head after `seen` [B] tokens."""
        return self.held + (seen > 0).long()[:, None]


def attend_merged(
    layer: BoundedLayer,
    layer_index: int,
    policy: Any,
    span: Span,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    hidden: Tensor | None,
    scaling: float,
) -> Tensor:
    """A stretch of C tokens; arguments and result as for `attend_chunk`.

    The open entry and those of the C tokens are C + 1 in order; entry c is finished where the token after it
    starts one of its own, and until then only the token that it ends with attends it.
    """
    assert isinstance(layer, MergedLayer)
    assert hidden is not None
    rule, length = layer.scorer, span.length
    valid = span.valid[:, None]
    merges, importance = rule.choose(hidden)
    merges &= (span.position > 0)[:, None]
    # Filler behind a row's tokens leaves the entry as it is.
    factor = torch.where(valid, merges, True).to(layer.open.dtype)
    weight = torch.where(valid, importance, 0.0).to(layer.open.dtype)
    new = weighted(key, value, weight, span.position, rule.inv_freq)
    sums = recurrence(
        torch.cat([torch.zeros_like(factor[..., :1]), factor], -1),
        torch.cat([layer.open[:, :, None], new], 2),
    )
    newest = torch.cat([span.seen[:, None] - 1, span.position], 1).clamp(min=0)
    entry_key, entry_value = entries(sums, newest, rule.inv_freq)
    entry_key, entry_value = entry_key.to(key.dtype), entry_value.to(value.dtype)

    exists = torch.cat([span.seen[:, None] > 0, span.valid], 1)[:, None]  # [B, 1, C + 1]
    finished = exists[..., :length] & valid & ~merges
    number = torch.arange(length + 1, device=key.device)
    own = number[1:, None]  # the entry that each token is in
    ended = torch.cat([finished, torch.zeros_like(finished[..., :1])], -1)
    visible = (number == own) | ((number < own) & ended[:, :, None])
    open_key, open_value, open_exists = layer.opened()
    whole = torch.cat([open_exists[:, :, None].expand(-1, -1, length, -1), visible], -1)
    out = grouped_attention(query, [open_key, entry_key], [open_value, entry_value], whole, scaling)

    layer.append(entry_key[:, :, :length], entry_value[:, :, :length], finished)
    layer.open.copy_(sums[:, :, -1])
    position = span.position[:, None].expand_as(merges)
    layer.note(position - 1, position, merges & valid, length)
    return out
