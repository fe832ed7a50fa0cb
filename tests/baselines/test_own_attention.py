"""Quest and StreamingLLM at cache positions against plain float64 loops, in parallel and in the cache."""

from __future__ import annotations

import math

import pytest
import torch
from rule_loops import softmax, texts_of
from torch import Tensor

from kvpop_lightning import BoundedCache, retrofit
from kvpop_lightning.baselines import build_policy, retention_map
from kvpop_lightning.models import observe, tiny_model
from kvpop_lightning.policy import NEVER, Budget

DIM, LENGTH, PAGE = 6, 26, 3
INV_FREQ = [1.0, 0.3, 0.05]


def tensors(group: int, kind: str = "normal", seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed + group)
    draw = lambda n: torch.randn(2, n, LENGTH, DIM, generator=g, dtype=torch.float64)  # noqa: E731
    query, key, value = 2 * draw(2 * group), draw(2), draw(2)
    if kind == "ties":
        which = torch.randint(0, 3, (LENGTH,), generator=g)
        query, key, value = (x.round()[:, :, which] for x in (query, key, value))
    if kind == "flat":
        query = torch.zeros_like(query)
    return query, key, value


def layouts() -> list[Tensor | None]:
    packed = torch.zeros(2, LENGTH, dtype=torch.int64)
    packed[0, 11:] = 1
    packed[0, 12:] = 2
    packed[1, :3], packed[1, -2:], packed[1, 9] = -1, -1, -1
    packed[1, 15:-2] = 5
    left = torch.zeros(2, LENGTH, dtype=torch.int64)
    left[1, :9] = -1
    return [None, packed, left]


