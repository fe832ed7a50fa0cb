"""DMC: the accumulation, its soft and its hard form against plain loops, and the cache against the parallel
form.
"""

from __future__ import annotations

import math

import pytest
import torch
from ragged_cases import (
    BUDGET,
    IDS,
    LENGTH,
    cache_is_parallel,
    decode,
    packed_as_alone,
    parallel,
    rows_move,
    saved_is_the_same,
    texts,
)
from rule_loops import softmax
from torch import Tensor

from kvpop_lightning import BoundedCache, retrofit
from kvpop_lightning.attention import soft_attention, sparse_attention
from kvpop_lightning.baselines import available, dms, get, retention_map
from kvpop_lightning.cache.paged import PAGE
from kvpop_lightning.models import dense, observe, tiny_model
from kvpop_lightning.policy import NEVER, document_layout
from kvpop_lightning.policy.borrow import lend_channel
from kvpop_lightning.policy.merge import merged_rows, recurrence
from kvpop_lightning.policy.ragged import closing_times
from kvpop_lightning.policy.scorers import build_scorer

DIM = 6
INV_FREQ = [1.0, 0.3, 0.05]


def turn(x: Tensor, by: float) -> Tensor:
    """RoPE by `by` positions, channel n paired with n + D / 2; differentiable."""
    half = x.shape[-1] // 2
    angle = torch.tensor(INV_FREQ, dtype=x.dtype) * by
    first, second = x[:half], x[half:]
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()])


def tensors(group: int, heads: int = 2) -> tuple[Tensor, ...]:
    """query, key, value, alpha, importance logits of two rows; float64."""
    g = torch.Generator().manual_seed(group)
    draw = lambda *size: torch.randn(*size, generator=g, dtype=torch.float64)  # noqa: E731
    query, key, value = (draw(2, n, LENGTH, DIM) for n in (heads * group, heads, heads))
    return query, key, value, draw(2, heads, LENGTH), draw(2, heads, LENGTH)


def documents(row: int) -> list[list[int]]:
    """Columns of every document of a row of IDS."""
    ids = IDS[row].tolist()
    return [[t for t in range(LENGTH) if ids[t] == d] for d in sorted(set(ids) - {-1})]


def test_recurrence_is_the_loop() -> None:
    """Values and both gradients, factors of exactly 0 and 1 among them."""
    g = torch.Generator().manual_seed(0)
    for length in (1, 2, 7, 16, 33):
        factor = torch.rand(3, length, generator=g, dtype=torch.float64)
        factor = torch.where(
            torch.rand(3, length, generator=g) < 0.5, factor.round(), factor
        ).requires_grad_()
        x = torch.randn(3, length, 2, generator=g, dtype=torch.float64).requires_grad_()
        loop, state = [], torch.zeros(3, 2, dtype=torch.float64)
        for t in range(length):
            state = factor[:, t, None] * state + x[:, t]
            loop.append(state)
        weight = torch.randn(3, length, 2, generator=g, dtype=torch.float64)
        expected = torch.autograd.grad((torch.stack(loop, 1) * weight).sum(), (factor, x))
        found = recurrence(factor, x)
        torch.testing.assert_close(found, torch.stack(loop, 1), atol=1e-12, rtol=0)
        for got, wanted in zip(
            torch.autograd.grad((found * weight).sum(), (factor, x)), expected, strict=True
        ):
            torch.testing.assert_close(got, wanted, atol=1e-12, rtol=1e-12)


def test_thousands_of_tokens_stay_finite_in_float32() -> None:
    """All merged into one entry, importances near 0 and 1: a weighted mean, and finite gradients."""
    length = 4096
    g = torch.Generator().manual_seed(0)
    layout = document_layout(None, batch=1, length=length)
    key, value = torch.randn(2, 1, 1, length, 2 * 1, generator=g)
    importance = (torch.sigmoid(30 * torch.randn(1, 1, length, generator=g)) + 1e-7).requires_grad_()
    merges = torch.ones(1, 1, length, requires_grad=True)
    keys, values = merged_rows(key, value, merges, importance, layout, [0.0])
    weight = importance.detach().double()[0, 0, :, None]
    expected = (weight * value[0, 0].double()).cumsum(0) / weight.cumsum(0)
    torch.testing.assert_close(values[0, 0].double(), expected, atol=1e-5, rtol=1e-5)
    values.square().sum().backward()
    assert torch.isfinite(importance.grad).all()
    assert torch.isfinite(merges.grad).all()
    assert torch.isfinite(keys).all()


