"""A whole retention policy: what each layer of a model keeps (METHOD.md, sections 1, 2, 5)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kvpop_lightning.policy import memory
from kvpop_lightning.policy.budget import NEVER, Budget
from kvpop_lightning.policy.decay import spread_decay
from kvpop_lightning.policy.eviction import eviction_time
from kvpop_lightning.policy.own_attention import OwnAttention
from kvpop_lightning.policy.priority import priority_at
from kvpop_lightning.policy.ragged import RaggedRule, closing_times
from kvpop_lightning.policy.scorers import Scorer, build_scorer
from kvpop_lightning.policy.stepwise import StepwiseRule
from kvpop_lightning.policy.stepwise_parallel import eviction_times as stepwise_eviction_times

Decay = float | Sequence[float] | Sequence[Sequence[float]] | Tensor


class RetentionPolicy(nn.Module):
    """Budget, one scorer per layer, decay; `retrofit` attaches it to a model as `model.kvpop`.

    Whatever dtype the model is cast to, the scorers stay in float32 or better and the decay in float64
    (METHOD.md, section 6): casts to half precision move devices only.

    Args:
        name: policy name, as in tables and files.
        budget: keys per KV head; where bytes were matched, the lowered one.
        scorers: one per layer, of one type and shape.
        decay: gamma in (0, 1]; a number, one per KV head, or [layers, KV heads]. 1 = no recency bias.
        decay_step: delta, tokens per decay step (>= 1).

    Attributes:
        decay: float64 buffer [layers, KV heads].

    Raises:
        ValueError: decay or decay_step out of range, a delay longer than the window.
    """

    decay: Tensor

    def __init__(
        self, name: str, budget: Budget, scorers: Sequence[Scorer], *, decay: Decay, decay_step: int
    ) -> None:
        super().__init__()
        self.name, self.budget, self.decay_step = name, budget, decay_step
        self.scorers = nn.ModuleList(scorers)
        first = scorers[0]
        if first.delay > budget.window:
            raise ValueError(
                f"scorer.delay {first.delay} is longer than budget.window {budget.window}: lower it"
            )
        if isinstance(decay_step, bool) or not isinstance(decay_step, int) or decay_step < 1:
            raise ValueError(
                f"policy.decay_step must be a whole number of tokens, at least 1, got {decay_step!r}"
            )
        given = torch.as_tensor(decay, dtype=torch.float64, device="cpu").detach()
        shape = (len(scorers), first.num_heads)
        if tuple(given.shape) not in ((), shape[1:], shape):
            raise ValueError(
                f"policy.decay must be a number, one per KV head ({shape[1]}) or [layers, KV heads] {shape}, "
                f"got shape {tuple(given.shape)}"
            )
        if not bool(((given > 0) & (given <= 1)).all()):
            raise ValueError(f"policy.decay must lie in (0, 1] (1 = no decay), got {given.tolist()}")
        self.register_buffer("decay", given.expand(shape).clone().to(torch.get_default_device()))

    @classmethod
    def build(
        cls,
        name: str,
        budget: Budget,
        scorer: str,
        *,
        num_layers: int,
        num_heads: int,
        head_dim: int,
        hidden_size: int,
        decay: Decay,
        decay_depth: float = 0.0,
        decay_heads: float = 0.0,
        decay_step: int = 64,
        match_bytes: bool = False,
        seed: int = 0,
        **scorer_options: Any,
    ) -> RetentionPolicy:
        """A policy with fresh scorers.

        Args:
            scorer: type for `build_scorer`, which also takes `scorer_options`.
            num_heads: KV heads.
            decay_depth, decay_heads: how a decay given as one number spreads over layers and heads, see
                `spread_decay`.
            match_bytes: lower `budget.topk` by what the scorer's memory costs (METHOD.md, section 5).
            seed: of the initial weights and of the random rule.
        """
        generator = torch.Generator().manual_seed(seed)
        scorers = [
            build_scorer(
                scorer,
                num_heads=num_heads,
                head_dim=head_dim,
                hidden_size=hidden_size,
                window=budget.window,
                layer=layer,
                seed=seed,
                generator=generator,
                **scorer_options,
            )
            for layer in range(num_layers)
        ]
        if match_bytes:
            budget = memory.equal_bytes_budget(budget, scorers[0])
        if decay_depth or decay_heads:
            decay = spread_decay(decay, num_layers, num_heads, depth=decay_depth, heads=decay_heads)
        return cls(name, budget, scorers, decay=decay, decay_step=decay_step)

    @property
    def needs_hidden(self) -> bool:
        """True when the scorers read the layers' hidden states (what q_proj reads)."""
        return self.layer_scorer(0).needs_hidden

    def layer_scorer(self, layer: int) -> Scorer:
        """`scorers[layer]`, typed."""
        scorer = self.scorers[layer]
        assert isinstance(scorer, Scorer)
        return scorer

    def score(
        self,
        layer: int,
        key: Tensor,
        value: Tensor,
        hidden: Tensor | None,
        *,
        position: Tensor | None,
        document_ids: Tensor | None,
    ) -> Tensor:
        """Scores of whole rows in one layer, [B, Hkv, T] float32 (float64 for float64 scorers), in nats.

        key, value [B, Hkv, T, D] (key after RoPE), hidden [B, T, Hid] or None, position int64 [B, T],
        document_ids int64 [B, T] (-1 = padding) or None. Differentiable in the scorer's parameters only.
        """
        scored: Tensor = self.scorers[layer](key, value, hidden, position=position, document_ids=document_ids)
        return scored

    def priority(self, layer: int, score: Tensor, position: Tensor) -> Tensor:
        """Static priorities, float64, of `score` [B, Hkv, N] at `position` int64 [B, N] or [B, Hkv, N]."""
        return priority_at(score, position, decay=self.decay[layer], decay_step=self.decay_step)

    def eviction_times(
        self,
        layer: int,
        key: Tensor,
        value: Tensor,
        hidden: Tensor | None,
        *,
        position: Tensor,
        document_ids: Tensor | None,
        query: Tensor | None = None,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(eviction time int64, score, priority float64), each [B, Hkv, T], of whole rows in one layer.

        Arguments as for `score`. The decisions carry no gradient; score and priority do. A stepwise rule also
        needs query [B, Hq, T, D] after RoPE and takes `scale` (None = D ** -0.5); it has no scores or
        priorities (None), and runs the row query by query (`policy/stepwise.py`).
        """
        rule = self.layer_scorer(layer)
        if isinstance(rule, OwnAttention) and rule.holds_all:
            return torch.full(key.shape[:3], NEVER, dtype=torch.int64, device=key.device), None, None
        row_times = getattr(rule, "row_times", None)
        if row_times is not None:  # a stepwise rule that needs no attention to decide
            return row_times(hidden, self.budget, document_ids), None, None
        if isinstance(rule, StepwiseRule):
            if query is None:
                raise ValueError(f"{self.name} decides from attention: eviction_times needs query=")
            scale = query.shape[-1] ** -0.5 if scale is None else scale
            times = stepwise_eviction_times(
                rule, self.budget, query, key, value, document_ids=document_ids, scale=scale
            )
            return times, None, None
        if isinstance(rule, RaggedRule):
            assert hidden is not None
            window = rule.protects(self.budget)
            return closing_times(rule.decide(hidden), window, document_ids), None, None
        score = self.score(layer, key, value, hidden, position=position, document_ids=document_ids)
        priority = self.priority(layer, score, position)
        return eviction_time(priority.detach(), self.budget, document_ids=document_ids), score, priority

    def bytes_per_sequence(self, element_bytes: int = memory.ACCOUNTING_BYTES, real_bytes: int = 4) -> int:
        """Bytes the bounded cache holds for one sequence, all layers; see `memory.bytes_per_sequence`."""
        return memory.bytes_per_sequence(
            self.budget,
            self.layer_scorer(0),
            num_layers=len(self.scorers),
            element_bytes=element_bytes,
            real_bytes=real_bytes,
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-able description without weights; `from_dict` builds an equal policy with fresh weights."""
        return {
            "name": self.name,
            "budget": {"sink": self.budget.sink, "window": self.budget.window, "topk": self.budget.topk},
            "decay": self.decay.tolist(),
            "decay_step": self.decay_step,
            "scorers": [self.layer_scorer(layer).to_dict() for layer in range(len(self.scorers))],
        }

    @classmethod
    def from_dict(cls, description: dict[str, Any]) -> RetentionPolicy:
        """The inverse of `to_dict`; load the weights with `load_state_dict`.

        Raises:
            ValueError: a field is missing or out of range.
        """
        missing = {"name", "budget", "decay", "decay_step", "scorers"} - description.keys()
        if missing:
            raise ValueError(
                f"this policy description lacks {', '.join(sorted(missing))}: write it with to_dict"
            )
        return cls(
            description["name"],
            Budget(**description["budget"]),
            [build_scorer(**scorer) for scorer in description["scorers"]],
            decay=description["decay"],
            decay_step=description["decay_step"],
        )

    def extra_repr(self) -> str:
        return f"{self.name}, {self.budget}, decay_step={self.decay_step}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RetentionPolicy:
        """`.to(...)`, `.half()`, `.cuda()`: scorers never fall below float32, the decay stays float64."""

        def keep_precision(x: Tensor) -> Tensor:
            changed = fn(x)
            lowered = changed.dtype in (torch.float16, torch.bfloat16)
            if (
                x.is_floating_point()
                and changed.dtype != x.dtype
                and (lowered or x is self._buffers["decay"])
            ):
                return x.to(changed.device)
            return changed

        super()._apply(keep_precision, recurse)
        return self
