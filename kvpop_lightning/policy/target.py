"""The future-attention target: how much later queries will attend to a key (METHOD.md, section 3)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvpop_lightning.errors import UserError
from kvpop_lightning.policy.documents import DocumentLayout, document_layout
from kvpop_lightning.policy.normalizer import (
    check_query_key,
    compute_dtype,
    dense_log_normalizer,
    full_precision,
    logit_strips,
)
from kvpop_lightning.policy.target_reference import aggregate_heads, future_attention_target_reference
from kvpop_lightning.policy.triton_choice import choose_backend, missing, triton_refusal

TARGET_BACKENDS = ("auto", "reference", "chunked", "flex", "triton")
"""What `backend=` takes: `reference` (float64, builds [T, T]), `chunked` (strips of queries, any device),
`flex` (compiled FlexAttention), `triton` (CUDA), `auto`."""

_NEGLIGIBLE_EPS = 1e-30
"""An `eps` from here on hides what float32 loses when probabilities are added up outside the log domain."""


def unavailable_target_backends(device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """The backends that serve no model of this dtype on this device, each with the reason."""
    query = torch.empty(1, 1, 0, 64, device=device, dtype=dtype)
    refusals = {"flex": _flex_refusal(query), "triton": missing(query) or triton_refusal(query)}
    return {name: reason for name, reason in refusals.items() if reason}


def _flex_refusal(query: Tensor) -> str:
    """Why FlexAttention does not take `query` ("" = it does)."""
    from kvpop_lightning.attention.flex import flex_unsupported  # imports dynamo

    plain = query.detach()  # no gradient is asked for
    return flex_unsupported(plain, plain, plain) or ""


def future_attention_target(
    query: Tensor,
    key: Tensor,
    *,
    window: int,
    document_ids: Tensor | None = None,
    normalizer: Tensor | None = None,
    aggregation: str = "max",
    eps: float = 1e-9,
    scale: float | None = None,
    backend: str = "auto",
    max_elements: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`u[h, j]`: log of the mean probability that queries `i >= j + window` give key j, over a KV group.

    `log m[g, j] = LSE_i (logit[g, i, j] - L[g, i]) - log n_j` in strips of queries; memory is bounded by
    `max_elements` logits at a time, [T, T] is never built. No gradient: the result is detached.

    Args:
        query: [B, Hq, T, D] and key: [B, Hkv, T, D] after RoPE, keys not repeated; any float dtype.
        window: w >= 1, keys that every query sees anyway.
        document_ids: int64 [B, T], -1 = padding; None = one document.
        normalizer: [B, Hq, T], natural-log normaliser of every query: the sparse student's own (the paper;
            the target may then exceed 0 nats and is not clamped, see `normalizer_inflation`). None = dense
            causal (exact).
        aggregation: over the group's query heads: `max`, `mean` (of logs) or `logmeanexp` (log of the mean
            mass).
        eps: added to the mass before the log.
        scale: factor on the logits; None = D ** -0.5.
        backend: `triton` (CUDA; bfloat16, float16 or float32, D up to 256), `flex` (compiled FlexAttention on
            CUDA, unfused on short rows on the CPU), `chunked` (any device) or `reference` (float64, from the
            definition, builds [T, T]); `auto` is triton where it can run, chunked elsewhere.
        max_elements: logits per strip of `chunked`; None = a default for the device.

    Returns:
        target [B, Hkv, T], float32 (float64 for float64 inputs), nats, 0 where invalid; and valid, bool, same
        shape: False at padding and at tokens that no later query outside their window follows.

    Raises:
        ValueError: shapes that do not fit, an unknown aggregation or backend, one that cannot run here.
        RuntimeError: flex on a GPU where torch.compile is switched off or gave up.
    """
    check_query_key(query, key)
    if window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    if aggregation not in ("max", "mean", "logmeanexp"):
        raise ValueError(f"target.aggregation must be max, mean or logmeanexp, got {aggregation!r}")
    if backend not in TARGET_BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(TARGET_BACKENDS)}, got {backend!r}")
    if normalizer is not None and normalizer.shape != query.shape[:3]:
        raise ValueError(
            f"normalizer must be [B, Hq, T] = {tuple(query.shape[:3])}, got {tuple(normalizer.shape)}"
        )
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    backend = choose_backend(
        backend, query, work="future_attention_target", otherwise="chunked", refusal=triton_refusal(query)
    )
    if backend == "flex" and (reason := _flex_refusal(query)):
        raise UserError(f'backend "flex" of future_attention_target: {reason}; use backend="auto"')
    with torch.no_grad(), full_precision(query):
        if backend == "reference":
            target, valid = future_attention_target_reference(
                query,
                key,
                window=window,
                document_ids=document_ids,
                normalizer=normalizer,
                aggregation=aggregation,
                eps=eps,
                scale=scale,
            )
            return target.to(compute_dtype(query)), valid
        batch, _, length, _ = query.shape
        layout = document_layout(document_ids, batch=batch, length=length, device=query.device)
        if backend == "triton":
            from kvpop_lightning.policy.triton_target import future_attention_target_triton

            if normalizer is None:
                normalizer = dense_log_normalizer(
                    query, key, document_ids=document_ids, scale=scale, backend="triton"
                )
            return future_attention_target_triton(
                query,
                key,
                layout,
                normalizer,
                window=window,
                aggregation=aggregation,
                eps=eps,
                scale=scale,
                logarithmic=eps < _NEGLIGIBLE_EPS,
            )
        if backend == "flex":
            if normalizer is None:
                normalizer = dense_log_normalizer(query, key, document_ids=document_ids, scale=scale)
            log_mass = _future_log_mass_flex(query, key, layout, window, normalizer, scale)
        elif normalizer is None and eps >= _NEGLIGIBLE_EPS:
            log_mass = _future_mass_dense(query, key, layout, window, scale, max_elements).log()
        else:
            if normalizer is None:
                normalizer = dense_log_normalizer(query, key, document_ids=document_ids, scale=scale)
            log_mass = _future_log_mass(query, key, layout, window, normalizer, scale, max_elements)
        future = (
            layout.length - layout.position - window
        )  # n_j, queries that may attend j from outside its window
        valid = (layout.real & (future > 0)).unsqueeze(1)
        log_mean = log_mass - future.clamp(min=1).to(log_mass.dtype).log()[:, None, None]
        target = aggregate_heads(log_mean, aggregation, eps)
        valid = valid.expand(target.shape)
        return target.masked_fill(~valid, 0.0), valid


