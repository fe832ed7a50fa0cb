"""The attention function that a retrofitted model runs, registered with transformers under one name.

Called per layer by the library with query [B, Hq, Q, D] and key, value [B, Hkv, K, D] after RoPE, not
repeated. Three
ways through it: a BoundedCache (the step belongs to the cache), the dense teacher, the parallel sparse
forward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kvpop_lightning.attention import as_autocast, dense_attention, masked_attention, sparse_attention
from kvpop_lightning.models.compat import register_attention
from kvpop_lightning.models.context import ForwardContext, LayerObservation
from kvpop_lightning.policy.own_attention import OwnAttention

ATTENTION_NAME = "kvpop"
_MODIFIERS = ("softcap", "s_aux", "position_bias", "sliding_window")
"""Extras of some families that change the logits; ignoring one would be silently wrong."""


def kvpop_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    *,
    kvpop: ForwardContext | None = None,
    kvpop_hidden: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer; returns ([B, Q, Hq, D], None) as the library expects.

    With a cache it calls `cache.attend(layer_index, query, key, value, hidden, scaling)`, hidden being what
    q_proj read.

    Raises:
        ValueError: called outside a retrofitted model, with a ready mask, dropout, or logits modified by the
            family.
    """
    if kvpop is None:
        raise ValueError(
            f'attention "{ATTENTION_NAME}" runs only inside a model that kvpop_lightning.retrofit prepared, '
            "called through the model itself"
        )
    if attention_mask is not None:
        raise ValueError("ready attention masks are not supported: pass a padding mask [B, T]")
    if dropout:
        raise ValueError(
            "attention dropout is not supported: set model.config.attention_dropout = 0.0 before building it"
        )
    modified = [name for name in _MODIFIERS if kwargs.get(name) is not None]
    if modified:
        raise ValueError(
            f"{type(module).__name__} uses {modified[0]} in its attention, which is not supported"
        )
    layer = module.layer_idx
    assert isinstance(layer, int)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    if kvpop.rope is not None and not kvpop.mode.dense:
        rule = kvpop.policy.layer_scorer(layer)
        if rule.borrows:  # what it took out of query and key stands where other gates read the hidden state
            query, key, kvpop_hidden = rule.borrow(query, key, kvpop.rope[:, -query.shape[2] :])
    if kvpop.cache is not None:
        out = kvpop.cache.attend(layer, query, key, value, kvpop_hidden, scale)
    elif kvpop.dense_mask is not None:
        out = masked_attention(query, key, value, kvpop.dense_mask, scale=scale)
    elif kvpop.mode.soft is not None:
        out = kvpop.mode.soft(layer, query, key, value, kvpop_hidden, kvpop, scale)
    else:
        assert kvpop_hidden is not None
        out = _parallel(kvpop, layer, query, key, value, kvpop_hidden, scale)
    return out.transpose(1, 2).contiguous(), None


def _parallel(
    call: ForwardContext, layer: int, query: Tensor, key: Tensor, value: Tensor, hidden: Tensor, scale: float
) -> Tensor:
    """A whole row at once, dense or sparse, and what observers want to see of it.

    After a prefix (`modes.after_prefix`) query, key, value and hidden are of the tokens behind it, and so is
    the result; decisions and observers still have the whole row.
    """
    assert call.segments is not None
    start = 0
    if call.mode.prefix is not None:
        start = call.mode.prefix[layer].length
        query, key, value, hidden = call.mode.prefix[layer].extended(query, key, value, hidden)
    query, key, value = as_autocast(query, key, value)  # decisions and observers read what attention reads
    eviction: Tensor | None = None
    score: Tensor | None = None
    priority: Tensor | None = None
    lse: Tensor | None = None
    own = False
    if call.mode.dense:
        out = dense_attention(query, key, value, segments=call.segments, scale=scale)
    else:
        if call.mode.replay is not None:
            eviction = call.mode.replay[layer].to(key.device)
        else:
            eviction, score, priority = _decide(call, layer, query, key, value, hidden, scale)
        rule, budget = call.policy.layer_scorer(layer), call.policy.budget
        if own := isinstance(rule, OwnAttention):
            out = rule.attend_rows(
                query, key, value, eviction, budget, document_ids=call.document_ids, scale=scale
            )
        else:
            held_key, held_value = key, value
            if own := rule.merges:
                held_key, held_value = rule.merged(key, value, hidden, eviction, call.document_ids)
            out, lse = sparse_attention(
                query,
                held_key,
                held_value,
                eviction,
                budget=budget,
                document_ids=call.document_ids,
                scale=scale,
                backend=call.mode.attention_backend,
                need_lse=None if call.mode.observers else False,
                segments=call.segments,
            )
    for observer in call.mode.observers:
        seen: list[Any] = [query, key, value, hidden, score, priority]
        if not observer.gradients:
            seen = [None if tensor is None else tensor.detach() for tensor in seen]
        q, k, v, x, r, p = seen
        assert call.position is not None
        observer.callback(
            LayerObservation(
                layer,
                q,
                k,
                v,
                x,
                call.document_ids,
                call.position,
                scale,
                score=r,
                priority=p,
                eviction=eviction,
                own_attention=own,
                known_lse=None if lse is None else lse.detach(),
                target_backend=call.mode.target_backend,
            )
        )
    return out[:, :, start:]


def _decide(
    call: ForwardContext,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    hidden: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Eviction times, scores and priorities from the layer's own tensors, which get no gradient from them.

    Scores carry a gradient to the scorers only when an observer asked for gradients: the mask is a hard
    decision, so the language-model loss has none to give. (Scorers step out of autocast themselves.)
    """
    wanted = torch.is_grad_enabled() and any(o.gradients for o in call.mode.observers)
    with torch.set_grad_enabled(wanted):
        return call.policy.eviction_times(
            layer,
            key.detach(),
            value.detach(),
            hidden.detach() if call.policy.needs_hidden else None,
            position=call.position,
            document_ids=call.document_ids,
            query=query.detach(),
            scale=scale,
        )


def kvpop_mask(*args: Any, **kwargs: Any) -> None:
    """No mask: documents and padding reach the attention through the model's hook."""
    return None


register_attention(ATTENTION_NAME, kvpop_attention, kvpop_mask)
