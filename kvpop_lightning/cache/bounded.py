"""`BoundedCache`: a transformers cache that never holds more than the budget (METHOD.md section 6)."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from kvpop_lightning.cache.checks import check_mask, check_positions, real_columns
from kvpop_lightning.cache.kinds import attend_by, layer_type
from kvpop_lightning.cache.layer import BoundedLayer
from kvpop_lightning.cache.span import Span

DEFAULT_CHUNK = 128


class BoundedCache(Cache):
    """Exactly `budget.total` keys per layer and KV head, allocated once, whatever the length of the text.

    Give it as `past_key_values` to a model that `retrofit` prepared, or to its `generate`; long texts may
    come in pieces of any size, and the result does not depend on the pieces. It is for inference: no
    gradient flows through it.

    Args:
        model: a retrofitted model; the cache serves this model and this policy only.
        chunk: longer inputs are worked on in stretches of so many tokens inside, so that memory does not
            grow with the prompt. The result does not depend on it.
        record: note when each token was evicted (`eviction_times`), 4 bytes per token, layer and KV head
            beside the cache and the one thing that grows with the text; not part of `bytes_held`.

    Raises:
        ValueError: the model has no policy, or `chunk` is below 1.
    """

    def __init__(self, model: nn.Module, *, chunk: int = DEFAULT_CHUNK, record: bool = True) -> None:
        policy = getattr(model, "kvpop", None)
        if policy is None:
            raise ValueError(
                "BoundedCache needs a model with an eviction policy: run kvpop_lightning.retrofit(model)"
            )
        if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
            raise ValueError(f"chunk must be a positive number of tokens, got {chunk!r}")
        self.policy: Any = policy
        self.budget = policy.budget
        self.chunk = chunk
        self.record = record
        self._config = getattr(model, "config", None)
        self._attention_name = getattr(self._config, "_attn_implementation", None)
        self._seen: Tensor | None = None
        """int64 [B]: real tokens of each row; one for all layers, moved on after the last of them."""
        self._padded = False
        self._spans: list[Span] | None = None
        self._attended = 0
        super().__init__(
            layers=[layer_type(scorer)(self.budget, scorer, record=record) for scorer in policy.scorers]
        )
        for layer in self._bounded:
            if not 0 <= layer.scorer.delay <= self.budget.window:
                raise ValueError(
                    f"scorer.delay must lie in 0..budget.window = {self.budget.window}, "
                    f"got {layer.scorer.delay}"
                )

    @property
    def _bounded(self) -> Iterator[BoundedLayer]:
        return (layer for layer in self.layers if isinstance(layer, BoundedLayer))

    # -------- one forward call
    def begin(
        self,
        batch: int,
        q_len: int,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        policy: object | None = None,
    ) -> Tensor:
        """Announces one forward call of the model; its layers then call `attend` in order.

        Args:
            batch, q_len: rows and columns of the input.
            attention_mask: [B, columns seen + q_len], non-zero = real token, padding anywhere; None = all
                real.
            position_ids: int64 [B or 1, q_len]; must count each row's real tokens. None = derived.
            policy: the calling model's policy, to refuse a cache made for another model.

        Returns:
            int64 [B, q_len]: positions to use (padding: 0).

        Raises:
            ValueError: mask or positions that do not fit, a packed row, another batch size, another model's
                cache, or a forward call before that did not finish.
        """
        if policy is not None and policy is not self.policy:
            raise ValueError(
                "this BoundedCache was made for another model or policy: make one with BoundedCache(model)"
            )
        if self._spans is not None and self._attended:
            raise ValueError(
                f"the forward call before stopped after {self._attended} of {len(self.layers)} layers, so "
                "the cache is torn: call cache.reset(), and keep the attention that retrofit set"
            )
        columns = self.get_seq_length()
        if columns and self._seen is not None and batch != self._seen.shape[0]:
            raise ValueError(
                f"this cache holds {self._seen.shape[0]} rows, but the input has {batch}: call cache.reset() "
                "before another batch"
            )
        check_mask(attention_mask, batch, columns, q_len)
        device = next(
            (t.device for t in (position_ids, attention_mask) if t is not None), self.policy.decay.device
        )
        if columns == 0 or self._seen is None:  # `columns` is layer 0's: no layer has a token yet
            self._seen = torch.zeros(batch, dtype=torch.int64, device=device)
            self._padded = False
        seen = self._seen
        real = real_columns(attention_mask, seen, columns, q_len)
        self._padded |= real is not None
        self._spans = self._split(seen, real, columns, q_len)
        self._attended = 0
        try:
            return check_positions(position_ids, seen, real, batch, q_len)
        except ValueError:
            self._spans = None
            raise

    def _split(self, seen: Tensor, real: Tensor | None, columns: int, q_len: int) -> list[Span]:
        spans = []
        for start in range(0, q_len, self.chunk):
            stop = min(start + self.chunk, q_len)
            part = None if real is None else real[:, start:stop]
            filled = not self._padded and columns + stop >= self.budget.total
            spans.append(Span(start, stop, seen, part, self.budget, filled))
            seen = seen + spans[-1].count
        return spans

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Hands keys and values on; `attend`, which the attention function calls with the query, stores them.

        Raises:
            ValueError: the model's attention was changed since `retrofit`, so `attend` would never be called.
        """
        name = getattr(self._config, "_attn_implementation", None)
        if name != self._attention_name:
            raise ValueError(
                "a BoundedCache works only through the attention that retrofit set, "
                f"{self._attention_name!r}, but the model now runs {name!r}: set it back with "
                f"model.set_attn_implementation({self._attention_name!r}), or use another cache"
            )
        if self._spans is None or self._attended != layer_idx:
            raise ValueError(
                f"layer {layer_idx} stores tokens, but {self._attended} layers have attended: a BoundedCache "
                "works only in the forward call of the model that retrofit prepared"
            )
        return key_states, value_states

    @torch.no_grad()
    def attend(
        self,
        layer_index: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        hidden: Tensor | None,
        scaling: float,
    ) -> Tensor:
        """Attention of the new tokens over what each of them may see, and the layer's update.

        Args:
            layer_index: layers come in order, each once per forward call.
            query [B, Hq, Q, D]; key, value [B, Hkv, Q, D], after RoPE, not repeated.
            hidden: [B, Q, Hid], what q_proj read; needed when the policy's scorers read it.
            scaling: factor of the logits.

        Returns:
            [B, Hq, Q, D]; columns of padding are 0.
        """
        if self._spans is None:
            raise ValueError(
                "the cache was not told of this forward call: use it with the model that retrofit prepared"
            )
        assert layer_index == self._attended, f"layer {layer_index} came after {self._attended} layers"
        layer = self.layers[layer_index]
        assert isinstance(layer, BoundedLayer)
        if layer.scorer.needs_hidden and hidden is None:
            raise ValueError("the policy's scorers read hidden states, but the attention was given none")
        layer.prepare(key, value, hidden)
        outputs = []
        for span in self._spans:
            q, k, v = span.compact(query), span.compact(key), span.compact(value)
            x = None if hidden is None else span.compact(hidden)
            step = attend_by(layer, span)
            out = step(layer, layer_index, self.policy, span, q, k, v, x, scaling)
            outputs.append(span.spread(out))
            layer.columns += span.length
        self._attended += 1
        if self._attended == len(self.layers):
            last = self._spans[-1]
            self._seen = last.seen + last.count
            self._spans = None
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)

    def __deepcopy__(self, memo: dict[int, Any]) -> BoundedCache:
        """A copy with its own slots for the same model: a prompt read once can be gone on from many times."""
        for shared in (self.policy, self._config, *self.policy.scorers):
            memo[id(shared)] = shared
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        return twin

    # -------- what it holds
    def eviction_times(self, layer_index: int) -> Tensor:
        """First query that no longer sees each token, by position in each row's text: int64 [B, Hkv, T].

        NEVER = still held. T = real tokens of the longest row.

        Raises:
            ValueError: the cache was made with `record=False`.
        """
        if not self.record:
            raise ValueError(
                "this cache keeps no record of its evictions: make it with BoundedCache(model, record=True)"
            )
        layer = self.layers[layer_index]
        assert isinstance(layer, BoundedLayer)
        if layer.keys is None:
            raise ValueError("this cache has seen no token yet")
        return layer.eviction_times(self.tokens_seen)

    @property
    def tokens_per_row(self) -> Tensor:
        """int64 [B]: real tokens seen by each row."""
        return torch.zeros(0, dtype=torch.int64) if self._seen is None else self._seen.clone()

    @property
    def tokens_seen(self) -> int:
        """Real tokens seen by the longest row."""
        return 0 if self._seen is None or not self._seen.numel() else int(self._seen.max())

    @property
    def keys_held(self) -> int:
        """Most keys that a KV head holds: `min(tokens_seen, budget.total)`, where heads hold equally many."""
        if self._seen is not None and not getattr(self.layers[0], "holds_budget", True):
            return int(self.keys_per_head().max())
        return min(self.tokens_seen, self.budget.total)

    def keys_per_head(self) -> Tensor:
        """int64 [L, B, Hkv]: keys held; differs between heads only under a rule without a budget (DMS)."""
        seen = self.tokens_per_row
        return torch.stack([layer.keys_per_head(seen) for layer in self._bounded])

    def bytes_held(self, element_bytes: int | None = None) -> int:
        """Bytes of all tensors kept between two steps, counted from the tensors: all rows and layers.

        Keys, values, scores, positions, scorer state and window inputs, as allocated, whether a token is in
        them or not. Apart from it: one int64 counter per row, shared by all layers, and the eviction
        record. `element_bytes` counts keys, values and window inputs as if they had so many bytes per
        element (policies are compared at 2, whatever the run's dtype).
        """
        total = 0
        for layer in self._bounded:
            for name, tensor in layer.tensors().items():
                model_dtype = name.endswith(("keys", "values", "hidden"))
                size = element_bytes if model_dtype and element_bytes else tensor.element_size()
                total += tensor.numel() * size
        return total

    def peak_bytes(self) -> int:
        """`bytes_held` at its highest since allocation: more than now after a prompt was held whole.

        The tensors of a step in progress (logits, the chunk itself) are not counted.
        """
        held = [sum(t.nbytes for t in layer.tensors().values()) for layer in self._bounded]
        return sum(
            max(now, getattr(layer, "peak", 0)) for now, layer in zip(held, self._bounded, strict=True)
        )

    # -------- transformers' interface
    @property
    def batch_size(self) -> int:
        return -1 if self._seen is None else self._seen.shape[0]

    def reset(self, batch_size: int | None = None) -> None:
        """Forgets the text. The allocation is kept and serves the next batch if that has no more rows.

        `batch_size`: rows of the next batch, if known; a larger one gives the allocation back now.
        """
        for layer in self._bounded:
            allocated = layer.tensors()
            if batch_size is not None and allocated and batch_size > allocated["keys"].shape[0]:
                layer.release()
            else:
                layer.reset()
        self._seen, self._padded, self._spans, self._attended = None, False, None, 0

    def resume(self, seen: Tensor) -> None:
        """Its layers were filled by hand with what `seen` int64 [B] real tokens of each row left."""
        self._seen, self._padded, self._spans, self._attended = seen, False, None, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        for layer in self._bounded:
            layer.reorder_cache(beam_idx)
        self._select_rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._select_rows(indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        if self._seen is not None:
            self._seen = self._seen.repeat_interleave(repeats)

    def _select_rows(self, index: Tensor) -> None:
        if self._seen is not None:
            self._seen = self._seen.index_select(0, index.to(self._seen.device))
