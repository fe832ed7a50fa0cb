"""Settings of the policies that learn a gate through a soft mask: `dms`, `dmc`, `retention_gate` (METHOD.md,
section 8).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GateConfig:
    width: int | None = None
    """SiLU units of the gate per KV head; 0 = a linear map of the hidden state (DMS's authors), null = as
    many parameters as the MLP scorer that `policy.scorer` describes."""
    source: str = "hidden"
    """dms, dmc: `hidden` = a map of the hidden state; `channel` = a channel borrowed from query (and key),
    which has no parameters of its own: the base learns it (`trainer.base=full`).
    """


@dataclass(frozen=True)
class GateTrainingConfig:
    reduction: float | None = None
    """dms, dmc: factor F that the cache shrinks by; 1 - 1/F of the keys are to be closed. null = so that a
    text of `eval.reference_length` tokens leaves `policy.budget`'s keys on average.
    """
    ramp: float | None = None
    """dms, dmc: steps in which F rises by 1, starting at 1. null = 34 (the authors), or fewer so that F is
    reached after four fifths of `trainer.max_steps`.
    """
    weight: float = 10.0
    """Weight of the compression loss (dms, dmc) or the capacity loss (retention_gate) beside the KL. At 1 DMS
    stops short of a target of 90 % closed keys, where closing more costs more KL (docs/results.md)."""
    lr: float | None = None
    """Rate of the gates, constant. null = 3e-5 for a linear map (DMS's authors), 1e-3 for units."""
