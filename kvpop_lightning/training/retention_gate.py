"""Training of retention gates in the manner of TRIM-KV: the KL through `(i - t) log beta_t` on the logits,
and a loss on the capacity that the scores take up.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvpop_lightning.policy import DocumentLayout, document_layout
from kvpop_lightning.training.forward import Batch
from kvpop_lightning.training.gates import GateModule, SoftPass
from kvpop_lightning.training.module import Metrics

_BLOCK_ELEMENTS = 2**24


class RetentionPass(SoftPass):
    """One training forward."""

    def addition(self, layer: int, hidden: Tensor, layout: DocumentLayout) -> Any:
        log_beta = self.policy.layer_scorer(layer).log_beta(hidden)
        excess, held = capacity(log_beta, self.policy.budget.total, layout)
        self.sums.append(excess)
        self.note(soft_keys=held)

        def add(first: int, last: int, keys: int) -> Tensor:
            age = layout.position[:, first:last, None] - layout.position[:, None, :keys]
            return age[:, None] * log_beta[:, :, None, :keys]

        return add


def capacity(log_beta: Tensor, budget: int, layout: DocumentLayout) -> tuple[Tensor, Tensor]:
    """Mean over rows, heads and queries of `max(0, S_i - budget) / (i + 1)`, and of `S_i` itself at the last
    queries.

    `S_i = sum over t <= i of beta_t ** (i - t)`, within the document; i + 1 is the number of its tokens so
    far.

    Args:
        log_beta: [B, H, T].
    """
    length = log_beta.shape[-1]
    excess, held = log_beta.new_zeros(()), log_beta.new_zeros(())
    chunk = max(16, _BLOCK_ELEMENTS // max(1, log_beta.shape[0] * log_beta.shape[1] * length))
    for start in range(0, length, chunk):
        stop = min(start + chunk, length)
        age = layout.position[:, start:stop, None] - layout.position[:, None, :stop]
        there = layout.real[:, start:stop, None] & layout.real[:, None, :stop] & (age >= 0)
        there = there & (layout.start[:, start:stop, None] == layout.start[:, None, :stop])
        score = (age.clamp(min=0)[:, None] * log_beta[:, :, None, :stop]).exp()
        total = torch.where(there[:, None], score, 0.0).sum(-1)  # [B, H, Q]
        seen = (layout.position[:, start:stop] + 1)[:, None]
        real = layout.real[:, None, start:stop]
        excess = excess + torch.where(real, (total - budget).clamp(min=0.0) / seen, 0.0).sum()
        last = real & (seen == layout.length[:, None, start:stop])
        held = held + torch.where(last, total, 0.0).sum()
    heads = log_beta.shape[1]
    ends = (layout.real & (layout.position + 1 == layout.length)).sum()
    return excess / (heads * layout.real.sum()).clamp(min=1), held.detach() / (heads * ends).clamp(min=1)


class RetentionGateModule(GateModule):
    """Trains retention gates; arguments as for `StudentModule`."""

    def soft_pass(self) -> SoftPass:
        return RetentionPass(self.model.kvpop)

    def weighed(self, batch: Batch) -> Tensor:
        ids = batch["document_ids"]
        return document_layout(ids, batch=ids.shape[0], length=ids.shape[1]).real.sum()

    def penalty(self, done: SoftPass) -> tuple[Tensor, Metrics]:
        """Mean over layers; `soft_keys` is the sum of scores at a document's end."""
        return torch.stack(done.sums).mean(), {"soft_keys": torch.stack(done.facts["soft_keys"]).mean()}
