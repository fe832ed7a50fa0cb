"""Attention sum with exponential averaging: what is attended now counts more than what was attended once."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvpop_lightning.baselines.registry import PolicySpec, register
from kvpop_lightning.policy.scorers import register_scorer
from kvpop_lightning.policy.stepwise import Held, Moment, StepwiseRule


class AttentionEMA(StepwiseRule):
    """`S_j <- averaging * S_j + p_ij` at every query i, mean over the group; lowest sum goes.

    KVpop's sinks and window are protected. `averaging` 0 looks at the newest query alone (TOVA per head), 1
    is H2O's plain sum.
    """

    kind = "attention_ema"

    def __init__(self, num_heads: int, head_dim: int, hidden_size: int, *, averaging: float = 0.98) -> None:
        super().__init__(num_heads, head_dim, hidden_size)
        if not 0 <= averaging <= 1:
            raise ValueError(f"attention_ema: averaging must lie in [0, 1], got {averaging}")
        self.averaging = averaging

    def options(self) -> dict[str, Any]:
        return {"averaging": self.averaging}

    def new_notes(self, batch: int, heads: int, slots: int, like: Tensor) -> dict[str, Tensor]:
        return {"attention": like.new_zeros(batch, heads, slots)}

    def observe(self, held: Held, moment: Moment) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return {"attention": self.averaging * held.notes["attention"] + moment.probability.mean(2)}, {}

    def value_of(self, held: Held, newest: Tensor) -> Tensor:
        return held.notes["attention"]


register_scorer("attention_ema", AttentionEMA, ("averaging",))
register(PolicySpec("attention_ema", "attention_ema", "attention sum with exponential averaging"))
