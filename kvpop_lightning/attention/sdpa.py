"""Attention without a log-normaliser, on PyTorch's fused kernel, document by document.

Query heads of a group share their KV head as a broadcast dimension of stride 0 (keys are never repeated in
memory). Sparse rows go through in blocks of queries; once a row is longer than the budget, a block meets only
the keys that are still alive for it, at most `budget.total + block` of them, so the cost is linear in the row
length.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpop_lightning.attention.segments import Segment

_GATHER_PAYS = 0.8
"""Collect the alive keys when they are fewer than this share of the keys so far."""


def _block_length(device: torch.device) -> int:
    """Queries per block: small blocks skip more of the causal triangle, large ones keep a GPU busy."""
    return 128 if device.type == "cpu" else 1024


def _grouped(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[B, Hq, Q, D], [B, Hkv, N, D] x2 -> query [B*Hkv, G, Q, D], key and value [B*Hkv, G (stride 0), N,
    D].
    """
    B, Hq, Q, D = query.shape
    H, N = key.shape[1], key.shape[2]
    G = Hq // H
    q = query.reshape(B * H, G, Q, D)
    k = key.reshape(B * H, 1, N, D).expand(-1, G, -1, -1)
    v = value.reshape(B * H, 1, N, value.shape[-1]).expand(-1, G, -1, -1)
    return q, k, v


def _attend(query: Tensor, key: Tensor, value: Tensor, mask_BHQN: Tensor | None, scale: float) -> Tensor:
    """One fused call; without a mask it is causal. A query that sees nothing gives 0 and passes no
    gradient.
    """
    B, Hq, Q, _ = query.shape
    q, k, v = _grouped(query, key, value)
    if mask_BHQN is None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    else:
        mask = mask_BHQN.expand(B, key.shape[1], -1, -1).reshape(q.shape[0], 1, Q, key.shape[2])
        sees = mask.any(dim=-1, keepdim=True)
        # Kernels differ in what a fully masked row gives (0 or NaN): let it see everything, then erase it.
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask | ~sees, scale=scale)
        out = out.masked_fill(~sees, 0.0)
    return out.reshape(B, Hq, Q, value.shape[-1])


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, *, segments: list[Segment], scale: float
) -> Tensor:
    """Causal attention inside each document.

    Args:
        query: [B, Hq, T, D]; key, value: [B, Hkv, T, D].
        segments: the documents, from `find_segments`.
        scale: factor on the dot products.

    Returns:
        [B, Hq, T, D]; 0 on padding.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, segment: Segment) -> Tensor:
        if segment.valid is None:
            return _attend(q, k, v, None, scale)
        n = segment.stop - segment.start
        causal_NN = torch.ones(n, n, dtype=torch.bool, device=q.device).tril()
        mask = causal_NN & segment.valid[:, None, None, :] & segment.valid[:, None, :, None]
        return _attend(q, k, v, mask, scale)

    return _over_segments(query, key, value, segments, attend)


def sdpa_sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    eviction_time: Tensor,
    *,
    budget_total: int,
    segments: list[Segment],
    scale: float,
) -> Tensor:
    """Attention under `j <= i < e_j` inside each document, on the fused kernel.

    Args:
        query: [B, Hq, T, D]; key, value: [B, Hkv, T, D].
        eviction_time: int64 [B, Hkv, T], row indices.
        budget_total: keys a query sees at most under a regular pattern; an imposed pattern may exceed it.
        segments: the documents, from `find_segments`.
        scale: factor on the dot products.

    Returns:
        [B, Hq, T, D]; 0 where a query sees nothing.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, segment: Segment) -> Tensor:
        # Times relative to the document; all that lies after its end means "never".
        e_BHN = (eviction_time[segment.rows, :, segment.start : segment.stop] - segment.start).clamp_max(
            q.shape[2]
        )
        return _sparse_document(q, k, v, e_BHN, segment.valid, budget_total, scale)

    return _over_segments(query, key, value, segments, attend)


