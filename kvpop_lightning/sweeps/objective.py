"""What a trial is judged by."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

TABLE_METRICS = (
    "kl",
    "top1",
    "perplexity",
    "nll",
    "retained_mass",
    "boundary_balanced_accuracy",
    "rank_correlation",
    "bytes_held",
    "bytes_accounted",
)
"""Fields of an entry of the comparison table (`evaluation.table`)."""
METRICS = (*TABLE_METRICS, "seconds")
"""What a sweep may optimise; `seconds` is the training's wall time."""


@dataclass(frozen=True)
class Objective:
    """The trained policy on held-out rows, at one budget.

    Args:
        budget: total keys per KV head; None = the point's own sinks + window + topk.
        rows: held-out rows.
        metrics: names out of `METRICS`, in the order of the study's directions.
    """

    budget: int | None
    rows: int
    metrics: tuple[str, ...]
    more_budgets: tuple[int, ...] = ()
    """Further budgets that the same policy is measured at; their values are called `kl@64`."""

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "metrics": list(self.metrics), "more_budgets": list(self.more_budgets)}

    @classmethod
    def from_dict(cls, description: dict[str, Any]) -> Objective:
        return cls(
            description["budget"],
            description["rows"],
            tuple(description["metrics"]),
            tuple(description.get("more_budgets", ())),
        )
