"""SnapKV: the prompt is cut once, by what its last queries attend (Li et al., 2024; docs/baselines.md)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

from kvpop_lightning.baselines.registry import PolicySpec, register
from kvpop_lightning.policy.budget import Budget
from kvpop_lightning.policy.scorers import register_scorer
from kvpop_lightning.policy.stepwise import Held, Moment, StepwiseRule


class SnapKV(StepwiseRule):
    """After the prompt: mean attention of its last `observed` queries, mean over the group, average pooling.

    The newest keys of the prompt are kept (`observed` of them, half the budget at most), then the best of the
    rest until `total - 1` are held. From there on each KV head drops the key that its newest queries attend
    least (TOVA per head) or have attended least since the window (H2O). A prompt shorter than the budget is
    not cut. The prompt itself is held whole: its first tokens are exempt from the budget (METHOD.md, section
    7).

    Args:
        prompt_length: tokens of every text that are its prompt.
        observed: queries whose attention counts.
        pool: width of the average pooling over positions, odd.
        decode: `tova_head` or `h2o`.
    """

    kind = "snapkv"

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        hidden_size: int,
        *,
        prompt_length: int = 256,
        observed: int = 64,
        pool: int = 5,
        decode: str = "tova_head",
    ) -> None:
        super().__init__(num_heads, head_dim, hidden_size)
        if prompt_length < 1 or observed < 1 or pool < 1 or pool % 2 == 0:
            raise ValueError(
                "snapkv: prompt_length and observed must be at least 1 and pool odd, "
                f"got {prompt_length}, {observed}, {pool}"
            )
        if decode not in ("tova_head", "h2o"):
            raise ValueError(f"snapkv: decode must be tova_head or h2o, got {decode!r}")
        self.prompt_length, self.observed, self.pool, self.decode = prompt_length, observed, pool, decode

    def options(self) -> dict[str, Any]:
        return {
            "prompt_length": self.prompt_length,
            "observed": self.observed,
            "pool": self.pool,
            "decode": self.decode,
        }

    def protected(self, budget: Budget) -> tuple[int, int]:
        return 0, 1

    def prompt_tokens(self, budget: Budget) -> int:
        return self.prompt_length if self.prompt_length >= budget.total else 0

    def new_notes(self, batch: int, heads: int, slots: int, like: Tensor) -> dict[str, Tensor]:
        return {"attention": like.new_zeros(batch, heads, slots)}

    def observe(self, held: Held, moment: Moment) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        before, now = held.notes["attention"], moment.probability.mean(2)
        place = moment.position[:, None, None]
        in_prompt = place < self.prompt_length
        summed = torch.where(place >= self.prompt_length - self.observed, before + now, before)
        later = now if self.decode == "tova_head" else summed
        return {"attention": torch.where(in_prompt, summed, later)}, {}

    def value_of(self, held: Held, newest: Tensor) -> Tensor:
        return held.notes["attention"]

    def keep_of_prompt(self, held: Held, budget: Budget) -> Tensor:
        length, wanted = self.prompt_length, budget.total - 1
        recent = min(self.observed, budget.total // 2, wanted)
        old = length - recent
        score = held.notes["attention"][..., :old]
        pooled = avg_pool1d(score.flatten(0, 1)[:, None], self.pool, 1, self.pool // 2)[:, 0].view_as(score)
        # The newest among equals: of a reversed row, a stable sort puts them first.
        order = pooled.flip(-1).argsort(dim=-1, descending=True, stable=True)[..., : wanted - recent]
        keep = torch.zeros_like(held.notes["attention"], dtype=torch.bool)
        keep.scatter_(-1, old - 1 - order, True)
        keep[..., old:length] = True
        return keep


register_scorer("snapkv", SnapKV, ("prompt_length", "observed", "pool", "decode"))
register(PolicySpec("snapkv", "snapkv", "prompt cut by its last queries' attention, then TOVA per head"))
