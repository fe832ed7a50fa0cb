"""The two hooks of a retrofitted model.

The decoder's hook runs once per forward: it checks the inputs, derives positions and documents, and announces
the call to the cache. The attention modules' hook hands on the tensor that q_proj reads. Both pass everything
as arguments.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from kvpop_lightning.attention import find_segments
from kvpop_lightning.cache import BoundedCache
from kvpop_lightning.models.attend import ATTENTION_NAME
from kvpop_lightning.models.compat import CACHE_KEYWORDS, bind_positional, cache_keyword, given_cache
from kvpop_lightning.models.context import RUNTIME, ForwardContext, Mode, Runtime
from kvpop_lightning.policy.documents import document_ids_from, position_in_document


def before_attention(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook of an attention module: adds its input, the normalised hidden state [B, Q, Hid]."""
    if "kvpop" in kwargs:
        kwargs = kwargs | {"kvpop_hidden": args[0] if args else kwargs["hidden_states"]}
    return args, kwargs


def before_decoder(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook of the decoder: one ForwardContext for all its layers.

    With a BoundedCache it calls `cache.begin(batch, q_len, mask, position_ids, policy=policy)` once: mask
    bool [B, columns seen + q_len] or None, position_ids int64 [B or 1, q_len] as the caller gave them or
    None; what `begin` returns, int64 [B, q_len], are the positions that RoPE uses. The layers' attention then
    calls `cache.attend`.
    Without a cache it derives position_ids and document_ids of whole rows: a document starts where
    position_ids are not the previous plus one (or as `document_ids` [B, T] say, which the model takes too),
    padding is -1.

    Raises:
        ValueError: another attention was set, a mask that is no padding mask or has the wrong length, a
            packed row or a foreign cache together with a cache, positions that do not fit.
    """
    runtime: Runtime = getattr(module, RUNTIME)
    call = bind_positional(module, args, kwargs)
    inputs = call.get("input_ids") if call.get("input_ids") is not None else call.get("inputs_embeds")
    if inputs is None:
        return args, kwargs  # the model's own message is clear
    _check_attention(module)
    batch, length, device = inputs.shape[0], inputs.shape[1], inputs.device
    mask = _padding_mask(call.get("attention_mask"), device)
    cache = given_cache(call)
    if runtime.mode.dense:
        if isinstance(cache, BoundedCache):
            raise ValueError(
                "a BoundedCache does not serve the dense teacher: leave past_key_values out inside "
                "dense(model)"
            )
        if cache is not None and cache.get_seq_length():
            return (), call | _dense_on_cache(runtime, call, mask, cache, batch, length, device)
    else:
        cache = _bounded_cache(runtime, module, call, cache, mask)
        if cache is not None:
            if runtime.mode.replay is not None or runtime.mode.observers:
                raise ValueError(
                    "replay and observe work on the parallel forward: call the model with use_cache=False"
                )
            document_ids = call.pop("document_ids", None)
            if document_ids is not None and bool(document_ids.any()):
                raise ValueError(
                    "document_ids say that rows are packed or padded, but a BoundedCache holds one "
                    "document per row: "
                    "call the model with use_cache=False, or give documents as rows with an attention_mask"
                )
            position_ids = cache.begin(batch, length, mask, call.get("position_ids"), policy=runtime.policy)
            context = ForwardContext(runtime.policy, runtime.mode, cache=cache, rope=position_ids)
            for name in CACHE_KEYWORDS:
                call.pop(name, None)
            call |= {cache_keyword(module): cache, "attention_mask": None, "position_ids": position_ids}
            return (), call | {"kvpop": context, "use_cache": True}
    return (), call | _parallel_call(runtime, call, mask, batch, length, device)


def _parallel_call(
    runtime: Runtime, call: dict[str, Any], mask: Tensor | None, batch: int, length: int, device: torch.device
) -> dict[str, Any]:
    """Positions, documents and context of a forward over whole rows."""
    if mask is not None and tuple(mask.shape) != (batch, length):
        raise ValueError(
            f"attention_mask must be [{batch}, {length}] like the input, got {list(mask.shape)}: pass the "
            "padding mask of "
            "these tokens"
        )
    document_ids = call.pop("document_ids", None)
    position_ids = _positions(call, batch, length)
    if document_ids is None and (position_ids is not None or mask is not None):
        count = position_ids if position_ids is not None else _count(mask)
        document_ids = document_ids_from(count.expand(batch, -1), mask)
    if document_ids is not None and not bool(document_ids.any()):
        document_ids = None  # one document per row and no padding: every later step is simpler
    position = position_in_document(document_ids, batch=batch, length=length, device=device)
    rope = position if position_ids is None else position_ids
    context = ForwardContext(
        runtime.policy,
        _checked_replay(runtime, batch, length),
        position=position,
        document_ids=document_ids,
        segments=find_segments(document_ids, batch=batch, length=length),
        rope=rope,
    )
    keep_cache = runtime.mode.dense and call.get("use_cache")
    changed = {"kvpop": context, "attention_mask": None, "use_cache": bool(keep_cache)}
    if runtime.mode.prefix is None:
        return changed | {"position_ids": rope}
    start = runtime.mode.prefix[0].length
    if start >= length:
        raise ValueError(f"after_prefix: rows of {length} tokens are not longer than the prefix of {start}")
    given = "input_ids" if call.get("input_ids") is not None else "inputs_embeds"
    return changed | {"position_ids": rope[:, start:], given: call[given][:, start:]}


def _dense_on_cache(
    runtime: Runtime,
    call: dict[str, Any],
    mask: Tensor | None,
    cache: Any,
    batch: int,
    length: int,
    device: torch.device,
) -> dict[str, Any]:
    """Later steps of the dense teacher's generation, on the library's own cache."""
    total = cache.get_seq_length() + length
    if mask is not None and tuple(mask.shape) != (batch, total):
        raise ValueError(
            f"attention_mask must be [{batch}, {total}], past and new columns, got {list(mask.shape)}"
        )
    query_Q1 = torch.arange(total - length, total, device=device)[:, None]
    seen_QK = torch.arange(total, device=device) <= query_Q1
    dense_mask = seen_QK[None, None] if mask is None else seen_QK[None, None] & mask[:, None, None, :]
    position_ids = call.get("position_ids")
    if position_ids is None:
        position_ids = query_Q1.T if mask is None else _count(mask)[:, -length:]
    context = ForwardContext(runtime.policy, runtime.mode, dense_mask=dense_mask)
    return {"kvpop": context, "attention_mask": None, "position_ids": position_ids}


def _bounded_cache(
    runtime: Runtime, module: Any, call: dict[str, Any], cache: Any, mask: Tensor | None
) -> BoundedCache | None:
    """The cache of this call: the one given, a new one when the caller wants one back, or None = parallel
    forward.

    `use_cache` left out follows the model's configuration, but never when gradients are on (a cache carries
    none), under `replay` or `observe`, or for a packed row (which no cache can go on from).
    """
    if cache is not None:
        if not isinstance(cache, BoundedCache):
            raise ValueError(
                f"a retrofitted model works with a BoundedCache, got {type(cache).__name__}: pass "
                "BoundedCache(model), "
                "or run the dense teacher with kvpop_lightning.dense(model)"
            )
        return cache
    wanted = call.get("use_cache")
    if wanted is None:
        mode = runtime.mode
        if (
            not module.config.use_cache
            or torch.is_grad_enabled()
            or mode.observers
            or mode.replay is not None
        ):
            return None
        position_ids = call.get("position_ids")
        if call.get("document_ids") is not None:
            return None
        if position_ids is not None and bool((document_ids_from(position_ids, mask) > 0).any()):
            return None
        wanted = True
    return BoundedCache(runtime.owner, record=False) if wanted else None


def _check_attention(module: Any) -> None:
    name = module.config._attn_implementation
    if name != ATTENTION_NAME:
        raise ValueError(
            f"this model was retrofitted, but its attention was set to {name!r}, which evicts nothing: call "
            f'model.set_attn_implementation("{ATTENTION_NAME}") or kvpop_lightning.models.unretrofit(model)'
        )


def _padding_mask(attention_mask: Any, device: torch.device) -> Tensor | None:
    """bool [B, T'], True = real token; None = no padding."""
    if attention_mask is None:
        return None
    if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2:
        got = (
            list(attention_mask.shape)
            if isinstance(attention_mask, Tensor)
            else type(attention_mask).__name__
        )
        raise ValueError(
            f"attention_mask must be a padding mask [B, T], got {got}: ready (4-D) masks are not supported, "
            "the policy decides what is seen"
        )
    return attention_mask.to(device) != 0


def _positions(call: dict[str, Any], batch: int, length: int) -> Tensor | None:
    position_ids = call.get("position_ids")
    if position_ids is None:
        return None
    if position_ids.dim() != 2 or position_ids.shape[0] not in (1, batch) or position_ids.shape[1] != length:
        raise ValueError(
            f"position_ids must be [{batch}, {length}] like the input, got {list(position_ids.shape)}"
        )
    return position_ids.expand(batch, -1)


def _count(mask: Tensor | None) -> Tensor:
    """Place of every column among the real tokens of its row; 0 on padding in front."""
    assert mask is not None
    return (mask.long().cumsum(-1) - 1).clamp_min(0)


def _checked_replay(runtime: Runtime, batch: int, length: int) -> Mode:
    mode = runtime.mode
    if mode.replay is None:
        return mode
    for layer, times in enumerate(mode.replay):
        if times.shape[0] not in (1, batch) or times.shape[2] != length:
            raise ValueError(
                f"replayed eviction times of layer {layer} must be [{batch}, Hkv, {length}] like the input, "
                f"got {list(times.shape)}"
            )
    return replace(mode, replay=tuple(times.expand(batch, -1, -1) for times in mode.replay))


def install(runtime: Runtime, decoder: nn.Module, attention_modules: list[nn.Module]) -> None:
    """Registers the hooks; their handles stay with the runtime."""
    setattr(decoder, RUNTIME, runtime)
    runtime.handles = [decoder.register_forward_pre_hook(before_decoder, with_kwargs=True)]
    runtime.handles += [
        m.register_forward_pre_hook(before_attention, with_kwargs=True) for m in attention_modules
    ]


def remove(runtime: Runtime, decoder: nn.Module) -> None:
    """Takes the hooks off again."""
    for handle in runtime.handles:
        handle.remove()
    delattr(decoder, RUNTIME)
