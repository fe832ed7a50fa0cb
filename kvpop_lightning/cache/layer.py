"""Storage of one layer of the bounded cache: allocated once, updated in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvpop_lightning.policy.budget import NEVER, Budget

_UNSEEN = torch.iinfo(torch.int32).max


class BoundedLayer(CacheLayerMixin):
    """`budget.total` slots per KV head (METHOD.md section 6).

    Slots `0 .. w-1` are the window ring (token i sits in slot i mod w), then `s` sinks in order, then `k`
    long-range slots in no particular order; no token is stored twice. All tensors are allocated for a batch
    at its first use.

    Attributes:
        keys, values: [B, Hkv, budget.total, D] in the model's dtype; keys carry the RoPE of their position.
        score: float32 [B, Hkv, k], raw scores of the long-range slots (float64 if the scorer works in
            float64).
        position: int64 [B, Hkv, k], of the long-range slots.
        waiting_score: as `score`, [B, Hkv, w], scores of the ring's tokens by ring slot (those already
            scored).
        hidden: [B, w, Hid] by ring slot, only for a delayed scorer that reads the hidden state; else None.
        state: the scorer's recurrent state, float32, possibly empty.
        columns: columns of the batch seen, padding included (what `generate` counts).
    """

    is_compileable = False
    is_croppable = False
    is_sliding = False
    supports_early_init = False
    holds_budget = True
    """False where heads may hold more keys than the budget, or different numbers of them."""

    def __init__(self, budget: Budget, scorer: Any, *, record: bool) -> None:
        super().__init__()
        self.budget = budget
        self.scorer = scorer
        self.record = record
        self.columns = 0
        self.batch_size = -1
        self.score: Tensor
        self.position: Tensor
        self.waiting_score: Tensor
        self.hidden: Tensor | None = None
        self.state: dict[str, Tensor] = {}
        self._store: dict[str, Tensor] = {}
        self._log: Tensor | None = None

    # -------- allocation
    def prepare(self, key: Tensor, value: Tensor, hidden: Tensor | None) -> None:
        """Makes the slots fit a text's first tokens: key, value [B, Hkv, Q, D], hidden [B, Q, Hid] or None.

        Raises:
            ValueError: in the middle of a text the batch size, dtype or device changed.
        """
        batch = key.shape[0]
        fits = self.is_initialized and self._store["keys"].dtype == key.dtype
        fits = (
            fits and self._store["keys"].device == key.device and self._store["keys"].shape[1] == key.shape[1]
        )
        if self.columns and not (fits and batch == self.batch_size):
            raise ValueError(
                f"this cache holds {self.batch_size} rows of {self._store['keys'].dtype}, but got "
                f"{batch} rows of {key.dtype} on {key.device}: call cache.reset() before another batch"
            )
        if fits and batch <= self._store["keys"].shape[0]:
            self._activate(batch)
            return
        self._store = self._allocate(key, value, hidden)
        self._start = {
            name: tensor[:1].clone() for name, tensor in self._store.items() if name.startswith("state.")
        }
        self.is_initialized, self.batch_size = True, -1
        self._activate(batch)

    def _allocate(self, key: Tensor, value: Tensor, hidden: Tensor | None) -> dict[str, Tensor]:
        """Every tensor of the layer by name, batch first; `state.*` start again from what they hold now."""
        batch, heads, budget = key.shape[0], key.shape[1], self.budget
        score_dtype = self.scorer.dtype_for(key)
        store = {
            "keys": key.new_zeros(batch, heads, budget.total, key.shape[3]),
            "values": value.new_zeros(batch, heads, budget.total, value.shape[3]),
            "score": key.new_zeros(batch, heads, budget.topk, dtype=score_dtype),
            "position": key.new_zeros(batch, heads, budget.topk, dtype=torch.int64),
            "waiting_score": key.new_zeros(batch, heads, budget.window, dtype=score_dtype),
        }
        if hidden is not None and self.scorer.needs_hidden and self.scorer.delay > 0:
            store["hidden"] = hidden.new_zeros(batch, budget.window, hidden.shape[-1])
        for name, tensor in self.scorer.init_state(batch, key.device).items():
            store[f"state.{name}"] = tensor
        return store

    def _activate(self, batch: int) -> None:
        """Uses the first `batch` rows of what is allocated."""
        if batch == self.batch_size and self.keys is not None:
            return
        self.batch_size = batch
        self._resize()
        self._log = None

    def _use(self, views: dict[str, Tensor]) -> None:
        """Takes the tensors of the rows in use, by name."""
        self.keys, self.values = views["keys"], views["values"]
        self.score, self.position, self.waiting_score = (
            views["score"],
            views["position"],
            views["waiting_score"],
        )
        self.hidden = views.get("hidden")
        self.state = {
            name[len("state.") :]: view for name, view in views.items() if name.startswith("state.")
        }

    def reset(self) -> None:
        """Forgets the text, keeps the allocation."""
        self.columns = 0
        for name, tensor in self._store.items():
            if name in self._start:
                tensor.copy_(self._start[name])
            else:
                tensor.zero_()
        self._log = None

    def _resize(self, **larger: Tensor) -> None:
        """Puts larger tensors in the place of those allocated, in the middle of a text."""
        self._store |= larger
        self._use({name: tensor[: self.batch_size] for name, tensor in self._store.items()})

    def release(self) -> None:
        """Gives the allocation back."""
        self.columns, self.batch_size, self.is_initialized = 0, -1, False
        self.keys = self.values = None
        self._store, self.state, self.hidden, self._log = {}, {}, None, None

    def tensors(self) -> dict[str, Tensor]:
        """Everything the layer keeps between two steps, by name, as allocated (the eviction record apart)."""
        return dict(self._store)

    def keys_per_head(self, seen: Tensor) -> Tensor:
        """int64 [B, Hkv]: keys that each head holds after `seen` [B] tokens."""
        assert self.keys is not None
        return seen.clamp(max=self.budget.total)[:, None].expand(-1, self.keys.shape[1])

    # -------- eviction record
    def note(self, position: Tensor, query: Tensor, happened: Tensor, new: int) -> None:
        """Notes that `query` is the first not to see token `position`, where `happened`; all [B, H, N].

        `new`: columns that are coming in; no noted position lies past them.
        """
        if not self.record:
            return
        log = self._log_for(self.columns + new)
        place = torch.where(happened, position + 1, 0)  # place 0 takes what did not happen
        log.scatter_(2, place, query.expand_as(place).to(torch.int32))

    def _log_for(self, tokens: int) -> Tensor:
        """int32 [B, H, >= 1 + tokens], grown by doubling."""
        log = self._log
        if log is None or log.shape[2] < tokens + 1:
            assert self.keys is not None
            size = max(256, 2 * (tokens + 1))
            grown = torch.full(
                (*self.keys.shape[:2], size), _UNSEEN, dtype=torch.int32, device=self.keys.device
            )
            if log is not None:
                grown[:, :, : log.shape[2]] = log
            self._log = log = grown
        return log

    def eviction_times(self, tokens: int) -> Tensor:
        """int64 [B, Hkv, tokens]; NEVER = still held (or no such token in a shorter row)."""
        log = self._log_for(max(tokens, 1))[:, :, 1 : tokens + 1]
        return torch.where(log == _UNSEEN, NEVER, log.to(torch.int64))

    # -------- transformers' interface
    def select(self, index: Tensor) -> None:
        """Rows become `index` (int64 [B']), in place when the number of rows stays."""
        if self.keys is None:
            return
        index = index.to(self.keys.device)
        log = None if self._log is None else self._log.index_select(0, index)
        if index.numel() == self.batch_size:
            for tensor in self._store.values():
                active = tensor[: self.batch_size]
                active.copy_(active.index_select(0, index))
        else:
            self._store = {
                name: tensor[: self.batch_size].index_select(0, index) for name, tensor in self._store.items()
            }
            self.batch_size = -1
            self._activate(index.numel())
        self._log = log

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if indices.dtype == torch.bool:
            indices = indices.nonzero()[:, 0]
        self.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.keys is not None:
            rows = torch.arange(self.batch_size, device=self.keys.device)
            self.select(rows.repeat_interleave(repeats))

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.prepare(key_states, value_states, None)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_seq_length(self) -> int:
        return self.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.columns + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        raise ValueError(
            "a bounded cache cannot be cropped, the keys it evicted are gone: use generate without an "
            "assistant model or prompt look-up, or call cache.reset() and feed the text again"
        )
