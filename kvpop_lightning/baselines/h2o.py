"""H2O: recent keys and heavy hitters by accumulated attention (Zhang et al., 2023; docs/baselines.md)."""

from __future__ import annotations

from torch import Tensor

from kvpop_lightning.baselines.registry import PolicySpec, register
from kvpop_lightning.policy.budget import Budget
from kvpop_lightning.policy.scorers import register_scorer
from kvpop_lightning.policy.stepwise import Held, Moment, StepwiseRule


class H2O(StepwiseRule):
    """Attention summed over all queries since the key came, mean over the group; half the budget is recent.

    The `total // 2` newest keys are protected, no sinks. `budget` counts in total only. An old key has been
    seen by more queries and so outranks a new one: the known defect, kept here and mended in `h2o_mean`.
    """

    kind = "h2o"

    def protected(self, budget: Budget) -> tuple[int, int]:
        return 0, budget.total // 2

    def new_notes(self, batch: int, heads: int, slots: int, like: Tensor) -> dict[str, Tensor]:
        return {"attention": like.new_zeros(batch, heads, slots)}

    def observe(self, held: Held, moment: Moment) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return {"attention": held.notes["attention"] + moment.probability.mean(2)}, {}

    def value_of(self, held: Held, newest: Tensor) -> Tensor:
        return held.notes["attention"]


class H2OMean(H2O):
    """The sum divided by the number of queries that saw the key: those from its own to the newest."""

    kind = "h2o_mean"

    def value_of(self, held: Held, newest: Tensor) -> Tensor:
        queries = (newest[:, None, None] - held.position + 1).clamp(min=1)
        return held.notes["attention"] / queries


register_scorer("h2o", H2O)
register_scorer("h2o_mean", H2OMean)
register(PolicySpec("h2o", "h2o", "recent half and heavy hitters by accumulated attention"))
register(PolicySpec("h2o_mean", "h2o_mean", "H2O by mean attention per query that saw the key"))
