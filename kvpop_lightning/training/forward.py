"""Running a causal language model up to its last hidden states, without `[B, T, V]` logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kvpop_lightning.errors import UserError
from kvpop_lightning.training.kl import Head

Batch = dict[str, Tensor]


def output_head(model: Any) -> Head:
    """The model's map from normalised hidden states [n, Hid] to logits [n, V].

    Raises:
        UserError: the family scales or caps its logits after the head, which the chunked losses would miss.
    """
    for key in ("final_logit_softcapping", "logits_scaling", "logit_scale"):
        if getattr(model.config, key, None) not in (None, 1, 1.0):
            raise UserError(
                f"models with {key} are not supported by the chunked losses: {type(model).__name__}; "
                "use a Llama, Qwen3 or Mistral model"
            )
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Module):
        raise UserError(f"{type(model).__name__} has no output head; load a causal language model")
    return head


def last_hidden(model: Any, batch: Batch) -> Tensor:
    """Normalised last hidden states [B, T, Hid] of a parallel forward, in the model's dtype.

    Args:
        model: a causal language model of transformers, retrofitted or plain (then packed rows are isolated by
            `position_ids`, as transformers does without padding).
        batch: `input_ids`, `position_ids` and `document_ids` [B, T] (-1 = padding).
    """
    captured: list[Tensor] = []

    def keep(_: nn.Module, __: Any, output: Any) -> None:
        captured.append(output[0] if isinstance(output, tuple) else output.last_hidden_state)

    document_ids = batch["document_ids"]
    where: dict[str, Tensor] = {}
    if hasattr(model, "kvpop"):
        where["document_ids"] = document_ids
    elif bool((document_ids < 0).any()):
        where["attention_mask"] = (document_ids >= 0).long()
    hook = model.base_model.register_forward_hook(keep)
    try:
        model(
            input_ids=batch["input_ids"],
            position_ids=batch["position_ids"],
            use_cache=False,
            logits_to_keep=torch.zeros(0, dtype=torch.int64, device=document_ids.device),
            **where,
        )
    finally:
        hook.remove()
    assert len(captured) == 1, "the decoder must run exactly once per forward"
    return captured[0]


def to_device(batch: Batch, device: torch.device | str) -> Batch:
    """The batch with every tensor on `device`."""
    return {name: value.to(device, non_blocking=True) for name, value in batch.items()}


def collate(rows: list[Batch]) -> Batch:
    """Rows without batch dimension -> one batch (row numbers become [B]); a single row is not copied."""
    if len(rows) == 1:
        return {name: torch.as_tensor(value)[None] for name, value in rows[0].items()}
    return {name: torch.stack([torch.as_tensor(row[name]) for row in rows]) for name in rows[0]}