def _future_log_mass_flex(
    query: Tensor, key: Tensor, layout: DocumentLayout, window: int, normalizer: Tensor, scale: float
) -> Tensor:
    if query.numel() == 0:
        return torch.full(
            _grouped_shape(query, key), -math.inf, dtype=compute_dtype(query), device=query.device
        )
    from kvpop_lightning.attention.flex_target import future_log_mass_flex

    return future_log_mass_flex(query, key, layout, window, normalizer, scale).to(compute_dtype(query))


def _future_log_mass(
    query: Tensor,
    key: Tensor,
    layout: DocumentLayout,
    window: int,
    normalizer: Tensor,
    scale: float,
    max_elements: int | None,
) -> Tensor:
    """`LSE over i >= j + window of (logit[g, i, j] - L[g, i])`, [B, Hkv, G, T]; -inf where none."""
    shape = _grouped_shape(query, key)
    log_mass = torch.full(shape, -math.inf, dtype=compute_dtype(query), device=query.device)
    normalizer = normalizer.detach().to(log_mass).view(shape)
    # A query that saw nothing has -inf: as +inf it adds nothing, instead of infinite mass.
    normalizer = normalizer.masked_fill(normalizer == -math.inf, math.inf)
    for strip in logit_strips(query, key, layout, lags=(window,), scale=scale, max_elements=max_elements):
        strip.logits.sub_(normalizer[..., strip.first : strip.stop, None])
        log_p = strip.hide(layout, lag=window, value=-math.inf)
        columns = log_mass[..., strip.low : strip.high]
        columns.copy_(torch.logaddexp(columns, log_p.logsumexp(-2)))
    return log_mass


def _future_mass_dense(
    query: Tensor,
    key: Tensor,
    layout: DocumentLayout,
    window: int,
    scale: float,
    max_elements: int | None,
) -> Tensor:
    """`sum over i >= j + window of P[g, i, j]` under the dense normaliser, [B, Hkv, G, T].

    A strip holds whole rows of P, so one exponential serves the normaliser and the sum over queries.
    Probabilities below the smallest float vanish, which only a target without `eps` could notice.
    """
    mass = torch.zeros(_grouped_shape(query, key), dtype=compute_dtype(query), device=query.device)
    lags = (0, window)
    for strip in logit_strips(query, key, layout, lags=lags, scale=scale, max_elements=max_elements):
        logits = strip.hide(layout, lag=0, value=-math.inf)
        high = strip.stop - window
        if strip.low >= high:
            continue
        # Rows of padding are -inf throughout; a finite maximum turns them into zeros instead of NaN.
        largest = logits.amax(-1, keepdim=True).clamp(min=torch.finfo(logits.dtype).min)
        weights = logits.sub_(largest).exp_()
        row_sum = weights.sum(-1).clamp(min=1.0)  # a row's largest weight is 1
        later = strip._replace(high=high, logits=weights[..., : high - strip.low])
        weights = later.hide(layout, lag=window, value=0.0)
        columns = torch.einsum("bkgij,bkgi->bkgj", weights, row_sum.reciprocal())
        mass[..., strip.low : high] += columns
    return mass


def _grouped_shape(query: Tensor, key: Tensor) -> tuple[int, int, int, int]:
    batch, heads, length, _ = query.shape
    return batch, key.shape[1], heads // key.shape[1], length
