"""Wrong use is refused in one clear line, and nothing is lost by it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from layer_harness import feed, make_cache, make_policy, random_text

from kvpop_lightning.cache import BoundedCache
from kvpop_lightning.policy import Budget


@pytest.fixture
def cache():
    cache = make_cache(make_policy("mlp"))
    feed(cache, random_text(12, batch=2), [12])
    return cache


def refuse(match: str):
    return pytest.raises(ValueError, match=match)


def test_model_without_policy() -> None:
    with refuse("retrofit"):
        BoundedCache(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("chunk", [0, -3, 2.5, True])
def test_chunk(chunk) -> None:
    with refuse("chunk must be"):
        make_cache(make_policy("mlp"), chunk=chunk)


def test_delay_longer_than_the_window() -> None:
    policy = make_policy("mlstm", Budget(1, 4, 2))
    policy.scorers[0].delay = 5
    with refuse("scorer.delay must lie in 0..budget.window = 4, got 5"):
        make_cache(policy)


@pytest.mark.parametrize("shape", [(2, 3), (2, 12), (2, 16), (1, 15), (2, 1, 3, 15)])
def test_mask_of_another_shape(cache, shape) -> None:
    """A failure that peers report, number 8: three new columns after twelve need a mask of fifteen."""
    with refuse("attention_mask must"):
        cache.begin(2, 3, torch.ones(shape))
    cache.begin(2, 3, torch.ones(2, 15))  # and nothing was lost


def test_mask_that_changes_the_past(cache) -> None:
    mask = torch.ones(2, 15)
    mask[1, 4] = 0
    with refuse(r"marks \[12, 11\] real tokens .* has seen \[12, 12\]"):
        cache.begin(2, 3, mask)
    cache.begin(2, 3)


def test_packed_row(cache) -> None:
    with refuse("row 1, new column 1 should be 13, got 0.*packed documents as rows"):
        cache.begin(2, 3, None, torch.tensor([[12, 13, 14], [12, 0, 1]]))
    with refuse("one per new column"):
        cache.begin(2, 3, None, torch.arange(15)[None])
    assert cache.begin(2, 3, None, torch.tensor([[12, 13, 14]])).tolist() == [[12, 13, 14]] * 2


def test_positions_of_padding_do_not_matter(cache) -> None:
    mask = torch.ones(2, 15)
    mask[0, 12] = 0
    got = cache.begin(2, 3, mask, torch.tensor([[99, 12, 13], [12, 13, 14]]))
    assert got.tolist() == [[0, 12, 13], [12, 13, 14]]


def test_another_batch_size(cache) -> None:
    with refuse(r"holds 2 rows, but the input has 3: call cache.reset\(\)"):
        cache.begin(3, 1)


def test_another_policy(cache) -> None:
    with refuse("another model or policy"):
        cache.begin(2, 1, policy=make_policy("mlp"))


def test_another_dtype(cache) -> None:
    text = [x[:, :, :1].float() if x.dim() == 4 else x[:, :1].float() for x in random_text(1, batch=2)]
    cache.begin(2, 1)
    with refuse("torch.float64, but got 2 rows of torch.float32"):
        cache.attend(0, *text, 0.5)


def test_crop(cache) -> None:
    for tokens in (-1, 0, 3):
        with refuse("cannot be cropped"):
            cache.crop(tokens)
    assert not cache.is_croppable
    assert not cache.is_compileable


def test_attention_set_back(cache) -> None:
    """With another attention the cache would never be asked; the first layer's update already refuses."""
    key = random_text(1, batch=2)[1]
    cache.begin(2, 1)
    cache.update(key, key, 0)
    cache._config._attn_implementation = "sdpa"
    with refuse("works only through the attention that retrofit set, 'kvpop', but the model now runs 'sdpa'"):
        cache.update(key, key, 0)


def test_update_without_begin(cache) -> None:
    key = random_text(1, batch=2)[1]
    with refuse("layer 0 stores tokens, but 1 layers have attended"):
        cache.update(key, key, 0)
    with refuse("use it with the model that retrofit prepared"):
        cache.attend(0, key, key, key, None, 0.5)


def test_torn_forward() -> None:
    policy = make_policy("mlp", layers=2)
    cache = make_cache(policy)
    text = random_text(5)
    cache.begin(1, 5)
    cache.update(*text[1:3], 0)
    cache.attend(0, *text, 0.5)
    with refuse("layer 0 stores tokens, but 1 layers have attended"):
        cache.update(*text[1:3], 0)
    with refuse("stopped after 1 of 2 layers"):
        cache.begin(1, 1)
    cache.reset()
    cache.begin(1, 5)
    for layer in range(2):
        cache.attend(layer, *text, 0.5)
    assert cache.get_seq_length(1) == 5


def test_hidden_states_missing() -> None:
    cache = make_cache(make_policy("mlp", inputs="hidden"))
    text = random_text(3)
    cache.begin(1, 3)
    with refuse("hidden states"):
        cache.attend(0, *text[:3], None, 0.5)


def test_eviction_times_before_the_first_token() -> None:
    with refuse("no token yet"):
        make_cache(make_policy("mlp")).eviction_times(0)


def test_model_config_may_be_missing() -> None:
    BoundedCache(SimpleNamespace(kvpop=make_policy("mlp")))
