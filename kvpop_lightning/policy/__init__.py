"""The policy's mathematics, on plain tensors: what to keep, what to drop, how to learn it (METHOD.md, 1-5).

Names are imported on first use: `Budget` alone must not cost an import of torch, and scorers import from it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpop_lightning.policy.budget import NEVER, Budget
    from kvpop_lightning.policy.decisions import Decisions, teacher_decisions
    from kvpop_lightning.policy.documents import (
        DocumentLayout,
        check_document_ids,
        document_bounds,
        document_ids_from,
        document_layout,
        position_in_document,
    )
    from kvpop_lightning.policy.eviction import eviction_time
    from kvpop_lightning.policy.eviction_reference import eviction_time_reference, running_kth_best_reference
    from kvpop_lightning.policy.loss import (
        LossParts,
        boundary_accuracy,
        boundary_loss,
        regression_loss,
        sample_queries,
        student_score,
    )
    from kvpop_lightning.policy.normalizer import dense_log_normalizer, normalizer_inflation
    from kvpop_lightning.policy.order_statistics import running_kth_best
    from kvpop_lightning.policy.priority import priority_at, static_priority
    from kvpop_lightning.policy.retention import RetentionPolicy
    from kvpop_lightning.policy.target import future_attention_target
    from kvpop_lightning.policy.target_reference import future_attention_target_reference

_MODULE_OF = {
    "NEVER": "budget",
    "Budget": "budget",
    "Decisions": "decisions",
    "DocumentLayout": "documents",
    "LossParts": "loss",
    "RetentionPolicy": "retention",
    "boundary_accuracy": "loss",
    "boundary_loss": "loss",
    "check_document_ids": "documents",
    "dense_log_normalizer": "normalizer",
    "document_bounds": "documents",
    "document_ids_from": "documents",
    "document_layout": "documents",
    "eviction_time": "eviction",
    "eviction_time_reference": "eviction_reference",
    "future_attention_target": "target",
    "future_attention_target_reference": "target_reference",
    "normalizer_inflation": "normalizer",
    "position_in_document": "documents",
    "priority_at": "priority",
    "regression_loss": "loss",
    "running_kth_best": "order_statistics",
    "running_kth_best_reference": "eviction_reference",
    "sample_queries": "loss",
    "static_priority": "priority",
    "student_score": "loss",
    "teacher_decisions": "decisions",
}

__all__ = [
    "NEVER",
    "Budget",
    "Decisions",
    "DocumentLayout",
    "LossParts",
    "RetentionPolicy",
    "boundary_accuracy",
    "boundary_loss",
    "check_document_ids",
    "dense_log_normalizer",
    "document_bounds",
    "document_ids_from",
    "document_layout",
    "eviction_time",
    "eviction_time_reference",
    "future_attention_target",
    "future_attention_target_reference",
    "normalizer_inflation",
    "position_in_document",
    "priority_at",
    "regression_loss",
    "running_kth_best",
    "running_kth_best_reference",
    "sample_queries",
    "static_priority",
    "student_score",
    "teacher_decisions",
]


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
