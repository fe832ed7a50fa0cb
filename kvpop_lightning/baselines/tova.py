"""TOVA: drop the held key that the newest query attends least (Oren et al., 2024; docs/baselines.md)."""

from __future__ import annotations

from torch import Tensor

from kvpop_lightning.baselines.registry import PolicySpec, register
from kvpop_lightning.policy.budget import Budget
from kvpop_lightning.policy.scorers import register_scorer
from kvpop_lightning.policy.stepwise import Held, Moment, StepwiseRule


class TOVA(StepwiseRule):
    """Attention of the newest query, averaged over all query heads of the layer: one score per position.

    Every KV head of a layer holds the same positions. Neither sinks nor a window are protected; the newest
    key is never the victim. `budget` counts in total only.
    """

    kind = "tova"
    layer_wide = True

    def protected(self, budget: Budget) -> tuple[int, int]:
        return 0, 1

    def new_notes(self, batch: int, heads: int, slots: int, like: Tensor) -> dict[str, Tensor]:
        return {"attention": like.new_zeros(batch, self.position_heads(heads), slots)}

    def observe(self, held: Held, moment: Moment) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        if self.layer_wide:
            return {"attention": moment.probability.mean((1, 2)).unsqueeze(1)}, {}
        return {"attention": moment.probability.mean(2)}, {}

    def value_of(self, held: Held, newest: Tensor) -> Tensor:
        return held.notes["attention"]


class TOVAPerHead(TOVA):
    """The mean over the query heads that share a KV head: each KV head chooses for itself."""

    kind = "tova_head"
    layer_wide = False


register_scorer("tova", TOVA)
register_scorer("tova_head", TOVAPerHead)
register(PolicySpec("tova", "tova", "least attended by the newest query goes, layer-wide"))
register(PolicySpec("tova_head", "tova_head", "least attended by the newest query goes, per KV head"))
