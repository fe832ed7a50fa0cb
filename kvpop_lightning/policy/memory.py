"""Bytes that one sequence holds in the bounded cache, and budgets of equal bytes (METHOD.md, section 5).

Policies are compared at equal bytes, always counted at 2 bytes per cached element whatever the run's dtype:
the scorer's state is paid for in long-range slots.
"""

from __future__ import annotations

from kvpop_lightning.policy.budget import Budget
from kvpop_lightning.policy.scorers import Scorer
from kvpop_lightning.policy.stepwise import StepwiseRule

ACCOUNTING_BYTES = 2
"""Bytes per element of keys, values and hidden states for equal-bytes comparisons."""
POSITION_BYTES = 8


def bytes_per_sequence(
    budget: Budget,
    scorer: Scorer,
    *,
    num_layers: int,
    element_bytes: int = ACCOUNTING_BYTES,
    real_bytes: int = 4,
) -> int:
    """Bytes of all layers' cache for one sequence:

        layers * (Hkv * ((s + w + k) * 2 D b + 4 k + 8 k + 4 w + state) + window inputs).

    These are exactly the tensors a layer of the bounded cache holds: keys and values [Hkv, s + w + k, D]; of
    each long-range slot its raw score (float32) and position (int64), from which the float64 priority is
    computed anew whenever two are compared, so that it costs 4 + 8 bytes and loses nothing; the scores of the
    w tokens that wait in the window; the scorer's state; and, for a delayed scorer that reads hidden states,
    those of the window [w, Hid], once per layer.

    Args:
        element_bytes: b, size of a cached key, value or hidden element.
        real_bytes: size of a score and of a number of the state (4; 8 where the scorer works in float64).

    A stepwise rule has all its s + w + k slots alike: `2 Hkv D b`, and per slot the positions and notes of
    its own (`StepwiseRule.slot_bytes`), beside its state of the text.
    """
    if isinstance(scorer, StepwiseRule):
        slot = 2 * scorer.num_heads * scorer.head_dim * element_bytes + scorer.slot_bytes(real_bytes)
        return num_layers * (budget.total * slot + scorer.text_bytes(real_bytes))
    per_head = (
        budget.total * 2 * scorer.head_dim * element_bytes
        + budget.topk * (real_bytes + POSITION_BYTES)
        + budget.window * real_bytes
        + scorer.state_bytes(real_bytes)
    )
    return num_layers * (scorer.num_heads * per_head + window_input_bytes(budget, scorer, element_bytes))


def window_input_bytes(budget: Budget, scorer: Scorer, element_bytes: int = ACCOUNTING_BYTES) -> int:
    """Bytes per layer of the hidden states kept until a delayed scorer reads them; 0 for all others."""
    if scorer.delay == 0 or not scorer.needs_hidden:
        return 0
    return budget.window * scorer.hidden_size * element_bytes


def dense_bytes_per_sequence(
    tokens: int, *, num_layers: int, num_heads: int, head_dim: int, element_bytes: int = ACCOUNTING_BYTES
) -> int:
    """Bytes of a full cache of `tokens` keys and values."""
    return num_layers * num_heads * tokens * 2 * head_dim * element_bytes


def equal_bytes_budget(budget: Budget, scorer: Scorer) -> Budget:
    """The budget whose bytes, with this scorer's state, do not exceed `budget`'s with a stateless one.

    `topk` falls by `ceil((state + window inputs) / (2 D b))` at b = 2: by `ceil(4 (d_m d_v + d_m + 1) / (4
    D))` for an mLSTM on keys and values; one that reads hidden states also pays for those it keeps, shared by
    the layer's heads.

    Raises:
        ValueError: nothing would be left for the long range.
    """
    key_bytes = scorer.num_heads * 2 * scorer.head_dim * ACCOUNTING_BYTES
    if isinstance(scorer, StepwiseRule):
        plain = budget.total * key_bytes + scorer.num_heads * (
            budget.topk * (4 + POSITION_BYTES) + budget.window * 4
        )
        total = min(budget.total, (plain - scorer.text_bytes()) // (key_bytes + scorer.slot_bytes()))
        return _without(budget, budget.total - total, scorer)
    extra = scorer.num_heads * scorer.state_bytes() + window_input_bytes(budget, scorer)
    slots = -(-extra // key_bytes)  # rounded up
    return _without(budget, slots, scorer)


def _smaller(scorer: Scorer) -> str:
    """The keys that make this scorer's memory smaller, as part of a sentence."""
    if scorer.kind == "mlstm":
        return ", lower policy.scorer.memory_dim or policy.scorer.value_dim, take policy.scorer.inputs=kv"
    return ", take policy.scorer.inputs=kv" if scorer.kind in ("linear", "mlp") else ""


def _without(budget: Budget, slots: int, scorer: Scorer) -> Budget:
    """`budget` with so many long-range slots less."""
    if slots >= budget.topk:
        raise ValueError(
            f"policy.budget.topk {budget.topk} cannot pay for the {scorer.kind} scorer's memory of {slots} "
            f"keys per head: raise it (eval.budgets in a comparison){_smaller(scorer)}, or set "
            "policy.equal_bytes=false"
        )
    return Budget(budget.sink, budget.window, budget.topk - slots)
