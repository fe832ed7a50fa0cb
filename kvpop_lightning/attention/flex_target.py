"""The future-attention target's column sums as FlexAttention: keys look at the queries after them.

`LSE_i (logit[i, j] - L[i])` over the queries `i` of a key `j` is the log-normaliser of an attention in which
the keys are the rows and the queries the columns, each column's logit lowered by its own normaliser. Only
that log-normaliser is wanted, so the values are 16 zeros.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from kvpop_lightning.attention.flex import BLOCK, block_mask_of, refuse_unfused
from kvpop_lightning.policy.documents import DocumentLayout

_VALUE_DIM = 16

Mod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def future_log_mass_flex(
    query: Tensor, key: Tensor, layout: DocumentLayout, window: int, normalizer: Tensor, scale: float
) -> Tensor:
    """`LSE over i >= j + window of (logit[g, i, j] - L[g, i])`, [B, Hkv, G, T]; -inf where there is none.

    Args:
        query: [B, Hq, T, D]; key: [B, Hkv, T, D].
        layout: the documents; queries outside a key's document and padding count for nothing.
        normalizer: [B, Hq, T], natural log; a query with -inf saw nothing and adds nothing.
        scale: factor on the logits.

    Raises:
        RuntimeError: on a GPU, where compilation is switched off or given up.
    """
    B, Hq, T, _ = query.shape
    group = Hq // key.shape[1]
    normalizer = normalizer.detach().to(torch.promote_types(query.dtype, torch.float32))
    normalizer = normalizer.masked_fill(normalizer == float("-inf"), float("inf"))
    low = torch.where(layout.real, layout.later(window).clamp(max=T), T)
    mask = range_block_mask(low, layout.end, layout.real)
    rows = key.detach().repeat_interleave(group, dim=1)
    nothing = query.new_zeros(B, Hq, T, _VALUE_DIM)
    look = _compiled if query.is_cuda else _look
    lse: Tensor = look(rows, query.detach(), nothing, mask, normalizer.contiguous(), scale)
    return lse.view(B, Hq // group, group, T)


def range_block_mask(low: Tensor, high: Tensor, real: Tensor) -> BlockMask:
    """The mask in which row `j` sees the real columns `low_j <= i < high_j`, without looking at [T, T].

    Args:
        low, high: int64 [B, T]; rows with `low >= high` see nothing.
        real: bool [B, T], columns that can be seen.

    Returns:
        For [B, 1, T, T], heads broadcast.
    """
    B, T = low.shape
    blocks = -(-T // BLOCK)
    short = blocks * BLOCK - T
    sees = low < high

    def extreme(x: Tensor, filler: int, largest: bool) -> Tensor:
        cut = F.pad(x, (0, short), value=filler).view(B, blocks, BLOCK)
        return cut.amax(-1) if largest else cut.amin(-1)

    first, last = extreme(low.masked_fill(~sees, T), T, False), extreme(high.masked_fill(~sees, 0), 0, True)
    # Rows past the end see nothing that is kept: they do not stop a block from being seen in full.
    clear, clear_end = extreme(low, 0, True), extreme(high, T, False)
    whole = extreme(real.long(), 1, False) > 0
    start = torch.arange(blocks, device=low.device) * BLOCK
    stop = (start + BLOCK).clamp(max=T)
    some = (first[:, :, None] < stop) & (last[:, :, None] > start)
    full = (clear[:, :, None] <= start) & (clear_end[:, :, None] >= stop) & whole[:, None, :]
    full = full & some
    return block_mask_of(some[:, None], full[:, None], _between(low, high, real), T)


def _between(low: Tensor, high: Tensor, real: Tensor) -> Mod:
    def between(b: Tensor, h: Tensor, j: Tensor, i: Tensor) -> Tensor:
        return (i >= low[b, j]) & (i < high[b, j]) & real[b, i]

    return between


def _look(
    rows: Tensor, columns: Tensor, value: Tensor, mask: BlockMask, offset: Tensor, scale: float
) -> Tensor:
    refuse_unfused(rows)

    def lowered(score: Tensor, b: Tensor, h: Tensor, j: Tensor, i: Tensor) -> Tensor:
        return score - offset[b, h, i]

    _, aux = flex_attention(
        rows, columns, value, score_mod=lowered, block_mask=mask, scale=scale, return_aux=AuxRequest(lse=True)
    )
    assert aux.lse is not None
    return aux.lse


_compiled = torch.compile(_look, fullgraph=True)