@pytest.mark.parametrize("group", [1, 3, 4])
def test_soft_form_is_the_loop(group: int) -> None:
    """Partial accumulations and the attention over them, noise included: values and the gradients of alpha
    and importance. Keys are merged as before RoPE and stand at their newest token's position.
    """
    noise = torch.randn(2, 2, LENGTH, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    layout = document_layout(IDS, batch=2, length=LENGTH)
    results = []
    for form in ("loop", "fast"):
        query, key, value, alpha, weight = tensors(group)
        alpha, weight = (0.2 * alpha).requires_grad_(), weight.requires_grad_()
        omega = torch.sigmoid(weight)
        if form == "fast":
            merges = torch.sigmoid((alpha + noise) / 0.1)
            keys, values = merged_rows(key, value, merges, omega, layout, INV_FREQ)
            opened = dms.log_open(dms.soft_gate(alpha, noise, layout))

            def addition(first: int, last: int, count: int, opened: Tensor = opened) -> Tensor:
                far = dms.outside_window(layout.position, 1, first, last, count)
                return torch.where(far, opened[:, :, None, :count], 0.0)

            out = soft_attention(query, keys, values, addition, document_ids=IDS, scale=0.5, query_chunk=7)
        else:
            out = torch.zeros(2, 2 * group, LENGTH, DIM, dtype=torch.float64)
            for b in range(2):
                for columns in documents(b):
                    for h in range(2):
                        z, k, v, entry = None, None, None, []
                        for place, t in enumerate(columns):
                            w = omega[b, h, t]
                            plain = turn(key[b, h, t], -place)
                            if place == 0:
                                z, k, v = w, plain, value[b, h, t]
                            else:
                                a = torch.sigmoid((alpha[b, h, t] + noise[b, h, t]) / 0.1)
                                new = a * z + w
                                k = (a * z * k + w * plain) / new
                                v = (a * z * v + w * value[b, h, t]) / new
                                z = new
                            entry.append((turn(k, place), v))
                        for n in range(h * group, (h + 1) * group):
                            for i, t in enumerate(columns):
                                logits = []
                                for j in range(i + 1):
                                    logit = 0.5 * (query[b, n, t] @ entry[j][0])
                                    if j < i:
                                        u = columns[j + 1]
                                        x = (alpha[b, h, u] + noise[b, h, u]) / 0.1
                                        logit = logit - torch.log1p(torch.exp(x)) if x < 30 else logit - x
                                    logits.append(logit)
                                share = torch.softmax(torch.stack(logits), 0)
                                out[b, n, t] = share @ torch.stack([e[1] for e in entry[: i + 1]])
        (out * torch.arange(DIM)).square().sum().backward()
        results.append((out.detach(), alpha.grad, weight.grad))
    torch.testing.assert_close(results[1][0], results[0][0], atol=1e-10, rtol=0)
    for n in (1, 2):
        torch.testing.assert_close(results[1][n], results[0][n], atol=1e-8, rtol=1e-7)
        assert results[0][n].abs().max() > 1e-3


def cache_loop(
    query: Tensor, key: Tensor, value: Tensor, alpha: list, omega: list, columns: list[int]
) -> tuple[list[list[float]], list[int], int]:
    """One head's cache, token by token as published: outputs of one query head, tokens that were merged,
    entries.

    Entries carry the RoPE of their newest token: one that takes another in is turned on by one position.
    """
    entries: list[list] = []  # [z, key, value]
    out, merged = [], []
    for t in columns:
        if entries and alpha[t] > 0:
            z, k, v = entries[-1]
            new = z + omega[t]
            entries[-1] = [
                new,
                (z * turn(k, 1) + omega[t] * key[t]) / new,
                (z * v + omega[t] * value[t]) / new,
            ]
            merged.append(t)
        else:
            entries.append([omega[t], key[t], value[t]])
        share = softmax([float(query[t] @ e[1]) * 0.5 for e in entries])
        mixed = sum(p * e[2] for p, e in zip(share, entries, strict=True))
        out.append(mixed.tolist())
    return out, merged, len(entries)


@pytest.mark.parametrize("group", [1, 3, 4])
def test_hard_form_is_the_cache_token_by_token(group: int) -> None:
    query, key, value, alpha, weight = tensors(group)
    omega = torch.sigmoid(weight)
    times = closing_times(alpha > 0, 1, IDS)
    rule = build_scorer("dmc", num_heads=2, head_dim=DIM, hidden_size=4, inv_freq=INV_FREQ).double()
    rule.choose = lambda hidden: (alpha > 0, omega)
    keys, values = rule.merged(key, value, torch.zeros(2, LENGTH, 4), times, IDS)
    out, _ = sparse_attention(
        query, keys, values, times, budget=BUDGET, document_ids=IDS, scale=0.5, need_lse=False
    )
    checked = 0
    for b in range(2):
        for columns in documents(b):
            for n in range(2 * group):
                h = n // group
                expected, merged, count = cache_loop(
                    query[b, n], key[b, h], value[b, h], alpha[b, h].tolist(), omega[b, h].tolist(), columns
                )
                found = out[b, n, columns]
                torch.testing.assert_close(
                    found, torch.tensor(expected, dtype=torch.float64), atol=1e-12, rtol=0
                )
                gone = [t for t in columns if times[b, h, t] != NEVER]
                assert [columns[columns.index(t) + 1] for t in gone] == merged
                assert int((times[b, h, columns] == NEVER).sum()) == count
                checked += len(merged)
    assert checked > 20
    assert (out[:, :, :] * (IDS < 0)[:, None, :, None]).abs().max() == 0


def make(family: str = "llama", group: int = 3, dtype: torch.dtype = torch.float64, source: str = "hidden"):
    """A tiny model whose gates merge a part of all tokens, other ones in every head, of uneven weights."""
    model = tiny_model(family, kv_heads=2, group=group, seed=group)
    options = {"gate_width": 0} if source == "hidden" else {"gate_source": "channel"}
    model = retrofit(model, BUDGET, policy="dmc", **options).to(dtype)
    g = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for layer, scorer in zip(model.model.layers, model.kvpop.scorers, strict=True):
            if source == "hidden":
                weight = scorer.network.projection.hidden_weight
                weight.copy_(torch.randn(weight.shape, generator=g) * 0.2)
                scorer.network.projection.bias.copy_(torch.tensor([0.05, 0.0]))
            else:  # the borrowed rows of the projections: logits of both signs and weights that differ
                size = model.config.head_dim
                for projection, spread in ((layer.self_attn.k_proj, 6.0), (layer.self_attn.q_proj, 3.0)):
                    rows = projection.weight[size - 1 :: size]
                    rows.copy_(torch.randn(rows.shape, generator=g) * spread)
    return model


@pytest.mark.parametrize(
    ("family", "group", "source"),
    [("llama", 1, "hidden"), ("qwen3", 3, "hidden"), ("mistral", 4, "hidden"), ("llama", 3, "channel")],
)
def test_cache_is_the_parallel_form(family: str, group: int, source: str) -> None:
    """Steps, chunks and whole prompts; padding on either side in one batch; the same tokens are merged."""
    model = make(family, group, source=source)
    ids, mask = texts()
    real = mask != 0
    logits, times = parallel(model, ids, mask)
    with dense(model):
        full = parallel(model, ids, mask)[0]
    assert (full - logits)[real].abs().max() > 1e-3, "merging must matter"
    share = torch.stack([(t != NEVER).float().mean() for t in times]).mean()
    assert 0.1 < float(share) < 0.9
    cache_is_parallel(model, ids, real, mask, logits, times)


def test_bytes_are_those_allocated() -> None:
    """Pages of finished entries and the sums of the open one, float32 beside a bfloat16 model too."""
    for dtype, size in ((torch.float32, 4), (torch.bfloat16, 2)):
        model = make(dtype=dtype)
        ids = texts()[0][:1]
        cache = BoundedCache(model)
        decode(cache, model, ids, None, 30)
        held = cache.keys_per_head()[:, 0]
        layers, heads = held.shape
        dim = model.config.head_dim
        pages = -(-(held - 1) // PAGE)
        sums = layers * heads * (2 * dim + 1) * 4
        table = sum(layer.table.numel() * 4 for layer in cache.layers)
        other = sums + layers * (heads * 8 + 8) + table  # counters, page numbers
        assert cache.bytes_held() == int(pages.sum()) * PAGE * 2 * dim * size + other
        assert cache.bytes_held() < 0.9 * layers * heads * ids.shape[1] * 2 * dim * size
        cache.reset()
        assert cache.bytes_held() == 0


def test_rows_move_and_packed_documents_are_as_alone(tmp_path) -> None:
    model = make()
    rows_move(model)
    packed_as_alone(model)
    for source in ("hidden", "channel"):
        model = make(dtype=torch.float32, source=source)
        saved_is_the_same(model, tmp_path / source, with_base=source == "channel")


def test_registry_map_and_a_fresh_gate() -> None:
    assert "dmc" in available()
    assert not get("dmc").bounded
    x = torch.randn(1, 2, 9, 4)
    with pytest.raises(ValueError, match=r"dmc has no retention map: it merges keys"):
        retention_map("dmc", x, x, x, budget=BUDGET, hidden=torch.zeros(1, 9, 3))
    shape = {"num_heads": 3, "head_dim": 16, "hidden_size": 40}
    for width in (0, None, 5):
        rule = build_scorer("dmc", gate_width=width, width=64, inputs="kv", **shape)
        alpha, omega = rule.decisions(torch.randn(2, 7, 40))
        assert torch.equal(alpha, torch.full((2, 3, 7), -5.0))
        torch.testing.assert_close(omega, torch.full((2, 3, 7), 0.5))
        again = build_scorer(**rule.to_dict())
        assert again.to_dict() == rule.to_dict()
    matched = build_scorer("dmc", gate_width=None, width=64, inputs="kv", **shape).parameter_count()
    scorer = build_scorer("mlp", width=64, inputs="kv", **shape).parameter_count()
    assert abs(matched - scorer) <= 0.5 * 3 * 43 + 6
    with pytest.raises(ValueError, match=r"policy\.gate\.source must be one of hidden, channel"):
        build_scorer("dmc", gate_source="query", **shape)
    # The map sees nothing of the attention, so observers get no normaliser that would be wrong.
    model, seen = make(), []
    with torch.no_grad(), observe(model, seen.append):
        model(texts()[0], use_cache=False)
    with pytest.raises(ValueError, match="no normaliser"):
        _ = seen[0].lse


@pytest.mark.parametrize("group", [1, 3, 4])
def test_a_lent_channel_is_that_before_rope(group: int) -> None:
    """DMS takes the first query head's last channel, DMC that of all queries (their mean) and of the key;
    what they leave has no trace of it.
    """
    query, key, *_ = tensors(group)
    position = torch.arange(LENGTH).expand(2, -1) + torch.tensor([[0], [5]])
    plain, changed = torch.empty_like(query), query.clone()
    for b in range(2):
        for n in range(2 * group):
            for t in range(LENGTH):
                plain[b, n, t] = turn(query[b, n, t], -int(position[b, t]))
                other = plain[b, n, t].clone()
                other[-1] = 17.0
                changed[b, n, t] = turn(other, int(position[b, t]))
    left, channel = lend_channel(query, position, INV_FREQ)
    torch.testing.assert_close(channel, plain[..., -1], atol=1e-12, rtol=0)
    again, seventeen = lend_channel(changed, position, INV_FREQ)
    torch.testing.assert_close(seventeen, torch.full_like(channel, 17.0), atol=1e-10, rtol=0)
    torch.testing.assert_close(again, left, atol=1e-10, rtol=0)
    assert (left[..., -1] == 0).all()
    options = {"num_heads": 2, "head_dim": DIM, "hidden_size": 4, "inv_freq": INV_FREQ}
    for kind in ("dms", "dmc"):
        rule = build_scorer(kind, gate_source="channel", **options)
        assert not list(rule.parameters())
        q, k, signal = rule.borrow(query, key, position)
        if kind == "dms":
            lender = torch.arange(2 * group) % group == 0
            assert torch.equal(q[:, ~lender], query[:, ~lender])
            assert torch.equal(q[:, lender], left[:, lender])
            assert torch.equal(k, key)
            torch.testing.assert_close(rule.gate(signal), 100 * channel[:, lender] - 5)
        else:
            assert torch.equal(q, left)
            assert (k[..., -1] == 0).all()
            alpha, omega = rule.decisions(signal)
            torch.testing.assert_close(alpha, lend_channel(key, position, INV_FREQ)[1] - 5)
            mean = channel.unflatten(1, (2, group)).mean(2)
            expected = [1 / (1 + math.exp(-x - 5)) for x in mean.flatten().tolist()]
            torch.testing.assert_close(
                omega.flatten(), torch.tensor(expected, dtype=torch.float64), atol=1e-9, rtol=0
            )
