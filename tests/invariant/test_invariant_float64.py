"""(a) of the invariant: float64 weights, all eviction times equal, logits far closer than 1e-4."""

from __future__ import annotations

import pytest
import torch
from invariant_checks import SCORERS, check_equal, padded_batch, retrofitted, run_cache, run_parallel

from kvpop_lightning import dense
from kvpop_lightning.policy import NEVER, Budget

TIGHT = 1e-8
SHAPES = [(family, group) for family in ("llama", "qwen3", "mistral") for group in (1, 3, 4)]


@pytest.mark.parametrize("name", SCORERS)
def test_every_scorer(name: str) -> None:
    """Chunks of 1, 7 and 64, rows without padding, padded left, right and on both sides, in one batch."""
    index = list(SCORERS).index(name)
    family, group = SHAPES[(4 * index + 1) % len(SHAPES)]
    model = retrofitted(family, name, group=group)
    ids, mask = padded_batch(67, seed=index)
    check_equal(model, ids, mask, sizes=(7, 64), tolerance=TIGHT)
    ids, mask = padded_batch(34, seed=index)
    check_equal(model, ids, mask, sizes=(1,), tolerance=TIGHT)


@pytest.mark.parametrize(("family", "group"), SHAPES)
def test_every_family_and_group(family: str, group: int) -> None:
    ids, mask = padded_batch(29, seed=group)
    check_equal(retrofitted(family, "mlp_kv_hidden", group=group), ids, mask, sizes=(1, 64), tolerance=TIGHT)


@pytest.mark.parametrize("budget", [Budget(0, 1, 1), Budget(3, 2, 1), Budget(1, 11, 3), Budget(4, 3, 90)])
def test_every_budget(budget: Budget) -> None:
    """Smallest, tight, wide window, and larger than the text: then nothing is evicted and sparse is dense."""
    model = retrofitted("qwen3", "mlstm_window", budget)
    ids, mask = padded_batch(27)
    check_equal(model, ids, mask, sizes=(1, 5), tolerance=TIGHT)
    if budget.total > 27:
        with torch.no_grad(), dense(model):
            reference = model(ids, attention_mask=mask, use_cache=False).logits
        cached = run_cache(model, ids, mask, 7)
        torch.testing.assert_close(cached.logits[mask != 0], reference[mask != 0], atol=TIGHT, rtol=0)
        assert all((times == NEVER).all() for times in cached.evictions)


@pytest.mark.parametrize("chunk", [1, 16])
def test_inner_split(chunk: int) -> None:
    ids, mask = padded_batch(50)
    check_equal(retrofitted("llama", "mlstm_hidden"), ids, mask, sizes=(50,), tolerance=TIGHT, chunk=chunk)


@pytest.mark.parametrize("length", [1, 2, 5, 8])
def test_texts_shorter_than_the_window_or_the_budget(length: int) -> None:
    ids = torch.randint(3, 272, (2, length), generator=torch.Generator().manual_seed(length))
    check_equal(retrofitted("mistral", "mlstm_window"), ids, sizes=(1, 3), tolerance=TIGHT)


@pytest.mark.parametrize("name", ["mlp", "mlstm_window", "key_norm"])
def test_packed_and_alone(name: str) -> None:
    """Documents packed into one row of the parallel forward are what the cache makes of each alone."""
    model = retrofitted("llama", name)
    lengths = (31, 1, 24, 12)
    ids = torch.randint(3, 272, (1, sum(lengths)), generator=torch.Generator().manual_seed(9))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    with torch.no_grad():
        packed = model(ids, position_ids=positions, use_cache=False).logits
    start = 0
    for length in lengths:
        alone = run_cache(model, ids[:, start : start + length], None, 7)
        torch.testing.assert_close(packed[:, start : start + length], alone.logits, atol=TIGHT, rtol=0)
        start += length


def test_it_is_not_vacuous() -> None:
    """Sparse differs from dense, and a changed scorer weight, decay or budget changes the cache's logits."""
    ids = torch.randint(3, 272, (1, 60), generator=torch.Generator().manual_seed(1))
    base = run_cache(retrofitted("llama", "mlp"), ids, None, 7).logits
    model = retrofitted("llama", "mlp")
    with torch.no_grad(), dense(model):
        full = model(ids, use_cache=False).logits
    assert (base - full).abs().max() > 0.1
    assert (base - run_parallel(model, ids, None).logits).abs().max() < TIGHT
    with torch.no_grad():
        model.kvpop.scorers[1].output_weight.neg_()
    assert (base - run_cache(model, ids, None, 7).logits).abs().max() > 1e-2
    other_decay = run_cache(retrofitted("llama", "mlp", decay=0.5), ids, None, 7).logits
    assert (base - other_decay).abs().max() > 1e-2
    larger = run_cache(retrofitted("llama", "mlp", Budget(2, 5, 7)), ids, None, 7).logits
    assert (base - larger).abs().max() > 1e-2
