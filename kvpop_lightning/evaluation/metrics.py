"""What one row says about a policy: divergence from the dense model, retained attention, ranking quality.

Plain tensor functions: no model, no policy object. Every value is per row; averaging over rows and the paired
intervals are in `statistics.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class TokenMetrics(NamedTuple):
    """Means over one row's evaluated positions; nats for `kl` and `nll`."""

    kl: float
    top1: float
    nll: float
    positions: int


class TeacherLogits(NamedTuple):
    """What of the dense model's output is kept for one row.

    `hidden` [P, Hid] (last hidden state at the evaluated positions), `log_probs` [P, V] float32 or None when
    the row is too large to keep, in which case every chunk is recomputed from `hidden`.
    """

    hidden: Tensor
    log_probs: Tensor | None


def supervised_positions(loss_mask: Tensor, document_ids: Tensor, first: int = 0) -> Tensor:
    """Positions of one row that are evaluated, int64 [P].

    Position `i` counts iff token `i + 1` belongs to the same document and to the loss mask (METHOD.md,
    section 4), and `i >= first`.

    Args:
        loss_mask: [T] bool, this token is a supervised target.
        document_ids: [T] int64, -1 is padding.
        first: first position that counts, in tokens.
    """
    same = (document_ids[1:] == document_ids[:-1]) & (document_ids[:-1] >= 0)
    keep = same & loss_mask[1:].bool()
    keep[:first] = False
    return keep.nonzero().squeeze(-1)


def _logits_chunks(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, chunk: int
) -> Iterator[tuple[slice, Tensor]]:
    """Logits of `chunk` positions at a time, float32 (float64 stays float64), free to be overwritten."""
    for start in range(0, hidden.shape[0], chunk):
        part = slice(start, min(start + chunk, hidden.shape[0]))
        logits = torch.nn.functional.linear(hidden[part], weight, bias)
        yield part, logits if logits.dtype == torch.float64 else logits.float()


def teacher_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None = None, *, chunk: int = 128, keep_bytes: int = 1 << 29
) -> TeacherLogits:
    """Keep the dense model's row for many comparisons: its log-probabilities if they fit in `keep_bytes`.

    Args:
        hidden: [P, Hid] last hidden state at the evaluated positions.
        weight: [V, Hid] output embedding; `bias` [V] or None.
        chunk: positions whose logits exist at once.
        keep_bytes: largest size of the kept [P, V] log-probabilities, in bytes.
    """
    positions, vocabulary = hidden.shape[0], weight.shape[0]
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    if positions * vocabulary * dtype.itemsize > keep_bytes:
        return TeacherLogits(hidden, None)
    log_probs = torch.empty(positions, vocabulary, dtype=dtype, device=hidden.device)
    for part, logits in _logits_chunks(hidden, weight, bias, chunk):
        log_probs[part] = logits.sub_(logits.logsumexp(-1, keepdim=True))
    return TeacherLogits(hidden, log_probs)


def token_metrics(
    hidden: Tensor,
    teacher: TeacherLogits,
    next_token: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    chunk: int = 128,
) -> TokenMetrics:
    """KL(dense || policy) over the full vocabulary, top-1 agreement and negative log-likelihood of one row.

    Each chunk's logits are normalised by one log-sum-exp and overwritten in place; nothing of size [P, V] is
    made beyond what `teacher` already keeps. Log-probabilities are subtracted before they are weighted, so
    that equal models give 0 up to rounding of single entries.

    Args:
        hidden: [P, Hid] the policy's last hidden state at the evaluated positions.
        teacher: from `teacher_logits` for the same positions.
        next_token: [P] int64, the token that follows each position.
        weight: [V, Hid] output embedding; `bias` [V] or None.

    Raises:
        ValueError: no position to evaluate.
    """
    count = hidden.shape[0]
    if count == 0:
        raise ValueError(
            "the row has no supervised position to evaluate: lower eval.first_position or check the loss mask"
        )
    kl = torch.zeros((), dtype=torch.float64, device=hidden.device)
    agree, nll = kl.clone(), kl.clone()
    for part, logits in _logits_chunks(hidden, weight, bias, chunk):
        logits.sub_(logits.logsumexp(-1, keepdim=True))
        nll -= logits.gather(-1, next_token[part, None]).double().sum()
        if teacher.log_probs is not None:
            reference = teacher.log_probs[part]
        else:
            _, reference = next(_logits_chunks(teacher.hidden[part], weight, bias, chunk))
            reference.sub_(reference.logsumexp(-1, keepdim=True))
        agree += (logits.argmax(-1) == reference.argmax(-1)).double().sum()
        difference = logits.sub_(reference)
        kl -= torch.exp(reference).mul_(difference).sum(-1).double().sum()
    mean_kl, mean_agree, mean_nll = (torch.stack((kl, agree, nll)) / count).tolist()
    return TokenMetrics(mean_kl, mean_agree, mean_nll, count)


def self_metrics(
    teacher: TeacherLogits,
    next_token: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    chunk: int = 128,
) -> TokenMetrics:
    """The dense model against itself: KL 0, agreement 1, its own likelihood (arguments as above)."""
    if teacher.log_probs is None:
        nll = token_metrics(teacher.hidden, teacher, next_token, weight, bias, chunk=chunk).nll
    else:
        nll = -float(teacher.log_probs.gather(-1, next_token[:, None]).double().mean())
    return TokenMetrics(0.0, 1.0, nll, next_token.numel())


