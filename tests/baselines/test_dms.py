"""DMS: the rule against plain loops, and the ragged cache against the masked parallel form."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from ragged_cases import (
    BUDGET,
    IDS,
    LENGTH,
    WINDOW,
    cache_is_parallel,
    decode,
    packed_as_alone,
    parallel,
    rows_move,
    saved_is_the_same,
    texts,
)
from torch import Tensor

from kvpop_lightning import BoundedCache, retrofit
from kvpop_lightning.attention import soft_attention
from kvpop_lightning.baselines import available, dms, get, retention_map
from kvpop_lightning.cache.paged import PAGE
from kvpop_lightning.models import observe, tiny_model
from kvpop_lightning.policy import NEVER, document_layout, position_in_document
from kvpop_lightning.policy.ragged import closing_times
from kvpop_lightning.policy.scorers import build_scorer
from kvpop_lightning.policy.scorers.gate import matched_width


def gate_values(heads: int, seed: int = 0) -> Tensor:
    return torch.randn(2, heads, LENGTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def loop(alpha: Tensor, ids: Tensor, window: int) -> list[list[set[int]]]:
    """Keys that each query attends in one row, [head][query]: the definition, token by token."""
    result = []
    for head in alpha.tolist():
        sees: list[set[int]] = []
        held: dict[int, bool] = {}  # key: closed?
        places: dict[int, int] = {}
        document, newest = -1, -1
        for i, number in enumerate(ids.tolist()):
            if number < 0:
                sees.append(set())
                continue
            if number != document:
                held, places, document, newest = {}, {}, number, -1
            if newest >= 0 and head[i] > 0:
                held[newest] = True  # the gate of key t is the one computed at token t + 1
            places[i] = len(places)
            held[i], newest = False, i
            held = {t: shut for t, shut in held.items() if not (shut and places[i] - places[t] >= window)}
            sees.append(set(held))
        result.append(sees)
    return result


@pytest.mark.parametrize("window", [1, 2, WINDOW, 513])
def test_closed_keys_leave_after_the_window(window: int) -> None:
    alpha = gate_values(3)
    times = closing_times(alpha > 0, window, IDS)
    i = torch.arange(LENGTH)
    for row in range(2):
        for head, sees in enumerate(loop(alpha[row], IDS[row], window)):
            for query, expected in enumerate(sees):
                alive = (
                    (i <= query)
                    & (query < times[row, head])
                    & (IDS[row] == IDS[row, query])
                    & (IDS[row] >= 0)
                )
                assert set(i[alive].tolist()) == expected, (row, head, query)


def test_window_of_the_release_protects_513_keys() -> None:
    """`i - j <= 512` stays: at query 512 key 0 is attended, at query 513 it is gone; its gate is token
    1's.
    """
    closes = torch.zeros(1, 1, 600, dtype=torch.bool)
    closes[..., 1] = True
    times = closing_times(closes, 513, None)[0, 0]
    assert times[0] == 513
    assert (times[1:] == NEVER).all()
    assert (
        closing_times(torch.ones(1, 1, 4, dtype=torch.bool), 2, None)[0, 0]
        == torch.tensor([2, 3, NEVER, NEVER])
    ).all()


@pytest.mark.parametrize("group", [1, 3, 4])
def test_soft_mask_is_the_loop(group: int) -> None:
    """Value and gradients of the training form, against sums written out; noise included."""
    heads, dim = 2, 4
    g = torch.Generator().manual_seed(group)
    query = torch.randn(2, heads * group, LENGTH, dim, generator=g, dtype=torch.float64)
    key, value = torch.randn(2, 2, heads, LENGTH, dim, generator=g, dtype=torch.float64)
    noise = gate_values(heads, 5)
    layout = document_layout(IDS, batch=2, length=LENGTH)
    place = position_in_document(IDS, batch=2, length=LENGTH)
    results = []
    for form in ("loop", "fast"):
        alpha = (0.3 * gate_values(heads, 9)).requires_grad_()
        if form == "fast":
            opened = dms.log_open(dms.soft_gate(alpha, noise, layout))

            def addition(first: int, last: int, keys: int, opened: Tensor = opened) -> Tensor:
                far = dms.outside_window(place, WINDOW, first, last, keys)
                return torch.where(far, opened[:, :, None, :keys], 0.0)

            out = soft_attention(query, key, value, addition, document_ids=IDS, scale=0.5, query_chunk=7)
        else:
            rows = []
            for b in range(2):
                real = [t for t in range(LENGTH) if IDS[b, t] >= 0]
                after = {t: u for t, u in itertools.pairwise(real) if IDS[b, t] == IDS[b, u]}
                for n in range(heads * group):
                    h = n // group
                    for i in range(LENGTH):
                        keys = [j for j in real if j <= i and IDS[b, j] == IDS[b, i]]
                        if IDS[b, i] < 0:
                            rows.append(torch.zeros(dim, dtype=torch.float64))
                            continue
                        logits = []
                        for j in keys:
                            logit = 0.5 * (query[b, n, i] @ key[b, h, j])
                            if place[b, i] - place[b, j] >= WINDOW and j in after:
                                z = (alpha[b, h, after[j]] + noise[b, h, after[j]]) / 0.1
                                logit = logit - torch.log1p(torch.exp(z)) if z < 30 else logit - z
                            logits.append(logit)
                        rows.append(torch.softmax(torch.stack(logits), 0) @ value[b, h, keys])
            out = torch.stack(rows).view(2, heads * group, LENGTH, dim)
        (out * torch.arange(dim)).square().sum().backward()
        results.append((out.detach(), alpha.grad))
    torch.testing.assert_close(results[1][0], results[0][0], atol=1e-10, rtol=0)
    torch.testing.assert_close(results[1][1], results[0][1], atol=1e-9, rtol=1e-8)
    assert results[0][1].abs().max() > 1e-3


def test_compression_loss_is_one_sided_and_the_target_rises() -> None:
    assert dms.closed_target(8.0) == 0.875
    assert [dms.reduction_at(s, 4.0, 34) for s in (0, 34, 68, 1000)] == [1.0, 2.0, 3.0, 4.0]
    for closed, expected, slope in ((0.2, 0.3, -1.0), (0.5, 0.0, 0.0), (0.9, 0.0, 0.0)):
        share = torch.tensor(closed, requires_grad=True)
        loss = dms.compression_loss(share, 0.5)
        loss.backward()
        assert float(loss.detach()) == pytest.approx(expected)
        assert float(share.grad) == pytest.approx(slope) or closed == 0.5
    z = torch.tensor([[[0.0, 3.0, -torch.inf]]])
    total, count = dms.closed_share(z)
    assert int(count) == 2
    assert float(total) == pytest.approx(0.5 + 1 / (1 + math.exp(-3)))
    torch.manual_seed(0)
    noise = dms.logistic_noise(torch.zeros(200_000))
    assert abs(float(noise.mean())) < 0.02
    assert float(noise.var()) == pytest.approx(math.pi**2 / 3, rel=0.02)


def test_a_fresh_gate_closes_nothing_and_has_the_scorers_parameters() -> None:
    shape = {"num_heads": 3, "head_dim": 16, "hidden_size": 40}
    for width in (0, None, 5):
        rule = build_scorer("dms", gate_width=width, width=64, inputs="kv", **shape)
        hidden = torch.randn(2, 7, 40)
        assert torch.equal(rule.gate(hidden), torch.full((2, 3, 7), -5.0))
        if width == 0:
            assert rule.parameter_count() == 3 * 41
    matched = build_scorer("dms", gate_width=None, width=64, inputs="kv", **shape).parameter_count()
    scorer = build_scorer("mlp", width=64, inputs="kv", **shape).parameter_count()
    assert abs(matched - scorer) <= 0.5 * 3 * 42 + 3
    assert matched_width(16, 40, "hidden", 9) == 9


def make(family: str = "llama", group: int = 3, dtype: torch.dtype = torch.float64, spread: float = 0.2):
    """A tiny model whose gates close about a third of all keys, other ones in every head."""
    model = tiny_model(family, kv_heads=2, group=group, seed=group)
    model = retrofit(model, BUDGET, policy="dms", gate_width=0).to(dtype)
    g = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for scorer in model.kvpop.scorers:
            weight = scorer.network.projection.hidden_weight
            weight.copy_(torch.randn(weight.shape, generator=g) * spread)
    return model


@pytest.mark.parametrize(("family", "group"), [("llama", 1), ("qwen3", 3), ("mistral", 4)])
def test_ragged_cache_is_the_masked_parallel_form(family: str, group: int) -> None:
    """Steps, chunks and whole prompts; padding on either side in one batch; the same keys leave at the same
    query.
    """
    model = make(family, group)
    ids, mask = texts()
    real = mask != 0
    logits, times = parallel(model, ids, mask)
    dense, _ = parallel(retrofit(copy.deepcopy(model), BUDGET, policy="dms"), ids, mask)  # fresh gates
    assert (dense - logits)[real].abs().max() > 1e-3, "closing keys must matter"
    cache_is_parallel(model, ids, real, mask, logits, times)


def test_bytes_are_those_allocated() -> None:
    """Window and pages, each head only as many as it needs; a reset gives them back."""
    model = make(dtype=torch.float32)
    ids = texts()[0][:1]
    cache = BoundedCache(model)
    decode(cache, model, ids, None, 30)
    held = cache.keys_per_head()[:, 0]
    layers, heads, dim = held.shape[0], held.shape[1], cache.layers[0].keys.shape[-1]
    pages = -(-(held - WINDOW) // PAGE)
    slots = int(pages.sum()) * PAGE + layers * heads * WINDOW
    table = sum(layer.table.numel() * 4 for layer in cache.layers)
    other = layers * (heads * WINDOW + heads * 8 + 8) + table  # flags, counters, page numbers
    assert cache.bytes_held() == slots * 2 * dim * 4 + other
    assert cache.bytes_held(element_bytes=2) == slots * 2 * dim * 2 + other
    full = layers * heads * ids.shape[1] * 2 * dim * 4
    assert cache.bytes_held() < 0.9 * full
    before = cache.bytes_held()
    cache.reset()
    assert cache.bytes_held() == 0
    again = decode(cache, model, ids[:, :40], None, 7)
    fresh = decode(BoundedCache(model), model, ids[:, :40], None, 40)
    torch.testing.assert_close(again, fresh, atol=1e-5, rtol=0)
    assert cache.bytes_held() < before


def test_rows_move_and_packed_documents_are_as_alone(tmp_path) -> None:
    model = make()
    rows_move(model)
    packed_as_alone(model)
    saved_is_the_same(make(dtype=torch.float32), tmp_path)


def test_map_and_registry_say_that_it_has_no_bound() -> None:
    assert "dms" in available()
    assert not get("dms").bounded
    model = make()
    seen = []
    with torch.no_grad(), observe(model, seen.append):
        model(texts()[0], use_cache=False)
    first = seen[0]
    kept = retention_map(
        "dms", first.query, first.key, first.value, budget=BUDGET, hidden=first.hidden, policy=model.kvpop
    )
    i = torch.arange(90)
    assert torch.equal(kept, (i <= i[:, None]) & (i[:, None] < first.eviction[:, :, None]))
    with pytest.raises(ValueError, match="reads hidden states"):
        retention_map("dms", first.query, first.key, first.value, budget=BUDGET)
