"""One held-out row: the dense model's answer, computed once, and each policy's record against it.

Rows are the outer loop of an evaluation and policies the inner one, so the dense forward, the target and the
log-probabilities of a row exist once and are dropped before the next row.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from kvpop_lightning.evaluation.metrics import (
    TeacherLogits,
    TokenMetrics,
    decision_accuracy,
    dense_attention_rows,
    retained_mass,
    self_metrics,
    spearman,
    supervised_positions,
    teacher_logits,
    token_metrics,
)
from kvpop_lightning.evaluation.ragged import dense_below, held_at_end
from kvpop_lightning.models import LayerPrefix, after_prefix, dense, observe
from kvpop_lightning.policy import (
    Budget,
    Decisions,
    document_layout,
    future_attention_target,
    static_priority,
    teacher_decisions,
)
from kvpop_lightning.policy.own_attention import OwnAttention
from kvpop_lightning.training.forward import Batch, last_hidden, output_head

Record = dict[str, Any]


@dataclass(frozen=True)
class RowSettings:
    """What decides a row's values beside model, data and policy; part of every stored record's key."""

    first_position: int
    """Metrics count row positions from here on, in tokens."""
    window: int
    """Protected window w of the target."""
    aggregation: str = "max"
    """Of the target over the query heads of a group."""
    boundary: str = "cutoff"
    """Boundary token of the decisions (METHOD.md, section 4)."""
    mass_queries: int = 64
    """Evenly spaced evaluated queries at which the retained attention is measured."""
    position_stride: int = 1
    """Every n-th position is measured (the output head and the KL cost as much as a fifth of a forward)."""


@dataclass
class DenseRow:
    """The dense model on one row (L layers, T tokens, P evaluated positions, N mass queries)."""

    batch: Batch
    positions: Tensor
    """int64 [P], evaluated row positions."""
    next_token: Tensor
    """int64 [P]."""
    logits: TeacherLogits
    metrics: TokenMetrics
    """The dense model against itself: kl 0, top1 1 and its own negative log-likelihood."""
    target: Tensor
    """float32 [1, L * Hkv, T], undecayed future-attention target in nats, 0 where invalid."""
    valid: Tensor
    """bool [1, L * Hkv, T]."""
    mass_positions: Tensor
    """int64 [N]."""
    probability: Tensor
    """float32 [L, Hq, N, T], dense attention of those queries."""
    layers: int
    hidden: Tensor
    """[1, S, Hid], the dense model's last hidden states of the first S tokens."""
    prefix: list[LayerPrefix] = field(default_factory=list)
    """What each layer computed for those S tokens; empty when S = 0."""
    decisions: dict[Any, Decisions] = field(default_factory=dict)
    """Teacher's decisions by (decay, decay step, budget), shared by the policies that have them in common."""

    @property
    def document_ids(self) -> Tensor:
        return self.batch["document_ids"]

    def prefix_of(self, tokens: int) -> list[LayerPrefix]:
        """The layers' prefix cut to `tokens` (or S) tokens; empty = nothing is known."""
        length = min(tokens, self.hidden.shape[1])
        return [
            LayerPrefix(
                p.query[:, :, :length], p.key[:, :, :length], p.value[:, :, :length], p.hidden[:, :length]
            )
            for p in self.prefix
            if length
        ]

    def layer_targets(self) -> Tensor:
        """[L, 1, Hkv, T], as the oracle takes them."""
        return self.target.unflatten(1, (self.layers, -1)).transpose(0, 1)


def _head_weights(model: nn.Module) -> tuple[Tensor, Tensor | None]:
    head: Any = output_head(model)
    return head.weight, getattr(head, "bias", None)