def _over_segments(query: Tensor, key: Tensor, value: Tensor, segments: list[Segment], attend) -> Tensor:  # type: ignore[no-untyped-def]
    B, _, T, _ = query.shape
    if (
        len(segments) == 1
        and (segments[0].start, segments[0].stop) == (0, T)
        and segments[0].rows == slice(0, B)
    ):
        return attend(query, key, value, segments[0])
    rows: list[list[Tensor]] = [[] for _ in range(B)]
    ends = [0] * B

    def fill(row: int, stop: int) -> None:
        if stop > ends[row]:
            gap = (query.shape[1], stop - ends[row], value.shape[-1])
            rows[row].append(query.new_zeros(gap))

    for segment in segments:
        cut = (segment.rows, slice(None), slice(segment.start, segment.stop))
        out = attend(query[cut], key[cut], value[cut], segment)
        for row, out_HND in zip(range(B)[segment.rows], out, strict=True):
            fill(row, segment.start)
            rows[row].append(out_HND)
            ends[row] = segment.stop
    for row in range(B):
        fill(row, T)
    return torch.stack([torch.cat(parts, dim=1) for parts in rows]) if T else torch.zeros_like(query)


def _sparse_document(
    q: Tensor, k: Tensor, v: Tensor, e_BHN: Tensor, valid: Tensor | None, budget_total: int, scale: float
) -> Tensor:
    """One document; `e_BHN` relative to its start, clamped to its length n."""
    n = q.shape[2]
    index_N = torch.arange(n, device=q.device)
    block = _block_length(q.device)
    first_C = list(range(0, n, block))
    if n <= block:
        return _attend(q, k, v, _mask(index_N, index_N.expand_as(e_BHN), e_BHN, valid, index_N), scale)
    # One look at the host per document: how many keys each block needs (the keys alive for its first query
    # and the new ones).
    counts = torch.stack([(e_BHN[..., : min(a + block, n)] > a).sum(dim=-1).amax() for a in first_C]).tolist()
    outs = []
    for a, count in zip(first_C, counts, strict=True):
        b = min(a + block, n)
        # The bound, not the count: a row's result must not depend on the pattern of another row of the batch.
        width = budget_total + block if count <= budget_total + block else int(count)
        e, keys, values = e_BHN[..., :b], k[:, :, :b], v[:, :, :b]
        if width < _GATHER_PAYS * b:
            alive_BHb = (e > a).to(torch.uint8)
            slot_BHW = alive_BHb.argsort(dim=-1, descending=True, stable=True)[..., :width]
            e = e.gather(-1, slot_BHW)
            wide = slot_BHW[..., None]
            keys = keys.gather(2, wide.expand(-1, -1, -1, k.shape[-1]))
            values = values.gather(2, wide.expand(-1, -1, -1, v.shape[-1]))
        else:
            slot_BHW = index_N[:b].expand_as(e)
        outs.append(
            _attend(q[:, :, a:b], keys, values, _mask(index_N[a:b], slot_BHW, e, valid, index_N), scale)
        )
    return torch.cat(outs, dim=2)


def _mask(query_Q: Tensor, slot_BHW: Tensor, e_BHW: Tensor, valid: Tensor | None, index_N: Tensor) -> Tensor:
    """bool [B, Hkv, Q, W]: key `slot` is seen by query i iff `slot <= i < e`."""
    i = query_Q[:, None]
    mask = (slot_BHW[:, :, None, :] <= i) & (i < e_BHW[:, :, None, :])
    if valid is not None:
        B, H, _ = slot_BHW.shape
        key_valid = valid.expand(B, -1)[:, None].expand(B, H, -1).gather(-1, slot_BHW)
        mask = mask & key_valid[:, :, None, :] & valid[:, None, query_Q, None]
    return mask


def masked_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, scale: float) -> Tensor:
    """Attention under a ready mask: new queries of the dense teacher over an ordinary, growing cache.

    Args:
        query: [B, Hq, Q, D]; key, value: [B, Hkv, K, D].
        mask: bool [B or 1, 1, Q, K], True = seen.
        scale: factor on the dot products.

    Returns:
        [B, Hq, Q, D]; 0 where a query sees nothing.
    """
    return _attend(query, key, value, mask.expand(query.shape[0], -1, -1, -1), scale)
