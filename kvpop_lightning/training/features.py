"""What the scorers learn from, computed once per row: the frozen base's keys, values and the future-attention
target.

With a frozen base nothing but the scorers changes, so one dense forward per row serves the whole training
(METHOD.md, section 4): everything here comes from the dense forward, with the dense normaliser.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvpop_lightning.errors import UserError
from kvpop_lightning.models import dense, observe
from kvpop_lightning.models.fingerprint import base_fingerprint
from kvpop_lightning.policy import future_attention_target
from kvpop_lightning.training.feature_store import Features, FeatureStore, folder_bytes
from kvpop_lightning.training.forward import Batch, collate, last_hidden, output_head, to_device
from kvpop_lightning.training.kl import top_logits
from kvpop_lightning.training.progress import ProgressLine


@dataclass(frozen=True)
class FeatureRequest:
    """What is wanted of a row.

    `window` and `aggregation` shape the target only (METHOD.md section 3); `hidden` adds the tensor that
    q_proj reads; `topk` > 0 adds the teacher's top-K distribution at every position; `target = False` leaves
    the target out.
    """

    window: int
    aggregation: str = "max"
    hidden: bool = False
    topk: int = 0
    kl_chunk: int = 256
    target: bool = True

    @property
    def target_part(self) -> str:
        """Name of the target's part in the store."""
        return f"target-w{self.window}-{self.aggregation}"

    @property
    def parts(self) -> list[str]:
        """All parts in the store."""
        extra = (["hidden"] if self.hidden else []) + ([f"topk-{self.topk}"] if self.topk else [])
        return ["row", "kv", self.target_part, *extra]


@torch.no_grad()
def dense_features(model: Any, batch: Batch, request: FeatureRequest) -> Features:
    """One dense forward of a batch.

    Args:
        model: a retrofitted model; it runs dense whatever its policy.
        batch: as the DataModule yields it, on the model's device.

    Returns:
        `key`, `value` [B, L, Hkv, T, D] in the model's dtype (keys after RoPE), `target` float32 and `valid`
        bool [B, L, Hkv, T] (nats; METHOD.md section 3), `hidden` [B, L, T, Hid] if requested, `position`,
        `document_ids` [B, T], and with `topk` `log_probs`, `ids` [B, T, K] and `rest` [B, T].
    """
    layers: list[Features] = []

    def keep(seen: Any) -> None:
        layer = {"key": seen.key, "value": seen.value}
        if request.hidden:
            layer["hidden"] = seen.hidden
        if request.target:
            layer["target"], layer["valid"] = target_of(seen)
        layers.append({name: tensor.detach() for name, tensor in layer.items()})

    def target_of(seen: Any) -> tuple[Tensor, Tensor]:
        with torch.autocast(seen.query.device.type, enabled=False):
            target, valid = future_attention_target(
                seen.query,
                seen.key,
                window=request.window,
                document_ids=seen.document_ids,
                aggregation=request.aggregation,
                scale=seen.scale,
                backend=seen.target_backend,
            )
        return target.float(), valid

    with dense(model), observe(model, keep):
        hidden_BTH = last_hidden(model, batch)
    features = {name: torch.stack([layer[name] for layer in layers], 1) for name in layers[0]}
    features["position"], features["document_ids"] = batch["position_ids"], batch["document_ids"]
    if request.topk:
        b, t, h = hidden_BTH.shape
        top = top_logits(
            hidden_BTH.reshape(b * t, h), output_head(model), request.topk, chunk=request.kl_chunk
        )
        features |= {name: value.unflatten(0, (b, t)) for name, value in top._asdict().items()}
    return features


_PARTS = {"row": ("position", "document_ids"), "kv": ("key", "value"), "hidden": ("hidden",)}