def _mass_queries(positions: Tensor, wanted: int, row_elements: int, limit_bytes: int) -> Tensor:
    """Evenly spaced positions; fewer than `wanted` if their probabilities would not fit in `limit_bytes`."""
    count = max(1, min(wanted, positions.numel(), limit_bytes // (4 * row_elements)))
    pick = torch.linspace(0, positions.numel() - 1, count, dtype=torch.float64).round().long()
    return positions[pick.to(positions.device)]


@torch.no_grad()
def dense_row(
    model: nn.Module,
    batch: Batch,
    settings: RowSettings,
    *,
    chunk: int = 128,
    limit_bytes: int = 1 << 29,
    prefix_tokens: int = 0,
) -> DenseRow:
    """One dense forward of a row and all that policies are compared with.

    Args:
        model: a retrofitted model in evaluation mode; it runs dense here.
        batch: one row with a batch dimension, on the model's device.
        chunk: positions whose logits exist at once.
        limit_bytes: most bytes kept for the log-probabilities, as many again for the attention rows and for
            the prefix.
        prefix_tokens: first tokens of the row whose activations are kept, so that policies of at least as
            many keys need not compute them again (`policy_record(reuse_prefix=True)`); fewer if they do not
            fit.

    Raises:
        ValueError: the row has no supervised position from `settings.first_position` on.
    """
    document = batch["document_ids"][0]
    positions = supervised_positions(batch["loss_mask"][0], document, settings.first_position)
    positions = positions[:: settings.position_stride]
    if positions.numel() == 0:
        raise ValueError(
            f"row {int(batch['row'][0])} has no supervised position from token {settings.first_position} on: "
            "lower eval.first_position or use longer documents"
        )
    targets: list[tuple[Tensor, Tensor]] = []
    probabilities: list[Tensor] = []
    mass_positions = positions
    prefix: list[LayerPrefix] = []
    length = min(prefix_tokens, document.numel() - 1)

    def keep(seen: Any) -> None:
        nonlocal mass_positions, length
        targets.append(
            future_attention_target(
                seen.query,
                seen.key,
                window=settings.window,
                document_ids=seen.document_ids,
                aggregation=settings.aggregation,
                scale=seen.scale,
                backend=seen.target_backend,
            )
        )
        if not probabilities:
            size = len(seen.query[0]) * document.numel() * int(model.config.num_hidden_layers)  # type: ignore
            mass_positions = _mass_queries(positions, settings.mass_queries, size, limit_bytes)
            token_bytes = sum(t[0].nbytes for t in (seen.query, seen.key, seen.value, seen.hidden))
            token_bytes = token_bytes * int(model.config.num_hidden_layers) // document.numel()  # type: ignore
            length = min(length, limit_bytes // token_bytes)
        if length:
            prefix.append(
                LayerPrefix(  # copies: a view would keep the whole row alive
                    seen.query[:, :, :length].clone(),
                    seen.key[:, :, :length].clone(),
                    seen.value[:, :, :length].clone(),
                    seen.hidden[:, :length].clone(),
                )
            )
        probabilities.append(
            dense_attention_rows(
                seen.query[0], seen.key[0], mass_positions, scale=seen.scale, document_ids=document
            )
        )

    with dense(model), observe(model, keep):
        last = last_hidden(model, batch)
    hidden = last[0, positions]
    weight, bias = _head_weights(model)
    logits = teacher_logits(hidden, weight, bias, chunk=chunk, keep_bytes=limit_bytes)
    next_token = batch["input_ids"][0, positions + 1]
    return DenseRow(
        batch=batch,
        positions=positions,
        next_token=next_token,
        logits=logits,
        metrics=self_metrics(logits, next_token, weight, bias, chunk=chunk),
        target=torch.cat([t for t, _ in targets], 1),
        valid=torch.cat([v for _, v in targets], 1),
        mass_positions=mass_positions,
        probability=torch.stack(probabilities),
        layers=len(targets),
        hidden=last[:, :length].clone(),
        prefix=prefix,
    )


def dense_record(row: DenseRow) -> Record:
    """The record of the policy `full`: the dense model is its own teacher."""
    heads = row.probability.shape[1]
    return {
        "row": int(row.batch["row"][0]),
        "kl": 0.0,
        "top1": 1.0,
        "nll": row.metrics.nll,
        "positions": row.metrics.positions,
        "retained_mass": torch.ones(row.layers, heads),
    }


def _decisions(row: DenseRow, policy: Any, settings: RowSettings) -> Decisions:
    """The teacher's keep-or-drop decisions under the policy's own decay and budget, at evaluated queries."""
    decay = torch.as_tensor(policy.decay, dtype=torch.float64, device=row.target.device).flatten()
    budget: Budget = policy.budget
    key = (tuple(decay.tolist()), policy.decay_step, budget)
    if key not in row.decisions:
        priority = static_priority(
            row.target, decay=decay, decay_step=policy.decay_step, document_ids=row.document_ids
        )
        found = teacher_decisions(
            priority, budget, document_ids=row.document_ids, valid=row.valid, boundary=settings.boundary
        )
        late = torch.arange(found.valid.shape[-1], device=found.valid.device) >= settings.first_position
        row.decisions[key] = found._replace(valid=found.valid & late)
    return row.decisions[key]


@torch.no_grad()
def policy_record(
    model: nn.Module,
    row: DenseRow,
    settings: RowSettings,
    *,
    chunk: int = 128,
    on_eviction: Callable[[Tensor], None] | None = None,
    reuse_prefix: bool = False,
) -> Record:
    """One sparse forward of the model under its current policy, against the dense row.

    Args:
        model: retrofitted, `model.kvpop` the policy to judge.
        on_eviction: called with the eviction times int64 [L, Hkv, T].
        reuse_prefix: take the row's first tokens from the dense forward. Right only where the base's weights
            are the dense row's, and then exact: nothing is evicted before a query has seen B keys.

    Returns:
        `row, kl, top1, nll, positions`; `retained_mass` [L, Hq] (absent where keys are merged);
        `boundary_accuracy`, `boundary_balanced_accuracy`, `rank_correlation` [L, Hkv] (NaN where undefined;
        absent under a stepwise rule, which has no priorities).
    """
    policy: Any = model.kvpop
    rule = policy.layer_scorer(0)
    own = rule if isinstance(rule, OwnAttention) else None
    scores: list[Tensor] = []
    priorities: list[Tensor] = []
    evictions: list[Tensor] = []
    masses: list[Tensor] = []

    def keep(seen: Any) -> None:
        if own is not None and own.holds_all:  # what a query attends, not what is held, which is everything
            at = row.mass_positions
            sees = own.visible(seen.query, seen.key, policy.budget, seen.document_ids, at)[0, :, None]
            dense_share = row.probability[len(masses)].unflatten(0, (sees.shape[0], -1))
            masses.append((dense_share * sees).sum(-1, dtype=torch.float32).mean(-1).flatten())
        scores.append(seen.score)
        priorities.append(seen.priority)
        evictions.append(seen.eviction)

    known = row.prefix_of(dense_below(rule, policy.budget)) if reuse_prefix else []
    with ExitStack() as modes:
        modes.enter_context(observe(model, keep))
        if known:
            modes.enter_context(after_prefix(model, known))
        last = last_hidden(model, row.batch)
    eviction = torch.cat(evictions)  # [L, Hkv, T]: one row, so the batch axis takes the layers
    if known:
        last = torch.cat([row.hidden[:, : known[0].length], last], 1)
        assert int(eviction.min()) >= known[0].length, "a key was evicted within its budget"
    hidden = last[0, row.positions]
    weight, bias = _head_weights(model)
    metrics = token_metrics(hidden, row.logits, row.next_token, weight, bias, chunk=chunk)
    if on_eviction is not None:
        on_eviction(eviction)
    record: Record = {
        "row": int(row.batch["row"][0]),
        "kl": metrics.kl,
        "top1": metrics.top1,
        "nll": metrics.nll,
        "positions": metrics.positions,
    }
    if masses:
        record["retained_mass"] = torch.stack(masses)
    elif not rule.merges:  # a key that was merged is neither held nor lost
        record["retained_mass"] = retained_mass(row.probability, row.mass_positions, eviction)
    record |= held_at_end(rule, eviction, row.document_ids)
    if scores[0] is None:  # a stepwise rule ranks nothing once and for all
        return record
    score, priority = torch.cat(scores), torch.cat(priorities).flatten(0, 1)
    decisions = _decisions(row, policy, settings)
    newcomer, boundary, kept = decisions.newcomer[0], decisions.boundary[0], decisions.keep[0]
    decided = decision_accuracy(priority, newcomer, boundary, kept, decisions.valid[0])
    layout = document_layout(row.document_ids, batch=1, length=row.document_ids.shape[1])
    competes = row.valid & layout.competing(policy.budget.sink)[:, None]
    target = row.target[0].view_as(score)
    shape = score.shape[:2]
    return record | {
        "boundary_accuracy": decided.accuracy.view(shape),
        "boundary_balanced_accuracy": decided.balanced.view(shape),
        "rank_correlation": spearman(score, target, competes[0].view_as(score)),
    }
