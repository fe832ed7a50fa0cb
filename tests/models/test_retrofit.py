"""Attaching a policy: what changes, what stays, on every family and with every KV group size."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from kvpop_lightning import BoundedCache, Budget, retrofit
from kvpop_lightning.config.schema import ModelConfig
from kvpop_lightning.models import (
    LayerObservation,
    build_on_meta,
    dense,
    is_retrofitted,
    observe,
    replay,
    tiny_model,
    unretrofit,
)

BUDGET = Budget(1, 6, 5)
FAMILIES = ("llama", "qwen3", "mistral")


def ids(T: int, B: int = 2, seed: int = 0) -> Tensor:
    return torch.randint(3, 272, (B, T), generator=torch.Generator().manual_seed(seed))


def logits(model: Any, input_ids: Tensor, **kwargs: Any) -> Tensor:
    return model(input_ids, use_cache=False, **kwargs).logits.detach()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("group", [1, 3, 4])
def test_sparse_is_dense_while_the_budget_lasts(family: str, group: int) -> None:
    model = tiny_model(family, group=group)
    x = ids(40)
    plain = logits(model, x)
    retrofit(model, Budget(1, 8, 31))
    torch.testing.assert_close(logits(model, x), plain, atol=2e-5, rtol=0)
    retrofit(model, BUDGET)
    sparse = logits(model, x)
    torch.testing.assert_close(sparse[:, :12], plain[:, :12], atol=2e-5, rtol=0)
    assert (sparse - plain)[:, 14:].abs().amax() > 1e-2
    with dense(model):
        torch.testing.assert_close(logits(model, x), plain, atol=2e-5, rtol=0)
    assert torch.equal(logits(model, x), sparse), "dense must end with its block"


@pytest.mark.parametrize("family", FAMILIES)
def test_forward_equals_attention_written_by_hand(family: str) -> None:
    """Each layer's attention output from its observed tensors and eviction times, and what o_proj really
    read.
    """
    model = retrofit(tiny_model(family).double(), BUDGET, scorer="mlstm", memory_dim=4, value_dim=4)
    for layer in model.model.layers:
        layer.self_attn.scaling = 0.4  # some families do not scale by head_dim ** -0.5
    seen: list[LayerObservation] = []
    read: list[Tensor] = []
    hooks = [
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args: read.append(args[0]))
        for layer in model.model.layers
    ]
    x = ids(33)
    with observe(model, seen.append):
        logits(model, x)
    for hook in hooks:
        hook.remove()
    assert [s.layer for s in seen] == [0, 1]
    assert {s.scale for s in seen} == {0.4}
    for s, out in zip(seen, read, strict=True):
        key, value = (t.repeat_interleave(3, dim=1) for t in (s.key, s.value))
        i = torch.arange(33)
        mask = (i[None, :] <= i[:, None]) & (i[:, None] < s.eviction[:, :, None, :]).repeat_interleave(
            3, dim=1
        )
        logit = (s.query @ key.transpose(-1, -2) * s.scale).masked_fill(~mask, float("-inf"))
        expected = (logit.softmax(-1) @ value).transpose(1, 2).reshape(2, 33, -1)
        torch.testing.assert_close(out, expected, atol=1e-10, rtol=0)
        torch.testing.assert_close(s.lse, logit.logsumexp(-1), atol=1e-10, rtol=0)
        assert not mask.all(dim=(0, 1)).tril().equal(torch.ones(33, 33).tril().bool()), "nothing was evicted"


@pytest.mark.parametrize("family", FAMILIES)
def test_observed_tensors(family: str) -> None:
    """Keys after RoPE (and after Qwen3's norm), not repeated; hidden is what q_proj reads."""
    model = retrofit(tiny_model(family), BUDGET)
    attention = model.model.layers[1].self_attn
    read: list[Tensor] = []
    hook = attention.q_proj.register_forward_pre_hook(lambda _, args: read.append(args[0]))
    seen: list[LayerObservation] = []
    with observe(model, seen.append):
        logits(model, ids(20))
    hook.remove()
    s = seen[1]
    assert torch.equal(s.hidden, read[0])
    assert s.query.shape == (2, 6, 20, 16)
    assert s.key.shape == s.value.shape == (2, 2, 20, 16)
    assert s.score.shape == s.priority.shape == s.eviction.shape == (2, 2, 20)
    assert (s.score.dtype, s.priority.dtype, s.eviction.dtype) == (torch.float32, torch.float64, torch.int64)
    assert s.document_ids is None
    assert s.position.tolist() == [list(range(20))] * 2
    key = attention.k_proj(s.hidden).view(2, 20, 2, 16)
    if family == "qwen3":
        key = attention.k_norm(key)
    cos, sin = model.model.rotary_emb(key, torch.arange(20)[None])
    first, second = key[..., :8], key[..., 8:]
    turned = key * cos[:, :, None] + torch.cat([-second, first], -1) * sin[:, :, None]
    torch.testing.assert_close(s.key, turned.transpose(1, 2), atol=1e-5, rtol=0)
    with dense(model), observe(model, seen.append):
        logits(model, ids(20))
    assert seen[-1].score is None
    assert seen[-1].eviction is None
    assert seen[-1].lse.isfinite().all()


def test_given_positions_turn_the_keys_and_policy_counts_from_zero() -> None:
    """A row that starts at position 100 is rotated from there on, while its sinks and decay count from its
    first token.
    """
    model = retrofit(tiny_model(), BUDGET)
    seen: list[LayerObservation] = []
    with observe(model, seen.append):
        logits(model, ids(20))
        logits(model, ids(20), position_ids=torch.arange(100, 120)[None])
    first, later = seen[0], seen[2]
    assert torch.equal(later.position, first.position)
    assert not torch.allclose(later.key, first.key, atol=1e-2)
    dot = [(s.query[:, ::3] @ s.key.transpose(-1, -2)) for s in (first, later)]
    torch.testing.assert_close(*dot, atol=1e-3, rtol=0)  # RoPE depends on distances alone


def test_replay_imposes_times() -> None:
    model = retrofit(tiny_model(), BUDGET)
    x = ids(50)
    seen: list[LayerObservation] = []
    with observe(model, seen.append):
        sparse = logits(model, x)
    times = [s.eviction for s in seen]
    retrofit(model, Budget(1, 6, 30), scorer="random")
    assert not torch.equal(logits(model, x), sparse)
    with replay(model, times):
        assert torch.allclose(logits(model, x), sparse, atol=1e-6)
        with replay(model, [torch.arange(50).expand(2, 2, 50) + 1] * 2):  # each query sees itself alone
            alone = logits(model, x)
    assert not torch.allclose(alone, sparse, atol=1e-2)
    torch.testing.assert_close(
        alone[:, 7], logits(model, x[:, 7:8], position_ids=torch.tensor([[7]]))[:, 0], atol=1e-5, rtol=0
    )


def test_gradients_reach_the_base_and_not_the_scorers() -> None:
    model = retrofit(tiny_model(), BUDGET, inputs="kv_hidden")
    x = ids(30)
    model(x, labels=x, use_cache=False).loss.backward()
    for name, parameter in model.named_parameters():
        if name.startswith("kvpop."):
            assert parameter.grad is None
        else:
            assert parameter.grad is not None, name
            assert parameter.grad.abs().sum() > 0, name
    model.zero_grad()
    scores: list[Tensor] = []
    with observe(model, lambda s: scores.append(s.score), gradients=True):
        model(x, use_cache=False)
    sum(s.square().sum() for s in scores).backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == name.startswith("kvpop."), name
    with observe(model, lambda s: scores.append(s.score)):
        model(x, use_cache=False)
    assert not scores[-1].requires_grad


def test_gradient_checkpointing_recomputes_the_same() -> None:
    model = retrofit(tiny_model(), BUDGET)
    x, position_ids = ids(30), torch.cat([torch.arange(13), torch.arange(17)])[None].expand(2, -1)
    gradients = []
    for checkpointed in (False, True):
        if checkpointed:
            model.gradient_checkpointing_enable()
        model.train()
        model.zero_grad()
        model(x, labels=x, use_cache=False, position_ids=position_ids).loss.backward()
        gradients.append(model.model.layers[0].self_attn.k_proj.weight.grad.clone())
    assert torch.equal(*gradients)


def test_configuration_is_not_shared_with_a_teacher() -> None:
    model = tiny_model()
    teacher = type(model)(model.config)
    teacher.load_state_dict(model.state_dict())
    plain = logits(teacher.eval(), ids(30))
    retrofit(model, BUDGET)
    assert torch.equal(logits(teacher, ids(30)), plain)
    assert teacher.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("copied_by", ["deepcopy", "pickle"])
def test_copies_are_whole_and_independent(copied_by: str) -> None:
    model = retrofit(tiny_model(), BUDGET, scorer="mlstm")
    x = ids(30)
    before = logits(model, x)
    twin = copy.deepcopy(model) if copied_by == "deepcopy" else pickle.loads(pickle.dumps(model))
    assert type(twin) is type(model)
    assert torch.equal(logits(twin, x), before)
    with torch.no_grad():
        for p in twin.kvpop.parameters():
            p.normal_()
    twin.kvpop.decay.fill_(0.1)
    assert not torch.equal(logits(twin, x), before)
    with dense(twin):
        assert torch.equal(logits(model, x), before)
    assert torch.equal(logits(model, x), before)
    new = model.generate(x, max_new_tokens=20, do_sample=False)
    assert new.shape == (2, 50)
    unretrofit(twin)
    assert torch.equal(logits(model, x), before)
    assert is_retrofitted(model)
    assert not is_retrofitted(twin)


def test_second_retrofit_replaces_the_first_and_unretrofit_restores() -> None:
    model = tiny_model()
    original, x = type(model), ids(30)
    names = list(model.state_dict())
    plain = logits(model, x)
    retrofit(model, BUDGET, scorer="mlstm")
    first = logits(model, x)
    retrofit(model, BUDGET, policy="streaming_llm")
    assert len(model.model._forward_pre_hooks) == 1
    assert len(model.model.layers[0].self_attn._forward_pre_hooks) == 1
    assert type(model).__mro__.count(original) == 1
    assert not torch.equal(logits(model, x), first)
    alone = retrofit(tiny_model(), BUDGET, policy="streaming_llm")
    assert torch.equal(logits(model, x), logits(alone, x))
    unretrofit(model)
    assert type(model) is original
    assert list(model.state_dict()) == names
    assert not model.model._forward_pre_hooks
    assert torch.equal(logits(model, x), plain)
    assert model.generate(x, max_new_tokens=3, do_sample=False).shape == (2, 33)


def test_a_failed_retrofit_changes_nothing() -> None:
    model = retrofit(tiny_model(), BUDGET)
    before = logits(model, ids(30))
    with pytest.raises(ValueError, match="unknown policy"):
        retrofit(model, BUDGET, policy="kvpop_mlpp")
    with pytest.raises(ValueError, match="decay"):
        retrofit(model, BUDGET, decay=1.5)
    assert torch.equal(logits(model, ids(30)), before)


def test_policy_names_and_options() -> None:
    model = tiny_model()
    assert retrofit(model, BUDGET).kvpop.name == "kvpop_mlp"
    assert retrofit(model, BUDGET, scorer="mlstm", delay=3).kvpop.scorers[0].delay == 3
    assert retrofit(model, BUDGET, policy="kvpop_mlstm").kvpop.scorers[0].delay == 6
    assert retrofit(model, BUDGET, policy="random", decay=0.5).kvpop.decay.unique().tolist() == [1.0]
    assert retrofit(model, BUDGET, policy="random+decay", decay=0.5).kvpop.decay.unique().tolist() == [0.5]
    assert retrofit(model, BUDGET, scorer="random", decay=0.5).kvpop.name == "random+decay"
    matched = retrofit(
        model, Budget(1, 6, 50), policy="kvpop_mlstm", match_bytes=True, memory_dim=4, value_dim=8
    )
    assert matched.kvpop.budget == Budget(1, 6, 50 - 3)  # ceil(4 (4*8 + 4 + 1) / (4 * 16))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_keeps_float32_scorers(dtype: torch.dtype) -> None:
    model = retrofit(tiny_model(dtype=dtype), BUDGET, scorer="mlstm")
    model.to(dtype)  # as a trainer does
    assert {p.dtype for p in model.kvpop.parameters()} == {torch.float32}
    assert model.kvpop.decay.dtype == torch.float64
    seen: list[LayerObservation] = []
    with observe(model, seen.append):
        out = logits(model, ids(30))
    assert out.dtype == dtype
    assert out.isfinite().all()
    assert seen[0].score.dtype == torch.float32


def test_autocast_does_not_lower_the_scores() -> None:
    model = retrofit(tiny_model(), BUDGET)
    seen: list[LayerObservation] = []
    with torch.autocast("cpu", dtype=torch.bfloat16), observe(model, seen.append):
        out = logits(model, ids(30))
    assert out.isfinite().all()
    s = seen[0]
    expected = model.kvpop.scorers[0](s.key, s.value, None, position=s.position, document_ids=None)
    assert torch.equal(s.score, expected)


def test_use_cache_left_out() -> None:
    """With gradients: the parallel forward. Without: a BoundedCache to go on from, unless the row is
    packed.
    """
    model = retrofit(tiny_model(), BUDGET)
    x = ids(30)
    assert model(x).logits.requires_grad
    with torch.no_grad():
        out = model(x)
        assert isinstance(out.past_key_values, BoundedCache)
        torch.testing.assert_close(out.logits, logits(model, x), atol=1e-4, rtol=0)
        packed = torch.cat([torch.arange(13), torch.arange(17)])[None].expand(2, -1)
        assert model(x, position_ids=packed).past_key_values is None
        assert model.generate(x, max_new_tokens=4, use_cache=False, do_sample=False).shape == (2, 34)


def test_dense_generation_is_the_base_models() -> None:
    model = tiny_model()
    x = ids(20)
    mask = torch.ones_like(x)
    mask[0, :5] = 0
    settings = {"max_new_tokens": 12, "do_sample": False, "attention_mask": mask, "pad_token_id": 0}
    expected = model.generate(x, **settings)
    retrofit(model, Budget(1, 4, 2))
    assert not torch.equal(model.generate(x, **settings), expected)
    with dense(model):
        assert torch.equal(model.generate(x, **settings), expected)


@pytest.mark.parametrize("path", ["Qwen/Qwen3-4B", "Qwen/Qwen3-8B"])
def test_qwen3_configurations_build_on_the_meta_device(path: str) -> None:
    model = build_on_meta(ModelConfig(source="hub", path=path))
    parameters = sum(p.numel() for p in model.parameters())
    assert parameters == {"Qwen/Qwen3-4B": 4_022_468_096, "Qwen/Qwen3-8B": 8_190_735_360}[path]
    retrofit(model, Budget(4, 256, 3836), policy="kvpop_mlstm", match_bytes=True)
    assert all(p.is_meta for p in model.parameters())
    assert model.kvpop.decay.shape == (36, 8)
    assert model.kvpop.budget.total < 4096
    with pytest.raises(ValueError, match="meta device"):
        model.save_pretrained("/nonexistent")
