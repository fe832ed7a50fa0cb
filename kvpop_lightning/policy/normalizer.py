"""Attention logits in strips of queries; the log-normaliser of dense attention (METHOD.md, section 3).

Nothing here builds [T, T]: a strip is some queries of every head against the keys they may see.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from kvpop_lightning.policy.documents import DocumentLayout, document_layout
from kvpop_lightning.policy.triton_choice import choose_backend, triton_refusal

_STRIP_ELEMENTS_CPU = 2**19
"""Logits per strip: small enough to stay in a core's cache between the passes over them."""
_STRIP_ELEMENTS_GPU = 2**26
"""256 MB in float32: large enough to fill the device."""
_MIN_STRIP = 16


class Strip(NamedTuple):
    """Queries `first:stop` against keys `low:high` (row indices)."""

    first: int
    stop: int
    low: int
    high: int
    clear: dict[int, tuple[int, int]]
    """By lag: a key range that every query of the strip sees, so that it needs no mask."""
    newest: dict[int, Tensor]
    """By lag: row index of the newest key that each query sees (-1 = none, as at padding), int64 [B, T]."""
    logits: Tensor
    """[B, Hkv, G, stop - first, high - low], scaled, without any mask; free to be overwritten."""

    def hide(self, layout: DocumentLayout, *, lag: int, value: float) -> Tensor:
        """Put `value` in `logits` (in place) wherever the key is not visible to the query.

        Visible: same document, at least `lag` tokens older than the query, no padding on either side.
        """
        newest = self.newest[lag][:, self.first : self.stop, None]
        oldest = layout.start[:, self.first : self.stop, None]
        clear_low, clear_high = self.clear[lag]
        for low, high in ((self.low, min(clear_low, self.high)), (clear_high, self.high)):
            if low >= high:
                continue
            keys = torch.arange(low, high, device=self.logits.device)
            hidden = (keys < oldest) | (keys > newest) | ~layout.real[:, None, low:high]
            self.logits[..., low - self.low : high - self.low].masked_fill_(hidden[:, None, None], value)
        return self.logits


class Inflation(NamedTuple):
    """How much a sparse log-normaliser overstates the probabilities, in nats: `L_dense - L_sparse`."""

    per_query: Tensor
    """[B, Hq, T], >= 0 up to rounding; padding 0. `P_sparse = P_dense * exp(per_query)`."""
    mean: Tensor
    """Over real queries and heads, scalar."""
    maximum: Tensor
    """Scalar."""


