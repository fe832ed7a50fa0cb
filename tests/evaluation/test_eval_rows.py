"""A row's record against the model itself, read plainly: full logits, full attention, loops."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import scipy.stats
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvpop_lightning import Budget, dense, retrofit
from kvpop_lightning.baselines import OracleScorer
from kvpop_lightning.evaluation.rows import RowSettings, dense_record, dense_row, policy_record
from kvpop_lightning.models import observe
from kvpop_lightning.policy import teacher_decisions

LAYERS, HQ, HKV, T = 2, 4, 2, 72
SETTINGS = RowSettings(first_position=18, window=6)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=HQ,
        num_key_value_heads=HKV,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


def make_batch(documents=(T,), padding=0, seed=3):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.cat([torch.full((n,), k) for k, n in enumerate(documents)] + [torch.full((padding,), -1)])
    position = torch.cat([torch.arange(n) for n in documents] + [torch.zeros(padding, dtype=torch.long)])
    return {
        "input_ids": torch.randint(0, 97, (1, len(ids)), generator=generator),
        "position_ids": position[None],
        "document_ids": ids[None],
        "loss_mask": (torch.rand(1, len(ids), generator=generator) < 0.8),
        "row": torch.tensor([5]),
    }


def reference_log_probs(model, batch):
    mask = (batch["document_ids"] >= 0).long()
    out = model(
        batch["input_ids"],
        position_ids=batch["position_ids"],
        attention_mask=None if mask.all() else mask,
        use_cache=False,
    )
    return out.logits[0].double().log_softmax(-1)


@pytest.mark.parametrize(("documents", "padding"), [((T,), 0), ((30, 41), 0), ((37, 20), 15)])
@pytest.mark.parametrize("policy", ["streaming_llm", "random+decay", "kvpop_mlp", "kvpop_mlstm"])
@torch.no_grad()
def test_token_metrics_equal_full_logits(model, policy, documents, padding):
    retrofit(model, Budget(2, 6, 5), policy=policy, memory_dim=4, value_dim=4)
    batch = make_batch(documents, padding)
    row = dense_row(model, batch, SETTINGS, chunk=7)
    record = policy_record(model, row, SETTINGS, chunk=7)
    with dense(model):
        log_p = reference_log_probs(model, batch)
    log_q = reference_log_probs(model, batch)
    ids, document = batch["input_ids"][0], batch["document_ids"][0]
    wanted = [
        i
        for i in range(SETTINGS.first_position, len(ids) - 1)
        if document[i + 1] == document[i] >= 0 and batch["loss_mask"][0, i + 1]
    ]
    assert row.positions.tolist() == wanted
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)[wanted].mean().item()
    top1 = (log_p.argmax(-1) == log_q.argmax(-1))[wanted].double().mean().item()
    nll = -log_q[wanted].gather(-1, ids[torch.tensor(wanted) + 1, None]).mean().item()
    assert (record["kl"], record["top1"], record["nll"]) == pytest.approx((kl, top1, nll), rel=1e-4, abs=1e-5)
    assert record["kl"] > 1e-3  # something was evicted and it matters
    assert record["positions"] == len(wanted)
    assert record["row"] == 5
    dense_nll = -log_p[wanted].gather(-1, ids[torch.tensor(wanted) + 1, None]).mean().item()
    assert dense_record(row)["nll"] == pytest.approx(dense_nll, rel=1e-5)


@pytest.mark.parametrize(("documents", "padding"), [((T,), 0), ((9, 30, 33), 0), ((37, 20), 15)])
@pytest.mark.parametrize(("topk", "limit"), [(5, 1 << 29), (17, 1 << 29), (200, 1 << 29), (17, 10_000)])
@pytest.mark.parametrize("policy", ["random+decay", "oracle", "kvpop_mlp", "kvpop_mlstm"])
@torch.no_grad()
def test_the_first_tokens_may_come_from_the_dense_forward(model, policy, topk, limit, documents, padding):
    """Nothing is evicted before a query has seen B keys: reuse changes no decision and no value."""
    retrofit(model, Budget(2, 6, topk), policy=policy, inputs="kv_hidden", memory_dim=4, value_dim=4)
    batch, times = make_batch(documents, padding), []
    row = dense_row(model, batch, SETTINGS, limit_bytes=limit, prefix_tokens=model.kvpop.budget.total)
    if policy == "oracle":
        for scorer, target in zip(model.kvpop.scorers, row.layer_targets(), strict=True):
            scorer.set_scores(target, row.document_ids)
    assert row.prefix[0].length == min(10_000 // 768 if limit == 10_000 else 8 + topk, T - 1)
    calls = []
    hook = model.model.layers[0].mlp.register_forward_hook(lambda _, args, out: calls.append(out.shape[1]))
    plain = policy_record(model, row, SETTINGS, on_eviction=times.append)
    reused = policy_record(model, row, SETTINGS, on_eviction=times.append, reuse_prefix=True)
    hook.remove()
    assert calls == [T, T - row.prefix[0].length]  # and the work is really saved
    assert torch.equal(*times)
    assert plain.keys() == reused.keys()
    for name in plain:
        torch.testing.assert_close(
            torch.as_tensor(reused[name]), torch.as_tensor(plain[name]), atol=2e-5, rtol=1e-4, equal_nan=True
        )


@torch.no_grad()
def test_a_prefix_that_a_policy_already_evicts_from_is_caught(model):
    retrofit(model, Budget(2, 6, 5), policy="random")
    row = dense_row(model, make_batch(), SETTINGS, prefix_tokens=30)
    policy = model.kvpop
    wrong = SimpleNamespace(total=30)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(policy.budget), "total", property(lambda self: wrong.total))
        patch.setattr(
            policy,
            "eviction_times",
            lambda *a, **k: (torch.full((1, HKV, T), 14), *[torch.zeros(1, HKV, T)] * 2),
        )
        with pytest.raises(AssertionError, match="within its budget"):
            policy_record(model, row, SETTINGS, reuse_prefix=True)


@torch.no_grad()
def test_a_budget_as_long_as_the_text_is_the_dense_model(model):
    retrofit(model, Budget(2, 6, T), policy="kvpop_mlp")
    row = dense_row(model, make_batch(), SETTINGS)
    record = policy_record(model, row, SETTINGS)
    assert abs(record["kl"]) < 1e-6
    assert record["top1"] == 1.0
    assert record["nll"] == pytest.approx(row.metrics.nll, abs=1e-5)
    torch.testing.assert_close(record["retained_mass"], torch.ones(LAYERS, HQ))
    assert record["boundary_accuracy"].isnan().all()  # nothing ever had to be decided


@pytest.mark.parametrize(("documents", "padding"), [((T,), 0), ((30, 41), 0)])
@torch.no_grad()
def test_retained_mass_equals_eager_attention(model, documents, padding):
    retrofit(model, Budget(1, 5, 6), policy="kvpop_mlp")
    batch, settings = make_batch(documents, padding), RowSettings(first_position=18, window=5, mass_queries=9)
    times = []
    row = dense_row(model, batch, settings)
    record = policy_record(model, row, settings, on_eviction=times.append)
    layers = []
    with dense(model), observe(model, layers.append):
        model(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False)
    assert row.mass_positions.numel() == 9
    assert set(row.mass_positions.tolist()) <= set(row.positions.tolist())
    document = batch["document_ids"][0]
    expected = torch.zeros(LAYERS, HQ)
    for n, seen in enumerate(layers):
        for head in range(HQ):
            for i in row.mass_positions.tolist():
                logits = seen.query[0, head, i] @ seen.key[0, head // 2].T * seen.scale
                visible = (torch.arange(len(document)) <= i) & (document == document[i])
                p = logits.masked_fill(~visible, -torch.inf).softmax(0)
                expected[n, head] += p[times[0][n, head // 2] > i].sum() / 9
    torch.testing.assert_close(record["retained_mass"], expected, atol=1e-5, rtol=1e-4)
    assert (record["retained_mass"] < 0.99).any()


@torch.no_grad()
def test_oracle_is_scored_by_the_dense_target(model):
    """With the target as its score the policy repeats every decision of the undecayed teacher."""
    retrofit(model, Budget(2, 6, 5), policy="oracle")
    row = dense_row(model, make_batch(), SETTINGS)
    targets = row.layer_targets()
    assert targets.shape == (LAYERS, 1, HKV, T)
    for scorer, target in zip(model.kvpop.scorers, targets, strict=True):
        assert isinstance(scorer, OracleScorer)
        scorer.set_scores(target)
    record = policy_record(model, row, SETTINGS)
    torch.testing.assert_close(record["boundary_accuracy"], torch.ones(LAYERS, HKV, dtype=torch.float32))
    torch.testing.assert_close(record["rank_correlation"].float(), torch.ones(LAYERS, HKV))
    retrofit(model, Budget(2, 6, 5), policy="random")
    other = policy_record(model, row, SETTINGS)
    assert other["retained_mass"].mean() < record["retained_mass"].mean()
    assert (other["boundary_balanced_accuracy"] < 0.9).all()
    assert (other["rank_correlation"].abs() < 0.5).all()


@torch.no_grad()
def test_boundary_accuracy_and_rank_correlation_equal_a_loop(model):
    budget = Budget(2, 6, 5)
    retrofit(model, budget, policy="kvpop_mlp", decay=0.6, decay_step=8)
    batch = make_batch()
    row = dense_row(model, batch, SETTINGS)
    seen = []
    with observe(model, seen.append):
        model(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False)
    record = policy_record(model, row, SETTINGS)
    for layer in range(LAYERS):
        for head in range(HKV):
            target = row.layer_targets()[layer, 0, head].double()
            teacher = target - (torch.arange(T) // 8) * torch.tensor(0.6, dtype=torch.float64).log()
            decided = teacher_decisions(teacher[None, None], budget)
            mine, right = seen[layer].priority[0, head], []
            for i in range(SETTINGS.first_position, T):
                eligible = list(range(budget.sink, i - budget.window + 1))
                if len(eligible) <= budget.topk:
                    continue
                newcomer, boundary = i - budget.window, int(decided.boundary[0, 0, i])
                best = sorted(eligible, key=lambda j: (teacher[j], j), reverse=True)[: budget.topk]
                right.append((mine[newcomer] >= mine[boundary]).item() == (newcomer in best))
            assert record["boundary_accuracy"][layer, head].item() == pytest.approx(sum(right) / len(right))
            tokens = slice(budget.sink, T - budget.window)
            expected = scipy.stats.spearmanr(seen[layer].score[0, head, tokens], target[tokens]).statistic
            assert record["rank_correlation"][layer, head].item() == pytest.approx(expected, abs=1e-9)


@torch.no_grad()
def test_a_row_without_supervised_positions_is_named(model):
    retrofit(model, Budget(2, 6, 5), policy="random")
    batch = make_batch()
    batch["loss_mask"] = torch.zeros_like(batch["loss_mask"])
    with pytest.raises(ValueError, match="row 5 has no supervised position"):
        dense_row(model, batch, SETTINGS)


@torch.no_grad()
def test_memory_limit_changes_nothing_but_the_queries_sampled(model):
    retrofit(model, Budget(2, 6, 5), policy="kvpop_mlp")
    batch = make_batch()
    wide, narrow = (dense_row(model, batch, SETTINGS, limit_bytes=n) for n in (1 << 29, 8000))
    assert narrow.logits.log_probs is None
    assert narrow.metrics.nll == pytest.approx(wide.metrics.nll, rel=1e-6)
    assert 1 <= narrow.mass_positions.numel() < wide.mass_positions.numel()
    first, second = (policy_record(model, row, SETTINGS) for row in (wide, narrow))
    assert first["kl"] == pytest.approx(second["kl"], rel=1e-5)


def test_position_stride_measures_every_nth_position_of_the_same_forward(model):
    batch = make_batch()
    retrofit(model, Budget(2, 6, 8), policy="streaming_llm")
    every = dense_row(model, batch, SETTINGS)
    third = dense_row(model, batch, RowSettings(first_position=18, window=6, position_stride=3))
    assert third.positions.tolist() == every.positions.tolist()[::3]
    got = policy_record(model, third, SETTINGS)
    teacher = reference_log_probs_under(model, batch, sparse=False)
    student = reference_log_probs_under(model, batch, sparse=True)
    kl = (teacher.exp() * (teacher - student)).sum(-1)[third.positions]
    assert got["positions"] == len(third.positions)
    assert got["kl"] == pytest.approx(float(kl.mean()), abs=1e-5)


def reference_log_probs_under(model, batch, *, sparse):
    with torch.no_grad():
        if sparse:
            return reference_log_probs(model, batch)
        with dense(model):
            return reference_log_probs(model, batch)
