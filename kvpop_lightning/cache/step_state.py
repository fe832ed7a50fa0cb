"""The bounded cache of all layers in a few stacked tensors: what the step kernels work on.

Slots and meaning are those of `BoundedLayer` (METHOD.md section 6), except that a long-range slot keeps its
priority, float64, in place of its score: priorities never change, so the step need not work them out again. A
text read by a `BoundedCache` is taken over row by row and goes on here, token for token the same.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from kvpop_lightning.cache.bounded import BoundedCache
from kvpop_lightning.cache.layer import BoundedLayer
from kvpop_lightning.policy.budget import Budget


def keeps_waiting(scorer: Any, budget: Budget) -> bool:
    """Whether scores are known before the token leaves the window and cannot be worked out again then: under
    a delay below the window, or from hidden states."""
    return bool(scorer.needs_hidden or (scorer.stateful and scorer.delay < budget.window))


@dataclass
class StepState:
    """Static tensors; L layers, B rows (slots of the engine), H KV heads, N = budget.total."""

    budget: Budget
    keys: Tensor
    """[L, B, H, N, D] in the model's dtype."""
    values: Tensor
    priority: Tensor
    """float64 [L, B, H, k]."""
    position: Tensor
    """int32 [L, B, H, k]."""
    seen: Tensor
    """int32 [B]: tokens of each row so far."""
    waiting: Tensor
    """[L, B, H, w]: scores of the ring's tokens, where `keeps_waiting` (else empty)."""
    memory: dict[str, Tensor]
    """The scorers' recurrent state, [L, B, H, ...]."""

    @classmethod
    def empty(
        cls, budget: Budget, *, layers: int, rows: int, heads: int, head_dim: int, dtype: torch.dtype,
        device: torch.device | str, memory: dict[str, Tensor] | None = None, waiting: bool = False,
        score_dtype: torch.dtype = torch.float32,
    ) -> StepState:  # fmt: skip
        """`memory`: the state of one row in one layer, [1, H, ...], as `Scorer.init_state(1)` returns it."""
        shape = (layers, rows, heads)

        def zeros(*size: int, kind: torch.dtype) -> Tensor:
            return torch.zeros(*shape, *size, dtype=kind, device=device)

        started = {
            name: one[:, None].expand(1, 1, *one.shape[1:]).repeat(layers, rows, *[1] * (one.dim() - 1))
            for name, one in (memory or {}).items()
        }
        return cls(
            budget,
            zeros(budget.total, head_dim, kind=dtype),
            zeros(budget.total, head_dim, kind=dtype),
            zeros(budget.topk, kind=torch.float64),
            zeros(budget.topk, kind=torch.int32),
            torch.zeros(rows, dtype=torch.int32, device=device),
            zeros(budget.window if waiting else 0, kind=score_dtype),
            started,
        )

    def tensors(self) -> dict[str, Tensor]:
        """Everything kept between two steps, by name; axis 1 is the row, except for `seen`."""
        found = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("budget", "memory")}
        return found | {f"memory.{name}": tensor for name, tensor in self.memory.items()}

    @property
    def rows(self) -> int:
        return self.seen.shape[0]

    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    @torch.no_grad()
    def take_over(self, row: int, cache: BoundedCache) -> None:
        """Row `row` goes on where row 0 of `cache` stands (same policy, a stateless or delayed scorer)."""
        policy: Any = cache.policy
        for index, layer in enumerate(cache.layers):
            assert isinstance(layer, BoundedLayer)
            assert layer.keys is not None
            assert layer.values is not None
            self.keys[index, row].copy_(layer.keys[0])
            self.values[index, row].copy_(layer.values[0])
            self.priority[index, row].copy_(policy.priority(index, layer.score[:1], layer.position[:1])[0])
            self.position[index, row].copy_(layer.position[0])
            if self.waiting.shape[-1]:
                self.waiting[index, row].copy_(layer.waiting_score[0])
            for name, tensor in self.memory.items():
                tensor[index, row].copy_(layer.state[name][0])
        self.seen[row] = cache.tokens_per_row[0]

    @torch.no_grad()
    def give_back(self, row: int, model: Any) -> BoundedCache:
        """A cache for `model` that stands where the row stands: the inverse of `take_over`."""
        cache = BoundedCache(model, record=False)
        policy: Any = cache.policy
        budget, seen = self.budget, int(self.seen[row])
        slot = torch.arange(budget.window, device=self.seen.device)
        ring = seen - 1 - (seen - 1 - slot) % budget.window  # position of the token in each ring slot
        for index, layer in enumerate(cache.layers):
            assert isinstance(layer, BoundedLayer)
            key, value = self.keys[index, row][None], self.values[index, row][None]
            layer.prepare(key, value, None)
            assert layer.keys is not None
            assert layer.values is not None
            layer.keys.copy_(key)
            layer.values.copy_(value)
            layer.position.copy_(self.position[index, row])
            offset = policy.priority(index, torch.zeros_like(layer.score), layer.position)
            layer.score.copy_(self.priority[index, row] - offset)
            if self.waiting.shape[-1]:
                layer.waiting_score.copy_(self.waiting[index, row])
            elif not layer.scorer.stateful:  # the kernels score a token when it leaves, the cache before
                window = slice(0, budget.window)
                score = policy.score(
                    index, key[:, :, window], value[:, :, window], None, position=ring[None].clamp(min=0),
                    document_ids=None,
                )  # fmt: skip
                layer.waiting_score.copy_(score)
            for name, tensor in self.memory.items():
                layer.state[name].copy_(tensor[index, row])
            layer.columns = seen
        cache.resume(torch.tensor([seen], device=self.seen.device))
        return cache

    def snapshot(self, row: int) -> dict[str, Tensor]:
        """A copy of one row, for `restore`."""
        return {n: (t[row] if n == "seen" else t[:, row]).clone() for n, t in self.tensors().items()}

    def restore(self, row: int, snapshot: dict[str, Tensor]) -> None:
        """Row `row` becomes what `snapshot` holds."""
        for name, tensor in self.tensors().items():
            (tensor[row] if name == "seen" else tensor[:, row]).copy_(snapshot[name])

    def row_bytes(self) -> int:
        return self.nbytes() // self.rows
