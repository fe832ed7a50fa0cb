"""The invariant's check must be able to fail: each broken component is caught by `check_equal`."""

from __future__ import annotations

import copy

import pytest
import torch
from invariant_checks import check_equal, padded_batch, retrofitted
from torch import Tensor

from kvpop_lightning.cache import bounded, chunk, layer, scoring, span, step
from kvpop_lightning.policy.eviction import eviction_time


def constant_scores(monkeypatch) -> None:
    def extend(cache_layer, new, waiting) -> Tensor:
        return cache_layer.score.new_zeros(*new.key.shape[:3])

    monkeypatch.setattr(step, "extend_state", extend)
    monkeypatch.setattr(scoring, "extend_state", extend)


def no_decay(monkeypatch) -> None:
    for module in (step, chunk):
        monkeypatch.setattr(module, "priorities", lambda policy, index, score, position: score.double())


def decay_of_the_slot_not_the_position(monkeypatch) -> None:
    def priorities(policy, index, score, position):
        return policy.priority(index, score, torch.arange(score.shape[-1]).expand(score.shape))

    for module in (step, chunk):
        monkeypatch.setattr(module, "priorities", priorities)


def delay_ignored(monkeypatch) -> None:
    real = layer.BoundedLayer.__init__

    def init(self, budget, scorer, *, record) -> None:
        scorer = copy.copy(scorer)
        scorer.delay = 0
        real(self, budget, scorer, record=record)

    monkeypatch.setattr(layer.BoundedLayer, "__init__", init)


def state_not_carried(monkeypatch) -> None:
    real = scoring.extend_state

    def extend(cache_layer, new, waiting) -> Tensor:
        for name, tensor in cache_layer.scorer.init_state(new.key.shape[0], new.key.device).items():
            cache_layer.state[name].copy_(tensor)
        return real(cache_layer, new, waiting)

    monkeypatch.setattr(step, "extend_state", extend)
    monkeypatch.setattr(scoring, "extend_state", extend)


def padding_absorbed(monkeypatch) -> None:
    valid = span.Span.valid.func
    monkeypatch.setattr(span.Span, "valid", property(lambda self: torch.ones_like(valid(self))))


def columns_counted_as_tokens(monkeypatch) -> None:
    monkeypatch.setattr(bounded, "real_columns", lambda *args: None)


def ring_one_slot_off(monkeypatch) -> None:
    slot = span.Span.slot.func
    monkeypatch.setattr(span.Span, "slot", property(lambda self: (slot(self) + 1) % self.budget.window))


def plain_argmin(monkeypatch) -> None:
    """Ties broken by slot instead of by age."""
    real = step._place

    def place(cache_layer, *args):
        kept = cache_layer.position.clone()
        cache_layer.position.zero_()  # all equally old: argmin takes the first slot
        index = real(cache_layer, *args)
        changed = cache_layer.position != 0
        cache_layer.position.copy_(torch.where(changed, cache_layer.position, kept))
        return index

    monkeypatch.setattr(step, "_place", place)


def chunk_peeks(monkeypatch) -> None:
    """A chunk's queries see the residents as they stand after the chunk."""
    real = chunk._visibility

    def visibility(place, contest, budget):
        lost = contest.resident_out != chunk.NEVER
        return real(place, contest._replace(resident_out=contest.resident_out.masked_fill(lost, 0)), budget)

    monkeypatch.setattr(chunk, "_visibility", visibility)


def newcomer_loses_ties(monkeypatch) -> None:
    def evict(priority, budget):
        older_first = priority.flip(-1)  # not what the routine means, but equal scores then favour the old
        return eviction_time(older_first, budget).flip(-1)

    monkeypatch.setattr(chunk, "eviction_time", evict)


BROKEN = [
    (constant_scores, "mlp", (1,)),
    (constant_scores, "mlp", (7,)),
    (no_decay, "mlp", (1,)),
    (no_decay, "mlp", (7,)),
    (decay_of_the_slot_not_the_position, "mlp", (7,)),
    (delay_ignored, "mlstm_window", (1,)),
    (delay_ignored, "mlstm_window", (7,)),
    (state_not_carried, "mlstm_window", (1,)),
    (state_not_carried, "mlstm_0", (7,)),
    (padding_absorbed, "mlstm_0", (7,)),
    (columns_counted_as_tokens, "mlp", (7,)),
    (ring_one_slot_off, "mlp", (1,)),
    (chunk_peeks, "mlp", (7,)),
    (newcomer_loses_ties, "streaming_llm", (7,)),
]


@pytest.mark.parametrize(("breakage", "name", "sizes"), BROKEN, ids=lambda x: getattr(x, "__name__", str(x)))
def test_each_breakage_is_caught(breakage, name: str, sizes: tuple[int, ...], monkeypatch) -> None:
    model = retrofitted("llama", name)
    ids, mask = padded_batch(26)
    check_equal(model, ids, mask, sizes)
    breakage(monkeypatch)
    with pytest.raises(AssertionError, match=r"eviction times differ|logits differ"):
        check_equal(model, ids, mask, sizes)


def test_plain_argmin_is_caught(monkeypatch) -> None:
    """Needs scores with ties between some residents only: two values, no decay."""
    model = retrofitted("llama", "mlp", decay=1.0)
    scorers = model.kvpop.scorers
    for scorer in scorers:
        forward, extend = scorer.forward, scorer.extend
        scorer.forward = lambda *a, forward=forward, **k: (forward(*a, **k) > 0).double()
        scorer.extend = lambda *a, extend=extend: (lambda r: ((r[0] > 0).double(), r[1]))(extend(*a))
    ids, mask = padded_batch(34)
    check_equal(model, ids, mask, (1, 7))
    plain_argmin(monkeypatch)
    with pytest.raises(AssertionError, match="eviction times differ"):
        check_equal(model, ids, mask, (1,))