class FeatureCache:
    """Features of the rows of one data set under one frozen model, on disk.

    Args:
        root: `trainer.feature_cache_dir`.
        model: retrofitted model whose base the features come from (its weights enter the folder's name).
        data_fingerprint: of the prepared data; changes when any row changes.
        request: what to keep per row.
        split: `train` or `eval`.
        limit_gb: most that may lie below `root`, in 10^9 bytes.
        dtype: storage of keys, values and hidden states.

    The folder is `<root>/<model>-<data>/<split>/<part>/`: another window or aggregation adds only targets.
    """

    def __init__(
        self,
        root: str | Path,
        model: Any,
        data_fingerprint: str,
        request: FeatureRequest,
        *,
        split: str = "train",
        limit_gb: float = 20.0,
        dtype: torch.dtype = torch.float16,
    ) -> None:
        self.root, self.request, self.limit_gb = Path(root), request, limit_gb
        key = f"{base_fingerprint(model)[:16]}-{data_fingerprint[:16]}" + (
            "" if dtype == torch.float16 else f"-{dtype}"[7:]
        )
        self.store = FeatureStore(self.root / key / split, dtype)
        self._model = [model]  # in a list: never a submodule of anything

    def __contains__(self, row: int) -> bool:
        return self.store.has(row, self.request.parts)

    def row_bytes(self, length: int) -> int:
        """Bytes that one new row of `length` tokens takes, targets included."""
        return sum(self._part_bytes().values()) * length

    def _part_bytes(self) -> dict[str, int]:
        """Bytes per token of each part in the store."""
        config, policy = self._model[0].config, self._model[0].kvpop
        layers, heads = policy.decay.shape
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        element = self.store.dtype.itemsize
        sizes = {
            "row": 16,
            "kv": layers * heads * 2 * head_dim * element,
            "hidden": layers * config.hidden_size * element,
            self.request.target_part: layers * heads * (4 + 1),
            f"topk-{self.request.topk}": self.request.topk * 12 + 4,
        }
        return {part: sizes[part] for part in self.request.parts}

    def put(self, rows: Sequence[int], features: Features) -> None:
        """Store the features of a batch (leading dimension = `rows`)."""
        for index, row in enumerate(rows):
            one = {name: tensor[index] for name, tensor in features.items()}
            for part in self.request.parts:
                if part == self.request.target_part:
                    # bool valid and float32 target: a target in half precision would blur close decisions
                    tensors = {"target": one["target"], "valid": one["valid"]}
                elif part.startswith("topk-"):
                    tensors = {"log_probs": one["log_probs"], "ids": one["ids"], "rest": one["rest"]}
                else:
                    compress = self.store.compress if part != "row" else lambda t: t
                    tensors = {name: compress(one[name]) for name in _PARTS[part]}
                if part == self.request.target_part or not self.store.has(row, [part]):
                    self.store.write(row, part, tensors)

    def get(self, row: int) -> Features:
        """All requested parts of one row, as stored (no batch dimension)."""
        found: Features = {}
        for part in self.request.parts:
            found |= self.store.read(row, part)
        return found

    def fill(self, rows_data: Any, rows: Sequence[int], *, batch_rows: int = 1, progress: bool = True) -> int:
        """Compute what is missing of `rows`; an interrupted call goes on where it stopped. Returns rows
        computed.

        Processes that fill the same rows at the same time share the work: each row is computed by one of
        them, and all return when all rows are there.

        Args:
            rows_data: data set with `rows_data[row] -> dict` as the DataModule's rows.
            rows: row numbers wanted.
            batch_rows: rows per forward.
            progress: print the size first and a line with an estimate.

        Raises:
            UserError: the features do not fit `trainer.feature_cache_limit_gb`, or the disk is full.
        """
        missing = [row for row in rows if row not in self]
        if not missing:
            return 0
        model = self._model[0]
        device = next(model.parameters()).device
        self._check_space(missing, len(rows_data[missing[0]]["input_ids"]), progress)
        line = ProgressLine("features", len(missing), unit="row", enabled=progress)
        was_training = model.training
        model.eval()
        try:
            computed, open_rows, patient = 0, missing, False
            while open_rows:
                # What another process works on comes last; a lock that is free by then is no guarantee that
                # its owner finished, so every row is looked at again.
                taken_elsewhere: list[int] = []
                for start in range(0, len(open_rows), batch_rows):
                    with self.store.claim(open_rows[start : start + batch_rows], wait=patient) as claimed:
                        chosen = [row for row in claimed if row not in self]
                        taken_elsewhere += [
                            row for row in open_rows[start : start + batch_rows] if row not in claimed
                        ]
                        if chosen:
                            batch = to_device(collate([rows_data[row] for row in chosen]), device)
                            self.put(chosen, dense_features(model, batch, self.request))
                    computed += len(chosen)
                    line.update(sum(row in self for row in missing))
                open_rows, patient = taken_elsewhere, True
        finally:
            line.close()
            model.train(was_training)
        return computed

    def _check_space(self, missing: Sequence[int], length: int, progress: bool) -> None:
        sizes = self._part_bytes()
        wanted = length * sum(
            size for row in missing for part, size in sizes.items() if not self.store.has(row, [part])
        )
        held = folder_bytes(self.root)
        limit = self.limit_gb * 1e9
        if progress:
            print(
                f"features of {len(missing)} rows: {wanted / 1e6:.0f} MB to add in {self.root} "
                f"({held / 1e6:.0f} MB there)"
            )
        if wanted + held > limit:
            raise UserError(
                f"features need {wanted / 1e9:.2f} GB beside the {held / 1e9:.2f} GB in {self.root}, over "
                f"trainer.feature_cache_limit_gb={self.limit_gb:g}: raise it, lower data.train_rows, or "
                "delete old features there"
            )
