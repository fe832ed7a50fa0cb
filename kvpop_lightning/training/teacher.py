"""The dense teacher: features and targets of rows for later training, and fine-tuning by cross-entropy
(METHOD.md, section 4).
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from kvpop_lightning.config.schema import TrainerConfig
from kvpop_lightning.models import dense
from kvpop_lightning.training.feature_store import Features
from kvpop_lightning.training.features import FeatureCache, FeatureRequest, dense_features
from kvpop_lightning.training.forward import Batch, last_hidden, output_head
from kvpop_lightning.training.kl import cross_entropy_sum, supervised_positions
from kvpop_lightning.training.module import Metrics, TrainingModule


class TeacherModule(TrainingModule):
    """A base model run dense.

    * `predict_step` gives the features, targets and (with `request.topk`) top-K logits of a batch, see
      `dense_features`; with `cache` it stores them and returns the row numbers instead.
    * `training_step` fine-tunes all weights by cross-entropy on the supervised positions.

    Args:
        model: causal language model; retrofitted for `predict_step`, either way for training.
        config: optimisation (`base_lr` is the rate).
        request: what `predict_step` computes.
        cache: where it goes.
        chunk: positions per piece of the cross-entropy.
    """

    def __init__(
        self,
        model: Any,
        config: TrainerConfig,
        *,
        request: FeatureRequest | None = None,
        cache: FeatureCache | None = None,
        chunk: int = 256,
    ) -> None:
        super().__init__(config)
        self.model, self.cache, self.chunk = model, cache, chunk
        self.request = cache.request if cache is not None else request

    def _dense(self) -> Any:
        return dense(self.model) if hasattr(self.model, "kvpop") else nullcontext()

    def base_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        return [(n, p) for n, p in self.model.named_parameters() if not n.startswith("kvpop.")]

    def on_fit_start(self) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(not name.startswith("kvpop."))

    def counts(self, batch: Batch) -> Tensor:
        return supervised_positions(batch["loss_mask"], batch["document_ids"]).sum()[None]

    def share(self, batch: Batch, totals: Tensor) -> tuple[Tensor, Metrics]:
        with self._dense():
            hidden = last_hidden(self.model, batch)
        return self._cross_entropy(hidden, batch) / totals[0].clamp(min=1), {}

    def _cross_entropy(self, hidden: Tensor, batch: Batch) -> Tensor:
        chosen = supervised_positions(batch["loss_mask"], batch["document_ids"])
        labels = batch["input_ids"].roll(-1, dims=1)[chosen]
        return cross_entropy_sum(hidden[chosen], output_head(self.model), labels, chunk=self.chunk)

    @torch.no_grad()
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Logs `val/cross_entropy`, nats per supervised position."""
        with self._dense():
            hidden = last_hidden(self.model, batch)
        count = int(self.counts(batch))
        value = self._cross_entropy(hidden, batch) / max(count, 1)
        self.log("val/cross_entropy", value, batch_size=max(count, 1), sync_dist=True)

    def predict_step(self, batch: Batch, batch_idx: int) -> Features | list[int]:
        """Features of the batch, or, with a cache, the rows that are now in it."""
        if self.request is None:
            raise ValueError("TeacherModule.predict_step needs request= or cache=")
        features = dense_features(self.model, batch, self.request)
        if self.cache is None:
            return features
        rows = [int(row) for row in batch["row"]]
        self.cache.put(rows, features)
        return rows
