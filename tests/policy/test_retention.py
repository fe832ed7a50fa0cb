"""The policy of a whole model: decisions, bytes, description, precision (METHOD.md, sections 5 and 6)."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
import torch

from kvpop_lightning.baselines import build_policy
from kvpop_lightning.policy import NEVER, Budget
from kvpop_lightning.policy.memory import dense_bytes_per_sequence, equal_bytes_budget
from kvpop_lightning.policy.retention import RetentionPolicy

SHAPE = {"num_layers": 2, "num_heads": 3, "head_dim": 64, "hidden_size": 40}
BUDGET = Budget(2, 4, 14)
POLICIES = ["streaming_llm", "random", "random+decay", "key_norm", "kvpop_linear", "kvpop_mlp", "kvpop_mlstm"]


def make(name: str, budget: Budget = BUDGET, **options: Any) -> RetentionPolicy:
    return build_policy(name, budget, **({**SHAPE, "decay_step": 8} | options))


def make_row(length: int = 60) -> dict[str, Any]:
    g = torch.Generator().manual_seed(0)
    key, value = torch.randn(2, 2, 3, length, 64, generator=g)
    ids = torch.zeros(2, length, dtype=torch.int64)
    ids[:, length // 2 :], ids[0, :3], ids[1, -5:] = 1, -1, -1
    position = torch.zeros_like(ids)
    for document in (0, 1):
        inside = ids == document
        position += (inside.cumsum(dim=1) - 1) * inside
    hidden = torch.randn(2, length, 40, generator=g)
    return {"key": key, "value": value, "hidden": hidden, "position": position, "document_ids": ids}


@pytest.mark.parametrize("name", POLICIES)
def test_eviction_times_follow_from_scores_decay_and_budget(name: str) -> None:
    policy, row = make(name), make_row()
    decay = policy.decay[1]
    times, score, priority = policy.eviction_times(1, **row)
    assert (times.dtype, priority.dtype, score.dtype) == (torch.int64, torch.float64, torch.float32)
    steps = torch.div(row["position"], 8, rounding_mode="floor").double()[:, None]
    real = (row["document_ids"] >= 0)[:, None].expand_as(score)
    expected = score.double() - steps * decay.log()[:, None]
    torch.testing.assert_close(priority[real], expected[real], rtol=0, atol=1e-12)
    priority = priority.detach()
    for b in range(2):
        for document in (0, 1):
            rows = (row["document_ids"][b] == document).nonzero()[:, 0].tolist()
            for h in range(3):
                for n, i in enumerate(rows):
                    held = [j for j in rows[: n + 1] if int(times[b, h, j]) > i]
                    eligible = rows[BUDGET.sink : max(n + 1 - BUDGET.window, BUDGET.sink)]
                    best = sorted(eligible, key=lambda j: (float(priority[b, h, j]), j))[-BUDGET.topk :]
                    always = rows[: min(BUDGET.sink, n + 1)] + rows[max(n + 1 - BUDGET.window, 0) : n + 1]
                    assert held == sorted({*best, *always})


def test_streaming_llm_is_a_sliding_window() -> None:
    policy, row = make("streaming_llm"), make_row()
    times, _, _ = policy.eviction_times(
        0, **{**row, "document_ids": None, "position": torch.arange(60).expand(2, -1)}
    )
    expected = torch.arange(60) + BUDGET.window + BUDGET.topk
    expected[: BUDGET.sink], expected[expected >= 60] = NEVER, NEVER
    assert (times == expected).all()


def test_decay_shapes_and_mistakes() -> None:
    assert (make("kvpop_mlp", decay=0.5).decay == 0.5).all()
    assert (
        make("kvpop_mlp", decay=[0.5, 0.6, 0.7]).decay[1]
        == torch.tensor([0.5, 0.6, 0.7], dtype=torch.float64)
    ).all()
    per_layer = [[0.5, 0.6, 0.7], [0.8, 0.9, 1.0]]
    assert make("kvpop_mlp", decay=per_layer).decay.tolist() == per_layer
    assert (make("random", decay=0.5).decay == 1).all(), "only +decay controls and trained policies decay"
    assert (make("random+decay", decay=0.5).decay == 0.5).all()
    for bad in (0.0, 1.5, -1.0, math.nan, [0.5, 0.5, 2.0]):
        with pytest.raises(ValueError, match=r"policy\.decay must lie in \(0, 1\]"):
            make("kvpop_mlp", decay=bad)
    with pytest.raises(
        ValueError, match=r"one per KV head \(3\) or \[layers, KV heads\] \(2, 3\), got shape \(2,\)"
    ):
        make("kvpop_mlp", decay=[0.5, 0.5])
    with pytest.raises(ValueError, match=r"policy\.decay_step must be a whole number"):
        make("kvpop_mlp", decay_step=0)
    with pytest.raises(ValueError, match=r"scorer\.delay 5 is longer than budget\.window 4"):
        make("kvpop_mlstm", delay=5)


def test_bytes_are_the_formula() -> None:
    s, w, k, d, b = 2, 4, 14, 64, 2
    keys = 3 * ((s + w + k) * 2 * d * b + 4 * k + 8 * k + 4 * w)
    assert make("kvpop_mlp").bytes_per_sequence() == 2 * keys
    state = 4 * (16 * 32 + 16 + 1)
    assert make("kvpop_mlstm").bytes_per_sequence() == 2 * (keys + 3 * state)
    assert make("kvpop_mlp", inputs="kv_hidden").bytes_per_sequence() == 2 * keys
    delayed = make("kvpop_mlstm", inputs="kv_hidden")
    assert delayed.bytes_per_sequence() == 2 * (keys + 3 * state + w * 40 * b)
    undelayed = make("kvpop_mlstm", inputs="kv_hidden", delay=0)
    assert undelayed.bytes_per_sequence() == 2 * (keys + 3 * state)
    wide = 3 * ((s + w + k) * 2 * d * 8 + 16 * k + 8 * w + 2 * state)
    assert make("kvpop_mlstm").bytes_per_sequence(element_bytes=8, real_bytes=8) == 2 * wide
    assert dense_bytes_per_sequence(100, num_layers=2, num_heads=3, head_dim=64) == 2 * 3 * 100 * 2 * 64 * 2


def test_equal_bytes_lowers_topk_as_amended() -> None:
    budget = Budget(4, 32, 92)
    plain = make("kvpop_mlp", budget, match_bytes=True)
    assert plain.budget == budget
    for d_m, d_v in ((16, 32), (8, 8), (1, 1)):
        matched = make("kvpop_mlstm", budget, match_bytes=True, memory_dim=d_m, value_dim=d_v)
        assert matched.budget.topk == 92 - math.ceil(4 * (d_m * d_v + d_m + 1) / (4 * 64))
        assert matched.bytes_per_sequence() <= plain.bytes_per_sequence()
        one_more = Budget(4, 32, matched.budget.topk + 1)
        state = matched.layer_scorer(0).state_bytes()
        assert one_more.total * 256 + state > budget.total * 256, "a slot was given up for nothing"
    reads_hidden = make("kvpop_mlstm", budget, match_bytes=True, inputs="kv_hidden")
    assert reads_hidden.budget.topk == 92 - math.ceil((2116 + 32 * 40 * 2 / 3) / 256)
    assert reads_hidden.bytes_per_sequence() <= plain.bytes_per_sequence()
    with pytest.raises(
        ValueError, match=r"budget\.topk 9 cannot pay for the mlstm scorer's memory of 9 keys"
    ):
        equal_bytes_budget(Budget(4, 32, 9), make("kvpop_mlstm", budget).layer_scorer(0))


@pytest.mark.parametrize("name", [*POLICIES, "oracle"])
def test_description_survives_json_and_rebuilds(name: str) -> None:
    policy = make(name, decay=[0.5, 0.6, 0.7], inputs="kv_hidden", seed=3)
    twin = RetentionPolicy.from_dict(json.loads(json.dumps(policy.to_dict())))
    twin.load_state_dict(policy.state_dict())
    assert twin.to_dict() == policy.to_dict()
    assert twin.needs_hidden == policy.needs_hidden == name.startswith("kvpop")
    if name != "oracle":
        for a, b in zip(
            twin.eviction_times(1, **make_row()), policy.eviction_times(1, **make_row()), strict=True
        ):
            assert torch.equal(a, b)
    with pytest.raises(ValueError, match="lacks budget, scorers"):
        RetentionPolicy.from_dict({"name": name, "decay": 1.0, "decay_step": 64})


@pytest.mark.parametrize("name", ["kvpop_mlp", "kvpop_mlstm", "random+decay"])
def test_casts_of_the_model_leave_scores_in_float32_and_decay_in_float64(name: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model.kvpop = make(name)
    before = copy.deepcopy(model.kvpop.state_dict())
    for cast in (model.to, lambda dtype: model.type(dtype)):
        for dtype in (torch.bfloat16, torch.float16):
            cast(dtype)
            assert model[0].weight.dtype == dtype
            for key, x in model.kvpop.state_dict().items():
                assert torch.equal(x, before[key]), key
    model.double().float()
    for key, x in model.kvpop.state_dict().items():
        assert torch.equal(x, before[key]), key
    assert model.kvpop.decay.dtype == torch.float64
    if name != "random+decay":
        scorer = model.double().kvpop.layer_scorer(0)
        row = {name: x.double() if x.is_floating_point() else x for name, x in make_row().items()}
        assert scorer(row["key"], row["value"]).dtype == torch.float64


def test_priorities_far_out_keep_their_thousandths() -> None:
    policy = make("kvpop_mlp", decay=0.7, decay_step=64)
    position = torch.full((1, 2), 131_072)
    score = torch.tensor([[[0.25, 0.2505]] * 3])
    priority = policy.priority(0, score, position)
    assert priority.min() > 700
    torch.testing.assert_close((priority[..., 1] - priority[..., 0]).float(), score[..., 1] - score[..., 0])


def test_scores_carry_gradients_to_the_scorers_only() -> None:
    policy, row = make("kvpop_mlstm", inputs="kv_hidden"), make_row()
    for part in ("key", "value", "hidden"):
        row[part].requires_grad_()
    _, score, priority = policy.eviction_times(0, **row)
    (score.square().sum() + priority.sum()).backward()
    assert all(p.grad is not None for p in policy.layer_scorer(0).parameters())
    assert all(p.grad is None for p in policy.layer_scorer(1).parameters())
    assert all(row[part].grad is None for part in ("key", "value", "hidden"))


def test_seed_sets_the_start_and_layers_differ() -> None:
    def weights(seed: int) -> list[torch.Tensor]:
        return [make("kvpop_mlp", seed=seed).layer_scorer(0).output_weight]

    assert all(torch.equal(a, b) for a, b in zip(weights(1), weights(1), strict=True))
    assert not torch.equal(weights(1)[0], weights(2)[0])
    first, second = make("kvpop_mlp").scorers
    assert not torch.equal(first.output_weight, second.output_weight)


def test_builds_on_the_meta_device() -> None:
    with torch.device("meta"):
        for name in POLICIES:
            policy = make(name)
            assert all(x.is_meta for x in policy.state_dict().values())
            assert policy.bytes_per_sequence() > 0
            key = torch.empty(1, 3, 9, 64)
            score = policy.score(0, key, key, None, position=None, document_ids=torch.zeros(1, 9).long())
            assert score.shape == (1, 3, 9)