def dense_attention_rows(
    query: Tensor,
    key: Tensor,
    positions: Tensor,
    *,
    scale: float,
    document_ids: Tensor | None = None,
) -> Tensor:
    """Dense causal attention probabilities of some queries of one row, [Hq, N, T] float32.

    Args:
        query: [Hq, T, D]; key: [Hkv, T, D] of the same row, after RoPE.
        positions: [N] int64, the queries wanted.
        document_ids: [T] int64 or None; keys of other documents and padding get probability 0.
    """
    heads, length, width = query.shape
    groups = heads // key.shape[0]
    wanted = query[:, positions].float().reshape(key.shape[0], groups * positions.numel(), width)
    logits = (wanted @ key.float().transpose(-1, -2)).mul_(scale).view(heads, positions.numel(), length)
    column = torch.arange(length, device=key.device)
    visible = column[None, :] <= positions[:, None]
    if document_ids is not None:
        visible &= (document_ids[None, :] == document_ids[positions, None]) & (document_ids[None, :] >= 0)
    logits.masked_fill_(~visible, -torch.inf)
    return torch.softmax(logits, -1).nan_to_num_(0.0)


def retained_mass(probability: Tensor, positions: Tensor, eviction: Tensor) -> Tensor:
    """Share of the dense model's attention that falls on keys the policy still holds, [L, Hq].

    `mean over the queries i of sum over keys j with i < e_j of P[i, j]` (causality is already in `P`).

    Args:
        probability: [L, Hq, N, T] dense probabilities of N queries, any floating dtype.
        positions: [N] int64, those queries' row positions.
        eviction: [L, Hkv, T] int64 eviction times.
    """
    groups = probability.shape[1] // eviction.shape[1]
    mass = []
    for layer in range(probability.shape[0]):  # a [Hkv, N, T] mask at a time
        held = positions[None, :, None] < eviction[layer, :, None, :]
        grouped = probability[layer].unflatten(0, (eviction.shape[1], groups))
        kept = torch.where(held[:, None], grouped, grouped.new_zeros(()))
        mass.append(kept.sum(-1, dtype=torch.float32).mean(-1).flatten())
    return torch.stack(mass)


def _average_ranks(values: Tensor, valid: Tensor) -> Tensor:
    """Ranks 0.. of the valid entries of each row of [R, T], equal values sharing their mean rank; float64.

    Invalid entries sort to the end and their ranks are rubbish.
    """
    masked = torch.where(valid, values.double(), torch.inf)
    ordered, order = masked.sort(dim=-1, stable=True)
    rank = torch.arange(values.shape[-1], device=values.device, dtype=torch.float64).expand_as(ordered)
    new_run = torch.ones_like(ordered, dtype=torch.bool)
    new_run[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    run = new_run.long().cumsum(-1) - 1
    total = torch.zeros_like(ordered).scatter_add_(-1, run, rank)
    size = torch.zeros_like(ordered).scatter_add_(-1, run, torch.ones_like(ordered))
    mean = (total / size.clamp(min=1)).gather(-1, run)
    return torch.empty_like(mean).scatter_(-1, order, mean)


def spearman(first: Tensor, second: Tensor, valid: Tensor) -> Tensor:
    """Rank correlation over each head's valid tokens, ties sharing their mean rank; [...] from [..., T].

    NaN where it is undefined: fewer than two valid tokens, or one side constant (a rule that scores all
    tokens alike). Values are expected to be finite where valid.
    """
    shape = first.shape[:-1]
    keep = valid.reshape(-1, valid.shape[-1])
    ranks = [_average_ranks(x.reshape(keep.shape), keep) for x in (first, second)]
    count = keep.sum(-1, keepdim=True)
    centred = [
        torch.where(keep, r - (r * keep).sum(-1, keepdim=True) / count.clamp(min=1), 0.0) for r in ranks
    ]
    covariance = (centred[0] * centred[1]).sum(-1)
    norm = (centred[0].square().sum(-1) * centred[1].square().sum(-1)).sqrt()
    return torch.where(norm > 0, covariance / norm, torch.nan).reshape(shape)


class DecisionAccuracy(NamedTuple):
    """Share of the teacher's keep-or-drop decisions that the policy makes alike."""

    accuracy: Tensor
    """[H] over all decisions."""
    balanced: Tensor
    """[H] mean of the accuracy on keeps and the accuracy on drops: 0.5 for a rule that always keeps."""
    decisions: Tensor
    """[H] decisions counted."""


def decision_accuracy(
    priority: Tensor, newcomer: Tensor, boundary: Tensor, keep: Tensor, valid: Tensor
) -> DecisionAccuracy:
    """Does the policy place each newcomer on the teacher's side of the boundary token (METHOD.md section 4)?

    A tie counts as "keep", as in the cache, where the newer token wins.

    Args:
        priority: [H, T] the policy's own priorities, float64.
        newcomer, boundary: [H, T] int64, key compared at query i and the teacher's boundary key.
        keep, valid: [H, T] bool, the teacher's label and whether there is a decision at query i.
    """
    newcomer, boundary = newcomer.clamp(min=0).expand_as(keep), boundary.clamp(min=0).expand_as(keep)
    said = priority.gather(-1, newcomer) >= priority.gather(-1, boundary)
    right = (said == keep) & valid
    keeps, drops = (keep & valid).sum(-1), (~keep & valid).sum(-1)
    count = valid.sum(-1)
    accuracy = right.sum(-1) / count.clamp(min=1)
    share_keep = (right & keep).sum(-1) / keeps.clamp(min=1)
    share_drop = (right & ~keep).sum(-1) / drops.clamp(min=1)
    both = (keeps > 0) & (drops > 0)
    balanced = torch.where(
        both, (share_keep + share_drop) / 2, torch.where(keeps > 0, share_keep, share_drop)
    )
    nothing = count == 0
    return DecisionAccuracy(
        accuracy.masked_fill(nothing, torch.nan), balanced.masked_fill(nothing, torch.nan), count
    )