def dense_log_normalizer(
    query: Tensor,
    key: Tensor,
    *,
    document_ids: Tensor | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Natural log-normaliser of every query under dense causal attention inside its document.

    Args:
        query: [B, Hq, T, D]; key: [B, Hkv, T, D], Hkv dividing Hq (query head g reads KV head
            g // (Hq / Hkv)).
        document_ids: int64 [B, T], -1 = padding; None = one document.
        scale: factor on the logits; None = D ** -0.5.
        backend: `triton` (CUDA; see `future_attention_target`), `chunked` (strips of queries, any device);
            `auto` is triton where it can run, chunked elsewhere.

    Returns:
        [B, Hq, T], float32 (float64 for float64 inputs); -inf at padding. No gradient.
    """
    check_query_key(query, key)
    if backend not in ("auto", "triton", "chunked"):
        raise ValueError(f"backend must be auto, triton or chunked, got {backend!r}")
    batch, heads, length, _ = query.shape
    layout = document_layout(document_ids, batch=batch, length=length, device=query.device)
    backend = choose_backend(
        backend, query, work="dense_log_normalizer", otherwise="chunked", refusal=triton_refusal(query)
    )
    if backend == "triton":
        from kvpop_lightning.policy.triton_target import dense_log_normalizer_triton

        return dense_log_normalizer_triton(
            query, key, layout, scale=query.shape[-1] ** -0.5 if scale is None else scale
        )
    groups = heads // key.shape[1]
    result = torch.full(
        (batch, key.shape[1], groups, length), float("-inf"), dtype=compute_dtype(query), device=query.device
    )
    with torch.no_grad(), full_precision(query):
        for strip in logit_strips(query, key, layout, scale=scale):
            logits = strip.hide(layout, lag=0, value=float("-inf"))
            result[..., strip.first : strip.stop] = logits.logsumexp(-1)
    return result.view(batch, heads, length)


def normalizer_inflation(
    query: Tensor,
    key: Tensor,
    normalizer: Tensor,
    *,
    document_ids: Tensor | None = None,
    scale: float | None = None,
) -> Inflation:
    """What a sparse `normalizer` [B, Hq, T] (the student's own) adds to the log-probabilities of the target.

    The sparse normaliser misses the evicted keys' mass, so the future-attention target may exceed 1 (0 nats);
    it is not clamped, but worth logging. Costs one dense pass. Arguments as for `dense_log_normalizer`.
    """
    dense = dense_log_normalizer(query, key, document_ids=document_ids, scale=scale)
    real = dense > float("-inf")
    per_query = torch.where(real, dense - normalizer.detach().to(dense.dtype), 0.0)
    mean = per_query.sum() / real.sum().clamp(min=1)
    maximum = per_query.amax() if per_query.numel() else per_query.sum()
    return Inflation(per_query, mean, maximum)


def logit_strips(
    query: Tensor,
    key: Tensor,
    layout: DocumentLayout,
    *,
    lags: tuple[int, ...] = (0,),
    scale: float | None = None,
    max_elements: int | None = None,
) -> Iterator[Strip]:
    """Scaled logits of successive query strips, each over the keys that it can reach.

    `lags` are those that `Strip.hide` will be asked for; keys less than the smallest one older than the
    strip's last query are left out. A strip begins at the first row of the oldest document that it touches,
    so packed rows cost what their documents cost. Empty strips are left out.
    """
    batch, heads, length, head_dim = query.shape
    kv_heads = key.shape[1]
    dtype = compute_dtype(query)
    q_BKGTD = query.detach().to(dtype).mul(head_dim**-0.5 if scale is None else scale)
    q_BKGTD = q_BKGTD.view(batch, kv_heads, heads // kv_heads, length, head_dim)
    k_BKDT = key.detach().to(dtype).transpose(-1, -2)
    size = strip_size(query, max_elements)
    newest = {lag: layout.earlier(lag) for lag in lags}
    bounds = _strip_bounds(layout, size, newest)
    for first, (low, *clear_bounds) in zip(range(0, length, size), bounds, strict=True):
        stop = min(first + size, length)
        high = stop - min(lags)
        if low >= high:
            continue
        clear = {}
        for lag, clear_low, clear_high in zip(lags, clear_bounds[::2], clear_bounds[1::2], strict=True):
            clear[lag] = (clear_low, clear_high) if low <= clear_low < clear_high <= high else (high, high)
        q_strip = q_BKGTD[..., first:stop, :].reshape(batch, kv_heads, -1, head_dim)
        logits = (q_strip @ k_BKDT[..., low:high]).view(batch, kv_heads, -1, stop - first, high - low)
        yield Strip(first, stop, low, high, clear, newest, logits)


def strip_size(query: Tensor, max_elements: int | None = None) -> int:
    """Queries per strip of about `max_elements` logits (None = a default for the device)."""
    batch, heads, length, _ = query.shape
    if max_elements is None:
        max_elements = _STRIP_ELEMENTS_CPU if query.device.type == "cpu" else _STRIP_ELEMENTS_GPU
    size = max(_MIN_STRIP, max_elements // max(1, batch * heads * length))
    return max(1, min(size, length))


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """float32 or better, whatever the model's dtype."""
    return torch.promote_types(tensor.dtype, torch.float32)


def full_precision(tensor: Tensor) -> torch.autocast:
    """Keeps a surrounding autocast from computing logits in half precision."""
    return torch.autocast(tensor.device.type, enabled=False)


def check_query_key(query: Tensor, key: Tensor) -> None:
    """Refuse shapes that are not [B, Hq, T, D] and [B, Hkv, T, D] with Hkv dividing Hq (ValueError)."""
    fits = (
        query.dim() == key.dim() == 4
        and query.shape[0] == key.shape[0]
        and query.shape[2:] == key.shape[2:]
        and query.shape[1] % max(1, key.shape[1]) == 0
    )
    if not fits:
        raise ValueError(
            "query must be [B, Hq, T, D] and key [B, Hkv, T, D] with Hkv dividing Hq, got "
            f"{tuple(query.shape)} and {tuple(key.shape)}"
        )


def _strip_bounds(layout: DocumentLayout, size: int, newest: dict[int, Tensor]) -> list[list[int]]:
    """Per strip: its lowest key, then by lag the range of keys that all its queries see (one transfer)."""
    length = layout.real.shape[-1]
    if length == 0:
        return []

    def per_strip(per_token: Tensor, *, largest: bool) -> Tensor:
        """Extreme over the batch and the strip's queries, [S]."""
        columns = per_token.amax(0) if largest else per_token.amin(0)
        filler = columns[-1:].expand(-length % size)  # the last strip may be short
        strips = torch.cat([columns, filler]).view(-1, size)
        return strips.amax(-1) if largest else strips.amin(-1)

    low = per_strip(torch.where(layout.real, layout.start, length), largest=False)
    bounds = [low]
    stop = torch.arange(size, length + size, size, device=low.device).clamp(max=length)
    padding_before = torch.nn.functional.pad((~layout.real).any(0).long().cumsum(0), (1, 0))
    padded = padding_before[stop] > padding_before[low]
    for newest_key in newest.values():
        clear_low = per_strip(layout.start, largest=True)
        clear_high = per_strip(newest_key, largest=False) + 1
        bounds += [clear_low, clear_high.masked_fill(padded, 0)]
    return torch.stack(bounds, dim=-1).tolist()