def quest_loop(query: Tensor, key: Tensor, total: int, page: int) -> list[list[set[int]]]:
    """One text: query [Hq, N, D], key [H, N, D] -> attended positions per head and query."""
    heads, length, dim = key.shape
    group = query.shape[0] // heads
    q, k = query.tolist(), key.tolist()
    result = []
    for h in range(heads):
        sees = []
        for i in range(length):
            own = i // page
            bounds = []
            for p in range(own):
                tokens = range(p * page, (p + 1) * page)
                of_group = []
                for g in range(h * group, (h + 1) * group):
                    total_bound = 0.0
                    for d in range(dim):
                        low = min(k[h][j][d] for j in tokens)
                        high = max(k[h][j][d] for j in tokens)
                        total_bound += max(q[g][i][d] * low, q[g][i][d] * high)
                    of_group.append(total_bound)
                bounds.append(max(of_group))
            best = sorted(range(own), key=lambda p: (bounds[p], p), reverse=True)[: total // page - 1]
            sees.append({j for p in (*best, own) for j in range(p * page, (p + 1) * page) if j <= i})
        result.append(sees)
    return result


@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize("kind", ["normal", "ties", "flat"])
def test_quest_is_its_plain_loop(group: int, kind: str) -> None:
    for seed, ids in enumerate(layouts()):
        query, key, value = tensors(group, kind, seed)
        budget = Budget(1, 2, 8)  # 11 keys: three pages of 3
        got = retention_map("quest", query, key, value, budget=budget, document_ids=ids, page_size=PAGE)
        expected = torch.zeros_like(got)
        for row, columns in texts_of(ids, 2, LENGTH):
            for h, sees in enumerate(
                quest_loop(query[row][:, columns], key[row][:, columns], budget.total, PAGE)
            ):
                for i, attended in enumerate(sees):
                    expected[row, h, columns[i], [columns[j] for j in attended]] = True
        assert torch.equal(got, expected)
        assert int(got.sum(-1).max()) == 9
        if kind == "normal" and ids is None:
            returns = got[:, :, 1:] & ~got[:, :, :-1] & (torch.arange(26) <= torch.arange(25)[:, None])
            assert returns.any(), "a page left out comes back: nothing was evicted"


def rotated_loop(query: Tensor, key: Tensor, value: Tensor, budget: Budget) -> Tensor:
    """One text with every key before RoPE in mind: positions are places in the cache. [Hq, N, D]."""

    def turn(x: list[float], by: int) -> list[float]:
        out, half = list(x), len(x) // 2
        for n in range(half):
            a, b, angle = x[n], x[n + half], by * INV_FREQ[n]
            out[n] = a * math.cos(angle) - b * math.sin(angle)
            out[n + half] = b * math.cos(angle) + a * math.sin(angle)
        return out

    group = query.shape[0] // key.shape[0]
    out = torch.zeros_like(query)
    recent = budget.total - budget.sink
    plain_key = [[turn(x, -j) for j, x in enumerate(head)] for head in key.tolist()]  # before RoPE
    plain_query = [[turn(x, -i) for i, x in enumerate(head)] for head in query.tolist()]
    for g in range(query.shape[0]):
        h = g // group
        for i in range(query.shape[1]):
            held = [j for j in range(i + 1) if j < budget.sink or i - j < recent]
            moved = [turn(plain_key[h][j], place) for place, j in enumerate(held)]
            own = turn(plain_query[g][i], len(held) - 1)
            logits = [sum(a * b for a, b in zip(own, k, strict=True)) * DIM**-0.5 for k in moved]
            out[g, i] = torch.tensor(softmax(logits), dtype=torch.float64) @ value[h, held]
    return out


@pytest.mark.parametrize("group", [1, 3, 4])
def test_rotated_streaming_is_its_plain_loop(group: int) -> None:
    budget = Budget(2, 3, 4)
    policy = build_policy(
        "streaming_llm", budget, num_layers=1, num_heads=2, head_dim=DIM, hidden_size=1,
        rerotate=True, inv_freq=INV_FREQ,
    )  # fmt: skip
    rule = policy.layer_scorer(0)
    for seed, ids in enumerate(layouts()[:2]):
        query, key, value = tensors(group, seed=seed)
        times, _, _ = policy.eviction_times(
            0, key, value, None, position=torch.zeros(2, LENGTH), document_ids=ids, query=query
        )
        got = rule.attend_rows(query, key, value, times, budget, document_ids=ids, scale=DIM**-0.5)
        expected = torch.zeros_like(query)
        for row, columns in texts_of(ids, 2, LENGTH):
            parts = [x[row][:, columns] for x in (query, key, value)]
            expected[row][:, columns] = rotated_loop(*parts, budget)
        torch.testing.assert_close(got, expected, atol=1e-12, rtol=0)
        same = retention_map("streaming_llm", query, key, value, budget=budget, document_ids=ids)
        moved = retention_map(
            "streaming_llm", query, key, value, budget=budget, document_ids=ids, rerotate=True
        )
        assert torch.equal(same, moved)


OPTIONS: dict[str, dict] = {"quest": {"page_size": 4}}


def make(name: str, family: str = "llama", group: int = 3):
    model = tiny_model(family, kv_heads=2, group=group, seed=group)
    return retrofit(model, Budget(2, 4, 5), policy=name, **OPTIONS.get(name, {})).double()


def decode(cache: BoundedCache, model, ids: Tensor, mask: Tensor | None, size: int) -> Tensor:
    parts = []
    for start in range(0, ids.shape[1], size):
        part = None if mask is None else mask[:, : start + size]
        parts.append(model(ids[:, start : start + size], attention_mask=part, past_key_values=cache).logits)
    return torch.cat(parts, 1)


@pytest.mark.parametrize("name", ["quest", "streaming_llm_rotated"])
@pytest.mark.parametrize(("family", "group"), [("llama", 1), ("qwen3", 3)])
@torch.no_grad()
def test_cache_is_the_parallel_forward(name: str, family: str, group: int) -> None:
    model = make(name, family, group)
    ids = torch.randint(3, 272, (4, 40), generator=torch.Generator().manual_seed(5))
    mask = torch.ones(4, 40, dtype=torch.long)
    mask[1, :11] = mask[2, -9:] = mask[3, :3] = mask[3, -4:] = 0
    seen = []
    with observe(model, seen.append):
        whole = model(ids, attention_mask=mask, use_cache=False).logits
    real = mask != 0
    plain = retrofit(tiny_model(family, kv_heads=2, group=group, seed=group), Budget(2, 4, 5),
                     policy="streaming_llm").double()  # fmt: skip
    assert (plain(ids, attention_mask=mask, use_cache=False).logits - whole)[real].abs().max() > 1e-3
    for size in (3, 40):
        cache = BoundedCache(model, chunk=16)
        got = decode(cache, model, ids, mask, size)
        torch.testing.assert_close(got[real], whole[real], atol=1e-8, rtol=0)
        assert cache.keys_held == (40 if name == "quest" else 11)
    if name == "quest":
        assert (seen[0].eviction == NEVER).all()
        assert (cache.eviction_times(0) == NEVER).all()
    # Reset, packed rows, one row alone.
    cache.reset()
    alone = decode(cache, model, ids[:1, :23], None, 5)
    torch.testing.assert_close(alone, whole[:1, :23], atol=1e-8, rtol=0)
    position = torch.cat([torch.arange(23), torch.arange(17)])[None]
    packed = model(ids[:1], position_ids=position, use_cache=False).logits
    torch.testing.assert_close(packed[:, :23], alone, atol=1e-8, rtol=0)
    other = decode(BoundedCache(model), model, ids[:1, 23:], None, 17)
    torch.testing.assert_close(packed[:, 23:], other, atol=1e-8, rtol=0)


def test_a_quarter_of_quest_is_dense() -> None:
    """Every page chosen: attention over all keys, so the dense forward."""
    query, key, value = tensors(3)
    seen = retention_map("quest", query, key, value, budget=LENGTH + PAGE, page_size=PAGE)
    assert torch.equal(seen, torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().expand_as(seen))
    with pytest.raises(ValueError, match="page_size must be a whole number"):
        retention_map("quest", query, key, value, budget=9, page_size=0)
