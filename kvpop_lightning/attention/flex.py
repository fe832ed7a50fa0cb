"""FlexAttention under eviction times, compiled once for the process.

The block mask is written down from the largest and smallest end of sight of each block of keys, without
looking at any [T, T]. Where FlexAttention is not compiled it computes all [T, T] scores without saying so; on
a GPU that is an error here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from kvpop_lightning.attention.lists import last_sight
from kvpop_lightning.attention.segments import PADDING

_Sees = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

BLOCK = 128
LARGEST_UNFUSED = 2**28
"""Scores that the unfused form may hold at once, on the CPU."""


def flex_unsupported(query: Tensor, key: Tensor, value: Tensor) -> str | None:
    """Why FlexAttention cannot take these tensors, in a few words; None when it can."""
    if query.device.type == "cpu":
        if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
            return "FlexAttention has no backward pass on the CPU"
        scores = query.shape[0] * query.shape[1] * query.shape[2] ** 2
        if scores > LARGEST_UNFUSED:
            return f"on the CPU it would hold {scores} scores at once (at most {LARGEST_UNFUSED})"
        return None
    if query.device.type != "cuda":
        return f"FlexAttention runs on CUDA and the CPU, the tensors are on {query.device.type}"
    if query.dtype == torch.float64:
        return "compiled FlexAttention does not take float64"
    if query.shape[-1] < 16:
        return "compiled FlexAttention needs a head dimension of at least 16"
    return None


def flex_sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    eviction_time: Tensor,
    *,
    document_ids: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attention under `j <= i < e_j` inside each document, by compiled FlexAttention (unfused on the CPU).

    Args:
        query: [B, Hq, T, D]; key, value: [B, Hkv, T, D]; any float dtype that FlexAttention takes.
        eviction_time: int64 [B, Hkv, T], row indices.
        document_ids: int64 [B, T], non-decreasing over real tokens, -1 = padding; None = one document.
        scale: factor on the dot products.

    Returns:
        out [B, Hq, T, D] in the dtype of query, lse [B, Hq, T] (natural log), differentiable through both;
        0 and -inf where a query sees nothing.

    Raises:
        RuntimeError: on a GPU, where compilation is switched off or given up.
    """
    if query.numel() == 0:
        return query.clone(), query.new_zeros(query.shape[:3], dtype=torch.float32)
    mask = eviction_block_mask(eviction_time, document_ids, query.shape[1])
    attend = _compiled if query.is_cuda else _attend
    out, lse = attend(query, key, value, mask, scale)
    return out, lse


def eviction_block_mask(eviction_time: Tensor, document_ids: Tensor | None, query_heads: int) -> BlockMask:
    """FlexAttention's block mask of a retention pattern, at a cost of one entry per pair of blocks.

    Args:
        eviction_time: int64 [B, Hkv, T].
        document_ids: int64 [B, T] or None.
        query_heads: Hq.

    Returns:
        The mask for [B, Hq, T, T]: blocks in which some key can be seen, and apart from them those in which
        every query sees every key.
    """
    B, H, T = eviction_time.shape
    group = query_heads // H
    end = last_sight(eviction_time, document_ids)
    real = None if document_ids is None else document_ids != PADDING
    blocks = -(-T // BLOCK)
    short = blocks * BLOCK - T
    latest = F.pad(end, (0, short)).view(B, H, blocks, BLOCK).amax(-1)
    earliest = F.pad(end, (0, short), value=T).view(B, H, blocks, BLOCK).amin(-1)
    at = torch.arange(blocks, device=end.device)
    start, stop = at * BLOCK, ((at + 1) * BLOCK).clamp(max=T)
    some = (at[:, None] >= at) & (latest[:, :, None, :] > start[:, None])
    full = (at[:, None] > at) & (earliest[:, :, None, :] >= stop[:, None])
    if real is not None:
        clean = F.pad(real, (0, short), value=True).view(B, 1, blocks, 1, BLOCK).all(-1)
        full = full & clean
    some, full = (kind.repeat_interleave(group, dim=1) for kind in (some, full))
    return block_mask_of(some, full, _sees(end, real, group), T)


def block_mask_of(some: Tensor, full: Tensor, sees: _Sees, length: int) -> BlockMask:
    """A block mask from what is known of each pair of blocks, bool [B, H, blocks, blocks].

    Args:
        some: something may be seen there.
        full: everything is; a part of `some`.
        sees: the mask itself.
        length: T of the [B, H, T, T] that is masked.
    """
    part, whole = _listed(some & ~full), _listed(full)
    return BlockMask.from_kv_blocks(
        *part, *whole, BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(length, length)
    )


def _listed(kind: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks of one kind as counts and indices per head, int32."""
    index = kind.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return kind.sum(-1, dtype=torch.int32), index.to(torch.int32)


def _sees(end: Tensor, real: Tensor | None, group: int) -> _Sees:
    def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & (i < end[b, h // group, j])

    def sees_real(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        assert real is not None
        return (j <= i) & (i < end[b, h // group, j]) & real[b, i]

    return sees if real is None else sees_real


def refuse_unfused(tensor: Tensor) -> None:
    """Raise where FlexAttention is about to run uncompiled on a GPU."""
    # True while this is traced, so what remains of the line in the compiled form is nothing.
    if tensor.is_cuda and not torch.compiler.is_dynamo_compiling():
        raise RuntimeError(
            "FlexAttention was about to run without torch.compile, holding all [T, T] scores: compilation is "
            "switched off or gave up (TORCH_COMPILE_DISABLE, TORCHDYNAMO_DISABLE, "
            "torch._dynamo.config.recompile_limit); enable it, or use another backend, such as auto"
        )


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float
) -> tuple[Tensor, Tensor]:
    refuse_unfused(query)
    out, aux = flex_attention(
        query, key, value, block_mask=mask, scale=scale, enable_gqa=True, return_aux=AuxRequest(lse=True)
    )
    assert aux.lse is not None
    return out, aux.lse


_compiled = torch.compile(_attend, fullgraph=True)
