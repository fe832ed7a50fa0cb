"""A decay per layer and head from three numbers."""

from __future__ import annotations

import math

import pytest
import torch

from kvpop_lightning import retrofit
from kvpop_lightning.config.compose import compose
from kvpop_lightning.config.policies import retrofit_options
from kvpop_lightning.models.sources import load_model
from kvpop_lightning.policy import Budget, RetentionPolicy
from kvpop_lightning.policy.decay import spread_decay


def test_zero_spread_is_one_decay_for_all() -> None:
    assert torch.equal(spread_decay(0.5, 3, 2), torch.full((3, 2), 0.5, dtype=torch.float64))


def test_rates_run_evenly_on_a_logarithmic_scale() -> None:
    gamma = spread_decay(0.8, 3, 2, depth=0.5, heads=-0.25)
    rate = -gamma.log() / -math.log(0.8)
    for layer, x in enumerate((-1.0, 0.0, 1.0)):
        for head, y in enumerate((-1.0, 1.0)):
            assert rate[layer, head] == pytest.approx(math.exp(0.5 * x - 0.25 * y), rel=1e-12)


@pytest.mark.parametrize("decay", [1e-300, 0.01, 0.5, 1 - 1e-12, 1.0])
@pytest.mark.parametrize(("depth", "heads"), [(4.0, 4.0), (-4.0, 4.0)])
def test_every_result_is_a_decay(decay: float, depth: float, heads: float) -> None:
    gamma = spread_decay(decay, 30, 3, depth=depth, heads=heads)
    assert bool(((gamma > 0) & (gamma <= 1)).all())
    assert bool((gamma == 1).all()) == (decay == 1.0)


def test_one_layer_or_head_keeps_the_decay() -> None:
    assert spread_decay(0.6, 1, 1, depth=2.0, heads=2.0).item() == pytest.approx(0.6, rel=1e-15)


@pytest.mark.parametrize("decay", [0.0, 1.5, [0.5, 0.6]])
def test_impossible_decays_are_refused(decay: object) -> None:
    with pytest.raises(ValueError, match=r"policy\.decay"):
        spread_decay(decay, 2, 2, depth=1.0)


def test_the_configuration_reaches_the_policy() -> None:
    config = compose(
        ["model=tiny_llama", "policy.decay=0.8", "policy.decay_depth=0.5", "policy.decay_heads=0.1"]
    )
    model, _ = load_model(config.model)
    model = retrofit(model, Budget(2, 4, 20), **retrofit_options(config))
    layers, heads = model.kvpop.decay.shape
    assert torch.equal(model.kvpop.decay, spread_decay(0.8, layers, heads, depth=0.5, heads=0.1))
    again = RetentionPolicy.from_dict(model.kvpop.to_dict())
    assert torch.equal(again.decay, model.kvpop.decay)


def test_policies_without_decay_stay_without() -> None:
    config = compose(["model=tiny_llama", "policy=random", "policy.decay_depth=1.0"])
    model, _ = load_model(config.model)
    model = retrofit(model, Budget(2, 4, 6), **retrofit_options(config))
    assert bool((model.kvpop.decay == 1.0).all())
