"""Distillation and language-model losses over a large vocabulary, a chunk of positions at a time (METHOD.md,
section 4).

Nothing here builds `[B, T, V]` logits: the output head runs on `chunk` supervised positions at a time, and
with gradients each chunk is recomputed in the backward pass, so the peak is a few `[chunk, V]` buffers
whatever T is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Head = Callable[[Tensor], Tensor]


def supervised_positions(loss_mask: Tensor, document_ids: Tensor) -> Tensor:
    """Positions whose next-token prediction is supervised.

    Position i counts iff token i+1 lies in the same document and is in the loss mask; padding (document id
    -1) never.

    Args:
        loss_mask: bool [B, T], True where the token itself is a supervised target.
        document_ids: int64 [B, T], -1 = padding.

    Returns:
        bool [B, T]; the last column is always False.
    """
    supervised = torch.zeros_like(loss_mask, dtype=torch.bool)
    same = (document_ids[:, 1:] == document_ids[:, :-1]) & (document_ids[:, 1:] >= 0)
    supervised[:, :-1] = same & loss_mask[:, 1:].bool()
    return supervised


class TopLogits(NamedTuple):
    """The teacher's K most likely tokens per position, and what is left over.

    `log_probs` [N, K] natural log of the probabilities over the whole vocabulary; `ids` int64 [N, K];
    `rest` [N] log of the summed probability of all other tokens.
    """

    log_probs: Tensor
    ids: Tensor
    rest: Tensor


def _at_least_float32(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _split_rest(logits_NV: Tensor, ids_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the chosen tokens and of all others together.

    The others' mass is a log-sum-exp with the chosen entries masked out; log(1 - sum) is NaN on confident
    rows.
    """
    normaliser = torch.logsumexp(logits_NV, -1, keepdim=True)
    chosen = logits_NV.gather(-1, ids_NK) - normaliser
    others = logits_NV.scatter(-1, ids_NK, float("-inf"))
    return chosen, torch.logsumexp(others, -1) - normaliser.squeeze(-1)


@torch.no_grad()
def top_logits(hidden: Tensor, head: Head, k: int, *, chunk: int = 256) -> TopLogits:
    """The top-K distribution of `head(hidden)`, float32 (float64 for float64 input).

    Args:
        hidden: [N, Hid], the normalised last hidden states.
        head: maps [n, Hid] to logits [n, V].
        k: tokens kept, 1 <= k < V.
        chunk: positions per piece.
    """
    parts = []
    for piece in hidden.split(chunk):
        logits = _at_least_float32(head(piece))
        ids = logits.topk(k, dim=-1).indices
        parts.append((*_split_rest(logits, ids), ids))
    if not parts:
        empty = hidden.new_zeros((0, k), dtype=torch.float32)
        return TopLogits(empty, torch.zeros((0, k), dtype=torch.int64, device=hidden.device), empty[:, 0])
    log_probs, rest, ids = (torch.cat(items) for items in zip(*parts, strict=True))
    return TopLogits(log_probs, ids, rest)


def _kl_piece(
    hidden: Tensor, head: Head, log_p: Tensor, ids: Tensor, rest_p: Tensor, reverse: bool
) -> Tensor:
    log_q, rest_q = _split_rest(_at_least_float32(head(hidden)), ids)
    if reverse:
        kl = (log_q.exp() * (log_q - log_p)).sum(-1) + rest_q.exp() * (rest_q - rest_p)
    else:
        kl = (log_p.exp() * (log_p - log_q)).sum(-1) + rest_p.exp() * (rest_p - rest_q)
    return kl.sum()


def _kl_full_piece(
    hidden: Tensor, head: Head, teacher_hidden: Tensor, teacher_head: Head, reverse: bool
) -> Tensor:
    with torch.no_grad():
        log_p = _at_least_float32(teacher_head(teacher_hidden)).log_softmax(-1)
    log_q = _at_least_float32(head(hidden)).log_softmax(-1)
    if reverse:
        return (log_q.exp() * (log_q - log_p)).sum()
    return F.kl_div(log_q, log_p, reduction="sum", log_target=True)


def _cross_entropy_piece(hidden: Tensor, head: Head, labels: Tensor) -> Tensor:
    return F.cross_entropy(_at_least_float32(head(hidden)), labels, reduction="sum")


def _run(function: Callable[..., Tensor], *args: object) -> Tensor:
    """`function`, recomputed in the backward pass when gradients are recorded."""
    if not torch.is_grad_enabled():
        return function(*args)
    result = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    assert isinstance(result, Tensor)
    return result


def _total(pieces: list[Tensor], hidden: Tensor) -> Tensor:
    # An empty sum still hangs on `hidden`, so that every parameter gets a (zero) gradient under DDP.
    return torch.stack(pieces).sum() if pieces else (hidden.float().sum() * 0.0)


def kl_to_top_logits(
    hidden: Tensor, head: Head, teacher: TopLogits, *, chunk: int = 256, reverse: bool = False
) -> Tensor:
    """Forward KL(teacher || student) on the teacher's top-K tokens with one bucket for the rest, summed over
    positions.

    Args:
        hidden: student's normalised last hidden states [N, Hid] at the supervised positions.
        head: the student's output head.
        teacher: `top_logits` of the same N positions.
        chunk: positions per piece.
        reverse: KL(student || teacher) instead, on the same tokens and bucket.

    Returns:
        scalar, nats, a lower bound of the full KL (equal at K = V); gradients reach `hidden` and the head's
        weights.
    """
    pieces = [
        _run(_kl_piece, h, head, log_p, ids, rest, reverse)
        for h, log_p, ids, rest in zip(
            hidden.split(chunk),
            teacher.log_probs.split(chunk),
            teacher.ids.split(chunk),
            teacher.rest.split(chunk),
            strict=True,
        )
        if len(h)
    ]
    return _total(pieces, hidden)


def kl_full(
    hidden: Tensor,
    head: Head,
    teacher_hidden: Tensor,
    teacher_head: Head,
    *,
    chunk: int = 256,
    reverse: bool = False,
) -> Tensor:
    """Forward KL(teacher || student) over the whole vocabulary, summed over positions; arguments as above."""
    pieces = [
        _run(_kl_full_piece, h, head, t, teacher_head, reverse)
        for h, t in zip(hidden.split(chunk), teacher_hidden.split(chunk), strict=True)
        if len(h)
    ]
    return _total(pieces, hidden)


def kl_sum(
    hidden: Tensor,
    head: Head,
    teacher_hidden: Tensor,
    teacher_head: Head,
    *,
    topk: int,
    chunk: int = 256,
    reverse: bool = False,
) -> Tensor:
    """KL from two models' hidden states, summed over the N positions; `topk = 0` (or >= V) is the full KL."""
    if len(hidden):
        with torch.no_grad():
            vocabulary = teacher_head(teacher_hidden[:1]).shape[-1]
        if 0 < topk < vocabulary:
            found = top_logits(teacher_hidden, teacher_head, topk, chunk=chunk)
            return kl_to_top_logits(hidden, head, found, chunk=chunk, reverse=reverse)
    return kl_full(hidden, head, teacher_hidden, teacher_head, chunk=chunk, reverse=reverse)


def cross_entropy_sum(hidden: Tensor, head: Head, labels: Tensor, *, chunk: int = 256) -> Tensor:
    """Next-token cross-entropy in nats, summed over the N positions; `labels` int64 [N]."""
    pieces = [
        _run(_cross_entropy_piece, h, head, y)
        for h, y in zip(hidden.split(chunk), labels.split(chunk), strict=True)
        if len(h)
    ]
    return _total(pieces, hidden)
