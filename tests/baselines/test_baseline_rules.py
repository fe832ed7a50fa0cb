"""Parameter-free rules and the registry of policies (METHOD.md, section 7)."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from kvpop_lightning.baselines import OracleScorer, available, build_policy, get, register
from kvpop_lightning.baselines.random import hash_uniform
from kvpop_lightning.baselines.registry import PolicySpec
from kvpop_lightning.config.choices import POLICIES
from kvpop_lightning.policy import Budget
from kvpop_lightning.policy.scorers import Scorer, Tokens, build_scorer

SHAPE = {"num_heads": 3, "head_dim": 8, "hidden_size": 16}


def make_row(length: int = 30) -> tuple[Tensor, Tensor]:
    key, value = torch.randn(2, 2, 3, length, 8, generator=torch.Generator().manual_seed(0))
    return key, value


def decode(scorer: Scorer, key: Tensor, value: Tensor, piece: int) -> Tensor:
    scores, state = [], scorer.init_state(2)
    for start in range(0, key.shape[2], piece):
        part = slice(start, start + piece)
        position = torch.arange(key.shape[2])[part].expand(2, -1)
        new = Tokens(
            key[:, :, part], value[:, :, part], None, position, torch.ones_like(position, dtype=torch.bool)
        )
        score, state = scorer.extend(state, new)
        scores.append(score)
    return torch.cat(scores, dim=2)


@pytest.mark.parametrize("kind", ["streaming_llm", "random", "key_norm", "oracle"])
@pytest.mark.parametrize("piece", [1, 7, 30])
def test_decoding_meets_the_same_scores(kind: str, piece: int) -> None:
    scorer = build_scorer(kind, layer=2, seed=5, **SHAPE)
    key, value = make_row()
    if isinstance(scorer, OracleScorer):
        scorer.set_scores(torch.randn(2, 3, 30))
    whole = scorer(key, value)
    assert whole.dtype == torch.float32
    assert torch.equal(decode(scorer, key, value, piece), whole)
    assert not list(scorer.parameters())
    assert not scorer.needs_hidden
    assert scorer.delay == 0
    assert scorer.state_bytes() == 0


def test_key_norm_prefers_short_keys() -> None:
    key, value = make_row()
    score = build_scorer("key_norm", **SHAPE)(key, value)
    torch.testing.assert_close(score, -key.square().sum(dim=-1).sqrt())
    half = build_scorer("key_norm", **SHAPE)(key.bfloat16(), value)
    assert half.dtype == torch.float32


def test_random_scores_are_uniform_and_independent() -> None:
    scorers = [build_scorer("random", layer=layer, seed=seed, **SHAPE) for layer in (0, 1) for seed in (0, 1)]
    key = torch.zeros(1, 3, 20_000, 8)
    streams = torch.cat([scorer(key, key)[0] for scorer in scorers])  # [12, T]
    assert streams.min() > 0
    assert streams.max() < 1
    counts = torch.stack([(row * 20).long().bincount(minlength=20) for row in streams]).double()
    chi_square = ((counts - 1000) ** 2 / 1000).sum(dim=1)
    assert (chi_square < 50).all(), "19 degrees of freedom: 50 is beyond 1 in 10,000"
    shifted = torch.cat([streams[:, :-1], streams[:, 1:]])
    correlation = torch.corrcoef(shifted) - torch.eye(24)
    assert correlation.abs().max() < 0.04, "layers, seeds, heads and neighbours must not resemble each other"


def test_random_scores_depend_on_position_not_on_row_and_are_fixed_for_good() -> None:
    key, value = make_row()
    scorer = build_scorer("random", layer=1, seed=7, **SHAPE)
    position = torch.arange(30).flip(0).expand(2, -1)
    assert torch.equal(scorer(key, value, position=position), scorer(key, value).flip(-1))
    wide = build_scorer("random", layer=1, seed=7, scale=3.0, **SHAPE)
    torch.testing.assert_close(wide(key, value), 3 * scorer(key, value))
    # A result of an earlier run must be reproducible by a later version.
    fixed = hash_uniform(7, 1, torch.tensor([0, 1]), torch.tensor([0, 4096]))
    torch.testing.assert_close(fixed, torch.tensor([0.6700019240379333, 0.30668526887893677]), rtol=0, atol=0)
    with pytest.raises(ValueError, match="scale must be above 0"):
        build_scorer("random", scale=0.0, **SHAPE)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_random_scores_are_the_same_on_cuda() -> None:
    key, value = make_row()
    scorer = build_scorer("random", layer=1, seed=7, **SHAPE)
    expected = scorer(key, value)
    assert torch.equal(scorer.cuda()(key.cuda(), value.cuda()).cpu(), expected)


def test_oracle_by_row_and_by_position_with_padding() -> None:
    scorer = build_scorer("oracle", **SHAPE)
    assert isinstance(scorer, OracleScorer)
    key, value = make_row(10)
    with pytest.raises(ValueError, match="call set_scores"):
        scorer(key, value)
    target = torch.randn(2, 3, 10)
    ids = torch.tensor([[-1] * 3 + [0] * 7, [0] * 8 + [-1] * 2])
    scorer.set_scores(target, ids)
    assert torch.equal(scorer(key, value, document_ids=ids), target * (ids >= 0)[:, None])
    new = Tokens(
        key[:, :, :2],
        value[:, :, :2],
        None,
        torch.tensor([[5, 6], [5, 6]]),
        torch.ones(2, 2, dtype=torch.bool),
    )
    score, _ = scorer.extend({}, new)
    assert torch.equal(score, torch.stack([target[0, :, 8:10], target[1, :, 5:7]]))
    with pytest.raises(ValueError, match="set_scores for each text"):
        scorer(key[:, :, :4], value[:, :, :4])
    with pytest.raises(ValueError, match="outside them"):
        scorer.extend({}, new._replace(position=torch.tensor([[9, 10], [9, 10]])))
    scorer.set_scores(None)
    with pytest.raises(ValueError, match="no scores"):
        scorer.extend({}, new)


def test_registry_and_configuration_name_the_same_policies() -> None:
    assert set(available()) == set(POLICIES)
    assert available()[0] == "full"
    for name in available():
        assert get(name).name == name


def test_controls_with_decay() -> None:
    shape = {"num_layers": 2, "decay": 0.5, **SHAPE}
    key, value = make_row()
    position = torch.arange(30).expand(2, -1)
    for rule in ("random", "key_norm"):
        plain = build_policy(rule, Budget(1, 2, 5), decay_step=4, **shape)
        decayed = build_policy(f"{rule}+decay", Budget(1, 2, 5), decay_step=4, **shape)
        assert not get(rule).uses_decay
        assert get(f"{rule}+decay").uses_decay
        a, score_a, _ = plain.eviction_times(0, key, value, None, position=position, document_ids=None)
        b, score_b, _ = decayed.eviction_times(0, key, value, None, position=position, document_ids=None)
        assert torch.equal(score_a, score_b)
        assert not torch.equal(a, b)


def test_unknown_policies_get_a_hint() -> None:
    with pytest.raises(ValueError, match="did you mean streaming_llm"):
        get("streaming_lm")
    with pytest.raises(ValueError, match=r"kvpop_mlp takes no \+decay \(it decays already\)"):
        get("kvpop_mlp+decay")
    with pytest.raises(ValueError, match=r"streaming_llm takes no \+decay"):
        get("streaming_llm+decay")
    with pytest.raises(ValueError, match="dense attention"):
        build_policy("full", Budget(1, 2, 5), num_layers=1, **SHAPE)
    with pytest.raises(ValueError, match="registered twice"):
        register(PolicySpec("random", "random", "again"))


def test_every_evicting_policy_builds() -> None:
    for name, match in itertools.product(available(), (False, True)):
        if name == "full":
            continue
        policy = build_policy(name, Budget(4, 8, 120), num_layers=2, match_bytes=match, **SHAPE)
        assert policy.name == name
        assert bool(list(policy.parameters())) == (get(name).trained and not get(name).trains_base)
